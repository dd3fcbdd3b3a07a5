"""Stubs: what a lazily restored directory has in the place of layers whose bytes are still in a bucket.

    stubs.json                                     the URL of the bucket
    stubs/<stage>/<fingerprint>/<shard>/<layer>    digest and size of a layer, and in which object its bytes are

Invariants
- A layer has a file of its own, or a stub, or, between the fetching of its bytes and their being durable, both: then the
  file counts. A stub goes only after its file is durable, or when nothing needs the layer any more.
- `stubs.json` goes last. While it is there the marker has a format that older versions refuse.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.json_file import (
    read_if_there,
    read_small,
    replace_small,
    seal_json,
    unseal_json,
    whole_number,
)
from nosync.lsm.platform.layout import LAYERS, STUBS, STUBS_FROM
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.remote.pack import Place, Placed


def is_lazy(root: Path) -> bool:
    """Returns whether a directory was restored lazily, and may lack layers; not where this user may not look."""
    return os.path.exists(root / STUBS_FROM)


def env_of(root: Path) -> Env:
    """Returns the environment in which all files of a directory are seen, those that are still in a bucket included."""
    if not is_lazy(root):
        return Env()
    from nosync.replication.remote.stub_env import StubEnv  # noqa: PLC0415 - mostly there are none

    return StubEnv(root)


def stub_path(root: Path, name: str) -> Path:
    """Returns where the stub of a layer is. `name`: that of the layer, relative to the data directory."""
    return root / STUBS / name.removeprefix(f"{LAYERS}/")


def write_stub(root: Path, placed: Placed, env: Env) -> Path:
    """Writes a stub, in the place of one that is there, and makes the directory that its layer will be in. Returns its
    path: what the caller makes durable.
    """
    version, place = placed.version, placed.place
    final = stub_path(root, version.name)
    fields = {
        "digest": version.digest, "bytes": version.size_bytes,
        "object": place.object, "offset": place.offset, "part_bytes": place.part_bytes,
    }  # fmt: skip
    with storage_errors("write", final):
        for directory in (final.parent, (root / version.name).parent):
            env.make_dirs(directory)
        temporary = temporary_path(root, env)
        with env.create(temporary) as file:
            file.write(seal_json(fields))
        env.replace(temporary, final)
    return final


def read_stub(root: Path, name: str, env: Env) -> Placed | None:
    """Returns where the bytes of a layer are; None where there is no stub. Raises CorruptionError."""
    path = stub_path(root, name)
    try:
        text = read_if_there(path, env)
    except FileNotFoundError:
        return None
    fields, _ = unseal_json(text, str(path))
    with parsed("a stub", str(path)):
        size_bytes, offset = whole_number(fields["bytes"], "bytes"), whole_number(fields["offset"], "offset")
        place = Place(str(fields["object"]), offset, whole_number(fields["part_bytes"], "part_bytes"))
        return Placed(FileVersion(FileName(name), str(fields["digest"]), size_bytes), place)


def stub_names(root: Path) -> Iterator[FileName]:
    """Yields the names of the layers that have a stub. Raises StorageError: none must be overlooked."""
    top = root / STUBS

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a directory may go while it is looked at
            raise storage_error("list", Path(error.filename or top), error) from error

    for directory, _, names in os.walk(top, onerror=failed):
        place = Path(directory).relative_to(top).as_posix()
        yield from (FileName(f"{LAYERS}/{place}/{name}") for name in names)


def write_from(root: Path, url: str, env: Env) -> None:
    """Says which bucket the stubs are of. Durable when this returns."""
    replace_small(root, root / STUBS_FROM, {"url": url}, env)


def read_from(root: Path, env: Env) -> str:
    """Returns the URL of the bucket. Raises CorruptionError, StorageError."""
    path = root / STUBS_FROM
    with parsed("where layers come from", str(path)):
        return str(read_small(path, env)["url"])


def remove_directories(root: Path, env: Env) -> bool:
    """Removes the directories of stubs. False: there is a stub in one of them."""
    try:
        for directory, _, _ in os.walk(root / STUBS, topdown=False):
            os.rmdir(directory)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise storage_error("remove", root / STUBS, error) from error
    with storage_errors("sync", root):
        env.sync_dir(root)
    return True


def forget_from(root: Path, env: Env) -> None:
    """Says no more which bucket the stubs are of: there are none."""
    with storage_errors("remove", root / STUBS_FROM):
        env.unlink(root / STUBS_FROM)
        env.sync_dir(root)
