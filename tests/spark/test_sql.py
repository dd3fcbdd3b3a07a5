"""Stages in SQL: tables of the catalog, views of a session, and that nothing is written that way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.clocks import NOON_US, SECOND_US, Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TABLES = ("prices_table", "prices_then", "prices_feed", "prices_with_columns")


@pytest.fixture
def store(open_store: OpenStore, spark: SparkSession) -> Iterator[nosync.Store]:
    nosync.register(spark)
    clock = Clock()
    opened = open_store(env=clock)
    for t in range(2):
        clock.now_us = NOON_US + t * 60 * SECOND_US
        for stage in ("prices", "by-day", "2013", "win__watermark", "win__late"):
            opened.append(stage, t=t, rows=pa.table({"item": ["tea"], "cents": [200 + t]}), key=["item"])
        opened.seal(t)
    opened.sync()  # which writes when they were sealed, for other processes
    yield opened
    for name in TABLES:
        spark.sql(f"DROP TABLE IF EXISTS {name}")
    for view in spark.catalog.listTables():
        if view.isTemporary:
            spark.sql(f"DROP VIEW IF EXISTS `{view.name}`")


def cents(spark: SparkSession, text: str) -> list[int]:
    return [row.cents for row in spark.sql(text).collect()]


def options(store: nosync.Store, **more: object) -> str:
    given = {"path": store.directory.root, "stage": "prices"} | more
    return ", ".join(f"{name} '{value}'" for name, value in given.items())


def test_a_table_of_the_catalog_is_read(spark: SparkSession, store: nosync.Store) -> None:
    spark.sql(
        f"CREATE TABLE prices_table USING nosync OPTIONS ({options(store)}) COMMENT 'x' TBLPROPERTIES ('a' = 'b')"
    )
    assert cents(spark, "SELECT * FROM prices_table") == [201]
    store.append("prices", t=2, rows=pa.table({"item": ["tea"], "cents": [202]}), key=["item"])
    store.seal(2, fill_missing=True)
    assert cents(spark, "SELECT * FROM prices_table WHERE cents > 100") == [202]
    assert cents(spark, "SELECT * FROM prices_table WITH (asOf = 0)") == [200]
    spark.sql(f"CREATE TABLE prices_then USING nosync OPTIONS ({options(store, timestampAsOf='2026-07-04T12:00:30')})")
    assert cents(spark, "SELECT b.cents FROM prices_table a JOIN prices_then b USING (item)") == [200]
    spark.sql(f"CREATE TABLE prices_feed USING nosync OPTIONS ({options(store, readChangeFeed='true')})")
    assert spark.sql("SELECT * FROM prices_feed WHERE _change_type = 'insert'").count() == 1
    assert spark.readStream.table("prices_feed").columns == ["item", "cents", "_change_type", "_epoch"]
    spark.sql("DROP TABLE prices_table")
    assert store.read("prices").num_rows == 1, "the store is not the table's to drop"


def test_a_table_that_cannot_be_is_refused_when_it_is_made_or_read(spark: SparkSession, store: nosync.Store) -> None:
    with pytest.raises(Exception, match=r"no option 'asoff' \(did you mean 'asOf'\?\)"):
        spark.sql(f"CREATE TABLE prices_table USING nosync OPTIONS ({options(store, asOff=1)})")
    with pytest.raises(Exception, match="prices2"):
        spark.sql(f"CREATE TABLE prices_table USING nosync OPTIONS ({options(store, stage='priceS2'.lower())})")
    spark.sql(f"CREATE TABLE prices_with_columns (item string) USING nosync OPTIONS ({options(store)})")
    with pytest.raises(Exception, match="has the columns of its stage: make it without any"):
        spark.sql("SELECT * FROM prices_with_columns").collect()


def test_every_stage_is_a_view(spark: SparkSession, store: nosync.Store) -> None:
    made = nosync.views(spark, store)
    assert made == {"prices": "prices", "by-day": "`by-day`", "2013": "`2013`", "win__late": "win__late"}
    for name in made.values():
        assert cents(spark, f"SELECT * FROM {name}") == [201]
    store.append("prices", t=2, rows=pa.table({"item": ["tea"], "cents": [202]}), key=["item"])
    store.seal(2, fill_missing=True)
    assert cents(spark, "SELECT * FROM prices") == [201], "all views are of the epoch that was the newest then"
    nosync.views(spark, store)
    assert cents(spark, "SELECT * FROM prices JOIN `by-day` USING (item)".replace("*", "prices.cents")) == [202]


@pytest.mark.parametrize("as_of", [0, "2026-07-04T12:00:30"])
def test_views_as_of_then(spark: SparkSession, store: nosync.Store, as_of: int | str) -> None:
    made = nosync.views(spark, str(store.directory.root), as_of, prefix="then_")
    assert made["by-day"] == "`then_by-day`"
    assert cents(spark, "SELECT * FROM then_prices") == [200]
    assert cents(spark, "SELECT * FROM then_2013") == [200]


def test_a_store_without_epochs_has_no_views(spark: SparkSession, tmp_path: Path) -> None:
    with nosync.open(tmp_path / "new") as new, pytest.raises(nosync.NotAvailableError, match="no sealed epoch"):
        nosync.views(spark, new)


def test_the_session_comes_first(store: nosync.Store) -> None:
    with pytest.raises(nosync.InvalidInputError, match="expected the SparkSession first, then the store"):
        nosync.views(store, "state/")  # type: ignore[arg-type]


@pytest.mark.long
def test_nothing_is_written_and_the_error_says_what_to_do(spark: SparkSession, store: nosync.Store) -> None:
    spark.sql(f"CREATE TABLE prices_table USING nosync OPTIONS ({options(store)})")
    nosync.views(spark, store)
    rows = spark.createDataFrame([("tea", 1)], "item string, cents bigint")
    path = str(store.directory.root)
    for write in (
        lambda: spark.sql("INSERT INTO prices_table VALUES ('tea', 1)"),
        lambda: spark.sql("INSERT INTO prices VALUES ('tea', 1)"),
        lambda: rows.write.format("nosync").mode("append").option("stage", "prices").save(path),
        lambda: rows.write.format("nosync").mode("overwrite").option("stage", "prices").save(path),
        lambda: rows.writeTo("prices_table").append(),
    ):
        with pytest.raises(Exception, match="format 'nosync' is for reading") as refused:
            write()
        (line,) = (line for line in str(refused.value).splitlines() if "is for reading" in line)
        assert "from job.advance(t, {...}), job.backfill(...) or job.stream(...)" in line
    assert cents(spark, "SELECT * FROM prices") == [201]
