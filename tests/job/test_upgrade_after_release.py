"""Upgrades of a job whose inputs were all released: their rows are gone, and with them what says their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
ROWS = "k string, v bigint"


def flow_of(schema: str = ROWS, *, is_new: bool = False) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", schema, at_safe_point="drop")
    more = {"top": nosync.max("v")} if is_new else {}
    rows.aggregate("sums", key=["k"], n=nosync.sum("v"), **more)
    return flow


def released(spark: SparkSession, store: nosync.Store) -> nosync.Job:
    job = nosync.Job(flow_of(), store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, {"rows": spark.createDataFrame([("a", t), ("b", 1)], ROWS)})
    store.sync()
    assert isinstance(store.node, Node)
    store.node.release_inputs()
    store.node.collect_garbage()
    assert not list((store.directory.root / "layers/rows").rglob("*.layer"))
    return job


@pytest.mark.parametrize("how", ["upgrade()", "Job(upgrade=True)"])
def test_other_code_goes_on_from_the_state(spark: SparkSession, open_store: OpenStore, how: str) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0))
    job = released(spark, store)
    if how == "upgrade()":
        job.upgrade(flow_of(is_new=True))
    else:
        job = nosync.Job(flow_of(is_new=True), store, spark=spark, shards=2, upgrade=True)
    job.advance(3, {"rows": spark.createDataFrame([("a", 10)], ROWS)})
    found = {row.k: row.n for row in job.read("sums").collect()}
    assert found["a"] == 13
    assert store.missing() == []
    store.sync()
    assert store.safe_point() == 3


def test_columns_that_nothing_can_be_compared_with_are_refused(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0))
    job = released(spark, store)
    with pytest.raises(
        nosync.FlowError, match="source rows: its columns are not those .* run an epoch with the code as it was"
    ):
        job.upgrade(flow_of(f"{ROWS}, more string"))
    job.advance(3, {"rows": spark.createDataFrame([("a", 10)], ROWS)})
    job.upgrade(flow_of(f"{ROWS}, more string"))
    job.advance(4, {"rows": spark.createDataFrame([("a", 1, "x")], f"{ROWS}, more string")})
    assert {row.k: row.n for row in job.read("sums").collect()} == {"a": 14, "b": 3}
