"""Comparing two states of a stage, row by row of the same key. Without Spark: for states that fit into memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from nosync.lsm.columnar.columns import as_batch, comparable, is_internal, plain, rows_equal, take
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.columnar.types import cast_exactly
from nosync.lsm.errors import SchemaError

ONLY_A, ONLY_B, CHANGED = "only_a", "only_b", "changed"
CHANGE = "_diff"


def compare(a: pa.Table, b: pa.Table, key: Sequence[str], whose: str) -> pa.Table:
    """Returns the keys whose rows differ: the key's columns, `_diff`, then each value column as `<column>_a` and
    `<column>_b`. Without a key: what `compare_rows` returns.

    Both tables hold each key once. Columns that only one side has are left out. Numbers of two types are compared, and
    returned, as the one that holds both. A column that has the name of another one gets underscores. Raises SchemaError
    where a column has two types.
    """
    if not key:
        return compare_rows(a, b, whose)
    a, b = _with_common_columns(a, b, key, whose)
    values = [name for name in a.column_names if name not in key]
    left, right = (as_batch(plain(table)) for table in (a, b))
    keys = [[side.column(name) for name in key] for side in (left, right)]
    at = match_keys(hash32(keys[0]), keys[0], hash32(keys[1]), keys[1])  # for each row of b, its row of a
    both = np.flatnonzero(at >= 0)
    texts = [[comparable(side.column(name)) for name in values] for side in (left, right)]
    same = rows_equal(texts[0], at[both], texts[1], both)
    of_a = np.ones(len(left), dtype=np.bool_)
    of_a[at[both]] = False
    changed, new, gone = both[~same], np.flatnonzero(at < 0), np.flatnonzero(of_a)
    rows_a = pa.array(np.concatenate([at[changed], np.full(len(new), -1), gone]))
    rows_b = np.concatenate([changed, new, np.full(len(gone), -1)])
    in_a, in_b = rows_a.to_numpy() >= 0, rows_b >= 0
    kinds = np.where(in_a & in_b, 0, np.where(in_a, 1, 2))
    columns: dict[str, pa.Array] = {}
    for i, name in enumerate(key):
        joined = pa.concat_arrays([keys[0][i], keys[1][i]])
        columns[name] = take(joined, np.where(in_a, rows_a.to_numpy(), rows_b + len(left)))
    columns[_free(CHANGE, columns)] = pa.array([CHANGED, ONLY_A, ONLY_B]).take(pa.array(kinds))
    for name in values:
        columns[_free(f"{name}_a", columns)] = left.column(name).take(pa.array(rows_a.to_numpy(), mask=~in_a))
        columns[_free(f"{name}_b", columns)] = right.column(name).take(pa.array(rows_b, mask=~in_b))
    return pa.table(columns)


def compare_rows(a: pa.Table, b: pa.Table, whose: str) -> pa.Table:
    """Returns the rows, of tables without a key, that one side has more often: the columns, `_diff`, and how often each has
    them as `n_a` and `n_b`.

    Columns and types are as those of `compare`. A row that both have, but not as often, is `changed`.
    """
    a, b = _with_common_columns(a, b, (), whose)
    rows = pa.concat_tables([plain(a), plain(b)])
    _, first, number = np.unique(content_hash(rows), return_index=True, return_inverse=True)
    counts = [np.bincount(of_side, minlength=len(first)) for of_side in (number[: a.num_rows], number[a.num_rows :])]
    differ = np.flatnonzero(counts[0] != counts[1])
    in_a, in_b = (count[differ] for count in counts)
    found = rows.take(pa.array(first[differ]))
    kinds = np.where((in_a > 0) & (in_b > 0), 0, np.where(in_a > 0, 1, 2))
    for name, column in (
        (CHANGE, pa.array([CHANGED, ONLY_A, ONLY_B]).take(pa.array(kinds))), ("n_a", pa.array(in_a)), ("n_b", pa.array(in_b)),
    ):  # fmt: skip
        found = found.append_column(_free(name, found.column_names), column)
    return found


def _with_common_columns(a: pa.Table, b: pa.Table, key: Sequence[str], whose: str) -> tuple[pa.Table, pa.Table]:
    """Returns the columns that both tables have, the key's first, with the same types."""
    names = [*key, *(name for name in a.column_names if name in b.column_names and name not in key)]
    for name in names:
        types = [table.schema.field(name).type for table in (a, b)]
        if types[0] == types[1]:
            continue
        if all(map(is_number, types)) and name not in key:
            a, b = _as_common_numbers((a, b), name)
        else:
            raise SchemaError(
                f"{whose}: column {name!r} is {types[0]} on one side and {types[1]} on the other: cast one before comparing"
            )
    return a.select(names), b.select(names)


def with_key_of(keyed: pa.Table, key: Sequence[str], rows: pa.Table, whose: str) -> pa.Table:
    """Returns rows that have no key with that of another table, so that they can be compared. Where the other has one row
    for all, and so have these, they are one another's. Raises SchemaError where rows cannot be matched.
    """
    if all(is_internal(name) for name in key) and len(key) == 1 and rows.num_rows <= 1:
        values = keyed.column(key[0])
        found = values.to_pylist()[:1] or [0]
        return rows.append_column(key[0], pa.array(found * rows.num_rows, values.type))
    if {*key} <= {*rows.column_names} and rows.group_by([*key]).aggregate([]).num_rows == rows.num_rows:
        return rows
    raise SchemaError(
        f"{whose} has key ({show_key(key)}) on one side, and on the other, where it has none, other columns or several rows "
        "for some of them: rows cannot be matched"
    )


def show_key(key: Sequence[str]) -> str:
    """Returns what an error says of a key."""
    return ", ".join(name for name in key if not is_internal(name)) or ("all rows" if key else "")


def is_number(type_: pa.DataType) -> bool:
    """Returns whether values of a type can be subtracted."""
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _as_common_numbers(tables: Sequence[pa.Table], name: str) -> list[pa.Table]:
    """Returns tables whose columns have the type that holds the numbers of all of them; a double may round them."""
    columns = [table.column(name) for table in tables]
    fields = [pa.schema([pa.field(name, column.type)]) for column in columns]
    try:
        common = pa.unify_schemas(fields, promote_options="permissive").field(name).type
        if pa.types.is_decimal(common):  # of whole numbers Arrow forgets the digits after the point
            common = pa.decimal128(38, common.scale)
        columns = [cast_exactly(column, common) for column in columns]
    except pa.ArrowException:  # such as whole numbers of more than 53 bits beside a double
        columns = [column.cast(pa.float64(), safe=False) for column in columns]
    return [
        table.set_column(table.schema.get_field_index(name), name, column)
        for table, column in zip(tables, columns, strict=True)
    ]


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
