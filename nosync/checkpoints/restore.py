"""Making a checkpoint directory that a query starts from: of a batch that is kept, as hard links, and one rename.

Invariants
- Always a new directory. Nothing that is there is truncated or overwritten, and the keep stays as it was.
- The directory has its name when all of it is there, and not before.
- A restored query has the id that it had, and runs the batch after with the offsets that it had, where they are known.
  A fork has a new id, and decides on its own what it reads next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import CRC_SUFFIX, METADATA, Batch
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.layout import CHECKPOINTS

_SINK_LOG = "_spark_metadata"
_SCHEMA_PATH = re.compile(r'"(?P<root>[^"\\]*?)(?P<rest>/state/\d+/_stateSchema/[^"\\]*)"')
"""What transformWithState writes in `_metadata/v2`: schema files by their absolute path."""


@dataclass(frozen=True)
class Restored:
    """A directory that a query can start from."""

    path: Path
    batch: Batch
    """The batch after which the query goes on."""
    files: int
    repeats_offsets: bool
    """Whether the next batch has the offsets that it had before."""


def restore(keep: Keep, directory: Path, t: int | None = None, *, address: str | None = None) -> Restored:
    """Makes a directory from which the same query goes on after batch `t`, by default the newest that is safe.

    `address`: what the query will call the directory, where that is not its path. Raises NotAvailableError where the
    batch cannot be gone on from, InvalidInputError where the directory has something in it, StorageError where the disk
    refuses.
    """
    return _make(keep, directory, keep.at(t), address, new_id=False)


def fork(keep: Keep, directory: Path, t: int | None = None, *, address: str | None = None) -> Restored:
    """Makes a directory from which another query, with an id of its own, goes on after batch `t`. See `restore`."""
    return _make(keep, directory, keep.at(t), address, new_id=True)


def _make(keep: Keep, directory: Path, t: Batch, address: str | None, *, new_id: bool) -> Restored:
    env = keep.env
    check_new(directory, env)
    paths = set(keep.closures.of(t).paths)
    following = set() if new_id else next_offsets(keep, t)
    paths |= following
    with new_directory(directory, env) as making:
        for path in sorted(paths):
            _place(keep, path, making)
        if new_id:
            _replace(keep, making, METADATA, json.dumps({"id": str(uuid.uuid4())}, separators=(",", ":")))
        for path in sorted(path for path in paths if "/_metadata/v2/" in path and not path.endswith(CRC_SUFFIX)):
            _readdress(keep, making, path, address or f"file:{directory.absolute()}")
    return Restored(directory, t, len(paths), bool(following))


@contextlib.contextmanager
def new_directory(directory: Path, env: Env) -> Iterator[Path]:
    """Gives a path beside a directory to fill. It becomes the directory at the end of the `with`, and not where that fails.

    Raises InvalidInputError as `check_new` does, StorageError where it cannot be made.
    """
    check_new(directory, env)
    making = directory.with_name(f".{directory.name}.{env.token()}.making")
    try:
        yield making
        with storage_errors("make", directory):
            if env.exists(directory):
                directory.rmdir()
            making.rename(directory)
            env.sync_dir(directory.parent)
    finally:
        remove_tree(making, env)


def check_target(keep: Keep, directory: Path) -> None:
    """Raises InvalidInputError as `check_new` does, and for a directory in the store that a user names: among those in which
    checkpoints are kept it would be taken for one of them, and elsewhere it would be lost with the store.
    """
    check_new(directory, keep.env)
    data, given = keep.data.resolve(), directory.resolve()
    if data in (given, *given.parents):
        what = "among the kept checkpoints of" if data / CHECKPOINTS in given.parents else "in the store"
        raise InvalidInputError(f"{directory} is {what} {keep.data}: say a directory elsewhere")


def check_new(directory: Path, env: Env) -> None:
    """Raises InvalidInputError where a directory is there that is not empty, or a file, or that another one cannot replace."""
    if directory.is_symlink():
        raise InvalidInputError(f"{directory} is a link: say a new directory; nothing was changed")
    is_file = env.exists(directory) and not directory.is_dir()
    if is_file or env.list_dir(directory) or os.path.ismount(directory):
        what = "a file" if is_file else "a mount point" if os.path.ismount(directory) else "there, and not empty"
        raise InvalidInputError(f"{directory} is {what}: say a new directory; nothing was changed")
    for parent in directory.resolve().parents:
        if env.exists(parent / METADATA) and (parent / "offsets").is_dir():
            raise InvalidInputError(f"{directory} is in the checkpoint {parent}: say a directory elsewhere")


def next_offsets(keep: Keep, t: Batch) -> set[str]:
    """Returns the files by which the batch after `t` reads what it read before: exactly this one entry of `offsets`.

    There are none where the entry is not kept, or where entries of sources' logs are missing that it names; nor where it is
    that of a repartition, which Spark wants to be done again by hand.
    """
    path, following = f"offsets/{t + 1}", Batch(t + 1)
    if path not in keep.index:
        return set()
    found = {path, path + CRC_SUFFIX} & set(keep.index.paths())
    of_t, of_next = keep.closures.offsets(t), keep.closures.offsets(following)
    if of_t.partitions != of_next.partitions:
        return set()
    before = of_t.log_ends
    for source, end in of_next.log_ends.items():
        entries = keep.index.source_log(source)
        for number in range(before.get(source, -1) + 1, end + 1):
            named = [entries[key] for key in ((number, False), (number, True)) if key in entries]
            if not named:
                return set()
            found.update(named)
    return found


def _place(keep: Keep, path: str, making: Path) -> None:
    """Gives a file of the keep a name in the directory that is made; a copy where there can be no second name."""
    target = making / path
    with storage_errors("make", target):
        keep.env.make_dirs(target.parent)
        try:
            keep.env.link(keep.root / path, target)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise storage_error("read", keep.root / path, error) from error
            with keep.env.create(target) as file:
                keep.env.copy(keep.root / path, file)
            keep.env.sync_file(target)


def _replace(keep: Keep, making: Path, path: str, text: str) -> None:
    """Writes a file of the directory anew. It replaces the name alone: the contents before are the keep's."""
    target = making / path
    with storage_errors("write", target):
        keep.env.unlink(target)
        keep.env.unlink(target.with_name(target.name + CRC_SUFFIX))
        with keep.env.create(target) as file:
            file.write(text.encode())
        keep.env.sync_file(target)


def _readdress(keep: Keep, making: Path, path: str, address: str) -> None:
    """Lets the schema files that an operator names be those of the new directory."""
    text = keep.read(path).decode()
    found = readdressed(text, address)
    if found != text:
        _replace(keep, making, path, found)


def readdressed(text: str, address: str) -> str:
    """Returns what an operator of transformWithState says of itself, with schema files below `address`."""
    return _SCHEMA_PATH.sub(lambda match: f'"{address}{match["rest"]}"', text)


def remove_tree(directory: Path, env: Env) -> None:
    """Removes a directory and all that is in it, if it is there. Links are removed, and not followed."""
    for name in env.list_dir(directory):
        entry = directory / name
        if stat.S_ISDIR(os.lstat(entry).st_mode):
            remove_tree(entry, env)
        else:
            env.unlink(entry)
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()


def sink_log(output: Path) -> Path | None:
    """Returns the log of a file sink in an output directory, by which it skips batches that it has; None without one."""
    return output / _SINK_LOG if (output / _SINK_LOG).is_dir() else None
