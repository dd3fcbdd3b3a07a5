"""Keys and aggregates over all rows against Spark's own batch query over the same rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.sql import functions as F

import nosync
from nosync.lsm.columnar.hashing import hash64
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "d double, f float, i interval day to second, a array<double>, s struct<x: double, w: array<string>>, v bigint"
DAY = "make_dt_interval(1)"
ROWS = [
    f"""(double('NaN'), float('NaN'), {DAY}, array(double('NaN'), 0D), named_struct('x', -0D, 'w', array('p')), 1L),
        (double('NaN'), float('0'), make_dt_interval(0, 24), array(double('NaN'), -0D), named_struct('x', 0D, 'w', array('p')),
         2L),
        (0D, float('-0'), make_dt_interval(-1), array(), named_struct('x', null, 'w', array('p', null)), 3L),
        (-0D, null, null, array(null), null, 4L)""",
    f"""(double('NaN'), float('NaN'), {DAY}, array(double('NaN'), 0D), named_struct('x', 0D, 'w', array('p')), 1L),
        (null, null, make_dt_interval(0), null, named_struct('x', double('NaN'), 'w', array()), 10L),
        (1D, float('1'), make_dt_interval(-1), array(1D, 2D), named_struct('x', null, 'w', array(null, 'p')), 20L)""",
]
KEYS = ("d", "f", "i", "a", "s")


def given(spark: SparkSession, t: int) -> DataFrame:
    columns = ", ".join([*KEYS, "v"])
    return spark.sql(f"SELECT * FROM VALUES {ROWS[t]} AS t({columns})").to(spark.createDataFrame([], SCHEMA).schema)


def plainly(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return tuple(map(plainly, value)) if isinstance(value, list | tuple) else value


def counted(rows: DataFrame) -> list[Any]:
    return sorted((tuple(map(plainly, row)) for row in rows.collect()), key=repr)


@pytest.mark.long
def test_every_key_is_grouped_as_spark_groups_it(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", SCHEMA)
    for key in KEYS:
        one = rows.aggregate(f"by_{key}", key=[key], n=nosync.count(), total=nosync.sum("v"))
        rows.select(f"only_{key}", key).dedupe(f"once_{key}")
        rows.select(f"left_{key}", key, "v").join(f"joined_{key}", one, on=[key])
    rows.dedupe("whole")
    rows.aggregate("of_all", key=[], n=nosync.count(), total=nosync.sum("v"), mean=nosync.mean("v"))
    rows.where("none", "v > 1000").aggregate("of_none", key=[], n=nosync.count(), total=nosync.sum("v"))
    job = nosync.Job(flow, open_store(), spark=spark, shards=3)
    for t in range(len(ROWS)):
        job.advance(t, {"rows": given(spark, t)})
    everything = given(spark, 0).union(given(spark, 1))
    for key in KEYS:
        by_key = everything.groupBy(key).agg(F.count("*").alias("n"), F.sum("v").alias("total"))
        assert counted(job.read(f"by_{key}")) == counted(by_key)
        assert counted(job.read(f"once_{key}")) == counted(everything.select(key).distinct())
        joined = everything.select(key, "v").join(by_key, on=key)
        assert counted(job.read(f"joined_{key}")) == counted(joined)
    assert counted(job.read("whole")) == counted(everything.distinct())
    assert counted(job.read("of_all")) == counted(everything.agg(F.count("*"), F.sum("v"), F.avg("v")))
    assert counted(job.read("of_none")) == [(0, None)]


def test_nested_values_are_hashed_as_spark_hashes_them(spark: SparkSession) -> None:
    for t in range(len(ROWS)):
        rows = given(spark, t)
        table = rows.toArrow()
        hashes = rows.selectExpr(f"xxhash64({', '.join(KEYS)})").toArrow().column(0).to_numpy()
        columns = [table.column(name).combine_chunks() for name in KEYS]
        assert np.array_equal(hash64(columns).view(np.int64), hashes)


def test_a_map_is_refused_with_the_cure(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, v bigint").select("maps", "map(k, v) AS m")
    rows.aggregate("n", key=["m"], n=nosync.count())
    with pytest.raises(nosync.SchemaError, match=r"stage n: .*'m' has type map.*array_sort\(map_entries\(m\)\)"):
        nosync.Job(flow, open_store(), spark=spark, shards=2)
