"""Operators against slow Python: random inputs, random epoch cuts, rows that come and go. No Spark."""

from __future__ import annotations

import datetime as dt
import math
import statistics
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import times_us
from nosync.replication.client.location import StoreLocation, open_directory
from nosync.runtime.shard_run import run_shard
from tests.helpers.depth import examples
from tests.helpers.oracles import state_of
from tests.helpers.runner import SHARDS, Runner

VALUES = st.none() | st.integers(-3, 3)
ROW = st.tuples(st.sampled_from(["a", "b", "c", None]), VALUES)
EPOCHS = st.lists(st.lists(ROW, max_size=10), min_size=1, max_size=6)

FUNCTIONS: dict[str, Aggregate] = {
    "rows": nosync.count(),
    "some": nosync.count("x"),
    "total": nosync.sum("x"),
    "mean": nosync.mean("x"),
    "least": nosync.min("x"),
    "most": nosync.max("x"),
    "kinds": nosync.count_distinct("x"),
    "var": nosync.variance("x"),
    "std": nosync.stddev("x"),
    "first_word": nosync.first("tag", by="x"),
    "last_word": nosync.last("tag", by="x"),
    "best": nosync.top_k("x", 2),
    "some_of": nosync.collect("x", limit=3),
}


TAGS = "pqr"


def tag_of(x: int | None) -> str | None:
    """Another column of the row: null for some, and of few values, so that there are ties."""
    return None if x == 2 else TAGS[(x or 0) % 3]


def aggregate_slowly(values: list[int | None]) -> tuple[Any, ...]:
    """In the order of FUNCTIONS."""
    x = sorted(v for v in values if v is not None)
    some = (sum(x), sum(x) / len(x), min(x), max(x)) if x else (None, None, None, None)
    variance = statistics.variance(x) if len(x) > 1 else None
    spread = (variance, None if variance is None else math.sqrt(variance))
    ends = (tag_of(x[0]), tag_of(x[-1])) if x else (None, None)
    lists = (x[::-1][:2], x[:3])
    return (len(values), len(x), *some, len(set(x)), *spread, *ends, *lists)


def close(found: dict[Any, Any], expected: dict[Any, Any]) -> bool:
    """Equal, but for the last digits of floats."""
    assert found.keys() == expected.keys()
    for key, row in found.items():
        for a, b in zip(row, expected[key], strict=True):
            assert a == b or (isinstance(a, float) and a == pytest.approx(b, abs=1e-9)), (key, row, expected[key])
    return True


def to_table(rows: list[tuple[Any, Any]]) -> pa.Table:
    return pa.table(
        {
            "word": pa.array([r[0] for r in rows], pa.string()),
            "x": pa.array([r[1] for r in rows], pa.int64()),
            "tag": pa.array([tag_of(r[1]) for r in rows], pa.string()),
        }
    )


@given(EPOCHS, st.integers(0, 2**32))
@settings(max_examples=examples(40))
def test_aggregates_over_rows_that_only_come(epochs: list[list[tuple[Any, Any]]], seed: int) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "word string, x bigint, tag string").aggregate("all", key=["word"], **FUNCTIONS)
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", seed)
        seen: dict[Any, list[Any]] = {}
        for t, rows in enumerate(epochs):
            runner.advance(t, to_table(rows))
            for word, x in rows:
                seen.setdefault(word, []).append(x)
            expected = {(w,): aggregate_slowly(v) for w, v in seen.items()}
            assert close(state_of(runner.read("all", t), ["word"]), expected)


def latest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """State per word: its last x of the epoch in order of value, so that it changes often; x = -3 deletes the word."""
    found = {row["word"]: row["x"] for row in state.to_pylist()}
    for row in sorted(changes.to_pylist(), key=lambda r: (r["x"] is None, r["x"] or 0)):
        found[row["word"]] = row["x"]
    kept = {word: x for word, x in found.items() if x != -3}
    return pa.table({"word": pa.array(list(kept), pa.string()), "x": pa.array(list(kept.values()), pa.int64())})


def latest_slowly(state: dict[Any, Any], rows: list[tuple[Any, Any]]) -> dict[Any, Any]:
    touched = {word for word, _ in rows}
    found = {word: x for word, x in state.items() if word not in touched}
    for word in touched:
        x = max((r[1] for r in rows if r[0] == word), key=lambda v: (v is None, v or 0))
        if x != -3:
            found[word] = x
    return found


def parity(rows: pa.Table) -> pa.Table:
    words = ["odd" if (x or 0) % 2 else "even" for x in rows["x"].to_pylist()]
    rows = rows.append_column("tag", pa.array([tag_of(x) for x in rows["x"].to_pylist()], pa.string()))
    return rows.set_column(rows.schema.get_field_index("word"), "word", pa.array(words, pa.string()))


@given(EPOCHS, st.integers(0, 2**32))
@settings(max_examples=examples(60))
def test_aggregates_over_rows_that_change_and_go(epochs: list[list[tuple[Any, Any]]], seed: int) -> None:
    """A stage whose rows are updated and deleted, remapped to another key, aggregated with every function."""
    flow = nosync.Dataflow("f")
    changing = flow.source("rows", "word string, x bigint, tag string").update(
        "latest", key=["word"], state="x bigint", fn=latest
    )
    changing.map("parity", parity).aggregate("all", key=["word"], **FUNCTIONS)
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", seed)
        state: dict[Any, Any] = {}
        for t, rows in enumerate(epochs):
            runner.advance(t, to_table(rows))
            state = latest_slowly(state, rows)
            assert state_of(runner.read("latest", t), ["word"]) == {(w,): (x,) for w, x in state.items()}
            groups: dict[str, list[Any]] = {}
            for x in state.values():
                groups.setdefault("odd" if (x or 0) % 2 else "even", []).append(x)
            expected = {(g,): aggregate_slowly(v) for g, v in groups.items()}
            assert close(state_of(runner.read("all", t), ["word"]), expected)


@given(st.lists(ROW, max_size=30), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=examples(25))
def test_how_rows_are_cut_into_epochs_does_not_matter(rows: list[tuple[Any, Any]], cuts: int, seed: int) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "word string, x bigint, tag string").aggregate("all", key=["word"], **FUNCTIONS)
    with tempfile.TemporaryDirectory() as root:
        states = []
        for n in (1, cuts):
            runner = Runner(flow, Path(root) / f"s{n}-{len(states)}", seed + n)
            for t in range(n):
                runner.advance(t, to_table(rows[t * len(rows) // n : (t + 1) * len(rows) // n]))
            states.append(state_of(runner.read("all", n - 1), ["word"]))
        assert close(states[0], states[1])
        assert sum(state[0] for state in states[0].values()) == len(rows)


def test_a_stage_never_computes_from_a_part_of_its_input(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    source = flow.source("rows", "word string, x bigint, tag string")
    source.map("rows_again", lambda rows: rows).aggregate("all", key=["word"], **FUNCTIONS)
    runner = Runner(flow, tmp_path / "s", 1)
    rows = {"rows": to_table([("a", 1), ("b", 2)])}
    segment = runner.flow.segments["all"]
    sent = runner.sent(0, segment.edges[0], rows)
    marks = Counter(r for r in sent[REPORT_COLUMN].to_pylist() if r and r.startswith(b"all-from"))
    assert marks == {b'all-from:{"from": 0}': SHARDS, b'all-from:{"from": 1}': SHARDS}
    part = sent.filter(pa.array([r != b'all-from:{"from": 1}' for r in sent[REPORT_COLUMN].to_pylist()]))
    part = part.append_column(HASH64_COLUMN, pa.nulls(part.num_rows, pa.int64()))
    with pytest.raises(nosync.StageError, match=r"shards \[1\] of its input rows_again sent nothing"):
        list(run_shard(runner.task(0, segment, None), 0, iter(part.to_batches())))
    assert not open_directory(StoreLocation(str(runner.root), 128)).traces("all")


DAY = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
TYPED: dict[str, list[Any]] = {
    "decimal(10,2)": [Decimal("1.25"), Decimal("-3.50"), None, Decimal("99999999.99"), Decimal("0.00")],
    "timestamp": [DAY, DAY - dt.timedelta(days=400), None, DAY + dt.timedelta(microseconds=1)],
    "boolean": [True, False, None],
    "date": [DAY.date(), None, dt.date(1969, 12, 31)],
    "string": ["b", "", None, "a"],
    "float": [1.5, -0.25, None],
}


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("type_", TYPED)
def test_aggregates_of_every_type_that_they_take(type_: str, changing: bool, tmp_path: Path) -> None:
    """Over several epochs, so that accumulators of all types are combined, and taken back where rows change."""
    functions: dict[str, Aggregate] = {"least": nosync.min("x"), "most": nosync.max("x"), "n": nosync.count("x")}
    is_number = type_ in ("decimal(10,2)", "float")
    if is_number:
        functions |= {"total": nosync.sum("x"), "mean": nosync.mean("x")}
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", f"id bigint, x {type_}")
    if changing:
        rows = rows.update("last", key=["id"], state=f"x {type_}", fn=last_rows)
    rows.map("keyed", keyed).aggregate("all", key=["word"], **functions)
    runner = Runner(flow, tmp_path / "s", 1)
    schema = runner.flow.stages["rows"].schema
    values, seen = TYPED[type_], dict[int, Any]()
    for t in range(6):
        ids = [(t + i) % 4 if changing else 10 * t + i for i in range(3)]
        given = [values[(t * 2 + i) % len(values)] for i in range(3)]
        seen |= dict(zip(ids, given, strict=True))
        runner.advance(t, pa.table([ids, given], schema=schema))
        x = sorted(value for value in seen.values() if value is not None)
        expected: list[Any] = [x[0], x[-1], len(x)] if x else [None, None, 0]
        if is_number:
            expected += [sum(x), pytest.approx(float(sum(x)) / len(x))] if x else [None, None]
        assert state_of(runner.read("all", t), ["word"]) == {("w",): tuple(expected)}


def last_rows(changes: pa.Table, state: pa.Table) -> pa.Table:
    return changes.select(["id", "x"])


def keyed(rows: pa.Table) -> pa.Table:
    return rows.append_column("word", pa.repeat(pa.scalar("w"), rows.num_rows))


def test_nan_is_a_value_as_others_are(tmp_path: Path) -> None:
    """What has it in a column that is no key is kept, and taken back."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "id bigint, x double")
    rows.dedupe("once", key=["id"])
    latest_x = rows.update("last", key=["id"], state="x double", fn=last_rows)
    latest_x.dedupe("of_changing", key=["id"])
    rows.aggregate("spread", key=["id"], x=nosync.variance("x"), n=nosync.count())
    runner = Runner(flow, tmp_path / "s", 1)
    nan = float("nan")
    runner.advance(0, pa.table({"id": [1, 2, 3], "x": [nan, 1.0, 1.0]}))
    runner.advance(1, pa.table({"id": [1, 2, 3], "x": [2.0, float("inf"), 3.0]}))
    once = {row["id"]: row["x"] for row in runner.read("once", 1).to_pylist()}
    assert math.isnan(once.pop(1))
    assert once == {2: 1.0, 3: 1.0}
    assert {row["id"]: row["x"] for row in runner.read("of_changing", 1).to_pylist()} == {1: 2.0, 2: math.inf, 3: 3.0}
    spread = {row["id"]: row["x"] for row in runner.read("spread", 1).to_pylist()}
    assert spread.pop(3) == 2.0
    assert all(math.isnan(x) for x in spread.values())


@pytest.mark.parametrize("changing", [False, True])
def test_values_that_are_equal_in_parts(tmp_path: Path, changing: bool) -> None:
    """Two zeros are one value; of equal `by`, null is the value only where there is no other."""
    flow = nosync.Dataflow("f")
    rows: nosync.Stage = flow.source("rows", "k string, by bigint, tag string, x double")
    if changing:
        rows = rows.aggregate("once", key=["k", "by", "tag", "x"], n=nosync.count())
    rows.aggregate(
        "all",
        key=["k"],
        kinds=nosync.count_distinct("x"),
        a=nosync.first("tag", by="by"),
        z=nosync.last("tag", by="by"),
    )
    runner = Runner(flow, tmp_path / "s", 1)

    def epoch(t: int, *given: tuple[str, int, str | None, float]) -> dict[Any, Any]:
        columns = zip(*given, strict=True)
        types = (pa.string(), pa.int64(), pa.string(), pa.float64())
        arrays = [pa.array(c, type_) for c, type_ in zip(columns, types, strict=True)]
        runner.advance(t, pa.table(arrays, names=["k", "by", "tag", "x"]))
        return state_of(runner.read("all", t), ["k"])

    first = epoch(
        0, ("a", 1, "p", 0.0), ("a", 1, None, -0.0), ("a", 2, None, 1.0), ("a", 2, "q", -0.0), ("b", 1, None, 0.0)
    )
    assert first == {("a",): (2, "p", "q"), ("b",): (1, None, None)}
    second = epoch(1, ("a", 3, None, 9.0), ("b", 1, "r", -0.0), ("b", 1, None, 5.0))
    assert second == {("a",): (3, "p", None), ("b",): (2, "r", "r")}


def test_nanoseconds_are_rounded_down() -> None:
    found, valid = times_us(pa.array([-1, 1999, None], pa.timestamp("ns", "UTC")))
    assert found.tolist() == [-1, 1, 0]
    assert valid.tolist() == [True, True, False]
