"""What led to a value, where other code computed some of it: rows that led to it are named, and it is said to be inexact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def above(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["n"], 0))


def below(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.less(rows["n"], 0))


def flow_of(kind: str, persist: str, *, is_new: bool) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, n bigint")
    made = (
        rows.where("made", "n < 0" if is_new else "n > 0", persist=persist)
        if kind == "where"
        else rows.map("made", below if is_new else above, persist=persist)
    )
    made.aggregate("totals", key=["k"], total=nosync.sum("n"))
    return flow


@pytest.mark.parametrize("persist", ["none", "disk"])
@pytest.mark.parametrize("kind", ["where", "map"])
def test_rows_of_before_an_upgrade_are_among_those_that_are_named(
    spark: SparkSession, open_store: OpenStore, kind: str, persist: str
) -> None:
    def give(job: nosync.Job, t: int, *rows: tuple[str, int]) -> None:
        job.advance(t, {"rows": spark.createDataFrame([*rows], "k string, n bigint")})

    def named(t: int) -> tuple[set[Any], bool]:
        found = job.explain("totals", {"k": "a"}, t)
        return {(row["n"], row["_epoch"]) for row in found.inputs["rows"].to_pylist()}, found.exact

    store = open_store()
    job = nosync.Job(flow_of(kind, persist, is_new=False), store, spark=spark, shards=1)
    give(job, 0, ("a", 4), ("a", -7))
    assert named(0) == ({(4, 0)}, True)
    job.upgrade(flow_of(kind, persist, is_new=True))
    give(job, 1, ("a", 5), ("a", -1))
    rows, exact = named(1)
    assert not exact
    assert {(4, 0), (-1, 1)} <= rows
    assert (5, 1) not in rows, "of its own epochs the code is known"
    rows, exact = named(0)
    assert not exact
    assert (4, 0) in rows


def test_an_aggregate_that_an_upgrade_gave_a_column_is_explained(spark: SparkSession, open_store: OpenStore) -> None:
    """Of epochs before and after; those before have null in it."""

    def sums(*, more: bool) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        asked = {"n": nosync.count()} | ({"most": nosync.max("n")} if more else {})
        flow.source("rows", "k string, n bigint").aggregate("totals", key=["k"], **asked)
        return flow

    store = open_store()
    job = nosync.Job(sums(more=False), store, spark=spark, shards=2)
    job.advance(0, {"rows": spark.createDataFrame([("a", 4), ("b", 1)], "k string, n bigint")})
    job.upgrade(sums(more=True))
    job.advance(1, {"rows": spark.createDataFrame([("a", 5)], "k string, n bigint")})
    for t, wanted in ((0, {4}), (1, {4, 5})):
        found = job.explain("totals", {"k": "a"}, t)
        assert wanted <= {row["n"] for row in found.inputs["rows"].to_pylist() if row["k"] == "a"}
