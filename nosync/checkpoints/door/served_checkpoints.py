"""The checkpoints behind a door. Each is opened at the first request for it, and stays open until the door closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nosync.checkpoints.door.elsewhere import SpreadFiles
from nosync.checkpoints.door.file_operations import FileOperations
from nosync.checkpoints.door.gate import PATIENCE_S, Gate, Held
from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.door.live_directory import UNFINISHED, prepare
from nosync.checkpoints.door.other_doors import OtherDoors, SpooledElsewhere
from nosync.checkpoints.door.places import Place
from nosync.checkpoints.door.remote_errors import denied, not_found, refused
from nosync.checkpoints.door.sending_on import SMALL_BYTES, SendingOn
from nosync.checkpoints.door.spool import Spool
from nosync.checkpoints.door.who_serves import FETCH_PATIENCE_S, RivalError, WhoServes
from nosync.checkpoints.generations import keeps_of
from nosync.checkpoints.keep import Keep, hold_going_on, open_generation
from nosync.checkpoints.names import METADATA, BatchFile, parse
from nosync.checkpoints.peers import fetch
from nosync.checkpoints.restore import remove_tree
from nosync.checkpoints.retention import kept_batches, set_kept_batches
from nosync.lsm.errors import NosyncError, StoreLockedError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import CHECKPOINT_LIVE
from nosync.lsm.platform.lock import DirectoryLock

log = logging.getLogger("nosync")

WRITING, SPOOL = ".writing", ".spool"
_POLL_S = 0.05
"""So often it is asked whether copies have come to other nodes: their coming wakes nobody here."""

LOST_AFTER_S = 10.0
"""How long a query that starts again waits for what another host has of a batch that was committed. Then it goes back."""
_LOOK_AGAIN_S = 0.5

Copies = Callable[[Keep, Collection[str]], int]
"""Returns, for files of a keep, the number of nodes that have the one that is on the fewest."""


@dataclass(frozen=True)
class DoorSettings:
    """What a door does. `nodes`: on how many nodes the files are that a strict answer needs; this one counts."""

    is_strict: bool = False
    nodes: int = 1
    patience_s: float = PATIENCE_S
    keep_batches: int | None = None
    """How many batches are kept; None: as many as before."""
    copies: Copies | None = None
    """Where it is None, the copy in the keep of this host is the only one."""
    small_bytes: int = SMALL_BYTES
    """Larger files stay where they were written until their batch is committed, if another door serves the checkpoint."""


class ServedCheckpoint:
    """One checkpoint that is open: its files, what takes them into the keep, and its gate in strict mode."""

    def __init__(
        self,
        data: Path,
        name: str,
        address: str,
        env: Env,
        settings: DoorSettings,
        changed: Callable[[], None],
        doors: OtherDoors | None = None,
    ) -> None:
        """`changed`: is called from another thread when files have become durable. `doors`: those of other hosts."""
        self._directory, self._env = data / CHECKPOINT_LIVE / name, env
        self._stopped = threading.Event()
        writing = data / CHECKPOINT_LIVE / WRITING
        spread: SpreadFiles | None = None
        if doors is not None:
            spread = SpreadFiles(self._directory, writing, env, self._publish, SpooledElsewhere(doors, name))
        self.files = spread or FileOperations(self._directory, writing, env, self._publish)
        fetch(data, name, FETCH_PATIENCE_S)
        before = _inode(self._directory)

        def prepared(keep: Keep) -> Keep:
            if spread is None:
                return prepare(keep, self._directory, address)
            spread.drop_torn()
            return prepare(keep, self._directory, address, is_shared=True, lacks=lambda: _lost(spread, env))

        self.keep, self._held = hold_going_on(open_generation(data, name, env), prepared)
        try:
            if settings.keep_batches is not None:
                set_kept_batches(self.keep, settings.keep_batches)
            self.intake = Intake(self._directory, self.keep, kept_batches(self.keep), changed, spread)
            self.intake.take_all()
        except BaseException:
            self._held.close()
            raise
        self.gate: Gate | None = None
        if settings.is_strict:
            self.gate = gate_of(self.keep, self.intake, env, settings)
        newest = self.keep.committed()
        self._commit = None if newest is None else f"commits/{newest}"
        self._went_back = newest is not None and before != _inode(self._directory)
        self._thread = threading.Thread(
            target=self.intake.run, args=(self._stopped,), name=f"nosync-door-{name}", daemon=True
        )
        self._thread.start()

    def can_go_on(self, path: str) -> bool:
        """Returns whether the checkpoint stays as it is when a path is asked for.

        It does not where somebody removed its directory; nor where a query starts, which first looks at `metadata`, and a
        part of the last batch is lost.
        """
        return self._directory.is_dir() and (path != METADATA or self.intake.lacks is None)

    def check_follows(self, path: str) -> None:
        """Raises RemoteError for an entry of a log that does not follow what the checkpoint went back to: a query that ran
        then, and runs on, would tear it. From the first entry on that follows, the query is one that began there.
        """
        file = parse(path)
        if not self._went_back or not isinstance(file, BatchFile):
            return
        is_next = file.log == "offsets" and (file.batch == self._next_batch() or self._has_offsets(file.batch))
        if is_next or (file.log == "commits" and self._has_offsets(file.batch)):
            self._went_back = False
            return
        raise refused(
            f"/{path} does not follow what is there: checkpoint {self.keep.name} went back to what is kept while this query "
            "ran. Start the query again, and it goes on from there"
        )

    def _has_offsets(self, t: int) -> bool:
        path = f"offsets/{t}"
        is_here = (self._directory / path).exists()
        return is_here or (isinstance(self.files, SpreadFiles) and self.files.is_elsewhere(path))

    def _next_batch(self) -> int:
        """Returns the batch that begins after the newest commit that is there."""
        commits = (parse(f"commits/{name}") for name in self._env.list_dir(self._directory / "commits"))
        return max((file.batch + 1 for file in commits if isinstance(file, BatchFile)), default=0)

    def _publish(self, path: str) -> None:
        if path.startswith("commits/") and isinstance(parse(path), BatchFile):
            self._commit = path
        self.intake.published(path)

    def hold(self, path: str) -> Held | None:
        """Holds the answer to who published a file; None where the answer is given at once."""
        if self.gate is None or not path.startswith("offsets/") or not isinstance(parse(path), BatchFile):
            return None
        return self.gate.hold([path] if self._commit is None else [path, self._commit])

    def is_kept(self) -> bool:
        """Returns whether something of the checkpoint is kept, or is about to be."""
        return bool(len(self.keep.index)) or self.intake.is_behind()

    def close(self) -> None:
        """Takes in what is there yet, and lets the checkpoint go."""
        self._stopped.set()
        self.intake.wake()
        self._thread.join()
        self._held.close()


def _lost(files: SpreadFiles, env: Env) -> str | None:
    """Returns which file of a batch that was committed is lost with another host; None where there is none."""
    end_s = env.monotonic_s() + LOST_AFTER_S
    while (
        path := next((path for path in sorted(files.all_elsewhere()) if files.is_committed(path)), None)
    ) is not None:
        try:
            files.bring(path, max(_LOOK_AGAIN_S, end_s - env.monotonic_s()))
        except NosyncError as error:
            if not files.is_needed(path):
                files.drop(path)
            elif env.monotonic_s() >= end_s:
                return f"{path}: {error}"
            else:
                env.wait_s(_LOOK_AGAIN_S)
    return None


def _inode(directory: Path) -> int | None:
    """Returns which directory has this name; None where there is none."""
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None


def gate_of(keep: Keep, intake: Intake, env: Env, settings: DoorSettings) -> Gate:
    """Returns the gate of a checkpoint, which begins with what is there."""
    elsewhere, said = settings.copies, ""

    def copies(paths: Sequence[str]) -> int:
        nonlocal said
        here = intake.copies(paths)
        if not here:
            return here
        try:
            needed = intake.all_of(paths)
            return here if elsewhere is None else elsewhere(keep, needed)
        except NosyncError as error:  # a batch that is not whole here is on no other node either
            if said != str(error):
                log.warning("checkpoint %s: strict mode does not count copies: %s", keep.name, error)
            said = str(error)
            return 0

    newest = [f"{log}/{batches[-1]}" for log in ("offsets", "commits") if (batches := keep.index.batches(log))]
    return Gate(keep.name, copies, env.monotonic_s, nodes=settings.nodes, patience_s=settings.patience_s, before=newest)


class ServedCheckpoints:
    """The checkpoints of a data directory. Its methods belong to the thread that answers requests, but for `close`."""

    def __init__(
        self, data: Path, address: str, env: Env, settings: DoorSettings, doors: OtherDoors | None = None
    ) -> None:
        """`address`: that of all checkpoints. `doors`: those of other hosts; None where there are none.

        Raises StoreLockedError where the directory has a door, StorageError.
        """
        self.doors = doors
        self.who = None if doors is None else WhoServes(data, env, doors, self.generation_of)
        self._data, self._address, self._env, self._settings = data, address, env, settings
        self._live = data / CHECKPOINT_LIVE
        with storage_errors("make", self._live):
            env.make_dirs(self._live)
        try:
            self._lock = DirectoryLock(self._live)
        except StoreLockedError as error:
            raise StoreLockedError(
                f"{data} has a door already, in another process or in this one ({self._live})"
            ) from error
        with storage_errors("empty", self._live / WRITING):
            for name in env.list_dir(self._live):
                if name == WRITING or (name.startswith(".") and name.endswith(UNFINISHED)):
                    remove_tree(self._live / name, env)
            env.make_dirs(self._live / WRITING)
        self.spool = Spool(self._live / SPOOL, self._live / WRITING, env)
        self.spool.remove_old()
        self.sending: SendingOn | None = None
        if doors is not None and self.who is not None:
            self.sending = SendingOn(doors, self.who, self.spool, settings.small_bytes)
        self._open: dict[str, ServedCheckpoint] = {}
        self._opening = asyncio.Lock()
        self._changed = asyncio.Event()

    async def of(self, place: Place, *, may_make: bool) -> ServedCheckpoint:
        """Returns the checkpoint of a place. `may_make`: a new one is made where none of this name is there.

        Raises RemoteError where there is none, NosyncError where it cannot be opened.
        """
        found = self._open.get(place.name)
        if found is not None and found.can_go_on(place.path):
            return found
        async with self._opening:
            found = self._open.get(place.name)
            if found is not None and not found.can_go_on(place.path):
                await self._let_go(place.name)
                found = None
            if found is None:
                if not may_make and place.name not in self.names():
                    raise not_found(str(place))
                found = self._open[place.name] = await asyncio.to_thread(
                    self._opened, place.name, asyncio.get_running_loop()
                )
        return found

    def _opened(self, name: str, loop: asyncio.AbstractEventLoop) -> ServedCheckpoint:
        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(self._wake)

        return ServedCheckpoint(
            self._data, name, f"{self._address}/{name}", self._env, self._settings, changed, self.doors
        )

    def generation_of(self, name: str) -> int | None:
        """Returns the generation of a checkpoint that is open here; None where it is not."""
        found = self._open.get(name)
        return None if found is None else found.keep.generation

    async def check_alone(self, name: str, path: str) -> None:
        """Raises RemoteError where a path is of offsets, and another door counts as the one that takes them."""
        if self.who is None or not path.startswith("offsets/") or not isinstance(parse(path), BatchFile):
            return
        try:
            await self.who.check_alone(name)
        except RivalError:
            async with self._opening:
                await self._let_go(name)
            raise

    def names(self) -> list[str]:
        """Returns the names of the checkpoints that are there, live or kept."""
        live = {name for name, is_directory in self._env.entries(self._live) if is_directory and name[0] != "."}
        return sorted(live | set(keeps_of(self._data, self._env)))

    def state(self, name: str) -> str | None:
        """Returns the state of a checkpoint's gate, or "async"; None where the checkpoint is not open."""
        found = self._open.get(name)
        if found is None:
            return None
        return "async" if found.gate is None else found.gate.state.value

    def problem(self, name: str) -> str | None:
        """Returns what keeps files of a checkpoint from being kept; None when all is well."""
        found = self._open.get(name)
        return None if found is None else found.intake.problem

    async def wait_at_gate(self, checkpoint: ServedCheckpoint, path: str) -> None:
        """Waits until the answer to who published a file may be given."""
        if checkpoint.gate is None:
            return
        # In a thread: on how many nodes files are is asked of the daemon, and requests go on meanwhile.
        held = await asyncio.to_thread(checkpoint.hold, path)
        while held is not None and not await asyncio.to_thread(checkpoint.gate.may_answer, held):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def forget(self, place: Place) -> None:
        """Removes a checkpoint's directory, which nothing is kept of. Raises RemoteError where something is."""
        async with self._opening:
            found = self._open.get(place.name)
            is_kept = found is not None and found.is_kept()
            if not is_kept:  # a checkpoint that stays is not closed under its query
                await self._let_go(place.name)
                is_kept = place.name in keeps_of(self._data, self._env) and bool(
                    len(open_generation(self._data, place.name, self._env).index)
                )
            if is_kept:
                raise denied(
                    f"checkpoint {place.name} is kept, and a query would go on from what is kept: take another name"
                )
            await asyncio.to_thread(remove_tree, self._live / place.name, self._env)

    async def _let_go(self, name: str) -> None:
        """Closes a checkpoint, if it is open. What a request that runs writes gets no name from here on."""
        found = self._open.pop(name, None)
        if found is not None:
            found.files.close()
            await asyncio.to_thread(found.close)

    def close(self) -> None:
        """Takes in what is there yet, and lets all checkpoints go. The requests have ended."""
        if self.sending is not None:
            self.sending.close()
        for found in self._open.values():
            found.close()
        self._open.clear()
        if self.doors is not None:
            self.doors.close()
        self._lock.release()
