"""Results by event time on Spark: what is lost of them is computed again, by a job that was made anew."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from tests.conftest import OpenStore
from tests.testing.flows import INPUTS, SCHEMAS, windows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def rows_of(job: nosync.Job, stage: str, t: int) -> list[str]:
    return sorted(map(repr, job.read(stage, t).collect()))


@pytest.mark.long
def test_what_is_lost_is_computed_again(spark: SparkSession, open_store: OpenStore) -> None:
    """With another number of shards from the third epoch on; digests are those that were sealed."""
    store = open_store()
    batches = INPUTS["windows"]

    def give(job: nosync.Job, t: int) -> None:
        inputs: dict[str, Any] = {name: spark.createDataFrame(rows, SCHEMAS[name]) for name, rows in batches[t].items()}
        job.advance(t, inputs)

    job = nosync.Job(windows(), store, spark=spark, shards=2)
    for t in range(2):
        give(job, t)
    job = nosync.Job(windows(), store, spark=spark, shards=3)
    for t in range(2, len(batches)):
        give(job, t)
    stages = ("final", "once", "near_inner", "near_full", "watched", "silences", "sessions")
    before = {(stage, t): rows_of(job, stage, t) for stage in stages for t in range(len(batches))}
    store.sync()
    sources = {stage.name for stage in windows().sources}
    for directory in (store.directory.root / "layers").iterdir():
        if directory.name not in sources:
            shutil.rmtree(directory)
    again = nosync.Job(windows(), store, spark=spark, shards=3)
    report = again.recover()
    assert report.recomputed > 100
    assert not report.unrecoverable
    assert store.missing() == []
    assert {(stage, t): rows_of(again, stage, t) for stage in stages for t in range(len(batches))} == before
    assert {"final", "once", "near_full", "watched"} <= again.status().windows.keys()
    why = again.explain("silences", {"silent_word": "fox"}) if rows_of(again, "silences", 3) else None
    assert why is None or why.inputs["words"].num_rows
