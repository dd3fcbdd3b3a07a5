"""The bytes of a store's files: read here and compared with their digests before they go to a bucket or come from one."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import pyarrow as pa
from blake3 import blake3

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.layers.format import decode, verify_block
from nosync.lsm.node.metadata_checks import check_contents
from nosync.lsm.platform.env import Env, storage_error
from nosync.replication.protocol.file_names import FileName, FileVersion

log = logging.getLogger("nosync.remote")


def digest_of(name: FileName, data: pa.Buffer, where: str) -> str:
    """Returns the digest of a file, after every byte of it was looked at. Raises CorruptionError for what is no file that
    a store has under this name.
    """
    if name.layer is not None:
        opened = decode(data, where)
        if opened.info.id != name.layer:
            raise CorruptionError(f"{where}: holds {opened.info.id}, and is called {name}")
        for index in range(len(opened.info.blocks)):
            verify_block(opened, index, where)
        return opened.digest
    if not name.is_opaque:
        check_contents(PurePosixPath(name), data.to_pybytes())
    return blake3(data).hexdigest()


def check_digest(name: FileName, data: pa.Buffer, digest: str, where: str) -> None:
    """Raises CorruptionError where a file is not the one with this digest."""
    found = digest_of(name, data, where)
    if found != digest:
        raise CorruptionError(
            f"{where}: has digest {found[:16]}, expected {digest[:16]}: it is not the file that was copied"
        )


class NodeFiles:
    """The files of one node, before they go to a bucket."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._digests: dict[PurePosixPath, str] = {}  # of small files that were read
        self.damaged: dict[str, str] = {}
        """Files that are damaged here, and why."""
        self.away: dict[str, str] = {}
        """Files of a lazily restored store that its bucket did not give, and why."""

    def read(self, name: FileName) -> pa.Buffer | None:
        """Returns the bytes of a file; None where it is gone."""
        path = self._root / name
        self.away.pop(str(name), None)
        try:
            return self._env.map(path)
        except FileNotFoundError:
            return None
        except CorruptionError as error:  # of the bucket that a lazily restored store comes from
            self.damaged[str(name)] = str(error)
            return None
        except RemoteError as error:  # it is looked for again with all others
            log.warning("not copied yet: %s", error)
            self.away[str(name)] = f"not copied yet: {error}"
            return None
        except OSError as error:
            raise storage_error("read", path, error) from error

    def checked(self, name: FileName, data: pa.Buffer) -> FileVersion | None:
        """Returns what a file is; None where it is damaged, which is for this node to mend."""
        try:
            version = FileVersion(name, digest_of(name, data, str(self._root / name)), data.size)
        except CorruptionError as error:
            if str(name) not in self.damaged:
                log.warning("not copied: %s", error)
            self.damaged[str(name)] = str(error)
            return None
        self.damaged.pop(str(name), None)
        return version

    def read_digest(self, name: FileName) -> str | None:
        """Returns the digest of a file. None: there is none, or it is damaged."""
        data = self.read(name)
        version = None if data is None else self.checked(name, data)
        return None if version is None else version.digest

    def digest_of_small(self, path: PurePosixPath) -> str | None:
        """Does what `read_digest` does, once for each small file, which never changes."""
        known = self._digests.get(path) or self.read_digest(FileName(str(path)))
        if known is not None:
            self._digests[path] = known
        return known

    def note(self, version: FileVersion) -> None:
        """Notes what a small file was found to be."""
        self._digests[PurePosixPath(version.name)] = version.digest

    def forget(self, path: PurePosixPath) -> None:
        """An operator put another file under the name of a small one."""
        self._digests.pop(path, None)

    def forget_gone(self) -> None:
        """Says no more of files that are gone that they are damaged, or away."""
        self.damaged = {name: why for name, why in self.damaged.items() if self._env.exists(self._root / name)}
        self.away = {name: why for name, why in self.away.items() if self._env.exists(self._root / name)}
