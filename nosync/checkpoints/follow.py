"""Following the checkpoint of a running query: what a commit covers is taken into the keep.

Nothing of this is on Spark's way. The follower looks at `commits/` alone, and when a new one is there it takes what
belongs to it by name; from time to time it lists all, for snapshots come later than their batches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from nosync.checkpoints.keep import Keep, files_below
from nosync.checkpoints.names import (
    CRC_SUFFIX,
    METADATA,
    Batch,
    BatchFile,
    SourceFile,
    StateFile,
    StoreId,
    StorePart,
    parse,
)
from nosync.checkpoints.rewind import other_of
from nosync.checkpoints.spark_files import read_commit, read_offsets, read_query
from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError
from nosync.lsm.platform.env import Identity, storage_errors
from nosync.lsm.platform.json_file import read_if_there

log = logging.getLogger("nosync")

LOOK_EVERY_S = 0.05
LIST_EVERY_S = 10.0
AGAIN_AFTER_S = 1.0
_MOST_LATER = 100
"""Of so many versions a snapshot is looked for after each commit; of older ones when all is listed."""
_DIRECTORIES = ("commits", "offsets", "sources", "state")
_OF_OPERATORS = ("_metadata", "_stateSchema")
_FORMS = ("delta", "changelog", "snapshot", "zip")


class Follower:
    """Follows one checkpoint into its keep. `look` does one step; `run` does steps until it is told to stop."""

    def __init__(self, source: Path, keep: Keep, *, list_every_s: float = LIST_EVERY_S) -> None:
        self._source, self._keep, self._list_every_s = source, keep, list_every_s
        self._listed_s: float | None = None
        self._last_seen: tuple[Batch, Identity | None] | None = None
        """The newest batch that is kept, and its commit in the checkpoint, when that was found to be what is kept."""
        self._left: str | None = None
        """Why the checkpoint is not the one any more that is kept. That stays, however far it runs on."""
        self._damaged: dict[str, str] = {}
        """Files that are damaged, and what was found of each. They are left out."""
        self.problem: str | None = None
        """What keeps the newest batch, or a file of it, from being kept; None when all is well."""

    def look(self) -> list[str]:
        """Takes in what is new, and returns its names. Raises NosyncError where something cannot be taken in."""
        env = self._keep.env
        if self._left is not None:
            raise CorruptionError(self._left)
        if self._listed_s is None:
            self._check_links()
        commits = self._commits()
        self._check_did_not_go_back(commits)
        new = [t for t in commits if f"commits/{t}" not in self._keep.index]
        is_due = self._listed_s is None or env.monotonic_s() - self._listed_s >= self._list_every_s
        if not new and not is_due:
            return []
        since = self._since()
        new = [t for t in new if t >= since]
        if not new and not is_due:
            return []
        self._check_query()
        for t in new:
            self._check_offsets(t)
        seen = (new[-1], self._identity_of(new[-1])) if new else self._last_seen
        taken: list[str] = []
        # The first time, and where batches came faster than they were looked at, all is listed.
        if is_due or len(new) > 1 or not self._keep.index.stores():
            last, index = max(commits, default=None), self._keep.index
            oldest = {source: min(n for n, _ in index.source_log(source)) for source in index.sources()}
            self._damaged = {}
            taken = self._keep.take(
                self._source, (path for path in self._listed() if self._is_of(path, last, since, oldest)), self._damaged
            )
            self._listed_s = env.monotonic_s()
        for t in new:
            try:
                names = self._names_of(t)
            except CorruptionError as error:  # what its commit or its offsets say is not known
                self._damaged[f"commits/{t}"] = str(error)
                continue
            taken += self._keep.take(self._source, names, self._damaged)
        self._last_seen = seen
        return taken

    def damage(self) -> str | None:
        """Returns what is damaged of the checkpoint; None where nothing is. Spark may never need it."""
        if not self._damaged:
            return None
        first, more = self._damaged[min(self._damaged)], len(self._damaged) - 1
        others = f" (and {more} more files are damaged)" if more else ""
        return f"{first}{others}. That is left out, with each batch that needs it; the others are kept"

    def _since(self) -> Batch:
        """Returns the first of the newest batches that are kept without a gap: what came before, and is not kept, was
        removed from the keep, and Spark has it still.
        """
        kept = self._keep.index.batches()
        since = max(kept, default=Batch(0))
        known = set(kept)
        while since - 1 in known:
            since = Batch(since - 1)
        return since

    def _check_query(self) -> None:
        """Raises CorruptionError where the directory has another query since it is followed."""
        for mine, theirs in queries_of(self._source, self._keep):
            if mine != theirs:
                self._refuse(
                    f"{self._source} is of query {mine} now, and checkpoint {self._keep.name!r} is kept of query {theirs}"
                )

    def _check_did_not_go_back(self, commits: list[Batch]) -> None:
        """Raises CorruptionError where the query was set back since it is followed, also where it has run on since: batches
        that ran again have commits of their own, and with other code they have other states.
        """
        kept = self._keep.committed()
        if kept is None or not commits:  # it is not there yet, or not any more
            return
        if max(commits) < kept:
            self._check_query()
            self._refuse(f"{self._source} has batches up to {max(commits)}, and up to {kept} are kept: it went back")
        seen = kept, self._identity_of(kept)
        if seen == self._last_seen:
            return
        other = other_of(self._source, self._keep, kept)
        if other is not None:
            self._check_query()
            self._refuse(
                f"{self._source / other} is not what is kept of batch {kept}, whose commit is kept: the query went back, and "
                "ran again"
            )
        self._last_seen = seen

    def _refuse(self, why: str) -> NoReturn:
        """Raises CorruptionError, now and in each look from now on."""
        self._left = f"{why}. End this, and watch {self._source} again, or keep it under another name"
        raise CorruptionError(self._left)

    def _identity_of(self, t: Batch) -> Identity | None:
        try:
            return self._keep.env.identity(self._source / f"commits/{t}")
        except FileNotFoundError:  # Spark removed it
            return None

    def _check_offsets(self, t: Batch) -> None:
        """Raises CorruptionError where batch `t` read something else than what is kept of it, from before it ran."""
        path = f"offsets/{t}"
        if path not in self._keep.index:
            return
        try:
            is_same = read_if_there(self._source / path, self._keep.env) == self._keep.read(path)
        except FileNotFoundError:  # Spark removed it
            return
        if not is_same:
            raise CorruptionError(
                f"{self._source / path}: is not what is kept of this batch, which was to run before: another query wrote it, "
                f"or it decided anew. End this, and watch {self._source} again"
            )

    def run(self, stopped: threading.Event, told: Callable[[list[str]], None] = lambda taken: None) -> None:
        """Looks until `stopped`. `told`: is given the names of what was taken in. An error is logged, and tried again."""
        while not stopped.is_set():
            try:
                taken = self.look()
                before, self.problem = self.problem, self.damage()
                if self.problem is not None and self.problem != before:
                    log.error("checkpoint %s: %s", self._keep.name, self.problem)
                if taken:
                    told(taken)
                elif self.problem is not None:
                    stopped.wait(AGAIN_AFTER_S)  # a damaged commit is new each time
            except NosyncError as error:
                if self.problem != str(error):
                    log.error("checkpoint %s: %s", self._keep.name, error)
                self.problem = str(error)
                stopped.wait(AGAIN_AFTER_S)
            except Exception as error:  # a defect of ours: whoever looks is told, and what can be kept is
                if self.problem != repr(error):
                    log.exception("checkpoint %s", self._keep.name)
                self.problem = repr(error)
                stopped.wait(AGAIN_AFTER_S)
            stopped.wait(LOOK_EVERY_S)

    def _commits(self) -> list[Batch]:
        with storage_errors("list", self._source / "commits"):
            names = self._keep.env.list_dir(self._source / "commits")
        return sorted(Batch(int(name)) for name in names if name.isascii() and name.isdigit())

    def _listed(self) -> list[str]:
        self._check_links()
        with storage_errors("list", self._source):
            return list(files_below(self._source, self._keep.env))

    def _check_links(self) -> None:
        """Raises InvalidInputError where a directory of the checkpoint is a link: Spark follows it, and what is behind it
        would be lacking.
        """
        state = self._source / "state"
        operators = state.iterdir() if state.is_dir() and not state.is_symlink() else ()
        with storage_errors("list", self._source):
            link = next(
                (one for one in (*map(self._source.joinpath, _DIRECTORIES), *operators) if one.is_symlink()), None
            )
        if link is not None:
            raise InvalidInputError(
                f"{link} is a link, and those are not followed: move the whole checkpoint, and say where it is"
            )

    def _is_of(self, path: str, last: Batch | None, since: Batch, oldest: Mapping[str, int]) -> bool:
        """Returns whether a file is finished once batch `last` is committed: of a batch that runs, states may change.

        A batch may be committed while all is listed. Its commit is not taken without its states: the next look takes both.
        What a snapshot of RocksDB names comes with it: Spark writes it in place. Batches before `since`, and entries of
        sources' logs before the `oldest`, were removed from the keep.
        """
        match parse(path.removesuffix(".crc")):
            case BatchFile(_, log, batch):
                return batch >= since and (log != "commits" or (last is not None and batch <= last))
            case StateFile() as file:
                return last is not None and since < file.version <= last + 1
            case SourceFile(_, source, number):
                return number >= oldest.get(source, 0)
            case StorePart():
                return False
            case _:
                return True

    def _names_of(self, t: Batch) -> list[str]:
        """Returns the names that the files of a batch can have; not all of them are there."""
        found = [f"commits/{t}", f"offsets/{t}", f"offsets/{t + 1}"]
        found += self._log_entries(t)
        if self._keep.env.exists(self._source / f"offsets/{t + 1}"):  # sources write their logs before it
            found += self._log_entries(Batch(t + 1))
        ids = read_commit(self._read(f"commits/{t}"), str(self._source / f"commits/{t}")).ids
        found += self._of_operators()
        for store in self._keep.index.stores():
            names = [f"{t + 1}_{id}" for id in sorted(ids.get((store.operator, store.partition), ()))] or [f"{t + 1}"]
            found += [f"{store.directory}/{name}.{form}" for name in names for form in _FORMS]
            found += self._later_bases(store)
        return [*found, *(f"{path}.crc" for path in found)]

    def _of_operators(self) -> list[str]:
        """Returns what operators say of themselves: a query that starts with other columns writes new files before its batch,
        under names that only a listing tells.
        """
        env, state = self._keep.env, self._source / "state"
        directories = (
            f"state/{operator}/{of_operator}"
            for operator, is_directory in env.entries(state)
            if is_directory
            for of_operator in _OF_OPERATORS
        )
        with storage_errors("list", state):
            return [
                path
                for one in directories
                for path in files_below(self._source, env, one)
                if not path.endswith(CRC_SUFFIX)
            ]

    def _later_bases(self, store: StoreId) -> list[str]:
        """Returns the names of bases that Spark may have made since, of versions after the newest one that is kept.

        They come after the commit of their batch. The next batch goes on from them, so they have to be here before its commit.
        """
        versions = self._keep.index.versions(store)
        newest = max((v for v, files in versions.items() if any(f.form.is_base for f in files)), default=0)
        later = [file for v in sorted(versions)[-_MOST_LATER:] if v > newest for file in versions[v]]
        return [f"{file.path.rpartition('.')[0]}.{form}" for file in later for form in ("zip", "snapshot")]

    def _log_entries(self, t: Batch) -> list[str]:
        """Returns the entries of sources' logs that the batch reads and that are not kept yet."""
        ends = read_offsets(self._read(f"offsets/{t}"), str(self._source / f"offsets/{t}")).log_ends
        found: list[str] = []
        for source, end in ends.items():
            kept = max((number for number, _ in self._keep.index.source_log(source) if number <= end), default=-1)
            for number in range(kept + 1, end + 1):
                found += [f"sources/{source}/{number}", f"sources/{source}/{number}.compact"]
        return found

    def _read(self, path: str) -> bytes:
        try:
            return read_if_there(self._source / path, self._keep.env)
        except FileNotFoundError as error:
            raise InvalidInputError(f"{self._source / path} is gone: somebody changed the checkpoint") from error


def queries_of(source: Path, keep: Keep) -> Iterator[tuple[str, str]]:
    """Yields the ids of the query in a directory and of that in a keep, if both have one."""
    try:
        mine = read_query((source / METADATA).read_bytes(), str(source / METADATA))
        yield mine, keep.closures.query()
    except (OSError, NosyncError):
        return


def check_checkpoint(source: Path) -> None:
    """Raises InvalidInputError where a directory is not the checkpoint of a query."""
    if not source.is_dir():
        raise InvalidInputError(f"{source} is no directory: say the query's checkpointLocation")
    if not (source / METADATA).is_file():
        raise InvalidInputError(f"{source} is not the checkpoint of a Structured Streaming query: it has no metadata")
