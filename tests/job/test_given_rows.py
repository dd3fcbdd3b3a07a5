"""Rows and tables mean what they meant to whoever gave them, and are left as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import PythonException

import nosync
from nosync.lsm.errors import FlowError, HoleError, SchemaError
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
        views = spark.catalog.listTables()
        job = nosync.Job(flow, open_store(), spark=spark, shards=2)
        job.advance(0, {"rows": given})
        assert given.storageLevel.useMemory
        assert spark.catalog.listTables() == views
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
    with pytest.raises(SchemaError, match=name):
        flow.source("rows", f"k string, `{name}` bigint")
    flow.source("rows", "k string, v bigint").map("out", lambda rows: rows.rename_columns(["k", name]))
    with pytest.raises(SchemaError, match=name):
        nosync.Job(flow, open_store(), spark=spark, shards=2)


def as_type(type_: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def cast(rows: pa.Table) -> pa.Table:
        return rows.set_column(1, "at", pa.chunked_array([pa.nulls(rows.num_rows, type_)]))

    return cast


@pytest.mark.parametrize(
    "type_",
    [
        pa.timestamp("ns", "UTC"), pa.timestamp("ms"), pa.time64("us"), pa.uint64(), pa.float16(), pa.date64(),
        pa.decimal256(50, 2), pa.list_(pa.timestamp("s")), pa.struct([("x", pa.uint32())]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.long
def test_columns_that_spark_does_not_read_are_told_of_and_recorded(
    spark: SparkSession, open_store: OpenStore, caplog: pytest.LogCaptureFixture, type_: pa.DataType
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, at timestamp").map("mapped", as_type(type_))
    store = open_store()
    problem = r"stage mapped: column 'at' is .*, and Spark does not read .*: cast it"
    job = nosync.Job(flow, store, spark=spark, shards=1)
    assert [record.levelname for record in caplog.records if re.search(problem, record.message)] == ["WARNING"]
    job.advance(0, {"rows": spark.createDataFrame([("a", None)], "k string, at timestamp")})
    assert store.read("mapped").to_pylist() == [{"k": "a", "at": None}]
    for read in (lambda: job.read("mapped"), lambda: job.changes("mapped", -1, 0)):
        with pytest.raises(SchemaError, match=problem):
            read()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("k strng", "'k strng' are no columns .*did you mean 'string'"),
        ("", "no columns are declared"),
        ("k varchar(5), v int", r"column 'k' .* is varchar\(5\).*declare it as string"),
        ("k char(3)", "declare it as string"),
        ("i interval year to month", "a number of months"),
    ],
)
def test_columns_that_are_none_say_what_is_wrong(
    spark: SparkSession, open_store: OpenStore, columns: str, problem: str
) -> None:
    flow = nosync.Dataflow("f")
    with pytest.raises(SchemaError, match=problem):  # noqa: PT012 - where only Spark knows, the job says it
        flow.source("rows", columns)
        nosync.Job(flow, open_store(), spark=spark, shards=1)


def test_stages_without_a_function_are_refused() -> None:
    rows = nosync.Dataflow("f").source("rows", "k string")
    with pytest.raises(FlowError, match="stage mapped: None is not a function"):
        rows.map("mapped", None)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="stage kept: None is not a function"):
        rows.update("kept", key=["k"], state="n bigint", fn=None)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match=r"stage some: 'n > 3' is not a function; where\(\) takes SQL text or a Column"):
        rows.filter("some", "n > 3")  # type: ignore[arg-type]
    with pytest.raises(FlowError, match=r"stage shorter: \['k'\] is not a function; select\(\) takes SQL text"):
        rows.map("shorter", ["k"])  # type: ignore[arg-type]
    with pytest.raises(nosync.InvalidInputError, match="None is not a function"):
        nosync.CallbackSink(None)  # type: ignore[arg-type]


def positive(rows: pa.Table) -> pa.Table:
    if min(rows.column("v").to_pylist(), default=1) < 0:
        raise ValueError("negative")
    return rows


def test_a_first_epoch_that_failed_can_be_given_other_rows(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string, v bigint")
    rows.aggregate("early", key=["k"], n=nosync.count())
    rows.map("checked", positive).aggregate("late", key=["k"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=1)

    def given(v: int) -> dict[str, DataFrame]:
        return {"rows": spark.createDataFrame([("a", v)], "k string, v bigint")}

    with pytest.raises(nosync.StageError, match="negative"):
        job.advance(0, given(-1))
    with pytest.raises(
        nosync.DeterminismError, match=r"rewind\(\) to the last sealed epoch first \(-1: there is none\)"
    ):
        job.advance(0, given(1))
    job.rewind(-1)
    assert store.layers() == []
    job.advance(0, given(1))
    assert store.read("rows").to_pylist() == [{"k": "a", "v": 1}]
    with pytest.raises(nosync.InvalidInputError, match="-1 is not an epoch"):
        job.rewind(-1)


def test_a_sink_that_fails_says_so_and_is_given_the_epoch_again(spark: SparkSession, open_store: OpenStore) -> None:
    fails, seen = [True], []

    def take(changes: DataFrame, t: int) -> None:
        if fails:
            raise ValueError("boom")
        seen.append((t, changes.count()))

    flow = nosync.Dataflow("f")
    flow.source("rows", "k string").aggregate("out", key=["k"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=1, sinks={"out": nosync.CallbackSink(take)})
    with pytest.raises(ValueError, match="boom") as caught:
        job.advance(0, {"rows": spark.createDataFrame([("a",)], "k string")})
    (note,) = caught.value.__notes__
    assert "the sink of stage out failed at epoch 0, which is sealed" in note
    fails.clear()
    job.advance(1, {"rows": spark.createDataFrame([("b",)], "k string")})
    assert seen == [(0, 1), (1, 1)]


@pytest.mark.long
def test_a_shard_whose_layers_are_all_lost_is_a_hole_and_not_still_to_come(
    spark: SparkSession, open_store: OpenStore
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string").aggregate("out", key=["k"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    for t in range(2):
        job.advance(t, {"rows": spark.createDataFrame([("a",), ("b",), ("c",)], "k string")})
    before = job.read("out").orderBy("k").collect()
    store.sync()
    for layer in (store.directory.root / "layers" / "out").rglob("*.layer"):
        layer.unlink()
    for read in (
        lambda: store.read("out"),
        lambda: store.lookup("out", pa.table({"k": ["a"]})),
        lambda: store.changes("out", -1, 1),
        lambda: job.advance(2, {"rows": spark.createDataFrame([("a",)], "k string")}),
    ):
        with pytest.raises(HoleError, match=r"its last layers, up to \d, are missing.*recover\(\) recomputes them"):
            read()
    with pytest.raises(PythonException, match="are missing.*recover"):  # Spark's own, when it reads
        job.read("out").collect()
    assert job.recover().recomputed
    assert job.read("out").orderBy("k").collect() == before


def test_expressions_mean_what_they_did_when_the_job_was_made(spark: SparkSession, open_store: OpenStore) -> None:
    """`size(null)` is -1 or null, by whether Spark's ANSI mode is on."""
    from nosync.spark.session import conf_set

    ansi = "spark.sql.ansi.enabled"

    def job() -> nosync.Job:
        flow = nosync.Dataflow("f")
        sized = flow.source("rows", "k int, l array<int>").select(
            "sized", "k", "size(l) AS n", "CAST(k AS string) + 1 AS x"
        )
        sized.aggregate("out", key=["x"], n=nosync.sum("n"))
        return nosync.Job(flow, store, spark=spark, shards=2)

    def rows() -> dict[str, DataFrame]:
        return {"rows": spark.createDataFrame([(1, None), (2, [5]), (2, [5])], "k int, l array<int>")}

    store = open_store()
    with conf_set(spark, {ansi: "false"}):
        first = job()
        first.advance(0, rows())
    with conf_set(spark, {ansi: "true"}):
        first.advance(1, rows())
        assert sorted(tuple(row) for row in first.read("out").collect()) == [(2.0, -2), (3.0, 4)]
        for layer in (store.directory.root / "layers" / "out").rglob("1-2-0.layer"):
            layer.unlink()
        assert first.recover().recomputed == 2
        branch = first.branch("other", at=0, replace={"out": {"n": nosync.sum("n"), "c": nosync.count()}})
        branch.replay()
        # It counts from the fork on.
        assert sorted(tuple(row) for row in branch.read("out").collect()) == [(2.0, -2, 1), (3.0, 4, 2)]
        with pytest.raises(FlowError, match="changed"):
            job()
    with conf_set(spark, {ansi: "false"}):
        job().advance(2, rows())
