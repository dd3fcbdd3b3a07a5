"""NexMark Q1, Q3, Q8 and Q12 in nosync, Structured Streaming and Flink SQL, on the same files, one after the other.

First all engines answer a small input, and the answers must be equal; then each is timed, with results that go nowhere.
Each does so several times, those on Spark by turns in one JVM, which goes on compiling for minutes: what counts are the later
runs. Queries that read no bids (a twelfth of the events are others) get many more epochs, for Flink has none: its rate is the
difference of a long and a short job, and where that is some tenths of a second it is noise. Flink reads the rows as CSV
(PyFlink comes without Parquet).
What Q3 would take at least, were its files read by the JVM, is measured beside: the same files read, and the rows that matter
moved by key into Python tasks that count them, by turns with ours in one JVM.
Event time only cuts windows (Q8, Q12): no engine is told to forget anything, so all keep the same state.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import nosync
from bench.engines_sums import CHANGELOG, STREAMING, checkpoint_directory, counted
from bench.flink import run_flink
from bench.harness import Result, Samples, timed
from bench.nexmark import AUCTIONS, BIDS, PERSONS, QUERIES, STREAMS, Query, digest_of_rows, write_events
from bench.spark_epochs import CORES, SHARDS
from nosync.spark.session import conf_set, local_session, session_settings


@dataclass(frozen=True)
class Size:
    """Says how many events an epoch has. So many epochs of a run come before those that are measured."""

    events: int
    warm: int
    measured: int
    enough_s: float
    """No more runs of one query after that."""
    flinks: tuple[int, int]
    """How many of these files Flink reads in a short and in a long run, whose difference is what counts."""
    flinks_enough_s: float = 20.0
    """No more of its long runs after that."""


WITH_BIDS = {
    "short": Size(500_000, warm=3, measured=2, enough_s=0.0, flinks=(1, 4), flinks_enough_s=0.0),
    "normal": Size(500_000, warm=10, measured=6, enough_s=30.0, flinks=(10, 16)),
    "full": Size(500_000, warm=10, measured=6, enough_s=30.0, flinks=(10, 16)),
}
WITHOUT_BIDS = {
    "short": Size(500_000, warm=8, measured=16, enough_s=10.0, flinks=(4, 24), flinks_enough_s=0.0),
    "normal": Size(500_000, warm=10, measured=60, enough_s=60.0, flinks=(10, 70), flinks_enough_s=60.0),
    "full": Size(500_000, warm=10, measured=60, enough_s=60.0, flinks=(10, 70), flinks_enough_s=60.0),
}
LARGE = {
    "normal": Size(2_000_000, warm=4, measured=16, enough_s=40.0, flinks=(4, 20), flinks_enough_s=25.0),
    "full": Size(2_000_000, warm=4, measured=16, enough_s=40.0, flinks=(4, 20), flinks_enough_s=25.0),
}
"""About half as many events in an epoch as Flink handles between two of its checkpoints."""
OF_LARGE = {"Q3"}
MOVED = {"Q3"}
SHORT_QUERIES = {"Q3", "Q12"}
LEAST_S = 0.5
"""A difference of Flink's jobs that is smaller than this is too small to tell a rate."""
MOST_RUNS = 30
"""Of one query. Time ends them, for the JVM goes on compiling for a minute, whether epochs take long or not."""
SMALL_EVENTS, SMALL_EPOCHS = 6_000, 3
FEWER_CHANGES = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "5s",
    "table.exec.mini-batch.size": "100000",
}
"""Of the answers of short runs alone: PyFlink takes milliseconds for each change that it hands over."""
HOT_SHARES = (0.0, 0.1, 0.2, 0.3)
GOALS = {"Q3", "Q8", "Q12"}
_PATIENCE_S = 900
_STREAMED = "Structured Streaming, RocksDB + changelog"
T = TypeVar("T")


def run(scale: str) -> Iterator[Result]:
    spark = local_session(CORES, "nosync-bench")
    queries = [query for query in QUERIES if scale != "short" or query.name in SHORT_QUERIES]
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary).absolute()
        if scale == "short":
            _check_answers(spark, root / "small", queries, SMALL_EVENTS // 3, FEWER_CHANGES)
        else:
            _check_answers(spark, root / "small", QUERIES, SMALL_EVENTS, {})
        for hot in {"short": (0.0,), "normal": (0.0, 0.3), "full": HOT_SHARES}[scale]:
            for sizes, has_bids in ((WITH_BIDS, True), (WITHOUT_BIDS, False)):
                these = [query for query in queries if (BIDS in query.streams) == has_bids]
                yield from _timed(spark, root / f"hot-{hot}-{has_bids}", these, hot, sizes[scale])
        if scale in LARGE:
            large = [query for query in queries if query.name in OF_LARGE]
            yield from _timed(spark, root / "large", large, 0.0, LARGE[scale])
        spark.stop()  # what maintains state for a while after a query, and writes, is to end before its directory goes


def _check_answers(
    spark: SparkSession, root: Path, queries: Sequence[Query], events: int, of_flinks: Mapping[str, str]
) -> None:
    """Raises RuntimeError where two engines answer a query differently. `of_flinks`: more settings of Flink's."""
    write_events(root, SMALL_EPOCHS, events, hot=0.1)
    of_flink = _flink(root, STREAMS, queries, {"answers": True, "settings": of_flinks})["answers"]
    of_flink = {name: digest_of_rows(rows) for name, rows in of_flink.items()}
    for query in queries:
        answers = {
            "nosync": _answer_of_nosync(spark, root, query),
            "nosync, backfill": _answer_of_nosync(spark, root, query, backfilled=True),
            "Structured Streaming": _answer_of_spark(spark, root, query),
            "Flink": of_flink[query.name],
        }
        if len(set(answers.values())) != 1:
            raise RuntimeError(f"{query.name} is answered differently: {answers}")


def _timed(spark: SparkSession, root: Path, queries: Sequence[Query], hot: float, size: Size) -> Iterator[Result]:
    streams = {name for query in queries for name in query.streams}
    digest = write_events(root, size.warm + size.measured, size.events, hot, streams)
    few, many = size.flinks
    of_flink = _flink(
        root, streams, queries, {"answers": False, "files": size.flinks, "enough_s": size.flinks_enough_s}
    )
    unclear = {name: round(s, 2) for name, s in of_flink["seconds"].items() if s < LEAST_S}
    if unclear:
        raise RuntimeError(f"Flink's long and short jobs differ by too little, {unclear} s: give them more files")
    for query in queries:
        flink_s = of_flink["seconds"][query.name]
        of_spark = {"nosync": _nosync, _STREAMED: _structured_streaming} | (
            {} if hot else {"nosync, backfill": _backfilled}
        )
        timed_runs = {name: partial(run, spark, root, query) for name, run in of_spark.items()}
        engines = {name: Samples(seconds) for name, seconds in _later_runs(timed_runs, size).items()}
        theirs = engines.pop(_STREAMED)
        workload = f"NexMark {query.name}, {hot:.0%} hot, epochs of {size.events:,} events"
        peers = {
            _STREAMED: size.events / theirs.median,
            f"Flink {of_flink['version']} SQL, RocksDB incremental, 1 s checkpoints": size.events
            * (many - few)
            / flink_s,
        }
        if query.name in MOVED and not hot:
            yield _beside_moving(spark, root, query, size, workload, digest)
        goal = query.name in GOALS
        for engine, samples in engines.items():
            ours = size.events / samples.median
            for name, rate in peers.items():
                yield Result(
                    workload, engine, ours, "events/s", name, rate, ours / rate, "> 1" if goal else "",
                    ours > rate if goal else None, samples.spread, len(samples.seconds),
                    {"input": digest, "flink_seconds": flink_s},
                )  # fmt: skip


def _later_runs(engines: Mapping[str, Callable[[], list[T]]], size: Size) -> dict[str, list[T]]:
    """Returns what each epoch took, in the later half of several runs of each engine.

    They take turns, whoever had least time so far: all have the machine as it is meanwhile, and a JVM that has compiled
    as much.
    """
    used_s = dict.fromkeys(engines, 0.0)
    runs: dict[str, list[list[T]]] = {name: [] for name in engines}
    while waiting := [n for n in engines if not runs[n] or (len(runs[n]) < MOST_RUNS and used_s[n] < size.enough_s)]:
        name = min(waiting, key=used_s.__getitem__)
        began_s = time.perf_counter()
        epochs = engines[name]()
        used_s[name] += time.perf_counter() - began_s
        if len(epochs) != size.warm + size.measured:
            raise RuntimeError(f"the input has {size.warm + size.measured} epochs, and {len(epochs)} were run")
        runs[name].append(epochs[size.warm :])
    return {name: [one for epochs in of[len(of) // 2 :] for one in epochs] for name, of in runs.items()}


def _beside_moving(spark: SparkSession, root: Path, query: Query, size: Size, workload: str, digest: str) -> Result:
    """Runs epochs of nosync by turns with the same files read and rows moved: what the machine does meanwhile hits
    both.
    """

    def run() -> list[tuple[float, float]]:
        moving: list[float] = []
        with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
            _, ours = _advanced(
                spark, root, query, store, lambda t: moving.append(timed(partial(_moved, spark, root, t)))
            )
        return list(zip(ours, moving, strict=True))

    pairs = _later_runs({"both": run}, size)["both"]
    ours, moving = Samples([a for a, _ in pairs]), Samples([b for _, b in pairs])
    ratio = Samples([b / a for a, b in pairs])
    return Result(
        workload, "nosync", size.events / ours.median, "events/s",
        "moving: the same files read, the same rows moved into Python tasks, no state", size.events / moving.median,
        ratio.median, "", None, ratio.spread, len(pairs), {"input": digest},
    )  # fmt: skip


def _moved(spark: SparkSession, root: Path, t: int) -> None:
    """Moves what Q3 reads of epoch `t`, by the people's ids, as nosync moves rows."""
    file = f"{t:04}.parquet"
    people = _read(spark, root / PERSONS / file, PERSONS).selectExpr(
        "id", "name", "city", "state", "ts", "state IN ('OR', 'ID', 'CA') AS ok"
    )
    offers = _read(spark, root / AUCTIONS / file, AUCTIONS).selectExpr(
        "seller AS id", "id AS auction", "category", "ts", "category = 10 AS ok"
    )
    rows = people.unionByName(offers, allowMissingColumns=True)
    with conf_set(spark, session_settings()):
        shard = F.expr(f"CAST(pmod(xxhash64(id), {SHARDS}) AS INT)")
        rows.repartitionById(SHARDS, shard).mapInArrow(counted, "n bigint").collect()


# --- nosync -----------------------------------------------------------------------------------------------------------


def _q1(flow: nosync.Dataflow) -> nosync.Stage:
    bids = flow.source(BIDS, STREAMS[BIDS])
    return bids.select("out", "auction", "bidder", "price * 908 AS mills", "ts")


def _q3(flow: nosync.Dataflow) -> nosync.Stage:
    persons, auctions = flow.source(PERSONS, STREAMS[PERSONS]), flow.source(AUCTIONS, STREAMS[AUCTIONS])
    local = persons.where("local", "state IN ('OR', 'ID', 'CA')").select("people", "id", "name", "city", "state")
    tens = auctions.where("tens", "category = 10").select("offers", "seller AS id", "id AS auction")
    return tens.join("out", local, on=["id"])


def _q8(flow: nosync.Dataflow) -> nosync.Stage:
    persons, auctions = flow.source(PERSONS, STREAMS[PERSONS]), flow.source(AUCTIONS, STREAMS[AUCTIONS])
    new = persons.select("people", "id", "name", "ts - ts % 10 AS w")
    sellers = auctions.select("sales", "seller AS id", "ts - ts % 10 AS w").dedupe("sellers", key=["id", "w"])
    return new.join("out", sellers, on=["id", "w"])


def _q12(flow: nosync.Dataflow) -> nosync.Stage:
    bids = flow.source(BIDS, STREAMS[BIDS])
    return bids.select("windows", "bidder", "ts - ts % 10 AS w").aggregate("out", key=["bidder", "w"], n=nosync.count())


FLOWS: Mapping[str, Callable[[nosync.Dataflow], nosync.Stage]] = {"Q1": _q1, "Q3": _q3, "Q8": _q8, "Q12": _q12}


def _job(spark: SparkSession, query: Query, store: nosync.Store) -> nosync.Job:
    flow = nosync.Dataflow("nexmark")
    FLOWS[query.name](flow)
    return nosync.Job(flow, store, spark=spark, shards=SHARDS)


def _advanced(
    spark: SparkSession,
    root: Path,
    query: Query,
    store: nosync.Store,
    between: Callable[[int], object] = lambda t: None,
) -> tuple[nosync.Job, list[float]]:
    """`between` is called after each epoch, outside of what is timed."""
    job = _job(spark, query, store)
    seconds = []
    for t in range(len(list((root / query.streams[0]).iterdir()))):

        def epoch(t: int = t) -> None:
            job.advance(t, {name: _read(spark, root / name / f"{t:04}.parquet", name) for name in query.streams})

        seconds.append(timed(epoch))  # reading what comes in is part of it, as it is for the others
        between(t)
    return job, seconds


def _read(spark: SparkSession, path: Path, stream: str) -> DataFrame:
    return spark.read.schema(STREAMS[stream]).parquet(str(path))


def _nosync(spark: SparkSession, root: Path, query: Query) -> list[float]:
    with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
        _, seconds = _advanced(spark, root, query, store)
    return seconds


def _backfilled(spark: SparkSession, root: Path, query: Query) -> list[float]:
    """Returns what all epochs took in one call, reading and counting their rows included, shared among them."""
    with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
        began_s = time.perf_counter()
        report = _backfill(spark, root, query, store)[1]
        seconds = time.perf_counter() - began_s
    return [seconds / report.epochs] * report.epochs


def _backfill(
    spark: SparkSession, root: Path, query: Query, store: nosync.Store
) -> tuple[nosync.Job, nosync.BackfillReport]:
    job = _job(spark, query, store)
    inputs = {name: _read(spark, root / name, name) for name in query.streams}
    return job, job.backfill(inputs, epoch="CAST(left(_metadata.file_name, 4) AS INT)")


def _answer_of_nosync(spark: SparkSession, root: Path, query: Query, *, backfilled: bool = False) -> str:
    with tempfile.TemporaryDirectory(dir=root) as directory, nosync.open(Path(directory) / "store") as store:
        run = _backfill if backfilled else _advanced
        job: nosync.Job = run(spark, root, query, store)[0]
        return digest_of_rows(job.read("out").select(*query.names).collect())


# --- Structured Streaming ---------------------------------------------------------------------------------------------


def _streaming_rows(spark: SparkSession, root: Path, query: Query) -> DataFrame:
    for name in query.streams:
        files = spark.readStream.schema(STREAMS[name]).option("maxFilesPerTrigger", 1)
        files.parquet(str(root / name)).createOrReplaceTempView(name)
    if query.name != "Q8":
        return spark.sql(query.sql)
    # A DISTINCT before a join is there only as dropDuplicates.
    new = spark.sql("SELECT id, name, ts - ts % 10 AS w FROM persons")
    sellers = spark.sql("SELECT seller AS id, ts - ts % 10 AS w FROM auctions").dropDuplicates(["id", "w"])
    return new.join(sellers, ["id", "w"]).select("id", "name", "w")


def _structured_streaming(spark: SparkSession, root: Path, query: Query) -> list[float]:
    with conf_set(spark, {**STREAMING, CHANGELOG: "true"}), checkpoint_directory(root) as checkpoint:
        writer = _streaming_rows(spark, root, query).writeStream.format("noop")
        running = writer.outputMode("update" if query.key else "append").option("checkpointLocation", checkpoint)
        stream = running.trigger(availableNow=True).start()
        if not stream.awaitTermination(_PATIENCE_S):
            stream.stop()
            raise RuntimeError(f"Structured Streaming did not answer {query.name} within {_PATIENCE_S} s")
        return [p["durationMs"]["triggerExecution"] / 1000 for p in stream.recentProgress if p["numInputRows"]]


def _answer_of_spark(spark: SparkSession, root: Path, query: Query) -> str:
    rows: dict[tuple[object, ...], tuple[object, ...]] = {}

    def take(batch: DataFrame, t: int) -> None:
        for i, row in enumerate(batch.collect()):
            rows[tuple(row)[: query.key] if query.key else (t, i)] = tuple(row)

    with conf_set(spark, {**STREAMING, CHANGELOG: "true"}), checkpoint_directory(root) as checkpoint:
        writer = _streaming_rows(spark, root, query).writeStream.foreachBatch(take)
        running = writer.outputMode("update" if query.key else "append").option("checkpointLocation", checkpoint)
        running.trigger(availableNow=True).start().awaitTermination(_PATIENCE_S)
    return digest_of_rows(rows.values())


# --- Flink ------------------------------------------------------------------------------------------------------------


def _flink(root: Path, streams: Collection[str], queries: Sequence[Query], what: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Flink's version, and by query the rows of the answers, or the seconds that a long job takes more than a
    short one.
    """
    return run_flink(
        "flink_nexmark.py",
        {
            "csv": str(root / "csv"), "streams": {name: STREAMS[name] for name in streams},
            "queries": [asdict(query) for query in queries], **what,
        },
    )  # fmt: skip
