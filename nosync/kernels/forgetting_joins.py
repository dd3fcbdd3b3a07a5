"""Incremental joins whose sides forget rows: what was joined with a forgotten row stays in the result.

A side that has forgotten a row cannot say any more what it was joined with. So what goes when a row is taken back, and
whether a row has had a match, is read from the recorded result. That costs a look at the results of the keys in
question, and only where rows are taken back, or rows without a match are kept.

With D for the changes at t without expiries, and the states before t without the rows that expire at t:

    out-  =  results with a row of D-L or D-R, and rows without a match that have one now
    out+  =  D+L x (R + DR) +  (L - D-L) x D+R, and rows that have no result any more
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.join_types import JoinSpec
from nosync.kernels.joins import (
    ROW_ID,
    KeyedChanges,
    Side,
    alone,
    distinct,
    keyed_changes,
    pairs,
    side_of,
    touched_keys,
)
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Bools, as_array
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.model.timestamp import Time
from nosync.lsm.trace.change_feed import EXPIRE
from nosync.lsm.trace.trace import Trace

_IDS = {side: tuple(f"__{side}{name[2:]}" for name in ROW_ID) for side in "lr"}
"""The columns of a result that say of which row of each side it is made. They are null for a side without a match."""


def join_changes_kept(
    changes: tuple[pa.Table, pa.Table], states: tuple[Trace, Trace], results: Trace, spec: JoinSpec, schema: pa.Schema,
    key: tuple[str, ...], before: Time, whose: str,
) -> KeyedChanges:  # fmt: skip
    """Returns the changes of a join from those of its arranged sides at an epoch, and their states and the results
    before it. `spec` is no semi and no anti join.
    """
    expired = [change.filter(pc.equal(change.column(CHANGE_TYPE_COLUMN), EXPIRE)) for change in changes]
    real = tuple(change.filter(pc.not_equal(change.column(CHANGE_TYPE_COLUMN), EXPIRE)) for change in changes)
    key_columns, key_hashes, numbers = touched_keys((real[0], real[1]), spec.on)
    n = len(key_hashes)
    touched = [np.isin(np.arange(n), number) for number in numbers]
    keeps_any = spec.keeps_left or spec.keeps_right
    left, right = (
        _without(
            side_of(
                change, number, state, key_columns, key_hashes, np.ones(n, dtype=np.bool_) if keeps_any else other,
                spec.on, before,
            ),
            gone,
            spec.on,
        )
        for change, number, state, other, gone in zip(real, numbers, states, reversed(touched), expired, strict=True)
    )  # fmt: skip
    asked = np.ones(n, dtype=np.bool_) if keeps_any else np.isin(np.arange(n), [*left.goes_key, *right.goes_key])
    old = _results(results, schema, key_columns, key_hashes, asked, spec.on, before)
    taken_back = _made_of(old, left.goes, "l", spec.on) | _made_of(old, right.goes, "r", spec.on)
    new = [
        pairs(left.comes, left.comes_key, right.stays, right.stays_key, spec, schema),
        pairs(left.comes, left.comes_key, right.comes, right.comes_key, spec, schema),
        pairs(left.stays, left.stays_key, right.comes, right.comes_key, spec, schema),
    ]
    joined = pa.concat_tables(new)
    gone = [old.filter(pa.array(taken_back))]
    left_over = old.filter(pa.array(~taken_back))
    for keeps, mine, side in ((spec.keeps_left, left, "l"), (spec.keeps_right, right, "r")):
        if keeps:
            lonely, lone = _unmatched(mine, side, left_over, joined, spec)
            new.append(alone(lonely, side, spec, schema))
            gone += [lone, alone(mine.goes.filter(pa.array(mine.goes_key < 0)), side, spec, schema)]
    return keyed_changes(pa.concat_tables(new), pa.concat_tables(gone), key, spec.on, whose)


def _results(
    results: Trace, schema: pa.Schema, key_columns: list[pa.Array], key_hashes: U32, asked: Bools, on: tuple[str, ...],
    before: Time,
) -> pa.Table:  # fmt: skip
    """Returns the recorded results of the keys in question."""
    has_null = np.zeros(len(key_hashes), dtype=np.bool_)
    for column in key_columns:
        has_null |= column.is_null().to_numpy(zero_copy_only=False)
    at = np.flatnonzero(asked & ~has_null)
    if not (len(at) and results.layers):
        return schema.empty_table()
    found = results.lookup_prefix([column.take(pa.array(at)) for column in key_columns], key_hashes[at], before)
    return pa.Table.from_batches([found]).select(schema.names)


def _without(side: Side, expired: pa.Table, on: tuple[str, ...]) -> Side:
    """Returns the side without the rows that expire now."""
    names = (*on, *ROW_ID)
    stays = ~_is_in(side.stays, names, expired, names, len(on))
    return replace(side, stays=side.stays.filter(pa.array(stays)), stays_key=side.stays_key[stays])


def _made_of(results: pa.Table, rows: pa.Table, side: str, on: tuple[str, ...]) -> Bools:
    """Returns which results are made of one of these rows of a side."""
    return _is_in(results, (*on, *_IDS[side]), rows, (*on, *ROW_ID), len(on))


def _is_in(rows: pa.Table, names: Sequence[str], others: pa.Table, other_names: Sequence[str], hashed: int) -> Bools:
    """Returns which rows have, in the columns `names`, what some row of `others` has. The hash is of the first ones."""
    n = rows.num_rows
    if not (n and others.num_rows):
        return np.zeros(n, dtype=np.bool_)
    both = [
        pa.concat_arrays([as_array(rows.column(name)), as_array(others.column(other))])
        for name, other in zip(names, other_names, strict=True)
    ]
    _, number = distinct(both, hash32(both[:hashed]))
    found: Bools = np.isin(number[:n], number[n:])
    return found


def _unmatched(
    mine: Side, side: str, left_over: pa.Table, joined: pa.Table, spec: JoinSpec
) -> tuple[pa.Table, pa.Table]:
    """Returns the rows of a side that are without a match from now on, and the recorded results that say so of rows
    that have one now. `left_over` are the recorded results that are not taken back, `joined` those that are new.
    """
    other = "r" if side == "l" else "l"
    names, ids = (*spec.on, *ROW_ID), (*spec.on, *_IDS[side])
    is_lone = left_over.column(_IDS[other][0]).is_null().to_numpy(zero_copy_only=False)
    lone, matched = left_over.filter(pa.array(is_lone)), left_over.filter(pa.array(~is_lone))
    n = len(spec.on)
    lonely = []
    for rows in (mine.stays, mine.comes):
        has = _is_in(rows, names, matched, ids, n) | _is_in(rows, names, joined, ids, n)
        has |= _is_in(rows, names, lone, ids, n)
        lonely.append(rows.filter(pa.array(~has)))
    return pa.concat_tables(lonely), lone.filter(pa.array(_is_in(lone, ids, joined, ids, n)))
