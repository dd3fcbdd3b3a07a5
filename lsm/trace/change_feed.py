"""What changed in a trace between two times: the change feed, from rows and what was there before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    Bools,
    keys_equal,
    take_batch,
)
from nosync.lsm.columnar.contents import net_counts
from nosync.lsm.layers.merging import Rows, concat_batches
from nosync.lsm.model.timestamp import ROUND_BITS

INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE = "insert", "update_preimage", "update_postimage", "delete"
EXPIRE = "expire"
"""A row went because what is kept is bounded: what was computed from it stays."""
CHANGE_TYPES = (INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE, EXPIRE)
_DELETE, _EXPIRE = CHANGE_TYPES.index(DELETE), CHANGE_TYPES.index(EXPIRE)


@dataclass(frozen=True)
class Lookup:
    """The answer to a lookup of n keys: `found` (n booleans), and a row of `data` for each key found, in key order."""

    found: Bools
    data: pa.RecordBatch


def first_of_keys(rows: Rows, key_columns: int) -> Bools:
    """Returns which of the rows, in order of (hash, key, time), is the first of its key."""
    first: Bools = np.ones(len(rows.hashes), dtype=np.bool_)
    keys = rows.data.columns[:key_columns]
    if len(rows.hashes) > 1:
        at = np.arange(len(rows.hashes) - 1)
        first[1:] = (rows.hashes[1:] != rows.hashes[:-1]) | ~keys_equal(keys, at, keys, at + 1)
    return first


def change_rows(rows: Rows, first_of_key: Bools, before: Lookup) -> pa.Table:
    """Returns entries in (hash, key, time) order, and the state before each key's first, as change rows."""
    n = len(rows.hashes)
    # Each entry's predecessor: the entry before it, or for a key's first entry a row of `before`, or none (-1).
    predecessor: npt.NDArray[np.int64] = np.arange(-1, n - 1, dtype=np.int64)
    first = np.flatnonzero(first_of_key)
    of_first = np.full(len(first), -1, dtype=np.int64)
    of_first[before.found] = n + np.arange(len(before.data))
    predecessor[first] = of_first
    inner = ~first_of_key
    predecessor[inner] = np.where(rows.tombstones[predecessor[inner]], -1, predecessor[inner])

    has_before, alive = predecessor >= 0, ~rows.tombstones
    entry = np.arange(n)
    # Two output slots an entry: its preimage (or the deleted row), then its postimage (or the inserted row).
    slot_rows = np.stack([predecessor, entry], axis=1).ravel()
    went = _DELETE if rows.expired is None else np.where(rows.expired, _EXPIRE, _DELETE)
    slot_types = np.stack([np.where(alive, 1, went), np.where(has_before, 2, 0)], axis=1).ravel().astype(np.int8)
    slot_used = np.stack([has_before, alive], axis=1).ravel()
    epochs = np.repeat(rows.times >> ROUND_BITS, 2)
    used = np.flatnonzero(slot_used)
    used = used[np.argsort(epochs[used], kind="stable")]
    values = concat_batches([rows.data, before.data], rows.data.schema) if n else rows.data
    return with_change_columns(take_batch(values, slot_rows[used]), slot_types[used], epochs[used])


def rows_left(log: pa.Table) -> pa.Table:
    """Returns the rows that are there after all that a log of changes says: those that came, less those that went. They have
    the log's columns without `_change_type`, in the order in which they first came.
    """
    goes = pc.is_in(log.column(CHANGE_TYPE_COLUMN), value_set=pa.array([DELETE, UPDATE_BEFORE, EXPIRE]))
    rows = log.drop_columns([CHANGE_TYPE_COLUMN])
    if not rows.num_rows or not pc.any(goes).as_py():
        return rows
    first, net = net_counts(rows, np.where(goes.to_numpy(), -1, 1))
    order = np.argsort(first)
    return rows.take(pa.array(np.repeat(first[order], np.maximum(net[order], 0))))


def with_change_columns(data: pa.RecordBatch, types: npt.NDArray[np.int8], epochs: npt.NDArray[np.int64]) -> pa.Table:
    """These rows with the columns that say what each of them does, and at which epoch."""
    names = pa.array(CHANGE_TYPES).take(pa.array(types))
    table = pa.Table.from_batches([data])
    return table.append_column(CHANGE_TYPE_COLUMN, names).append_column(EPOCH_COLUMN, pa.array(epochs))
