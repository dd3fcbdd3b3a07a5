"""Upgrades that give a stage other columns, or the same in another order: what follows holds rows of it by their contents.

The oracle is a job that had the new code from the first epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.kernels.aggregates import Aggregate
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ORDERS, NAMES = "id bigint, g string, v bigint", "g string, name string"
BEFORE = {"n": nosync.count(), "total": nosync.sum("v")}
AFTER = {
    "another order": {"total": nosync.sum("v"), "n": nosync.count()},
    "one more": {**BEFORE, "top": nosync.max("v")},
}


def flow_of(aggregates: dict[str, Any]) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    names = flow.source("names", NAMES)
    spent = flow.source("orders", ORDERS).aggregate("spent", key=["id", "g"], **aggregates)
    bare = spent.select("bare", "g", *aggregates)
    bare.join("joined", names, on=["g"])
    bare.per_key("ranked", key=["g"], fn=lambda rows: rows)
    spent.dedupe("one", key=["g"])
    return flow


def give(job: nosync.Job, t: int) -> None:
    spark = job._spark
    names = [("a", "Ann"), ("b", "Bob")] if t == 0 else []
    rows: dict[str, DataFrame] = {
        "orders": spark.createDataFrame(EPOCHS[t], ORDERS),
        "names": spark.createDataFrame(names, NAMES),
    }
    job.advance(t, rows)


EPOCHS = (
    [(1, "a", 20), (2, "a", 1), (2, "a", 0), (3, "b", 7)],
    [(1, "a", 22), (3, "b", 5)],
    [(2, "a", 4), (4, "b", 1)],
)


@pytest.mark.parametrize("change", list(AFTER))
def test_what_holds_rows_of_a_stage_with_other_columns_begins_anew(
    spark: SparkSession, open_store: OpenStore, change: str
) -> None:
    job = nosync.Job(flow_of(BEFORE), open_store("upgraded"), spark=spark, shards=2)
    fresh = nosync.Job(flow_of(AFTER[change]), open_store("fresh"), spark=spark, shards=2)
    give(job, 0)
    plan = job.plan_upgrade(flow_of(AFTER[change]))
    assert plan is not None
    assert {"one", "joined", "ranked"} <= {*plan.begins_anew}
    assert plan.goes_on == ("spent",)
    job.upgrade(flow_of(AFTER[change]))
    for t in range(1, len(EPOCHS)):
        give(job, t)
    for t in range(len(EPOCHS)):
        give(fresh, t)
    shown = [*BEFORE]  # what is new is null for what did not change since
    for stage in ("spent", "joined", "ranked", "one"):
        found, expected = (sorted(map(tuple, one.read(stage).select("g", *shown).collect())) for one in (job, fresh))
        assert found == expected, stage


def totals_of(**aggregates: Aggregate) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    flow.source("orders", ORDERS).aggregate("totals", key=["g"], **aggregates)
    return flow


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nosync.mean("v"), nosync.sum("v")),
        (nosync.max("v"), nosync.sum("v")),
        (nosync.max("v"), nosync.min("v")),
        (nosync.count(), nosync.sum("v")),
        (nosync.variance("v"), nosync.mean("v")),
        (nosync.first("v", by="id"), nosync.first("v", by="v")),
        (nosync.top_k("v", 2), nosync.top_k("v", 3)),
    ],
    ids=str,
)
def test_an_aggregate_does_not_go_on_from_the_state_of_another_function(
    spark: SparkSession, open_store: OpenStore, before: Aggregate, after: Aggregate
) -> None:
    """It begins anew, over all rows."""
    job = nosync.Job(totals_of(m=before), open_store(), spark=spark, shards=2)
    fresh = nosync.Job(totals_of(m=after), open_store("fresh"), spark=spark, shards=2)
    rows = [[(1, "a", 10), (2, "a", 30), (3, "a", 20)], [(4, "a", 5)]]
    job.advance(0, {"orders": spark.createDataFrame(rows[0], ORDERS)})
    plan = job.plan_upgrade(totals_of(m=after))
    assert plan is not None
    assert (plan.begins_anew, plan.goes_on) == (("totals",), ())
    job.upgrade(totals_of(m=after))
    job.advance(1, {"orders": spark.createDataFrame(rows[1], ORDERS)})
    for t, given in enumerate(rows):
        fresh.advance(t, {"orders": spark.createDataFrame(given, ORDERS)})
    assert job.read("totals").collect() == fresh.read("totals").collect()


def test_source_columns_in_another_order_are_refused_before_anything_is_done(
    spark: SparkSession, open_store: OpenStore
) -> None:
    store = open_store()
    job = nosync.Job(totals_of(n=nosync.count()), store, spark=spark, shards=2)
    job.advance(0, {"orders": spark.createDataFrame([(1, "a", 10)], ORDERS)})
    flow = nosync.Dataflow("shop")
    flow.source("orders", "g string, id bigint, v bigint").aggregate("totals", key=["g"], m=nosync.max("v"))
    for upgrade in (job.plan_upgrade, job.upgrade):
        with pytest.raises(nosync.SchemaError, match=r"source orders: .* another order .* keep \(id, g, v\)"):
            upgrade(flow)
    assert [*store.branches()] == ["main"]
    job.advance(1, {"orders": spark.createDataFrame([(2, "a", 10)], ORDERS)})
    assert [tuple(row) for row in job.read("totals").collect()] == [("a", 2)]


def of_orders(columns: str) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    flow.source("orders", columns).where("kept", "v > 0").aggregate("spent", key=["g"], n=nosync.count())
    return flow


MORE = f"{ORDERS}, place string"


def with_one_more_column(spark: SparkSession, store: nosync.Store) -> nosync.Job:
    job = nosync.Job(of_orders(ORDERS), store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, {"orders": spark.createDataFrame(EPOCHS[t], ORDERS)})
    job.upgrade(of_orders(MORE))
    job.advance(2, {"orders": spark.createDataFrame([(*row, "here") for row in EPOCHS[2]], MORE)})
    return job


def test_layers_of_before_a_source_had_a_column_are_computed_again(spark: SparkSession, open_store: OpenStore) -> None:
    """Their rows have null in it, as the plan of the upgrade says."""
    store = open_store()
    job = with_one_more_column(spark, store)
    store.sync()
    before = [sorted(map(str, store.read("spent", t).to_pylist())) for t in range(3)]
    lost = list((store.directory.root / "layers" / "spent").rglob("*.layer"))
    for path in lost:
        path.unlink()
    report = job.recover()
    assert not report.unrecoverable
    assert [sorted(map(str, store.read("spent", t).to_pylist())) for t in range(3)] == before


def test_a_branch_that_its_code_does_not_fit_is_not_left_behind(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store()
    job = with_one_more_column(spark, store)
    branches = set(store.branches())
    for t in (0, 1):
        with pytest.raises(nosync.FlowError, match="branch from the job of the code before it"):
            job.branch("fix", at=t)
    assert set(store.branches()) == branches
    old = nosync.Job(of_orders(ORDERS), store, spark=spark, shards=2, branch="before-upgrade-1")
    branch = old.branch("fix", at=0)
    assert branch.read("spent", 0).count() == 2
    branch.replay()
