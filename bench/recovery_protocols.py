"""Textbook ways to survive a failure, on our own engine and the same work: how long each holds up, and how soon it is back.

An epoch looks 2,000 keys up and writes their new values. The *stall* is the time from having these values until the next
epoch may begin. What an engine without our layers would have to do besides is done here in the plainest way: a full
snapshot is an Arrow file, synced; a replay computes the epochs again.

| protocol | between two epochs | after a failure |
|---|---|---|
| nosync | write and link | list and map the files |
| coordinated, incremental | the same, and wait until it is durable | the same |
| coordinated, full | write the whole state, synced | load the newest snapshot |
| uncoordinated | every 10 epochs wait until all is durable | replay up to 10 epochs |
| passive standby | wait until a second node has it too | that node has it |
| active standby | a second computation of everything | it goes on |
| upstream backup | keep the input | replay all of it |
| gap | nothing | begin with nothing |

The node is a daemon of its own, as for Spark's tasks; one shard, one process that computes. Where a second node is slow, it is
stopped for nine tenths of the time, in short turns; hundreds of epochs with it slow and hundreds with it quick take turns, too.

Files are made while the next epoch waits, and how long that takes is the file system's: so ours is measured on an ext4 with a
journal as well, in a file, where we may mount one.

(Hwang et al., High-availability algorithms for distributed stream processing, ICDE 2005; Elnozahy et al., A survey of
rollback-recovery protocols in message-passing systems, 2002.)
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import nosync
from bench.harness import Result, Samples, timed
from bench.loopdisk import journaled_disk
from bench.spark_epochs import MEMORY_DIRECTORY
from nosync.testing.daemon_cluster import Daemons, eventually, running

ROWS = 2_000
LOAD_ROWS = 1_000_000
STATES = {"short": (10**5,), "normal": (10**5,), "full": (10**5, 10**6, 10**7)}
LARGER: dict[str, tuple[int, ...]] = {"short": (), "normal": (10**6, 10**7), "full": ()}
"""States of which ours is measured, and nothing on disk, but none of the others."""
TURNS = {"short": 1, "normal": 3, "full": 5}
"""Of ours and of nothing on disk: of 2,000 stalls two are above the p99.9, so one run says little."""
WARM_UP_EPOCHS = {"short": 500, "normal": 2000, "full": 2000}
"""That count for nothing: what is measured first would otherwise be measured on a machine that has been idle."""
CHECKPOINT_EPOCHS = 10
GOAL_S = 0.005
SLOW_TURN_S = 0.1
SLOW_TURNS = 5
STAGE = "sums"


class Work:
    """Runs epochs over a state of so many keys in a store."""

    def __init__(self, store: nosync.Store, keys: int) -> None:
        self.store, self.keys, self.t = store, keys, 0
        for first in range(0, keys, LOAD_ROWS):
            at = np.arange(first, min(keys, first + LOAD_ROWS))
            self.publish(pa.table({"k": at, "total": np.zeros(len(at), dtype=np.int64)}))
        self.store.compact()

    def compute(self, t: int) -> pa.Table:
        """Returns the new values of an epoch's keys."""
        keys = np.unique(np.random.default_rng(t).integers(0, self.keys, ROWS))
        old = self.store.lookup(STAGE, pa.table({"k": keys}), t - 1)
        return pa.table({"k": old.column("k"), "total": pc.add(old.column("total"), 1)})

    def publish(self, rows: pa.Table) -> None:
        self.store.append(STAGE, t=self.t, rows=rows, key=["k"])
        self.store.seal(self.t)
        self.t += 1

    def publish_and_wait(self, rows: pa.Table) -> None:
        """Publishes, and waits until as many nodes have it as should."""
        self.publish(rows)
        while (self.store.safe_point() or 0) < self.t - 1:
            time.sleep(0.001)

    def stalls(self, epochs: int, persist: Callable[[pa.Table], object]) -> Samples:
        seconds = []
        for _ in range(epochs):
            rows = self.compute(self.t)
            began = time.perf_counter()
            persist(rows)
            seconds.append(time.perf_counter() - began)
        return Samples(seconds)


def run(scale: str) -> Iterator[Result]:
    # Ours have a goal, for one epoch in a thousand.
    epochs, others = {"short": (1000, 200), "normal": (2000, 2000), "full": (3000, 3000)}[scale]
    _measured("nosync", STATES[scale][0], WARM_UP_EPOCHS[scale])
    for keys in STATES[scale]:
        measured = _by_turns(keys, epochs, TURNS[scale])
        measured |= {name: _measured(name, keys, others) for name in PROTOCOLS if name not in measured}
        nothing, mine = measured["gap"][0].percentile(99.9), measured["nosync"][1]
        for name, (stalls, recovery_s, what) in measured.items():
            p999 = stalls.percentile(99.9)
            is_ours = name == "nosync"
            yield Result(
                f"{keys:,} keys, stall p99.9", name, 1e3 * p999, "ms", "gap: the same, nothing on disk", 1e3 * nothing,
                p999 / nothing, f"<= {1e3 * GOAL_S:.0f} ms" if is_ours else "", p999 <= GOAL_S if is_ours else None,
                stalls.spread, len(stalls.seconds),
                {"p50_ms": 1e3 * stalls.median, "p99_ms": 1e3 * stalls.percentile(99)},
            )  # fmt: skip
            yield Result(
                f"{keys:,} keys, stall p50", name, 1e3 * stalls.median, "ms", "gap: the same, nothing on disk",
                1e3 * measured["gap"][0].median, stalls.median / measured["gap"][0].median, repeats=len(stalls.seconds),
            )  # fmt: skip
            yield Result(
                f"{keys:,} keys, state served again", f"{name} ({what})", 1e3 * recovery_s, "ms", "nosync", 1e3 * mine,
                recovery_s / mine,
            )  # fmt: skip
        yield from _beside_a_slow_node(keys, others)
        with journaled_disk() as disk:
            if disk is not None:
                yield from _ours_alone(f"{keys:,} keys, on an ext4 with a journal", keys, epochs, TURNS[scale], disk)
    for keys in LARGER[scale]:
        yield from _ours_alone(f"{keys:,} keys", keys, epochs, TURNS[scale])


def _by_turns(keys: int, epochs: int, turns: int, directory: Path = Path()) -> dict[str, Measured]:
    """Ours and nothing on disk, with the stalls of all turns."""
    found: dict[str, list[Measured]] = {"nosync": [], "gap": []}
    for _ in range(turns):
        for name, of_name in found.items():
            of_name.append(_measured(name, keys, epochs, directory))
    return {
        name: (
            Samples([seconds for stalls, _, _ in of_name for seconds in stalls.seconds]),
            Samples([recovery_s for _, recovery_s, _ in of_name]).median,
            of_name[0][2],
        )
        for name, of_name in found.items()
    }


def _ours_alone(workload: str, keys: int, epochs: int, turns: int, directory: Path = Path()) -> Iterator[Result]:
    (stalls, _, _), (beside, _, _) = _by_turns(keys, epochs, turns, directory).values()
    p999, nothing = 1e3 * stalls.percentile(99.9), 1e3 * beside.percentile(99.9)
    yield Result(
        f"{workload}, stall p99.9", "nosync", p999, "ms", "gap: the same, nothing on disk", nothing, p999 / nothing,
        f"<= {1e3 * GOAL_S:.0f} ms", p999 <= 1e3 * GOAL_S, stalls.spread, len(stalls.seconds),
    )  # fmt: skip
    yield Result(
        f"{workload}, stall p50", "nosync", 1e3 * stalls.median, "ms", "gap: the same, nothing on disk",
        1e3 * beside.median, stalls.median / beside.median, repeats=len(stalls.seconds),
    )  # fmt: skip


Measured = tuple[Samples, float, str]
"""Stalls, seconds until the state is served again, and what came back."""


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A directory that goes in the end; what merges for a daemon that was killed may write into it for another moment."""
    made = Path(tempfile.mkdtemp(dir=directory)).absolute()

    def is_gone() -> bool:
        shutil.rmtree(made, ignore_errors=True)
        return not made.exists()

    try:
        yield made
    finally:
        eventually(f"{made} is gone", is_gone)


def _measured(name: str, keys: int, epochs: int, directory: Path = Path()) -> Measured:
    with _scratch(directory) as disk, _scratch(MEMORY_DIRECTORY) as memory:
        return PROTOCOLS[name](disk, memory, keys, epochs)


@contextmanager
def kept_by_a_daemon(root: Path) -> Iterator[nosync.Store]:
    """The node is a process of its own, as it is for Spark's tasks."""
    with running(root, ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        yield store


def _served(path: Path, keys: int) -> float:
    """Returns the seconds until another process that knows nothing yet has looked 2,000 keys up."""

    def serve() -> None:
        with nosync.open(path, read_only=True) as other:
            found = other.lookup(STAGE, pa.table({"k": np.arange(0, keys, keys // ROWS)}))
            if found.num_rows < ROWS:
                raise RuntimeError("keys are missing")

    return timed(serve)


def _nosync(disk: Path, _: Path, keys: int, epochs: int) -> Measured:
    with kept_by_a_daemon(disk) as store:
        work = Work(store, keys)
        stalls = work.stalls(epochs, work.publish)
        return stalls, _served(disk / "n1", keys), "all of it"


def _incremental(disk: Path, _: Path, keys: int, epochs: int) -> Measured:
    with kept_by_a_daemon(disk) as store:
        work = Work(store, keys)

        def persist(rows: pa.Table) -> None:
            work.publish(rows)
            store.sync()

        return work.stalls(epochs, persist), _served(disk / "n1", keys), "all of it"


def _full(disk: Path, memory: Path, keys: int, epochs: int) -> Measured:
    snapshot = disk / "snapshot.arrow"
    with kept_by_a_daemon(memory) as store:
        work = Work(store, keys)

        def persist(rows: pa.Table) -> None:
            work.publish(rows)
            state = store.read(STAGE, work.t - 1)
            with open(disk / "new", "wb") as file, pa.ipc.new_file(file, state.schema) as writer:
                writer.write_table(state)
            descriptor = os.open(disk / "new", os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            (disk / "new").replace(snapshot)

        stalls = work.stalls(min(epochs, 100), persist)

    def load() -> None:
        with pa.memory_map(str(snapshot)) as file:
            state = pa.ipc.open_file(file).read_all()
        with nosync.open(memory / "restored") as restored:
            restored.append(STAGE, t=0, rows=state, key=["k"])

    return stalls, timed(load), "all of it"


def _uncoordinated(disk: Path, _: Path, keys: int, epochs: int) -> Measured:
    with kept_by_a_daemon(disk) as store:
        work = Work(store, keys)

        def persist(rows: pa.Table) -> None:
            work.publish(rows)
            if work.t % CHECKPOINT_EPOCHS == 0:
                store.sync()

        stalls = work.stalls(epochs, persist)

        def replay() -> None:
            for _ in range(CHECKPOINT_EPOCHS - 1):
                work.publish(work.compute(work.t))

        replay_s = timed(replay)
        return stalls, _served(disk / "n1", keys) + replay_s, f"{CHECKPOINT_EPOCHS - 1} epochs replayed"


def _passive(disk: Path, _: Path, keys: int, epochs: int) -> Measured:
    with running(disk, ("n1", "n2"), replicas=2) as daemons:
        with daemons.open("n1") as store:
            work = Work(store, keys)
            stalls = work.stalls(min(epochs, 100), work.publish_and_wait)
        daemons.kill("n1")
        return stalls, _served(daemons.data("n2"), keys), "all of it, on another node"


def _beside_a_slow_node(keys: int, epochs: int) -> Iterator[Result]:
    """Measures what a second node that is slow does to nosync, and to those who wait for it."""
    found: dict[tuple[str, bool], list[float]] = {}
    for engine, many in (("nosync", epochs // (2 * SLOW_TURNS)), ("passive standby", 10)):
        with (
            _scratch(Path()) as root,
            running(root, ("n1", "n2"), replicas=2) as daemons,
            daemons.open("n1") as store,
        ):
            work = Work(store, keys)
            persist = work.publish if engine == "nosync" else work.publish_and_wait
            for turn in range(2 * SLOW_TURNS):
                eventually("both have all of it", lambda work=work: work.store.safe_point() == work.t - 1)  # type: ignore[misc]
                is_slow = turn % 2 == 1
                with _slowed(daemons, "n2") if is_slow else nullcontext():
                    found.setdefault((engine, is_slow), []).extend(work.stalls(many, persist).seconds)
    for engine in ("nosync", "passive standby"):
        quick, slow = (Samples(found[engine, is_slow]) for is_slow in (False, True))
        ratio = slow.median / quick.median
        is_ours = engine == "nosync"
        yield Result(
            f"{keys:,} keys, a slow second node, stall p50", engine, 1e3 * slow.median, "ms",
            "the second node as quick as the first", 1e3 * quick.median, ratio, "<= 1.2" if is_ours else "",
            ratio <= 1.2 if is_ours else None, slow.spread, len(slow.seconds),
        )  # fmt: skip


@contextmanager
def _slowed(daemons: Daemons, node: str) -> Iterator[None]:
    """The node runs for a tenth of the time."""
    done = threading.Event()

    def slow() -> None:
        while not done.is_set():
            for number, share in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
                daemons.signal(node, number)
                time.sleep(share * SLOW_TURN_S)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _active(_: Path, memory: Path, keys: int, epochs: int) -> Measured:
    with kept_by_a_daemon(memory / "one") as store, kept_by_a_daemon(memory / "two") as second:
        work, other = Work(store, keys), Work(second, keys)

        def persist(rows: pa.Table) -> None:
            work.publish(rows)
            other.publish(other.compute(other.t))

        stalls = work.stalls(epochs, persist)
        return stalls, timed(lambda: other.compute(other.t)), "all of it, computed twice"


def _upstream(_: Path, memory: Path, keys: int, epochs: int) -> Measured:
    kept: list[int] = []
    with kept_by_a_daemon(memory) as store:
        work = Work(store, keys)

        def persist(rows: pa.Table) -> None:
            kept.append(work.t)
            work.publish(rows)

        stalls = work.stalls(epochs, persist)

    def replay() -> None:
        with kept_by_a_daemon(memory / "again") as again:
            redone = Work(again, keys)
            for _ in kept:
                redone.publish(redone.compute(redone.t))

    return stalls, timed(replay), f"{epochs:,} epochs replayed"


def _gap(_: Path, memory: Path, keys: int, epochs: int) -> Measured:
    with kept_by_a_daemon(memory) as store:
        work = Work(store, keys)
        stalls = work.stalls(epochs, work.publish)
    return stalls, timed(lambda: nosync.open(memory / "empty").close()), "all of it lost"


PROTOCOLS: dict[str, Callable[[Path, Path, int, int], Measured]] = {
    "nosync": _nosync,
    "coordinated, incremental": _incremental,
    "coordinated, full snapshots": _full,
    "uncoordinated": _uncoordinated,
    "passive standby": _passive,
    "active standby": _active,
    "upstream backup": _upstream,
    "gap": _gap,
}
