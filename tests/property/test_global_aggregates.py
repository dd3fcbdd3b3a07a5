"""Aggregates over all rows, `key=[]`: always one row, whatever comes and goes, in whatever shards."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.job.explain import explain
from tests.helpers.depth import examples
from tests.helpers.runner import Runner, StoreRunner

FUNCTIONS: dict[str, nosync.Aggregate] = {
    "n": nosync.count(), "some": nosync.count("v"), "s": nosync.sum("v"), "m": nosync.mean("v"), "least": nosync.min("v"),
    "kinds": nosync.count_distinct("v"), "var": nosync.variance("v"), "best": nosync.top_k("v", 2),
}  # fmt: skip
ROW = st.tuples(st.integers(0, 3), st.none() | st.integers(-3, 3))


def flow_over(*, changing: bool, **other: nosync.Aggregate) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    rows: nosync.Stage = flow.source("rows", "k bigint, v bigint")
    if changing:
        rows = rows.update("last", key=["k"], state="v bigint", fn=last_of_each)
    one = rows.aggregate("one", key=[], **(FUNCTIONS | other))
    one.map("passed", lambda t: t.select(["n", "_change_type"])).aggregate("counts", key=["n"], rows=nosync.count())
    return flow


def last_of_each(changes: pa.Table, state: pa.Table) -> pa.Table:
    """The last row of each key; -3 takes it away."""
    found = {row["k"]: row["v"] for row in changes.to_pylist()}
    kept = {k: v for k, v in found.items() if v != -3}
    return pa.table({"k": pa.array(list(kept), pa.int64()), "v": pa.array(list(kept.values()), pa.int64())})


def table(rows: list[tuple[int, int | None]]) -> pa.Table:
    return pa.table({"k": pa.array([k for k, _ in rows], pa.int64()), "v": pa.array([v for _, v in rows], pa.int64())})


def slowly(values: list[int | None]) -> dict[str, Any]:
    x = sorted(v for v in values if v is not None)
    mean = sum(x) / len(x) if x else None
    var = sum((v - mean) ** 2 for v in x) / (len(x) - 1) if mean is not None and len(x) > 1 else None
    expected = {"n": len(values), "some": len(x), "kinds": len(set(x)), "best": x[::-1][:2]}
    expected |= {"s": sum(x) if x else None, "m": mean, "least": x[0] if x else None}
    return expected | {"var": None if var is None else pytest.approx(var, abs=1e-9)}


@given(st.lists(st.lists(ROW, max_size=4, unique_by=lambda r: r[0]), min_size=1, max_size=4), st.booleans())
@settings(max_examples=examples(25), deadline=None)
def test_one_row_always(epochs: list[list[tuple[int, int | None]]], changing: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow_over(changing=changing), Path(root) / "s", 1)
        there: dict[Any, int | None] = {}
        for t, rows in enumerate([[], *epochs]):
            runner.shards = 2 + t % 2  # the row's shard is another one, and finds it
            runner.advance(t, table(rows))
            for i, (k, v) in enumerate(rows):
                there[k if changing else (t, i)] = v
                if changing and v == -3:
                    del there[k]
            assert runner.read("one", t).to_pylist() == [slowly(list(there.values()))]
            assert runner.read("counts", t).to_pylist() == [{"n": len(there), "rows": 1}]


def test_a_sum_that_does_not_fit_is_one_of_all_rows(tmp_path: Path) -> None:
    runner = Runner(flow_over(changing=False), tmp_path / "s", 1)
    with pytest.raises(nosync.StageError, match="stage one .*s, sum.v., of all rows is 9223372036854775808"):
        runner.advance(0, table([(1, 2**63 - 1), (2, 1)]))


def test_branches_are_compared_and_explained(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        runner = StoreRunner(flow_over(changing=False), store, 1)
        for t in range(3):
            runner.advance(t, table([(t, 10 * t)]))
        other = runner.make_branch("other", 0, flow_over(changing=False, s=nosync.sum("k")), own=["one"])
        for t in (1, 2):
            other.replay(t)
        (row,) = store.diff("one", "main", "other").to_pylist()
        assert (row["s_a"], row["s_b"], row["_diff"]) == (30, 3, "changed")
        assert "__all" not in store.read("one").column_names
        found = explain(runner.flow, store, "one", {}, None, evaluate=lambda *_: pa.table({}))
        assert [row["s"] for row in found.value.to_pylist()] == [30]
        sources = next(step for step in found.steps if step.stage == "rows")
        assert sorted(r["v"] for r in sources.rows.to_pylist()) == [0, 10, 20]


def test_only_an_empty_list_is_over_all_rows() -> None:
    rows = nosync.Dataflow("f").source("rows", "k bigint, v bigint")
    for key in ("", None, {}):
        with pytest.raises((nosync.FlowError, TypeError)):
            rows.aggregate("one", key=key, n=nosync.count())  # type: ignore[arg-type]
