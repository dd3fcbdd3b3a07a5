"""Merging layers: what is kept, in bounded steps, over whole columns.

Invariants, for a merge of the contiguous layers [a, b) of a trace at frontier `since`
- For every t >= since, the state as of t read through the merged layer equals the one read through its inputs.
- Of each key's entries at or before `since` only the newest is kept; its time becomes at most `since`. A tombstone at
  or before `since` goes altogether when nothing older lies below the merged layers (`bottom`).
- The result depends on the inputs, `since` and the block size only: nodes with the same settings write the same bytes.
- Logs (layers without a key) have nothing to supersede: they are concatenated, and keep every time.

A merge is an iterator of blocks (`merged_blocks`); each step works on one range of hashes with at most about
`block_rows` input rows, so the caller can stop, sleep or do other work between any two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.lsm.columns import Bools, conform, order_by_key, take_batch, unify_schemas
from nosync.lsm.env import Env, storage_errors
from nosync.lsm.errors import CorruptionError
from nosync.lsm.format import HASH_COLUMN, TIME_COLUMN, TOMBSTONE_COLUMN, LayerFileWriter
from nosync.lsm.hashing import HASH_BITS, U32, key_groups_of
from nosync.lsm.layer import Description, Digest, LayerId
from nosync.lsm.reader import Block, LayerReader
from nosync.lsm.ready_files import new_file
from nosync.lsm.timestamp import ZERO, Time, epoch_of, pack
from nosync.lsm.writer import Published, link_layer, temporary_path

FANOUT = 4
LOG_FANOUT = 16
"""Nobody looks keys up in all layers of a log, so more of them may lie side by side: rows are written again half as often."""
BLOCK_ROWS = 1 << 17
_BLOCK_BYTES = 512 << 20
_SMALLEST_LEVEL_ROWS = 1024
_STALE_SHARE = 0.25
_SYNC_EACH_BYTES = 8 << 20

RowFilter = Callable[[pa.RecordBatch], Bools]


@dataclass(frozen=True)
class Rows:
    """Rows of several layers in (hash, key, time) order; `data` has the user's columns."""

    data: pa.RecordBatch
    hashes: U32
    times: npt.NDArray[np.int64]
    tombstones: Bools


# --- choosing what to merge -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A layer of a trace as the policy sees it."""

    rows: int
    description: Description
    has_key: bool = True


def level_of(rows: int, *, has_key: bool = True) -> int:
    """A layer's level: 0 below 1024 rows, then one more for each factor of FANOUT, of logs of LOG_FANOUT."""
    if rows < _SMALLEST_LEVEL_ROWS:
        return 0
    return int(math.log(rows / _SMALLEST_LEVEL_ROWS, FANOUT if has_key else LOG_FANOUT)) + 1


def _level(layer: Candidate) -> int:
    return level_of(layer.rows, has_key=layer.has_key)


def choose_merge(trace: Sequence[Candidate], since: Time, *, taken: int = 0) -> tuple[int, int] | None:
    """Which layers `[i, j)` of a contiguous trace, oldest first, to merge next; None when it is in shape.

    `taken`: so many of the oldest are being merged already, and left alone.

    Two rules. *Geometric levels*: FANOUT layers of one level (LOG_FANOUT of a log), with nothing larger after them, become one,
    together with older ones that are smaller than what comes of it; so a trace of n rows has at most (FANOUT - 1) layers at
    each of O(log n) levels. *Stale rows*: when the layers above the
    oldest that `since` has passed hold more than a quarter of its rows, they are merged into it, so that superseded
    rows do not take more than about that share of the space.
    """
    # A small layer with a larger one after it counts as one of that level: it waits for the same merge.
    fanout = FANOUT if not trace or trace[0].has_key else LOG_FANOUT
    levels = [_level(layer) for layer in trace]
    levels = list(itertools.accumulate(reversed(levels), max))[::-1]
    levels[:taken] = []
    for level in sorted(set(levels)):
        if levels.count(level) >= fanout:
            first = taken + levels.index(level)
            total = sum(layer.rows for layer in trace[first:])
            # Many may have waited: they outgrow what is below.
            while first > taken and _level(trace[first - 1]) < level_of(total, has_key=trace[0].has_key):
                first -= 1
                total += trace[first].rows
            return first, len(trace)
    if not taken and len(trace) > 1 and trace[0].has_key:
        passed = next((i for i in range(1, len(trace)) if trace[i].description.upper > since + 1), len(trace))
        if sum(layer.rows for layer in trace[1:passed]) > _STALE_SHARE * trace[0].rows:
            return 0, passed
    return None


def is_behind(trace: Sequence[Candidate]) -> bool:
    """Whether there are far more layers than merging leaves: so many that reading feels it."""
    fanout = FANOUT if not trace or trace[0].has_key else LOG_FANOUT
    levels = {_level(layer) for layer in trace}
    return len(trace) > (fanout - 1) * len(levels) + 2 * FANOUT**2


# --- the work --------------------------------------------------------------------------------------------------------


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
    """The merged rows of keyed, contiguous `layers` (oldest first), a range of hashes at a time.

    `until` leaves out, of each layer, rows after that time, `keep` rows of keys that it does not select, and
    `[first_hash, end_hash)` bounds the hashes. Raises CorruptionError when a block of a layer does not match its digest.
    """
    schema = unified_schema(layers, None if until is None else [Time(time + 1) for time in until])
    cursors = [_Cursor(layer, first_hash) for layer in layers]
    size = sum(layer.size_bytes for layer in layers)
    total = max(1, sum(layer.info.rows for layer in layers))
    budget = max(1, min(block_rows, _BLOCK_BYTES * total // max(size, 1)))
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
    """The columns of all. `until`: of each, the time before which a column must be there."""
    schemas = [layer.schema for layer in layers]
    if until is not None:
        schemas = [layer.schema_until(end) for layer, end in zip(layers, until, strict=True)]
    schema = schemas[0]
    for layer, other in zip(layers[1:], schemas[1:], strict=True):
        if not other.equals(schema):
            schema = unify_schemas(schema, other, str(layer.id))
    return schema


def added_columns(layers: Sequence[LayerReader], since: Time) -> dict[str, Time]:
    """Columns that the first of these layers, oldest first, had not from its beginning, and from when on they are there.

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
    """How far a merge has come in one layer."""

    def __init__(self, layer: LayerReader, first_hash: int) -> None:
        self._layer = layer
        self._ends = np.cumsum([0] + [block.rows for block in layer.info.blocks[:-1]])
        self.position = self.rank(first_hash)

    def rank(self, hash: int) -> int:
        """How many of the layer's rows have a smaller hash."""
        infos = self._layer.info.blocks
        for i in range(len(infos) - 1):
            if infos[i].last_hash >= hash:
                within = 0
                if infos[i].first_hash < hash:
                    within = int(np.searchsorted(self._layer.block(i).hashes, np.uint32(hash)))
                return int(self._ends[i]) + within
        return int(self._ends[-1])

    def advance(self, cut: int) -> Iterator[tuple[Block, int, int]]:
        """The (block, start, stop) pieces of the rows from here to the first with a hash >= cut."""
        end = self.rank(cut) if cut < 1 << HASH_BITS else int(self._ends[-1])
        for i in range(len(self._ends) - 1):
            start, stop = max(self.position, int(self._ends[i])), min(end, int(self._ends[i + 1]))
            if start < stop:
                yield self._layer.block(i), start - int(self._ends[i]), stop - int(self._ends[i])
        self.position = end


def _cut(cursors: Sequence[_Cursor], low: int, end: int, budget: int) -> int:
    """The largest hash such that at most `budget` rows lie before it; at least one hash is always taken."""

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
    batches, hash_parts, time_parts, dead_parts = [], [], [], []
    for block, start, stop, until in pieces:
        data = conform(block.data.slice(start, stop - start), schema)
        hashes, times = block.hashes[start:stop], block.row_times()[start:stop]
        dead = block.row_tombstones()[start:stop]
        selected = np.ones(stop - start, dtype=np.bool_)
        if until is not None:
            selected &= times <= until
        if keep is not None:
            selected &= keep(data)
        if not selected.all():
            at = np.flatnonzero(selected)
            data, hashes, times, dead = take_batch(data, at), hashes[at], times[at], dead[at]
        batches.append(data)
        hash_parts.append(hashes)
        time_parts.append(times)
        dead_parts.append(dead)
    data = concat_batches(batches, schema)
    hashes, times = np.concatenate(hash_parts), np.concatenate(time_parts)
    dead = np.concatenate(dead_parts)
    # The key's columns come first in every layer's schema; `pieces` are of one trace, so they agree on how many.
    keys = data.columns[: len(pieces[0][0].keys)]
    order, next_is_same_key = order_by_key(hashes, keys)
    kept = order[_survivors(np.take(times, order), np.take(dead, order), next_is_same_key, since, bottom)]
    return Rows(take_batch(data, kept), np.take(hashes, kept), np.take(times, kept), np.take(dead, kept))


def _survivors(times: npt.NDArray[np.int64], dead: Bools, next_is_same_key: Bools, since: Time, bottom: bool) -> Bools:
    """Which rows, ordered by key and then time, a merge at `since` keeps."""
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
    columns = [pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _log_blocks(layers: Sequence[LayerReader], schema: pa.Schema, block_rows: int) -> Iterator[Rows]:
    """The rows of logs, one after the other, in blocks of about `block_rows`, or fewer where rows are large."""
    waiting: list[Block] = []
    rows = size_bytes = 0
    for layer in layers:
        for block in layer.blocks():
            if waiting and (rows >= block_rows or size_bytes + block.data.nbytes > _BLOCK_BYTES):
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


class Merge:
    """One merge in progress: `layers` of one trace, oldest first and contiguous, become one layer.

    `for _ in merge.steps(): ...` does the work, a bounded step at a time; then `merge.published` is the result.
    Abandoning it in the middle leaves nothing but a temporary file, which the next start removes.
    """

    def __init__(
        self,
        root: Path,
        layers: Sequence[LayerReader],
        *,
        since: Time,
        bottom: bool,
        env: Env,
        block_rows: int = BLOCK_ROWS,
        temporary: Path | None = None,
    ) -> None:
        """`temporary`: where it is written, in the store's `tmp/` (default: a name that nobody else takes)."""
        first, last = layers[0].info, layers[-1].info
        self.temporary = temporary or temporary_path(root, env)
        self.root, self.layers, self._env = root, tuple(layers), env
        self.bottom, self.block_rows = bottom, block_rows
        self.requested_since = since
        self.key = first.key
        lower, upper = first.id.description.lower, last.id.description.upper
        carried = max(layer.id.description.since for layer in layers)
        # A frontier beyond the newest epoch says nothing more about these layers.
        frontier = max(carried, min(since, pack(epoch_of(Time(upper - 1))))) if self.key else ZERO
        self._since = frontier
        self.id = LayerId(first.id.trace, Description(lower, upper, frontier))
        times = {t for layer in layers for t in layer.info.times}
        self._times = sorted({max(t, frontier) for t in times})
        self._published: Published | None = None

    @property
    def published(self) -> Published:
        assert self._published is not None, "run steps() to its end first"
        return self._published

    def steps(self) -> Iterator[int]:
        """Yields the number of rows written after each step. Raises CorruptionError or StorageError."""
        schema = unified_schema(self.layers)
        stored = self._stored_schema(schema)
        key_groups = self.layers[0].info.key_groups
        counts = np.zeros(key_groups if self.key else 0, dtype=np.int64)
        temporary = self.temporary
        done = False
        try:
            with storage_errors("write", temporary), new_file(self.root, temporary, self._env) as file:
                writer = LayerFileWriter(file, stored)
                synced = 0
                for rows in self._blocks(schema):
                    writer.write_block(self._stored(rows, stored))
                    if writer.body_bytes - synced >= _SYNC_EACH_BYTES:
                        # One fsync of all at the end would hold up everyone who creates files meanwhile.
                        file.flush()
                        self._env.sync_file(temporary)
                        synced = writer.body_bytes
                    if self.key:
                        counts += np.bincount(key_groups_of(rows.hashes, key_groups), minlength=key_groups)
                    yield writer.rows
                offsets = np.concatenate([[0], np.cumsum(counts)]) if self.key else counts
                info, digest = writer.finish(
                    self.id,
                    key=self.key,
                    key_groups=key_groups,
                    times=self._times,
                    group_offsets=offsets.astype(np.uint64),
                    added=added_columns(self.layers, self._since),
                )
            # Inputs are deleted once this is published, so it must be durable first; nobody waits for a merge.
            with storage_errors("sync", temporary):
                self._env.sync_file(temporary)
            self._verify(digest)
            self._published = link_layer(self.root, self.id, temporary, info, digest, self._env)
            done = True
        finally:
            if not done:
                with storage_errors("remove", temporary):
                    self._env.unlink(temporary)

    def _verify(self, digest: Digest) -> None:
        """What is to stand for its inputs, which go, is read back first. Raises CorruptionError."""
        written = LayerReader.open(self.temporary, self._env, self.id)
        written.verify()
        if written.digest != digest:
            raise CorruptionError(f"{self.temporary}: was written with digest {digest[:16]}, is {written.digest[:16]}")

    def _blocks(self, schema: pa.Schema) -> Iterator[Rows]:
        if not self.key:
            return _log_blocks(self.layers, schema, self.block_rows)
        return merged_blocks(self.layers, since=self._since, bottom=self.bottom, block_rows=self.block_rows)

    def _stored_schema(self, schema: pa.Schema) -> pa.Schema:
        fields = list(schema)
        if self.key:
            fields.insert(0, pa.field(HASH_COLUMN, pa.uint32()))
        if len(self._times) > 1:
            fields.append(pa.field(TIME_COLUMN, _index_type(len(self._times))))
        if any(layer.info.tombstones for layer in self.layers):
            fields.append(pa.field(TOMBSTONE_COLUMN, pa.bool_()))
        return pa.schema(fields)

    def _stored(self, rows: Rows, stored: pa.Schema) -> pa.RecordBatch:
        columns = list(rows.data.columns)
        if self.key:
            columns.insert(0, pa.array(rows.hashes))
        if len(self._times) > 1:
            index = np.searchsorted(np.array(self._times), np.maximum(rows.times, self._since))
            columns.append(pa.array(index).cast(stored.field(TIME_COLUMN).type))
        if stored.get_field_index(TOMBSTONE_COLUMN) >= 0:
            columns.append(pa.array(rows.tombstones))
        return pa.RecordBatch.from_arrays(columns, schema=stored)


def _index_type(times: int) -> pa.DataType:
    if times <= 1 << 8:
        return pa.uint8()
    return pa.uint16() if times <= 1 << 16 else pa.uint32()
