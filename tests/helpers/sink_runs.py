"""Jobs with one sink and without Spark: the epochs that a flow of sums has, given as a job gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema

import nosync
from nosync.job.delivery import Delivery
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.sinks import Sink
from tests.helpers.runner import StoreRunner, parse_ddl
from tests.helpers.tables import Rows

COLUMNS = ("_epoch", "_change_type", "k", "total")


class Frame:
    """Rows as a DataFrame of Spark has them for a sink."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def toArrow(self) -> pa.Table:
        return self._rows

    @property
    def schema(self) -> Any:
        return from_arrow_schema(self._rows.schema)

    @property
    def write(self) -> Frame:
        return self

    def parquet(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        pq.write_table(self._rows, f"{path}/part-00000.parquet")


def flow_of() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, v bigint").aggregate("sums", key=["k"], total=nosync.sum("v"))
    return flow


def rows_of(t: int) -> pa.Table:
    return pa.table(
        {"k": ["a", f"b{t % 3}"], "v": pa.array([t, 1], pa.int64())}
        if t % 4
        else {"k": pa.array([], pa.string()), "v": pa.array([], pa.int64())}
    )


def delivery_of(store: nosync.Store, sink: Sink) -> Delivery:
    """Begins what a job on a store begins for its sinks."""
    position = Position(store, "main")
    position.take_over(store.node.timelines.timeline("main").id)
    made = Delivery(
        {"sums": sink},
        store,
        position,
        lambda stage, after, until: Frame(store.changes(stage, after, until)),  # type: ignore[arg-type,return-value]
    )
    made.start(store.last_sealed())
    return made


def expected(store: nosync.Store, until: int) -> Rows:
    feed = store.changes("sums", -1, until).to_pylist()
    return sorted((tuple(row[name] for name in COLUMNS) for row in feed), key=repr)


def run(store: nosync.Store, sink: Sink, until: int) -> None:
    delivery, last = delivery_of(store, sink), store.last_sealed()
    for t in range(0 if last is None else last + 1, until):
        advance(store, t, rows_of(t))
        delivery.deliver(t)


def advance(store: nosync.Store, t: int, rows: pa.Table) -> None:
    """Seals an epoch, on whatever line main is."""
    runner = StoreRunner(flow_of(), store, t, shards=1)
    runner.flow = FlowVersions(flow_of(), store.node, Position(store, "main"), parse_ddl, None).flow
    runner.advance(t, rows)
