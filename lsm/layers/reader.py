"""Reads one layer file through a memory map.

A block is verified against its digest when it is first touched, then kept as Arrow arrays that point into the map.
Nothing is copied until rows are taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import (
    EXPIRED_COLUMN,
    HASH_COLUMN,
    TIME_COLUMN,
    TOMBSTONE_COLUMN,
    Bools,
    Indices,
)
from nosync.lsm.columnar.hashing import U32
from nosync.lsm.errors import CorruptionError
from nosync.lsm.layers.format import HEAD_BYTES, LayerInfo, Opened, decode, open_body, read_checked, verify_block
from nosync.lsm.layers.hash_index import HashIndex
from nosync.lsm.model.layer import Digest, LayerId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.env import Env, Have, Identity, is_foreign, storage_error

ROWS_OF_A_LOOKUP = 4
"""An index is made when one lookup is for a hash in so many rows: making it takes less than it saves."""
BLOCKS_AT_ONCE = 8
"""Blocks of a file that is elsewhere which are asked for together, where all are read in order."""
_BOOKKEEPING = (HASH_COLUMN, TIME_COLUMN, TOMBSTONE_COLUMN, EXPIRED_COLUMN)


class Block:
    """One verified record batch of a layer: `data` has the user's columns; the rest is bookkeeping.

    `hashes` is sorted; `time_index` points into `times` and is None where the layer has a single time;
    `tombstones` is None where the block has none, `expired`, which of them are expiries, where none is.
    """

    def __init__(self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], key: tuple[str, ...]) -> None:
        names = batch.schema.names
        self.batch = batch
        self._times = times
        self.data = batch.select([name for name in names if name not in _BOOKKEEPING])
        self.keys = [batch.column(name) for name in key]
        self.hashes: U32 = batch.column(HASH_COLUMN).to_numpy() if key else np.empty(0, dtype=np.uint32)
        self._index: HashIndex | None = None
        self._bounds: dict[str, tuple[int, int]] = {}
        self.time_index = batch.column(TIME_COLUMN).to_numpy() if TIME_COLUMN in names else None
        self.tombstones: Bools | None = None
        if TOMBSTONE_COLUMN in names and batch.column(TOMBSTONE_COLUMN).true_count:
            self.tombstones = batch.column(TOMBSTONE_COLUMN).to_numpy(zero_copy_only=False)
        self.expired: Bools | None = None
        if EXPIRED_COLUMN in names and batch.column(EXPIRED_COLUMN).true_count:
            self.expired = batch.column(EXPIRED_COLUMN).fill_null(False).to_numpy(zero_copy_only=False)

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)

    def last_at_most(self, wanted: U32) -> Indices:
        """Returns for each hash the last row whose hash is at most that, or -1. The block must have rows."""
        if self._index is None:
            if len(wanted) * ROWS_OF_A_LOOKUP < self.rows:
                return np.searchsorted(self.hashes, wanted, side="right").astype(np.int64) - 1
            self._index = HashIndex(self.hashes)
        return self._index.last_at_most(wanted)

    def may_have(self, column: str, low: int, high: int) -> bool:
        """Returns whether a row may have a number, or a time, from `low` to `high` in a column. None has where it says
        so.
        """
        if column not in self._bounds:
            ends = pc.min_max(self.data.column(column).view(pa.int64())).as_py()
            self._bounds[column] = (1, 0) if ends["min"] is None else (ends["min"], ends["max"])
        least, most = self._bounds[column]
        return least <= most and low <= most and least <= high

    def row_times(self) -> npt.NDArray[np.int64]:
        """Returns the packed time of every row."""
        if self.time_index is None:
            return np.full(self.rows, self._times[0], dtype=np.int64)
        times: npt.NDArray[np.int64] = self._times[self.time_index]
        return times

    def row_tombstones(self) -> Bools:
        return np.zeros(self.rows, dtype=np.bool_) if self.tombstones is None else self.tombstones

    def row_expiries(self) -> Bools:
        """Returns which rows are tombstones of rows that expired."""
        return np.zeros(self.rows, dtype=np.bool_) if self.expired is None else self.expired


class LayerReader:
    """An open layer. Safe to share between threads: blocks are immutable once read."""

    def __init__(
        self,
        opened: Opened,
        path: Path,
        size_bytes: int,
        identity: Identity,
        *,
        is_validated: bool = False,
        have: Have | None = None,
    ) -> None:
        """`have`: gets ranges that are not there before they are read (None: all are)."""
        self._opened, self.is_validated, self._have_ranges = opened, is_validated, have
        self.path = path
        self.identity = identity
        self.size_bytes = size_bytes
        self._times = np.array(opened.info.times, dtype=np.int64)
        self._file = open_body(opened, str(path))
        self._blocks: dict[int, Block] = {}

    @classmethod
    def open(cls, path: Path, env: Env, expected: LayerId | None = None, *, is_validated: bool = False) -> LayerReader:
        """Maps the file and verifies its ends; milliseconds for any size.

        `is_validated`: this host's node looked at all of it. Else each block is looked at in full when it is first
        touched, for Arrow follows offsets in a forged one to wherever they point.

        Raises FileNotFoundError when the file is gone (a merge may have replaced it), CorruptionError when it is
        not the whole layer that its name promises.
        """
        try:
            identity = env.identity(path)  # before: a file that takes its place meanwhile is then another one
            buffer, have = env.map_in_parts(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if is_foreign(error):
                raise CorruptionError(f"{path}: {error.strerror}; nosync did not write it") from error
            raise storage_error("map", path, error) from error
        reader = cls(decode(buffer, str(path)), path, buffer.size, identity, is_validated=is_validated, have=have)
        if expected is not None and reader.info.id != expected:
            raise CorruptionError(f"{path}: holds {reader.info.id} {reader.info.id.description}, expected {expected}")
        return reader

    @property
    def info(self) -> LayerInfo:
        return self._opened.info

    @property
    def id(self) -> LayerId:
        return self._opened.info.id

    @property
    def digest(self) -> Digest:
        return self._opened.digest

    @property
    def group_offsets(self) -> npt.NDArray[np.uint64]:
        """Returns where each key group's rows begin: `key_groups + 1` row numbers; empty for a layer without a key."""
        return self._opened.group_offsets

    @property
    def last_time(self) -> Time:
        """Returns the newest time of any row (the layer's lower bound where it has no rows)."""
        return self.info.times[-1]

    @property
    def schema(self) -> pa.Schema:
        """Returns the user's columns: the key's first, then the values."""
        return pa.schema([field for field in self._file.schema if field.name not in _BOOKKEEPING])

    @property
    def has_expiries(self) -> bool:
        """Returns whether it may have tombstones of rows that expired."""
        return EXPIRED_COLUMN in self._file.schema.names

    def schema_until(self, until: Time) -> pa.Schema:
        """Returns the columns that there are before a time: a merged layer may have some that came later."""
        added = self.info.added
        return pa.schema([field for field in self.schema if field.name not in added or added[field.name] < until])

    @property
    def block_count(self) -> int:
        return len(self.info.blocks) - 1

    def block(self, index: int) -> Block:
        """Raises CorruptionError where the block's bytes were changed."""
        block = self._blocks.get(index)
        if block is None:
            self._have([index])
            verify_block(self._opened, index, str(self.path))
            block = Block(self._batch(index), self._times, self.info.key)
            self._blocks[index] = block
        return block

    def _have(self, indices: Sequence[int]) -> None:
        if self._have_ranges is not None:
            blocks = self.info.blocks
            begins = [blocks[i - 1].end if i else 0 for i in indices]
            self._have_ranges(
                [(HEAD_BYTES + begin, HEAD_BYTES + blocks[i].end) for begin, i in zip(begins, indices, strict=True)]
            )

    def _batch(self, index: int) -> pa.RecordBatch:
        if self.is_validated:
            return self._file.get_batch(index)
        return read_checked(self._opened, self._file, index, str(self.path))

    def blocks(self) -> Iterator[Block]:
        for i in range(self.block_count):
            if i % BLOCKS_AT_ONCE == 0:
                self._have([j for j in range(i, min(i + BLOCKS_AT_ONCE, self.block_count)) if j not in self._blocks])
            yield self.block(i)

    def blocks_with(self, wanted: U32) -> Iterator[Block]:
        """Yields the blocks that may hold one of these hashes, which are in order. No other block is touched."""
        first, last = self._hash_ranges
        at = np.searchsorted(wanted, first)
        has = np.append(wanted, np.uint32(0))[at] <= last
        found = np.flatnonzero(has & (at < len(wanted))).tolist()
        self._have([i for i in found if i not in self._blocks])  # all at once: each may be a request
        return (self.block(i) for i in found)

    @cached_property
    def _hash_ranges(self) -> tuple[U32, U32]:
        """The first and the last hash of each block."""
        blocks = self.info.blocks[:-1]
        first, last = ([block.first_hash for block in blocks], [block.last_hash for block in blocks])
        return np.array(first, dtype=np.uint32), np.array(last, dtype=np.uint32)

    def verify(self, progress: Callable[[], object] = lambda: None) -> None:
        """Reads every byte. Raises CorruptionError for the first block that does not match, or is not valid Arrow."""
        for i in range(len(self.info.blocks)):
            self._have([i])
            verify_block(self._opened, i, str(self.path))
            progress()
        for i in range(self.block_count):
            progress()
            read_checked(self._opened, self._file, i, str(self.path))
