"""A keyed aggregation (count and sum) in nosync and in other engines, on the same rows, one after the other in one session.

Rows are (k, id): every engine computes k by itself. The first ids have each key once, so every engine has all keys in its
state, and has had as many rows, before anything is measured; from there on keys come as if drawn at random, some of them
twice in an epoch. Of each engine its own sink for nothing takes the results. Each run has a process, and a JVM, of its own,
whose heap may be 1 GiB; Flink runs in an environment of its own, `.venv-flink`, which is made when it is missing.

A rate is of all rows over all seconds, with what slow epochs took, and until ours are on disk. Besides time: processor seconds
of all processes, bytes written, the shuffle's included, and the most memory that they had at once: their own, and beside it
what of files is mapped, such as our layers and every engine's libraries. A row of change has 24 bytes: a key, a count, a sum.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from bench.footprint import Memory, PeakMemory, Spent, alone, spent
from bench.harness import Result, Samples, timed
from bench.spark_epochs import CORES, SHARDS, start
from bench.spark_epochs import Run as EpochsOfOurs
from nosync.spark.session import arrow_settings, conf_set, local_session, session_settings
from nosync.spark.worker import task_in_worker

KEYS = 2_000_000
FEW_KEYS = {"short": 40_000, "normal": 100_000, "full": 100_000}
"""Of Python's transformWithState, which takes some 10 s for 20,000 rows, a smaller state is made; and of ours beside it."""
_DRAWN = "pmod(pmod({id} * 2654435761, 4294967296) * (pmod({id}, 65521) + 1), 4294967291)"
KEY = "IF({id} < {keys}, {id}, pmod(" + _DRAWN + ", {keys}))"
LARGE, SMALL = 500_000, 20_000
HEAP = "-Xmx1g"
"""Of Spark's driver it is the default."""
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
    """Holds what one engine took for `rows`: seconds of each epoch (of Flink, which has none, of each pair of jobs),
    until they were on disk, and the rest.
    """

    rows: int
    samples: Samples
    spent: Spent
    peak: Memory
    durable_s: float = 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / (sum(self.samples.seconds) + self.durable_s)

    @property
    def cpu_s(self) -> float:
        """Returns the processor seconds for a million rows."""
        return 1e6 * self.spent.cpu_s / self.rows

    @property
    def written(self) -> float:
        """Returns the bytes written for each byte of change."""
        return self.spent.written_bytes / (BYTES_OF_CHANGE * self.rows)


def batch(spark: SparkSession, first: int, rows: int, keys: int) -> DataFrame:
    return spark.range(first, first + rows, 1, CORES).selectExpr(f"{KEY.format(id='id', keys=keys)} AS k", "id AS v")


def run(scale: str) -> Iterator[Result]:
    full, short = scale == "full", scale == "short"
    warm, many = (4, 4) if short else (25, 12)
    few_keys = FEW_KEYS[scale]
    slow, slowest = {"short": ((1, 2), (0, 1)), "normal": ((4, 8), (2, 3)), "full": ((4, 12), (2, 8))}[scale]
    mine = {
        (LARGE, KEYS): alone(_ours, LARGE, KEYS, warm, many),
        (SMALL, KEYS): alone(_ours, SMALL, KEYS, warm, 3 * many),
        (SMALL, few_keys): alone(_ours, SMALL, few_keys, warm, 3 * many),
    }
    floors = {rows: alone(_beside_the_floor, rows, warm, 2 * many) for rows in (LARGE, SMALL)}
    large, small = alone(_streamed, "true", (LARGE, *slow), (SMALL, warm, 6 if short else 3 * many))
    streamed: list[tuple[str, int, int, float, Run]] = [
        ("RocksDB + changelog", LARGE, KEYS, 5.0, large),
        ("RocksDB + changelog", SMALL, KEYS, 1.5, small),
        ("transformWithStateInPandas", SMALL, few_keys, 20.0, alone(_in_python, SMALL, few_keys, *slowest)),
    ]
    variants: dict[str, dict[str, str]] = {"default": {}}
    if not short:
        variants["mini-batch, unaligned checkpoints"] = FLINK_TUNED
    if full:
        (snapshots,) = alone(_streamed, "false", (LARGE, *slow))
        streamed.insert(1, ("RocksDB, snapshots", LARGE, KEYS, 5.0, snapshots))
        variants["changelog backend"] = FLINK_CHANGELOG
    for rows, (ours, floor) in floors.items():
        ratio = Samples([theirs / mine for mine, theirs in zip(ours.seconds, floor.seconds, strict=True)])
        yield Result(
            f"epochs of {rows:,} rows, {KEYS:,} keys", "nosync", rows / ours.median, "rows/s",
            "identity job: Spark's shuffle and a Python hop, no state", rows / floor.median, ratio.median, ">= 0.8",
            ratio.median >= 0.8, ratio.spread, len(ratio.seconds),
        )  # fmt: skip
    for name, rows, keys, goal, theirs in streamed:
        workload = f"epochs of {rows:,} rows, {keys:,} keys"
        yield from _beside(mine[rows, keys], workload, f"Structured Streaming, {name}", theirs, goal)
    pairs, more = {"short": (1, 1_000_000), "normal": (3, 2_500_000), "full": (5, 6_000_000)}[scale]
    first = KEYS // 4 if short else KEYS
    for name, settings in variants.items():
        version, theirs = alone(_flink, first, more, pairs, settings)
        peer = f"Flink {version} SQL, RocksDB incremental, 1 s checkpoints, {name}"
        yield from _beside(mine[LARGE, KEYS], f"{KEYS:,} keys, ours in epochs of {LARGE:,} rows", peer, theirs, 5.0)


def _beside(mine: Run, workload: str, peer: str, theirs: Run, goal: float) -> Iterator[Result]:
    ratio = mine.rows_per_s / theirs.rows_per_s
    rates = ("rows/s", mine.rows_per_s, theirs.rows_per_s)
    for (unit, ours, its), text, met in (
        (rates, f">= {goal:g}", ratio >= goal),
        (("CPU s for 10^6 rows", mine.cpu_s, theirs.cpu_s), "", None),
        (("bytes written for a byte of change", mine.written, theirs.written), "", None),
        (("MB of memory at the peak", mine.peak.own_bytes / 1e6, theirs.peak.own_bytes / 1e6), "", None),
        (("MB mapped from files at the peak", mine.peak.mapped_bytes / 1e6, theirs.peak.mapped_bytes / 1e6), "", None),
    ):
        yield Result(
            workload, "nosync", ours, unit, peer, its, ours / its, text, met, mine.samples.spread, len(mine.samples.seconds),
            baseline_spread=theirs.samples.spread, baseline_repeats=len(theirs.samples.seconds),
        )  # fmt: skip


# --- nosync -----------------------------------------------------------------------------------------------------------


def _filled(spark: SparkSession, path: Path, keys: int) -> EpochsOfOurs:
    """Returns a job whose state has all keys."""
    one = start(spark, path)
    for first in range(0, keys, LARGE):
        one.advance(batch(spark, first, min(LARGE, keys - first), keys))
    return one


def _ours(rows: int, keys: int, warm: int, repeats: int) -> Run:
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as directory:
        one = _filled(spark, Path(directory) / "store", keys)

        def epoch(i: int) -> None:
            one.advance(batch(spark, keys + i * rows, rows, keys))

        for i in range(warm):
            epoch(i)
        one.store.sync()
        with PeakMemory() as memory:
            before = spent()
            seconds = [timed(partial(epoch, i)) for i in range(warm, warm + repeats)]
            durable_s = timed(one.store.sync)
            cost = spent() - before
        one.store.close()
    spark.stop()
    return Run(rows * repeats, Samples(seconds), cost, memory.peak, durable_s)


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
        if handed(batch(spark, KEYS + i * rows, rows, KEYS), counted) != rows:
            raise RuntimeError("rows were lost")


def _beside_the_floor(rows: int, warm: int, repeats: int) -> tuple[Samples, Samples]:
    """Returns the seconds of epochs, and of moving as many rows. They run by turns in one JVM, so that what the machine
    does meanwhile hits both.

    The rows are not the same: for each range of ids Spark compiles code anew, and the second to come would find it
    compiled.
    """
    spark = local_session(CORES, "nosync-bench")
    ours, floor = [], []
    epochs = warm + repeats
    with tempfile.TemporaryDirectory(dir=".") as directory:
        one = _filled(spark, Path(directory) / "store", KEYS)

        def epoch(i: int) -> None:
            one.advance(batch(spark, KEYS + i * rows, rows, KEYS))

        for i in range(epochs):
            ours.append(timed(partial(epoch, i)))
            floor.append(timed(partial(moved, spark, epochs + i, rows)))
        one.store.close()
    spark.stop()
    return Samples(ours[warm:]), Samples(floor[warm:])


# --- Structured Streaming ---------------------------------------------------------------------------------------------


def checkpoint_directory(root: Path = Path()) -> tempfile.TemporaryDirectory[str]:
    """Spark's maintenance of state goes on for a moment after a query, and may write while its directory goes, or after it.

    So the session is to end before whatever this lies in goes, or before this does.
    """
    return tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True)


def _source(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    return source.load().selectExpr(f"{KEY.format(id='value', keys=keys)} AS k", "value AS v")


def _streamed(changelog: str, *runs: tuple[int, int, int]) -> list[Run]:
    """One query, started again for each of `runs`: rows of a micro-batch, how many come before those that are measured, and how
    many these are. The first one begins with all keys.
    """
    spark = local_session(CORES, "nosync-bench")
    found: list[Run] = []
    with checkpoint_directory() as checkpoint:
        with conf_set(spark, {**STREAMING, CHANGELOG: changelog}):
            for rows, warm, repeats in runs:
                sums = (
                    _source(spark, rows, KEYS).groupBy("k").agg(F.count(F.lit(1)).alias("n"), F.sum("v").alias("total"))
                )
                writer = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint)
                found.append(_batches(writer.start(), rows, warm if found else KEYS // rows + warm, repeats))
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


def _in_python(rows: int, keys: int, warm: int, repeats: int) -> Run:
    spark = local_session(CORES, "nosync-bench")
    with checkpoint_directory() as checkpoint:
        with conf_set(spark, {**STREAMING, CHANGELOG: "true"}):
            sums = _source(spark, rows, keys).groupBy("k").transformWithStateInPandas(
                Sums(), "k bigint, n bigint, total bigint", "Update", "None"
            )  # fmt: skip
            writer = sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint)
            found = _batches(writer.start(), rows, keys // rows + warm, repeats)
        spark.stop()
    return found


def _batches(stream: StreamingQuery, rows: int, warm: int, repeats: int) -> Run:
    """Runs the query, and measures the micro-batches after the warm ones. Cost is counted over those that are seen to
    begin and end.
    """
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
    return Run(rows * len(seconds), Samples(seconds), cost, memory.peak)


# --- Flink ------------------------------------------------------------------------------------------------------------


def _flink(first: int, rows: int, pairs: int, settings: dict[str, str]) -> tuple[str, Run]:
    """Returns Flink's version, and what so many rows took after those that have each key once; its JVM warms up with
    `first` rows.
    """
    about = {
        "first_rows": first, "warm_rows": KEYS, "rows": KEYS + rows, "pairs": pairs, "keys": KEYS, "settings": settings,
    }  # fmt: skip
    os.environ["JAVA_TOOL_OPTIONS"] = HEAP  # of the process that this function has to itself
    with PeakMemory(with_this=False) as memory:
        found = run_flink("flink_sums.py", about)
    cost = Spent(found["cpu_s"], found["written_bytes"])
    return found["version"], Run(rows * pairs, Samples(found["seconds"]), cost, memory.peak)
