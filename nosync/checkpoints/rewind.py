"""Rewinding a kept checkpoint: what came after a batch is kept under another name, and the batch is the newest again.

Invariants
- Nothing is lost: the whole keep, as it was, is kept under the other name before another generation counts.
- Nothing is changed or removed: a rewind makes another generation of the keep, a directory of links. It counts with its
  last file, so a rewind that dies in between leaves the keep as it was, and saying the same again does it.
- What a query behind the door has as its directory gets another name, so that the query goes on from what is kept.

The trap is the sink. A file sink skips batches that its log has, Delta skips what it has of the query's id and batch:
both would lose what the batches hold when they run again. So a rewind asks where the output goes, and refuses while
the sink remembers batches that are about to run again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nosync.checkpoints.generations import REWOUND, generations_of, keeps_of
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import CRC_SUFFIX, Batch, BatchFile, Form, OperatorFile, SourceFile, StateFile, parse
from nosync.checkpoints.restore import next_offsets
from nosync.checkpoints.retention import copy_pins, kept_batches, set_kept_batches
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_small, read_if_there, sync_published
from nosync.lsm.platform.layout import CHECKPOINT_LIVE

log = logging.getLogger("nosync")

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_FILE_SINK, _DELTA = "_spark_metadata", "_delta_log"


class SinkRemembersError(NosyncError):
    """A sink has batches that would run again, and would skip them: what they hold would be lost."""


def rewind(keep: Keep, t: int, *, keep_as: str | None = None) -> tuple[Keep, str]:
    """Lets batch `t` be the newest that is kept. Returns the keep as it is then, and the name under which the rest is kept.

    Raises NotAvailableError where the batch cannot be gone on from, InvalidInputError where the name is empty or taken.
    """
    if keep_as == "":
        raise InvalidInputError("--keep-as has no name: give one, or leave it out for one that is free")
    at = keep.at(t)
    taken = [name for name in keeps_of(keep.data, keep.env) if not _is_part_of(name, keep)]
    name = keep_as or next(
        n for i in range(1, len(taken) + 2) if (n := f"{keep.name[:44]}-before-rewind-{i}") not in taken
    )
    if name in taken or name == keep.name:
        raise InvalidInputError(f"checkpoint {name!r} is kept already: say another name with --keep-as")
    later = Keep(keep.data, name, keep.env)
    with later.writing():
        later.take(keep.root, list(keep.index.paths()))
        copy_pins(keep, later)
        set_kept_batches(later, kept_batches(keep))
    put_aside(keep.data / CHECKPOINT_LIVE / keep.name, keep.env)
    return begin_generation(keep, at), name


def _is_part_of(name: str, keep: Keep) -> bool:
    """Returns whether what is kept under a name is some of what `keep` has, the very files: a rewind that died left it."""
    if name == keep.name or generations_of(keep.data, name, keep.env) != [0]:
        return False
    found = Keep(keep.data, name, keep.env)
    return all(
        path in keep.index and keep.env.identity(found.root / path) == keep.env.identity(keep.root / path)
        for path in found.index.paths()
    )


def put_aside(live: Path, env: Env) -> None:
    """Gives the directory of a query behind the door another name: the query goes on from what is kept.

    An empty directory goes.
    """
    if not env.exists(live):
        return
    with storage_errors("rename", live):
        if not env.list_dir(live):
            live.rmdir()
            return
        aside = live.with_name(f".{live.name}.{env.token()}.old")
        live.rename(aside)
    log.warning("%s is %s now: the query goes on from what is kept", live, aside)


def begin_generation(keep: Keep, t: Batch, *, repeats_offsets: bool = False) -> Keep:
    """Makes the next generation of a keep, of all that is not of batches after `t`. Durable when this returns.

    `repeats_offsets`: with what the next batch has to read again, where that is kept.
    """
    taken = generations_of(keep.data, keep.name, keep.env)
    made = Keep(keep.data, keep.name, keep.env, max(taken, default=0) + 1)
    again = next_offsets(keep, t) if repeats_offsets else set()
    with made.writing():
        made.take(keep.root, sorted(set(keep.index.paths()).difference(left_after(keep, t)) | again))
        copy_pins(keep, made, until=t)
        set_kept_batches(made, kept_batches(keep))
        fields = {"from": keep.generation, "at": t}
        publish_small(keep.data, made.root / REWOUND, fields, keep.env)
        sync_published(keep.data, made.root / REWOUND, keep.env)
    return made


def going_on(source: Path, keep: Keep) -> Keep:
    """Returns the keep that the checkpoint at `source` goes on from: this one, or a generation that begins with it.

    A query that was started from an earlier batch than the newest one that is kept went back, as a rewind does. What came
    after is kept under another name, if a query could go on from it. So did a query that was started where the offsets of
    the next batch were not kept: it decides anew what that batch reads.
    Raises InvalidInputError where the checkpoint went back and has run on since: whose batches are kept is not known.
    """
    committed, env = keep.committed(), keep.env
    last = max(_numbers(source / "commits", env), default=None)
    if committed is None or last is None:
        return keep
    t = Batch(min(last, committed))
    other = other_of(source, keep, t)
    if other is not None:
        raise InvalidInputError(
            f"{source / other} is not what is kept of batch {t}, whose commit is kept: the query went back, and ran again. "
            f"Rewind checkpoint {keep.name!r} to a batch before it first, or keep {source} under another name"
        )
    if last < committed:
        if (keep.safe() or 0) > last:
            rewound, name = rewind(keep, last)
            log.warning("%s went back to batch %d: what came after is kept as checkpoint %s", source, last, name)
            return rewound
        return begin_generation(keep, Batch(last))
    if last > committed:
        _check_was_not_left(source, keep, committed)
        return keep
    # Of states that come after it the keep has none. A checksum is beside its file.
    following = [path for path in left_after(keep, committed) if not path.endswith(CRC_SUFFIX)]
    if all(_is_same(source / path, keep, path) for path in following):
        return keep
    return begin_generation(keep, committed)


def other_of(source: Path, keep: Keep, t: Batch) -> str | None:
    """Returns a file of batch `t` that a checkpoint at `source` has with other contents than are kept; None where there is none.

    With format v2 states have names of their own in each run, which the commit tells. With others a state has the name of
    its version.
    """
    paths = (f"offsets/{t}", f"commits/{t}", *_states_after(keep, t))
    return next(
        (path for path in paths if path in keep.index and is_other(source / path, keep.root / path, keep.env)), None
    )


def _check_was_not_left(source: Path, keep: Keep, committed: Batch) -> None:
    """Raises InvalidInputError where a checkpoint is the one that a query had before it was rewound to batch `committed`: to
    go on with it would undo the rewind. It has the very file that is kept of the next batch under another name, or the one
    that was copied, whose time the copy has.
    """
    path = f"commits/{committed + 1}"
    if not keep.env.exists(keep.root / REWOUND):
        return
    for name in keeps_of(keep.data, keep.env):
        kept = Keep(keep.data, name, keep.env).root / path
        if name != keep.name and keep.env.exists(kept) and _is_one_file(source / path, kept, keep.env):
            raise InvalidInputError(
                f"{source} is what checkpoint {keep.name!r} was before it was rewound to batch {committed}; what came after is "
                f"kept as {name!r}. Watch the directory from which the query goes on, or keep {source} under another name"
            )


def _is_one_file(a: Path, b: Path, env: Env) -> bool:
    try:
        is_of_one_time = env.identity(a)._replace(inode=0) == env.identity(b)._replace(inode=0)
        return is_of_one_time and not is_other(a, b, env)
    except FileNotFoundError:
        return False


def _states_after(keep: Keep, t: Batch) -> list[str]:
    """Returns the names of the states after a batch, without those that Spark may write anew."""
    files = (file for store in keep.index.stores() for file in keep.index.versions(store).get(t + 1, ()))
    return [file.path for file in files if file.form is not Form.SNAPSHOT]


def is_other(file: Path, kept: Path, env: Env) -> bool:
    """Returns whether a file is there, and has other contents than the one that is kept."""
    try:
        if env.identity(file) == env.identity(kept):
            return False
        return env.size_bytes(file) != env.size_bytes(kept) or bytes(env.map(file)) != bytes(env.map(kept))
    except FileNotFoundError:  # Spark removed it, or a daemon did
        return False


def _is_same(file: Path, keep: Keep, path: str) -> bool:
    try:
        return read_if_there(file, keep.env) == keep.read(path)
    except FileNotFoundError:
        return False


def _numbers(directory: Path, env: Env) -> list[Batch]:
    with storage_errors("list", directory):
        return [Batch(int(name)) for name in env.list_dir(directory) if is_number(name)]


def left_after(keep: Keep, t: Batch) -> Iterator[str]:
    """Yields what belongs to batches after `t`: when they run again, others may come in their place.

    Of the log of a source these are the entries that batch `t` and those before did not read.
    """
    ends = keep.closures.offsets(t).log_ends
    for path in keep.index.paths():
        match parse(path.removesuffix(CRC_SUFFIX)):
            case SourceFile(_, source, number) if source in ends and number > ends[source]:
                yield path
            case SourceFile(_, source, _) if source not in ends and keep.closures.begins_after(source, t):
                yield path
            case BatchFile(_, _, batch) if batch > t:
                yield path
            case StateFile() as file if file.version > t + 1:
                yield path
            case OperatorFile(_, _, since) if since is not None and since > t:
                yield path
            case _:
                continue


def check_sink(output: Path, t: Batch, query: str | None, env: Env, then: str = "say --sink-rewound") -> None:
    """Raises SinkRemembersError where the sink in an output directory has batches after `t` of the query.

    `then`: what to do when they were taken back. Raises InvalidInputError where the directory is not there, or has no log of a
    sink.
    """
    if not output.is_dir():
        raise InvalidInputError(f"{output} is no directory: say where the query writes to")
    if not any((output / log).is_dir() for log in (_FILE_SINK, _DELTA)):
        raise InvalidInputError(
            f"{output} has no log of a file sink ({_FILE_SINK}) or of Delta ({_DELTA}), so it does not say which batches the "
            f"sink has. Give the very path that the query writes to. Where its sink has no such log, take back what it has of "
            f"batches after {t}, if it remembers them, then {then}"
        )
    newest = max(_remembered(output, query, env), default=-1)
    if newest > t:
        log = _FILE_SINK if (output / _FILE_SINK).is_dir() else _DELTA
        raise SinkRemembersError(
            f"{output / log} has batches up to {newest} of this query, or of an application with a name of its own. "
            f"Those after {t} would run again, and the sink would skip them: their rows would be lost. Take back what it has "
            f"of them first, then {then}; or write to another output: of a file sink `rewind --new-output` makes one that has "
            "what was there after the batch"
        )


def _remembered(output: Path, query: str | None, env: Env) -> Iterator[int]:
    """Yields the batches that a sink has: those in a file sink's log, and what Delta has of the query's transactions.

    Delta's log has them in its entries, and in its checkpoints, after which entries go.
    """
    with storage_errors("list", output):
        for name in env.list_dir(output / _FILE_SINK):
            if (number := name.removesuffix(".compact")).isdigit():
                yield int(number)
        for name in env.list_dir(output / _DELTA):
            path = output / _DELTA / name
            if name.endswith(".json"):
                yield from _transactions(path.read_text(errors="replace"), query)
            elif name.endswith(".parquet") and ".checkpoint." in name:
                yield from _transactions_of_checkpoint(path, query)


def _is_of_query(app: str, query: str | None) -> bool:
    """Returns whether transactions of an application are the query's, or may be: `txnAppId` can be any text, and those of
    other queries are ids of theirs.
    """
    return query is None or app == query or _UUID.fullmatch(app) is None


def _transactions_of_checkpoint(path: Path, query: str | None) -> Iterator[int]:
    try:
        file = pq.ParquetFile(path)
        found = file.read(["txn"]).column("txn").to_pylist() if "txn" in file.schema_arrow.names else []
    except (pa.ArrowException, OSError) as error:
        raise SinkRemembersError(
            f"{path}: cannot be read, so it is not known which batches the sink has ({error}). Take back what it has of "
            "those that run again, and say --sink-rewound"
        ) from error
    yield from (int(one["version"]) for one in found if one is not None and _is_of_query(str(one["appId"]), query))


def _transactions(text: str, query: str | None) -> Iterator[int]:
    for line in text.splitlines():
        if '"txn"' not in line:
            continue
        try:
            found = json.loads(line)["txn"]
            if _is_of_query(str(found["appId"]), query):
                yield int(found["version"])
        except (ValueError, KeyError, TypeError):
            continue  # a line of another kind, or a newer form
