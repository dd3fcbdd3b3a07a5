"""Epochs whose Parquet files tasks read themselves, each reading all and keeping its shard's rows, beside the same files read,
shuffled and handed over by the JVM. By turns in one JVM, a store each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import nosync
from bench.harness import Result, paired
from bench.spark_epochs import CORES, SHARDS
from nosync.spark.parquet_inputs import MOST_READERS
from nosync.spark.session import DRIVER_MAX_BYTES, local_session

COLUMNS = "k bigint, state string, a bigint, b bigint"
KEYS = 100_000
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
SIZES = {"short": (20_000,), "normal": (20_000, 500_000), "full": (20_000, 500_000, 2_000_000)}
WARM = 6


def run(scale: str) -> Iterator[Result]:
    repeats = {"short": 6, "normal": 20, "full": 40}[scale]
    spark = local_session(CORES, "nosync-bench", settings={DRIVER_MAX_BYTES: "0"})
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary).absolute()
        for rows in SIZES[scale]:
            for shards in (SHARDS, MOST_READERS):
                yield _beside(spark, root / f"{rows}-{shards}", rows, shards, repeats)
    spark.stop()


def _beside(spark: SparkSession, root: Path, rows: int, shards: int, repeats: int) -> Result:
    root.mkdir()
    epochs = [_written(root / f"{t}.parquet", rows, t) for t in range(WARM + repeats)]
    with nosync.open(root / "ours") as mine, nosync.open(root / "theirs") as theirs:
        by_tasks = _Epochs(_job(spark, mine, shards), epochs, partial(_read, spark))
        # What is not just files the JVM reads.
        by_jvm = _Epochs(_job(spark, theirs, shards), epochs, lambda path: _read(spark, path).where("true"))
        ours, baseline = paired(by_tasks.next, by_jvm.next, repeats, WARM)
        if not mine.read("out").sort_by("k").equals(theirs.read("out").sort_by("k")):
            raise RuntimeError("the two came to different states")
    return Result(
        f"epochs of {rows:,} rows in a Parquet file, {shards} shards", "tasks read it", ours.median, "s p50",
        "the JVM reads it and moves the rows to tasks", baseline.median, ours.median / baseline.median, "< 1",
        ours.median < baseline.median, ours.spread, len(ours.seconds),
    )  # fmt: skip


def _job(spark: SparkSession, store: nosync.Store, shards: int) -> nosync.Job:
    flow = nosync.Dataflow("scan")
    some = flow.source("rows", COLUMNS).where("some", "state IN ('OR', 'ID', 'CA')")
    some.aggregate("out", key=["k"], n=nosync.count(), a=nosync.sum("a"))
    return nosync.Job(flow, store, spark=spark, shards=shards)


class _Epochs:
    """A job's epochs, one after the other."""

    def __init__(self, job: nosync.Job, files: list[Path], read: Callable[[Path], DataFrame]) -> None:
        self._job, self._files, self._read, self._t = job, files, read, 0

    def next(self) -> None:
        self._job.advance(self._t, {"rows": self._read(self._files[self._t])})
        self._t += 1


def _read(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(COLUMNS).parquet(str(path))


def _written(path: Path, rows: int, t: int) -> Path:
    random = np.random.default_rng(t)
    columns = {
        "k": random.integers(0, KEYS, rows),
        "state": np.array(STATES)[random.integers(0, len(STATES), rows)],
        "a": random.integers(0, 1000, rows),
        "b": random.integers(0, 1 << 40, rows),
    }
    pq.write_table(pa.table(columns), path)
    return path
