"""Handing an epoch's rows to Python tasks: bytes counted after each row or rows only; hashes sent, or computed there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
from pyspark.sql import SparkSession

from bench.engines_sums import KEYS, LARGE, Task, batch, counted, handed
from bench.harness import Result, Samples, paired
from bench.spark_epochs import CORES
from nosync.lsm.hashing import hash64
from nosync.spark.session import arrow_settings, conf_set, local_session, session_settings

ROW_BYTES = 16
HASHED = (("k",), ("v",), ("k", "v"))
WARM = 4


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

    sent = [f"xxhash64({', '.join(names)}) AS h{i}" for i, names in enumerate(HASHED)]
    ours, theirs = paired(
        partial(_handed, spark, by_rows, _hashed),
        partial(_handed, spark, by_rows, counted, *sent),
        repeats, WARM,
    )  # fmt: skip
    yield _result("three columns of hashes computed in the task", ours, "the same sent by the JVM", theirs)
    spark.stop()


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
