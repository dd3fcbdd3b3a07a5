"""The canonical order of rows, which depends on their contents only, and the hashes that it goes by.

Equal rows make equal layers, however Spark cut them into tasks and batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.lsm.columnar.columns import Indices, as_array, rows_equal
from nosync.lsm.columnar.hashing import hash64, is_quick
from nosync.lsm.columnar.ordering import order_of


def is_hashed_in_tasks(schema: pa.Schema, names: Sequence[str]) -> bool:
    """Returns whether tasks hash these columns themselves. Else the JVM sends the hash along."""
    return is_quick(schema.field(name).type for name in names)


def is_hashed_alike(types: Iterable[pa.DataType], *, nested: bool = False) -> bool:
    """Returns whether columns of these types have the same hash here as in the JVM, without its having to send it. `nested`:
    structs count as well; those of files do not.
    """
    t = pa.types
    return all(
        is_quick([type_])
        or any(is_one(type_) for is_one in (t.is_string, t.is_binary, t.is_decimal128))
        or (nested and t.is_struct(type_) and is_hashed_alike((field.type for field in type_), nested=True))
        for type_ in types
    )


def hashed(rows: pa.Table, names: Sequence[str], *, sent: pa.Table, under: str = HASH64_COLUMN) -> pa.Table:
    """`rows` with `_hash64` of some of their columns.

    `sent` are the rows as they came, which have that hash in the column `under` if tasks do not compute it.
    """
    if under in sent.column_names and not is_hashed_in_tasks(rows.schema, names):
        return rows.append_column(HASH64_COLUMN, sent.column(under))
    hashes = hash64([as_array(rows.column(name)) for name in names])
    return rows.append_column(HASH64_COLUMN, pa.array(hashes.view(np.int64)))


def by_content(rows: pa.Table) -> pa.Table:
    """Returns the rows in canonical order, without their hash."""
    order = canonical_order(rows)
    rows = rows.drop_columns([HASH64_COLUMN])
    return rows if (np.diff(order) == 1).all() else rows.take(pa.array(order))


def canonical_order(rows: pa.Table) -> Indices:
    """Returns the order of a source's rows by the hash of each whole row.

    Rows of one hash are the same row, but for collisions, which are put in order of their text.
    """
    hashes = rows.column(HASH64_COLUMN).to_numpy()
    order = order_of(hashes)
    ordered = hashes[order]
    at = np.flatnonzero(ordered[1:] == ordered[:-1])
    if not len(at):
        return order
    contents = rows.drop_columns([HASH64_COLUMN])
    columns = [_bits(as_array(column)) for column in contents.columns]
    others = at[~rows_equal(columns, order[at], columns, order[at + 1])]
    for start, stop in _runs_with(others, ordered):
        texts = _texts(contents.take(pa.array(order[start:stop])))
        if len(set(texts)) > 1:
            order[start:stop] = order[start:stop][sorted(range(len(texts)), key=texts.__getitem__)]
    return order


def _bits(column: pa.Array) -> pa.Array:
    """Returns a column of floats as what is stored: 0.0 and -0.0 have one hash, and are not the same row."""
    types = {pa.float64(): pa.int64(), pa.float32(): pa.int32()}
    return column.view(types[column.type]) if column.type in types else column


def _runs_with(places: Indices, ordered: Indices) -> Iterator[tuple[int, int]]:
    """Yields the (start, stop) of each run of equal values that has one of the places."""
    values = np.unique(ordered[places])
    starts, stops = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    yield from zip(starts.tolist(), stops.tolist(), strict=True)


def _texts(rows: pa.Table) -> list[str]:
    """Returns a text for each row. Rows of equal contents have the same text."""
    try:
        return [repr(row) for row in rows.to_pylist()]
    except (OverflowError, ValueError):  # a date after the year 9999, which Python does not have
        numbers = [
            column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
            if pa.types.is_temporal(column.type)
            else column
            for column in rows.columns
        ]
        return [repr(row) for row in pa.table(numbers, names=rows.column_names).to_pylist()]


def one_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the column with NaN in one form only. Processors make NaN of several forms (`sqrt(-1)`), and equal rows
    are to make equal layers.
    """
    if not pa.types.is_floating(column.type):
        return column
    is_nan = pc.is_nan(column)
    return pc.if_else(is_nan, pa.scalar(float("nan"), column.type), column) if pc.any(is_nan).as_py() else column
