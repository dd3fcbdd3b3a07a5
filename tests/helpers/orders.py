"""Orders and items, and a flow over both."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


ORDERS, ITEMS = "customer string, item bigint, n bigint, at timestamp", "item bigint, price bigint"


EPOCHS, SHARDS = 7, 2


Digests = dict[str, str]
"""By file."""


def many(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["n"], 2))


def latest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """The last total of each item, and how often it changed."""
    found = {row["item"]: row["seen"] for row in state.to_pylist()}
    totals = {}
    for row in changes.to_pylist():
        if row["_change_type"] in ("insert", "update_postimage"):
            found[row["item"]] = found.get(row["item"], 0) + 1
            totals[row["item"]] = row["total"]
    return pa.table(
        {"item": list(totals), "last": list(totals.values()), "seen": [found[item] for item in totals]},
        pa.schema([("item", pa.int64()), ("last", pa.int64()), ("seen", pa.int64())]),
    )


def make_flow() -> nosync.Dataflow:
    """Logs and states, expressions, two shuffles one after the other, a join, several exits of a segment, a window."""
    flow = nosync.Dataflow("f")
    orders, items = flow.source("orders", ORDERS), flow.source("items", ITEMS)
    kept = orders.map("kept", many)
    sums = kept.aggregate("sums", key=["item"], total=nosync.sum("n"))
    sums.update("latest", key=["item"], state="last bigint, seen bigint", fn=latest)
    priced = sums.where("large", "total > 5").join("priced", items, on=["item"])
    priced.select("spent", "item % 3 AS kind", "total * price AS money").aggregate(
        "by_kind", key=["kind"], money=nosync.sum("money"), n=nosync.count()
    )
    kept.dedupe("customers", key=["customer"])
    kept.window("hourly", time="at", size="1 hour", watermark="30 minutes", key=["item"], n=nosync.count())
    return flow


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    noon = datetime.datetime(2013, 7, 4, 12, tzinfo=datetime.UTC)
    minutes = [datetime.timedelta(minutes=20 * t - 3 * i % 70) for i in range(30)]  # some come too late
    orders = [(f"c{i * t % 11}", 50 if (t, i) == (5, 0) else i * 7 % 13, i % 6, noon + minutes[i]) for i in range(30)]
    items = [(i, 3 * i + 1) for i in range(2 * t, 2 * t + 2)]
    return {"orders": spark.createDataFrame(orders, ORDERS), "items": spark.createDataFrame(items, ITEMS)}


def digests(store: nosync.Store) -> Digests:
    return {str(Path(layer.path).relative_to(store.directory.root)): layer.digest for layer in store.layers()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The epochs of each run that follows."""
    from nosync.spark import runner

    runs: list[list[int]] = []
    run_epochs = runner.run_epochs

    def run(spark: Any, flow: Any, plans: Any, inputs: Any, **how: Any) -> Any:
        runs.append([plan.t for plan in plans])
        return run_epochs(spark, flow, plans, inputs, **how)

    monkeypatch.setattr(runner, "run_epochs", run)
    return runs
