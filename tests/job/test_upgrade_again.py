"""Upgrades one after the other, with no epoch between them, and ways back from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
COLUMNS = "k string, n bigint"


def flow_of(query: str = "total >= 10", columns: tuple[str, ...] = (), *, extra: bool = False) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    totals = flow.source("rows", COLUMNS).aggregate("totals", key=["k"], n=nosync.count(), total=nosync.sum("n"))
    found = totals.where("large" if not columns else "of_large", query, persist="disk" if not columns else "none")
    if columns:
        found.select("large", *columns)
    if extra:
        totals.where("small", "total < 3")
    return flow


W1, W2 = "total >= 10", "total >= 3"
DOUBLED, AS_TEXT = ("k", "total * 2 AS twice"), ("k", "n", "CAST(total AS string) AS total")


@pytest.fixture
def store(open_store: OpenStore) -> nosync.Store:
    return open_store(retain=100)


def give(spark: SparkSession, job: nosync.Job, t: int, *rows: tuple[str, int]) -> None:
    job.advance(t, {"rows": spark.createDataFrame([*rows], COLUMNS)})


def job_of(spark: SparkSession, store: nosync.Store, flow: nosync.Dataflow, **more: Any) -> nosync.Job:
    return nosync.Job(flow, store, spark=spark, shards=1, **more)


def large(job: nosync.Job, t: int | None = None) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in job.read("large", t).collect()}


@pytest.mark.parametrize("columns", [DOUBLED, AS_TEXT])
def test_the_second_upgrade_counts(spark: SparkSession, store: nosync.Store, columns: tuple[str, ...]) -> None:
    """A fix is deployed, and before the next batch another one with other columns."""
    job = job_of(spark, store, flow_of(W1))
    give(spark, job, 0, ("a", 5), ("b", 20))
    job.upgrade(flow_of(W2))
    again = job.upgrade(flow_of(W2, columns))
    assert again is not None
    assert again.is_needed
    give(spark, job, 1, ("c", 1))
    assert large(job) == ({("a", 10), ("b", 40)} if columns is DOUBLED else {("a", 1, "5"), ("b", 1, "20")})
    assert large(job, 0) == {("b", 1, 20)}
    assert store.read("large", 1).num_rows == 2
    with pytest.raises(nosync.SchemaError):
        job.changes("large", after=-1, until=1).collect()
    once_more = job.plan_upgrade(flow_of(W2, columns))
    assert once_more is not None
    assert not once_more.is_needed


@pytest.mark.parametrize("partly", [False, True])
def test_an_upgrade_is_taken_back_before_its_first_epoch(
    spark: SparkSession, store: nosync.Store, partly: bool
) -> None:
    """A deploy fails, and the program of before starts again with the same words."""
    before = flow_of(W1)
    give(spark, job_of(spark, store, before), 0, ("a", 5), ("b", 20))
    job_of(spark, store, flow_of(W2, extra=True), upgrade=True)
    back = flow_of(W2) if partly else flow_of(W1)
    job = job_of(spark, store, back, upgrade=True)
    give(spark, job, 1, ("c", 4))
    assert large(job) == ({("a", 1, 5), ("b", 1, 20), ("c", 1, 4)} if partly else {("b", 1, 20)})
    assert "small" not in job.flow.stages


def test_the_line_before_is_gone_back_to(spark: SparkSession, store: nosync.Store) -> None:
    job = job_of(spark, store, flow_of(W1))
    for t in range(3):
        give(spark, job, t, ("a", t))
    kept = job.rewind(1)
    assert kept is not None
    job.promote(job_of(spark, store, flow_of(W1), branch=kept))
    assert job.last_sealed() == 2
    plan = job.upgrade(flow_of(W2))
    assert plan is not None
    give(spark, job, 3, ("a", 9))
    before = job_of(spark, store, flow_of(W1), branch=str(plan.keep_as))
    with pytest.raises(nosync.FlowError, match=r"go back: rewind\(2\)"):
        job.promote(before)
    store.rewind(2)
    back = job_of(spark, store, flow_of(W1))
    give(spark, back, 3, ("a", 9))
    assert large(back) == {("a", 4, 12)}


def test_a_name_that_the_line_before_cannot_have(spark: SparkSession, store: nosync.Store) -> None:
    job = job_of(spark, store, flow_of(W1))
    give(spark, job, 0, ("a", 5))
    job.branch("taken", at=0)
    for name, said in [
        ("Before Fix", "not a valid name"),
        ("taken", "exists"),
        ("upgrade-in-progress", "has this name"),
    ]:
        with pytest.raises(nosync.InvalidInputError, match=said):
            job.plan_upgrade(flow_of(W2), keep_as=name)
    with pytest.raises(nosync.InvalidInputError, match="has this name"):
        job.branch("upgrade-in-progress", at=0)
    give(spark, job, 1, ("a", 6))
    for _ in range(2):  # as a program does that asks at each start
        job.upgrade(flow_of(W2), keep_as="before-v2")
        give(spark, job, int(job.last_sealed() or 0) + 1, ("a", 1))


def test_sides_are_compared_by_the_columns_of_then(spark: SparkSession, store: nosync.Store) -> None:
    job = job_of(spark, store, flow_of(W1))
    give(spark, job, 0, ("a", 5), ("b", 20))
    plan = job.upgrade(flow_of(W1, DOUBLED))
    assert plan is not None
    give(spark, job, 1, ("a", 50))
    before = job_of(spark, store, flow_of(W1), branch=str(plan.keep_as))
    assert nosync.diff(job, before, "large", 0).isEmpty()
    assert nosync.diff_summary(job, before, "large", 0).same
    with pytest.raises(nosync.NotAvailableError, match="began anew at epoch 1"):
        job.explain("large", {"k": "b"}, 0)


def test_a_branch_that_gets_other_columns_before_it_is_replayed(spark: SparkSession, store: nosync.Store) -> None:
    job = job_of(spark, store, flow_of(W1))
    for t in range(2):
        give(spark, job, t, ("a", 5), ("b", 20))
    job.branch("x", at=0, replace={"large": W2})
    with pytest.raises(nosync.InvalidInputError, match="exists already"):
        job.branch("x", at=0, drop=["large"], add=lambda flow: flow["totals"].select("large", *DOUBLED))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda job: job.upgrade(flow_of), r"expected a nosync.Dataflow: give what it returns, upgrade\(flow_of\(\)\)"),
        (lambda job: job.plan_upgrade(None), "expected a nosync.Dataflow"),
        (lambda job: job.replay("0"), r"replay\('0'\): expected the number of an epoch"),
        (lambda job: job.plan_replay(-1), r"replay\(-1\): expected the number"),
        (lambda job: job.recover(outputs=5), r"recover\(outputs=5\): expected names of stages"),
        (lambda job: job.explain("large", 5), "key is 5, expected its columns and values"),
    ],
)
def test_what_is_of_another_type_is_refused(spark: SparkSession, store: nosync.Store, call: Any, said: str) -> None:
    job = job_of(spark, store, flow_of(W1))
    give(spark, job, 0, ("a", 5))
    with pytest.raises(nosync.InvalidInputError, match=said):
        call(job)
