"""Rows and tables mean what they meant to whoever gave them, and are left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.lsm.errors import FlowError, SchemaError
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

NOON_IN_NEW_YORK_S = 1704128400  # 2024-01-01 17:00 UTC


@pytest.fixture
def in_new_york(spark: SparkSession) -> Iterator[None]:
    from nosync.spark.session import conf_set

    with conf_set(spark, {"spark.sql.session.timeZone": "America/New_York"}):
        yield


@pytest.fixture
def at_noon(spark: SparkSession, in_new_york: None, tmp_path: Path) -> DataFrame:
    (tmp_path / "noon").mkdir()
    (tmp_path / "noon" / "0.csv").write_text("1,2024-01-01 12:00:00\n")
    return spark.read.schema("k int, at timestamp").csv(str(tmp_path / "noon"))


def test_times_in_the_text_of_a_table_to_join_with_are_of_the_sessions_zone(
    spark: SparkSession, open_store: OpenStore, at_noon: DataFrame
) -> None:
    from nosync.spark.session import conf_set

    def job() -> nosync.Job:
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", "k int").join_static("joined", at_noon, on=["k"])
        rows.aggregate("out", key=["k"], at=nosync.max("at"))
        return nosync.Job(flow, store, spark=spark, shards=2)

    store = open_store()
    first = job()
    first.advance(0, {"rows": spark.createDataFrame([(1,)], "k int")})
    with conf_set(spark, {"spark.sql.session.timeZone": "UTC"}):  # the job's table is what it was
        first.advance(1, {"rows": spark.createDataFrame([(1,)], "k int")})
        with pytest.raises(FlowError, match="changed"):
            job()  # which would read other times
    job()
    assert [row.s for row in first.read("out").selectExpr("unix_timestamp(at) s").collect()] == [NOON_IN_NEW_YORK_S]


def test_subqueries_and_the_zones_name_are_of_the_sessions_zone(
    spark: SparkSession, open_store: OpenStore, at_noon: DataFrame
) -> None:
    at_noon.createOrReplaceTempView("noon")
    rows = spark.sql(
        "SELECT CAST(id AS int) k, (SELECT unix_timestamp(max(at)) FROM noon) s, current_timezone() z FROM range(1)"
    )
    flow = nosync.Dataflow("f")
    flow.source("rows", "k int, s bigint, z string").dedupe("out", key=["k"])
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": rows})
    assert job.read("out").collect() == rows.collect() == [(0, NOON_IN_NEW_YORK_S, "America/New_York")]
    spark.catalog.dropTempView("noon")


def test_rows_that_were_cached_stay_so(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k int, v int").where("some", "v > 0").select("more", "k", "v * 2 AS w")
    rows.where("few", "w < 1000").aggregate("out", key=["k"], total=nosync.sum("w"))
    given = spark.range(100).selectExpr("CAST(id % 3 AS int) k", "CAST(id AS int) v").persist()
    try:
        job = nosync.Job(flow, open_store(), spark=spark, shards=2)
        job.advance(0, {"rows": given})
        assert given.storageLevel.useMemory
        assert [table.name for table in spark.catalog.listTables()] == []
    finally:
        given.unpersist()
    assert sum(row.total for row in job.read("out").collect()) == sum(2 * v for v in range(100))


@pytest.mark.parametrize(
    "expression", ["v * 2 AS w -- doubled", "v * 2 /* doubled */ AS w", "v * 2 AS w /* '*/", "v * 2 AS `w` -- `x`"]
)
def test_expressions_with_comments(spark: SparkSession, open_store: OpenStore, expression: str) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k int, v int").where("some", "v > 0").select("more", "k", expression, "'-- /*' AS text")
    rows.aggregate("out", key=["k"], total=nosync.sum("w"), text=nosync.max("text"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": spark.createDataFrame([(1, 1), (1, 2), (2, -5)], "k int, v int")})
    assert [tuple(row) for row in job.read("out").collect()] == [(1, 6, "-- /*")]


@pytest.mark.parametrize("name", ["_TAG", "_hash64", "_Report", "_EPOCH", "_Change_Type"])
def test_names_that_spark_takes_for_ours_are_refused(spark: SparkSession, open_store: OpenStore, name: str) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", f"k string, `{name}` bigint").aggregate("out", key=["k"], n=nosync.count())
    with pytest.raises(SchemaError, match=name):
        nosync.Job(flow, open_store(), spark=spark, shards=2)
