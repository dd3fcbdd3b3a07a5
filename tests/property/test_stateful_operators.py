"""Joins, unions, dedupe, windows, time to live and rescaling against slow Python. No Spark.

Every test runs with random numbers of shards, which may change at any epoch, and with rows in random order.
"""

from __future__ import annotations

import datetime
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.dataflow import Dataflow
from nosync.testing import FlowTester
from tests.helpers.depth import examples
from tests.helpers.oracles import state_of
from tests.helpers.runner import Runner

KEYS = st.sampled_from(["a", "b", "c", "d", None])
PAIR = st.tuples(KEYS, st.integers(0, 3))
EPOCH = st.tuples(st.integers(1, 4), st.lists(PAIR, max_size=6), st.lists(PAIR, max_size=6))
EPOCHS = st.lists(EPOCH, min_size=1, max_size=6)
SEED = st.integers(0, 2**32)
HOWS = ["inner", "left", "right", "full", "left_semi", "left_anti"]


@contextmanager
def running(flow: Dataflow, seed: int) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory() as root:
        yield Runner(flow, Path(root) / "s", seed)


def pairs(rows: list[tuple[Any, Any]], names: tuple[str, str]) -> pa.Table:
    return pa.table(
        {names[0]: pa.array([r[0] for r in rows], pa.string()), names[1]: pa.array([r[1] for r in rows], pa.int64())}
    )


def rows_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.to_pylist())


def live_rows(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """The rows of a log of changes that are left."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in table.to_pylist():
        kind = row.pop("_change_type")
        found[tuple(row.values())] += -1 if kind in ("delete", "update_preimage") else 1
    assert min(found.values(), default=0) >= 0
    return +found


def join_slowly(left: Counter[Any], right: Counter[Any], how: str) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    matched = set()
    for (k, x), n in left.items():
        partners = [(y, m) for (other, y), m in right.items() if other == k and k is not None]
        matched |= {(k, y) for y, _ in partners}
        if how in ("left_semi", "left_anti"):
            if bool(partners) == (how == "left_semi"):
                found[k, x] += n
            continue
        for y, m in partners:
            found[k, x, y] += n * m
        if not partners and how in ("left", "full"):
            found[k, x, None] += n
    if how in ("right", "full"):
        for (k, y), m in right.items():
            if (k, y) not in matched:
                found[k, None, y] += m
    return found


@given(EPOCHS, SEED, st.sampled_from(HOWS))
@settings(max_examples=examples(30))
def test_joins_of_inputs_that_only_grow(epochs: list[Any], seed: int, how: str) -> None:
    flow = nosync.Dataflow("f")
    left, right = flow.source("l", "k string, x bigint"), flow.source("r", "k string, y bigint")
    left.join("joined", right, on=["k"], how=how)
    with running(flow, seed) as runner:
        seen: tuple[Counter[Any], Counter[Any]] = (Counter(), Counter())
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": pairs(ls, ("k", "x")), "r": pairs(rs, ("k", "y"))})
            seen[0].update(ls)
            seen[1].update(rs)
            assert rows_of(runner.read("joined", t)) == join_slowly(*seen, how)


def last_value(changes: pa.Table, state: pa.Table) -> pa.Table:
    """The largest x of the epoch replaces the key's value; 0 deletes the key."""
    found = {row["k"]: row["x"] for row in state.to_pylist()}
    for row in sorted(changes.to_pylist(), key=lambda r: r["x"]):
        found[row["k"]] = row["x"]
    kept = {k: x for k, x in found.items() if x}
    return pa.table({"k": pa.array(list(kept), pa.string()), "x": pa.array(list(kept.values()), pa.int64())})


def drop_key(rows: pa.Table) -> pa.Table:
    """Few keys from many: so different rows become equal."""
    return rows.set_column(
        rows.schema.get_field_index("k"),
        "k",
        pa.array([k and "ab"[k > "b"] for k in rows["k"].to_pylist()], pa.string()),
    )


@given(EPOCHS, SEED, st.sampled_from(HOWS), st.booleans())
@settings(max_examples=examples(60))
def test_joins_of_inputs_that_change(epochs: list[Any], seed: int, how: str, swapped: bool) -> None:
    """One side is updated, deleted, and has equal rows; the other one grows. A count follows the join."""
    flow = nosync.Dataflow("f")
    changing = flow.source("l", "k string, x bigint").update("state", key=["k"], state="x bigint", fn=last_value)
    right = flow.source("r", "k string, y bigint")
    few_rows = changing.map("few", drop_key)
    first, second = (right, few_rows) if swapped else (few_rows, right)
    joined = first.join("joined", second, on=["k"], how=how)
    one_sided = how in ("left_semi", "left_anti")
    value = "y" if swapped else "x"  # of the left side
    if one_sided:
        joined.aggregate("counted", key=[value], n=nosync.count())
    else:
        joined.aggregate("counted", key=["x"], n=nosync.count(), total=nosync.sum("y"))
    with running(flow, seed) as runner:
        state: dict[Any, int] = {}
        grown: Counter[Any] = Counter()
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": pairs(ls, ("k", "x")), "r": pairs(rs, ("k", "y"))})
            state |= {k: max(x for other, x in ls if other == k) for k, _ in ls}
            state = {k: x for k, x in state.items() if x}
            grown.update(rs)
            few = Counter((k and "ab"[k > "b"], x) for k, x in state.items())
            if one_sided:
                of_left = join_slowly(*((grown, few) if swapped else (few, grown)), how)
                assert rows_of(runner.read("joined", t)) == of_left
                counts: Counter[tuple[Any]] = Counter()
                for (_, v), n in of_left.items():
                    counts[(v,)] += n
                assert state_of(runner.read("counted", t), [value]) == {v: (n,) for v, n in counts.items()}
                continue
            expected = join_slowly(few, grown, how)
            if swapped:
                expected = Counter({(k, x, y): n for (k, y, x), n in join_slowly(grown, few, how).items()})
            assert rows_of(runner.read("joined", t).select(["k", "x", "y"])) == expected
            by_x: dict[Any, list[Any]] = {}
            for (_, x, y), n in expected.items():
                by_x.setdefault(x, []).extend([y] * n)
            known = {x: [y for y in ys if y is not None] for x, ys in by_x.items()}
            sums = {(x,): (len(ys), sum(known[x]) if known[x] else None) for x, ys in by_x.items()}
            assert state_of(runner.read("counted", t), ["x"]) == sums


@given(EPOCHS, SEED)
@settings(max_examples=examples(15))
def test_a_stage_can_be_joined_with_itself(epochs: list[Any], seed: int) -> None:
    flow = nosync.Dataflow("f")
    left = flow.source("l", "k string, x bigint")
    left.join("joined", left.map("renamed", lambda rows: rows.rename_columns(["k", "y"])), on=["k"])
    with running(flow, seed) as runner:
        seen: Counter[Any] = Counter()
        for t, (shards, ls, _) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, pairs(ls, ("k", "x")))
            seen.update(ls)
            assert rows_of(runner.read("joined", t)) == join_slowly(seen, seen, "inner")


@given(EPOCHS, SEED)
@settings(max_examples=examples(20))
def test_unions_within_and_across_segments(epochs: list[Any], seed: int) -> None:
    flow = nosync.Dataflow("f")
    left, right = flow.source("l", "k string, x bigint"), flow.source("r", "k string, x bigint")
    changing = left.update("state", key=["k"], state="x bigint", fn=last_value)
    near = left.filter("low", lambda rows: pa.compute.less(rows["x"], 2)).union("near", left)
    near.union("all", right, changing).aggregate("counted", key=["k"], n=nosync.count())
    with running(flow, seed) as runner:
        state: dict[Any, int] = {}
        grown: Counter[Any] = Counter()
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": pairs(ls, ("k", "x")), "r": pairs(rs, ("k", "x"))})
            grown.update([*ls, *(row for row in ls if row[1] < 2), *rs])
            state |= {k: max(x for other, x in ls if other == k) for k, _ in ls}
            state = {k: x for k, x in state.items() if x}
            expected = Counter(k for k, _ in grown.elements())
            expected.update(state.keys())
            assert state_of(runner.read("counted", t), ["k"]) == {(k,): (n,) for k, n in expected.items()}


@given(EPOCHS, SEED)
@settings(max_examples=examples(40))
def test_dedupe(epochs: list[Any], seed: int) -> None:
    """By key and by whole rows over an input that grows; by key over one that changes."""
    flow = nosync.Dataflow("f")
    source = flow.source("l", "k string, x bigint")
    source.dedupe("by_key", key=["k"]).aggregate("counted", key=["x"], n=nosync.count())
    source.dedupe("by_row")
    changing = source.update("state", key=["k"], state="x bigint", fn=last_value)
    changing.dedupe("by_x", key=["x"])
    with running(flow, seed) as runner:
        state: dict[Any, int] = {}
        first: dict[Any, int] = {}
        seen: set[Any] = set()
        for t, (shards, ls, _) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, pairs(ls, ("k", "x")))
            found = state_of(runner.read("by_key", t), ["k"])
            new = {k: x for (k,), (x,) in found.items() if k not in first}
            assert new.keys() == {k for k, _ in ls} - first.keys()
            assert set(new.items()) <= set(ls), "a key's row is one of those that came first"
            first |= new
            assert found == {(k,): (x,) for k, x in first.items()}, "and stays"
            counted = Counter(first.values())
            assert state_of(runner.read("counted", t), ["x"]) == {(x,): (n,) for x, n in counted.items()}
            seen.update(ls)
            assert rows_of(runner.read("by_row", t)) == Counter(seen)
            state |= {k: max(x for other, x in ls if other == k) for k, _ in ls}
            state = {k: x for k, x in state.items() if x}
            smallest: dict[int, Any] = {}
            for k, x in state.items():
                smallest[x] = min(smallest.get(x, k), k, key=lambda v: (v is None, v or ""))
            assert state_of(runner.read("by_x", t), ["x"]) == {(x,): (k,) for x, k in smallest.items()}


def count_key(
    key: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None
) -> dict[str, Any] | None:
    n = len(changes) + (state["n"] if state else 0)
    return None if n > 4 else {"n": n}


@given(EPOCHS, SEED, st.integers(1, 3))
@settings(max_examples=examples(30))
def test_time_to_live_and_functions_of_one_key(epochs: list[Any], seed: int, ttl: int) -> None:
    flow = nosync.Dataflow("f")
    source = flow.source("l", "k string, x bigint")
    source.update_per_key("counted", key=["k"], state="n bigint", fn=count_key, ttl=ttl)
    with running(flow, seed) as runner:
        state: dict[Any, tuple[int, int]] = {}
        for t, (shards, ls, _) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, pairs(ls, ("k", "x")))
            state = {k: (n, at) for k, (n, at) in state.items() if t - at < ttl or k in {key for key, _ in ls}}
            for k, count in Counter(k for k, _ in ls).items():
                n = count + state.get(k, (0, 0))[0]
                state.pop(k, None)
                if n <= 4:
                    state[k] = (n, t)
            assert state_of(runner.read("counted", t), ["k"]) == {(k,): (n,) for k, (n, _) in state.items()}


# --- windows ---------------------------------------------------------------------------------------------------------

MINUTE = datetime.timedelta(minutes=1)
START = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
EVENT = st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(0, 40), st.integers(1, 3))
EVENT_EPOCHS = st.lists(st.tuples(st.integers(1, 4), st.lists(EVENT, max_size=6)), min_size=1, max_size=6)
Event = tuple[Any, int | None, int]


def events(rows: list[Event]) -> pa.Table:
    times = [None if minute is None else START + minute * MINUTE for _, minute, _ in rows]
    return pa.table(
        {
            "k": pa.array([r[0] for r in rows], pa.string()),
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "x": pa.array([r[2] for r in rows], pa.int64()),
        }
    )


def minutes(time: datetime.datetime) -> int:
    return int((time - START) / MINUTE)


SHAPES = st.sampled_from([(10, 10), (10, 5), (7, 3)])
DELAY, KEEP = st.none() | st.integers(0, 10), st.none() | st.integers(0, 8)


ON_THE_EDGE = [(1, [("a", 10, 1)]), (1, [("a", 0, 1)])]  # the watermark is just where the window of the late row ends


@given(EVENT_EPOCHS, SEED, SHAPES, DELAY, KEEP)
@example(ON_THE_EDGE, 0, (10, 10), 0, None)
@settings(max_examples=examples(40))
def test_tumbling_and_sliding_windows(
    epochs: list[Any], seed: int, shape: tuple[int, int], delay: int | None, keep: int | None
) -> None:
    size, slide = shape
    flow = nosync.Dataflow("f")
    source = flow.source("events", "k string, at timestamp, x bigint")
    windows = source.window(
        "w", key=["k"], time="at", size=f"{size} minutes", slide=f"{slide} minutes",
        watermark=None if delay is None else f"{delay} minutes",
        keep=None if delay is None or keep is None else f"{keep} minutes",
        n=nosync.count(), total=nosync.sum("x"), widest=nosync.variance("x"),
    )  # fmt: skip
    windows.late.map("late_again", lambda rows: rows)
    # Windows start at multiples of the slide since 1970, which START is not of 7 minutes.
    offset = int((START - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / MINUTE) % slide
    with running(flow, seed) as runner:
        state: dict[Any, list[int]] = {}
        late: Counter[Any] = Counter()
        newest, late_by, watermark = None, None, None
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            if keep is not None and late_by is not None:
                state = {w: xs for w, xs in state.items() if w[1] + size > late_by - keep}
            for k, minute, x in rows:
                if minute is None:
                    late[k, minute, x, None] += 1
                    continue
                first = (minute + offset) // slide * slide - offset
                for start in range(first, minute - size, -slide):
                    if late_by is not None and start + size <= late_by:
                        late[k, minute, x, start] += 1
                    else:
                        state.setdefault((k, start), []).append(x)
                newest = max(minute, newest if newest is not None else minute)
            late_by = watermark
            if delay is not None and newest is not None:
                watermark = newest - delay
            found = {
                (r["k"], minutes(r["window_start"])): (r["n"], r["total"], minutes(r["window_end"]))
                for r in runner.read("w", t).to_pylist()
            }
            assert found == {(k, s): (len(xs), sum(xs), s + size) for (k, s), xs in state.items()}
            for name in ("w__late", "late_again"):
                rows_late = Counter(
                    (r["k"], r["at"] and minutes(r["at"]), r["x"], r["window_start"] and minutes(r["window_start"]))
                    for r in runner.read(name, t).to_pylist()
                )
                assert rows_late == late
            if delay is not None:
                counted = sum(r["late_rows"] for r in runner.read("w__watermark", t).to_pylist())
                assert counted == sum(late.values())


def sessions_slowly(open_: list[list[Any]], new: list[tuple[int, int]], gap: int) -> list[list[Any]]:
    """Sessions as [start, end, xs], grown one event at a time."""
    for minute, x in new:
        mine = [minute, minute + gap, [x]]
        rest = []
        for other in open_:
            if other[0] <= mine[1] and mine[0] <= other[1]:
                mine = [min(mine[0], other[0]), max(mine[1], other[1]), mine[2] + other[2]]
            else:
                rest.append(other)
        open_ = [*rest, mine]
    return open_


@given(EVENT_EPOCHS, SEED, DELAY, KEEP)
@settings(max_examples=examples(50))
def test_session_windows(epochs: list[Any], seed: int, delay: int | None, keep: int | None) -> None:
    gap = 5
    flow = nosync.Dataflow("f")
    flow.source("events", "k string, at timestamp, x bigint").window(
        "w", key=["k"], time="at", gap=f"{gap} minutes",
        watermark=None if delay is None else f"{delay} minutes",
        keep=None if delay is None or keep is None else f"{keep} minutes",
        n=nosync.count(), total=nosync.sum("x"), spread=nosync.variance("x"), best=nosync.top_k("x", 2),
    )  # fmt: skip
    with running(flow, seed) as runner:
        state: dict[Any, list[list[Any]]] = {}
        newest, late_by, watermark = None, None, None
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            in_force = -1000 if late_by is None else late_by
            if keep is not None and late_by is not None:
                state = {k: [s for s in ss if s[1] > late_by - keep] for k, ss in state.items()}
            for k in {r[0] for r in rows}:
                new = [(m, x) for other, m, x in rows if other == k and m is not None and m + gap > in_force]
                closed = [s for s in state.get(k, []) if s[1] <= in_force]
                still = [s for s in state.get(k, []) if s[1] > in_force]
                state[k] = closed + sessions_slowly(still, new, gap)
            times = [m for _, m, _ in rows if m is not None]
            newest = max([*times, *([] if newest is None else [newest])], default=None)
            late_by = watermark
            if delay is not None and newest is not None:
                watermark = newest - delay
            found = {
                (r["k"], minutes(r["window_start"])): (
                    minutes(r["window_end"]),
                    r["n"],
                    r["total"],
                    r["spread"],
                    r["best"],
                )
                for r in runner.read("w", t).to_pylist()
            }
            expected = {(k, s): (e, len(xs), sum(xs), xs) for k, ss in state.items() for s, e, xs in ss}
            assert found.keys() == expected.keys()
            for at, (e, n, total, xs) in expected.items():
                mean = total / n
                spread = sum((x - mean) ** 2 for x in xs) / (n - 1) if n > 1 else None
                assert found[at][:3] == (e, n, total)
                assert found[at][3] == (None if spread is None else pytest.approx(spread))
                assert found[at][4] == sorted(xs, reverse=True)[:2]


@given(EPOCHS, SEED)
@settings(max_examples=examples(20))
def test_logs_and_states_survive_any_rescaling(epochs: list[Any], seed: int) -> None:
    """2 -> 4 -> 2 shards and so on: no layer is rewritten, and reads as of every epoch stay exact."""
    flow = nosync.Dataflow("f")
    source = flow.source("l", "k string, x bigint")
    source.aggregate("sums", key=["k"], n=nosync.count(), total=nosync.sum("x"))
    with running(flow, seed) as runner:
        seen: list[Any] = []
        expected = []
        for t, (shards, ls, _) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, pairs(ls, ("k", "x")))
            seen += ls
            keys = {k for k, _ in seen}
            sums = {(k,): (sum(1 for o, _ in seen if o == k), sum(x for o, x in seen if o == k)) for k in keys}
            expected.append((Counter(seen), sums))
        for t, (rows, sums) in enumerate(expected):
            assert rows_of(runner.read("l", t)) == rows
            assert state_of(runner.read("sums", t), ["k"]) == sums


@pytest.mark.parametrize(
    ("ddl", "keys"),
    [
        ("array<double>", [[1.0, None], [1.0], [math.nan], [], None]),
        ("struct<a: double, b: array<string>>", [{"a": 1.0, "b": ["x"]}, {"a": math.nan, "b": None}, None]),
        ("double", [math.nan, 0.5, None]),
    ],
)
def test_keys_of_a_function_of_one_key_are_of_any_type(ddl: str, keys: list[Any]) -> None:
    def counted(key: tuple[Any, ...], rows: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
        assert repr(rows[0]["k"]) == repr(key[0])
        return {"n": len(rows) + (state["n"] if state else 0)}

    flow = nosync.Dataflow("f")
    flow.source("rows", f"k {ddl}").update_per_key("counts", key=["k"], state="n bigint", fn=counted)
    with FlowTester(flow, shards=2) as tester:
        for _ in range(3):
            tester.advance({"rows": [(key,) for key in [*keys, *keys]]})
        found = {repr(row["k"]): row["n"] for row in tester.read("counts").to_pylist()}
    assert found == {repr(key): 6 for key in keys}
