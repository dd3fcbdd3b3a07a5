"""Each clause that a view can have, kept up to date under insertions, changes and deletions; and what is refused."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

import nosync
from nosync.spark.session import ZONE, active_in_jvm, conf_set
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, flow_over_inputs, named, parts, run
from tests.views.clauses import CLAUSES, REFUSED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROUNDS = int(os.environ.get("NOSYNC_VIEWS", "1"))
VIEWS = named(CLAUSES)
PARTS = parts(VIEWS, 22)
SOME = [
    "frames_by_decimals", "distinct_pairs_of_groups", "lambdas_of_two", "with_inside", "pipes", "two_lists",
    "lag_of_fields", "subqueries_in_sums", "order_by_fields", "other_schemas", "one_name_for_two",
    "newest_by_subqueries", "lists_of_nothing", "maps_in_lambdas", "decimals_in_functions", "decimals_in_sums",
    "names_in_quotes", "spans_of_time", "any_at_all", "not_or_in", "in_is_false", "not_or_in_of_a_side",
    "not_or_in_inside_of_exists", "limit_of_one_row", "limit_of_a_limit", "limit_of_what_is_computed",
    "limit_by_a_subquery", "exists_of_an_aggregate", "sums_with_and_without_distinct_inside",
    "median_of_what_lambdas_make",
]  # fmt: skip
"""What `make test` has time for; `make views` has all."""


@pytest.mark.timeout(400)
def test_some_views_are_what_spark_gives(spark: SparkSession, open_store: OpenStore) -> None:
    run(spark, open_store(), {name: VIEWS[name] for name in SOME}, Inputs(0), 2, [2])


@pytest.mark.long("make views")
@pytest.mark.parametrize("part", range(len(PARTS)))
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_all_views_are_what_spark_gives(spark: SparkSession, open_store: OpenStore, seed: int, part: int) -> None:
    shards = [1, 4, 4, 2] if seed % 2 else [2, 2, 3]
    run(spark, open_store(), {name: VIEWS[name] for name in PARTS[part]}, Inputs(seed), 4, shards)


def test_instants_in_a_query_are_of_the_zone_of_the_session(spark: SparkSession, open_store: OpenStore) -> None:
    queries = {
        "since": "SELECT id, at FROM orders WHERE at >= TIMESTAMP '2026-01-01 00:00:00'",
        "beside_lambdas": """SELECT id, CASE WHEN at < TIMESTAMP '2026-01-01 00:00:00' THEN transform(array(id), x -> x + 1)
                             END AS l FROM orders""",
        "pivoted": """SELECT * FROM (SELECT item, id, at FROM orders)
                      PIVOT (count(id) FOR at IN (TIMESTAMP '2026-01-01 00:00:00' AS midnight))""",
        "days": "SELECT date(at) AS day, count(*) AS n FROM orders WHERE at > TIMESTAMP '2025-12-31 23:30:00' GROUP BY 1",
        "of_days": """SELECT day, hour(at) AS h FROM days JOIN orders ON date(at) = day
                      WHERE (SELECT max(hour(at)) FROM orders) > 5""",
        "shown": """SELECT id, transform(array(at), t -> date_format(t, 'HH') || CAST(t AS string)) AS l,
                    date_format(at, 'HH') || CAST(at AS string) AS h FROM orders""",
    }
    rows = [(i, "tea", datetime.datetime(2026, 1, 1, hour, tzinfo=datetime.UTC)) for i, hour in enumerate((4, 5, 6))]
    with conf_set(spark, {ZONE: "America/New_York"}):  # whose year begins at five in UTC
        flow = nosync.Dataflow("f")
        flow.source("orders", "id bigint, item string, at timestamp")
        for name, query in queries.items():
            flow.sql(name, query, spark=spark)
        job = nosync.Job(flow, open_store(), spark=spark, shards=2)
        job.advance(0, {"orders": spark.createDataFrame(rows, "id bigint, item string, at timestamp")})
        for name in queries:  # but for constants, expressions of epochs are in UTC
            assert job.verify_view(name).is_equal, str(job.verify_view(name))
        assert sorted(row.id for row in job.read("since").collect()) == [1, 2]
        shown = job.read("shown").collect()
        assert all(row.l == [row.h] for row in shown)
        assert sorted(row.h[:2] for row in shown) == ["04", "05", "06"]
        assert [row.midnight for row in job.read("pivoted").collect()] == [1]


def test_the_clock_is_found_in_dataframes(spark: SparkSession) -> None:
    flow = flow_over_inputs()
    views: dict[str, Callable[[Any], DataFrame]] = {
        "where": lambda t: t["orders"].where("at < DATE 'today'"),
        "expr": lambda t: t["orders"].select("id", F.expr("TIMESTAMP 'now'").alias("c")),
        "sql": lambda t: t["orders"].sparkSession.sql("SELECT id FROM orders WHERE at < DATE 'tomorrow'"),
    }
    for name, query in views.items():
        with pytest.raises(nosync.FlowError, match=f"view {name}: .*line 1: it depends on when it is asked"):
            flow.view(name, query, spark=spark)
    flow.view("fixed", lambda t: t["orders"].where("at < DATE '2020-01-01' OR item = 'today'"), spark=spark)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT date_trunc('month', day) AS m, known, count(*) AS n FROM o GROUP BY CUBE (date_trunc('month', day), known)",
        "SELECT to_date(s, 'yyyy') AS m, known, count(*) AS n FROM o GROUP BY ROLLUP (to_date(s, 'yyyy'), known)",
        "SELECT date_trunc('month', day) AS m, known, count(*) AS n FROM o "
        "GROUP BY date_trunc('month', day), day, known GROUPING SETS ((date_trunc('month', day), known), (day))",
    ],
)
def test_a_date_in_grouping_sets_is_no_constant_of_the_clock(
    spark: SparkSession, open_store: OpenStore, query: str
) -> None:
    """Of the null that stands for it Spark says that it was read from the whole clause."""
    flow = nosync.Dataflow("f")
    flow.source("o", "day date, known string, s string")
    flow.sql("v", query, spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    rows = [(datetime.date(2026, 1, d), known, "2026") for d in (1, 2) for known in ("a", None)]
    job.advance(0, {"o": spark.createDataFrame(rows, "day date, known string, s string")})
    assert job.verify_view("v").is_equal, str(job.verify_view("v"))


def test_a_column_with_a_backtick_is_verified(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("o", "q bigint")
    flow.sql("v", "SELECT q AS `x``y` FROM o", spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    job.advance(0, {"o": spark.range(3).toDF("q")})
    assert job.verify_view("v").is_equal


def test_a_branch_with_another_schema_of_json_computes_it(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", "id bigint, s string", key=["id"])
    flow.sql("v", "SELECT id, CAST(from_json(s, 'a int').a AS string) AS v FROM t", spark=spark)
    job = nosync.Job(flow, open_store(retain=100), spark=spark, shards=1)
    for t, value in enumerate(("7", "x")):
        job.advance(t, {"t": spark.createDataFrame([(t, f'{{"a": "{value}"}}')], "id bigint, s string")})
    branch = job.branch("texts", views={"v": "SELECT id, CAST(from_json(s, 'a string').a AS string) AS v FROM t"})
    branch.replay()
    assert [row.v for row in job.read("v").orderBy("id").collect()] == [None, None]
    assert [row.v for row in branch.read("v").orderBy("id").collect()] == ["7", "x"]


def test_lists_with_their_nulls_are_refused(spark: SparkSession) -> None:
    try:
        spark.sql("SELECT array_agg(1) RESPECT NULLS")
    except AnalysisException:
        pytest.skip("this Spark has no RESPECT NULLS for lists")
    for function in ("array_agg", "collect_set"):
        with pytest.raises(nosync.FlowError, match="line 1: lists are without nulls"):
            flow_over_inputs().sql("mine", f"SELECT {function}(price) RESPECT NULLS AS l FROM orders", spark=spark)


def test_frames_of_days_are_refused_in_a_zone_where_clocks_change(spark: SparkSession) -> None:
    query = (
        "SELECT count(*) OVER (ORDER BY at RANGE BETWEEN INTERVAL 7 DAYS PRECEDING AND CURRENT ROW) AS n FROM orders"
    )
    flow = flow_over_inputs()
    with (
        active_in_jvm(spark.newSession()),  # whose zone is UTC
        conf_set(spark, {ZONE: "Europe/Rome"}),
        pytest.raises(nosync.FlowError, match="as in Europe/Rome, a day is not"),
    ):
        flow.sql("mine", query, spark=spark)
    flow.sql("mine", query, spark=spark)


@pytest.mark.parametrize("clause", REFUSED)
def test_what_cannot_be_kept_up_to_date_is_refused_where_it_is_declared(spark: SparkSession, clause: str) -> None:
    query, said = REFUSED[clause]
    flow = flow_over_inputs()
    before = [stage.name for stage in flow.stages]
    with pytest.raises(nosync.NosyncError, match=f"(?s)view mine: .*{said}"):
        flow.sql("mine", query, spark=spark)
    assert [stage.name for stage in flow.stages] == before, "nothing is half declared"
    assert not flow.views


@pytest.mark.parametrize("clause", ["insertions", "insertions of with", "commands", "scripts", "texts that are run"])
def test_what_is_no_query_does_nothing(spark: SparkSession, clause: str, tmp_path: Path) -> None:
    # At a place of its own: other processes that run tests have tables of this name.
    spark.sql(f"CREATE TABLE kept USING parquet LOCATION '{tmp_path}/kept' AS SELECT 1 AS id")
    try:
        with pytest.raises(nosync.FlowError, match="a view is a query"):
            flow_over_inputs().sql("mine", REFUSED[clause][0], spark=spark)
        assert [row.id for row in spark.table("kept").collect()] == [1]
    finally:
        spark.sql("DROP TABLE IF EXISTS kept")
