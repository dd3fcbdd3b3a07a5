"""Rows on their way to their shards by way of files, in the place of Spark's shuffle.

Each task that has rows writes an Arrow file, in which the rows of a shard lie together; each shard's task maps those of
its own into memory. The JVM hands a row over once, and neither writes it into a shuffle's file nor reads it back.

Invariant: a shard gets the rows that a shuffle would bring it; in what order does not matter to tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.lsm.columnar.hashing import hash32, key_groups_of
from nosync.lsm.errors import StorageError
from nosync.lsm.platform.env import storage_errors


@dataclass(frozen=True)
class Exchange:
    """Knows where the rows of a segment are."""

    files: Sequence[Path]
    shards: int

    def rows_of(self, shard: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a shard. Raises StorageError where a file cannot be read."""
        for path in self.files:
            with _file_errors("read", path), pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
                for i in range(shard, file.num_record_batches, self.shards):
                    yield file.get_batch(i)


@dataclass(frozen=True)
class Placement:
    """Says which of `shards` shards a row goes to, as `nosync.lsm.model.layer.Shard` has it for the hash of columns."""

    shards: int
    key_groups: int
    names: Sequence[str]
    """The columns whose hash decides. Empty: the rows' last column is the shard, and goes no further."""

    def placed(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.uint16]]:
        """Returns the rows, and the shard of each."""
        if not self.names:
            *columns, shard = rows.columns
            schema = pa.schema(list(rows.schema)[:-1])
            return pa.RecordBatch.from_arrays(columns, schema=schema), shard.to_numpy().astype(np.uint16)
        hashes = hash32([rows.column(name) for name in self.names])
        shard = key_groups_of(hashes, self.key_groups) * self.shards // self.key_groups
        return rows, shard.astype(np.uint16)


def write_by_shard(batches: Iterable[pa.RecordBatch], placement: Placement, path: Path) -> int:
    """Writes rows, and returns how many there were; of none there is no file. Raises StorageError."""
    with contextlib.ExitStack() as opened:
        opened.enter_context(_file_errors("write", path))
        writer: pa.RecordBatchFileWriter | None = None
        rows = 0
        for batch in batches:
            for mine in _by_shard(batch, placement):
                if writer is None:
                    file = opened.enter_context(pa.OSFile(str(path), "wb"))
                    writer = opened.enter_context(pa.ipc.new_file(file, mine.schema))
                writer.write_batch(mine)
            rows += batch.num_rows
        return rows


def _by_shard(batch: pa.RecordBatch, placement: Placement) -> Iterator[pa.RecordBatch]:
    """Yields a batch for each shard, also for one that has no rows: the place in the file says whose it is."""
    if not batch.num_rows:
        return
    rows, shard_of_row = placement.placed(batch)
    # NumPy sorts numbers of 16 bits by their digits.
    rows = rows.take(pa.array(np.argsort(shard_of_row, kind="stable")))
    start = 0
    for count in np.bincount(shard_of_row, minlength=placement.shards).tolist():
        yield rows.slice(start, count)
        start += count


@contextlib.contextmanager
def _file_errors(doing: str, path: Path) -> Iterator[None]:
    """Raises Arrow's errors of a file, too, as StorageError."""
    try:
        with storage_errors(f"{doing} rows on their way to their shards, in", path):
            yield
    except pa.ArrowInvalid as error:
        raise StorageError(
            f"cannot {doing} rows on their way to their shards, in {path}: {error}; run the epoch again"
        ) from error
