"""Comparing two tables by key, against dicts."""

from __future__ import annotations

import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nosync
from nosync.lsm.columnar.table_diff import compare, compare_rows, with_key_of

STATE = st.dictionaries(st.sampled_from(["a", "b", "c", None]), st.none() | st.integers(0, 2))


def table(state: dict[Any, Any]) -> pa.Table:
    return pa.table({"k": pa.array(list(state), pa.string()), "v": pa.array(list(state.values()), pa.int64())})


@given(STATE, STATE)
def test_every_difference_and_no_other(a: dict[Any, Any], b: dict[Any, Any]) -> None:
    found = {r["k"]: (r["_diff"], r["v_a"], r["v_b"]) for r in compare(table(a), table(b), ["k"], "x").to_pylist()}
    expected = {}
    for k in a.keys() | b.keys():
        if k not in b:
            expected[k] = ("only_a", a[k], None)
        elif k not in a:
            expected[k] = ("only_b", None, b[k])
        elif a[k] != b[k]:
            expected[k] = ("changed", a[k], b[k])
    assert found == expected


ROWS = st.lists(st.tuples(st.sampled_from(["a", None]), st.none() | st.integers(0, 1)), max_size=8)


@given(ROWS, ROWS)
def test_rows_without_a_key_are_counted(a: list[tuple[Any, Any]], b: list[tuple[Any, Any]]) -> None:
    sides = [
        pa.table({"k": pa.array([k for k, _ in rows], pa.string()), "v": pa.array([v for _, v in rows], pa.int64())})
        for rows in (a, b)
    ]
    found = {(r["k"], r["v"]): (r["_diff"], r["n_a"], r["n_b"]) for r in compare_rows(*sides, "x").to_pylist()}
    expected = {}
    for row in {*a, *b}:
        n_a, n_b = a.count(row), b.count(row)
        if n_a != n_b:
            expected[row] = ("only_b" if not n_a else "only_a" if not n_b else "changed", n_a, n_b)
    assert found == expected


def test_nested_values_and_numbers_of_two_types_are_compared_in_rows_without_a_key() -> None:
    a = pa.table({"l": pa.array([[1, 2], None, [1, 2]]), "v": pa.array([1, 2, 1], pa.int32()), "only": ["x", "y", "z"]})
    b = pa.table({"v": pa.array([1.0, 2.5, 1.0]), "l": pa.array([[1, 2], None, [2, 1]])})
    found = {(repr(r["l"]), r["v"]): (r["_diff"], r["n_a"], r["n_b"]) for r in compare_rows(a, b, "x").to_pylist()}
    assert found == {
        ("[1, 2]", 1.0): ("changed", 2, 1), ("None", 2.0): ("only_a", 1, 0), ("None", 2.5): ("only_b", 0, 1),
        ("[2, 1]", 1.0): ("only_b", 0, 1),
    }  # fmt: skip
    assert compare_rows(a, a, "x").num_rows == 0


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([1.0, 2.5]), (2.0, 2.5)),
        (pa.array([1, 2**62 + 1], pa.int64()), pa.array([1.0, 0.5]), (2.0**62, 0.5)),
        (
            pa.array([decimal.Decimal("1.00"), decimal.Decimal("2.50")], pa.decimal128(9, 2)), pa.array([1, 2], pa.int64()),
            (decimal.Decimal("2.50"), decimal.Decimal("2.00")),
        ),
    ],
)  # fmt: skip
def test_numbers_of_two_types_are_compared_as_numbers(a: pa.Array, b: pa.Array, differs: tuple[Any, Any]) -> None:
    sides = [pa.table({"k": ["x", "y"], "v": values}) for values in (a, b)]
    (row,) = compare(sides[0], sides[1], ["k"], "x").to_pylist()
    assert (row["k"], row["_diff"], row["v_a"], row["v_b"]) == ("y", "changed", *differs)
    texts = pa.table({"k": ["x"], "v": ["1"]})
    with pytest.raises(nosync.SchemaError, match="column 'v' is .* on one side and string on the other"):
        compare(sides[0], texts, ["k"], "x")


def test_rows_without_a_key_are_matched_by_that_of_the_other_side_where_each_is_there_once() -> None:
    keyed = pa.table({"k": ["x", "y"], "v": [1, 2]})
    assert with_key_of(keyed, ["k"], keyed.slice(1), "x").equals(keyed.slice(1))
    for rows in (pa.concat_tables([keyed, keyed]), keyed.drop_columns(["k"])):
        with pytest.raises(nosync.SchemaError, match=r"key \(k\) on one side.*rows cannot be matched"):
            with_key_of(keyed, ["k"], rows, "x")
    one = pa.table({"__all": pa.array([0], pa.int8()), "v": [1]})
    found = with_key_of(one, ["__all"], pa.table({"v": [2]}), "x")
    assert compare(one, found, ["__all"], "x").to_pylist() == [{"__all": 0, "_diff": "changed", "v_a": 1, "v_b": 2}]
    with pytest.raises(nosync.SchemaError, match=r"key \(all rows\) on one side"):
        with_key_of(one, ["__all"], pa.table({"v": [2, 3]}), "x")
