"""Values of Python as columns: nothing is cut off without a word."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosync.kernels.python_rows import column_of, table_of
from nosync.lsm.errors import SchemaError

US = pa.timestamp("us", "UTC")
NESTED = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("type_", "value", "said"),
    [
        (pa.int32(), 2.9, "2.9 is no whole number"),
        (pa.int64(), Decimal("-1.9"), "is no whole number"),
        (pa.int64(), float("nan"), "nan is no whole number"),
        (pa.int64(), np.float32(0.5), "is no whole number"),
        (pa.int64(), Decimal("Infinity"), "is no whole number"),
        (pa.int64(), 1j, "is no whole number"),
        (pa.int8(), 200, "too large"),
        (pa.list_(pa.int32()), [1, None, 1.9], "is no whole number"),
        (pa.map_(pa.string(), pa.int32()), {"a": 1.9}, "is no whole number"),
        (pa.map_(pa.string(), pa.int32()), [("a", 1.9)], "is no whole number"),
        (NESTED, {"a": 1.9}, "is no whole number: .* \\(field 'a'\\)"),
        (NESTED, {"b": [0.5]}, "is no whole number: .* \\(field 'b'\\)"),
        (NESTED, {"c": 1}, "has a field 'c', which is not declared"),
        (US, 5, "5 is a number: give a date or a time"),
        (US, 5.5, "is a number"),
        (pa.date32(), 5, "is a number"),
        (pa.float32(), 1e300, "is too large: declare double"),
        (pa.string(), 5, "column 'x' is string"),
        (pa.int64(), "5", "column 'x' is int64"),
        (pa.decimal128(10, 2), Decimal("1.239"), "data loss"),
    ],
)
def test_what_would_lose_a_part_is_refused(type_: pa.DataType, value: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=f"column 'x' is .*{said}" if "column" not in said else said):
        column_of([None, value], pa.field("x", type_))


@pytest.mark.parametrize(
    ("type_", "value", "found"),
    [
        (pa.int64(), 2.0, 2),
        (pa.int64(), np.int32(7), 7),
        (pa.int64(), Decimal("3.00"), 3),
        (US, dt.datetime(2024, 1, 1, 12), dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)),
        (pa.float32(), float("inf"), float("inf")),
        (NESTED, {"b": [1, None]}, {"a": None, "b": [1, None]}),
        (pa.map_(pa.string(), pa.int32()), {"a": 1}, [("a", 1)]),
    ],
)
def test_what_fits_is_taken(type_: pa.DataType, value: Any, found: Any) -> None:
    assert column_of([value, None], pa.field("x", type_)).to_pylist() == [found, None]


@given(st.lists(st.one_of(st.none(), st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6))))
def test_whole_numbers_are_taken_as_they_are(values: list[Any]) -> None:
    """Whatever is taken is equal to what was given."""
    try:
        found = column_of(values, pa.field("x", pa.int64())).to_pylist()
    except SchemaError:
        assert any(value is not None and value != int(value) for value in values)
    else:
        assert found == values


def test_a_column_that_a_row_does_not_have_is_null() -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    assert table_of([{"n": 1}, {"k": "a"}], schema).to_pylist() == [{"k": None, "n": 1}, {"k": "a", "n": None}]
