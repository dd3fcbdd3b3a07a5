"""Reading one trace: the state of one (stage, shard) as of any timestamp, and what changed between two.

Invariants
- The layers of a trace are contiguous: each `lower` equals the previous `upper`. A missing one is a HoleError that
  names it, never a silently different answer.
- State as of `t` = the newest entry of each key with time <= t, for any `t` with `since <= t < upper`.
- `changes(t0, t1)` applied to the state as of `t0` gives the state as of `t1`.

Lookups go from the newest layer to the oldest with the keys that are still open, one search of a block for all of them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    Bools,
    Indices,
    conform,
    gather,
    keys_equal,
    take,
    take_batch,
)
from nosync.lsm.columnar.hashing import U32, Hasher, first_hash_of_group
from nosync.lsm.columnar.ordering import order_by_key, sort_hashes
from nosync.lsm.errors import CompactedError, HoleError
from nosync.lsm.layers.merging import RowFilter, Rows, concat_batches, merged_blocks, unified_schema
from nosync.lsm.layers.reader import Block, LayerReader
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, ROUND_BITS, Time, show, show_as_of
from nosync.lsm.trace.change_feed import (
    INSERT,
    Lookup,
    change_rows,
    first_of_keys,
    with_change_columns,
)

_MOST = (1 << 63) - 1
_HASHED_ROWS = 100
_STEPS = 32


class Trace:
    """A contiguous sequence of open layers, oldest first. Immutable; cheap to make from open layers.

    After rescaling it begins with layers of older traces, whose other keys are passed over.
    """

    def __init__(
        self,
        id: TraceId,
        layers: Sequence[LayerReader],
        key_groups: int,
        schema: pa.Schema | None = None,
        ends: Mapping[LayerId, Time] | None = None,
        begins: Mapping[LayerId, Time] | None = None,
        until: Time | None = None,
        key: tuple[str, ...] = (),
    ) -> None:
        """`schema`, `key`: of a trace without layers. `ends`: of layers that count only up to a time (exclusive),
        because the state goes on elsewhere from there. `begins`: of layers whose entries before a time are in the layer
        before as well. `until`: nothing is asked for at this time or later, so columns that came with it are not there.
        """
        self.ends, self.begins = ends or {}, begins or {}
        for previous, layer in itertools.pairwise(layers):
            if layer.id.trace != previous.id.trace or previous.id in self.ends or layer.id in self.begins:
                continue  # older traces that the state begins in; whoever opened them knows where they end
            if layer.id.description.lower != previous.id.description.upper:
                lower, upper = previous.id.description.upper, layer.id.description.lower
                raise HoleError(
                    f"{id}: [{show(lower)}, {show(upper)}) is missing between its layers",
                    stage=id.stage,
                    shard=str(id.shard),
                    lower=show(lower),
                    upper=show(upper),
                )
        self.id = id
        self.layers = tuple(layers)
        self.key: tuple[str, ...] = layers[0].info.key if layers else key
        upper = END_OF_TIME if until is None else until
        limits = [min(upper, self.ends.get(layer.id, upper)) for layer in layers]
        self.schema: pa.Schema = unified_schema(layers, limits) if layers else (schema or pa.schema([]))
        groups = id.shard.groups(key_groups)
        self._first_hash = first_hash_of_group(groups.start, key_groups)
        self._end_hash = first_hash_of_group(groups.stop, key_groups)

    def has_hash(self, hash32: int) -> bool:
        """Returns whether keys of a hash belong to the trace's shard."""
        return self._first_hash <= hash32 < self._end_hash

    def read_as(self, schema: pa.Schema) -> Trace:
        """Returns the same trace, with columns that its layers may lack: these are null. Columns of its own that
        `schema` lacks come last.
        """
        if self.schema.equals(schema):
            return self
        more = [field for field in self.schema if schema.get_field_index(field.name) < 0]
        other = copy.copy(self)
        other.schema = pa.schema([*schema, *more])
        return other

    @property
    def since(self) -> Time:
        return max((layer.id.description.since for layer in self.layers), default=Time(0))

    @property
    def upper(self) -> Time:
        return self.layers[-1].id.description.upper if self.layers else Time(0)

    def _until(self, layer: LayerReader, as_of: Time) -> Time:
        """Returns up to which time a layer counts in a read as of `as_of`."""
        end = self.ends.get(layer.id)
        return as_of if end is None else Time(min(as_of, end - 1))

    def _after(self, layer: LayerReader, after: Time) -> Time:
        """Returns after which time a layer's entries count that no layer before has."""
        begin = self.begins.get(layer.id)
        return after if begin is None else Time(max(after, begin - 1))

    def _check_exact(self, as_of: Time) -> None:
        # `as_of` is -1 for the state before epoch 0, which is empty and was never merged away.
        if max(as_of, 0) < self.since:
            raise CompactedError(
                f"{self.id}: the history before {show(self.since)} was merged away, {show_as_of(as_of)} was asked for. "
                "Keep more with retain=, or hold a point with pin()"
            )

    # --- whole state ---------------------------------------------------------------------------------------------

    def scan(self, as_of: Time, keep: RowFilter | None = None) -> list[pa.RecordBatch]:
        """Returns the live rows as of `as_of` in stored order; of a log, all rows up to it.

        `keep` selects rows by key columns (it must select all or none of a key's versions).
        """
        self._check_exact(as_of)
        if not self.layers:
            return []
        if not self.key:
            return self._log_rows(Time(-1), as_of)
        blocks = merged_blocks(
            self.layers,
            since=as_of,
            bottom=True,
            until=[self._until(layer, as_of) for layer in self.layers],
            keep=keep,
            first_hash=self._first_hash,
            end_hash=self._end_hash,
        )
        return [conform(rows.data, self.schema) for rows in blocks]

    def _log_rows(self, after: Time, until: Time) -> list[pa.RecordBatch]:
        """Returns the rows with `after < time <= until` in recorded order."""
        batches = []
        for layer in self.layers:
            if layer.last_time <= after or layer.id.description.lower > until:
                continue
            for block in layer.blocks():
                times = block.row_times()
                # A log's rows are in order of time, so the selected ones are one slice.
                low = self._after(layer, after)
                start, stop = np.searchsorted(times, [low, max(low, self._until(layer, until))], side="right")
                batches.append(conform(block.data.slice(int(start), int(stop - start)), self.schema))
        return batches

    # --- by key --------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[pa.Array], hashes: U32, as_of: Time) -> Lookup:
        """Returns the state of the given keys (columns in the key's order; any row order) as of `as_of`."""
        self._check_exact(as_of)
        order, sorted_hashes = _sorted_within(hashes, self._first_hash, self._end_hash)
        sorted_keys = [take(key, order) for key in keys]
        open_ = np.ones(len(order), dtype=np.bool_)
        hits: list[tuple[Block, Indices, Indices]] = []  # block, its rows, positions in sorted order
        for layer in reversed(self._layers_until(as_of)):
            if not open_.any():
                break
            latest = self._until(layer, as_of)
            check_time = layer.last_time > latest
            for block in layer.blocks_with(sorted_hashes[open_]):
                low = int(np.searchsorted(sorted_hashes, block.hashes[0], side="left"))
                high = int(np.searchsorted(sorted_hashes, block.hashes[-1], side="right"))
                probes = np.flatnonzero(open_[low:high]) + low
                rows, probes = _probe(block, sorted_hashes, probes, sorted_keys, latest if check_time else None)
                open_[probes] = False
                if block.tombstones is not None:
                    alive = ~block.tombstones[rows]
                    rows, probes = rows[alive], probes[alive]
                if len(rows):
                    hits.append((block, rows, probes))
        return self._gather(hits, order, len(hashes))

    def _layers_until(self, as_of: Time) -> list[LayerReader]:
        """Returns the layers that may have rows as of a time, oldest first."""
        return [layer for layer in self.layers if layer.id.description.lower <= as_of and layer.info.rows]

    def lookup_prefix(self, prefix: Sequence[pa.Array], hashes: U32, as_of: Time) -> pa.RecordBatch:
        """Returns the live rows as of `as_of` whose first key columns are one of the given ones; for stages whose rows
        are hashed by those columns alone (the sides of a join). `prefix` holds each combination once; rows come in
        stored order.
        """
        self._check_exact(as_of)
        order, wanted = _sorted_within(hashes, self._first_hash, self._end_hash)
        batches, row_hashes, dead = [], [], []
        for layer in self._layers_until(as_of):
            for block in layer.blocks_with(wanted):
                rows, asked = _rows_of(block, wanted)
                same = keys_equal(block.keys[: len(prefix)], rows, prefix, order[asked])
                if layer.last_time > self._until(layer, as_of):
                    same &= block.row_times()[rows] <= self._until(layer, as_of)
                rows = rows[same]
                if len(rows):
                    batches.append(conform(take_batch(block.data, rows), self.schema))
                    row_hashes.append(block.hashes[rows])
                    dead.append(block.row_tombstones()[rows])
        data = concat_batches(batches, self.schema)
        if not batches:
            return data
        by_key, next_is_same_key = order_by_key(np.concatenate(row_hashes), data.columns[: len(self.key)])
        newest = by_key[np.append(~next_is_same_key, True)]
        return take_batch(data, newest[~np.concatenate(dead)[newest]])

    def lookup_prefix_above(
        self, prefix: Sequence[pa.Array], hashes: U32, column: str, above: int, as_of: Time
    ) -> pa.RecordBatch:
        """Does what `lookup_prefix` does, for rows whose `column`, a timestamp, is above a number: it is read first."""
        order, wanted = _sorted_within(hashes, self._first_hash, self._end_hash)
        found, of = [], []
        for layer in self._layers_until(as_of):
            for block in layer.blocks_with(wanted):
                if block.may_have(column, above + 1, _MOST):
                    rows, asked = _rows_of(block, wanted)
                    at = np.flatnonzero(_between(take(block.data.column(column), rows), above + 1, _MOST))
                    rows = rows[at][keys_equal(block.keys[: len(prefix)], rows[at], prefix, order[asked[at]])]
                    found.append(take_batch(block.data.select(list(self.key)), rows))
                    of.append(block.hashes[rows])
        return _still_there(self, found, of, column, above + 1, _MOST, as_of)[0]

    def rows_where(self, column: str, low: int, high: int, as_of: Time) -> tuple[pa.RecordBatch, U32]:
        """Returns the live rows as of `as_of` with `low <= column <= high` (an integer or timestamp column), and their
        hashes.

        Reads that one column of every layer, and nothing else of the rows that it leaves out.
        """
        found, hashes = [], []
        for layer in self._layers_until(as_of):
            if column not in layer.schema.names:
                continue
            for block in layer.blocks():
                if not block.may_have(column, low, high):
                    continue
                at = np.flatnonzero(_between(block.data.column(column), low, high))
                of = block.hashes[at]
                at = at[(of >= self._first_hash) & (of.astype(np.int64) < self._end_hash)]
                if len(at):
                    found.append(take_batch(block.data.select(list(self.key)), at))
                    hashes.append(block.hashes[at])
        return _still_there(self, found, hashes, column, low, high, as_of)

    def _gather(self, hits: Sequence[tuple[Block, Indices, Indices]], order: Indices, n: int) -> Lookup:
        found: Bools = np.zeros(n, dtype=np.bool_)
        asked = [np.take(order, probes) for _, _, probes in hits]
        for at in asked:
            found[at] = True
        place = np.cumsum(found) - 1
        pieces = [
            (conform(block.data, self.schema), rows, np.take(place, at))
            for (block, rows, _), at in zip(hits, asked, strict=True)
        ]
        return Lookup(found, gather(pieces, self.schema))

    def goes_on_as(self, fingerprint: str) -> bool:
        """Returns whether code of this fingerprint recorded any of it: not, where other code changed to that just now."""
        return any(layer.id.trace.fingerprint == fingerprint for layer in self.layers)

    # --- change feed ---------------------------------------------------------------------------------------------

    def rows_between(self, after: Time, until: Time) -> Rows:
        """Returns every recorded entry with `after < time <= until`, tombstones included, by (hash, key, time)."""
        self._check_exact(after)
        batches, hashes, times, dead, expired = [], [], [], [], []
        for layer in self.layers:
            if layer.last_time <= after or layer.id.description.lower > until or not layer.info.rows:
                continue
            for block in layer.blocks():
                row_times = block.row_times()
                selected = (row_times > self._after(layer, after)) & (row_times <= self._until(layer, until))
                selected &= (block.hashes >= self._first_hash) & (block.hashes.astype(np.int64) < self._end_hash)
                at = np.flatnonzero(selected)
                data = block.data if len(at) == block.rows else take_batch(block.data, at)
                batches.append(conform(data, self.schema))
                hashes.append(block.hashes[at])
                times.append(row_times[at])
                dead.append(block.row_tombstones()[at])
                expired.append(block.row_expiries()[at])
        if not batches:
            nothing = np.empty(0, dtype=np.int64)
            empty = concat_batches([], self.schema)
            return Rows(empty, nothing.astype(np.uint32), nothing, nothing.astype(np.bool_))
        data = concat_batches(batches, self.schema)
        joined = np.concatenate(hashes)
        order, _ = order_by_key(joined, data.columns[: len(self.key)])
        went = np.concatenate(dead)[order], np.concatenate(expired)[order]
        return Rows(take_batch(data, order), joined[order], np.concatenate(times)[order], *went)

    def changes(self, after: Time, until: Time) -> pa.Table:
        """Returns the change feed: what turns the state as of `after` into the state as of `until`.

        Columns: the stage's, then `_change_type` (insert, update_preimage, update_postimage, delete, as in Delta's
        change feed; and expire, where a row was forgotten) and `_epoch`. In order of epoch, then of (key group, hash,
        key); a preimage comes right before its postimage, and a delete or an expiry carries the values that were there.
        """
        if not self.key:
            return self._log_changes(after, until)
        rows = self.rows_between(after, until)
        first_of_key = first_of_keys(rows, len(self.key))
        first = np.flatnonzero(first_of_key)
        keys = rows.data.columns[: len(self.key)]
        before = self.lookup([take(key, first) for key in keys], rows.hashes[first], after)
        return change_rows(rows, first_of_key, before)

    def _log_changes(self, after: Time, until: Time) -> pa.Table:
        self._check_exact(after)
        batches, epochs = [], []
        for layer in self.layers:
            for block in layer.blocks():
                times = block.row_times()
                low = self._after(layer, after)
                limit = max(low, self._until(layer, until))
                start, stop = (int(i) for i in np.searchsorted(times, [low, limit], side="right"))
                batches.append(conform(block.data.slice(start, stop - start), self.schema))
                epochs.append(times[start:stop] >> ROUND_BITS)
        data = concat_batches(batches, self.schema)
        row_epochs = np.concatenate([*epochs, np.empty(0, dtype=np.int64)])
        if CHANGE_TYPE_COLUMN in self.schema.names:  # a log of changes says itself what each row does
            table = pa.Table.from_batches([data])
            at = table.schema.get_field_index(CHANGE_TYPE_COLUMN)
            kinds = pc.fill_null(table.column(at), INSERT)  # where only a part of its layers says so, others add rows
            return table.set_column(at, table.schema.field(at), kinds).append_column(EPOCH_COLUMN, pa.array(row_epochs))
        return with_change_columns(data, np.zeros(len(data), dtype=np.int8), row_epochs)


def hashes_in(trace: Trace, keys: Sequence[pa.Array], hasher: Hasher) -> U32 | None:
    """Returns by which hashes rows of these keys are in a trace. None: by those of all their columns.

    Rows of sessions, and of joins, are hashed by the first columns of their keys. A store does not say so, but its rows
    do.
    """
    blocks = (block for layer in trace.layers if layer.info.rows for block in layer.blocks())
    block = next(blocks, None)
    if block is None:
        return None
    rows = np.arange(min(block.rows, _HASHED_ROWS))
    some = [take(key, rows) for key in block.keys]
    counts = range(len(some), 0, -1)
    n = next((n for n in counts if np.array_equal(hasher(some[:n]), block.hashes[rows])), len(some))
    return None if n == len(some) else hasher(keys[:n])


def _still_there(
    trace: Trace, keys: Sequence[pa.RecordBatch], hashes: Sequence[U32], column: str, low: int, high: int, as_of: Time
) -> tuple[pa.RecordBatch, U32]:
    """Returns the rows of some keys, each of which may be given several times, that are live with `low <= column <= high`
    as of `as_of`, and their hashes.
    """
    if not keys:
        return concat_batches([], trace.schema), np.empty(0, dtype=np.uint32)
    given, all_hashes = concat_batches(keys, keys[0].schema), np.concatenate(hashes)
    order, next_is_same_key = order_by_key(all_hashes, given.columns)
    once = order[np.append(~next_is_same_key, True)[: len(order)]]
    answer = trace.lookup([take(key, once) for key in given.columns], all_hashes[once], as_of)
    still = np.flatnonzero(_between(answer.data.column(column), low, high))
    return take_batch(answer.data, still), all_hashes[once][answer.found][still]


def _rows_of(block: Block, wanted: U32) -> tuple[Indices, Indices]:
    """Returns the rows of a block that have one of the hashes, which are in order, and for each the place of its hash."""
    low, high = np.searchsorted(block.hashes, wanted, "left"), np.searchsorted(block.hashes, wanted, "right")
    counts = high - low
    rows = np.repeat(low - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return rows, np.repeat(np.arange(len(wanted)), counts)


def _between(column: pa.Array, low: int, high: int) -> Bools:
    values = column.view(pa.int64())
    if column.null_count:
        numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
        valid: Bools = column.is_valid().to_numpy(zero_copy_only=False)
        among: Bools = valid & (numbers >= low) & (numbers <= high)
        return among
    numbers = values.to_numpy(zero_copy_only=True)
    selected: Bools = numbers >= low
    selected &= numbers <= high
    return selected


def _sorted_within(hashes: U32, first: int, end: int) -> tuple[Indices, U32]:
    """Returns which of some keys are of a shard, and their hashes, in the order of these.

    A layer may have rows of other shards: those from before the number of shards changed have.
    """
    order, ordered = sort_hashes(hashes)
    mine = slice(np.searchsorted(ordered, np.uint32(first)), np.searchsorted(ordered, np.uint32(end - 1), "right"))
    return order[mine], ordered[mine]


def _probe(
    block: Block, hashes: U32, probes: Indices, keys: Sequence[pa.Array], as_of: Time | None
) -> tuple[Indices, Indices]:
    """Returns for each of the keys and hashes at `probes`: the newest row of it in the block (not after `as_of`), and
    the probe.

    Starts at the last row of each hash and steps down while hashes are equal; one step is enough unless hashes
    collide or the row is too new. Where many rows have a hash, as those of a side of a join, all of them are compared.
    """
    at = block.last_at_most(np.take(hashes, probes))
    found_rows, found_probes = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for step in itertools.count():
        same = np.flatnonzero((at >= 0) & (np.take(block.hashes, at, mode="clip") == np.take(hashes, probes)))
        probes, at = np.take(probes, same), np.take(at, same)
        if not len(probes):
            break
        if step == _STEPS:
            rows, probes = _matched(block, hashes, probes, keys, as_of)
            found_rows.append(rows)
            found_probes.append(probes)
            break
        match = keys_equal(block.keys, at, keys, probes)
        if as_of is not None:
            match &= block.row_times()[at] <= as_of
        hit, miss = np.flatnonzero(match), np.flatnonzero(~match)
        found_rows.append(np.take(at, hit))
        found_probes.append(np.take(probes, hit))
        probes, at = np.take(probes, miss), np.take(at, miss) - 1
    return np.concatenate(found_rows), np.concatenate(found_probes)


def _matched(
    block: Block, hashes: U32, probes: Indices, keys: Sequence[pa.Array], as_of: Time | None
) -> tuple[Indices, Indices]:
    """Does what `_probe` does, in the time of sorting all rows that have one of the hashes."""
    rows, _ = _rows_of(block, np.unique(hashes[probes]))
    if as_of is not None:
        rows = rows[block.row_times()[rows] <= as_of]
    both = [
        pa.concat_arrays([take(mine, rows), take(asked, probes)]) for mine, asked in zip(block.keys, keys, strict=True)
    ]
    order, same_key = order_by_key(np.concatenate([block.hashes[rows], hashes[probes]]), both)
    key_of = np.empty(len(order), dtype=np.int64)
    key_of[order] = np.cumsum(np.append(False, ~same_key))
    row_of_key = np.full(len(order), -1, dtype=np.int64)
    row_of_key[key_of[: len(rows)]] = rows  # of several the last one stays, which is the newest
    found = row_of_key[key_of[len(rows) :]]
    hit = np.flatnonzero(found >= 0)
    return found[hit], probes[hit]
