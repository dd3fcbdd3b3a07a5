"""Copies in an object store under faults, from a seed: a real store, a bucket that misbehaves, and a clock of its own.

What must hold, whatever happens
- What was acknowledged as remotely safe is restored, with the rows that its writer sealed: after a crash, after a
  takeover, and by whoever acknowledged it.
- Whoever reads what a bucket holds finds all of it, if that, and how much listings are behind, takes less than the grace.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from nosync.lsm.errors import NosyncError, RemoteError
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.settings import StoreSettings
from nosync.lsm.store.opened import abandon
from nosync.lsm.store.opening import open_store
from nosync.lsm.store.store import Store
from nosync.replication.remote.bucket import MissingObjectError
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.hydration import Stubs
from nosync.replication.remote.level import RemoteLevel
from nosync.replication.remote.log import LogWriter
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.stub_env import StubEnv
from nosync.replication.remote.stubs import is_lazy
from nosync.replication.remote.view import RemoteView, read_view
from nosync.testing.simulated_bucket import MOST_LAG_S, Fault, Objects, SimulatedBucket

STEPS = 80
GRACE_S = 300.0
_STAGE = "s"
_SETTINGS = StoreSettings(background=False, grace_s=0.0, retry_s=0.0, archive_epochs=2, retain=2)


class SimulationError(AssertionError):
    """A promise was broken. Says by which seed, and what had happened."""


class World:
    """The time, the bucket, the chance of faults, and what happened."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.now_s = seed, np.random.default_rng(seed), 0.0
        self.objects, self.has_faults = Objects(now_s=lambda: self.now_s), True
        self.course: list[str] = []

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def fault(self, call: str, name: str) -> Fault:
        if not self.has_faults or name.startswith("probe/"):
            return ""
        return "before" if self.chance(0.02) else "after" if self.chance(0.02) else ""

    def bucket(self) -> SimulatedBucket:
        lag = lambda: int(self.random.integers(3)) if self.has_faults else 0  # noqa: E731
        return SimulatedBucket(self.objects, self.fault, list_lag=lag)

    def failed(self, why: str) -> SimulationError:
        return SimulationError(f"seed {self.seed}: {why}\n" + "\n".join(self.course))


class SimulatedTime(Env):
    """The clock of a simulated world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_s(self) -> float:
        return self._world.now_s

    def wait_s(self, seconds: float) -> None:
        self._world.now_s += seconds

    def sync_file(self, path: Path) -> None:
        """Nothing is lost here but by whole directories."""

    def sync_dir(self, path: Path) -> None:
        """Nothing is lost here but by whole directories."""


class _LazyTime(StubEnv, SimulatedTime):
    """The clock of a simulated world, and a directory that was restored lazily there."""

    def __init__(self, root: Path, world: World) -> None:
        SimulatedTime.__init__(self, world)
        StubEnv.__init__(self, root, world.bucket(), SimulatedTime(world))


@dataclass
class Writer:
    """A process that keeps a store and copies it, and what it sealed."""

    name: str
    root: Path
    rows: dict[int, dict[str, int]] = field(default_factory=dict)
    """By epoch, the state after it."""
    store: Store | None = None
    level: RemoteLevel | None = None


class RemoteSimulation:
    """One run. Make with a directory of its own and a seed."""

    level_class: type[RemoteLevel] = RemoteLevel
    writer_class: type[LogWriter] = LogWriter

    def __init__(self, directory: Path, seed: int) -> None:
        self.world, self._directory = World(seed), directory
        self._env = SimulatedTime(self.world)
        self._writers: list[Writer] = []
        self._acknowledged: list[tuple[str, int, dict[str, int]]] = []
        """By whom, up to which epoch, and the state then."""
        self._views: list[tuple[RemoteView, float]] = []
        self._restored = 0

    @property
    def _main(self) -> Writer:
        return self._writers[-1]

    def run(self) -> int:
        """Returns how many epochs were acknowledged. Raises SimulationError."""
        steps: list[tuple[Callable[[], None], int]] = [
            (self._seal, 10), (self._copy, 14), (self._merge, 8), (self._wait, 6), (self._crash, 1), (self._take_over, 1),
            (self._old_writer_goes_on, 3), (self._look, 6), (self._finish_looking, 3), (self._stranger, 1),
            (self._fetch_rest, 2),
        ]  # fmt: skip
        weights = np.array([weight for _, weight in steps], dtype=float)
        try:
            self._begin(Writer("w0", self._directory / "w0"))
            for _ in range(STEPS):
                step = steps[int(self.world.random.choice(len(steps), p=weights / weights.sum()))][0]
                self.world.course.append(step.__name__.strip("_"))
                step()
            self.world.has_faults = False
            self._check_restored()
        finally:
            for writer in self._writers:
                self._end(writer)
        return max((t + 1 for _, t, _ in self._acknowledged), default=0)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _begin(self, writer: Writer) -> None:
        writer.store = open_store(writer.root, settings=_SETTINGS, env=self._env_of(writer.root))
        assert isinstance(writer.store.node, Node)
        settings = RemoteSettings(
            "memory://simulated", flush_s=5.0, flush_bytes=4000, large_bytes=3500, grace_s=GRACE_S
        )
        writer.level = self.level_class(writer.store.node, settings, bucket=self.world.bucket())
        if writer not in self._writers:
            self._writers.append(writer)
        try:
            writer.level.begin_without_thread()
        except RemoteError as error:  # another one, which had not begun to write when this one did, has the log
            self.world.course.append(f"{writer.name} is refused: {error}")
            writer.level = None

    def _env_of(self, root: Path) -> Env:
        return _LazyTime(root, self.world) if is_lazy(root) else self._env

    def _end(self, writer: Writer) -> None:
        if writer.store is not None:
            with suppress(NosyncError):
                abandon(writer.store.node)  # type: ignore[arg-type]
            writer.store = writer.level = None

    def _crash(self) -> None:
        writer = self._main
        self._end(writer)
        self._begin(writer)

    def _take_over(self) -> None:
        """All of the main writer's host seems lost: another one is restored, and goes on. The old one may live on."""
        if len(self._writers) > 2:
            return
        name = f"w{len(self._writers)}"
        report = self._restore(name)
        if report is None:
            return
        t, rows = report
        new = Writer(name, self._directory / name, {t: rows} if t >= 0 else {})
        self._begin(new)
        for _ in range(3):  # or nothing of it has begun
            self._copy()

    def _old_writer_goes_on(self) -> None:
        if len(self._writers) > 1:
            writer = self._writers[int(self.world.random.integers(len(self._writers) - 1))]
            if writer.store is not None:
                self._seal_by(writer)
                self._copy_by(writer)

    # --- what a writer does ---------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        self._seal_by(self._main)

    def _seal_by(self, writer: Writer) -> None:
        store = writer.store
        assert store is not None, "it runs"
        last = store.last_sealed()
        t = 0 if last is None else last + 1
        many = 1 + 120 * int(self.world.chance(0.2))
        new = {f"{writer.name}-{t}-{i}": t for i in range(many)} | {"all": t, writer.name: t}
        store.append(_STAGE, t=t, rows=pa.table({"k": list(new), "n": list(new.values())}), key=["k"])
        store.seal(t)
        store.sync()
        writer.rows[t] = writer.rows.get(t - 1, {}) | new
        self.world.course.append(f"{writer.name} sealed {t}")

    def _merge(self) -> None:
        store = self._main.store
        assert store is not None, "it runs"
        if self.world.chance(0.3):
            with suppress(RemoteError):  # of a store that is restored lazily, and its bucket does not answer
                store.compact()
        else:
            store.node.merge_once()  # type: ignore[attr-defined]
        store.node.archive_manifests()  # type: ignore[attr-defined]
        store.sync()

    def _fetch_rest(self) -> None:
        """A writer that was restored lazily fetches what it lacks."""
        store, root = self._main.store, self._main.root
        assert store is not None, "it runs"
        if is_lazy(root):
            stubs = Stubs(root, self.world.bucket(), self._env, lambda name: store.node.note([name.layer]))  # type: ignore[list-item]
            with suppress(RemoteError):
                stubs.fetch_all()
                stubs.finish()
                self.world.course.append(f"{self._main.name} has all")

    def _wait(self) -> None:
        self.world.now_s += 1.2 * GRACE_S if self.world.chance(0.15) else float(self.world.random.uniform(5.0, 60.0))

    def _copy(self) -> None:
        self._copy_by(self._main)

    def _copy_by(self, writer: Writer) -> None:
        level = writer.level
        self.world.now_s += 6.0
        if level is None:
            return
        level.step_now()
        status = level.status()
        self.world.course.append(f"{writer.name} copied up to {status.safe_point} {status.problem}")
        if status.safe_point is not None:
            rows = writer.rows.get(status.safe_point)
            if rows is not None and (writer.name, status.safe_point, rows) not in self._acknowledged:
                self._acknowledged.append((writer.name, status.safe_point, rows))

    def _stranger(self) -> None:
        """Somebody puts an object where the next pack goes."""
        level = self._main.level
        name = None if level is None else level.next_pack()
        if name is not None and name not in self.world.objects.by_name:
            self.world.objects.by_name[name] = b"of somebody else"

    # --- who reads ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        with suppress(RemoteError):
            self._views.append((read_view(self.world.bucket()), self.world.now_s))

    def _finish_looking(self) -> None:
        """A reader that knew what there was fetches it now."""
        views, self._views = self._views, []
        for view, when_s in views:
            if self.world.now_s - when_s >= GRACE_S - MOST_LAG_S:  # what it listed may be so much older
                continue
            try:
                fetcher = Fetcher(SimulatedBucket(self.world.objects))
                fetch_all(fetcher, view.files.values(), lambda placed, data: None)
            except MissingObjectError as error:
                raise self.world.failed(f"a reader of {self.world.now_s - when_s:.0f} s ago lacks: {error}") from error

    def _restore(self, name: str) -> tuple[int, dict[str, int]] | None:
        """Restores a directory, and returns its newest epoch and the state then. None: the bucket did not answer."""
        target = self._directory / name
        shutil.rmtree(target, ignore_errors=True)
        for _ in range(20):
            try:
                report = restore(self.world.bucket(), target, env=self._env, lazy=self.world.chance(0.5))
                with open_store(target, read_only=True, env=self._env_of(target)) as store:
                    if report.epoch is None:
                        return -1, {}
                    rows = store.read(_STAGE)
                    return report.epoch, dict(zip(rows["k"].to_pylist(), rows["n"].to_pylist(), strict=True))
            except RemoteError as error:
                self.world.course.append(f"not restored: {error}")
                shutil.rmtree(target, ignore_errors=True)
        return None

    def _check_restored(self) -> None:
        """All that was acknowledged is there, or was gone on from."""
        if not self._acknowledged:
            return
        self._restored += 1
        found = self._restore(f"restored{self._restored}")
        if found is None:
            raise self.world.failed("cannot be restored")
        t, rows = found
        for writer, safe, state in self._acknowledged:
            if t < safe:
                raise self.world.failed(f"{writer} acknowledged epoch {safe}, restored is {t}")
            lacking = state.keys() - rows.keys()
            if lacking:
                raise self.world.failed(
                    f"{writer} acknowledged epoch {safe}; restored epoch {t} lacks {sorted(lacking)[:3]}"
                )
        newest = max(self._acknowledged, key=lambda one: one[1])
        if newest[1] == t and newest[2] != rows:
            raise self.world.failed(f"epoch {t} is restored with other rows than {newest[0]} acknowledged")
