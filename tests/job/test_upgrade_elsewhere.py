"""Upgrades that change another stage, or when things expire: what holds a state goes on with it. Without Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner
from tests.job.test_sources_that_come_back import rows, upgraded

Y2024, Y1960 = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2024, 1960))


def clean(given: pa.Table) -> pa.Table:
    return given


def clean_fixed(given: pa.Table) -> pa.Table:
    return given.slice(0)


def count(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    came = sum(row["_change_type"] in ("insert", "update_postimage") for row in changes)
    return {"updates": (state["updates"] if state else 0) + came}


@pytest.mark.parametrize("of", [nosync.sum("v"), nosync.mean("v"), nosync.stddev("v")], ids=["sum", "mean", "stddev"])
def test_an_aggregate_that_nobody_touched_goes_on(open_store: OpenStore, of: Any) -> None:
    """A layer has the columns of a mean that are rare only where it needs them: they are no other columns than declared."""

    def flow_of(fn: Any) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        cleaned = flow.source("e", "k string, v bigint").map("clean", fn)
        totals = cleaned.aggregate("totals", key=["k"], v=nosync.sum("v"))
        by_key = totals.aggregate("by_key", key=["k"], v=of)
        by_key.update_per_key("history", key=["k"], state="updates bigint", fn=count, version="1")
        return flow

    epochs = [rows(("a", 1), ("b", 2)), rows(("a", 3)), rows(("a", 5)), rows(("b", 1)), rows()]
    states = []
    for is_upgraded in (False, True):
        store = open_store(f"upgraded_{is_upgraded}", retain=100)
        runner = StoreRunner(flow_of(clean), store, 1, shards=2)
        for t, given in enumerate(epochs):
            if is_upgraded and t == 3:
                runner = upgraded(store, flow_of(clean_fixed))
            runner.advance(t, {"e": given})
        states.append(sorted(map(repr, store.read("history").to_pylist())))
    assert states[0] == states[1]


def at(base: datetime.datetime, *minutes: tuple[str, int]) -> pa.Table:
    times = [base + datetime.timedelta(minutes=minute) for _, minute in minutes]
    return pa.table(
        {"k": pa.array([k for k, _ in minutes], pa.string()), "at": pa.array(times, pa.timestamp("us", "UTC"))}
    )


@pytest.mark.parametrize("still", [1, 2])
def test_windows_expire_where_the_watermark_stands_still_at_the_upgrade(open_store: OpenStore, still: int) -> None:
    def flow_of(**how: Any) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        rows_ = flow.source("e", "k string, at timestamp")
        rows_.window("w", key=["k"], time="at", size="10 minutes", watermark="0 minutes", n=nosync.count(), **how)
        return flow

    store = open_store(retain=100)
    runner = StoreRunner(flow_of(), store, 1, shards=2)
    before = [(("a", 0),), (("b", 100),), *[()] * still]
    for t, given in enumerate(before):
        runner.advance(t, {"e": at(Y2024, *given)})
    runner = upgraded(store, flow_of(keep="1 hour"))
    for t, given in enumerate([(("c", 400),), (("c", 800),), (("c", 1200),), (), ()], len(before)):
        runner.advance(t, {"e": at(Y2024, *given)})
    assert {row["k"] for row in store.read("w").to_pylist()} == {"c"}


@pytest.mark.parametrize("base", [Y2024, Y1960])
def test_a_time_to_live_counts_for_keys_of_any_year(open_store: OpenStore, base: datetime.datetime) -> None:
    def flow_of(**how: Any) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        rows_ = flow.source("e", "k string, at timestamp")
        rows_.update_per_key(
            "u", key=["k"], state="updates bigint", fn=count, version="1", time="at", watermark="0 minutes", **how
        )
        return flow

    store = open_store(retain=100)
    runner = StoreRunner(flow_of(), store, 1, shards=2)
    runner.advance(0, {"e": at(base, ("a", 0), ("b", 0))})
    runner = upgraded(store, flow_of(ttl="10 minutes"))
    for t, given in enumerate([(("a", 1), ("new", 1)), *((("z", minute),) for minute in (120, 240, 360, 480))], 1):
        runner.advance(t, {"e": at(base, *given)})
    assert {row["k"] for row in store.read("u").to_pylist()} == {"b", "z"}, "b did not change since"
