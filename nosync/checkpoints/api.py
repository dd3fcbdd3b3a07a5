"""Kept checkpoints for people: what they are, what can be done with them, and following one beside its query."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nosync.checkpoints import peers
from nosync.checkpoints import rewind as rewinding
from nosync.checkpoints.closure import Closure
from nosync.checkpoints.file_sink import output_at
from nosync.checkpoints.follow import Follower, check_checkpoint, queries_of
from nosync.checkpoints.generations import directory_of, keeps_of
from nosync.checkpoints.keep import Keep, hold_going_on, open_generation, open_keep
from nosync.checkpoints.names import METADATA, Batch
from nosync.checkpoints.places import check_apart, data_directory, local_directory
from nosync.checkpoints.restore import Restored, check_target, fork, next_offsets, remove_tree, restore
from nosync.checkpoints.retention import (
    CheckpointPin,
    clean,
    kept_batches,
    pin,
    pins,
    set_kept_batches,
    unpin,
)
from nosync.checkpoints.state_diff import state_diff
from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError, StorageError, StoreLockedError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import CHECKPOINT_VIEWS
from nosync.lsm.visible import visible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class BatchStatus:
    """A batch that is kept. `why_not`: what it lacks to be gone on from; None when nothing."""

    batch: Batch
    why_not: str | None
    files: int
    size_bytes: int
    """The size of all that a query needs to go on after the batch."""
    pins: tuple[str, ...]
    copies: int | None = None
    """On how many nodes all of that is; None where it is not known, or the batch cannot be gone on from."""


@dataclass(frozen=True)
class CheckpointStatus:
    """What is kept of a checkpoint.

    `safe`: the newest batch of which all that a query needs is on `nodes` nodes. `newest`: the newest batch that a query
    can go on from with what is here. Each is None where there is no such batch.
    """

    name: str
    query: str | None
    committed: Batch | None
    newest: Batch | None
    safe: Batch | None
    nodes: int
    files: int
    size_bytes: int
    batches: tuple[BatchStatus, ...]
    problem: str | None = None
    """Why it is not known what is safe; None when it is."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"checkpoint {self.name}: committed {_or_none(self.committed)}, safe {_or_none(self.safe)}, {self.files} files"
        ]
        lines += [f"  {self.problem}"] if self.problem else []
        lines += [f"  batch {b.batch}: {b.why_not or 'can be gone on from'}" for b in self.batches]
        return "\n".join(map(visible, lines))

    __repr__ = __str__


def _or_none(t: Batch | None) -> str:
    return "none" if t is None else str(t)


class Checkpoint:
    """One kept checkpoint. See `nosync.checkpoint`."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return self._keep.name

    def status(self, last: int | None = None) -> CheckpointStatus:
        """Returns what is kept, and of each batch whether a query can go on from it. `last`: only so many batches."""
        keep, index = self._keep, self._keep.index
        batches = index.batches()
        named: dict[Batch, list[str]] = {}
        for one in pins(keep):
            named.setdefault(one.batch, []).append(one.name)
        nodes = peers.nodes_of(keep.data)
        shown = batches if last is None else batches[max(0, len(batches) - last) :]
        closures = {t: keep.closures.find(t) for t in shown}
        copies = _Copies(keep)
        if nodes > 1:  # of all at once: each question goes to the daemon
            copies.of({path for one in closures.values() if isinstance(one, Closure) for path in one.paths})
        found = []
        for t, closure in closures.items():
            why, paths = (closure, frozenset[str]()) if isinstance(closure, str) else (None, closure.paths)
            size = sum(index.size_bytes(path) or 0 for path in paths)
            on = 1 if nodes == 1 else copies.of(paths)
            found.append(BatchStatus(t, why, len(paths), size, tuple(named.get(t, ())), on if why is None else None))
        total = sum(index.size_bytes(path) or 0 for path in index.paths())
        newest = keep.safe()
        safe = newest if nodes == 1 else _newest_on(keep, copies, nodes)
        return CheckpointStatus(
            keep.name, self.query(), keep.committed(), newest, safe, nodes, len(index), total, tuple(found), copies.problem
        )  # fmt: skip

    def query(self) -> str | None:
        """Returns the id of the query that wrote the checkpoint; None where it is not kept."""
        try:
            return self._keep.closures.query()
        except (OSError, NosyncError):
            return None

    def restore(
        self,
        directory: str | os.PathLike[str],
        at: int | None = None,
        *,
        address: str | None = None,
        output: str | os.PathLike[str] | None = None,
    ) -> Restored:
        """Makes a directory from which the query goes on after batch `at`, by default the newest that is safe.

        `address`: what the query will call the directory, where that is not its path. `output`: where the query writes to;
        it is looked at for a log that would make the sink skip batches that run again with other rows: those that had been
        committed, and were not kept yet. Raises NotAvailableError where the batch cannot be gone on from, InvalidInputError
        where the directory is not empty, SinkRemembersError, StorageError.
        """
        self._bring()
        if output is not None:
            batch = self._keep.at(at)
            again = Batch(batch + 1) if next_offsets(self._keep, batch) else batch  # which reads the same rows again
            then = "restore without saying where it writes to"
            rewinding.check_sink(local_directory(output), again, self.query(), self._keep.env, then)
        check_target(self._keep, local_directory(directory))
        return restore(self._keep, local_directory(directory), at, address=address)

    def fork(
        self,
        directory: str | os.PathLike[str],
        at: int | None = None,
        *,
        name: str | None = None,
        address: str | None = None,
        output: str | os.PathLike[str] | None = None,
        new_output: str | os.PathLike[str] | None = None,
    ) -> Restored:
        """Makes a directory from which another query goes on after batch `at`, with an id of its own.

        `name`: keeps the fork under this name as well. Give it an output of its own: a sink takes the batches of another
        query for new ones. `output`, `new_output`: of a file sink (parquet, json, ...), where the first query writes to, and
        the directory for the fork, which is given what was there after the batch. Raises as `restore` does.
        """
        if name is not None and check_name(name, "checkpoint name") in keeps_of(self._keep.data, self._keep.env):
            raise InvalidInputError(f"checkpoint {name!r} is kept already: say another name")
        self._bring()
        if (output is None) != (new_output is None):
            raise InvalidInputError(
                "say both output= and new_output=: from where, and to where, a file sink's output goes"
            )
        path = local_directory(directory)
        check_target(self._keep, path)
        batch = self._keep.at(at)
        with self._output_at(output, new_output, batch):
            made = fork(self._keep, path, batch, address=address)
        if name is not None:
            keep = Keep(self._keep.data, name, self._keep.env)
            with keep.writing():
                follower = Follower(made.path, keep)
                follower.look()
            _check_whole(follower)
        return made

    def rewind(
        self,
        at: int,
        directory: str | os.PathLike[str],
        *,
        output: str | os.PathLike[str] | None = None,
        new_output: str | os.PathLike[str] | None = None,
        sink_rewound: bool = False,
        keep_as: str | None = None,
    ) -> tuple[Restored, str]:
        """Lets batch `at` be the newest, and makes a directory from which the query goes on after it.

        What came after is kept under another name, which is returned too. `output`: where the query writes to; it is
        looked at for a log that would make the sink skip batches that run again. `new_output`: of a file sink, a new directory
        for the query to write to, which is given what was in `output` after the batch. `sink_rewound`: the output was taken back
        already, or does not remember batches. Raises SinkRemembersError, and as `restore` does.
        """
        self._bring()
        batch = self._keep.at(at)
        if output is None and not sink_rewound:
            raise InvalidInputError(
                "say where the query writes to (output=), so that the sink can be looked at, or that it was rewound "
                "(sink_rewound=True): a sink that remembers batch ids skips those that run again, and their rows are lost"
            )
        if new_output is not None and output is None:
            raise InvalidInputError("say output= as well: from where the new output is made")
        if output is not None and new_output is None and not sink_rewound:
            rewinding.check_sink(local_directory(output), batch, self.query(), self._keep.env)
        path = local_directory(directory)
        check_target(self._keep, path)
        with self._writing(), self._output_at(output, new_output, batch):
            self._keep, kept = rewinding.rewind(self._keep, batch, keep_as=keep_as)
        try:
            return restore(self._keep, path, batch), kept
        except StorageError as error:
            raise StorageError(
                f"{error}. Checkpoint {self.name} is rewound, though: batch {batch} is the newest, and what came after is kept "
                f"as {kept!r}. Make the directory with nosync checkpoint restore {self.name} DIRECTORY --at {batch}"
            ) from error

    def _output_at(
        self, output: str | os.PathLike[str] | None, new_output: str | os.PathLike[str] | None, t: Batch
    ) -> AbstractContextManager[object]:
        """Makes what a file sink had after a batch, where both are said; it gets its name at the end of the `with`."""
        if output is None or new_output is None:
            return nullcontext()
        return output_at(local_directory(output), local_directory(new_output), t, self._keep.env)

    def at(self, batch: int) -> Restored:
        """Returns a directory of the checkpoint as of a batch, for Spark's `statestore` reader to read.

            spark.read.format("statestore").load(str(nosync.checkpoint("words").at(41).path))

        It is made when it is asked for the first time, of hard links, in the data directory.
        """
        if batch not in self._keep.index.batches():
            self._bring()
        t = self._keep.at(batch)
        generation = directory_of(self.name, self._keep.generation)
        directory = self._keep.data / CHECKPOINT_VIEWS / generation / str(t)
        if self._keep.env.exists(directory / METADATA):
            closure = self._keep.closures.of(t)
            if self._is_of(directory, closure):
                return Restored(directory, t, len(closure.paths), repeats_offsets=False)
            remove_tree(directory, self._keep.env)
        self._keep.env.make_dirs(directory.parent)
        return fork(self._keep, directory, t)

    def diff(self, spark: SparkSession, before: int, after: int, **options: str | int) -> DataFrame:
        """Returns what differs in the state between two batches: partition_id, key, change, before, after.

            nosync.checkpoint("words").diff(spark, 41, 42).show()

        `change` is insert, update or delete. `options`: of Spark's `statestore` reader (operatorId, storeName, joinSide,
        stateVarName, ...); with stateVarName of a map, and of timers, `key` says which entry it is of the key. Raises
        NotAvailableError where a batch cannot be gone on from, InvalidInputError where the session does not read such states.
        """
        said = {name: str(value) for name, value in options.items()}
        return state_diff(spark, self.at(before), self.at(after), said)

    def _is_of(self, directory: Path, closure: Closure) -> bool:
        """Returns whether a directory that was made of a batch is of what is kept now: that may have been replaced."""
        env, root = self._keep.env, self._keep.root
        linked = (
            path for path in closure.paths if path != METADATA and "/_metadata/v2/" not in path
        )  # others are made
        return not any(rewinding.is_other(directory / path, root / path, env) for path in linked)

    def pin(self, name: str, at: int | None = None) -> CheckpointPin:
        """Keeps a batch, by default the newest that is safe, for as long as the name is there."""
        return pin(self._current(), name, at)

    def pins(self) -> list[CheckpointPin]:
        """Returns the pins, by batch. Raises CorruptionError for a damaged one."""
        return pins(self._current())

    def unpin(self, name: str) -> None:
        """Takes a name back. Raises InvalidInputError where there is none."""
        unpin(self._current(), name)

    def clean(self, batches: int | None = None) -> int:
        """Removes what neither the last batches nor pinned ones need. Returns how many files went.

        `batches`: how many are kept from now on (default: as many as before). Raises StoreLockedError while the checkpoint
        is followed, for `watch` does the same by itself; InvalidInputError where a daemon keeps the directory, for it
        does it by itself on all nodes.
        """
        if peers.is_kept_by_daemon(self._keep.data):
            raise InvalidInputError(
                f"the daemon of {self._keep.data} removes by itself what is not needed, here and on its peers"
            )
        self._current()
        with self._writing():
            if batches is not None:
                set_kept_batches(self._keep, batches)
            return clean(self._keep)

    def _bring(self) -> None:
        """Has peers send what is not here, where there are any: a query is to start here, or to be looked at."""
        if peers.is_kept_by_daemon(self._keep.data):
            peers.fetch(self._keep.data, self.name)
        self._current()

    def _current(self) -> Keep:
        """Opens the generation that counts: another process may have rewound the checkpoint."""
        self._keep = open_generation(self._keep.data, self.name, self._keep.env)
        return self._keep

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the keep for changes. Raises StoreLockedError where another process does, or has just rewound it."""
        with self._keep.writing():
            if open_generation(self._keep.data, self.name, self._keep.env).generation != self._keep.generation:
                raise StoreLockedError(f"checkpoint {self.name} was rewound by another process just now: say it again")
            yield

    def __repr__(self) -> str:
        keep = self._keep
        return visible(
            f"Checkpoint({keep.name!r}, committed={_or_none(keep.committed())}, newest={_or_none(keep.safe())})"
        )


class _Copies:
    """Says on how many nodes files of a keep are. The daemon is asked of each file once."""

    def __init__(self, keep: Keep) -> None:
        self._keep, self._counted = keep, dict[str, int]()
        self.problem: str | None = None
        """Why it is not known; None when it is."""

    def of(self, paths: Collection[str]) -> int | None:
        """Returns on how many nodes all of these files are; None where it is not known, or there are none."""
        new = [path for path in paths if path not in self._counted]
        if new and self.problem is None:
            try:
                self._counted |= peers.copies_of(self._keep, new)
            except NosyncError as error:
                self.problem = f"it is not known what is safe: {error}"
        return None if self.problem else min((self._counted[path] for path in paths), default=None)


def _newest_on(keep: Keep, copies: _Copies, nodes: int) -> Batch | None:
    """Returns the newest batch of which all that a query needs is on so many nodes."""
    for t in reversed(keep.index.batches()):
        closure = keep.closures.find(t)
        if isinstance(closure, Closure) and (copies.of(closure.paths) or 0) >= nodes:
            return t
    return None


def _check_whole(follower: Follower) -> None:
    """Raises CorruptionError where files were left out that are damaged."""
    damage = follower.damage()
    if damage is not None:
        raise CorruptionError(damage)


def checkpoint(name: str, store: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Opens what is kept of a checkpoint. `store`: the data directory (default: $NOSYNC_DATA).

    Where a daemon keeps the directory and has nothing of the checkpoint, its peers are asked. Raises InvalidInputError
    where none of this name is kept.
    """
    data = data_directory(store)
    if peers.is_kept_by_daemon(data) and check_name(name, "checkpoint name") not in keeps_of(data, Env()):
        peers.fetch(data, name)
    return Checkpoint(open_keep(data, name, Env()))


def checkpoints(store: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the names of the checkpoints that a data directory keeps."""
    return keeps_of(data_directory(store), Env())


class Watch:
    """Follows a query's checkpoint in a thread of its own. Use it in `with`, or call `close`."""

    def __init__(self, source: Path, keep: Keep, keep_batches: int | None = None) -> None:
        keep, self._writing = hold_going_on(keep, lambda held: rewinding.going_on(source, held))
        self._keep = keep
        try:
            if keep_batches is not None:
                set_kept_batches(keep, keep_batches)
            self._batches, self._has_daemon = kept_batches(keep), peers.is_kept_by_daemon(keep.data)
        except BaseException:
            self._writing.close()
            raise
        self._follower = Follower(source, keep)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nosync-checkpoint-{keep.name}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """What keeps the newest batch from being kept; None when all is well."""
        return self._follower.problem

    @property
    def checkpoint(self) -> Checkpoint:
        """What is kept, as of now."""
        return checkpoint(self._keep.name, self._keep.data)

    def close(self) -> None:
        """Takes in what is there yet, and ends. Raises NosyncError where that cannot be, or something of it is damaged."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            with self._writing:
                self._follower.look()
            _check_whole(self._follower)

    def abandon(self) -> None:
        """Ends without taking in what is there yet: what the death of the process does."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            self._writing.close()

    def _run(self) -> None:
        self._follower.run(self._stopped, self._clean)

    def _clean(self, taken: list[str]) -> None:
        has_commit = any(path.startswith("commits/") for path in taken)
        if has_commit and not self._has_daemon and len(self._keep.index.batches()) > 2 * self._batches:
            clean(self._keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watch(
    path: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    keep_batches: int | None = None,
) -> Watch:
    """Keeps the checkpoint of a query that runs beside, from now on.

    `path`: the query's checkpointLocation, on a file system of this host; it need not be there yet. `name`: what it is
    kept as (default: the directory's name). `keep_batches`: so many batches stay (default: as many as before, which are 100 of
    a new one). Spark does not notice: nothing of this is on its way. Raises
    InvalidInputError where the name is that of another query's checkpoint, StoreLockedError where it is followed already.
    """
    source = local_directory(path)
    with storage_errors("read", source):
        is_there = source.exists() and (not source.is_dir() or any(source.iterdir()))
    if is_there:
        check_checkpoint(source)
    data = data_directory(store)
    check_apart(source, data)
    if name is None:
        name = check_name(source.name.lower(), "no name is said (name=, --name), and that of the directory,")
    keep = open_generation(data, name, Env())
    _check_same_query(source, keep)
    return Watch(source, keep, keep_batches)


def _check_same_query(source: Path, keep: Keep) -> None:
    """Raises InvalidInputError where a keep is that of another query: two must not be mixed."""
    for mine, theirs in queries_of(source, keep):
        if mine != theirs:
            raise InvalidInputError(
                f"checkpoint {keep.name!r} is kept of query {theirs}, and {source} is of query {mine}: say another name"
            )
