"""Sources whose rows are released at the safe point: a job goes on, recovers, and says what can no longer be
replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pytest

import nosync
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def make_flow(at_safe_point: str, persist: str = "disk") -> nosync.Dataflow:
    flow = nosync.Dataflow("words")
    source = flow.source("rows", "word string, n bigint", at_safe_point=at_safe_point)
    kept = source.map("kept", lambda rows: rows.filter(pc.greater(rows["n"], 0)), persist="none")
    kept.aggregate("sums", key=["word"], total=nosync.sum("n"), persist=persist)
    return flow


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    return {"rows": spark.createDataFrame([(f"w{i % 5}", i + t) for i in range(20)], "word string, n bigint")}


def release(store: nosync.Store) -> list[str]:
    """What is left of the source when everything is safe."""
    store.sync()
    assert isinstance(store.node, Node)
    store.node.release_inputs()
    store.node.collect_garbage()
    return [layer.stage for layer in store.layers() if layer.stage == "rows"]


def test_rows_that_were_released_are_missed_by_replays_only(spark: SparkSession, open_store: OpenStore) -> None:
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    store = open_store(settings=settings)
    job = nosync.Job(make_flow("drop"), store, spark=spark, shards=2)
    for t in range(3):
        job.advance(t, rows(spark, t))
    state = sorted(map(tuple, job.read("sums", as_of=1).collect()))
    assert release(store) == []
    assert job.recover().lost == 0
    assert sorted(map(tuple, job.read("sums", as_of=1).collect())) == state
    with pytest.raises(
        nosync.NotAvailableError, match=r"replay branch b from 1: the rows of source rows were released"
    ):
        job.branch("b", at=0, replace={"kept": lambda rows: rows}).replay()
    store.delete_branch("b")
    store.close()
    store = open_store(settings=settings)
    job = nosync.Job(make_flow("drop"), store, spark=spark, shards=2)
    job.advance(3, rows(spark, 3))
    assert job.safe_point() == 2
    branch = job.branch("later", at=2, replace={"kept": lambda rows: rows})
    assert release(store) == ["rows", "rows"], "a branch holds what came after its fork"
    branch.replay()
    assert branch.last_sealed() == 3


def test_what_could_not_be_computed_again_is_refused(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(
        nosync.FlowError, match=r"source rows: at_safe_point='drop', and stage sums has persist='memory'"
    ):
        nosync.Job(make_flow("drop", persist="memory"), store, spark=spark, shards=2)
    nosync.Job(make_flow("keep", persist="memory"), store, spark=spark, shards=2)
