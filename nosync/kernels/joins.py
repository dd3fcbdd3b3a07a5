"""Incremental joins: what a join keeps of its sides, and how changes of either become changes of the result.

Each side is *arranged*: its rows as a keyed table whose hash is that of the join key, so that all rows of a key lie
together in every layer. A row is told from equal ones by two numbers: over an input that only grows its time and place
in it, else the hash of its contents and how many equal rows were there before it.

With D for the changes at t and the states before t, the changes of the result are (differential dataflow's join)

    out-  =  D-L x R        +  (L - D-L) x D-R
    out+  =  D+L x (R + DR) +  (L - D-L) x D+R

and for outer joins the rows that have lost, or found, their last match. A semi join gives the rows of the left side
that have a match, an anti join those that have none. Sides that forget rows are joined in `forgetting_joins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.join_types import SEMI, JoinSpec
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Bools, Indices, as_array, as_batch, plain, take_batch
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys, order_by_key
from nosync.lsm.layers.writer import LayerRows, arrange
from nosync.lsm.model.timestamp import Time
from nosync.lsm.trace.change_feed import DELETE, EXPIRE, UPDATE_BEFORE, Lookup
from nosync.lsm.trace.trace import Trace

ROW_ID = ("__a", "__b")
_WENT = pa.array([DELETE, UPDATE_BEFORE])


def arranged_schema(rows: pa.Schema, on: tuple[str, ...]) -> tuple[pa.Schema, tuple[str, ...]]:
    """Returns the schema of a side's arrangement, and its key."""
    ids = [pa.field(name, pa.int64()) for name in ROW_ID]
    rest = [f for f in rows if f.name not in on]
    return pa.schema([*(rows.field(name) for name in on), *ids, *rest]), (*on, *ROW_ID)


def joined_schema(left: pa.Schema, right: pa.Schema, spec: JoinSpec) -> tuple[pa.Schema, tuple[str, ...]]:
    """Returns the schema of the joined rows, and their key: the join key and the ids of both rows."""
    sides = {"l": left} if spec.is_one_sided else {"l": left, "r": right}
    ids = [pa.field(f"__{side}{name[2:]}", pa.int64()) for side in sides for name in ROW_ID]
    rest = [f for side in sides.values() for f in side if f.name not in spec.on]
    key = (*spec.on, *(f.name for f in ids))
    return pa.schema([*(left.field(name) for name in spec.on), *ids, *rest]), key


@dataclass(frozen=True)
class KeyedChanges:
    """A layer, and for each of its rows whether the key was there before, with the rows that were."""

    layer: LayerRows
    before: Lookup


# --- arranging a side ------------------------------------------------------------------------------------------------


def arrange_growing(
    rows: pa.Table, schema: pa.Schema, key: tuple[str, ...], hashes: U32, time: Time, whose: str
) -> KeyedChanges:
    """Returns new rows of an input that only grows, in canonical order: the ids are the time and the place in it."""
    n = rows.num_rows
    numbered = rows.append_column(ROW_ID[0], pa.repeat(pa.scalar(int(time), pa.int64()), n))
    numbered = numbered.append_column(ROW_ID[1], pa.array(np.arange(n)))
    layer = arrange(numbered.select(schema.names), key, whose=whose, hashes=hashes)
    return KeyedChanges(layer, Lookup(np.zeros(n, dtype=np.bool_), _no_rows(schema)))


class NeverThereError(Exception):
    """A row of the input is taken back that never came."""


def arrange_changing(
    rows: pa.Table,
    schema: pa.Schema,
    key: tuple[str, ...],
    on: tuple[str, ...],
    hashes: U32,
    state: Trace,
    before: Time,
    whose: str,
    *,
    expires: bool = False,
) -> KeyedChanges:
    """Returns the layer for rows that come and go. Equal rows are numbered, and the highest numbers go first.

    `expires` says that rows may also be forgotten, the oldest first, which have the lowest numbers. Those are not used again:
    what was joined with one of them is still there, and is not what its successor is joined with. Raises NeverThereError.
    """
    kinds = rows.column(CHANGE_TYPE_COLUMN)
    went = pc.is_in(kinds, value_set=_WENT).to_numpy()
    forgotten = pc.equal(kinds, EXPIRE).to_numpy()
    rows = rows.drop_columns([CHANGE_TYPE_COLUMN])
    content = content_hash(rows.select(schema.names[: len(on)] + schema.names[len(key) :]))
    # One group for each (join key, contents) that changed, and by how many rows.
    groups, group_of = _groups(rows, on, hashes, content)
    weights = np.where(forgotten, 0.0, np.where(went, -1.0, 1.0))
    net = np.bincount(group_of, weights, minlength=len(groups)).astype(np.int64)
    expire = np.bincount(group_of[forgotten], minlength=len(groups)).astype(np.int64)
    keys = [as_array(rows.column(name)) for name in on]
    once, _ = distinct(keys, hashes)
    old = _no_rows(schema)
    if state.layers:
        old = state.lookup_prefix([k.take(pa.array(once)) for k in keys], hashes[once], before)
    of_old = _match_rows(
        old, on, [*(k.take(pa.array(groups)) for k in keys), pa.array(content[groups])], hashes[groups]
    )
    have = np.bincount(of_old[of_old >= 0], minlength=len(groups)).astype(np.int64)
    comes, goes = np.maximum(net, 0), np.maximum(-net, 0)
    if (goes + expire > have).any():
        raise NeverThereError
    source = np.repeat(groups, comes)
    # Those of one epoch come after those of all epochs before, where some of these may be forgotten.
    number = _places(comes) + (int(before) + 1 if expires else np.repeat(have, comes))
    new = rows.take(pa.array(source)).append_column(ROW_ID[0], pa.array(content[source]))
    new = new.append_column(ROW_ID[1], pa.array(number)).select(schema.names)
    rank = _ranks(of_old, old.column(ROW_ID[1]).to_numpy())
    of_group = np.maximum(of_old, 0)
    oldest, newest = (expire[of_group], (have - goes)[of_group]) if len(groups) else (have, have)
    is_forgotten = rank < oldest
    out = np.flatnonzero((of_old >= 0) & (is_forgotten | (rank >= newest)))
    gone = pa.Table.from_batches([old]).take(pa.array(out)).select(schema.names)
    return keyed_changes(new, gone, key, on, whose, is_forgotten[out] if expires else None)


def _ranks(groups: Indices, numbers: Indices) -> Indices:
    """Returns the place of each row among those of its group, by their numbers."""
    order = np.lexsort((numbers, groups))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = np.diff(groups[order]) != 0
    starts = np.flatnonzero(begins)
    ranks: Indices = np.empty(len(order), dtype=np.int64)
    ranks[order] = _places(np.diff(starts, append=len(order)))
    return ranks


def keyed_changes(
    new: pa.Table,
    gone: pa.Table,
    key: tuple[str, ...],
    on: tuple[str, ...],
    whose: str,
    expired: Bools | None = None,
) -> KeyedChanges:
    """Returns the layer that adds `new` and deletes `gone`, tables of the same columns with different keys. `expired`
    says which of those that go are forgotten, and not taken back.
    """
    both = [hash32([as_array(part.column(name)) for name in on]) for part in (new, gone)]
    deletes, hashes = gone.select(list(key)), np.concatenate(both)
    layer = arrange(new, key, whose=whose, deletes=deletes, hashes=hashes, expired=expired)
    dead = layer.order >= new.num_rows
    return KeyedChanges(layer, Lookup(dead, take_batch(as_batch(plain(gone)), layer.order[dead] - new.num_rows)))


def _groups(rows: pa.Table, on: tuple[str, ...], hashes: U32, content: Indices) -> tuple[Indices, Indices]:
    """Returns a row of each different (join key, content hash), and each row's group."""
    keys = [*(as_array(rows.column(name)) for name in on), pa.array(content)]
    return distinct(keys, hashes)


def distinct(keys: Sequence[pa.Array], hashes: U32) -> tuple[Indices, Indices]:
    """Returns the first row of each different key, and the group of each row."""
    if not len(hashes):
        empty: Indices = np.empty(0, dtype=np.int64)
        return empty, empty
    order, same = order_by_key(hashes, keys)
    number = np.concatenate([[0], np.cumsum(~same)])
    group_of: Indices = np.empty(len(order), dtype=np.int64)
    group_of[order] = number
    return order[np.concatenate([[True], ~same])], group_of


def _match_rows(old: pa.RecordBatch, on: tuple[str, ...], wanted: Sequence[pa.Array], hashes: U32) -> Indices:
    """Returns for each row of an arrangement the (join key, content hash) of `wanted` that it has, or -1."""
    keys = [old.column(name) for name in (*on, ROW_ID[0])]
    old_hashes = hash32(keys[:-1])
    first, group_of = distinct(keys, old_hashes)
    at = match_keys(hashes, wanted, old_hashes[first], [k.take(pa.array(first)) for k in keys])
    matched: Indices = at[group_of]
    return matched


def _places(counts: Indices) -> Indices:
    """Returns 0, 1, ..., count - 1 for each count, one after the other."""
    places: Indices = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


# --- joining ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One side's rows for the keys in question: what stays, what goes, what comes; each with its key's number."""

    stays: pa.Table
    goes: pa.Table
    comes: pa.Table
    stays_key: Indices
    goes_key: Indices
    comes_key: Indices


def join_changes(
    changes: tuple[pa.Table, pa.Table], states: tuple[Trace, Trace], spec: JoinSpec, schema: pa.Schema,
    key: tuple[str, ...], before: Time, whose: str,
) -> KeyedChanges:  # fmt: skip
    """Returns the changes of a join from those of its arranged sides at an epoch, and their states before it."""
    key_columns, key_hashes, numbers = touched_keys(changes, spec.on)
    in_left, in_right = (np.isin(np.arange(len(key_hashes)), n) for n in numbers)
    asks_left, asks_right = spec.keeps_left or spec.is_one_sided, spec.keeps_right
    # A side's old rows are needed where the other side changed, and to know whether unmatched rows had a match.
    wanted = (in_right | (asks_right & in_left), in_left | (asks_left & in_right))
    left, right = (
        side_of(change, number, state, key_columns, key_hashes, want, spec.on, before)
        for change, number, state, want in zip(changes, numbers, states, wanted, strict=True)
    )
    n = len(key_hashes)
    if spec.is_one_sided:
        gone, new = _of_one_side(left, right, n, matched=spec.how == SEMI)
        parts = (alone(new, "l", spec, schema), alone(gone, "l", spec, schema))
        return keyed_changes(*parts, key, spec.on, whose)
    gone, new = [], []
    gone.append(pairs(left.goes, left.goes_key, right.stays, right.stays_key, spec, schema))
    gone.append(pairs(left.goes, left.goes_key, right.goes, right.goes_key, spec, schema))
    gone.append(pairs(left.stays, left.stays_key, right.goes, right.goes_key, spec, schema))
    new.append(pairs(left.comes, left.comes_key, right.stays, right.stays_key, spec, schema))
    new.append(pairs(left.comes, left.comes_key, right.comes, right.comes_key, spec, schema))
    new.append(pairs(left.stays, left.stays_key, right.comes, right.comes_key, spec, schema))
    for outer, mine, other, side in ((spec.keeps_left, left, right, "l"), (spec.keeps_right, right, left, "r")):
        if outer:
            lone, lonely = _of_one_side(mine, other, n, matched=False)
            gone.append(alone(lone, side, spec, schema))
            new.append(alone(lonely, side, spec, schema))
    return keyed_changes(pa.concat_tables(new), pa.concat_tables(gone), key, spec.on, whose)


def touched_keys(
    changes: tuple[pa.Table, pa.Table], on: tuple[str, ...]
) -> tuple[list[pa.Array], U32, tuple[Indices, Indices]]:
    """Returns the different keys among both sides' changes, their hashes, and each change's key number, which is -1 for
    a null key.
    """
    columns = [pa.concat_arrays([as_array(c.column(name)) for c in changes]) for name in on]
    hashes = hash32(columns)
    first, group_of = distinct(columns, hashes)
    null = np.zeros(len(hashes), dtype=np.bool_)
    for column in columns:
        null |= column.is_null().to_numpy(zero_copy_only=False)
    number = np.where(null, -1, group_of)
    split = changes[0].num_rows
    return [c.take(pa.array(first)) for c in columns], hashes[first], (number[:split], number[split:])


def side_of(
    change: pa.Table, number: Indices, state: Trace, key_columns: list[pa.Array], key_hashes: U32, wanted: Bools,
    on: tuple[str, ...], before: Time,
) -> Side:  # fmt: skip
    went = (
        pc.is_in(change.column(CHANGE_TYPE_COLUMN), value_set=_WENT).to_numpy()
        if change.num_rows
        else np.zeros(0, bool)
    )
    change = change.drop_columns([CHANGE_TYPE_COLUMN])
    goes, comes = change.filter(pa.array(went)), change.filter(pa.array(~went))
    null_key = np.zeros(len(key_hashes), dtype=np.bool_)
    for column in key_columns:
        null_key |= column.is_null().to_numpy(zero_copy_only=False)
    asked = np.flatnonzero(wanted & ~null_key)
    old = change.slice(0, 0)
    old_key: Indices = np.empty(0, dtype=np.int64)
    if len(asked) and state.layers:
        asked_columns = [c.take(pa.array(asked)) for c in key_columns]
        batch = state.lookup_prefix(asked_columns, key_hashes[asked], before)
        old = pa.Table.from_batches([batch]).select(change.column_names)
        of = number_of_keys([as_array(old.column(name)) for name in on], asked_columns, key_hashes[asked])
        old_key = asked[of]
        if goes.num_rows and old.num_rows:
            names = [*on, *ROW_ID]
            columns = [as_array(old.column(name)) for name in names]
            leaving = [as_array(goes.column(name)) for name in names]
            at = match_keys(hash32(leaving[: len(on)]), leaving, hash32(columns[: len(on)]), columns)
            stays = at < 0
            old, old_key = old.filter(pa.array(stays)), old_key[stays]
    return Side(old, goes, comes, old_key, number[went], number[~went])


def number_of_keys(rows: list[pa.Array], keys: list[pa.Array], hashes: U32) -> Indices:
    """Returns for each row the number of the key that it has."""
    row_hashes = hash32(rows)
    first, group_of = distinct(rows, row_hashes)
    at = match_keys(hashes, keys, row_hashes[first], [r.take(pa.array(first)) for r in rows])
    found: Indices = at[group_of]
    return found


def pairs(
    left: pa.Table, left_key: Indices, right: pa.Table, right_key: Indices, spec: JoinSpec, schema: pa.Schema
) -> pa.Table:
    """Returns every pair of rows with the same key number, as rows of the join."""
    order = np.argsort(right_key, kind="stable")
    ordered = right_key[order]
    low, high = np.searchsorted(ordered, left_key, "left"), np.searchsorted(ordered, left_key, "right")
    counts = np.where(left_key >= 0, high - low, 0)
    at_left = np.repeat(np.arange(len(left_key)), counts)
    at_right = order[np.repeat(low, counts) + _places(counts)]
    return _joined(left.take(pa.array(at_left)), right.take(pa.array(at_right)), spec, schema)


def _joined(left: pa.Table | None, right: pa.Table | None, spec: JoinSpec, schema: pa.Schema) -> pa.Table:
    """Returns rows of the two sides beside each other, with nulls for a side that is missing."""
    present = left if left is not None else right
    assert present is not None
    columns = []
    for f in schema:
        source, name = None, f.name
        if name in spec.on:
            source = present
        elif name.startswith(("__l", "__r")):
            source, name = (left if name[2] == "l" else right), "__" + name[3:]
        else:
            source = next((s for s in (left, right) if s is not None and name in s.column_names), None)
        columns.append(pa.nulls(present.num_rows, f.type) if source is None else source.column(name))
    return pa.Table.from_arrays([as_array(c) for c in columns], schema=schema)


def _of_one_side(mine: Side, other: Side, keys: int, *, matched: bool) -> tuple[pa.Table, pa.Table]:
    """Returns the rows that had a match (or had none, as `matched` says) and have it no longer, or are gone, and those
    of which that is so now.
    """

    def some(*numbers: Indices) -> Bools:
        present = np.zeros(keys + 1, dtype=np.bool_)  # the last one stands for null keys, which never match
        for n in numbers:
            present[n[n >= 0]] = True
        return present

    had, has = some(other.stays_key, other.goes_key), some(other.stays_key, other.comes_key)
    was, is_now = (had, has) if matched else (~had, ~has)
    no_more = pa.concat_tables(
        [
            mine.goes.filter(pa.array(was[mine.goes_key])),
            mine.stays.filter(pa.array(was[mine.stays_key] & ~is_now[mine.stays_key])),
        ]
    )
    from_now_on = pa.concat_tables(
        [
            mine.comes.filter(pa.array(is_now[mine.comes_key])),
            mine.stays.filter(pa.array(~was[mine.stays_key] & is_now[mine.stays_key])),
        ]
    )
    return no_more, from_now_on


def alone(rows: pa.Table, side: str, spec: JoinSpec, schema: pa.Schema) -> pa.Table:
    return _joined(rows if side == "l" else None, rows if side == "r" else None, spec, schema)
