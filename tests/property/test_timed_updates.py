"""Updates by event time: timers, a time to live, and several outputs, against slow Python."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.errors import FlowError, SchemaError, StageError
from tests.helpers.depth import examples
from tests.property.test_stateful_operators import EVENT_EPOCHS, MINUTE, SEED, START, events, minutes, running

DELAY, WAIT, TTL = st.integers(0, 6), st.integers(1, 8), st.integers(1, 12)
COLUMNS = "k string, at timestamp, x bigint"


def watching(wait: int) -> Any:
    """Counts the rows of a key, and says how many there were when none came for some minutes."""

    def watch(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> Any:
        n = (state["n"] if state else 0) + len(changes)
        silent = [{"k": key[0], "counted": n}] if state and state["_timer_fired"] and not changes else []
        if not changes:
            return None, {"silent": silent}
        newest = max(row["at"] for row in changes)
        due = newest + wait * MINUTE
        if state and state["due"]:
            due = max(due, state["due"])
        return {"n": n, "due": due}, {"silent": silent, "rows": [{"x": row["x"]} for row in changes]}

    return watch


@given(EVENT_EPOCHS, SEED, DELAY, WAIT)
@settings(max_examples=examples(40))
def test_timers_fire_once_the_watermark_has_passed_them(epochs: list[Any], seed: int, delay: int, wait: int) -> None:
    """Timers far enough ahead are never in the past here, for rows may be at most `delay` behind."""
    wait += 60
    flow = nosync.Dataflow("f")
    watched = flow.source("events", COLUMNS).update_per_key(
        "watched", key=["k"], state="n bigint, due timestamp", fn=watching(wait), time="at",
        watermark=f"{delay} minutes", timer="due", outputs={"silent": "k string, counted bigint", "rows": "x bigint"},
    )  # fmt: skip
    watched.output("silent").aggregate("alerts", key=["k"], n=nosync.count())
    later = [(shards, [(k, m and m + 40 * i, x) for k, m, x in rows]) for i, (shards, rows) in enumerate(epochs)]
    with running(flow, seed) as runner:
        state: dict[Any, tuple[int, int]] = {}
        alerts: Counter[Any] = Counter()
        seen: Counter[Any] = Counter()
        newest, late_by, watermark = None, -1000, -1000
        for t, (shards, rows) in enumerate(later):
            runner.shards = shards
            runner.advance(t, events(rows))
            in_time = [r for r in rows if r[1] is not None and r[1] > late_by]
            changed = {r[0] for r in in_time}
            for k, (n, due) in list(state.items()):
                if due <= watermark and k not in changed:
                    alerts[k, n] += 1
                    del state[k]
            for k in changed:
                times = [m for other, m, _ in in_time if other == k]
                n, due = state.get(k, (0, -1000))
                state[k] = n + len(times), max(due, max(times) + wait)
            seen.update(x for _, _, x in in_time)
            newest = max([m for _, m, _ in rows if m is not None] + ([] if newest is None else [newest]), default=None)
            late_by, watermark = watermark, watermark if newest is None else newest - delay
            found = {r["k"]: (r["n"], minutes(r["due"])) for r in runner.read("watched", t).to_pylist()}
            assert found == state
            silent = Counter((r["k"], r["counted"]) for r in runner.read("watched__silent", t).to_pylist())
            assert silent == alerts
            assert Counter(runner.read("watched__rows", t).column("x").to_pylist()) == seen
            counted = {r["k"]: r["n"] for r in runner.read("alerts", t).to_pylist()}
            assert counted == Counter(k for k, _ in alerts.elements())


def count(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    return {"n": (state["n"] if state else 0) + len(changes)}


@given(EVENT_EPOCHS, SEED, DELAY, TTL)
@settings(max_examples=examples(40))
def test_a_state_lives_as_long_after_its_newest_row(epochs: list[Any], seed: int, delay: int, ttl: int) -> None:
    flow = nosync.Dataflow("f")
    kept = flow.source("events", COLUMNS).update_per_key(
        "kept", key=["k"], state="n bigint", fn=count, time="at", watermark=f"{delay} minutes", ttl=f"{ttl} minutes"
    )
    kept.aggregate("seen", key=["k"], lives=nosync.count())
    kept.late.map("late_again", lambda rows: rows)
    with running(flow, seed) as runner:
        state: dict[Any, tuple[int, float]] = {}
        lives: Counter[Any] = Counter()
        late = 0
        newest, late_by, watermark = None, -1000, -1000
        for t, (shards, rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, events(rows))
            in_time = [r for r in rows if r[1] is not None and r[1] > late_by]
            late += len(rows) - len(in_time)
            changed = {r[0] for r in in_time}
            state = {k: (n, until) for k, (n, until) in state.items() if until > watermark or k in changed}
            for k in changed:
                times = [m for other, m, _ in in_time if other == k]
                lives[k] += k not in state
                n, until = state.get(k, (0, -1000))
                state[k] = n + len(times), max(until, max(times) + ttl, watermark + 0.5)
            newest = max([m for _, m, _ in rows if m is not None] + ([] if newest is None else [newest]), default=None)
            late_by, watermark = watermark, watermark if newest is None else newest - delay
            assert {r["k"]: r["n"] for r in runner.read("kept", t).to_pylist()} == {k: n for k, (n, _) in state.items()}
            assert {r["k"]: r["lives"] for r in runner.read("seen", t).to_pylist()} == lives, (
                "what expired stays counted"
            )
            assert runner.read("late_again", t).num_rows == late


def test_what_a_function_returns_is_checked() -> None:
    def run(fn: Any, **options: Any) -> None:
        flow = nosync.Dataflow("f")
        given = {"timer": "due", "outputs": {"more": "x bigint"}, **options}
        flow.source("events", COLUMNS).update(
            "u", key=["k"], state="due timestamp", fn=fn, time="at", watermark="0 minutes", **given
        )
        with running(flow, 1) as runner:
            for t, minute in enumerate((5, 50, 55)):
                runner.advance(t, events([("a", minute, 1)]))

    def due_at(time: datetime.datetime) -> Any:
        def fn(changes: pa.Table, state: pa.Table) -> pa.Table:
            keys = sorted({*changes.column("k").to_pylist(), *state.column("k").to_pylist()})
            return pa.table({"k": keys, "due": pa.array([time] * len(keys), pa.timestamp("us", "UTC"))})

        return fn

    with pytest.raises(
        StageError, match=r"returned an output 'else' that was not declared: expected 'state' and any of"
    ):
        run(lambda changes, state: {"state": state, "else": state})
    with pytest.raises(StageError, match=r"returned \{'y': 1\} for output more, expected a mapping of \(x int64\)"):
        run(lambda changes, state: {"state": state.drop_columns(["_timer_fired"]), "more": [{"y": 1}]})
    with pytest.raises(StageError, match="its function returned no state"):
        run(lambda changes, state: {"more": [{"x": 1}]})
    with pytest.raises(StageError, match=r"state for \{'k': 'z'\}, a key that neither changed nor has a timer now"):
        run(lambda c, s: pa.table({"k": ["z"], "due": pa.nulls(1, pa.timestamp("us", "UTC"))}))
    run(due_at(START + datetime.timedelta(days=3)))


def test_a_timer_that_has_passed_fires_when_the_watermark_moves_on() -> None:
    """The function cannot know how far the watermark has come, and rows may be behind it by as much as an epoch."""

    def fn(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> Any:
        fired = 1 if state and state["_timer_fired"] and not changes else 0
        n = (state["fired"] if state else 0) + fired
        return {"fired": n, "due": START if changes else None}

    flow = nosync.Dataflow("f")
    flow.source("events", COLUMNS).update_per_key(
        "u", key=["k"], state="fired bigint, due timestamp", fn=fn, time="at", watermark="0 minutes", timer="due"
    )
    with running(flow, 1) as runner:
        found = []
        for t, rows in enumerate([[("a", 50, 1)], [("b", 40, 1)], [("a", 60, 1)], [("a", 70, 1)], []]):
            runner.advance(t, events(rows))
            found.append({row["k"]: row["fired"] for row in runner.read("u", t).to_pylist()})
    # There is no watermark in epoch 0, it is 50 minutes in the epochs 1 and 2, then 60, then 70.
    assert found == [{"a": 0}, {"a": 1, "b": 0}, {"a": 1, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]


def test_what_does_not_fit_is_refused_where_it_is_declared() -> None:
    source = nosync.Dataflow("f").source("events", COLUMNS)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"time": "at"}, "stage u: time= and watermark= go together"),
        ({"timer": "due"}, "stage u: timer=, policy= and idle_after= go by event time: give time= and watermark="),
        (
            {"ttl": "1 hour"},
            "stage u: ttl='1 hour', expected a number of epochs, 1 or more; a duration goes by event time",
        ),
        ({"time": "at", "watermark": "1 hour", "ttl": 3}, "stage u: ttl=3: .* it is a duration of event time"),
        ({"time": "x", "watermark": "1 hour"}, "stage u: time column 'x' is int64, expected a timestamp"),
        ({"outputs": {"state": "x bigint"}}, "stage u: an output cannot be named 'state'"),
        ({"outputs": {"more": "x bigit"}}, "stage u: output more"),
        ({"outputs": ["more"]}, r"stage u: outputs=\['more'\], expected DDL by name"),
        ({"outputs": {"seen": "x bigint"}}, "stage u: an output cannot be named 'seen'"),
        ({"outputs": {"more": "x bigint"}, "deterministic": False}, "stage u: outputs= and deterministic=False do not"),
    ]
    for options, said in wrong:
        with pytest.raises((FlowError, SchemaError), match=said):
            source.update("u", key=["k"], state="due timestamp", fn=count, **options)
    counted = source.aggregate("counted", key=["k", "at"], n=nosync.count())
    with pytest.raises(FlowError, match="stage u: its input counted changes, and here rows may only be added"):
        counted.update("u", key=["k"], state="n bigint", fn=count, time="at", watermark="1 hour")
    with pytest.raises(FlowError, match="stage events has no output 'more'; outputs: none"):
        source.output("more")


@pytest.mark.parametrize("timer_hours", [1, 2, 3])
@pytest.mark.parametrize("steps", [[600], [90, 600], [30, 60, 119, 120, 121, 180, 600]])
def test_a_timer_that_is_due_before_the_state_ends_fires_however_epochs_are_cut(
    steps: list[int], timer_hours: int
) -> None:
    def watch(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> Any:
        if state and state["_timer_fired"]:
            return {"due": None}, {"silent": [{"k": key[0]}]}
        return {"due": max(row["at"] for row in changes) + timer_hours * 60 * MINUTE}, {}

    flow = nosync.Dataflow("f")
    watched = flow.source("events", COLUMNS).update_per_key(
        "watched", key=["k"], state="due timestamp", fn=watch, time="at", watermark="0 minutes", timer="due",
        ttl="2 hours", outputs={"silent": "k string"},
    )  # fmt: skip
    watched.output("silent").aggregate("alerts", key=["k"], n=nosync.count())
    with running(flow, 1) as runner:
        runner.advance(0, events([("a", 0, 1)]))
        for t, step in enumerate([*steps, 601], 1):
            runner.advance(t, events([("z", step, 1)]))
        runner.advance(t + 1, events([]))
        alerts = {row["k"]: row["n"] for row in runner.read("alerts", t + 1).to_pylist()}
        assert alerts.get("a", 0) == (1 if timer_hours <= 2 else 0)
        assert "a" not in {row["k"] for row in runner.read("watched", t + 1).to_pylist()}
