"""Files of a checkpoint that are on the host where they were written, and not here yet.

The door that serves a checkpoint knows the name of every file. Of a state that a task of another host wrote it has the
name and this: on which node the contents are, and under which token. They come when their batch is committed, or when
somebody reads them.

Invariants
- A token stands for one file that is never written again. So what comes is what had the name when it was given.
- A file that is elsewhere has its name in one of two trees: below `.door/elsewhere` while its contents are elsewhere, and
  in the live directory from then on. Where a crash leaves both, the former counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from blake3 import blake3

from nosync.checkpoints.door.file_operations import (
    FileOperations,
    file_status,
)
from nosync.checkpoints.door.live_directory import DOOR
from nosync.checkpoints.door.remote_errors import already_exists, not_empty, not_found
from nosync.checkpoints.names import CRC_SUFFIX, Form, StateFile, StorePart, is_kept, parse
from nosync.checkpoints.restore import remove_tree
from nosync.checkpoints.spark_files import read_commit, read_snapshot
from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there, seal_json, unseal_json
from nosync.lsm.platform.parsing import parsed

log = logging.getLogger("nosync")

ELSEWHERE = "elsewhere"
PATIENCE_S = 50.0
"""How long the contents of a file that a query reads are waited for, beside the time that they take. Spark waits for 60
seconds.
"""


@dataclass(frozen=True)
class Reference:
    """Says where the contents of a file are, and what they are. `digest`: BLAKE3, hexadecimal."""

    node: str
    token: str
    size_bytes: int
    digest: str


class Target(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes, /) -> object: ...


class Source(Protocol):
    """The hosts where contents are."""

    def fetch(self, reference: Reference, target: Target, patience_s: float) -> None:
        """Writes the contents into a file, which has time by its size beside `patience_s`.

        Raises ReplicationError where they are not to be had at the moment.
        """

    def release(self, reference: Reference) -> None:
        """Says that the contents are not needed there any more. Raises ReplicationError."""


class SpreadFiles(FileOperations):
    """The files of a checkpoint, some of which are elsewhere. See FileOperations.

    A lock is held while a name changes, for files come in another thread.
    """

    def __init__(self, root: Path, writing: Path, env: Env, published: Callable[[str], None], source: Source) -> None:
        super().__init__(root, writing, env, published)
        self._elsewhere, self._source = root / DOOR / ELSEWHERE, source
        self._changing = threading.RLock()
        self._released: list[Reference] = []

    # --- what is elsewhere --------------------------------------------------------------------------------------------

    def reference(self, path: str) -> Reference | None:
        """Returns where a file is; None where it is here, or nowhere. Raises CorruptionError, StorageError."""
        if not self.is_elsewhere(path):
            return None
        where = self._elsewhere / path
        try:
            fields, _ = unseal_json(read_if_there(where, self._env), str(where))
        except FileNotFoundError:  # it has come just now
            return None
        with parsed("where a file of a checkpoint is", str(where)):
            return Reference(fields["node"], fields["token"], int(fields["size_bytes"]), fields["digest"])

    def is_elsewhere(self, path: str) -> bool:
        """Returns whether the contents of a file are on another host."""
        return bool(path) and (self._elsewhere / path).is_file()

    def all_elsewhere(self, below: str = "") -> Iterator[str]:
        """Yields the names of all files below a directory that are elsewhere."""
        for directory, _, names in os.walk(self._elsewhere / below):
            yield from (str((Path(directory) / name).relative_to(self._elsewhere)) for name in names)

    def drop_torn(self) -> None:
        """Drops the names of files of which a power cut left nothing that says where they are. What was committed stays,
        for then the query has to be told.
        """
        for path in list(self.all_elsewhere()):
            try:
                self.reference(path)
            except CorruptionError as error:
                if not (self.is_committed(path) and self.is_needed(path)):
                    log.warning("%s: is dropped, no batch that was committed needs it: %s", path, error)
                    self.drop(path)

    def refer(self, path: str, reference: Reference, *, may_overwrite: bool) -> None:
        """Gives a name to a file that is elsewhere. Raises RemoteError as `create` does."""
        with self._changing:
            self._check_open()
            self._check_new(path, may_overwrite=may_overwrite)
            before = self.reference(path)
            with storage_errors("make", self._root / path):
                self._env.make_dirs((self._root / path).parent)
                where = self._elsewhere / path
                self._env.make_dirs(where.parent)
                making = self._writing / self._env.token()
                with self._env.create(making) as file:
                    file.write(seal_json(asdict(reference)))
                self._env.replace(making, where)
                self._env.unlink(self._root / path)
            if before is not None:
                self._released.append(before)
        self._published(path)

    def bring(self, path: str, patience_s: float = PATIENCE_S) -> None:
        """Has the contents of a file come here, where they are elsewhere. It may be long: not for the door's own thread.

        They have time by their size beside `patience_s`.

        Raises ReplicationError where they are not to be had, CorruptionError where they are others, StorageError.
        """
        reference = self.reference(path)
        if reference is None:
            return
        part, target = self._writing / self._env.token(), self._root / path
        try:
            with storage_errors("write", part), self._env.create(part) as file:
                hashed = Hashed(file)
                self._source.fetch(reference, hashed, patience_s)
            if hashed.digest() != reference.digest:
                raise CorruptionError(
                    f"{path}: came from {reference.node} with digest {hashed.digest()[:16]}, not {reference.digest[:16]}"
                )
            with self._changing, storage_errors("write", target):
                if self.reference(path) == reference:  # else it has other contents by now, or is gone
                    self._env.make_dirs(target.parent)
                    self._env.replace(part, target)
                    self._forget(path)
        finally:
            self._env.unlink(part)

    def is_committed(self, path: str) -> bool:
        """Returns whether a file belongs to a batch whose commit is here: then it is not written again."""
        if not is_kept(path):
            return False
        file = parse(path.removesuffix(CRC_SUFFIX))
        if isinstance(file, StorePart):
            return any(file.path in names for names in self._named_in(file.store.directory))
        return not isinstance(file, StateFile) or self._env.exists(self._root / f"commits/{file.version - 1}")

    def _named_in(self, directory: str) -> Iterator[set[str]]:
        """Yields what each committed snapshot of a store names, of those that are here."""
        for name, is_directory in self._env.entries(self._root / directory):
            path = f"{directory}/{name}"
            if not is_directory and name.endswith(f".{Form.ZIP.value}") and self.is_committed(path):
                with contextlib.suppress(FileNotFoundError, CorruptionError):
                    parts = read_snapshot(read_if_there(self._root / path, self._env), path)
                    yield {f"{directory}/{part.name}" for part in parts}

    def is_needed(self, path: str) -> bool:
        """Returns whether a query cannot do without a file that is lost with another host.

        It can do without the state that an attempt wrote which the commit does not name, and without a snapshot of a version
        whose changes are here.
        """
        file = parse(path.removesuffix(CRC_SUFFIX))
        if not isinstance(file, StateFile):
            return True
        commit = f"commits/{file.version - 1}"
        if file.id is not None:
            with contextlib.suppress(FileNotFoundError):
                ids = read_commit(read_if_there(self._root / commit, self._env), commit).ids
                if file.id not in ids.get((file.store.operator, file.store.partition), (file.id,)):
                    return False
        stem = path.removesuffix(CRC_SUFFIX).rpartition(".")[0]
        changes = [f"{stem}.{form.value}" for form in Form if not form.is_base]
        return not (file.form.is_base and any(self._env.exists(self._root / change) for change in changes))

    def drop(self, path: str) -> None:
        """Removes the name of a file that is elsewhere."""
        with self._changing:
            self._forget(path)

    def release_all(self) -> None:
        """Tells hosts what is not needed there any more. A host that is away is told the next time."""
        with self._changing:
            released, self._released = self._released, []
        away = set[str]()
        for reference in released:
            try:
                if reference.node not in away:
                    self._source.release(reference)
                    continue
            except NosyncError as error:
                log.debug("%s keeps %s for now: %s", reference.node, reference.token, error)
                away.add(reference.node)  # each further call would wait as long
            with self._changing:
                self._released.append(reference)

    def _forget(self, path: str) -> None:
        """The name stands for what is elsewhere no more."""
        if not self.is_elsewhere(path):
            return
        with contextlib.suppress(CorruptionError):  # of what is torn nobody knows where it is; a spool drops it one day
            if (reference := self.reference(path)) is not None:
                self._released.append(reference)
        self._env.unlink(self._elsewhere / path)

    # --- what the query does --------------------------------------------------------------------------------------------

    def status(self, path: str) -> dict[str, Any]:
        """See FileOperations."""
        found = self._status_elsewhere(path) if path else None
        return super().status(path) if found is None else found

    def _status_elsewhere(self, path: str, name: str = "") -> dict[str, Any] | None:
        reference = self.reference(path)
        if reference is None:
            return None
        try:
            found = os.lstat(self._elsewhere / path)
        except FileNotFoundError:  # it has come just now
            return None
        return file_status(reference.size_bytes, found, name)

    def list(self, path: str) -> list[dict[str, Any]]:
        """See FileOperations."""
        if path and (found := self._status_elsewhere(path)) is not None:
            return [found]
        # Names come here and never go there by themselves: so what is elsewhere is looked at first.
        there = {}
        for name, is_directory in self._env.entries(self._elsewhere / path):
            if not is_directory and (status := self._status_elsewhere(f"{path}/{name}".lstrip("/"), name)) is not None:
                there[name] = status
        here = {status["pathSuffix"]: status for status in super().list(path)}
        return [found for _, found in sorted({**here, **there}.items())]

    def delete(self, path: str, *, is_recursive: bool) -> bool:
        """See FileOperations."""
        with self._changing:
            if self.is_elsewhere(path):
                self._forget(path)
                super().delete(path, is_recursive=False)
                return True
            there = self._elsewhere / path
            is_tree = bool(path) and there.is_dir()
            below = list(self.all_elsewhere(path)) if is_tree else []
            if below and not is_recursive:
                raise not_empty(path)
            done = super().delete(path, is_recursive=is_recursive)
            for one in below:
                self._forget(one)
            if is_tree:
                remove_tree(there, self._env)
            return done

    def rename(self, source: str, target: str, *, may_overwrite: bool) -> None:
        """See FileOperations."""
        with self._changing:
            if not self.is_elsewhere(source):
                if self.is_elsewhere(target):
                    if not may_overwrite:
                        raise already_exists(target)
                    self.status(source)  # raises where it is not there: what had the name stays then
                    self._forget(target)
                super().rename(source, target, may_overwrite=may_overwrite)
                return
            self._check_new(target, may_overwrite=may_overwrite or source == target)
            if not (self._root / target).parent.is_dir():
                raise not_found(os.path.dirname(target))
            if source == target:
                raise already_exists(target)
            self._check_open()
            before = self.reference(target)
            with storage_errors("rename", self._elsewhere / source):
                self._env.make_dirs((self._elsewhere / target).parent)
                self._env.replace(self._elsewhere / source, self._elsewhere / target)
                self._env.unlink(self._root / target)
            if before is not None:
                self._released.append(before)
        self._published(target)

    @contextlib.contextmanager
    def create(self, path: str, *, may_overwrite: bool) -> Iterator[BinaryIO]:
        """See FileOperations."""
        with contextlib.ExitStack() as held, super().create(path, may_overwrite=may_overwrite) as file:
            yield file
            held.enter_context(self._changing)  # until the file has its name
            if self.is_elsewhere(path):
                if not may_overwrite:
                    raise already_exists(path)
                self._forget(path)

    def _check_new(self, path: str, *, may_overwrite: bool) -> Path:
        """See FileOperations."""
        target = super()._check_new(path, may_overwrite=may_overwrite)
        if not may_overwrite and self.is_elsewhere(path):
            raise already_exists(path)
        return target


class Hashed:
    """A file that is written, and hashed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hashed = file, blake3()

    def write(self, data: bytes) -> int:
        self._hashed.update(data)
        return self._file.write(data)

    def digest(self) -> str:
        return str(self._hashed.hexdigest())
