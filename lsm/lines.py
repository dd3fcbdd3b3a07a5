"""The lines of a store as one process knows them: manifests, histories and origins by branch.

Reading needs no lock on the directory, so a read-only store has the same view as the node; only the node adds to it.
A branch's manifests are its own and, up to the fork, those of its parent: the same objects, so a branch costs a
dictionary and not a copy of anything on disk.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from nosync.lsm.branches import MAIN, Line, append, creation, read_refs
from nosync.lsm.directory import MANIFESTS
from nosync.lsm.env import Env, storage_errors
from nosync.lsm.errors import CorruptionError, InvalidInputError
from nosync.lsm.history import History
from nosync.lsm.layer import TraceId
from nosync.lsm.manifest import Histories, Manifest, read_manifests
from nosync.lsm.timestamp import Epoch, Time, end_of


class Lines:
    """Every line that is needed, with its manifests. `errors`: a CorruptionError for each damaged manifest."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._lock = threading.RLock()
        self.refs = read_refs(root, env)
        self.errors: list[CorruptionError] = []
        self._manifests: dict[str, dict[Epoch, Manifest]] = {}
        self._histories: dict[str, Histories] = {}
        self._origins: dict[TraceId, set[Time]] = {}
        self._sealed_until: dict[TraceId, Time] = {}
        for line in self.refs.lines.values():
            self._load(line)
        kept = self.refs.kept_until()
        for id in [*self._manifests]:
            if id not in kept:
                del self._manifests[id], self._histories[id]

    def _load(self, line: Line) -> None:
        own, errors = read_manifests(self._root, line.id, self._env)
        self.errors += errors
        self._begin(line)
        for manifest in own.values():
            self._learn(line.id, manifest)

    def _begin(self, line: Line) -> None:
        inherited: dict[Epoch, Manifest] = {}
        histories = Histories()
        if line.parent is not None and line.at is not None:
            parent = self._manifests.get(line.parent, {})
            inherited = {t: manifest for t, manifest in parent.items() if t <= line.at}
            histories = self._histories[line.parent].until(line.at) if line.parent in self._histories else histories
        self._manifests[line.id], self._histories[line.id] = inherited, histories

    def _learn(self, line: str, manifest: Manifest) -> None:
        self._manifests[line][manifest.t] = manifest
        self._histories[line].add(manifest)
        for entry in manifest.entries:
            trace = entry.id.trace
            self._origins.setdefault(trace, set()).add(entry.origin)
            self._sealed_until[trace] = max(self._sealed_until.get(trace, Time(0)), end_of(manifest.t))

    def refresh(self) -> tuple[list[Manifest], bool]:
        """Reads what other processes added: new manifests, in order, and whether the log of branches has new entries."""
        with self._lock:
            refs = read_refs(self._root, self._env)
            listed = {line: self._listed(line) for line in self._manifests}
            if refs.entries != self.refs.entries or any(self._is_another(*found) for found in listed.items()):
                known = {(m.line, t) for manifests in self._manifests.values() for t, m in manifests.items()}
                self.reload()
                found = {(m.line, t): m for manifests in self._manifests.values() for t, m in manifests.items()}
                return [m for at, m in sorted(found.items()) if at not in known], True
            learned = []
            for line, there in listed.items():
                learned += self._new_of(line, there)
            return learned, False

    def reload(self) -> None:
        """Reads everything again."""
        with self._lock:
            fresh = Lines(self._root, self._env)
            self.__dict__.update({k: v for k, v in fresh.__dict__.items() if k != "_lock"})

    def _listed(self, line: str) -> set[int]:
        names = self._env.list_dir(self._root / MANIFESTS / line)
        return {int(stem) for name in names if (stem := name.removesuffix(".json")).isdigit()}

    def _is_another(self, line: str, there: set[int]) -> bool:
        """Whether an epoch was added before those that are known, as another node's files come in any order, or the last went."""
        known = self._manifests[line]
        last = max(known, default=None)
        if last is None:
            return False
        return (known[last].line == line and last not in there) or any(
            t < last and Epoch(t) not in known for t in there
        )

    def _new_of(self, line: str, there: set[int]) -> list[Manifest]:
        """The manifests of a line that were added since, as far as they follow each other."""
        known = self._manifests[line]
        learned: list[Manifest] = []
        for t in sorted(there - known.keys()):
            if known and t != max(known) + 1:
                break  # what is between is still on its way
            path = self._root / MANIFESTS / line / f"{t}.json"
            try:
                with storage_errors("read", path):
                    manifest = Manifest.from_json(self._env.read(path), str(path))
            except CorruptionError as error:
                self.errors.append(error)
                break
            self._learn(line, manifest)
            learned.append(manifest)
        return learned

    # --- looking ----------------------------------------------------------------------------------------------------

    def line(self, branch: str = MAIN) -> Line:
        with self._lock:
            return self.refs.line_of(branch)

    def manifests(self, branch: str = MAIN) -> dict[Epoch, Manifest]:
        """By epoch, in order; those of the parent up to the fork included."""
        with self._lock:
            return dict(self._manifests[self.refs.line_of(branch).id])

    def of_line(self, line: str) -> dict[Epoch, Manifest]:
        """As `manifests`, of a line by its id; what is left of one that no branch is named for."""
        with self._lock:
            return self._manifests.get(line, {})

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        with self._lock:
            return self._manifests[self.refs.line_of(branch).id].get(Epoch(t))

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        """By stage, which fingerprint and number of shards wrote each stretch of the branch's sealed epochs."""
        with self._lock:
            return self._histories[self.refs.line_of(branch).id].all()

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        with self._lock:
            return next(reversed(self._manifests[self.refs.line_of(branch).id]), None)  # they are in order

    def expected(self, branch: str = MAIN) -> Epoch | None:
        """The next epoch to be sealed; None where any may come first."""
        last = self.last_sealed(branch)
        return None if last is None else Epoch(last + 1)

    def newest(self) -> list[Epoch]:
        """The last sealed epoch of each branch that has one."""
        return [last for name in self.refs.names if (last := self.last_sealed(name)) is not None]

    def origins(self, trace: TraceId) -> list[Time]:
        """Where the stretches of a trace begin, in order."""
        with self._lock:
            return sorted(self._origins.get(trace, ()))

    def first_origin(self, stage: str) -> Time | None:
        """Where the first trace of a stage begins."""
        with self._lock:
            return min((min(o) for trace, o in self._origins.items() if trace.stage == stage), default=None)

    def sealed_until(self, trace: TraceId) -> Time:
        """The end of the newest epoch whose manifest lists the trace; zero where none does."""
        with self._lock:
            return self._sealed_until.get(trace, Time(0))

    def left_at(self, trace: TraceId, origin: Time, reached: Time) -> Time | None:
        """Of the stretch of a trace that begins at `origin` and has reached `reached`: where the first of the branches that
        read it leaves it. Its history may not be compacted past that. None where none does.
        """
        with self._lock:
            ends = [
                span.upper
                for name in self.refs.names
                for span in self._histories[self.refs.line_of(name).id].of(trace.stage)
                if (span.fingerprint, span.shard_count, span.lower) == (trace.fingerprint, trace.shard.count, origin)
            ]
            return min((end for end in ends if end < reached), default=None)

    # --- changing (the node only) -----------------------------------------------------------------------------------

    def add(self, manifest: Manifest) -> None:
        """A manifest that was published."""
        with self._lock:
            self._learn(manifest.line, manifest)

    def create(self, name: str, parent: str, at: int, changed: Iterable[str]) -> Line:
        """A branch of `parent` at a sealed epoch. Durable when this returns."""
        with self._lock:
            line = self.refs.line_of(parent)
            if Epoch(at) not in self._manifests[line.id]:
                raise InvalidInputError(
                    f"cannot branch {parent} at {at}: it is not a sealed epoch; the newest is {self.last_sealed(parent)}"
                )
            entry = creation(self.refs, name, line.id, at, changed)
            self.refs = append(self._root, self.refs, entry, self._env)
            made = self.refs.lines[entry["line"]]
            self._begin(made)
            return made

    def promote(self, name: str, keep_as: str | None) -> None:
        """`main` is from now on the line of `name`; the line it was is kept under `keep_as`, or dropped."""
        with self._lock:
            self.refs.line_of(name)
            if name == MAIN:
                raise InvalidInputError("main is the main line already")
            if keep_as is not None and keep_as in self.refs.names and keep_as != name:
                raise InvalidInputError(f"branch {keep_as!r} exists already: keep the old line under another name")
            entry = {"do": "promote", "name": name, "keep_as": keep_as}
            self.refs = append(self._root, self.refs, entry, self._env)

    def delete(self, name: str) -> None:
        """Forgets the name. What its line has of its own goes with `prune`, unless another branch begins in it."""
        with self._lock:
            self.refs.line_of(name)
            if name == MAIN:
                raise InvalidInputError("main cannot be deleted; promote another branch, then delete the old line")
            self.refs = append(self._root, self.refs, {"do": "delete", "name": name}, self._env)

    def prune(self) -> dict[TraceId, Time]:
        """Removes the manifests that no branch needs. Returns the traces that lost some, each with the time up to which
        it is still listed.
        """
        with self._lock:
            kept = self.refs.kept_until()
            lost: set[TraceId] = set()
            for line in self.refs.lines:
                directory = self._root / MANIFESTS / line
                until = kept.get(line)
                if line in kept and until is None:
                    continue
                own, _ = read_manifests(self._root, line, self._env)
                gone = [m for t, m in own.items() if line not in kept or (until is not None and t > until)]
                lost |= {e.id.trace for m in gone for e in m.entries}
                with storage_errors("remove", directory):
                    for manifest in gone:
                        self._env.unlink(directory / manifest.name)
                    if line not in kept and directory.exists():
                        shutil.rmtree(directory)
                known = self._manifests.get(line, {})
                for manifest in gone:
                    known.pop(manifest.t, None)
                if line not in kept:
                    self._manifests.pop(line, None)
                    self._histories.pop(line, None)
            still: dict[TraceId, Time] = dict.fromkeys(lost, Time(0))
            for manifests in self._manifests.values():
                for manifest in manifests.values():
                    for entry in manifest.entries:
                        if entry.id.trace in still:
                            still[entry.id.trace] = max(still[entry.id.trace], end_of(manifest.t))
            self._sealed_until |= still
            return still
