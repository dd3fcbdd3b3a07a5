"""Epochs whose rows go to their shards by files, beside the same through Spark's shuffle. By turns in one JVM, a store each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pyspark.sql import SparkSession

import nosync
from bench.harness import Result, paired
from bench.spark_epochs import CORES, SHARDS
from nosync.spark import file_shuffle as exchanges
from nosync.spark.session import DRIVER_MAX_BYTES, local_session

NEVER = 1 << 62
WARM = 12


@dataclass(frozen=True)
class Rows:
    """`made`: of `id`, which no two epochs have alike, for Spark compiles code anew for each range of it."""

    name: str
    columns: str
    made: tuple[str, ...]


NARROW = Rows("a key and a number", "k bigint, v bigint", ("id * 2654435761 % 1000000 AS k", "id AS v"))
WIDE = Rows(
    "a key and seven numbers",
    "k bigint, v bigint, " + ", ".join(f"n{i} bigint" for i in range(6)),
    ("id * 2654435761 % 100000 AS k", "id AS v", *(f"id * {i + 3} AS n{i}" for i in range(6))),
)
TEXT = Rows(
    "two texts, one of them the key, and a number",
    "k string, name string, v bigint",
    ("concat('key-', id * 2654435761 % 100000) AS k", "concat('somebody number ', id) AS name", "id AS v"),
)


def run(scale: str) -> Iterator[Result]:
    repeats = {"short": 6, "normal": 20, "full": 40}[scale]
    spark = local_session(CORES, "nosync-bench", settings={DRIVER_MAX_BYTES: "0"})
    workloads = [(NARROW, 500_000, SHARDS), (TEXT, 500_000, SHARDS)]
    if scale != "short":
        least = exchanges.LEAST_ROWS
        workloads += [
            (NARROW, least, SHARDS),
            (NARROW, 2_000_000, SHARDS),
            (NARROW, 500_000, 16),
            (WIDE, 500_000, SHARDS),
        ]
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary).absolute()
        for rows, count, shards in workloads:
            yield _beside(spark, root / f"{rows.name}-{count}-{shards}", rows, count, shards, repeats)
    spark.stop()


def _beside(spark: SparkSession, root: Path, rows: Rows, count: int, shards: int, repeats: int) -> Result:
    root.mkdir()
    with nosync.open(root / "files") as mine, nosync.open(root / "shuffle") as theirs:
        by_files = _Epochs(_job(spark, mine, rows, shards), spark, rows, count, least_rows=0)
        by_shuffle = _Epochs(_job(spark, theirs, rows, shards), spark, rows, count, least_rows=NEVER)
        ours, baseline = paired(by_files.next, by_shuffle.next, repeats, WARM)
    return Result(
        f"epochs of {count:,} rows, {rows.name}, {shards} shards", "by files", ours.median, "s p50", "Spark's shuffle",
        baseline.median, ours.median / baseline.median, "< 1", ours.median < baseline.median, ours.spread,
        len(ours.seconds),
    )  # fmt: skip


def _job(spark: SparkSession, store: nosync.Store, rows: Rows, shards: int) -> nosync.Job:
    flow = nosync.Dataflow("exchange")
    flow.source("rows", rows.columns).aggregate("out", key=["k"], n=nosync.count(), v=nosync.sum("v"))
    return nosync.Job(flow, store, spark=spark, shards=shards)


class _Epochs:
    """A job's epochs, one after the other."""

    _next_id = 0

    def __init__(self, job: nosync.Job, spark: SparkSession, rows: Rows, count: int, *, least_rows: int) -> None:
        self._job, self._spark, self._rows, self._count, self._least_rows = job, spark, rows, count, least_rows
        self._t = 0

    def next(self) -> None:
        first = _Epochs._next_id
        _Epochs._next_id += self._count
        rows = self._spark.range(first, first + self._count, 1, CORES).selectExpr(*self._rows.made)
        with mock.patch.object(exchanges, "LEAST_ROWS", self._least_rows):
            self._job.advance(self._t, {"rows": rows})
        self._t += 1
