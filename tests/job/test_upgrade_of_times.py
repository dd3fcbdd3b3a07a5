"""Upgrades of what goes by event time: with other windows, times or bounds there is no going on from what a stage holds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CLICKS, OTHERS = "k string, at timestamp, made timestamp, x bigint", "k string, seen timestamp, eff timestamp, y bigint"
Make = Callable[[nosync.Stage, nosync.Stage], Any]


def minute(n: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC) + dt.timedelta(minutes=n)


def flow_of(make: Make) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    make(flow.source("clicks", CLICKS), flow.source("others", OTHERS))
    return flow


def give(job: nosync.Job, spark: SparkSession, t: int) -> None:
    clicks = [[("a", 0), ("a", 5)], [("a", 18), ("b", 31)], [("a", 12), ("a", 200)], []][t]
    rows = [(k, minute(n), minute(n + 7), n) for k, n in clicks]
    others = [(k, minute(n + 1), minute(n + 3), n) for k, n in clicks]
    job.advance(t, {"clicks": spark.createDataFrame(rows, CLICKS), "others": spark.createDataFrame(others, OTHERS)})


def window(**arguments: Any) -> Make:
    said = {"time": "at", "watermark": "1 hour", "n": nosync.count(), **arguments}
    return lambda clicks, _: clicks.window("s", key=["k"], **said)


def interval(**arguments: Any) -> Make:
    said = {"time": ("at", "seen"), "within": ("0 seconds", "5 minutes"), "watermark": "1 hour", **arguments}
    return lambda clicks, others: clicks.join("s", others.select("o", "k", "seen", "eff", "y"), on=["k"], **said)


def asof(**arguments: Any) -> Make:
    said = {"time": ("at", "seen"), "watermark": "1 hour", **arguments}
    return lambda clicks, others: clicks.join_asof("s", others, on=["k"], **said)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (window(size="10 minutes"), window(size="20 minutes")),
        (window(size="20 minutes"), window(size="20 minutes", slide="10 minutes")),
        (window(gap="5 minutes"), window(gap="10 minutes")),
        (window(gap="10 minutes", keep="10 days"), window(gap="30 minutes", keep="10 days")),
        (window(size="10 minutes"), window(size="10 minutes", time="made")),
        (window(size="10 minutes"), window(size="10 minutes", n=nosync.sum("x"))),
    ],
    ids=["size", "slide", "gap", "gap of kept ones", "time", "function"],
)
def test_other_windows_are_made_of_all_rows(
    spark: SparkSession, open_store: OpenStore, before: Make, after: Make
) -> None:
    store = open_store("upgraded")
    upgraded = nosync.Job(flow_of(before), store, spark=spark, shards=1)
    fresh = nosync.Job(flow_of(after), open_store("fresh"), spark=spark, shards=1)
    for t in range(2):
        give(upgraded, spark, t)
    plan = upgraded.plan_upgrade(flow_of(after))
    assert plan is not None
    assert "s" in plan.begins_anew
    upgraded.upgrade(flow_of(after))
    give(upgraded, spark, 2)
    store.close()  # and it starts again
    store = open_store("upgraded")
    upgraded = nosync.Job(flow_of(after), store, spark=spark, shards=1)
    give(upgraded, spark, 3)
    for t in range(4):
        give(fresh, spark, t)
    rows = sorted(map(tuple, fresh.read("s").collect()))
    assert len(rows) > 1
    assert sorted(map(tuple, upgraded.read("s").collect())) == rows


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (window(size="10 minutes", emit="final"), window(size="20 minutes", emit="final")),
        (interval(), interval(within=("0 seconds", "10 minutes"))),
        (interval(), interval(how="left")),
        (interval(), interval(time=("at", "eff"))),
        (asof(), asof(time=("at", "eff"))),
        (asof(), asof(within="5 minutes")),
    ],
    ids=["final windows", "bounds", "type", "times", "times of as-of", "bounds of as-of"],
)
def test_what_cannot_be_made_anew_is_refused(
    spark: SparkSession, open_store: OpenStore, before: Make, after: Make
) -> None:
    job = nosync.Job(flow_of(before), open_store(retain=10), spark=spark, shards=1)
    give(job, spark, 0)
    with pytest.raises(nosync.FlowError, match="stage s goes by other windows, times or bounds.*Give it another name"):
        job.plan_upgrade(flow_of(after))
    with pytest.raises(nosync.FlowError, match="stage s goes by other windows, times or bounds.*Give it another name"):
        job.upgrade(flow_of(after))
    give(job, spark, 1)


def test_a_longer_delay_goes_on(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(flow_of(window(size="10 minutes")), open_store(), spark=spark, shards=1)
    give(job, spark, 0)
    plan = job.plan_upgrade(flow_of(window(size="10 minutes", watermark="2 hours")))
    assert plan is not None
    assert "s" in plan.goes_on
