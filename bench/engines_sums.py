"""A keyed aggregation (count and sum) in nosync and in other engines, on the same rows, one after the other in one session.

Rows are (k, id) with k = (id * 2654435761 mod 2^32) mod keys: every engine computes them by itself. Of each engine its own
sink for nothing takes the results. Each run has a process, and a JVM, of its own; Flink runs in an environment of its own,
`.venv-flink`, which is made when it is missing.

Besides time: processor seconds of all processes, the most memory that they had at once (what is mapped from files is not
counted), and bytes written, the shuffle's included. A row of change has 24 bytes: a key, a count and a sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from bench.flink import run_flink
from bench.footprint import PeakMemory, Spent, alone, spent
from bench.harness import Result, Samples, timed
from bench.spark_epochs import CORES, SHARDS, start
from nosync.spark.session import arrow_settings, conf_set, local_session, session_settings
from nosync.spark.worker import task_in_worker

KEYS = 2_000_000
KEY = "pmod(pmod({id} * 2654435761, 4294967296), {keys})"
LARGE, SMALL = 500_000, 20_000
BYTES_OF_CHANGE = 24
FLINK_TUNED = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "1s",
    "table.exec.mini-batch.size": "100000",
    "execution.checkpointing.unaligned.enabled": "true",
}
FLINK_CHANGELOG = {"state.changelog.enabled": "true", "state.changelog.storage": "filesystem"}
STREAMING = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.shuffle.partitions": str(SHARDS),
}
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Run:
    """What one engine took for `rows`: seconds an epoch (of Flink, which has none, altogether), and the rest."""

    rows: int
    samples: Samples
    spent: Spent
    peak_bytes: int

    @property
    def rows_per_s(self) -> float:
        return self.rows / len(self.samples.seconds) / self.samples.median

    @property
    def cpu_s(self) -> float:
        """For a million rows."""
        return 1e6 * self.spent.cpu_s / self.rows

    @property
    def written(self) -> float:
        """Bytes written for each byte of change."""
        return self.spent.written_bytes / (BYTES_OF_CHANGE * self.rows)


def batch(spark: SparkSession, first: int, rows: int, keys: int) -> DataFrame:
    return spark.range(first, first + rows, 1, CORES).selectExpr(f"{KEY.format(id='id', keys=keys)} AS k", "id AS v")


def run(scale: str) -> Iterator[Result]:
    full, short = scale == "full", scale == "short"
    warm, many = (4, 4) if short else (25, 12)
    slow, slowest = {"short": ((2, 2), (1, 1)), "normal": ((5, 4), (2, 3)), "full": ((5, 8), (2, 8))}[scale]
    mine = {LARGE: alone(_ours, LARGE, warm, many), SMALL: alone(_ours, SMALL, warm, 3 * many)}
    floors = {rows: alone(_beside_the_floor, rows, warm, 2 * many) for rows in (LARGE, SMALL)}
    streamed: list[tuple[str, int, float, Run]] = [
        ("RocksDB + changelog", LARGE, 5.0, alone(_streamed, LARGE, "true", *slow)),
        ("RocksDB + changelog", SMALL, 1.5, alone(_streamed, SMALL, "true", warm, 10 if short else 20)),
        ("transformWithStateInPandas", SMALL, 20.0, alone(_in_python, SMALL, *slowest)),
    ]
    variants: dict[str, dict[str, str]] = {"default": {}}
    if not short:
        variants["mini-batch, unaligned checkpoints"] = FLINK_TUNED
    if full:
        streamed.insert(1, ("RocksDB, snapshots", LARGE, 5.0, alone(_streamed, LARGE, "false", 5, 8)))
        variants["changelog backend"] = FLINK_CHANGELOG
    for rows, (ours, floor) in floors.items():
        ratio = Samples([theirs / mine for mine, theirs in zip(ours.seconds, floor.seconds, strict=True)])
        yield Result(
            f"epochs of {rows:,} rows, {KEYS:,} keys", "nosync", rows / ours.median, "rows/s",
            "identity job: Spark's shuffle and a Python hop, no state", rows / floor.median, ratio.median, ">= 0.8",
            ratio.median >= 0.8, ratio.spread, len(ratio.seconds),
        )  # fmt: skip
    for name, rows, goal, theirs in streamed:
        yield from _beside(
            mine[rows], f"epochs of {rows:,} rows, {KEYS:,} keys", f"Structured Streaming, {name}", theirs, goal
        )
    for name, settings in variants.items():
        version, theirs = _flink({"short": 1_000_000, "normal": 2_500_000, "full": 6_000_000}[scale], settings)
        peer = f"Flink {version} SQL, RocksDB incremental, 1 s checkpoints, {name}"
        yield from _beside(mine[LARGE], f"{KEYS:,} keys, ours in epochs of {LARGE:,} rows", peer, theirs, 5.0)


def _result(
    workload: str, mine: Run, unit: str, ours: float, peer: str, theirs: float, ratio: float, goal: str = "",
    met: bool | None = None,
) -> Result:  # fmt: skip
    return Result(
        workload, "nosync", ours, unit, peer, theirs, ratio, goal, met, mine.samples.spread, len(mine.samples.seconds)
    )


def _beside(mine: Run, workload: str, peer: str, theirs: Run, goal: float) -> Iterator[Result]:
    one = partial(_result, workload, mine)
    ratio = mine.rows_per_s / theirs.rows_per_s
    yield one("rows/s", mine.rows_per_s, peer, theirs.rows_per_s, ratio, f">= {goal:g}", ratio >= goal)
    for unit, ours, its in (
        ("CPU s for 10^6 rows", mine.cpu_s, theirs.cpu_s),
        ("bytes written for a byte of change", mine.written, theirs.written),
        ("MB of memory at the peak", mine.peak_bytes / 1e6, theirs.peak_bytes / 1e6),
    ):
        yield one(unit, ours, peer, its, ours / its)


# --- nosync -----------------------------------------------------------------------------------------------------------


def _ours(rows: int, warm: int, repeats: int) -> Run:
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as directory:
        one = start(spark, Path(directory) / "store")

        def epoch(i: int) -> None:
            one.advance(batch(spark, i * rows, rows, KEYS))

        for i in range(warm):
            epoch(i)
        one.store.sync()
        with PeakMemory() as memory:
            before = spent()
            seconds = [timed(partial(epoch, i)) for i in range(warm, warm + repeats)]
            one.store.sync()
            found = Run(rows * repeats, Samples(seconds), spent() - before, 0)
        one.store.close()
    spark.stop()
    return replace(found, peak_bytes=memory.peak_bytes)


def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with task_in_worker():  # as in tasks of ours
        yield pa.RecordBatch.from_pydict({"n": [sum(one.num_rows for one in batches)]})


def handed(rows: DataFrame, task: Task, *also: str) -> int:
    """Moves rows as nosync moves them here, by key into Python tasks; what those count. `also`: expressions sent, too."""
    keyed = rows.repartitionById(SHARDS, F.expr(f"CAST(pmod(xxhash64(k), {SHARDS}) AS INT)"))
    return sum(row.n for row in keyed.selectExpr("*", *also).mapInArrow(task, "n bigint").collect())


def moved(spark: SparkSession, i: int, rows: int) -> None:
    """Moves the rows of epoch `i`, and nothing else: an epoch's floor."""
    with conf_set(spark, {**session_settings(), **arrow_settings(spark, row_bytes=16)}):
        if handed(batch(spark, i * rows, rows, KEYS), counted) != rows:
            raise RuntimeError("rows were lost")


def _beside_the_floor(rows: int, warm: int, repeats: int) -> tuple[Samples, Samples]:
    """Seconds of epochs, and of moving as many rows, by turns in one JVM, so that what the machine does meanwhile hits both.

    The rows are not the same: for each range of ids Spark compiles code anew, and the second to come would find it compiled.
    """
    spark = local_session(CORES, "nosync-bench")
    ours, floor = [], []
    epochs = warm + repeats
    with tempfile.TemporaryDirectory(dir=".") as directory:
        one = start(spark, Path(directory) / "store")

        def epoch(i: int) -> None:
            one.advance(batch(spark, i * rows, rows, KEYS))

        for i in range(epochs):
            ours.append(timed(partial(epoch, i)))
            floor.append(timed(partial(moved, spark, epochs + i, rows)))
        one.store.close()
    spark.stop()
    return Samples(ours[warm:]), Samples(floor[warm:])


# --- Structured Streaming ---------------------------------------------------------------------------------------------


def checkpoint_directory(root: Path = Path()) -> tempfile.TemporaryDirectory[str]:
    """Spark's maintenance of state goes on for a moment after a query, and may write while its directory goes."""
    return tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True)


def _source(spark: SparkSession, rows: int) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    return source.load().selectExpr(f"{KEY.format(id='value', keys=KEYS)} AS k", "value AS v")


def _streamed(rows: int, changelog: str, warm: int, repeats: int) -> Run:
    spark = local_session(CORES, "nosync-bench")
    with conf_set(spark, {**STREAMING, CHANGELOG: changelog}), checkpoint_directory() as checkpoint:
        sums = _source(spark, rows).groupBy("k").agg(F.count(F.lit(1)).alias("n"), F.sum("v").alias("total"))
        stream = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint).start()
        found = _batches(stream, rows, warm, repeats)
    spark.stop()
    return found


class Sums(StatefulProcessor):
    """Count and sum of a key, as a user would write it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("sums", "n bigint, total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total = self._state.get() or (0, 0)
        for frame in rows:
            n, total = n + len(frame), total + int(frame["v"].sum())
        self._state.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})

    def close(self) -> None:
        pass


def _in_python(rows: int, warm: int, repeats: int) -> Run:
    spark = local_session(CORES, "nosync-bench")
    with conf_set(spark, {**STREAMING, CHANGELOG: "true"}), checkpoint_directory() as checkpoint:
        sums = _source(spark, rows).groupBy("k").transformWithStateInPandas(
            Sums(), "k bigint, n bigint, total bigint", "Update", "None"
        )  # fmt: skip
        stream = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint).start()
        found = _batches(stream, rows, warm, repeats)
    spark.stop()
    return found


def _batches(stream: StreamingQuery, rows: int, warm: int, repeats: int) -> Run:
    """Of the micro-batches after the warm ones. What was spent is of those that are seen to begin and end."""
    progress: dict[int, Any] = {}
    before: Spent | None = None
    first = 0
    with PeakMemory() as memory:
        while len(progress) < warm + repeats and stream.isActive:
            stream.awaitTermination(1)
            progress |= {p["batchId"]: p for p in stream.recentProgress if p["numInputRows"] == rows}
            if before is None and len(progress) >= warm:
                before, first = spent(), len(progress)
        after, last = spent(), len(progress)
    stream.stop()
    error = stream.exception()
    if error is not None:
        raise RuntimeError(str(error))
    if before is None or last <= first:
        raise RuntimeError(f"micro-batches were too fast to be told apart: {last} of them")
    seconds = [progress[i]["durationMs"]["triggerExecution"] / 1000 for i in sorted(progress)][warm:]
    share = len(seconds) / (last - first)
    whole = after - before
    cost = Spent(whole.cpu_s * share, int(whole.written_bytes * share))
    return Run(rows * len(seconds), Samples(seconds), cost, memory.peak_bytes)


# --- Flink ------------------------------------------------------------------------------------------------------------


def _flink(rows: int, settings: dict[str, str]) -> tuple[str, Run]:
    """Its version, and what the rows after the first 500,000 took."""
    about = {"rows": rows, "warm_rows": LARGE, "keys": KEYS, "settings": settings}
    with PeakMemory() as memory:
        found = run_flink("flink_sums.py", about)
    cost = Spent(found["cpu_s"], found["written_bytes"])
    return found["version"], Run(found["rows"], Samples([found["seconds"]]), cost, memory.peak_bytes)
