"""The live directory of a checkpoint: what its query goes on from, made out of the keep where it is not there.

Invariants
- A directory that is there, of the same query and not older than the keep, stays as it is. It is older if the keep has
  more batches, or goes on in another generation: then the query went on elsewhere.
- What the keep is further than is never gone on from: it is put aside, and nothing of it is removed.
- Where hosts share a keep, whoever makes the directory anew goes on into another generation: what the host before has, and
  nobody else got, stays behind in the earlier one, and nobody's files meet others of their names.
- What is in the keep of batches that the query runs again stays behind in an earlier generation: the query may write the
  same names with other contents, and the keep overwrites nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from nosync.checkpoints.generations import directory_of, generations_of
from nosync.checkpoints.keep import Keep, files_below
from nosync.checkpoints.names import CRC_SUFFIX, METADATA, Batch, never_empty
from nosync.checkpoints.restore import next_offsets, readdressed, restore
from nosync.checkpoints.rewind import begin_generation, is_other, left_after, put_aside
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.layout import CHECKPOINTS

log = logging.getLogger("nosync")

DOOR = ".door"
"""In a live directory: what the door has to know of it. The query does not see it."""
GENERATION = "generation"
UNFINISHED = ".making"
"""Ends the name of a directory that did not become a live directory."""


def prepare(
    keep: Keep,
    directory: Path,
    address: str,
    *,
    is_shared: bool = False,
    lacks: Callable[[], str | None] = lambda: None,
) -> Keep:
    """Lets a directory be what the query goes on from. `address`: what the query calls the directory.

    `is_shared`: other hosts may have gone on from this keep. `lacks`: returns what the directory's newest batch needs and is
    lost with another host.

    Returns the keep that it goes on into, which may be another generation. The keep is held for writing. Raises
    InvalidInputError where the directory is of another query, NotAvailableError where the keep has batches and none can be
    gone on from, StorageError.
    """
    env = keep.env
    if env.exists(directory / METADATA):
        _check_same_query(keep, directory)
        if _is_up_to_date(keep, directory) and not _is_torn(keep, directory, lacks):
            keep = _with_other_offsets(keep, directory)
            _readdress(directory, address, env)
            return keep
    if METADATA not in keep.index:
        _check_is_new(keep)
        with storage_errors("make", directory):
            env.make_dirs(directory)
        return keep
    put_aside(directory, env)
    if keep.index.batches():
        keep = _go_on(keep, directory, address, is_shared=is_shared)
    else:
        _begin_again(keep, directory)
    _write_generation(directory, keep)
    return keep


def _check_is_new(keep: Keep) -> None:
    """Raises NotAvailableError where a checkpoint without its beginning has other files: its query would begin anew."""
    for generation in generations_of(keep.data, keep.name, keep.env):
        root = keep.data / CHECKPOINTS / directory_of(keep.name, generation)
        path = next(files_below(root, keep.env), None)
        if path is not None:
            raise NotAvailableError(
                f"checkpoint {keep.name}: {root / path} is kept, and {METADATA} of the generation that counts is not, so it is "
                f"not known where the query was. Bring {root} back from a copy, wait until peers have sent it, or take another "
                "name"
            )


def _is_up_to_date(keep: Keep, directory: Path) -> bool:
    """Returns whether the query may go on from a directory, as far as the keep knows."""
    safe = keep.safe()
    return _generation_of(directory, keep.env) == keep.generation and (
        safe is None or _newest_commit(directory, keep.env) >= safe
    )


def _is_torn(keep: Keep, directory: Path, lacks: Callable[[], str | None]) -> bool:
    """Returns whether the query has to go back from a directory, because something of it was lost."""
    if keep.safe() is None or (lost := lacks() or _empty_file(keep, directory)) is None:
        return False
    log.warning("checkpoint %s: the query cannot go on from %s, and goes back: %s", keep.name, directory, lost)
    return True


def _empty_file(keep: Keep, directory: Path) -> str | None:
    """Returns what lost its contents with the power: files get their names before they are durable. What is kept is."""
    index = keep.index
    paths = (path for path in files_below(directory, keep.env) if never_empty(path) and not index.size_bytes(path))
    empty = next((path for path in paths if not keep.env.size_bytes(directory / path)), None)
    return None if empty is None else f"{empty} is empty, as after a loss of power"


def _with_other_offsets(keep: Keep, directory: Path) -> Keep:
    """Returns the keep that a directory goes on into. That is another generation where somebody took offsets back, so that the
    query decides, or has decided, anew what its next batch reads: then what was kept of that stays behind.
    """
    committed = keep.committed()
    if committed is None:
        return keep
    following = [path for path in left_after(keep, committed) if not path.endswith(CRC_SUFFIX)]
    env = keep.env
    if all(
        env.exists(directory / path) and not is_other(directory / path, keep.root / path, env) for path in following
    ):
        return keep
    found = begin_generation(keep, committed)
    _write_generation(directory, found)
    log.warning(
        "checkpoint %s: %s has not the offsets after batch %d that were kept, and goes on without these",
        keep.name,
        directory,
        committed,
    )
    return found


def _generation_of(directory: Path, env: Env) -> int:
    try:
        text = read_if_there(directory / DOOR / GENERATION, env).decode(errors="replace")
    except FileNotFoundError:
        return 0
    return int(text) if is_number(text) else 0


def _write_generation(directory: Path, keep: Keep) -> None:
    """Says of a directory which generation it goes on into. Without that it is the first."""
    if keep.generation:
        where = directory / DOOR / GENERATION
        with storage_errors("write", where):
            keep.env.make_dirs(where.parent)
            with keep.env.create(where) as file:
                file.write(str(keep.generation).encode())
            keep.env.sync_file(where)


def _go_on(keep: Keep, directory: Path, address: str, *, is_shared: bool) -> Keep:
    """Makes the directory at the newest batch that can be gone on from, where the keep ends from then on.

    The generation is made first: who dies in between finds no directory, and does it again.
    """
    safe = keep.at(None)
    if is_shared or not next_offsets(keep, safe).issuperset(left_after(keep, safe)):
        keep = begin_generation(keep, safe, repeats_offsets=True)
    made = restore(keep, directory, safe, address=address)
    again = "with the offsets that it had" if made.repeats_offsets else "with new offsets"
    log.warning(
        "checkpoint %s: goes on after batch %d, %s; %s is made of what is kept", keep.name, safe, again, directory
    )
    return keep


def _begin_again(keep: Keep, directory: Path) -> None:
    """Makes the directory of a query that has committed nothing: its id, and what its first batch reads if that is known."""
    paths = {METADATA, *_first_offsets(keep)}
    keep.remove(set(keep.index.paths()) - paths)
    making = directory.with_name(f".{directory.name}.{keep.env.token()}{UNFINISHED}")
    for path in sorted(paths):
        with storage_errors("make", making / path):
            keep.env.make_dirs((making / path).parent)
            keep.env.link(keep.root / path, making / path)
    with storage_errors("make", directory):
        making.rename(directory)
        keep.env.sync_dir(directory.parent)
    log.warning("checkpoint %s: begins again; nothing of it was committed", keep.name)


def _first_offsets(keep: Keep) -> set[str]:
    """Returns the files by which the first batch reads what it read before; none where they are not all kept."""
    path = "offsets/0"
    if path not in keep.index:
        return set()
    ends = keep.closures.offsets(Batch(0)).log_ends
    found = {path, path + CRC_SUFFIX} & set(keep.index.paths())
    for source in keep.index.sources():
        found |= {p for (n, _), p in keep.index.source_log(source).items() if source not in ends or n <= ends[source]}
    for source, end in ends.items():
        if not {number for number, _ in keep.index.source_log(source)}.issuperset(range(end + 1)):
            return set()
    return found


def _check_same_query(keep: Keep, directory: Path) -> None:
    """Raises InvalidInputError where the directory and the keep are of two queries."""
    if METADATA not in keep.index:
        return
    try:
        kept = json.loads(keep.read(METADATA))["id"]
        found = json.loads(read_if_there(directory / METADATA, keep.env))["id"]
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(
            f"{directory / METADATA} says no query: remove {directory}, and it is made anew"
        ) from None
    if kept != found:
        raise InvalidInputError(
            f"checkpoint {keep.name!r} is kept of query {kept}, and {directory} is of query {found}: move one of them away"
        )


def _newest_commit(directory: Path, env: Env) -> int:
    with storage_errors("list", directory / "commits"):
        return max((int(n) for n in env.list_dir(directory / "commits") if n.isascii() and n.isdigit()), default=-1)


def _readdress(directory: Path, address: str, env: Env) -> None:
    """Lets the schema files that operators name be those of this directory: its address may have been another one."""
    with storage_errors("write", directory):
        for operator in env.list_dir(directory / "state"):
            versions = directory / "state" / operator / "_metadata" / "v2"
            for name in env.list_dir(versions):
                if name.isascii() and name.isdigit():
                    _readdress_file(versions / name, address, env)


def _readdress_file(path: Path, address: str, env: Env) -> None:
    text = read_if_there(path, env).decode()
    found = readdressed(text, address)
    if found == text:
        return
    making = path.with_name(f".{path.name}.{env.token()}.tmp")
    with env.create(making) as file:
        file.write(found.encode())
    for side_file in (f"{path.name}{CRC_SUFFIX}", f".{path.name}{CRC_SUFFIX}"):
        env.unlink(path.with_name(side_file))  # they are of what it said before
    env.replace(making, path)
