"""What functions of one key return, and what a tester is given: nothing is cut off, and a failed epoch may be run again."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import nosync
from nosync.testing import FlowTester


def flow_with(fn: Any, state: str = "n bigint", **more: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("s", "k string, amount double").update_per_key("u", key=["k"], state=state, fn=fn, version="1", **more)
    return flow


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda key, rows, old: {"n": 0.75}, "column 'n' is int64, and 0.75 is no whole number"),
        (lambda key, rows, old: {"z": 1}, r"the function returned \['z'\], which are not state columns"),
        (lambda key, rows, old: 5, "the function returned 5, expected the new state as a mapping, or None"),
        (lambda key, rows, old: (None,), r"the function returned \(None,\), expected a state, or \(state, "),
        (lambda key, rows, old: (None, [1]), "the function returned outputs"),
        (lambda key, rows, old: {"k": "b", "n": 1}, "the function returned k='b' for key {'k': 'a'}"),
    ],
)
def test_what_a_function_of_one_key_may_not_return(fn: Any, said: str) -> None:
    with FlowTester(flow_with(fn), shards=1) as tester:
        with pytest.raises(nosync.StageError, match=f"stage u shard 0of1 timestamp 0: {said}"):
            tester.advance({"s": [("a", 0.75)]})
        assert tester.last_sealed() is None


def test_a_key_that_a_function_returns_as_it_is_may_be_there() -> None:
    with FlowTester(flow_with(lambda key, rows, old: {"k": key[0], "n": len(rows)})) as tester:
        tester.advance({"s": [("a", 1.0), (None, 2.0)]})
        assert tester.read("u").to_pylist() == [{"k": "a", "n": 1}, {"k": None, "n": 1}]


def test_an_output_cuts_nothing_off() -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "k string, at timestamp").update_per_key(
        "u", key=["k"], state="n bigint", fn=lambda key, rows, old: ({"n": 1}, {"more": [{"x": 1.5}]}), version="1",
        time="at", watermark="1 hour", outputs={"more": "x bigint"},
    )  # fmt: skip
    with (
        FlowTester(flow) as tester,
        pytest.raises(nosync.StageError, match="output more: column 'x' is int64, and 1.5"),
    ):
        tester.advance({"s": [("a", dt.datetime(2026, 1, 1))]})


@pytest.mark.parametrize("rows", [[(2.9,)], [{"amount": 2.9}], {"amount": [2.9]}])
def test_a_tester_takes_no_rows_that_lose_a_part(rows: Any) -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "amount bigint").aggregate("total", key=[], total=nosync.sum("amount"))
    with (
        FlowTester(flow) as tester,
        pytest.raises(nosync.SchemaError, match="source s: column 'amount' is int64, and 2.9"),
    ):
        tester.advance({"s": rows})


@pytest.mark.parametrize(
    ("type_", "values", "found"),
    [
        ("double", pd.Series([1.0, None]), [1.0, None]),
        ("bigint", pd.Series([1, None], dtype="Int64"), [1, None]),
        ("string", pd.Series(["a", None]), ["a", None]),
        ("timestamp", pd.Series([pd.Timestamp("2026-01-01"), pd.NaT]), [dt.datetime(2026, 1, 1, tzinfo=dt.UTC), None]),
        ("bigint", pa.array([1, None], pa.int32()), [1, None]),
        ("bigint", np.array([1, 2]), [1, 2]),
    ],
)
def test_columns_with_a_type_are_taken_as_before(type_: str, values: Any, found: list[Any]) -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", f"x {type_}")
    with FlowTester(flow) as tester:
        tester.advance({"s": {"x": values}})
        assert sorted(tester.read("s")["x"].to_pylist(), key=repr) == sorted(found, key=repr)


def test_an_epoch_that_failed_may_be_given_other_rows() -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", "id int, v bigint", key=["id"]).aggregate("total", key=[], total=nosync.sum("v"))
    with FlowTester(flow) as tester:
        for t in range(2):
            with pytest.raises(nosync.NosyncError, match="several changes of"):
                tester.advance({"t": [(t, 1), (t, 2)]})
            tester.advance({"t": [(t, 3)]})
            assert tester.read("total").to_pylist() == [{"total": 3 * (t + 1)}]
        tester.assert_deterministic()


def test_a_function_that_returns_a_column_twice_is_named() -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "n bigint").map("v", lambda rows: rows.append_column("n", rows["n"]), version="1")
    with pytest.raises(nosync.SchemaError, match="stage v: its function returned two columns of the name 'n'"):
        FlowTester(flow)
