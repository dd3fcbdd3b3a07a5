"""Batches of an unchanged Structured Streaming query whose checkpoint is kept: what that costs, and how soon it is safe.

The same query runs by turns in one session. Its checkpoint is a local directory under either of Spark's two managers of
checkpoint files; one that is watched beside a daemon with a peer; or behind the door, async and strict. The default manager
forks a process for operations on `file:`, so the tuned one is the baseline.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import nosync
from bench.harness import Result, Samples, timed
from nosync.checkpoints.door.api import address_of
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running

ROWS, KEYS, PARTITIONS = 20_000, 50_021, 2
WARM_BATCHES = 5
MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
TUNED = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
STATE = "spark.sql.streaming.stateStore"
WORKLOAD = f"batch of {ROWS:,} rows, {KEYS:,} keys, {PARTITIONS} partitions"
BASELINE = "local, tuned manager"
PATIENCE_S = 300.0


def session() -> SparkSession:
    """Returns a session whose queries keep their state in RocksDB, by changelog and format v2."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", str(PARTITIONS))
        .config(f"{STATE}.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
        .config(f"{STATE}.checkpointFormatVersion", "2")
        .config(f"{STATE}.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def batches_ms(spark: SparkSession, location: str, batches: int) -> list[float]:
    """Runs a query, and returns how long each batch took but for the first ones."""
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    counted = rows.groupBy((F.col("value") % KEYS).alias("k")).count()
    query = counted.writeStream.outputMode("update").format("noop").option("checkpointLocation", location).start()
    try:
        last = WARM_BATCHES + batches

        def is_done() -> bool:
            if (error := query.exception()) is not None:
                raise error
            progress: Any = query.lastProgress
            return progress is not None and progress["batchId"] >= last

        eventually(f"{last} batches in {location}", is_done, PATIENCE_S)
        found: list[Any] = list(query.recentProgress)
    finally:
        query.stop()
    return [p["durationMs"]["triggerExecution"] for p in found if WARM_BATCHES < p["batchId"] <= last]


@dataclass
class Turn:
    """One way to keep a checkpoint. `processes`: those whose processor time counts."""

    name: str
    goal: float | None
    location: Callable[[int], str]
    manager: str = ""
    processes: list[int] = field(default_factory=list)
    beside: Callable[[int], contextlib.AbstractContextManager[object]] = lambda i: contextlib.nullcontext()
    rounds_ms: list[list[float]] = field(default_factory=list)
    cpu_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)


def run(scale: str) -> Iterator[Result]:
    rounds, batches = {"short": (3, 15), "normal": (5, 25), "full": (9, 40)}[scale]
    spark = session()
    try:
        with tempfile.TemporaryDirectory(dir=".") as temporary:
            root = Path(temporary).absolute()
            with running(root / "cluster", ("n1", "n2"), replicas=2) as daemons, _doors(root) as doors:
                turns = _turns(root, daemons, doors)
                spark.conf.set(MANAGER, TUNED)
                batches_ms(spark, f"file:{root}/warm", batches)
                for i in range(rounds):
                    for turn in turns if i % 2 else reversed(turns):
                        _take(spark, turn, i, batches)
                yield from _results(turns, rounds, batches)
                yield from _lag(spark, root, daemons)
            yield from _restore(root)
    finally:
        spark.stop()


# --- batches by turns -------------------------------------------------------------------------------------------------


def _turns(root: Path, daemons: Daemons, doors: dict[str, tuple[int, Callable[[str], str]]]) -> list[Turn]:
    local = [
        Turn(BASELINE, None, lambda i: f"file:{root}/tuned-{i}", TUNED),
        Turn("local, Spark's default manager", None, lambda i: f"file:{root}/default-{i}"),
        Turn(
            "watched, a daemon and its peer", 1.05, lambda i: f"file:{root}/watched-{i}", TUNED,
            [one.pid for one in daemons.processes.values()],
            lambda i: nosync.checkpoints.watch(root / f"watched-{i}", daemons.data("n1")),
        ),
    ]  # fmt: skip
    behind = [
        Turn(f"door, {mode}", 1.15, lambda i, address=address, mode=mode: address(f"{mode}-{i}"), "", [pid])  # type: ignore[misc]
        for mode, (pid, address) in doors.items()
    ]
    return local + behind


@contextlib.contextmanager
def _doors(root: Path) -> Iterator[dict[str, tuple[int, Callable[[str], str]]]]:
    """Opens a door of each mode in a process of its own. Returns its process and its address of a checkpoint."""
    processes = list[subprocess.Popen[bytes]]()
    found: dict[str, tuple[int, Callable[[str], str]]] = {}
    try:
        for mode, option in (("async", ()), ("strict", ("--strict",))):
            data, (port,) = root / f"door-{mode}", free_ports(1)
            command = [sys.executable, "-m", "nosync.cli", "checkpoint", "serve", "--store", str(data)]
            log = subprocess.DEVNULL
            process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}", *option], stdout=log, stderr=log)
            processes.append(process)

            address = partial(address_of, store=data)
            eventually("the door is open", partial(address, "x"))
            found[mode] = process.pid, address
        yield found
    finally:
        for process in processes:
            process.terminate()
            process.wait(timeout=60)


def _take(spark: SparkSession, turn: Turn, i: int, batches: int) -> None:
    if turn.manager:
        spark.conf.set(MANAGER, turn.manager)
    else:
        spark.conf.unset(MANAGER)
    before_s = _cpu_s(turn.processes)
    with turn.beside(i):
        turn.rounds_ms.append(batches_ms(spark, turn.location(i), batches))
    turn.cpu_s += _cpu_s(turn.processes) - before_s


def _cpu_s(processes: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in processes)


def _results(turns: list[Turn], rounds: int, batches: int) -> Iterator[Result]:
    base = turns[0]
    for turn in turns[1:]:
        ratios = Samples(
            [statistics.median(a) / statistics.median(b) for a, b in zip(turn.rounds_ms, base.rounds_ms, strict=True)]
        )
        goal = "" if turn.goal is None else f"<= {turn.goal}"
        yield Result(
            WORKLOAD, turn.name, _median(turn), "ms a batch", base.name, _median(base), ratios.median, goal,
            None if turn.goal is None else ratios.median <= turn.goal, ratios.spread, rounds * batches,
        )  # fmt: skip
        if turn.processes:
            done = rounds * (batches + WARM_BATCHES + 1)
            yield Result(WORKLOAD, turn.name, 1000 * turn.cpu_s / done, "ms of processor time a batch beside Spark")


def _median(turn: Turn) -> float:
    return statistics.median(ms for round_ms in turn.rounds_ms for ms in round_ms)


# --- how soon a batch is safe, and how long a restore takes -----------------------------------------------------------


def _lag(spark: SparkSession, root: Path, daemons: Daemons) -> Iterator[Result]:
    """Measures from a commit in Spark's directory until all of its batch is on two nodes."""
    directory, lags_s = root / "lag", list[float]()
    spark.conf.set(MANAGER, TUNED)
    with nosync.checkpoints.watch(directory, daemons.data("n1")) as watch:
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
        counted = rows.groupBy((F.col("value") % KEYS).alias("k")).count()
        writer = (
            counted.writeStream.outputMode("update").format("noop").option("checkpointLocation", f"file:{directory}")
        )
        query = writer.trigger(processingTime="1 second").start()
        try:
            for t in range(WARM_BATCHES + 20):
                eventually("the batch is committed", (directory / "commits" / str(t)).exists, PATIENCE_S)
                seen_s = time.perf_counter()
                eventually("it is safe", lambda t=t: (watch.checkpoint.status(last=0).safe or -1) >= t, PATIENCE_S)  # type: ignore[misc]
                if t >= WARM_BATCHES:
                    lags_s.append(time.perf_counter() - seen_s)
        finally:
            query.stop()
    found = Samples(lags_s)
    yield Result(
        f"{WORKLOAD}, one a second", "watched, a daemon and its peer", found.median, "s until a batch is safe, as status sees it",
        spread=found.spread, repeats=len(lags_s),
    )  # fmt: skip


def _restore(root: Path) -> Iterator[Result]:
    """Measures a restore of as many files that are small, and that are large: hard links cost the same."""
    found = {}
    for size_bytes in (1_000, 10_000_000):
        source, data = root / f"source-{size_bytes}", root / f"kept-{size_bytes}"
        _write_checkpoint(source, size_bytes)
        with nosync.checkpoints.watch(source, data, name="q"):
            pass
        kept, targets = nosync.checkpoint("q", data), [root / f"restored-{size_bytes}-{n}" for n in range(11)]
        found[size_bytes] = Samples([timed(partial(kept.restore, target)) for target in targets])
    small, large = found.values()
    yield Result(
        "restore a checkpoint of 64 files of state, 640 MB", "hard links", 1000 * large.median, "ms",
        "the same files of 64 kB together", 1000 * small.median, large.median / small.median, "<= 2",
        large.median <= 2 * small.median, large.spread, 11,
    )  # fmt: skip


def _write_checkpoint(root: Path, size_bytes: int) -> None:
    """Writes a checkpoint of one batch, with a snapshot of so many bytes for each of 64 partitions."""
    partitions = 64
    files: dict[str, bytes] = {
        "metadata": b'{"id":"4c0c1a0e-0000-4000-8000-000000000000"}',
        "offsets/0": b'v1\n{"conf":{"spark.sql.shuffle.partitions":"64"}}\n{"offset":1}',
        "commits/0": b"v1\n{}",
        "state/0/_metadata/metadata": b'v1\n{"stateStoreInfo":[{"storeName":"default","numPartitions":64}]}',
    }
    files |= {f"state/0/{p}/1.snapshot": b"x" * size_bytes for p in range(partitions)}
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
