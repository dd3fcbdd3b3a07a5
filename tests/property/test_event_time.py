"""Results that are final: windows that are given once, first rows within a time, and interval joins.

The oracles keep every row, and look at all of them at each epoch.
"""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.binder import bind
from nosync.lsm.errors import FlowError, SchemaError
from tests.helpers.depth import examples
from tests.helpers.runner import Runner, parse_ddl
from tests.helpers.two_sides import Row, TwoSides
from tests.property.test_stateful_operators import (
    EVENT_EPOCHS,
    MINUTE,
    SEED,
    START,
    events,
    minutes,
    running,
    sessions_slowly,
)

DELAY = st.integers(0, 8)
SIDE = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(0, 30)), max_size=4)
TWO_SIDES = st.lists(st.tuples(st.integers(1, 3), SIDE, SIDE), min_size=1, max_size=7)
HOWS = ["inner", "left", "right", "full", "left_semi", "left_anti"]
BOUNDS = st.sampled_from([(0, 5), (-5, 5), (-6, -2), (2, 6), (0, 0)])


def shown(time: datetime.datetime | None) -> int | None:
    return None if time is None else minutes(time)


@given(EVENT_EPOCHS, SEED, st.sampled_from([(10, 10), (10, 5)]), DELAY, st.booleans())
@settings(max_examples=examples(40))
def test_a_window_is_given_once_when_it_is_closed(
    epochs: list[Any], seed: int, shape: tuple[int, int], delay: int, by_window: bool
) -> None:
    """And what follows may rely on it: it only grows, and is counted once."""
    size, slide = shape
    flow = nosync.Dataflow("f")
    source = flow.source("events", "k string, at timestamp, x bigint")
    final = source.window(
        "w", key=["k"], time="at", size=f"{size} minutes", slide=f"{slide} minutes", watermark=f"{delay} minutes",
        emit="final", n=nosync.count(), total=nosync.sum("x"),
    )  # fmt: skip
    final.aggregate("windows", key=["k"], windows=nosync.count(), total=nosync.sum("total"))
    if by_window:
        ends = final.map("ends", lambda rows: rows.select(["window_end", "n"]).rename_columns(["ended", "n"]))
        ends.window("hours", time="ended", size="1 hour", watermark="0 seconds", n=nosync.sum("n"))
    with running(flow, seed) as runner:
        is_open: dict[Any, list[int]] = {}
        given_out: Counter[Any] = Counter()
        newest, late_by, watermark = None, None, None
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            for k, minute, x in rows:
                if minute is None:
                    continue
                for start in range(minute // slide * slide, minute - size, -slide):
                    if late_by is None or start + size > late_by:
                        is_open.setdefault((k, start), []).append(x)
                newest = max(minute, newest if newest is not None else minute)
            for (k, start), xs in list(is_open.items()):
                if watermark is not None and start + size <= watermark:
                    given_out[k, start, start + size, len(xs), sum(xs)] += 1
                    del is_open[k, start]
            late_by, watermark = watermark, None if newest is None else newest - delay
            found = Counter(
                (r["k"], minutes(r["window_start"]), minutes(r["window_end"]), r["n"], r["total"])
                for r in runner.read("w", t).to_pylist()
            )
            assert found == given_out
            by_key = {r["k"]: (r["windows"], r["total"]) for r in runner.read("windows", t).to_pylist()}
            keys = {k for k, *_ in given_out}
            assert by_key == {
                k: (sum(1 for w in given_out if w[0] == k), sum(w[4] for w in given_out if w[0] == k)) for k in keys
            }
            if by_window:
                late = runner.read("hours__late", t)
                assert not late.num_rows, "windows come in the order of their ends"
            assert {(r["k"], minutes(r["window_start"])) for r in runner.read("w__open", t).to_pylist()} == set(is_open)


@given(EVENT_EPOCHS, SEED, DELAY)
@settings(max_examples=examples(25))
def test_a_session_is_given_once_when_it_is_closed(epochs: list[Any], seed: int, delay: int) -> None:
    gap = 5
    flow = nosync.Dataflow("f")
    flow.source("events", "k string, at timestamp, x bigint").window(
        "w", key=["k"], time="at", gap=f"{gap} minutes", watermark=f"{delay} minutes", emit="final", n=nosync.count()
    )
    with running(flow, seed) as runner:
        is_open: dict[Any, list[list[Any]]] = {}
        given_out: Counter[Any] = Counter()
        newest, late_by, watermark = None, -1000, -1000
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            for k in {r[0] for r in rows}:
                new = [(m, x) for other, m, x in rows if other == k and m is not None and m + gap > late_by]
                is_open[k] = sessions_slowly(is_open.get(k, []), new, gap)
            for k, of_key in is_open.items():
                given_out.update((k, start, end, len(xs)) for start, end, xs in of_key if end <= watermark)
                is_open[k] = [session for session in of_key if session[1] > watermark]
            times = [m for _, m, _ in rows if m is not None]
            newest = max([*times, *([] if newest is None else [newest])], default=None)
            late_by, watermark = watermark, watermark if newest is None else newest - delay
            found = Counter(
                (r["k"], minutes(r["window_start"]), minutes(r["window_end"]), r["n"])
                for r in runner.read("w", t).to_pylist()
            )
            assert found == given_out


@given(EVENT_EPOCHS, SEED, DELAY, st.none() | st.integers(0, 12))
@settings(max_examples=examples(40))
def test_the_first_row_of_each_key_within_a_time(epochs: list[Any], seed: int, delay: int, within: int | None) -> None:
    flow = nosync.Dataflow("f")
    source = flow.source("events", "k string, at timestamp, x bigint")
    first = source.dedupe(
        "d", key=["k"], time="at", watermark=f"{delay} minutes", within=None if within is None else f"{within} minutes"
    )
    first.aggregate("counted", key=["k"], n=nosync.count())
    first.late.map("late_again", lambda rows: rows)
    lasts = delay if within is None else within
    with running(flow, seed) as runner:
        until: dict[Any, int] = {}
        given_out: Counter[Any] = Counter()
        late: Counter[Any] = Counter()
        newest, late_by, watermark = None, None, None
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            known = dict(until)
            in_time = [r for r in rows if r[1] is not None and (late_by is None or r[1] > late_by)]
            late.update(r for r in rows if r not in in_time)
            for k in {r[0] for r in in_time if r[0] not in known}:
                minute = min(r[1] for r in in_time if r[0] == k)
                until[k] = minute + lasts
                given_out[k, minute] += 1
            until = {k: end for k, end in until.items() if watermark is None or end > watermark}
            newest = (
                max([r[1] for r in rows if r[1] is not None], default=newest)
                if newest is None
                else max([newest, *(r[1] for r in rows if r[1] is not None)])
            )
            late_by, watermark = watermark, None if newest is None else newest - delay
            found = Counter((r["k"], minutes(r["at"])) for r in runner.read("d", t).to_pylist())
            assert found == given_out
            for name in ("d__late", "late_again"):
                assert Counter((r["k"], shown(r["at"]), r["x"]) for r in runner.read(name, t).to_pylist()) == late
            assert {r["k"]: r["n"] for r in runner.read("counted", t).to_pylist()} == Counter(
                k for k, _ in given_out.elements()
            )
            assert {r["k"] for r in runner.read("d__seen", t).to_pylist()} == set(until)


def side(rows: list[tuple[Any, int | None]], time: str, value: str, first: int) -> pa.Table:
    """Rows with a number each, so that all are different."""
    times = [None if minute is None else START + minute * MINUTE for _, minute in rows]
    return pa.table(
        {
            "k": pa.array([k for k, _ in rows], pa.string()),
            time: pa.array(times, pa.timestamp("us", "UTC")),
            value: pa.array(range(first, first + len(rows)), pa.int64()),
        }
    )


def interval_flow(how: str, bounds: tuple[int, int], delays: tuple[int, int], policy: str) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    left = flow.source("l", "k string, at timestamp, x bigint")
    right = flow.source("r", "k string, seen timestamp, y bigint")
    joined = left.join(
        "joined", right, on=["k"], how=how, time=("at", "seen"), watermark=tuple(f"{d} minutes" for d in delays),
        within=tuple(f"{b} minutes" for b in bounds), policy=policy,
    )  # fmt: skip
    joined.aggregate("counted", key=["k"], n=nosync.count())
    joined.late_left.map("late_again", lambda rows: rows)
    return flow


def matched(left: Row, right: Row, bounds: tuple[int, int]) -> bool:
    return left[0] is not None and left[0] == right[0] and bounds[0] <= right[1] - left[1] <= bounds[1]


A_MATCH_AND_NONE = [(2, [("a", 0), ("b", 1)], [("a", 2)]), (1, [("a", 30)], [("a", 30)]), (3, [], []), (1, [], [])]


@given(TWO_SIDES, SEED, st.sampled_from(HOWS), BOUNDS, st.tuples(DELAY, DELAY), st.sampled_from(["min", "max"]))
@example(A_MATCH_AND_NONE, 0, "full", (0, 5), (0, 3), "min")
@example(
    [(1, [("a", 0)], []), (2, [("a", 30)], []), (1, [("a", 0)], []), (1, [], [])], 0, "left", (0, 5), (0, 3), "max"
)
@settings(max_examples=examples(80))
def test_interval_joins(
    epochs: list[Any], seed: int, how: str, bounds: tuple[int, int], delays: tuple[int, int], policy: str
) -> None:
    """Pairs come at once, rows without a match when none can come any more, and the state is bounded."""
    with running(interval_flow(how, bounds, delays, policy), seed) as runner:
        sides = TwoSides(delays, policy)
        lefts, rights = sides.in_time
        done: set[Any] = set()
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": side(ls, "at", "x", 100 * t), "r": side(rs, "seen", "y", 100 * t)})
            sides.take(t, (ls, rs))
            watermark = sides.watermark
            pairs = {(a, b) for a in lefts for b in rights if matched(a, b, bounds)}
            results: Counter[Any] = Counter()
            if how not in ("left_semi", "left_anti"):
                results = Counter((a[0], a[2], b[2]) for a, b in pairs)
            if how == "left_semi":
                results = Counter((a[0], a[2]) for a in {a for a, _ in pairs})
            if watermark is not None:
                done |= {a for a in lefts if a[1] + bounds[1] < watermark and a not in {a for a, _ in pairs}}
                gone = {b for b in rights if b[1] - bounds[0] < watermark and b not in {b for _, b in pairs}}
                if how in ("left", "full"):
                    results.update((a[0], a[2], None) for a in done)
                if how == "left_anti":
                    results.update((a[0], a[2]) for a in done)
                if how in ("right", "full"):
                    results.update((b[0], None, b[2]) for b in gone)
            columns = ["k", "x"] if how in ("left_semi", "left_anti") else ["k", "x", "y"]
            found = Counter(tuple(row.values()) for row in runner.read("joined", t).select(columns).to_pylist())
            assert found == results
            assert {r["k"]: r["n"] for r in runner.read("counted", t).to_pylist()} == Counter(
                r[0] for r in results.elements()
            )
            assert [runner.read(f"joined__late_{name}", t).num_rows for name in ("left", "right")] == sides.late
            _check_state(runner, t, (lefts, rights), bounds, watermark, how)


def _check_state(
    runner: Runner, t: int, rows: tuple[list[Any], list[Any]], bounds: tuple[int, int], watermark: int | None, how: str
) -> None:
    needs_nulls = (how in ("left", "full", "left_anti"), how in ("right", "full"))
    for name, of_side, value, lasts, nulls in zip(
        ("left", "right"), rows, "xy", (bounds[1], -bounds[0]), needs_nulls, strict=True
    ):
        kept = {
            r[2] for r in of_side if (watermark is None or r[1] + lasts >= watermark) and (nulls or r[0] is not None)
        }
        assert set(runner.read(f"joined__kept_{name}", t).column(value).to_pylist()) == kept


COLUMNS = "k string, at timestamp, x bigint"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"within": None}, r"stage j: within=None, expected both bounds .* rows would be kept for ever"),
        ({"within": ("0 seconds",)}, r"stage j: within=\('0 seconds',\), expected both bounds"),
        ({"within": ("1 hour", "0 seconds")}, "the first bound is larger than the second: swap them"),
        ({"within": ("0 seconds", "soon")}, "stage j: 'soon' is not a duration"),
        (
            {"within": ("0 seconds", "20000000 weeks")},
            "stage j: '20000000 weeks' is too long: .* 146,000 years at most",
        ),
        ({"watermark": None}, "stage j: watermark=None, expected how late rows may be"),
        ({"time": None}, "stage j: time=None, expected the columns of event time of both sides"),
        ({"time": ("at", "y")}, "stage j: time column 'y' is int64, expected a timestamp"),
        ({"time": ("at", "sen")}, "stage j: time column 'sen' is not in its input r .*did you mean 'seen'"),
        ({"how": "cross"}, "stage j: how='cross', expected 'inner', 'left', 'right', 'full', 'left_semi'"),
        ({"idle_after": 0}, "stage j: idle_after=0, expected a number of epochs"),
    ],
)
def test_an_interval_join_is_refused_where_it_is_declared(wrong: dict[str, Any], said: str) -> None:
    flow = nosync.Dataflow("f")
    left, right = flow.source("l", COLUMNS), flow.source("r", "k string, seen timestamp, y bigint")
    how = {"time": ("at", "seen"), "within": ("0 seconds", "1 hour"), "watermark": "1 minute", **wrong}
    with pytest.raises((FlowError, SchemaError), match=said):
        left.join("j", right, on=["k"], **how)


def test_what_is_to_be_final_takes_only_rows_that_are_added() -> None:
    flow = nosync.Dataflow("f")
    source = flow.source("l", COLUMNS)
    counted = source.window("w", key=["k"], time="at", size="1 hour", watermark="1 hour", n=nosync.count())
    with pytest.raises(FlowError, match='stage d: its input w changes, .* Give it windows with emit="final"'):
        counted.dedupe("d", key=["k"], time="window_end", watermark="1 hour")
    with pytest.raises(FlowError, match='stage j: its input w changes, .* Give it windows with emit="final"'):
        source.join(
            "j", counted, on=["k"], time=("at", "window_end"), within=("0 seconds", "1 hour"), watermark="1 hour"
        )
    for wrong, said in (
        ({"emit": "append"}, "stage f: emit='append', expected 'changes' .* or 'final'"),
        ({"emit": "final", "watermark": None}, "stage f: emit='final' gives a window when .* say watermark="),
        (
            {"emit": "final", "keep": "1 day"},
            "stage f: emit='final' forgets a window when it is given: leave keep= out",
        ),
    ):
        given_settings = {"watermark": "1 hour", **wrong}
        with pytest.raises(FlowError, match=said):
            source.window("f", time="at", size="1 hour", n=nosync.count(), **given_settings)
    with pytest.raises(FlowError, match="stage d: watermark= goes by event time: say which column has it"):
        source.dedupe("d", key=["k"], watermark="1 hour")
    with pytest.raises(FlowError, match="stage d: time= is for keys that are forgotten, which takes watermark="):
        source.dedupe("d", key=["k"], time="at")
    again = source.select("again", "k", "at AS seen", "x AS y")
    source.join("j", again, on=["k"], time=("at", "seen"), within=("0 seconds", "1 hour"), watermark="1 hour")
    with pytest.raises(FlowError, match="rows of l come by both sides, whose watermarks|no Spark session here"):
        bind(flow, parse_ddl)
