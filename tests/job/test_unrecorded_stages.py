"""A stage of expressions that is not recorded is read as it would be if it were."""

from __future__ import annotations

import datetime
from collections import Counter

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import nosync
from tests.conftest import OpenStore

pytestmark = pytest.mark.spark
SCHEMA = "k string, v bigint, at timestamp"


def build(flow: nosync.Dataflow, spark: SparkSession, persist: str, suffix: str) -> None:
    """Chains over a source and over rows that change; under two names, once recorded and once not."""
    table = spark.createDataFrame([("a", "Rome"), ("b", "Oslo")], "k string, city string")
    for below, column in (("rows", "v"), ("sums", "total")):
        some = flow[below].where(f"{below}_some_{suffix}", f"{column} > 1", persist=persist)
        made = some.select(
            f"{below}_made_{suffix}", "k", f"{column} * 2 AS doubled", "hour(at) AS hour", persist=persist
        )
        named = made.join_static(f"{below}_named_{suffix}", table, on=["k"], how="left", persist=persist)
        named.select(f"{below}_out_{suffix}", "*", F.upper("city").alias("big"), persist=persist).aggregate(
            f"{below}_n_{suffix}", key=["k"], n=nosync.count()
        )


def contents(frame: DataFrame) -> Counter[str]:
    columns = sorted(frame.columns)
    return Counter(str([row[name] for name in columns]) for row in frame.collect())


@pytest.mark.long
def test_state_and_changes_are_those_of_a_recorded_stage(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", SCHEMA)
    rows.aggregate("sums", key=["k"], total=nosync.sum("v"), at=nosync.max("at"))
    for persist, suffix in (("disk", "kept"), ("none", "not")):
        build(flow, spark, persist, suffix)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    noon = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    for t, given in enumerate([[("a", 1), ("b", 5)], [("a", 3), ("c", 9)], [("b", -5)], [], [("a", -1), ("b", 2)]]):
        job.advance(
            t, {"rows": spark.createDataFrame([(k, v, noon + datetime.timedelta(hours=t)) for k, v in given], SCHEMA)}
        )
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        for below in ("rows", "sums"):
            for part in ("some", "made", "named", "out"):
                kept, derived = f"{below}_{part}_kept", f"{below}_{part}_not"
                assert not job.stage(derived).recorded
                assert job.read(derived).columns == job.read(kept).columns
                for t in (0, 2, 4):
                    assert contents(job.read(derived, as_of=t)) == contents(job.read(kept, as_of=t)), (derived, t)
                for after, until in ((-1, 4), (1, 3)):
                    changes = contents(job.changes(derived, after, until))
                    assert changes == contents(job.changes(kept, after, until)), (derived, after, until)
        assert {row.hour for row in job.read("rows_made_not").collect()} == {12, 13, 16}, "in UTC, as epochs run"
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_functions_of_users_in_expressions(spark: SparkSession, open_store: OpenStore) -> None:
    twice = F.udf(lambda v: None if v is None else v * 2, "bigint")
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, v bigint").select("out", "k", twice("v").alias("w")).aggregate(
        "sums", key=["k"], total=nosync.sum("w")
    )
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"rows": spark.createDataFrame([("a", 4)], "k string, v bigint")})
    assert [tuple(row) for row in job.read("out").collect()] == [("a", 8)]


def test_what_stays_refused(spark: SparkSession, open_store: OpenStore) -> None:
    def as_they_are(rows: pa.Table) -> pa.Table:
        return rows

    flow = nosync.Dataflow("f")
    edges = flow.source("edges", "node string, neighbour string")
    mapped = edges.map("mapped", as_they_are, persist="none")
    mapped.select("chosen", "node").aggregate("n", key=["node"], n=nosync.count())
    roots = flow.source("roots", "node string")
    roots.iterate("reached", lambda r: r.join("hops", edges, on=["node"]).select("next", "neighbour AS node"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    given = {"edges": spark.createDataFrame([("a", "b")], "node string, neighbour string")}
    job.advance(0, {**given, "roots": spark.createDataFrame([("a",)], "node string")})
    for stage, message in (
        ("mapped", r"stage mapped is not recorded \(persist='none'\), and a map is not an expression"),
        ("chosen", "stage chosen is computed from mapped, which is not recorded .* and a map is not an expression"),
        ("next", "stage next is computed in the rounds of the loop reached, which are not kept: read reached"),
        ("hops", "stage hops is computed in the rounds of the loop reached"),
    ):
        with pytest.raises(nosync.NotAvailableError, match=message):
            job.read(stage)
        with pytest.raises(nosync.NotAvailableError, match=message):
            job.changes(stage, -1, 0)
    assert {row.node for row in job.read("reached").collect()} == {"a", "b"}


@pytest.mark.long
def test_a_select_gets_other_code_on_a_branch_where_it_is_not_recorded_any_more(
    spark: SparkSession, open_store: OpenStore
) -> None:
    """It was recorded as the end of the flow; on the branch something follows it."""
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, n bigint").select("clean", "k", "n")
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    for t in range(2):
        job.advance(t, {"rows": spark.createDataFrame([("a", t)], "k string, n bigint")})
    branch = job.branch(
        "more", at=0, replace={"clean": ("k", "n + 10 AS n")},
        add=lambda copy: copy["clean"].aggregate("totals", key=["k"], total=nosync.sum("n")),
    )  # fmt: skip
    branch.replay()
    assert [tuple(row) for row in branch.read("totals").collect()] == [("a", 11)]
    assert [tuple(row) for row in job.read("clean").orderBy("n").collect()] == [("a", 0), ("a", 1)]
