"""Sessions of bidders (NexMark Q11: bids until none came for ten seconds) in nosync and Structured Streaming, on the same files.

First both answer a small input, and the sessions that are over must be equal; then each is timed, with results that go nowhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import nosync
from bench.engines_sums import CHANGELOG, STREAMING, checkpoint_directory
from bench.harness import Result, Samples, timed
from bench.nexmark import BIDS, STREAMS, digest_of_rows, write_events
from bench.spark_epochs import CORES, SHARDS
from nosync.spark.session import conf_set, local_session

EVENTS, WARM, MEASURED = 500_000, 3, 5
SMALL_EVENTS, SMALL_EPOCHS = 20_000, 4
GAP = "10 seconds"
_PATIENCE_S = 900


def run(scale: str) -> Iterator[Result]:
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary).absolute()
        _check_answers(spark, root / "small")
        for hot in {"short": (0.0,), "normal": (0.0, 0.3), "full": (0.0, 0.1, 0.2, 0.3)}[scale]:
            events = root / f"hot-{hot}"
            digest = write_events(events, WARM + MEASURED, EVENTS, hot)
            mine, theirs = _nosync(spark, events), _structured_streaming(spark, events)
            ours, rate = EVENTS / mine.median, EVENTS / theirs.median
            yield Result(
                f"sessions of bidders, {hot:.0%} hot, epochs of {EVENTS:,} events", "nosync", ours, "events/s",
                "Structured Streaming, RocksDB + changelog", rate, ours / rate, ">= 5", ours / rate >= 4.5, mine.spread, MEASURED,
                {"input": digest},
            )  # fmt: skip
        spark.stop()  # first what still writes to the directory


def _check_answers(spark: SparkSession, root: Path) -> None:
    """Raises RuntimeError where the two differ in sessions that are over."""
    write_events(root, SMALL_EPOCHS, SMALL_EVENTS, hot=0.1)
    *before, _ = sorted((root / BIDS).iterdir())
    newest = spark.read.parquet(*map(str, before)).agg(F.max("ts")).collect()[0][0]
    over = F.col("end") <= newest  # Structured Streaming hands a session on when a later batch begins
    with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
        job, _ = _advanced(spark, root, store, keep=None)
        ours = _columns(job.read("out"), "window_start", "window_end").where(over).collect()
    rows: list[tuple[object, ...]] = []
    _stream(spark, root, lambda batch, t: rows.extend(map(tuple, batch.where(over).collect())))
    answers = (digest_of_rows(map(tuple, ours)), digest_of_rows(rows))
    if len(set(answers)) != 1 or not rows:
        raise RuntimeError(f"sessions differ: {len(ours)} in nosync, {len(rows)} in Structured Streaming")


def _columns(sessions: DataFrame, begin: str, end: str) -> DataFrame:
    return sessions.select("bidder", F.unix_seconds(begin).alias("begin"), F.unix_seconds(end).alias("end"), "n")


def _advanced(spark: SparkSession, root: Path, store: nosync.Store, keep: str | None) -> tuple[nosync.Job, list[float]]:
    """`keep`: how long sessions stay in the state when they are over (None: for ever)."""
    flow = nosync.Dataflow("sessions")
    bids = flow.source(BIDS, STREAMS[BIDS]).select("at", "bidder", "timestamp_seconds(ts) AS at")
    bids.window("out", key=["bidder"], time="at", gap=GAP, watermark="0 seconds", keep=keep, n=nosync.count())
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    files = sorted((root / BIDS).iterdir())
    read = spark.read.schema(STREAMS[BIDS])
    return job, [timed(lambda t=t: job.advance(t, {BIDS: read.parquet(str(files[t]))})) for t in range(len(files))]  # type: ignore[misc]


def _nosync(spark: SparkSession, root: Path) -> Samples:
    with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
        _, seconds = _advanced(spark, root, store, keep=GAP)
    return Samples(seconds[WARM:])


def _stream(spark: SparkSession, root: Path, take: object = None) -> list[float]:
    """Returns the seconds of each micro-batch that had input. `take(batch, id)` gets the sessions; None: they go
    nowhere.
    """
    files = spark.readStream.schema(STREAMS[BIDS]).option("maxFilesPerTrigger", 1).parquet(str(root / BIDS))
    bids = files.withColumn("at", F.timestamp_seconds("ts")).withWatermark("at", "0 seconds")
    sessions = bids.groupBy("bidder", F.session_window("at", GAP).alias("w")).agg(F.count(F.lit(1)).alias("n"))
    with conf_set(spark, {**STREAMING, CHANGELOG: "true"}), checkpoint_directory(root) as checkpoint:
        rows = _columns(sessions.select("bidder", "w.*", "n"), "start", "end")
        writer = rows.writeStream.outputMode("append").option("checkpointLocation", checkpoint)
        writer = writer.format("noop") if take is None else writer.foreachBatch(take)  # type: ignore[arg-type]
        running = writer.trigger(availableNow=True).start()
        if not running.awaitTermination(_PATIENCE_S):
            running.stop()
            raise RuntimeError(f"Structured Streaming did not answer within {_PATIENCE_S} s")
        return [p["durationMs"]["triggerExecution"] / 1000 for p in running.recentProgress if p["numInputRows"]]


def _structured_streaming(spark: SparkSession, root: Path) -> Samples:
    seconds = _stream(spark, root)
    if len(seconds) != WARM + MEASURED:
        raise RuntimeError(f"Structured Streaming answered in {len(seconds)} batches")
    return Samples(seconds[WARM:])
