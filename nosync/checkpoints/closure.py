"""The files that a query needs to go on after a batch: a pure function of names, sizes and a few small files.

Invariants
- A batch can be gone on from if and only if every file of its closure is there, in the size that is known of it.
- The closure of a batch never changes: later files do not enter it, and none of it is ever needed less.

Steps, for batch `t`:
1. `metadata`, `commits/t`, `offsets/t`, and the offsets of the batch before, which Spark reads when it starts. A query
   without state that tracks its progress asynchronously leaves out offsets and commits of most batches: then those of the
   one before that has them.
2. Of each source the entries of its log up to the one that `offsets/t` names: from the newest compacted one on.
3. What operators say of themselves, as of the batch, and the schemas of states that they name.
4. Of each state store version `t + 1`, and the versions before it back to the newest one that has a whole base: a
   snapshot, or a zip file all of whose SST files are there; else back to version 1. With format v2 a changelog says
   from which snapshot on Spark goes, so an older base does not serve.
5. Beside each of these the checksum that Spark wrote (`<file>.crc`), where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nosync.checkpoints.index import FileIndex
from nosync.checkpoints.names import (
    CRC_SUFFIX,
    METADATA,
    Batch,
    BatchFile,
    Form,
    StateFile,
    StoreId,
    never_empty,
    parse,
)
from nosync.checkpoints.spark_files import (
    Commit,
    Offsets,
    Operator,
    PartFile,
    read_commit,
    read_lineage,
    read_offsets,
    read_operator,
    read_query,
    read_snapshot,
)
from nosync.lsm.errors import CorruptionError, NotAvailableError

Read = Callable[[str], bytes]
"""Returns the contents of a small file by its name, or the first bytes of any. Raises FileNotFoundError."""


@dataclass(frozen=True)
class Closure:
    """The files that a query needs to go on after `batch`."""

    batch: Batch
    paths: frozenset[str]


class IncompleteBatchError(NotAvailableError):
    """A batch cannot be gone on from: a file that it needs is not there, or not whole. Attributes: `batch`, `path`."""

    def __init__(self, batch: Batch, path: str, why: str) -> None:
        super().__init__(f"batch {batch} cannot be gone on from: {path} {why}")
        self.batch = batch
        self.path = path
        self.why = why


class Closures:
    """Finds closures over an index that grows. What small files say is read once: files never change."""

    def __init__(self, index: FileIndex, read: Read, head: Read) -> None:
        """`read`: reads a small file. `head`: reads the first HEAD_BYTES of a file of any size."""
        self._index, self._read, self._head = index, read, head
        self._lineages: dict[str, dict[int, str] | None] = {}
        self._commits: dict[Batch, Commit] = {}
        self._offsets: dict[Batch, Offsets] = {}
        self._parts: dict[str, list[PartFile]] = {}
        self._operators: dict[str, Operator] = {}
        self._query: str | None = None

    def of(self, t: Batch) -> Closure:
        """Returns the closure of a batch.

        Raises IncompleteBatchError naming the first file that is missing, and CorruptionError for a damaged one.
        """
        try:
            return Closure(t, frozenset(_Search(self, t).paths()))
        except FileNotFoundError as error:  # whoever removes what nobody needs is another process
            raise IncompleteBatchError(t, str(error.filename), "was removed just now") from None

    def find(self, t: Batch) -> Closure | str:
        """Returns the closure of a batch, or why it cannot be gone on from."""
        try:
            return self.of(t)
        except IncompleteBatchError as error:
            return f"{error.path} {error.why}"
        except CorruptionError as error:
            return str(error)

    def why_not(self, t: Batch) -> str | None:
        """Returns why a batch cannot be gone on from; None where it can."""
        found = self.find(t)
        return found if isinstance(found, str) else None

    def newest(self) -> Closure | None:
        """Returns the closure of the newest batch that can be gone on from; None where none can."""
        found = map(self.find, reversed(self._index.batches()))
        return next((one for one in found if isinstance(one, Closure)), None)

    @property
    def index(self) -> FileIndex:
        return self._index

    def forget(self, path: str) -> None:
        """Forgets what a file said, which is removed: another one may come under its name."""
        file = parse(path)
        if isinstance(file, BatchFile):
            (self._commits if file.log == "commits" else self._offsets).pop(file.batch, None)
        for said in (self._parts, self._lineages, self._operators):
            said.pop(path, None)
        if path == METADATA:
            self._query = None

    def query(self) -> str:
        """Returns the id of the query. Raises CorruptionError where the file that has it does not say it."""
        if self._query is None:
            self._query = read_query(self._read(METADATA), METADATA)
        return self._query

    def commit(self, t: Batch) -> Commit:
        """Returns what `commits/t` says."""
        if t not in self._commits:
            self._commits[t] = read_commit(self._read(path := f"commits/{t}"), path)
        return self._commits[t]

    def offsets(self, t: Batch) -> Offsets:
        """Returns what `offsets/t` says."""
        if t not in self._offsets:
            self._offsets[t] = read_offsets(self._read(path := f"offsets/{t}"), path)
        return self._offsets[t]

    def parts(self, path: str) -> list[PartFile]:
        """Returns the files that the zip file of a snapshot names."""
        if path not in self._parts:
            self._parts[path] = read_snapshot(self._read(path), path)
        return self._parts[path]

    def lineage(self, path: str) -> dict[int, str] | None:
        """Returns which files a changelog goes on from, by version; None where it does not say."""
        if path not in self._lineages:
            self._lineages[path] = read_lineage(self._head(path), path)
        return self._lineages[path]

    def operator(self, path: str, operator: int) -> Operator:
        """Returns what the metadata of an operator says."""
        if path not in self._operators:
            self._operators[path] = read_operator(self._read(path), path, operator)
        return self._operators[path]

    def begins_after(self, source: str, t: Batch) -> bool:
        """Returns whether a source is one of files that had none as of a batch: offsets of later ones name them."""
        for n in self.index.batches("offsets"):
            if n <= t:
                continue
            with contextlib.suppress(CorruptionError, FileNotFoundError):  # which that batch is told of
                if source in self.offsets(n).log_ends:
                    return True
        return False


class _Search:
    """The steps for one batch."""

    def __init__(self, closures: Closures, t: Batch) -> None:
        self._closures, self._t, self._index = closures, t, closures.index
        self._found: list[str] = []

    def paths(self) -> list[str]:
        """Returns the names of the closure, with those of checksums."""
        self._logs()
        self._sources()
        stores = self._operators()
        for store in sorted({*stores, *(s for s in self._index.stores() if self._has_begun(s))}):
            self._state(store)
        self._found += self._index.others()
        return [*self._found, *(crc for path in self._found if (crc := path + CRC_SUFFIX) in self._index)]

    def _has_begun(self, store: StoreId) -> bool:
        return any(version <= self._t + 1 for version in self._index.versions(store))

    def _must(self, path: str, size_bytes: int | None = None) -> None:
        """Takes a file into the closure. Raises IncompleteBatchError where it is not there in this size, and CorruptionError
        where it lost its contents.
        """
        found = self._index.size_bytes(path)
        if found is None:
            raise IncompleteBatchError(self._t, path, "is not there")
        if not found and never_empty(path):
            raise CorruptionError(f"{path}: is empty")
        if size_bytes is not None and found != size_bytes:
            raise IncompleteBatchError(self._t, path, f"has {found:,} bytes, and should have {size_bytes:,}")
        self._found.append(path)

    def _logs(self) -> None:
        self._must(METADATA)
        self._closures.query()
        self._must(f"commits/{self._t}")
        self._must(f"offsets/{self._t}")
        if self._t > 0:
            before = self._before()
            self._must(f"offsets/{before}")
            self._closures.offsets(before)  # Spark reads it when it starts

    def _before(self) -> Batch:
        """Returns the batch before, or the last one that has offsets where several were left out."""
        before = Batch(self._t - 1)
        has_state = any(map(self._index.versions, self._index.stores())) or any(self._index.operator_files())
        if has_state or f"offsets/{before}" in self._index or f"commits/{before}" in self._index:
            return before
        there = [n for n in self._index.batches("offsets") if n < self._t and f"commits/{n}" in self._index]
        return max(there, default=before)

    def _sources(self) -> None:
        ends = self._closures.offsets(self._t).log_ends
        for source in sorted({*self._index.sources(), *ends}):
            entries = self._index.source_log(source)
            if source not in ends:  # what a source wrote when it began
                self._found += () if self._closures.begins_after(source, self._t) else entries.values()
            elif ends[source] >= 0:
                self._log_of(source, ends[source])

    def _log_of(self, source: str, end: int) -> None:
        """Takes the entries of a file source's log that stand for all up to `end`."""
        entries = self._index.source_log(source)
        begin = max((n for n, is_compact in entries if is_compact and n <= end), default=None)
        if begin is not None:
            self._must(entries[begin, True])
        for number in range(0 if begin is None else begin + 1, end + 1):
            self._must(entries.get((number, False), f"sources/{source}/{number}"))

    def _operators(self) -> list[StoreId]:
        """Takes what operators say of themselves, and returns the stores that they name."""
        named: dict[int, Operator] = {}
        newest: dict[int, int] = {}
        for file in self._index.operator_files():
            if file.batch is not None and file.batch > self._t:
                continue  # of a later start, perhaps with other columns
            self._must(file.path)
            names_stores = file.path == f"state/{file.operator}/_metadata/metadata" or "/_metadata/v2/" in file.path
            since = -1 if file.batch is None else file.batch
            if names_stores and since <= self._t and since >= newest.get(file.operator, -1):
                newest[file.operator] = since
                named[file.operator] = self._closures.operator(file.path, file.operator)
        for path in {schema for one in named.values() for schema in one.schemas}.difference(self._found):
            self._must(path)
        return [store for one in named.values() for store in one.stores]

    def _state(self, store: StoreId) -> None:
        """Takes version `t + 1` of a store: from the newest whole base on."""
        versions = self._index.versions(store)
        lineage: dict[int, str] | None = None
        for version in range(self._t + 1, 0, -1):
            files = self._written(store, version, versions.get(version, ()), lineage)
            base = self._base(store, files)
            if base:
                self._take(base)
                return
            changes = [file.path for file in files if not file.form.is_base]
            is_first = bool(lineage) and version == min(lineage or ()) > 1
            if not changes or is_first:  # what Spark goes on from is a snapshot there
                raise IncompleteBatchError(self._t, *self._lacks(store, version, files))
            self._take(changes)
            if version == self._t + 1:
                lineage = self._closures.lineage(changes[0]) if files[0].form is Form.CHANGELOG else None

    def _written(
        self, store: StoreId, version: int, files: Iterable[StateFile], lineage: dict[int, str] | None
    ) -> list[StateFile]:
        """Returns the files of the attempt that counts: with format v2 the changelog, or the batch's commit, says which."""
        known = list(files)
        if lineage is not None and version in lineage:
            return [file for file in known if file.id == lineage[version]]
        commit = Batch(version - 1)
        if f"commits/{commit}" not in self._index:
            return known
        ids = self._closures.commit(commit).ids.get((store.operator, store.partition))
        return known if ids is None else [file for file in known if file.id is None or file.id in ids]

    def _base(self, store: StoreId, files: Sequence[StateFile]) -> list[str]:
        """Returns a base that is whole, with the files that it names; none where there is none."""
        for file in files:
            if file.form is Form.SNAPSHOT and self._index.size_bytes(file.path):
                return [file.path]
            if file.form is Form.ZIP and self._is_whole(store, file):
                return [file.path, *(f"{store.directory}/{part.name}" for part in self._closures.parts(file.path))]
        return []

    def _is_whole(self, store: StoreId, file: StateFile) -> bool:
        try:
            parts = self._closures.parts(file.path)
        except CorruptionError:
            return False
        return all(self._index.size_bytes(f"{store.directory}/{part.name}") == part.size_bytes for part in parts)

    def _lacks(self, store: StoreId, version: int, files: Sequence[StateFile]) -> tuple[str, str]:
        """Returns which file is missing of a version, and why it does not count."""
        for file in files:
            if file.form is not Form.ZIP:
                continue
            try:
                parts = self._closures.parts(file.path)
            except CorruptionError:
                return file.path, "is not a whole zip file"
            for part in parts:
                path = f"{store.directory}/{part.name}"
                found = self._index.size_bytes(path)
                if found is None:
                    return path, f"is not there, and {file.path} names it"
                if found != part.size_bytes:
                    return path, f"has {found:,} bytes, and should have {part.size_bytes:,}"
        what = "snapshot, from which the changelogs after it go on" if files else "file of the state's version"
        return f"{store.directory}/{version}", f"has no {what}"

    def _take(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._must(path)
