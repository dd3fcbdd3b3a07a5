"""Handing an epoch's rows to Python tasks: bytes counted after each row or rows only; hashes sent, or computed there; and what
the workers' garbage collections take between tasks."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench.engines_sums import KEYS, LARGE, SMALL, Task, batch, counted, handed
from bench.footprint import alone, cpu_by_process
from bench.harness import Result, Samples, paired, timed
from bench.spark_epochs import CORES, SHARDS
from nosync.lsm.columnar.hashing import hash64
from nosync.spark.arrow_transfer import MOST_TEXT_BYTES, Handover
from nosync.spark.session import arrow_settings, conf_set, local_session, session_settings
from nosync.spark.worker import lasting_objects_frozen

ROW_BYTES = 16
HASHED = (("k",), ("v",), ("k", "v"))
TEXTS = ("concat('name ', k) AS name", "concat('city ', v) AS city", "if(k % 2 = 0, 'OR', 'CA') AS state")
WARM = 4
HOPS, HOP_JOBS = 3, 60


def run(scale: str) -> Iterator[Result]:
    repeats = {"short": 6, "normal": 20, "full": 60}[scale]
    spark = local_session(CORES, "nosync-bench")
    by_rows = {**session_settings(), **arrow_settings(spark, ROW_BYTES)}

    ours, theirs = paired(
        partial(_handed, spark, by_rows, counted),
        partial(_handed, spark, session_settings(), counted),
        repeats, WARM,
    )  # fmt: skip
    yield _result(
        "bytes not looked at after each row", ours, "spark.sql.execution.arrow.maxBytesPerBatch as it is", theirs
    )

    ours, theirs = paired(
        partial(_texts_handed, spark, Handover(arrow_settings(spark, ROW_BYTES + MOST_TEXT_BYTES), is_text_limited=True)),
        partial(_texts_handed, spark, Handover()),
        repeats, WARM,
    )  # fmt: skip
    yield Result(
        f"{LARGE:,} rows with {len(TEXTS)} texts to Python tasks", "long rows refused", ours.median, "s p50",
        "spark.sql.execution.arrow.maxBytesPerBatch as it is", theirs.median, ours.median / theirs.median, "< 1",
        ours.median < theirs.median, ours.spread, len(ours.seconds),
    )  # fmt: skip

    sent = [f"xxhash64({', '.join(names)}) AS h{i}" for i, names in enumerate(HASHED)]
    ours, theirs = paired(
        partial(_handed, spark, by_rows, _hashed),
        partial(_handed, spark, by_rows, counted, *sent),
        repeats, WARM,
    )  # fmt: skip
    yield _result("three columns of hashes computed in the task", ours, "the same sent by the JVM", theirs)
    spark.stop()

    processes = max(1, repeats // 10)
    frozen, plain = [], []
    for _ in range(processes):  # in turn, each in workers of its own
        frozen.append(alone(_hops, _passed_frozen))
        plain.append(alone(_hops, _passed))
    for what, unit, part in (("", "s p50", 0), ("; processor time of the workers", "s", 1)):
        mine_s, theirs_s = (statistics.median(one[part] for one in runs) for runs in (frozen, plain))
        yield Result(
            f"{HOPS} hops of {SMALL:,} rows through Python tasks{what}", "modules kept out of garbage collections", mine_s, unit,
            "as Spark's workers do it", theirs_s, mine_s / theirs_s, "< 1", mine_s < theirs_s, repeats=processes,
        )  # fmt: skip


def _passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _passed_frozen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with lasting_objects_frozen():
        yield from batches


def _hops(task: Task) -> tuple[float, float]:
    """Returns the seconds of a job of several hops, and the processor seconds of its Python workers."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        spark = local_session(CORES, "nosync-bench", log=Path(directory) / "spark.log")
        seconds = []
        for i in range(HOP_JOBS):
            if i == HOP_JOBS // 2:
                before = cpu_by_process()
            rows = batch(spark, 0, SMALL, KEYS)
            for _ in range(HOPS):
                placed = rows.repartitionById(SHARDS, F.expr(f"CAST(pmod(k, {SHARDS}) AS INT)"))
                rows = placed.mapInArrow(task, rows.schema)
            seconds.append(timed(rows.agg(F.sum("v")).collect))
        after = cpu_by_process()
        spark.stop()
    jobs = HOP_JOBS - HOP_JOBS // 2
    return statistics.median(seconds[-jobs:]), (after["Python tasks"] - before["Python tasks"]) / jobs


def _result(what: str, ours: Samples, baseline: str, theirs: Samples) -> Result:
    return Result(
        f"{LARGE:,} rows of {ROW_BYTES} bytes to Python tasks", what, ours.median, "s p50", baseline, theirs.median,
        ours.median / theirs.median, "< 1", ours.median < theirs.median, ours.spread, len(ours.seconds),
    )  # fmt: skip


def _hashed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = 0
    for one in batches:
        for names in HASHED:
            hash64([one.column(name) for name in names])
        rows += one.num_rows
    yield pa.RecordBatch.from_pydict({"n": [rows]})


def _handed(spark: SparkSession, settings: Mapping[str, str], task: Task, *also: str) -> None:
    with conf_set(spark, settings):
        if handed(batch(spark, 0, LARGE, KEYS), task, *also) != LARGE:
            raise RuntimeError("rows were lost")


def _texts_handed(spark: SparkSession, over: Handover) -> None:
    with conf_set(spark, {**session_settings(), **over.settings}):
        rows = batch(spark, 0, LARGE, KEYS).selectExpr("*", *TEXTS)
        keyed = rows.repartitionById(SHARDS, F.expr(f"CAST(pmod(xxhash64(k), {SHARDS}) AS INT)"))
        if sum(row.n for row in over.mapped(keyed, counted, pa.schema([("n", pa.int64())])).collect()) != LARGE:
            raise RuntimeError("rows were lost")
