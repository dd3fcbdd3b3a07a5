"""A keyed aggregation (count and sum) in nosync and in other engines, on the same rows, one after the other in one session.

Rows are (k, id) with k = (id * 2654435761 mod 2^32) mod keys: every engine computes them by itself. Of each engine its own
sink for nothing takes the results. Flink runs in an environment of its own, `.venv-flink`, which is made when it is missing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery

from bench.flink import run_flink
from bench.harness import Result, Samples, cpu_s, timed
from bench.spark_epochs import CORES, SHARDS, start
from nosync.spark.session import conf_set, local_session, session_settings

KEYS = 2_000_000
KEY = "pmod(pmod({id} * 2654435761, 4294967296), {keys})"
FLINK_TUNED = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "1s",
    "table.exec.mini-batch.size": "100000",
    "execution.checkpointing.unaligned.enabled": "true",
}
STREAMING = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.shuffle.partitions": str(SHARDS),
}
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


@dataclass(frozen=True)
class Run:
    """What one engine took: seconds of each epoch, and of all cores for a million rows."""

    samples: Samples
    cpu_s: float

    @property
    def median(self) -> float:
        return self.samples.median


def batch(spark: SparkSession, first: int, rows: int, keys: int) -> DataFrame:
    return spark.range(first, first + rows, 1, CORES).selectExpr(f"{KEY.format(id='id', keys=keys)} AS k", "id AS v")


def run(scale: str) -> Iterator[Result]:
    full = scale == "full"
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary)
        large = _ours(spark, root / "large", 500_000, warm=8, repeats=12 if full else 6)
        small = _ours(spark, root / "small", 20_000, warm=10, repeats=40 if full else 20)
        floors = {n: _floor(spark, n, repeats=12 if full else 6) for n in (500_000, 20_000)}
        peers: list[tuple[str, Run, Run, float, int]] = []
        for name, changelog in (("RocksDB + changelog", "true"), ("RocksDB, snapshots", "false")):
            took = _streamed(spark, root / f"large-{changelog}", 500_000, changelog, warm=8, repeats=8 if full else 4)
            peers.append((f"Structured Streaming, {name}", large, took, 5.0, 500_000))
        took = _streamed(spark, root / "small-stream", 20_000, "true", warm=10, repeats=20)
        peers.append(("Structured Streaming, RocksDB + changelog", small, took, 1.5, 20_000))
        took = _in_python(spark, root / "python", 20_000, warm=3, repeats=4)
        peers.append(("Structured Streaming, transformWithStateInPandas", small, took, 20.0, 20_000))
    spark.stop()
    for rows, mine in ((500_000, large), (20_000, small)):
        ratio = floors[rows].median / mine.median
        yield Result(
            f"epochs of {rows:,} rows, {KEYS:,} keys", "nosync", rows / mine.median, "rows/s",
            "identity job: the same shuffle and Python hop, no state", rows / floors[rows].median, ratio, ">= 0.8",
            ratio >= 0.8, mine.samples.spread, len(mine.samples.seconds),
        )  # fmt: skip
    for peer, mine, theirs, goal, rows in peers:
        ratio = theirs.median / mine.median
        yield Result(
            f"epochs of {rows:,} rows, {KEYS:,} keys", "nosync", rows / mine.median, "rows/s", peer, rows / theirs.median,
            ratio, f">= {goal}", ratio >= goal, mine.samples.spread, len(mine.samples.seconds),
        )  # fmt: skip
    for peer, mine, theirs, _, rows in peers:
        yield Result(
            f"CPU of all cores for 1,000,000 rows, epochs of {rows:,}", "nosync", mine.cpu_s, "s", peer, theirs.cpu_s,
            theirs.cpu_s / mine.cpu_s, repeats=len(mine.samples.seconds),
        )  # fmt: skip
    for name, settings in (("default", {}), ("mini-batch, unaligned checkpoints", FLINK_TUNED)):
        found = _flink(6_000_000 if full else 3_000_000, settings)
        ours = 500_000 / large.median
        ratio = ours / found["rows_per_s"]
        yield Result(
            f"{KEYS:,} keys", "nosync, epochs of 500,000 rows", ours, "rows/s",
            f"Flink {found['version']} SQL, RocksDB incremental, 1 s checkpoints, {name}", found["rows_per_s"], ratio, ">= 5",
            ratio >= 5, large.samples.spread, 1, settings,
        )  # fmt: skip


# --- nosync -----------------------------------------------------------------------------------------------------------


def _ours(spark: SparkSession, root: Path, rows: int, *, warm: int, repeats: int) -> Run:
    one = start(spark, root)
    for i in range(warm):
        one.advance(batch(spark, i * rows, rows, KEYS))
    before_s = cpu_s()
    seconds = [one.advance(batch(spark, i * rows, rows, KEYS)) for i in range(warm, warm + repeats)]
    spent_s = cpu_s() - before_s
    one.store.close()
    return Run(Samples(seconds), 1e6 * spent_s / (rows * repeats))


def _counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"n": [sum(one.num_rows for one in batches)]})


def _floor(spark: SparkSession, rows: int, repeats: int) -> Samples:
    """What moving the rows takes as nosync moves them here: by key into Python tasks, and a report back."""

    def work(i: int) -> None:
        given = batch(spark, i * rows, rows, KEYS)
        keyed = given.repartitionById(SHARDS, F.expr(f"CAST(pmod(xxhash64(k), {SHARDS}) AS INT)"))
        if sum(row.n for row in keyed.mapInArrow(_counted, "n bigint").collect()) != rows:
            raise RuntimeError("rows were lost")

    with conf_set(spark, session_settings()):
        seconds = [timed(lambda i=i: work(i)) for i in range(4 + repeats)]  # type: ignore[misc]
    return Samples(seconds[4:])


# --- Structured Streaming ---------------------------------------------------------------------------------------------


def _source(spark: SparkSession, rows: int) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    return source.load().selectExpr(f"{KEY.format(id='value', keys=KEYS)} AS k", "value AS v")


def _streamed(spark: SparkSession, root: Path, rows: int, changelog: str, *, warm: int, repeats: int) -> Run:
    with conf_set(spark, {**STREAMING, CHANGELOG: changelog}):
        sums = _source(spark, rows).groupBy("k").agg(F.count(F.lit(1)).alias("n"), F.sum("v").alias("total"))
        query = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", str(root)).start()
        return _batches(query, rows, warm, repeats)


class Sums(StatefulProcessor):
    """Count and sum of a key, as a user would write it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("sums", "n bigint, total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total = self._state.get() or (0, 0)
        for frame in rows:
            n, total = n + len(frame), total + int(frame["v"].sum())
        self._state.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})

    def close(self) -> None:
        pass


def _in_python(spark: SparkSession, root: Path, rows: int, *, warm: int, repeats: int) -> Run:
    with conf_set(spark, {**STREAMING, CHANGELOG: "true"}):
        sums = _source(spark, rows).groupBy("k").transformWithStateInPandas(
            Sums(), "k bigint, n bigint, total bigint", "Update", "None"
        )  # fmt: skip
        query = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", str(root)).start()
        return _batches(query, rows, warm, repeats)


def _batches(query: StreamingQuery, rows: int, warm: int, repeats: int) -> Run:
    """Of the micro-batches after the warm ones."""
    progress: dict[int, Any] = {}
    before_s, seen_before = 0.0, 0
    while len(progress) < warm + repeats and query.isActive:
        query.awaitTermination(1)
        progress |= {p["batchId"]: p for p in query.recentProgress if p["numInputRows"] == rows}
        if not seen_before and len(progress) >= warm:
            before_s, seen_before = cpu_s(), len(progress)
    spent_s, seen = cpu_s() - before_s, len(progress) - seen_before
    query.stop()
    error = query.exception()
    if error is not None:
        raise RuntimeError(str(error))
    seconds = [progress[i]["durationMs"]["triggerExecution"] / 1000 for i in sorted(progress)]
    return Run(Samples(seconds[warm : warm + repeats]), 1e6 * spent_s / (rows * max(seen, 1)))


# --- Flink ------------------------------------------------------------------------------------------------------------


def _flink(rows: int, settings: dict[str, str]) -> dict[str, Any]:
    return run_flink("flink_sums.py", {"rows": rows, "warm_rows": 500_000, "keys": KEYS, "settings": settings})
