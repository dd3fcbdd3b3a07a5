"""Rows by what they have in all of their columns, for tables without a key."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import Indices, as_array
from nosync.lsm.columnar.hashing import hash64

_NULL = -0x6F73_796E_6300_0000


def content_hash(rows: pa.Table) -> Indices:
    """Returns a 64-bit hash of each row's contents. Nested columns are hashed by their text, row by row.

    The hash passes over nulls, as Spark's does; so which columns are null is hashed as well.
    """
    columns = []
    for column in rows.columns:
        array = as_array(column)
        if pa.types.is_nested(array.type):
            array = pa.array([repr(value) for value in array.to_pylist()], pa.string())
        columns.append(array)
    if any(array.null_count for array in columns):
        nothing = pa.scalar(None, pa.int64())
        # Numbers that no column is likely to have, or a null before a 0 would be hashed as a 0 after it.
        columns += [pc.if_else(pc.is_null(array), pa.scalar(_NULL + i), nothing) for i, array in enumerate(columns)]
    hashes: Indices = hash64(columns).view(np.int64)  # contents are no keys
    return hashes


def net_counts(rows: pa.Table, weights: npt.NDArray[np.int64]) -> tuple[Indices, npt.NDArray[np.int64]]:
    """Returns the first row of each different contents, in the order of their hash, and the sum of their weights."""
    _, first, number = np.unique(content_hash(rows), return_index=True, return_inverse=True)
    return first, np.bincount(number, weights, minlength=len(first)).astype(np.int64)
