"""Joins by event time on a branch where one side has other code: what is late of the other side goes by both. Without Spark."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.flow.meanings import Meanings
from nosync.job.position import Position
from nosync.job.upgrade import Upgrade
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner, parse_ddl

KINDS = ["interval", "as-of"]


def minute(n: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC) + dt.timedelta(minutes=n)


def table(time: str, *minutes: int) -> pa.Table:
    times = pa.array([minute(n) for n in minutes], pa.timestamp("us", "UTC"))
    return pa.table({"k": pa.array(["a"] * len(minutes), pa.string()), time: times})


EPOCHS = [
    {"l": table("at", *minutes), "r": table("seen", *minutes)} for minutes in ((0,), (0, 100), (100,), (20, 60, 120))
]


def same(rows: pa.Table) -> pa.Table:
    return rows


def early(rows: pa.Table) -> pa.Table:
    """Keeps the watermark of a side back."""
    time = rows.column_names.index("seen" if "seen" in rows.column_names else "at")
    back = pc.subtract(rows.column(time), pa.scalar(dt.timedelta(minutes=65), pa.duration("us")))
    return rows.set_column(time, rows.column_names[time], back)


def flow_of(kind: str, **fns: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    left = flow.source("l", "k string, at timestamp").map("left", fns.get("left", same))
    right = flow.source("r", "k string, seen timestamp").map("right", fns.get("right", same))
    said = {"on": ["k"], "time": ("at", "seen"), "watermark": "0 minutes"}
    if kind == "interval":
        left.join("j", right, within=("0 seconds", "5 minutes"), **said)
    else:
        left.join_asof("j", right, **said)
    return flow


def late(store: nosync.Store, side: str, branch: str = "main") -> list[list[Any]]:
    found = [store.read(f"j__late_{side}", t, branch=branch).to_pylist() for t in range(len(EPOCHS))]
    return [sorted(row["at" if side == "left" else "seen"] for row in rows) for rows in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("changed", "other"), [("left", "right"), ("right", "left")])
def test_a_branch_with_other_code_on_one_side(open_store: OpenStore, kind: str, changed: str, other: str) -> None:
    store, fresh = open_store("store", retain=100), open_store("fresh", retain=100)
    runner = StoreRunner(flow_of(kind), store, 1, shards=2)
    alone = StoreRunner(flow_of(kind, **{changed: early}), fresh, 1, shards=2)
    for t, given in enumerate(EPOCHS):
        runner.advance(t, given)
        alone.advance(t, given)
    branch = runner.make_branch("what-if", 0, flow_of(kind, **{changed: early}), [changed])
    for t in range(1, len(EPOCHS)):
        branch.replay(t)
    expected = late(fresh, other)
    assert late(store, other, "what-if") == expected
    assert late(store, other) != expected, "other rows are late there"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_an_earlier_version_goes_on_and_refuses_such_a_branch(open_store: OpenStore, kind: str) -> None:
    """Its late rows are recorded as those of their side alone."""
    store = open_store(retain=100)
    before = Meanings(late_by_side={"j"})
    StoreRunner(flow_of(kind), store, 1, shards=2, meanings=before).advance(0, EPOCHS[0])
    StoreRunner(flow_of(kind), store, 1, shards=2).advance(1, EPOCHS[1])
    other = {e.id.trace.fingerprint for e in store.manifest(1).entries if e.id.trace.stage == "j__late_left"}
    assert other == {e.id.trace.fingerprint for e in store.manifest(0).entries if e.id.trace.stage == "j__late_left"}
    new = flow_of(kind, right=early)
    assert Upgrade(new, store, Position(store, "main"), parse_ddl, None, sinks=()).plan is not None, (
        "what was given stays"
    )
    with pytest.raises(
        nosync.FlowError, match="stage j: one side of it has other code, and an earlier version.*another name"
    ):
        Upgrade(new, store, Position(store, "main"), parse_ddl, None, at=0, sinks=())
