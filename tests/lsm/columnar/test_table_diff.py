"""Comparing two tables by key, against dicts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nosync
from nosync.lsm.columnar.table_diff import compare

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


def test_a_log_has_no_key() -> None:
    with pytest.raises(nosync.InvalidInputError, match="x is a log"):
        compare(table({}), table({}), [], "x")
