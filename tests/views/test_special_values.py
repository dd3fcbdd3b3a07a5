"""Views over doubles that are no numbers, infinite or -0.0, and views whose queries Spark computes before there are rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

import nosync
from nosync.spark.session import conf_set
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.views.both_ways import flow_over_inputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

NAN, INFINITY = float("nan"), float("inf")
SCHEMA = "id bigint, g bigint, x double, f float"
GROUPS = (
    [NAN], [-0.0], [INFINITY], [-INFINITY, 1.0], [-INFINITY, -INFINITY, 2.0], [NAN, NAN], [1.0, INFINITY], [NAN, 1.0],
    [5.0, None], [-1e30, *map(float, range(10))], [-INFINITY, INFINITY], [-0.0, -0.0], [0.125, 0.75, 0.25], [None],
)  # fmt: skip
QUERIES = {
    "distinct_rows": "SELECT CAST(x AS string) AS x, CAST(f AS string) AS f FROM (SELECT DISTINCT x, f FROM t)",
    "groups": "SELECT CAST(x AS string) AS x, n FROM (SELECT x, count(*) AS n FROM t GROUP BY x)",
    "floats": "SELECT CAST(f AS string) AS f, n FROM (SELECT f, count(*) AS n FROM t GROUP BY f)",
    "of_expressions": "SELECT CAST(k AS string) AS k, n FROM (SELECT -x AS k, count(*) AS n FROM t GROUP BY -x)",
    "cube": "SELECT CAST(x AS string) AS x, g, n FROM (SELECT x, g, count(*) AS n FROM t GROUP BY CUBE (x, g))",
    "both": "SELECT CAST(x AS string) AS x FROM (SELECT x FROM t UNION SELECT x FROM t WHERE g > 5)",
    "sets": "SELECT g, CAST(sort_array(collect_set(x)) AS string) AS s FROM t GROUP BY g",
    "sums": "SELECT g, CAST(sum(x) AS string) AS s, CAST(avg(x) AS string) AS a, sum(DISTINCT x) AS d FROM t GROUP BY g",
    "spread": "SELECT g, CAST(var_pop(x) AS string) AS v, CAST(stddev_pop(x) AS string) AS s, var_samp(x) AS w FROM t GROUP BY g",
    "extremes": "SELECT g, CAST(min(x) AS string) AS least, CAST(max(x) AS string) AS most FROM t GROUP BY g",
    "percentiles": """SELECT g, CAST(percentile(x, 0.25) AS string) AS low, CAST(percentile(x / 10, 0.3) AS string) AS mid,
                      CAST(median(x) AS string) AS m FROM t GROUP BY g""",
    "percentiles_from_above": """SELECT g, CAST(percentile_cont(0.25) WITHIN GROUP (ORDER BY x DESC) AS string) AS a,
                                 CAST(percentile_cont(0.9) WITHIN GROUP (ORDER BY x DESC) AS string) AS b FROM t GROUP BY g""",
    "running": "SELECT id, CAST(sum(x) OVER (PARTITION BY g ORDER BY id) AS string) AS s FROM t",
    "ranks": "SELECT id, rank() OVER (ORDER BY x) AS r FROM t",
    "joined": "SELECT a.id, b.g FROM t a JOIN t b ON a.x = b.x",
    "one_row": "SELECT 1 AS one FROM t HAVING true",
    "one_row_of_none": "SELECT 1 AS one FROM t WHERE id < -1 HAVING true",
    "one_value": "SELECT id, x - (SELECT x FROM t WHERE id = 1) AS d FROM t WHERE g > 7",
    "no_value": "SELECT id, (SELECT x FROM t WHERE id < 0) AS d FROM t WHERE g > 7",
    "limited": "SELECT id, (SELECT id FROM t WHERE g = 4 ORDER BY id LIMIT 1) AS d FROM t WHERE g > 7",
}


@pytest.mark.long("make views")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_driver", [False, True])
def test_doubles_of_all_kinds(spark: SparkSession, open_store: OpenStore, by_driver: bool) -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", SCHEMA, key=["id"])
    for name, query in QUERIES.items():
        flow.sql(name, query, spark=spark)
    values = [(g, x) for g, group in enumerate(GROUPS) for x in group]
    rows = [(i, g, x, x) for i, (g, x) in enumerate(values)]
    gone = [(100, 0, 1.0, 1.0), (101, 1, NAN, NAN), (102, 2, INFINITY, INFINITY), (103, 11, 7.0, 7.0)]
    half = len(rows) // 2
    with driver_runs(spark, functions=True) if by_driver else contextlib.nullcontext():
        job = nosync.Job(flow, open_store(), spark=spark, shards=2)
        job.advance(0, {"t": spark.createDataFrame([*rows[:half], *gone], SCHEMA)})
        changes = [*((*row, "insert") for row in rows[half:]), *((*row, "delete") for row in gone)]
        job.advance(1, {"t": spark.createDataFrame(changes, f"{SCHEMA}, _change_type string")})
    session = spark.newSession()
    session.createDataFrame(rows, SCHEMA).createOrReplaceTempView("t")
    for name, query in QUERIES.items():
        expected = sorted(map(str, session.sql(query).collect()))
        assert sorted(map(str, job.read(name).collect())) == expected, name


def test_a_scalar_subquery_of_several_rows_fails_as_in_spark(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", SCHEMA, key=["id"])
    flow.sql("mine", "SELECT id, (SELECT x FROM t WHERE g = 1) AS d FROM t", spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"t": spark.createDataFrame([(1, 1, 2.0, 2.0), (2, 2, 3.0, 3.0)], SCHEMA)})
    assert sorted((row.id, row.d) for row in job.read("mine").collect()) == [(1, 2.0), (2, 2.0)]
    more = spark.createDataFrame([(3, 1, 4.0, 4.0, "insert")], f"{SCHEMA}, _change_type string")
    with pytest.raises(nosync.NosyncError, match="a scalar subquery has 2 rows, expected at most one"):
        job.advance(1, {"t": more})
    job.rewind(0)
    other = [(3, 1, 4.0, 4.0, "insert"), (1, 1, 2.0, 2.0, "delete")]
    job.advance(1, {"t": spark.createDataFrame(other, f"{SCHEMA}, _change_type string")})
    assert sorted((row.id, row.d) for row in job.read("mine").collect()) == [(2, 4.0), (3, 4.0)]


def test_columns_whose_names_differ_in_their_letters_case(spark: SparkSession, open_store: OpenStore) -> None:
    session = spark.newSession()
    with conf_set(session, {"spark.sql.caseSensitive": "true"}):
        flow = nosync.Dataflow("f")
        flow.source("t", "a bigint, A bigint")
        try:
            flow.sql("mine", "SELECT a + 1 AS small, A + 1 AS large FROM t", spark=session)
        except nosync.NosyncError as error:
            assert "A" in str(error)  # noqa: PT017 - either is well
            return
        job = nosync.Job(flow, open_store(), spark=session, shards=1)
        job.advance(0, {"t": session.createDataFrame([(1, 10)], "a bigint, A bigint")})
        assert [(row.small, row.large) for row in job.read("mine").collect()] == [(2, 11)]


ACTIONS: dict[str, Callable[[dict[str, DataFrame]], Any]] = {
    "pivot": lambda t: t["orders"].groupBy("person").pivot("item").sum("price"),
    "collect": lambda t: t["orders"].where(F.col("price") > t["orders"].agg(F.max("price")).collect()[0][0]),
    "count": lambda t: t["orders"].limit(t["orders"].count()),
    "is_empty": lambda t: t["orders"] if t["orders"].isEmpty() else t["people"],
    "first": lambda t: t["orders"].where(F.col("id") == t["people"].first().pid),  # type: ignore[union-attr]
    "to_arrow": lambda t: t["orders"].limit(t["people"].toArrow().num_rows),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_function_that_asks_for_rows_is_refused(spark: SparkSession, action: str) -> None:
    flow = flow_over_inputs()
    with pytest.raises(nosync.FlowError, match="view mine: a view says what is computed, before there are rows"):
        flow.view("mine", ACTIONS[action], spark=spark)
    assert not flow.views


def test_a_pivot_of_values_that_are_said(spark: SparkSession) -> None:
    flow = flow_over_inputs()
    flow.view("mine", lambda t: t["orders"].groupBy("person").pivot("item", ["tea", "ink"]).sum("price"), spark=spark)
    assert flow.views["mine"].columns == (("person", "BIGINT"), ("tea", "DOUBLE"), ("ink", "DOUBLE"))
