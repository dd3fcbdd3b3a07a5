"""Epochs of few rows: run by the driver, beside the same by Spark's tasks. Where the two meet is where few ends.

Rows are in Spark's memory, as Arrow tables, or in a Parquet file. Both ways run in one session, by turns, each with a
store of its own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import nosync
from bench.harness import Result
from bench.spark_epochs import CORES
from nosync.spark.session import DRIVER_MAX_BYTES, conf_set, local_session

KEYS = 300_000
SIZES = {
    "short": (1_000, 20_000),
    "normal": (1_000, 20_000, 100_000, 250_000),
    "full": (1_000, 20_000, 100_000, 250_000),
}
EPOCHS, WARM = 14, 6
SHARDS = 4
GOAL_ROWS = 20_000
"""Epochs of up to so many rows are to take at most half of the time."""


def run(scale: str) -> Iterator[Result]:
    spark = local_session(CORES, "nosync-bench")
    for name, declare, given in (
        ("sums by key", _sums, _in_memory),
        ("a join and sums", _join, _in_memory),
        ("sums by key of a Parquet file", _sums, _in_a_file),
    ):
        for rows in SIZES[scale]:
            mine, theirs = _measured(spark, declare, given, rows)
            yield Result(
                f"{name}, an epoch of {rows:,} rows, {SHARDS} shards", "driver", mine * 1000, "ms p50", "Spark's tasks",
                theirs * 1000, mine / theirs, "<= 0.5" if rows <= GOAL_ROWS else "",
                mine / theirs <= 0.5 * 1.1 if rows <= GOAL_ROWS else None, repeats=EPOCHS - WARM,
            )  # fmt: skip
    spark.stop()


def _sums(flow: nosync.Dataflow) -> None:
    flow.source("rows", "k bigint, x double").aggregate("sums", key=["k"], n=nosync.count(), sum=nosync.sum("x"))


def _join(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", "k bigint, x double")
    sums = rows.aggregate("sums", key=["k"], n=nosync.count(), sum=nosync.sum("x"))
    joined = rows.select("last", "k", "x").join("joined", sums, on=["k"])
    joined.select("grouped", "k % 100 AS g", "x").aggregate("by_group", key=["g"], n=nosync.count())


def _measured(
    spark: SparkSession,
    declare: Callable[[nosync.Dataflow], None],
    give: Callable[[SparkSession, pa.Table, Path], DataFrame],
    rows: int,
) -> tuple[float, float]:
    """Returns the medians of the seconds of an epoch: by the driver, and by Spark's tasks."""
    chance, sizes = np.random.default_rng(7), ("1g", "0")
    seconds: dict[str, list[float]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        stores = {size: nosync.open(Path(directory) / size, retain=10) for size in sizes}
        jobs = {}
        for size, store in stores.items():
            flow = nosync.Dataflow("sums")
            declare(flow)
            jobs[size] = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        for t in range(EPOCHS):
            table = pa.table({"k": chance.integers(0, KEYS, rows), "x": chance.random(rows)})
            given = give(spark, table, Path(directory) / f"{t}.parquet")
            for size, job in jobs.items():
                with conf_set(spark, {DRIVER_MAX_BYTES: size}):
                    began = time.perf_counter()
                    job.advance(t, {"rows": given})
                    seconds[size].append(time.perf_counter() - began)
            given.unpersist()
        for store in stores.values():
            store.close()
    mine, theirs = (statistics.median(seconds[size][WARM:]) for size in sizes)
    return mine, theirs


def _in_memory(spark: SparkSession, table: pa.Table, _: Path) -> DataFrame:
    frame = spark.createDataFrame(table).persist()
    frame.count()
    return frame


def _in_a_file(spark: SparkSession, table: pa.Table, path: Path) -> DataFrame:
    pq.write_table(table, path)
    return spark.read.schema("k bigint, x double").parquet(str(path))
