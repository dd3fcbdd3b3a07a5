"""Layers out of a bucket into a data directory: compared with their digests before they get their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pyarrow as pa

from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_text
from nosync.lsm.platform.publish import give_name, temporary_path
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.files import check_digest
from nosync.replication.remote.pack import Placed


class Keeper:
    """Writes files of one data directory. A name that is taken stays as it is: another process was quicker.

    `kept`: called with the path of each that it wrote. Nothing is made durable.
    """

    def __init__(self, root: Path, url: str, env: Env, kept: Callable[[Path], None] = lambda path: None) -> None:
        self._root, self._url, self._env, self._kept = root, url, env, kept

    def keep(self, placed: Placed, data: pa.Buffer) -> None:
        """Writes a file whose bytes were compared."""
        self.publish(PurePosixPath(placed.version.name), data)

    def keep_large(self, placed: Placed, parts: Iterator[bytes]) -> None:
        """Writes a file part by part: it may be larger than memory. Raises CorruptionError where its bytes are others."""
        name = placed.version.name
        final, temporary = self._root / name, temporary_path(self._root, self._env)
        with storage_errors("write", final):
            self._env.make_dirs(final.parent)
            try:
                with self._env.create(temporary) as file:
                    for part in parts:
                        file.write(part)
                where = f"{self._url}/{placed.place.object}: {name}"
                check_digest(name, self._env.map(temporary), placed.version.digest, where)
                give_name(temporary, final, self._env)
            except FileExistsError:
                return
            finally:
                self._env.unlink(temporary)
        self._kept(final)

    def publish(self, path: PurePosixPath, data: bytes | pa.Buffer) -> None:
        """Writes a small file."""
        final = self._root / path
        with storage_errors("write", final):
            self._env.make_dirs(final.parent)
        if publish_text(self._root, final, data, self._env) is not None:
            self._kept(final)


def fetch_layers(root: Path, wanted: Iterable[Placed], fetcher: Fetcher, env: Env) -> None:
    """Fetches layers, which then have their names. Raises RemoteError, CorruptionError naming a damaged object."""
    keeper = Keeper(root, fetcher.url, env)
    fetch_all(fetcher, wanted, keeper.keep, take_large=keeper.keep_large)
