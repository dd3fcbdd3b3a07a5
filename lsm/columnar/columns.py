"""Whole-column work on keys and rows: equality, and schemas.

Keys are compared as in Spark's GROUP BY: null equals null, NaN equals NaN, 0.0 equals -0.0, and nested values are equal
where all of their parts are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.hashing import check_key_type, is_list, list_parts
from nosync.lsm.errors import SchemaError

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

INTERNAL_PREFIX = "__"
"""Columns that begin so are a stage's internal state, but for two."""
START_AT_COLUMN, END_AT_COLUMN = "__START_AT", "__END_AT"
"""When a row of a history began to be there, and when it ended. Declarative Pipelines name these columns so, and their
users read them.
"""
HASH_COLUMN = "_hash"
TIME_COLUMN = "_time"
TOMBSTONE_COLUMN = "_tombstone"
EXPIRED_COLUMN = "_expired"
"""Says of a tombstone that its row was forgotten, because what is kept is bounded, and not taken back by the data."""
CHANGE_TYPE_COLUMN = "_change_type"
EPOCH_COLUMN = "_epoch"
RESERVED = frozenset({HASH_COLUMN, TIME_COLUMN, TOMBSTONE_COLUMN, EXPIRED_COLUMN, CHANGE_TYPE_COLUMN, EPOCH_COLUMN})


def is_internal(name: str) -> bool:
    """Returns whether a column is a stage's internal state: stored with its rows, shown only when asked for by name."""
    return name.startswith(INTERNAL_PREFIX) and name not in (START_AT_COLUMN, END_AT_COLUMN)


def as_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns one contiguous array, without a copy where there is only one chunk."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else joined(column.chunks, column.type)


def joined(arrays: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    """Returns arrays of a type as one. Raises SchemaError where that has more bytes than Arrow can number."""
    try:
        return pa.concat_arrays([*arrays] or [pa.nulls(0, type_)])
    except pa.ArrowInvalid as error:
        if "overflow" not in str(error):
            raise
        raise SchemaError(
            f"a column of {type_} has more than 2 GiB of values in one piece: record, or ask for, fewer rows at a time or "
            f"fewer columns; or make it large_{type_} ({error})"
        ) from error


def as_batch(table: pa.Table) -> pa.RecordBatch:
    """Returns the table as one record batch, without a copy where it is one already."""
    return pa.RecordBatch.from_arrays([as_array(column) for column in table.columns], schema=table.schema)


def fixed_view(column: pa.Array) -> npt.NDArray[np.generic] | None:
    """Returns a fixed-width column without nulls as NumPy sees it in place; None for any other."""
    fixed = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if pa.types.is_date32(column.type):
        column, fixed = column.view(pa.int32()), True
    elif pa.types.is_timestamp(column.type) or pa.types.is_date64(column.type):
        column, fixed = column.view(pa.int64()), True
    if not fixed or column.null_count:
        return None
    view: npt.NDArray[np.generic] = column.to_numpy(zero_copy_only=True)
    return view


def take(column: pa.Array, indices: Indices) -> pa.Array:
    """Returns the rows at `indices`; NumPy's gather is the faster one where it can be used."""
    view = fixed_view(column) if not (pa.types.is_date(column.type) or pa.types.is_timestamp(column.type)) else None
    if view is not None:
        # np.take and not view[indices], which would hold the interpreter's lock all the while.
        return pa.array(np.take(view, indices), type=column.type)
    return column.take(pa.array(indices))


def take_batch(batch: pa.RecordBatch, indices: Indices) -> pa.RecordBatch:
    """Returns rows of the batch in buffers of their own, but for columns that would come out as they are."""
    n = len(batch)
    # Nearly always the ends tell already.
    takes_all = len(indices) == n > 0 == indices[0] and indices[-1] == n - 1 and bool((np.diff(indices) == 1).all())
    columns = [
        column if takes_all and fixed_view(column) is not None and _is_packed(column) else take(column, indices)
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def gather(pieces: Sequence[tuple[pa.RecordBatch, Indices, Indices]], schema: pa.Schema) -> pa.RecordBatch:
    """Returns rows of several batches of one schema: of each batch the rows at the first indices, put to those at the
    second.

    The second ones are all of 0 .. n - 1, once each.
    """
    n = sum(len(rows) for _, rows, _ in pieces)
    columns = []
    for i, field in enumerate(schema):
        views = [view for batch, _, _ in pieces if (view := fixed_view(batch.column(i))) is not None]
        if 0 < len(views) == len(pieces):
            values = np.empty(n, views[0].dtype)
            for view, (_, rows, to) in zip(views, pieces, strict=True):
                values[to] = np.take(view, rows)
            columns.append(pa.array(values).view(field.type))
            continue
        taken = [take(batch.column(i), rows) for batch, rows, _ in pieces]
        came_from = np.empty(n, dtype=np.int64)
        came_from[np.concatenate([to for _, _, to in pieces] or [came_from])] = np.arange(n)
        columns.append(take(joined(taken, field.type), came_from))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def packed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch in buffers of its own rows alone: Arrow writes some of what lies behind a slice, so that equal
    rows would become files of different bytes.
    """
    if all(map(_is_packed, batch.columns)):
        return batch
    everything = pa.array(np.arange(batch.num_rows))
    columns = [column if _is_packed(column) else column.take(everything) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _is_packed(column: pa.Array) -> bool:
    """Returns whether its buffers have the sizes that its rows need, and nothing lies under nulls. False also where
    that is not known.
    """
    rows, type_ = len(column), column.type
    if column.null_count:
        return False
    validity, *buffers = column.buffers()
    if column.offset or not rows or not (validity is None or _are_bits_of(validity, rows)):
        return False
    if pa.types.is_boolean(type_):
        return _are_bits_of(buffers[0], rows)
    if pa.types.is_struct(type_):
        fields = [column.field(i) for i in range(type_.num_fields)]
        return all(len(field) == rows and _is_packed(field) for field in fields)
    large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_) or pa.types.is_large_list(type_)
    if large or pa.types.is_string(type_) or pa.types.is_binary(type_) or pa.types.is_list(type_):
        offsets = np.frombuffer(buffers[0], np.int64 if large else np.int32)
        if len(offsets) != rows + 1 or offsets[0]:
            return False
        if pa.types.is_list(type_) or pa.types.is_large_list(type_):
            return len(column.values) == offsets[-1] and _is_packed(column.values)
        return bool((0 if buffers[1] is None else buffers[1].size) == offsets[-1])
    try:
        return bool(buffers[0].size == -(-rows * type_.bit_width // 8))
    except (ValueError, AttributeError, IndexError):  # a type of no fixed width
        return False


def _are_bits_of(buffer: pa.Buffer, rows: int) -> bool:
    """Returns whether it has a bit for each row and then zeros."""
    return bool(buffer.size == -(-rows // 8) and not (rows % 8 and memoryview(buffer)[-1] >> rows % 8))


def rows_equal(left: Sequence[pa.Array], left_at: Indices, right: Sequence[pa.Array], right_at: Indices) -> Bools:
    """Returns for each i whether row `left_at[i]` of `left` and row `right_at[i]` of `right` agree in every column.
    Nested values, which Arrow does not compare, do not.
    """
    equal: Bools = np.ones(len(left_at), dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        if a.null_count == len(a) and b.null_count == len(b) and not pa.types.is_nested(a.type):
            continue
        va, vb = fixed_view(a), fixed_view(b)
        if va is not None and vb is not None:
            equal &= np.take(va, left_at) == np.take(vb, right_at)
        else:
            equal &= _null_safe_equal(a.take(pa.array(left_at)), b.take(pa.array(right_at)))
    return equal


def _null_safe_equal(a: pa.Array, b: pa.Array) -> Bools:
    if pa.types.is_null(a.type):
        return np.ones(len(a), dtype=np.bool_)
    if pa.types.is_nested(a.type):
        return np.zeros(len(a), dtype=np.bool_)
    equal = pc.fill_null(pc.equal(a, b), False)
    if a.null_count and b.null_count:
        equal = pc.or_(equal, pc.and_(pc.is_null(a), pc.is_null(b)))
    result: Bools = equal.to_numpy(zero_copy_only=False)
    return result


def keys_equal(left: Sequence[pa.Array], left_at: Indices, right: Sequence[pa.Array], right_at: Indices) -> Bools:
    """Returns the same as `rows_equal`, for keys, which the module's first lines say how to compare."""
    equal: Bools = np.ones(len(left_at), dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        equal &= _keys_equal(a, left_at, b, right_at)
    return equal


def _keys_equal(a: pa.Array, a_at: Indices, b: pa.Array, b_at: Indices) -> Bools:
    if not (pa.types.is_nested(a.type) or pa.types.is_floating(a.type)):
        return rows_equal([a], a_at, [b], b_at)
    valid_a, valid_b = (
        np.take(column.is_valid().to_numpy(zero_copy_only=False), at) for column, at in ((a, a_at), (b, b_at))
    )
    both = np.flatnonzero(valid_a & valid_b)
    a_at, b_at = a_at[both], b_at[both]
    if pa.types.is_floating(a.type):
        x, y = (np.take(c.fill_null(0).to_numpy(), at) for c, at in ((a, a_at), (b, b_at)))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
    elif is_list(a.type):
        same = _lists_equal(a, a_at, b, b_at)
    else:
        fields = [[column.field(i) for i in range(a.type.num_fields)] for column in (a, b)]
        same = keys_equal(fields[0], a_at, fields[1], b_at)
    equal: Bools = ~(valid_a | valid_b)
    equal[both] = same
    return equal


def _lists_equal(a: pa.Array, a_at: Indices, b: pa.Array, b_at: Indices) -> Bools:
    """Returns which lists are equal. None of them is null."""
    (a_starts, a_lengths, a_elements), (b_starts, b_lengths, b_elements) = list_parts(a), list_parts(b)
    lengths = a_lengths[a_at]
    equal: Bools = lengths == b_lengths[b_at]
    rows = np.flatnonzero(equal & (lengths > 0))
    if len(rows):
        counts = lengths[rows]
        begins = np.cumsum(counts) - counts
        place = np.arange(counts.sum()) - np.repeat(begins, counts)
        at = (np.repeat(starts[of[rows]], counts) + place for starts, of in ((a_starts, a_at), (b_starts, b_at)))
        equal[rows] = np.logical_and.reduceat(_keys_equal(a_elements, next(at), b_elements, next(at)), begins)
    return equal


def comparable(column: pa.Array) -> pa.Array:
    """Returns values that are equal where a user would call them so: nested ones by their text, for Arrow does not
    compare them; and NaN equals itself, as in Spark.
    """
    if pa.types.is_floating(column.type):
        values = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0  # one zero
        bits = np.where(np.isnan(values), np.nan, values).view(np.int64)
        return pa.array(bits, mask=column.is_null().to_numpy(zero_copy_only=False))
    if not pa.types.is_nested(column.type):
        return column
    return pa.array([None if value is None else repr(value) for value in column.to_pylist()], pa.string())


def plain_type(type_: pa.DataType, name: str) -> pa.DataType:
    """Returns the type a column is stored as: dictionaries decoded, at any depth. Raises SchemaError for what cannot be
    stored.
    """
    t = pa.types
    if t.is_dictionary(type_):
        return plain_type(type_.value_type, name)
    if t.is_string_view(type_) or t.is_binary_view(type_):
        return pa.large_string() if t.is_string_view(type_) else pa.large_binary()
    if t.is_struct(type_):
        return pa.struct([f.with_type(plain_type(f.type, name)) for f in type_])
    if t.is_map(type_):
        return pa.map_(plain_type(type_.key_type, name), plain_type(type_.item_type, name))
    if t.is_fixed_size_list(type_):
        return pa.list_(plain_type(type_.value_type, name), type_.list_size)
    if t.is_list(type_) or t.is_large_list(type_):
        make = pa.large_list if t.is_large_list(type_) else pa.list_
        return make(type_.value_field.with_type(plain_type(type_.value_type, name)))
    unusual = t.is_union(type_) or t.is_run_end_encoded(type_) or t.is_list_view(type_) or t.is_large_list_view(type_)
    if isinstance(type_, pa.BaseExtensionType) or unusual:
        raise SchemaError(f"column {name!r} has type {type_}, which cannot be stored: cast it to a plain type first")
    return type_


def plain(table: pa.Table, *, allow: frozenset[str] = frozenset()) -> pa.Table:
    """Returns the table as it is stored: one chunk a column, no dictionaries, all fields nullable, no metadata.

    `allow` names reserved columns that it may have all the same. Raises SchemaError for what is no Arrow table.
    """
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise SchemaError(
            f"{type(table).__name__} was given where rows are expected: make a table of it, as pa.table({{...}}), "
            "pa.Table.from_pandas(frame, preserve_index=False) or pa.Table.from_pylist(rows) do"
        )
    for name in table.column_names:
        if name in RESERVED - allow:
            raise SchemaError(f"column {name!r} has a name that nosync uses itself: rename it")
    if len(set(table.column_names)) != table.num_columns:
        raise SchemaError(f"two columns have the same name: {table.column_names}")
    fields = [pa.field(f.name, plain_type(f.type, f.name)) for f in table.schema]
    columns = [_plain_column(column, field) for column, field in zip(table.columns, fields, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _plain_column(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if column.type == field.type:
        return as_array(column)
    try:
        return as_array(column.cast(field.type))
    except (pa.ArrowException, IndexError) as error:  # what Arrow cannot do yet, some dictionaries inside other types
        raise SchemaError(
            f"column {field.name!r} has type {column.type}, which Arrow does not turn into {field.type} ({error}): cast it first"
        ) from error


def key_columns(table: pa.Table, key: Sequence[str], whose: str) -> list[pa.Array]:
    """Returns the key's columns. Raises SchemaError where one is missing or cannot be a key."""
    for name in key:
        if name not in table.column_names:
            raise SchemaError(
                f"{whose}: key column {name!r} is missing; the table has {', '.join(table.column_names) or 'no columns'}"
            )
        check_key_type(name, table.schema.field(name).type)
    return [as_array(table.column(name)) for name in key]


def nullable(type_: pa.DataType) -> pa.DataType:
    """Returns the same type, whose parts may be null: whether they may is nothing that rows are told apart by."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        make = pa.large_list if pa.types.is_large_list(type_) else pa.list_
        return make(pa.field(type_.value_field.name, nullable(type_.value_type)))
    if pa.types.is_struct(type_):
        return pa.struct([(f.name, nullable(f.type)) for f in type_])
    if pa.types.is_map(type_):
        return pa.map_(nullable(type_.key_type), nullable(type_.item_type))
    return type_


def unify_schemas(older: pa.Schema, newer: pa.Schema, whose: str) -> pa.Schema:
    """Returns the schema that reads both: `newer` may add columns (null in older rows); it may not drop or retype any.

    A stage's internal columns may be missing where all rows are null in them, and so may what says whether a row comes or
    goes, where all come. Raises SchemaError naming the columns.
    """
    for field in older:
        may_lack = is_internal(field.name) or field.name == CHANGE_TYPE_COLUMN
        if newer.get_field_index(field.name) < 0 and not may_lack:
            raise SchemaError(
                f"{whose}: column {field.name!r} ({field.type}) is missing; columns may be added, not dropped. "
                f"Expected {describe(older)}, found {describe(newer)}"
            )
    return joined_schema(older, newer, whose)


def joined_schema(a: pa.Schema, b: pa.Schema, whose: str) -> pa.Schema:
    """Returns the columns of both, those of `a` first: two shards may get a column in different epochs, so neither is
    the older one. Where one of them may have nulls inside of a column, so may both.

    Raises SchemaError for a column of two types.
    """
    for field in b:
        index = a.get_field_index(field.name)
        if index >= 0 and nullable(a.field(index).type) != nullable(field.type):
            raise SchemaError(
                f"{whose}: column {field.name!r} was recorded as {a.field(index).type} and is now {field.type}; "
                "cast it to the recorded type"
            )
    types = dict(zip(b.names, b.types, strict=True))
    both = [f if types.get(f.name, f.type) == f.type else f.with_type(nullable(f.type)) for f in a]
    return pa.schema([*both, *(field for field in b if a.get_field_index(field.name) < 0)])


def describe(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with the columns of `schema`, in that order; columns it lacks are null.

    So is one of another type: a merged layer may go on beyond where a rewound line left it, with a column that only
    came there.
    """
    if batch.schema.equals(schema):
        return batch
    known = {f.name: batch.column(i) for i, f in enumerate(batch.schema)}
    columns = [_of_type(known.get(f.name), f.type, len(batch)) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _of_type(column: pa.Array | None, type_: pa.DataType, n: int) -> pa.Array:
    """Returns the column with a type that differs at most in what may be null inside; n nulls for any other."""
    if column is None or column.type == type_:
        return pa.nulls(n, type_) if column is None else column
    return column.cast(type_) if nullable(column.type) == nullable(type_) else pa.nulls(n, type_)


def with_columns_of(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns rows with the columns of a schema: nulls in those that they lack."""
    there = set(rows.column_names)
    columns = [rows.column(f.name) if f.name in there else pa.nulls(rows.num_rows, f.type) for f in schema]
    return pa.table(columns, names=schema.names)


def conformed(column: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    """Returns the column with a type that it has but for its width: Spark may hand large strings where strings went in."""
    return column if column.type == type_ else column.cast(type_)
