"""Operators where values are nulls, large, not numbers, or named as things inside; and loops that a branch changes."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.binder import bind
from tests.conftest import OpenStore
from tests.helpers.depth import examples
from tests.helpers.runner import Runner, StoreRunner, parse_ddl

SMALL = st.none() | st.integers(0, 1)
ROW = st.tuples(st.integers(0, 2), st.integers(0, 1), SMALL, SMALL)
"""id, k, a, b"""


def newest(changes: pa.Table, state: pa.Table) -> pa.Table:
    came = pc.is_in(changes["_change_type"], pa.array(["insert", "update_postimage"]))
    return changes.filter(came).select(["id", "k", "a", "b"])


def without_id(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["id"])


def table(rows: list[tuple[Any, ...]], names: str) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(names.split())
    return pa.table({name: pa.array(column, pa.int64()) for name, column in zip(names.split(), columns, strict=True)})


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(0, 2), ROW, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["inner", "left", "full"]),
)
@example([{0: (0, 1, None, 1), 1: (0, 1, 1, None)}], "inner")
@example([{0: (0, 1, None, 1)}, {0: (0, 1, 1, None)}], "left")
@example([{0: (0, 1, None, 0), 1: (0, 1, 0, 1)}], "full")
def test_joins_tell_rows_apart_by_which_of_their_columns_is_null(
    epochs: list[dict[int, tuple[Any, ...]]], how: str
) -> None:
    flow = nosync.Dataflow("f")
    left, right = flow.source("l", "id bigint, k bigint, a bigint, b bigint"), flow.source("r", "k bigint, z bigint")
    current = left.update("current", key=["id"], state="k bigint, a bigint, b bigint", fn=newest)
    current.map("rows", without_id).join("joined", right, on=["k"], how=how)
    known: dict[int, tuple[Any, ...]] = {}
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(flow, Path(directory) / "s", 0)
        for t, changed in enumerate(epochs):
            rows = [(id, *row[1:]) for id, row in changed.items()]
            right_rows = table([(1, 7)] if t == 0 else [], "k z")
            runner.advance(t, {"l": table(rows, "id k a b"), "r": right_rows})
            known |= {id: row[1:] for id, row in changed.items()}
            expected = Counter(
                (k, a, b, 7 if k == 1 else None) for k, a, b in known.values() if k == 1 or how != "inner"
            )
            if how == "full" and not any(k == 1 for k, _, _ in known.values()):
                expected[1, None, None, 7] += 1
            found = Counter((row["k"], row["a"], row["b"], row["z"]) for row in runner.read("joined", t).to_pylist())
            assert found == expected


LARGE = [2**60 + 1, 1_735_689_600_123_456_789, -(2**62), 1_735_689_600_000]


@pytest.mark.parametrize("values", [LARGE[:1], LARGE[:2], [LARGE[3]] * 6001, LARGE], ids=len)
def test_means_of_large_whole_numbers(tmp_path: Path, values: list[int]) -> None:
    flow = nosync.Dataflow("f")
    aggregates = {"mean": nosync.mean("v"), "deviation": nosync.stddev("v")}
    flow.source("s", "k bigint, v bigint").aggregate("a", key=["k"], **aggregates)
    runner = Runner(flow, tmp_path / "s", 0)
    for t in range(2):
        runner.advance(t, table([(1, v) for v in values], "k v"))
    (row,) = runner.read("a", 1).to_pylist()
    mean = sum(values) / len(values)
    assert row["mean"] == pytest.approx(mean, rel=1e-12)
    variance = 2 * sum((v - mean) ** 2 for v in values) / (2 * len(values) - 1)
    assert row["deviation"] == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1.0)


@pytest.mark.parametrize("epochs", [[[2**62, 2**62]], [[2**62], [2**62]], [[-(2**63)], [-1]]])
def test_a_sum_beyond_64_bits_is_an_error_that_names_its_stage(tmp_path: Path, epochs: list[list[int]]) -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "k bigint, v bigint").aggregate("sums", key=["k"], total=nosync.sum("v"))
    runner = Runner(flow, tmp_path / "s", 0)
    for t, values in enumerate(epochs[:-1]):
        runner.advance(t, table([(1, v) for v in values], "k v"))
    last = table([(1, v) for v in epochs[-1]], "k v")
    with pytest.raises(nosync.StageError, match=r"stage sums shard .* timestamp .*: its aggregate failed"):
        runner.advance(len(epochs) - 1, last)


def test_large_values_that_sum_to_small_ones(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "k bigint, v bigint").aggregate("sums", key=["k"], total=nosync.sum("v"))
    runner = Runner(flow, tmp_path / "s", 0)
    runner.advance(0, table([(1, 2**62), (1, -(2**62)), (1, 5)], "k v"))
    assert runner.read("sums", 0)["total"].to_pylist() == [5]


@pytest.mark.parametrize("changing", [False, True])
def test_the_largest_values_are_the_same_over_rows_that_grow_and_that_change(tmp_path: Path, changing: bool) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("s", "id bigint, v double")
    if changing:
        rows = rows.update("now", key=["id"], state="v double", fn=lambda changes, state: changes.select(["id", "v"]))
    rows.map("k", lambda r: r.append_column("k", pa.array([0] * r.num_rows, pa.int64()))).aggregate(
        "best", key=["k"], top=nosync.top_k("v", 2)
    )
    runner = Runner(flow, tmp_path / "s", 0)
    runner.advance(0, pa.table({"id": [1, 2, 3], "v": [1.0, 2.0, math.nan]}))
    (row,) = runner.read("best", 0).to_pylist()
    assert math.isnan(row["top"][0])
    assert row["top"][1] == 2.0


def test_a_loop_over_columns_named_as_things_inside(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("s", "hash bigint, came bigint, lost bigint").iterate("all", lambda v: v.map("same", lambda rows: rows))
    runner = Runner(flow, tmp_path / "s", 0)
    runner.advance(0, table([(1, 2, 3), (4, 5, 6)], "hash came lost"))
    assert sorted(runner.read("all", 0)["hash"].to_pylist()) == [1, 4]


def to_node(rows: pa.Table) -> pa.Table:
    kept = [name for name in rows.column_names if name != "node"]
    return rows.select(kept).rename_columns(["node" if name == "dst" else name for name in kept])


def reachability(usable: Any, result: str = "next") -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    roots, links = flow.source("roots", "node bigint"), flow.source("links", "node bigint, dst bigint")
    some = links.map("usable", usable)

    def body(reached: nosync.Stage) -> nosync.Stage:
        following = reached.join("hops", some, on=["node"]).map("next", to_node)
        less = following.map("less", lambda rows: rows.filter(pc.less(rows["node"], 2)))
        return following if result == "next" else less

    roots.iterate("reached", body)
    return flow


def every(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["dst"], -1))


def few(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.less(rows["dst"], 3))


def count_rows(
    key: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None
) -> dict[str, Any] | None:
    return {"n": (state or {"n": 0})["n"] + len(changes)} if changes else None  # without changes its timer fired


def test_a_function_of_one_key_is_called_once_for_all_rows_whose_key_is_not_a_number(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "a double, b string").update_per_key("u", key=["a", "b"], state="n bigint", fn=count_rows)
    runner = Runner(flow, tmp_path / "s", seed=0)
    for t in range(3):
        keys = pa.table({"a": [math.nan, -math.nan, 0.0, -0.0], "b": ["x"] * 4})
        runner.advance(t, {"rows": pa.concat_tables([keys, keys])})
    found = {
        ("NaN" if math.isnan(row["a"]) else row["a"], row["b"]): row["n"] for row in runner.read("u", 2).to_pylist()
    }
    assert found == {(0.0, "x"): 12, ("NaN", "x"): 12}


def test_what_enters_a_loop_counts_as_its_code(open_store: OpenStore) -> None:
    main, other = reachability(every), reachability(few)
    bound = [bind(flow, parse_ddl).stages["reached"].fingerprint for flow in (main, other, reachability(every, "less"))]
    assert len(set(bound)) == 3
    given = {"roots": table([(0,)], "node"), "links": table([(0, 1), (1, 2), (2, 3), (3, 4)], "node dst")}
    store = open_store()
    runner = StoreRunner(main, store, 0)
    runner.advance(0, {name: rows.slice(0, 0) for name, rows in given.items()})
    runner.advance(1, given)
    assert sorted(runner.read("reached", 1)["node"].to_pylist()) == [0, 1, 2, 3, 4]
    branch = runner.make_branch("few", 0, other)
    branch.replay(1)
    assert sorted(row["node"] for row in store.read("reached", 1, branch="few").to_pylist()) == [0, 1, 2]
