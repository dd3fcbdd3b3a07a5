"""Several sources in one stream: Spark knows them in its checkpoint by their place alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class Streams:
    """Files of several sources, read by patterns, so that any of them would take the offsets of another one."""

    def __init__(self, spark: SparkSession, root: Path, store: nosync.Store, *names: str) -> None:
        self._spark, self._root, self._store, self._names = spark, root, store, names

    def write(self, source: str, word: str) -> None:
        directory = self._root / "in" / source
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{word}.json").write_text(f'{{"word": "{word}"}}')

    def run(self, order: str, checkpoint: Path, names: str = "") -> dict[str, int]:
        flow = nosync.Dataflow("f")
        first, *others = (flow.source(name, "word string") for name in names or self._names)
        first.union("all", *others).aggregate("counts", key=["word"], n=nosync.count())
        job = nosync.Job(flow, self._store, spark=self._spark, shards=1, upgrade=bool(names))
        read = self._spark.readStream.schema("word string")
        inputs = {name: read.json(str(self._root / "in" / name / "*.json")) for name in order}
        job.stream(inputs, checkpoint=checkpoint, trigger={"availableNow": True}).awaitTermination()
        return {row.word: row.n for row in job.read("counts").collect()}


def test_they_may_be_given_in_any_order(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    streams = Streams(spark, tmp_path, open_store(), "x", "y")
    for n, order in enumerate(("yx", "xy", "yx")):
        streams.write("x", f"x{n}")
        streams.write("y", f"y{n}")
        found = streams.run(order, tmp_path / "checkpoint")
        assert found == {f"{source}{i}": 1 for source in "xy" for i in range(n + 1)}


def test_a_checkpoint_of_other_sources_is_refused_before_it_is_used(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    streams = Streams(spark, tmp_path, open_store(retain=10), "x", "y")
    for source in "xyz":
        streams.write(source, source)
    streams.run("xy", tmp_path / "checkpoint")
    with pytest.raises(nosync.FlowError, match="has the offsets of x, y, and the stream is of z, y, x: .*first=1"):
        streams.run("zyx", tmp_path / "checkpoint", "xyz")


def test_an_older_copy_of_a_checkpoint_is_told_as_such(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    streams = Streams(spark, tmp_path, open_store(), "x", "y")
    for n in range(3):
        streams.write("x", f"x{n}")
        streams.write("y", f"y{n}")
        streams.run("xy", tmp_path / "checkpoint")
        if n == 0:
            shutil.copytree(tmp_path / "checkpoint", tmp_path / "older")
    streams.write("x", "x3")
    with pytest.raises(nosync.FlowError, match="an older copy of its checkpoint, and rows would come twice"):
        streams.run("xy", tmp_path / "older")
