"""Tables as inputs of a job on Spark: epoch by epoch, from a stream, and as a history."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.flow.binder import bind
from nosync.flow.meanings import Meanings
from nosync.spark.schemas import parse_ddl
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DDL = "id bigint, city string, version bigint"
BEFORE, AFTER = {1: "Bern", 2: "Rome"}, {1: "Oslo", 3: "Rome"}


def flow_of(**options: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    flow.table("customers", DDL, key=["id"], **options).aggregate("counts", key=["city"], n=nosync.count())
    return flow


def held(job: nosync.Job, as_of: int) -> dict[int, str]:
    rows = {row.id: row.city for row in job.read("customers", as_of).collect()}
    counts = {row.city: row.n for row in job.read("counts", as_of).collect()}
    assert counts == Counter(rows.values())
    return rows


def test_epochs_with_and_without_change_types(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(flow_of(), open_store(retain=10), spark=spark, shards=2)
    job.advance(0, {"customers": spark.createDataFrame([(1, "Bern", 0), (2, "Rome", 0)], DDL)})
    changes = [
        (1, "Oslo", 1, "update_postimage"),
        (1, "Bern", 0, "update_preimage"),
        (2, "", 1, "delete"),
        (3, "Rome", 1, None),
    ]
    frame = spark.createDataFrame(changes, f"{DDL}, _change_type string")
    feed = frame.selectExpr("*", "7L AS _commit_version", "current_timestamp() AS _commit_timestamp")
    job.advance(1, {"customers": feed})  # as Delta's change data feed has it
    assert (held(job, 0), held(job, 1)) == (BEFORE, AFTER)
    with pytest.raises(
        nosync.InvalidInputError, match="'customer' is not a source of shop; sources: customers .did you mean"
    ):
        job.advance(2, {"customer": frame})
    with pytest.raises(nosync.InvalidInputError, match="source customers has no input"):
        job.advance(2, {})
    with pytest.raises(nosync.InvalidInputError, match="is given twice"):
        job.advance(2, {"customers": frame, "customers_changes": frame})


def test_a_stream_of_changes(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    job = nosync.Job(flow_of(sequence_by="version"), open_store(retain=10), spark=spark, shards=2)
    changes = spark.readStream.schema(f"{DDL}, _change_type string").json(str(given))
    lines = [
        '{"id": 1, "city": "late", "version": 0}\n{"id": 1, "city": "Bern", "version": 1}\n'
        '{"id": 2, "city": "Rome", "version": 1}\n',
        '{"id": 1, "city": "Oslo", "version": 2}\n{"id": 2, "version": 2, "_change_type": "delete"}\n'
        '{"id": 3, "city": "Rome", "version": 1}\n{"id": 1, "city": "later", "version": 0}\n',
    ]
    for t, text in enumerate(lines):
        (given / f"{t}.json").write_text(text)
        query = job.stream({"customers": changes}, checkpoint=tmp_path / "cp", trigger={"availableNow": True})
        query.awaitTermination()
        assert query.exception() is None
    assert (held(job, 0), held(job, 1)) == (BEFORE, AFTER)


def test_a_history_of_changes(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(flow_of(), open_store(retain=10), spark=spark, shards=2)
    rows = [
        (1, "Bern", 0, None),
        (2, "Rome", 0, None),
        (1, "Oslo", 1, None),
        (2, "", 1, "delete"),
        (3, "Rome", 1, None),
    ]
    job.backfill({"customers": spark.createDataFrame(rows, f"{DDL}, _change_type string")}, epoch="version")
    assert (held(job, 0), held(job, 1)) == (BEFORE, AFTER)


@pytest.mark.parametrize("size", ["0", "64m"])
def test_structs_that_are_null_and_have_fields_that_are_not(
    spark: SparkSession, open_store: OpenStore, size: str
) -> None:
    """`NOT NULL` says of a field that it is not null in a struct that is there."""
    ddl = "id int, s struct<a: int not null, b: string>, l array<struct<a: int not null>>"
    query = "SELECT id, s, s.a AS a, l, CASE WHEN id > 1 THEN named_struct('k', id) END AS z FROM t"
    flow = nosync.Dataflow("f")
    table = flow.table("t", ddl, key=["id"])
    table.aggregate("by_struct", key=["s"], n=nosync.count())
    flow.sql("v", query, spark=spark)
    rows = spark.sql(
        """SELECT * FROM VALUES (1, named_struct('a', 1, 'b', 'x'), array(named_struct('a', 1), NULL)), (2, NULL, NULL),
           (3, NULL, array()) AS t(id, s, l)"""
    )
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    with driver_runs(spark, size):
        job.advance(0, {"t": rows})
        job.advance(1, {"t": rows.where("id > 1").selectExpr("id", "named_struct('a', id, 'b', 'y') AS s", "l")})
        job.advance(2, {"t": rows.where("id = 3")})
    rows.createOrReplaceTempView("t")
    try:
        changed = "CASE WHEN id = 2 THEN named_struct('a', id, 'b', 'y') ELSE s END AS s"
        spark.sql(f"SELECT id, {changed}, l FROM t").createOrReplaceTempView("t")
        assert sorted(job.read("v").collect()) == sorted(spark.sql(query).collect())
        expected = spark.sql("SELECT s, count(*) AS n FROM t GROUP BY s").collect()
        assert sorted(job.read("by_struct").collect(), key=str) == sorted(expected, key=str)
    finally:
        spark.catalog.dropTempView("t")


def test_what_may_be_null_inside_is_no_other_source(spark: SparkSession, open_store: OpenStore) -> None:
    """Stores of versions that took NOT NULL by the letter go on: their sources have the fingerprints that they had."""
    flow = nosync.Dataflow("f")
    flow.table("t", "id int, s struct<a: int not null, b: string>", key=["id"])
    before = bind(flow, parse_ddl, meanings=Meanings(unnamed={"t_changes"}))
    assert before.stages["t_changes"].fingerprint == "b8ef6be6792cf4c5"
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    assert str(job.flow.stages["t"].schema.field("s").type) == "struct<a: int32, b: string>"
