"""Rewinding a kept checkpoint: what came after a batch is kept under another name, and the batch is the newest again.

Invariants
- Nothing is lost: the whole keep, as it was, is kept under the other name before anything goes.
- Commits go first and from the newest on, so a rewind that dies in between leaves a keep whose batches are whole, and
  saying the same again finishes it.

The trap is the sink. A file sink skips batches that its log has, Delta skips what it has of the query's id and batch:
both would lose what the batches hold when they run again. So a rewind asks where the output goes, and refuses while
the sink remembers batches that are about to run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nosync.checkpoints.index import FileIndex
from nosync.checkpoints.keep import Keep, keeps_of
from nosync.checkpoints.names import CRC_SUFFIX, Batch, BatchFile, OperatorFile, StateFile, parse
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.platform.env import Env, storage_errors

_FILE_SINK, _DELTA = "_spark_metadata", "_delta_log"


class SinkRemembersError(NosyncError):
    """A sink has batches that would run again, and would skip them: what they hold would be lost."""


def rewind(keep: Keep, t: int, *, keep_as: str | None = None) -> str:
    """Lets batch `t` be the newest that is kept. Returns the name under which the rest is kept.

    Raises NotAvailableError where the batch cannot be gone on from, InvalidInputError where the name is taken.
    """
    at = keep.at(t)
    taken = keeps_of(keep.data, keep.env)
    name = keep_as or next(
        n for i in range(1, len(taken) + 2) if (n := f"{keep.name[:44]}-before-rewind-{i}") not in taken
    )
    if name in taken:
        raise InvalidInputError(f"checkpoint {name!r} is kept already: say another name with --keep-as")
    later = Keep(keep.data, name, keep.env)
    later.take(keep.root, list(keep.index.paths()))
    keep.remove(list(_after(keep.index, at)))
    return name


def _after(index: FileIndex, t: Batch) -> Iterator[str]:
    """Yields what belongs to batches after `t`, commits first and from the newest on."""
    for batch in sorted((b for b in index.batches() if b > t), reverse=True):
        yield f"commits/{batch}"
    for path in sorted(index.paths()):
        match parse(path.removesuffix(CRC_SUFFIX)):
            case BatchFile(_, _, batch) if batch > t and path != f"commits/{batch}":
                yield path
            case StateFile() as file if file.version > t + 1:
                yield path
            case OperatorFile(_, _, since) if since is not None and since > t:
                yield path
            case _:
                continue  # what a batch reads of a source's log, its offsets say


def check_sink(output: Path, t: Batch, query: str | None, env: Env) -> None:
    """Raises SinkRemembersError where the sink in an output directory has batches after `t` of the query.

    Raises InvalidInputError where the directory is not there.
    """
    if not output.is_dir():
        raise InvalidInputError(f"{output} is no directory: say where the query writes to")
    newest = max(_remembered(output, query, env), default=-1)
    if newest > t:
        log = _FILE_SINK if (output / _FILE_SINK).is_dir() else _DELTA
        raise SinkRemembersError(
            f"{output / log} has batches up to {newest} of this query. Those after {t} would run again, and the sink would "
            f"skip them: their rows would be lost. Take back what it has of them first, then say --sink-rewound; or fork "
            f"the checkpoint, and write to another output"
        )


def _remembered(output: Path, query: str | None, env: Env) -> Iterator[int]:
    """Yields the batches that a sink has: those in a file sink's log, and what Delta has of the query's transactions."""
    with storage_errors("list", output):
        for name in env.list_dir(output / _FILE_SINK):
            if (number := name.removesuffix(".compact")).isdigit():
                yield int(number)
        for name in env.list_dir(output / _DELTA):
            if name.endswith(".json"):
                yield from _transactions((output / _DELTA / name).read_text(errors="replace"), query)


def _transactions(text: str, query: str | None) -> Iterator[int]:
    for line in text.splitlines():
        if '"txn"' not in line:
            continue
        try:
            found = json.loads(line)["txn"]
            if query is None or found["appId"] == query:
                yield int(found["version"])
        except (ValueError, KeyError, TypeError):
            continue  # a line of another kind, or a newer form
