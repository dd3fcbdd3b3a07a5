"""Another number of shards for a keyed aggregation, beside Spark's own repartition of a checkpoint's state.

Spark's (4.2 and later) wants the query stopped, reads the whole state and writes it again. Ours changes what the next epoch
does: a new shard begins with the layers of the old ones. So the first epoch after it counts as well: of Spark from the
start of the query until its first batch with rows is done. Each engine has a process, and a JVM, of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import nosync
from bench.engines_sums import CHANGELOG, STREAMING, checkpoint_directory
from bench.footprint import alone
from bench.harness import Result, timed
from bench.spark_epochs import CORES, aggregation
from nosync.spark.session import conf_set, local_session

KEYS = {"short": 200_000, "normal": 1_000_000, "full": 4_000_000}
BEFORE, AFTER = 2, 5
ROWS = 20_000
WARM = 3


def run(scale: str) -> Iterator[Result]:
    keys = KEYS[scale]
    mine, theirs = alone(_ours, keys), alone(_by_spark, keys)
    rows = (
        ("another number of shards", "Structured Streaming: offline repartition of the state"),
        ("and the first epoch after it", "Structured Streaming, started again until its first batch is done"),
        (f"an epoch before it, of {ROWS:,} rows", "Structured Streaming"),
    )
    for (name, peer), ours, its in zip(rows, mine, theirs, strict=True):
        yield Result(
            f"{name}, {keys:,} keys, {BEFORE} to {AFTER}", "nosync", ours, "s",
            peer, its, ours / its,
        )  # fmt: skip


def _ours(keys: int) -> tuple[float, float, float]:
    """Returns the seconds that the change took, the first epoch after it, and one before."""
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as directory, nosync.open(Path(directory) / "store") as store:
        job = nosync.Job(aggregation(), store, spark=spark, shards=BEFORE)
        job.advance(0, {"rows": spark.range(0, keys, 1, CORES).selectExpr("id AS k", "id AS v")})

        def epoch(t: int) -> None:
            job.advance(t, {"rows": spark.range(t * ROWS, (t + 1) * ROWS, 1, CORES).selectExpr("id AS k", "id AS v")})

        for t in range(1, 1 + WARM):
            epoch(t)
        before_s = timed(partial(epoch, 1 + WARM))
        rescale_s = timed(partial(job.rescale, AFTER))
        found = (rescale_s, timed(partial(epoch, 2 + WARM)), before_s)
    spark.stop()
    return found


def _by_spark(keys: int) -> tuple[float, float, float]:
    spark = local_session(CORES, "nosync-bench")
    with checkpoint_directory() as checkpoint:
        with conf_set(spark, {**STREAMING, CHANGELOG: "true", "spark.sql.shuffle.partitions": str(BEFORE)}):
            before_s = _batches(_started(spark, checkpoint), keys // ROWS + WARM)
            # The source never ends, so the query is stopped within a batch: that is allowed, for a sink for nothing.
            repartition = partial(spark._streamingCheckpointManager.repartition, enforce_exactly_once_sink=False)
            rescale_s = timed(partial(repartition, checkpoint, AFTER))
        with conf_set(spark, {**STREAMING, CHANGELOG: "true", "spark.sql.shuffle.partitions": str(AFTER)}):
            began = time.perf_counter()
            _batches(_started(spark, checkpoint), 1)
            first_s = time.perf_counter() - began
        spark.stop()
    return rescale_s, first_s, before_s


def _started(spark: SparkSession, checkpoint: str) -> StreamingQuery:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", CORES)
    sums = source.load().selectExpr("value AS k", "value AS v").groupBy("k").agg(F.count("v"), F.sum("v"))
    return sums.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint).start()


def _batches(query: StreamingQuery, batches: int) -> float:
    """Waits for so many batches with rows, and stops the query. Returns the seconds of the last one."""
    progress: dict[int, float] = {}
    while len(progress) < batches and query.isActive:
        query.awaitTermination(1)
        for one in query.recentProgress:
            if one["numInputRows"]:
                progress[one["batchId"]] = one["durationMs"]["triggerExecution"] / 1000
    query.stop()
    error = query.exception()
    if error is not None:
        raise RuntimeError(str(error))
    return progress[max(progress)]
