"""An upgrade takes a source out, and another one brings it back: the rows that it was given are there again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

import nosync
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.reading import Reading
from nosync.job.upgrade import Upgrade
from nosync.lsm.errors import InvalidInputError
from nosync.replication.client.location import StoreLocation
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner, parse_ddl


def flow_of(*, with_sales: bool, as_table: bool) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("clicks", "k string, v bigint").aggregate("clicked", key=["k"], total=nosync.sum("v"))
    if with_sales:
        columns = "k string, v bigint"
        sales = flow.table("sales", columns, key=["k"]) if as_table else flow.source("sales", columns)
        sales.aggregate("sold", key=["k"], total=nosync.sum("v"))
    return flow


def rows(*given: tuple[str, int], kind: str | None = None) -> pa.Table:
    found = pa.table(
        {"k": pa.array([k for k, _ in given], pa.string()), "v": pa.array([v for _, v in given], pa.int64())}
    )
    return found if kind is None else found.append_column("change_type", pa.repeat(kind, len(given)))


def upgraded(store: nosync.Store, flow: nosync.Dataflow) -> StoreRunner:
    Upgrade(flow, store, Position(store, "main"), parse_ddl, None, sinks=()).run()
    runner = StoreRunner(flow, store, 1, shards=2)
    runner.flow = FlowVersions(flow, store.node, Position(store, "main"), parse_ddl, None).flow
    return runner


def state(store: nosync.Store, stage: str, t: int) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in store.read(stage, t).to_pylist())


def test_an_upgrade_by_which_a_sink_would_get_nothing_is_refused_before_it_is_done(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store(retain=100)
    code = flow_of(with_sales=True, as_table=False)
    StoreRunner(code, store, 1, shards=2).advance(0, {"clicks": rows(("x", 1)), "sales": rows()})
    sinks = {"sold": nosync.ParquetSink(tmp_path / "out")}
    without, at_epochs = flow_of(with_sales=False, as_table=False), flow_of(with_sales=False, as_table=False)
    at_epochs.source("sales", "k string, v bigint").aggregate("sold", key=["k"], epoch=nosync.sum("v"))
    for flow, error, said in (
        (without, nosync.UnknownStageError, "a sink is for stage 'sold', which the flow does not have"),
        (at_epochs, InvalidInputError, "epoch"),
    ):
        with pytest.raises(error, match=said):
            Upgrade(flow, store, Position(store, "main"), parse_ddl, None, sinks=sinks)
    assert list(store.branches()) == ["main"]
    assert Upgrade(code, store, Position(store, "main"), parse_ddl, None, sinks=sinks).plan is not None


def test_a_source(open_store: OpenStore) -> None:
    store = open_store(retain=100)
    runner = StoreRunner(flow_of(with_sales=True, as_table=False), store, 1, shards=2)
    for t in range(2):
        runner.advance(t, {"clicks": rows(("x", 1)), "sales": rows(("y", 10), ("z", 1))})
    runner = upgraded(store, flow_of(with_sales=False, as_table=False))
    runner.advance(2, {"clicks": rows(("x", 1))})
    runner = upgraded(store, flow_of(with_sales=True, as_table=False))
    runner.advance(3, {"clicks": rows(("x", 1)), "sales": rows(("y", 5))})
    runner.advance(4, {"clicks": rows(), "sales": rows(("z", 7))})
    assert state(store, "sales", 3) == [("y", 5), ("y", 10), ("y", 10), ("z", 1), ("z", 1)]
    assert (state(store, "sold", 3), state(store, "sold", 4)) == ([("y", 25), ("z", 2)], [("y", 25), ("z", 9)])
    assert state(store, "clicked", 4) == [("x", 4)]
    kinds = [row["_change_type"] for row in store.changes("sales", -1, 4).to_pylist()]
    assert kinds == ["insert"] * 6, "nothing is taken back"


def test_an_epoch_without_the_stage_is_not_read_as_one_without_rows(open_store: OpenStore) -> None:
    store = open_store(retain=100)
    runner = StoreRunner(flow_of(with_sales=True, as_table=False), store, 1, shards=2)
    runner.advance(0, {"clicks": rows(("x", 1)), "sales": rows(("y", 10))})
    runner = upgraded(store, flow_of(with_sales=False, as_table=False))
    runner.advance(1, {"clicks": rows(("x", 1))})
    code = flow_of(with_sales=True, as_table=False)
    runner = upgraded(store, code)
    runner.advance(2, {"clicks": rows(("x", 1)), "sales": rows(("y", 5))})
    position = Position(store, "main")
    versions = FlowVersions(code, store.node, position, parse_ddl, None)
    location = StoreLocation(str(store.directory.root), store.directory.key_groups)
    reading = Reading(cast(Any, None), store, location, position, versions, {})
    for stage in ("sold", "sales"):  # with a key and without one
        for read in (
            lambda stage=stage: store.read(stage, 1),
            lambda stage=stage: reading.state(stage, 1),
            lambda stage=stage: reading.changes(stage, 0, 1),
        ):
            with pytest.raises(nosync.UnknownStageError, match=f"branch main has no stage {stage} at 1"):
                read()
    assert state(store, "sold", 2) == [("y", 15)]


def test_a_table(open_store: OpenStore) -> None:
    store = open_store(retain=100)
    runner = StoreRunner(flow_of(with_sales=True, as_table=True), store, 1, shards=2)
    runner.advance(0, {"clicks": rows(), "sales_changes": rows(("y", 10), ("z", 1), kind="insert")})
    runner = upgraded(store, flow_of(with_sales=False, as_table=True))
    runner.advance(1, {"clicks": rows(("x", 1))})
    runner = upgraded(store, flow_of(with_sales=True, as_table=True))
    runner.advance(2, {"clicks": rows(), "sales_changes": rows(("y", 5), kind="update_postimage")})
    assert state(store, "sales", 2) == state(store, "sold", 2) == [("y", 5), ("z", 1)]
