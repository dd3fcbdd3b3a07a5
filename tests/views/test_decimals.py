"""Views over decimals of many digits: values are rounded where Spark rounds them, and as often."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
COLUMNS = {"a": (23, 2), "b": (18, 2), "c": (16, 0), "d": (22, 9), "e": (15, 2), "f": (24, 12), "g": (20, 2)}
SCHEMA = "id bigint, k bigint, " + ", ".join(f"{name} decimal({p}, {s})" for name, (p, s) in COLUMNS.items())
GROUPS = 250


def rows() -> pa.Table:
    """Groups of up to 300 rows whose sums are near to halves of the last digit of a mean, which a second rounding brings up."""
    chance = random.Random(7)
    found: list[dict[str, object]] = []
    for k in range(GROUPS):
        n = chance.choice([1, 2, 3, 7, 39, chance.randint(2, 300)])
        sums = {}
        for name, (_, scale) in COLUMNS.items():
            half = Decimal(chance.randint(-(10**9), 10**9) * 2 + 1) / 2
            exact = half.scaleb(-(scale + 4)) * n
            sums[name] = exact.quantize(Decimal(1).scaleb(-scale)) + Decimal(chance.randint(-2, 2)).scaleb(-scale)
        zero = {name: Decimal(0).scaleb(-scale) for name, (_, scale) in COLUMNS.items()}
        found += [{"id": len(found) + i, "k": k, **(sums if i == 0 else zero)} for i in range(n)]
    schema = pa.schema(
        [("id", pa.int64()), ("k", pa.int64()), *((name, pa.decimal128(p, s)) for name, (p, s) in COLUMNS.items())]
    )
    return pa.Table.from_pylist(found, schema)


def test_means_are_rounded_once(spark: SparkSession, open_store: OpenStore) -> None:
    """SQL's division has a few digits more than a mean has, for some types: it rounded twice."""
    means = ", ".join(f"avg({name}) AS {name}" for name in COLUMNS)
    query = f"SELECT k, {means} FROM t GROUP BY k"
    flow = nosync.Dataflow("f")
    flow.table("t", SCHEMA, key=["id"])
    flow.sql("v", query, spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    given = rows()
    job.advance(0, {"t": spark.createDataFrame(given)})
    spark.createDataFrame(given, SCHEMA).createOrReplaceTempView("t")
    try:
        there = {row.k: row.asDict() for row in spark.sql(query).collect()}
    finally:
        spark.catalog.dropTempView("t")
    here = {row.k: row.asDict() for row in job.read("v").select("k", *COLUMNS).collect()}
    assert here == there
    # Some of them are such that a second rounding shows: else nothing was tried.
    sums = given.group_by("k").aggregate([("a", "sum"), ("a", "count")]).to_pylist()
    twice = [
        (row["a_sum"] / row["a_count"])
        .quantize(Decimal("1e-7"), "ROUND_HALF_UP")
        .quantize(Decimal("1e-6"), "ROUND_HALF_UP")
        for row in sums
    ]
    assert sum(value != there[row["k"]]["a"] for value, row in zip(twice, sums, strict=True)) > 0


def test_a_mean_whose_division_would_round_twice_and_has_no_place_is_refused(spark: SparkSession) -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", "id bigint, w decimal(38, 1)", key=["id"])
    with pytest.raises(nosync.FlowError, match="CAST the argument to 24 digits"):
        flow.sql("v", "SELECT avg(w) AS w FROM t", spark=spark)
