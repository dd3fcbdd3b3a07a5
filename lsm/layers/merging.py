"""The merge of sorted layers: which entries stay, in blocks of bounded size, without holding the layers in memory.

Invariants
- Of each key's entries at or before `since` only the newest stays; later ones all do.
- At the bottom of a trace a tombstone at or before `since` goes, for nothing older is left that it would hide.
- The result does not depend on how layers are cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.lsm.columnar.columns import Bools, conform, joined, take_batch, unify_schemas
from nosync.lsm.columnar.hashing import HASH_BITS, U32
from nosync.lsm.columnar.ordering import order_by_key
from nosync.lsm.layers.blocks import BLOCK_BYTES, rows_of_block
from nosync.lsm.layers.reader import Block, LayerReader
from nosync.lsm.model.timestamp import Time

BLOCK_ROWS = 1 << 17
RowFilter = Callable[[pa.RecordBatch], Bools]


@dataclass(frozen=True)
class Rows:
    """Holds rows of several layers in (hash, key, time) order; `data` has the user's columns."""

    data: pa.RecordBatch
    hashes: U32
    times: npt.NDArray[np.int64]
    tombstones: Bools
    expired: Bools | None = None
    """Which of the tombstones are of rows that expired. None: none is."""


def merged_blocks(
    layers: Sequence[LayerReader],
    *,
    since: Time,
    bottom: bool,
    until: Sequence[Time] | None = None,
    block_rows: int = BLOCK_ROWS,
    keep: RowFilter | None = None,
    first_hash: int = 0,
    end_hash: int = 1 << HASH_BITS,
) -> Iterator[Rows]:
    """Yields the merged rows of keyed, contiguous `layers` (oldest first), a range of hashes at a time.

    `until` leaves out, of each layer, rows after that time, `keep` rows of keys that it does not select, and
    `[first_hash, end_hash)` bounds the hashes. Raises CorruptionError when a block of a layer does not match its
    digest.
    """
    schema = unified_schema(layers, None if until is None else [Time(time + 1) for time in until])
    cursors = [_Cursor(layer, first_hash) for layer in layers]
    size = sum(layer.size_bytes for layer in layers)
    total = max(1, sum(layer.info.rows for layer in layers))
    budget = min(block_rows, rows_of_block(total, size))
    low = first_hash
    while low < end_hash:
        cut = _cut(cursors, low, end_hash, budget)
        limits: Sequence[Time | None] = until or [None] * len(cursors)
        pieces = [(*p, limit) for cursor, limit in zip(cursors, limits, strict=True) for p in cursor.advance(cut)]
        low = cut
        if pieces:
            rows = _merge_pieces(pieces, schema, since=since, bottom=bottom, keep=keep)
            if len(rows.hashes):
                yield rows


def unified_schema(layers: Sequence[LayerReader], until: Sequence[Time] | None = None) -> pa.Schema:
    """Returns the columns of all. `until`: of each, the time before which a column must be there."""
    schemas = [layer.schema for layer in layers]
    if until is not None:
        schemas = [layer.schema_until(end) for layer, end in zip(layers, until, strict=True)]
    schema = schemas[0]
    for layer, other in zip(layers[1:], schemas[1:], strict=True):
        if not other.equals(schema):
            schema = unify_schemas(schema, other, str(layer.id))
    return schema


def added_columns(layers: Sequence[LayerReader], since: Time) -> dict[str, Time]:
    """Returns the columns that the first of these layers, oldest first, did not have from its beginning, and from when
    on they are there.

    Without those that are there at every time that can still be asked for.
    """
    of_first = layers[0].info.added
    always = set(layers[0].schema.names) - of_first.keys()
    added: dict[str, Time] = {}
    for layer in layers:
        for name in layer.schema.names:
            if name not in always:
                added.setdefault(name, layer.info.added.get(name, layer.id.description.lower))
    return {name: at for name, at in added.items() if at > since}


class _Cursor:
    """Knows how far a merge has come in one layer."""

    def __init__(self, layer: LayerReader, first_hash: int) -> None:
        self._layer = layer
        self._ends = np.cumsum([0] + [block.rows for block in layer.info.blocks[:-1]])
        self.position = self.rank(first_hash)

    def rank(self, hash: int) -> int:
        """Returns how many of the layer's rows have a smaller hash."""
        infos = self._layer.info.blocks
        for i in range(len(infos) - 1):
            if infos[i].last_hash >= hash:
                within = 0
                if infos[i].first_hash < hash:
                    within = int(np.searchsorted(self._layer.block(i).hashes, np.uint32(hash)))
                return int(self._ends[i]) + within
        return int(self._ends[-1])

    def advance(self, cut: int) -> Iterator[tuple[Block, int, int]]:
        """Yields the (block, start, stop) pieces of the rows from here to the first with a hash >= cut."""
        end = self.rank(cut) if cut < 1 << HASH_BITS else int(self._ends[-1])
        for i in range(len(self._ends) - 1):
            start, stop = max(self.position, int(self._ends[i])), min(end, int(self._ends[i + 1]))
            if start < stop:
                yield self._layer.block(i), start - int(self._ends[i]), stop - int(self._ends[i])
        self.position = end


def _cut(cursors: Sequence[_Cursor], low: int, end: int, budget: int) -> int:
    """Returns the largest hash such that at most `budget` rows lie before it; at least one hash is always taken."""

    def rows_before(hash: int) -> int:
        return sum(cursor.rank(hash) - cursor.position for cursor in cursors)

    if rows_before(end) <= budget:
        return end
    fits, exceeds = low + 1, end
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if rows_before(middle) <= budget:
            fits = middle
        else:
            exceeds = middle
    return fits


def _merge_pieces(
    pieces: Sequence[tuple[Block, int, int, Time | None]],
    schema: pa.Schema,
    *,
    since: Time,
    bottom: bool,
    keep: RowFilter | None,
) -> Rows:
    batches, hash_parts, time_parts, dead_parts, expired_parts = [], [], [], [], []
    for block, start, stop, until in pieces:
        data = conform(block.data.slice(start, stop - start), schema)
        hashes, times = block.hashes[start:stop], block.row_times()[start:stop]
        dead, expired = block.row_tombstones()[start:stop], block.row_expiries()[start:stop]
        selected = np.ones(stop - start, dtype=np.bool_)
        if until is not None:
            selected &= times <= until
        if keep is not None:
            selected &= keep(data)
        if not selected.all():
            at = np.flatnonzero(selected)
            data, hashes, times, dead, expired = take_batch(data, at), hashes[at], times[at], dead[at], expired[at]
        batches.append(data)
        hash_parts.append(hashes)
        time_parts.append(times)
        dead_parts.append(dead)
        expired_parts.append(expired)
    data = concat_batches(batches, schema)
    hashes, times = np.concatenate(hash_parts), np.concatenate(time_parts)
    dead, expired = np.concatenate(dead_parts), np.concatenate(expired_parts)
    # The key's columns come first in every layer's schema; `pieces` are of one trace, so they agree on how many.
    keys = data.columns[: len(pieces[0][0].keys)]
    order, next_is_same_key = order_by_key(hashes, keys)
    kept = order[_survivors(np.take(times, order), np.take(dead, order), next_is_same_key, since, bottom)]
    hashes, times = np.take(hashes, kept), np.take(times, kept)
    return Rows(take_batch(data, kept), hashes, times, np.take(dead, kept), np.take(expired, kept))


def _survivors(times: npt.NDArray[np.int64], dead: Bools, next_is_same_key: Bools, since: Time, bottom: bool) -> Bools:
    """Returns which rows, ordered by key and then time, a merge at `since` keeps."""
    passed = times <= since
    superseded = np.zeros(len(times), dtype=np.bool_)
    superseded[:-1] = next_is_same_key & passed[1:]
    gone = superseded | (dead & passed) if bottom else superseded
    return ~gone


def concat_batches(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
    columns = [joined([batch.column(i) for batch in batches], schema.field(i).type) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def log_blocks(layers: Sequence[LayerReader], schema: pa.Schema, block_rows: int) -> Iterator[Rows]:
    """Yields the rows of logs, one after the other, in blocks of about `block_rows`, or fewer where rows are large."""
    waiting: list[Block] = []
    rows = size_bytes = 0
    for layer in layers:
        for block in layer.blocks():
            if waiting and (rows >= block_rows or size_bytes + block.data.nbytes > BLOCK_BYTES):
                yield _log_rows(waiting, schema)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append(block)
            rows, size_bytes = rows + block.rows, size_bytes + block.data.nbytes
    if waiting:
        yield _log_rows(waiting, schema)


def _log_rows(blocks: Sequence[Block], schema: pa.Schema) -> Rows:
    data = concat_batches([conform(block.data, schema) for block in blocks], schema)
    n = len(data)
    times = np.concatenate([block.row_times() for block in blocks])
    return Rows(data, np.zeros(n, dtype=np.uint32), times, np.zeros(n, dtype=np.bool_))
