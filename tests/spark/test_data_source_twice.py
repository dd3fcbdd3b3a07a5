"""One DataFrame, view or table of the format is read several times, with other filters: in a query, and one after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import nosync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def path(tmp_path: Path) -> str:
    with nosync.open(tmp_path / "s") as store:
        store.append("src", t=0, rows=pa.table({"id": range(100), "n": [i % 10 for i in range(100)]}), key=["id"])
        store.seal(0)
    return str(tmp_path / "s")


@pytest.fixture(params=["frame", "feed", "view", "table"])
def rows(spark: SparkSession, path: str, request: pytest.FixtureRequest) -> Iterator[DataFrame]:
    nosync.register(spark)
    reader = spark.read.format("nosync").option("stage", "src")
    if request.param in ("frame", "feed"):
        yield reader.option("readChangeFeed", str(request.param == "feed").lower()).load(path)
        return
    if request.param == "view":
        nosync.views(spark, path, prefix="twice_")
        yield spark.table("twice_src")
        spark.sql("DROP VIEW twice_src")
        return
    spark.sql(f"CREATE TABLE twice_t USING nosync OPTIONS (path '{path}', stage 'src')")
    try:
        yield spark.table("twice_t")
    finally:
        spark.sql("DROP TABLE twice_t")


def test_each_read_has_its_own_filters(rows: DataFrame) -> None:
    assert (rows.where("n = 1").count(), rows.count(), rows.where("n = 2").count()) == (10, 100, 10)
    assert rows.where("abs(n) = 2").count() == 10
    assert rows.where("n = 1").union(rows.where("n <> 1")).count() == 100
    ones, twos = rows.where("n = 1").alias("a"), rows.where("n = 2").alias("b")
    assert ones.join(twos, F.expr("a.n + 1 = b.n")).count() == 100
    assert rows.groupBy("n").count().count() == 10


@pytest.mark.parametrize("pushes", ["true", "false"])
def test_what_a_session_says_of_filters_does_not_matter(spark: SparkSession, path: str, pushes: str) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushes)
    try:
        rows = spark.read.format("nosync").option("stage", "src").load(path)
        assert (rows.where("n = 1").count(), rows.count()) == (10, 100)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_structs_and_lists_are_compared_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:
        store.append("l", t=0, rows=pa.table({"s": [{"q": 1}, {"q": 2}], "a": [[7], [8]]}), key=[])
        store.seal(0)
    nosync.register(spark)
    rows = spark.read.format("nosync").option("stage", "l").load(str(tmp_path / "s"))
    assert rows.where("s = named_struct('q', 1L)").count() == rows.where("a = array(7L)").count() == 1
