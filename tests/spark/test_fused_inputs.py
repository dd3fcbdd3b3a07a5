"""Sources and the keyed stage after expressions in one task: the same layers as by the longer way, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.flow.bound_flow import BoundFlow
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

PEOPLE, SALES = "id bigint, name string, state string, x double", "id bigint, seller bigint, n bigint, price double"


def joined(flow: nosync.Dataflow) -> None:
    """Two sources, each through expressions, into one join; dividing fails where the row does not pass."""
    people, sales = flow.source("people", PEOPLE), flow.source("sales", SALES)
    some = (
        sales.where("some", "n != 0 -- not all\n")
        .where("good", "price > 1")
        .select("per", "seller AS id", "100 DIV n AS each", r"replace('a', r'\', '--') AS q")
    )
    local = people.where("local", "state IN ('A', 'B')").select("named", "id", "upper(name) AS name", "x")
    some.join("out", local, on=["id"], how="left").aggregate(
        "by_name", key=["name"], total=nosync.sum("each"), x=nosync.sum("x")
    )


def summed(flow: nosync.Dataflow) -> None:
    """One source with another consumer beside; floats, so that the order of rows shows."""
    people = flow.source("people", PEOPLE)
    some = (
        people.select("all", "*", "x * 3 AS y")
        .where("known", "name IS NOT NULL")
        .where("here", "coalesce(state, 'A') <> 'B'")
    )
    some.aggregate("sums", key=["name"], y=nosync.sum("y"), ids=nosync.max("id"))
    people.where("there", "state IS NOT NULL").aggregate("states", key=["state", "id"], n=nosync.count())


def latest(flow: nosync.Dataflow) -> None:
    """A user's function over rows in their order, after one in Python on the source, and a join of a source as it is."""
    people, sales = flow.source("people", PEOPLE), flow.source("sales", SALES)
    people.select("brief", "id", "state", "x").update("last", key=["id"], state="state string, x double", fn=keep_last)
    sales.where("dear", "price > 50").select("sold", "seller AS id", "price").dedupe("first", key=["id"])


def bucketed(flow: nosync.Dataflow) -> None:
    """Keys that expressions compute, which fail on rows that do not pass; of them one is a string."""
    sales, people = flow.source("sales", SALES), flow.source("people", PEOPLE)
    some = sales.where("some", "n != 0 -- not all\n").where("good", "coalesce(price, 0) < 90")
    per = some.select("per", "seller", "100 DIV n AS each", "price")
    per.aggregate("sums", key=["each", "seller"], price=nosync.sum("price"), n=nosync.count())
    people.select("loud", "upper(coalesce(name, 'x')) AS name", "x").aggregate(
        "loud_x", key=["name"], x=nosync.sum("x")
    )


def lateral(flow: nosync.Dataflow) -> None:
    """A column that is used beside its definition; others have names of the source's that they are not."""
    some = flow.source("sales", SALES).select("some", "n * 2 AS y", "y + 1 AS z", "seller AS id", "n AS seller")
    some.aggregate("by_id", key=["id"], z=nosync.sum("z"), most=nosync.max("seller"))


def chained(flow: nosync.Dataflow) -> None:
    """A join of what is in its shards already with what comes through expressions, and what follows in shards of its own."""
    people, sales = flow.source("people", PEOPLE), flow.source("sales", SALES)
    named = people.where("known", "name IS NOT NULL").select("new", "id", "name", "id % 3 AS w", "x")
    sellers = sales.select("sold", "seller AS id", "seller % 3 AS w", "price").dedupe("sellers", key=["id", "w"])
    out = named.join("out", sellers, on=["id", "w"], how="full")
    out.filter("some", lambda rows: pc.greater(rows["w"], 0)).aggregate("by_id_w", key=["id", "w"], n=nosync.count())
    out.aggregate("by_name", key=["name"], x=nosync.sum("x"), price=nosync.sum("price"))


def both_aggregated(flow: nosync.Dataflow) -> None:
    """Two aggregates of one source, which is in the shards of their key as it is, and one of another, by a string."""
    people, sales = flow.source("people", PEOPLE), flow.source("sales", SALES)
    xs = people.aggregate("xs", key=["state"], x=nosync.sum("x"))
    ids = people.aggregate("ids", key=["state"], id=nosync.max("id"))
    lettered = sales.where("dear", "price > 20").select("lettered", "IF(n = 0, 'A', 'B') AS state", "price")
    totals = lettered.aggregate("totals", key=["state"], price=nosync.sum("price"))
    xs.join("two", ids, on=["state"]).join("three", totals, on=["state"], how="left")


def keep_last(changes: pa.Table, state: pa.Table) -> pa.Table:
    both = pa.concat_tables([state.select(["id", "state", "x"]), changes.select(["id", "state", "x"])])
    return (
        both.group_by("id", use_threads=False)
        .aggregate([("state", "last"), ("x", "last")])
        .rename_columns(["id", "state", "x"])
    )


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    """Rows twice, nulls, numbers that divide by zero, and shares of rows that change with the epoch (one has none)."""
    r = random.Random(t)
    people = [
        (r.choice([None, *range(20)]), r.choice([None, "a", "b", "c"]), r.choice("ABC"), r.random())
        for _ in range(30 * (t % 3))
    ]
    sales = [(1000 * t + i, r.randrange(25), r.randrange(3), r.choice([None, r.random() * 100])) for i in range(60)]
    return {
        "people": spark.createDataFrame([*people, *people[:7]], PEOPLE),
        "sales": spark.createDataFrame(sales, SALES).repartition(1 + t),
    }


def digests(store: nosync.Store) -> dict[tuple[Any, ...], tuple[int, str]]:
    return {(x.stage, x.shard, x.lower): (x.rows, x.digest) for x in store.layers()}


def start(spark: SparkSession, store: nosync.Store, build: Any) -> nosync.Job:
    flow = nosync.Dataflow("f")
    build(flow)
    return nosync.Job(flow, store, spark=spark, shards=2)


def advance(spark: SparkSession, job: nosync.Job, epochs: int = 3) -> None:
    for t in range(epochs):
        given = rows(spark, t)
        job.advance(t, {source.name: given[source.name] for source in job.flow.sources})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("build", "together"),
    [
        pytest.param(joined, {"sales", "people", "out__left", "out__right", "out"}, marks=pytest.mark.long),
        pytest.param(summed, {"people", "sums"}, marks=pytest.mark.long),
        pytest.param(latest, {"people", "last"}, marks=pytest.mark.long),
        pytest.param(bucketed, {"sales", "sums"}, marks=pytest.mark.long),
        pytest.param(bucketed, {"people", "loud_x"}, marks=pytest.mark.long),
        pytest.param(lateral, {"sales", "by_id"}, marks=pytest.mark.long),
        (chained, {"people", "sales", "sellers", "out__left", "out__right", "out", "some", "by_id_w"}),
        (
            both_aggregated,
            {
                "people",
                "sales",
                "xs",
                "ids",
                "totals",
                "two",
                "two__left",
                "two__right",
                "three",
                "three__left",
                "three__right",
            },
        ),
    ],
)
def test_one_task_records_what_two_would(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, build: Any, together: set[str]
) -> None:
    quiet = nosync.StoreSettings(background=False)
    store, other = open_store(settings=quiet), open_store("other", settings=quiet)
    job, longer = start(spark, store, build), start(spark, other, build)
    advance(spark, job)
    assert together in [set(segment.stages) for segment in job.flow.fused.segments.values() if segment.fused]
    with monkeypatch.context() as patched:
        patched.setattr(BoundFlow, "fused", property(lambda flow: flow))
        advance(spark, longer)
    assert digests(store) == digests(other)
    assert any(n for n, _ in digests(store).values())

    lost = [x for x in store.layers() if x.stage not in ("people", "sales") and x.lower == 1]
    for layer in lost:
        Path(layer.path).unlink()
    report = job.recover()  # from the recorded inputs, so the longer way; it compares digests
    assert (report.recomputed, report.unrecoverable) == (len(lost), {})
    lost = [x for x in store.layers() if x.stage in ("people", "sales") and x.lower == 2]
    for layer in lost:
        Path(layer.path).unlink()
    job = start(spark, store, build)  # which knows of manifests only where rows were placed
    report = job.recover(inputs=lambda t: {source.name: rows(spark, t)[source.name] for source in job.flow.sources})
    assert (report.recomputed, report.unrecoverable) == (len(lost), {})
    assert digests(store) == digests(other)


def test_expressions_that_are_objects_and_tables_take_the_longer_way(
    spark: SparkSession, open_store: OpenStore
) -> None:
    from pyspark.sql import functions as F

    flow = nosync.Dataflow("f")
    people = flow.source("people", PEOPLE)
    people.where("objects", F.col("x") > 0.5).aggregate("sums", key=["id"], n=nosync.count())
    table = spark.createDataFrame([("A", 1), ("B", 2)], "state string, number bigint")
    people.join_static("numbered", table, on=["state"]).aggregate("numbers", key=["number"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    assert not any(segment.fused for segment in job.flow.fused.segments.values())
    given = spark.createDataFrame([(1, "a", "A", 0.7), (1, "b", "B", 0.2), (2, "c", "C", 0.9)], PEOPLE)
    job.advance(0, {"people": given})
    assert sorted(map(tuple, job.read("sums").collect())) == [(1, 1), (2, 1)]
    assert sorted(map(tuple, job.read("numbers").collect())) == [(1, 1), (2, 1)]


def test_what_may_fail_is_asked_only_of_rows_that_pass(spark: SparkSession, open_store: OpenStore) -> None:
    """Wherever the condition is; and rows that do not pass are spread over the shards, not all in that of null."""
    flow = nosync.Dataflow("f")
    sales = flow.source("sales", SALES)
    sales.where("some", "n != 0").select("per", "100 DIV n AS each").aggregate("before", key=["each"], n=nosync.count())
    people = flow.source("people", PEOPLE)
    people.select("ratio", "id", "100 DIV id AS each").where("safe", "id != 0").aggregate(
        "after", key=["each"], n=nosync.count()
    )
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    given = {
        "sales": spark.createDataFrame([(i, 0, 0 if i else 50, 1.0) for i in range(100)], SALES),
        "people": spark.createDataFrame([(i, "a", "A", 1.0) for i in (0, 1, 10, 10)], PEOPLE),
    }
    job.advance(0, given)
    assert store.read("before").to_pylist() == [{"each": 2, "n": 1}]
    assert sorted(tuple(row.values()) for row in store.read("after").to_pylist()) == [(10, 2), (100, 1)]
    assert min(layer.rows for layer in store.layers() if layer.stage == "sales") > 20


def test_what_fails_on_nulls_is_not_asked_of_them(spark: SparkSession, open_store: OpenStore) -> None:
    """Rows that do not pass, and reports, have nulls in all columns; an expression that makes something of these may fail."""
    flow = nosync.Dataflow("f")
    days = flow.source("days", "y string, m string, d string")
    day = "to_date(concat_ws('-', y, m, d)) AS day"
    days.select("dated", day, "d").aggregate("by_day", key=["day"], n=nosync.count())
    some = days.where("some", "m <> 'x'").where("more", "CAST(concat_ws('', m, '1') AS INT) > 11")
    some.select("later", day).aggregate("later_by_day", key=["day"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    given = [("2024", "1", "2"), ("2024", "10", "3"), ("2024", "10", "3")]
    job.advance(0, {"days": spark.createDataFrame(given, "y string, m string, d string")})
    found = {stage: store.read(stage) for stage in ("by_day", "later_by_day")}
    assert [row["n"] for row in found["by_day"].sort_by("day").to_pylist()] == [1, 2]
    assert [row["n"] for row in found["later_by_day"].to_pylist()] == [2]
    store.sync()
    for layer in store.layers():
        if layer.stage in found:
            Path(layer.path).unlink()
    assert job.recover().recomputed == 4, "from the recorded rows, which go the longer way"
    assert all(store.read(stage).equals(rows) for stage, rows in found.items())
    with_x = spark.createDataFrame([("2024", "x", "1"), ("2023", "12", "31")], "y string, m string, d string")
    branch = job.branch("no_dates", drop=["dated", "by_day"])
    branch.advance(1, {"days": with_x})
    assert branch.read("later_by_day").count() == 2


def test_a_frames_name_is_not_taken_for_a_column(spark: SparkSession, open_store: OpenStore) -> None:
    columns = "id bigint, name string, person struct<name: string>"
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", columns)
    rows.where("xs", "person.name = 'x'").aggregate("named", key=["id"], n=nosync.count())
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=2)
    given = spark.createDataFrame([(1, "x", ("y",)), (2, "y", ("x",))], columns)
    job.advance(0, {"rows": given.alias("person")})
    assert [row["id"] for row in store.read("named").to_pylist()] == [2]
