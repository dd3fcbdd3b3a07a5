"""Comparing two states of a stage, row by row of the same key. Without Spark: for states that fit into memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from nosync.lsm.columnar.columns import as_batch, comparable, plain, rows_equal, take
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.errors import InvalidInputError, SchemaError

ONLY_A, ONLY_B, CHANGED = "only_a", "only_b", "changed"
CHANGE = "_diff"


def compare(a: pa.Table, b: pa.Table, key: Sequence[str], whose: str) -> pa.Table:
    """Returns the keys whose rows differ: the key's columns, `_diff`, then each value column as `<column>_a` and
    `<column>_b`.

    Both tables hold each key once. Columns that only one side has are left out. Numbers of two types are compared, and
    returned, as the one that holds both. A column that has the name of another one gets underscores. Raises
    InvalidInputError without a key, SchemaError where a column has two types.
    """
    if not key:
        raise InvalidInputError(f"{whose} is a log, whose rows have no key to compare by")
    values = [name for name in a.column_names if name in b.column_names and name not in key]
    for name in (*key, *values):
        types = [table.schema.field(name).type for table in (a, b)]
        if all(map(is_number, types)) and name not in key:
            a, b = (_as_common_number(table, name, types) for table in (a, b))
        elif types[0] != types[1]:
            raise SchemaError(
                f"{whose}: column {name!r} is {types[0]} on one side and {types[1]} on the other: cast one before comparing"
            )
    left, right = (as_batch(plain(table.select([*key, *values]))) for table in (a, b))
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


def is_number(type_: pa.DataType) -> bool:
    """Returns whether values of a type can be subtracted."""
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _as_common_number(table: pa.Table, name: str, types: Sequence[pa.DataType]) -> pa.Table:
    """Returns a table whose column has the type that holds the numbers of all these types; a double may round them."""
    fields = [pa.schema([pa.field(name, type_)]) for type_ in types]
    try:
        common = pa.unify_schemas(fields, promote_options="permissive").field(name).type
        column = table.column(name).cast(common)
    except pa.ArrowException:  # such as whole numbers of more than 53 bits beside a double
        column = table.column(name).cast(pa.float64(), safe=False)
    return table.set_column(table.schema.get_field_index(name), name, column)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
