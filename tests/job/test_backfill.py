"""Backfill: many epochs of given rows in one Spark job, against the same epochs one by one."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.kernels.aggregates import count
from tests.conftest import OpenStore
from tests.helpers.orders import ITEMS, ORDERS, SHARDS, counted, digests, make_flow, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

Frames = dict[str, "DataFrame"]


def fused_join() -> nosync.Dataflow:
    """Both sources, the expressions over them and the join in one task."""
    flow = nosync.Dataflow("f")
    orders, items = flow.source("orders", "item bigint, n bigint"), flow.source("items", ITEMS)
    orders.where("many", "n > 2").select("chosen", "item AS sold", "n * 2 AS twice").join(
        "priced", items.where("odd", "price % 2 = 1").select("named", "item AS sold", "price"), on=["sold"]
    )
    return flow


def fused_by_a_computed_key() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    orders = flow.source("orders", ORDERS)
    orders.select("tens", "customer", "n - n % 2 AS pair").aggregate("pairs", key=["customer", "pair"], n=count())
    flow.source("items", ITEMS).aggregate("prices", key=["price"], n=count())
    return flow


def with_a_loop() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    orders, items = flow.source("orders", "item bigint, n bigint"), flow.source("items", ITEMS)

    def further(reached: nosync.Stage) -> nosync.Stage:
        return reached.join("next", orders, on=["item"]).select("there", "n AS item")

    items.select("begin", "item").iterate("reached", further)
    return flow


def by_hour() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    orders = flow.source("orders", ORDERS)
    orders.window("hourly", time="at", size="1 hour", watermark="30 minutes", key=["item"], n=count())
    flow.source("items", ITEMS)
    return flow


FLOWS = (make_flow, fused_join, fused_by_a_computed_key, with_a_loop)


def all_rows(spark: SparkSession, epochs: range) -> Frames:
    """Those of all epochs, in no order."""
    given = [rows(spark, t) for t in epochs]
    return {
        name: reduce(
            lambda a, b: b.unionByName(a),
            [frames[name].selectExpr("*", f"{t} AS number") for t, frames in zip(epochs, given, strict=True)],
        )
        for name in given[0]
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[] if make is make_flow else [pytest.mark.long]) for make in FLOWS]
)
def test_the_same_layers_as_one_epoch_after_the_other(
    make: Callable[[], nosync.Dataflow], spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = 2 if make is with_a_loop else 4
    one_by_one = nosync.Job(make(), open_store("one"), spark=spark, shards=SHARDS)
    expected = [one_by_one.advance(t, rows(spark, t)) for t in range(epochs)]
    job = nosync.Job(make(), open_store("all"), spark=spark, shards=SHARDS)
    runs = counted(monkeypatch)
    steps: list[tuple[int, int]] = []
    report = job.backfill(all_rows(spark, range(epochs)), epoch="number", progress=lambda *step: steps.append(step))
    assert digests(job._store) == digests(one_by_one._store)
    assert runs == ([[t] for t in range(epochs)] if make is with_a_loop else [list(range(epochs))])
    assert steps == [(t + 1, epochs) for t in range(epochs)]
    assert (report.first, report.last, report.sealed_before) == (0, epochs - 1, 0)
    assert report.rows_in == sum(one.rows_in for one in expected)
    assert report.layers_computed == sum(one.layers_computed for one in expected)
    assert job.last_sealed() == epochs - 1


@pytest.mark.long
def test_in_parts_with_gaps_on_other_shards_and_on(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done already is not done again; epochs without rows are there; what comes after goes on from it."""
    monkeypatch.setattr("nosync.runtime.epoch_batches.MOST_EPOCHS", 3)
    store, other = open_store("all"), open_store("one")
    job = nosync.Job(by_hour(), store, spark=spark, shards=SHARDS)
    assert job.backfill(all_rows(spark, range(2)), epoch="number + 3").first == 3
    job = nosync.Job(by_hour(), store, spark=spark, shards=SHARDS + 1)
    report = job.backfill(all_rows(spark, range(4)), epoch="number + IF(number > 1, 5, 3)")
    assert (report.first, report.last, report.sealed_before) == (5, 8, 2)
    job.advance(9, rows(spark, 5))
    again = job.backfill(all_rows(spark, range(2)), epoch="number + 3")
    assert (again.epochs, again.sealed_before, again.layers_computed) == (0, 2, 0)
    assert str(again) == "backfill: nothing to run; 2 were sealed before"

    alone = nosync.Job(by_hour(), other, spark=spark, shards=SHARDS)
    nothing = {name: frame.where("false") for name, frame in rows(spark, 0).items()}
    for t in (3, 4):
        alone.advance(t, rows(spark, t - 3))
    alone = nosync.Job(by_hour(), other, spark=spark, shards=SHARDS + 1)
    for t in (5, 6):
        alone.advance(t, nothing)
    for t in (7, 8):
        alone.advance(t, rows(spark, t - 5))
    alone.advance(9, rows(spark, 5))
    assert digests(store) == digests(other)


def until_three(rows: pa.Table) -> pa.Table:
    if pc.any(pc.equal(rows["x"], 3)).as_py():
        raise ValueError("3 came")
    return rows


def mapped(fn: Callable[[pa.Table], pa.Table]) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("a", "x bigint").map("kept", fn, version="1").aggregate("n", key=["x"], n=count())
    return flow


def as_it_is(rows: pa.Table) -> pa.Table:
    return rows


def test_what_came_before_a_failure_is_sealed_and_the_rest_goes_on(spark: SparkSession, open_store: OpenStore) -> None:
    store, rows = open_store(), {"a": spark.range(10).selectExpr("id AS x")}
    failing = nosync.Job(mapped(until_three), store, spark=spark, shards=SHARDS)
    with pytest.raises(nosync.StageError, match=r"stage kept .* timestamp 1.*3 came"):
        failing.backfill(rows, epoch="x div 2")
    assert failing.last_sealed() == 0
    report = nosync.Job(mapped(as_it_is), store, spark=spark, shards=SHARDS).backfill(rows, epoch="x div 2")
    assert (report.first, report.last, report.sealed_before) == (1, 4, 1)


@pytest.mark.long
def test_other_rows_after_a_failure(spark: SparkSession, open_store: OpenStore) -> None:
    """What a failed attempt recorded is bound to its rows until rewind() to the last sealed epoch."""
    job = nosync.Job(mapped(until_three), open_store(), spark=spark, shards=SHARDS)
    rows = spark.range(8).selectExpr("id AS x")
    with pytest.raises(nosync.StageError, match="3 came"):
        job.backfill({"a": rows}, epoch="x div 2")
    mended = rows.where("x <> 3")
    with pytest.raises(nosync.DeterminismError, match=r"For other input .* rewind\(\) to the last sealed epoch first"):
        job.backfill({"a": mended}, epoch="x div 2")
    assert job.rewind(0) is None
    assert set(job._store.branches()) == {"main"}, "there was nothing to keep"
    assert job.backfill({"a": mended}, epoch="x div 2").epochs == 3
    for t in (0, 1, 3):
        expected = [(x, 1) for x in range(2 * t + 2) if x != 3]
        assert sorted((row.x, row.n) for row in job.read("n", t).collect()) == expected


def test_a_sink_that_fails_gets_the_epoch_again(spark: SparkSession, open_store: OpenStore) -> None:
    given: list[int] = []

    def take(changes: DataFrame, t: int) -> None:
        given.append(t)
        if given == [0, 1]:
            raise ConnectionError("gone")

    flow = nosync.Dataflow("f")
    flow.source("a", "x bigint")
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS, sinks={"a": nosync.CallbackSink(take)})
    rows = {"a": spark.range(4).selectExpr("id AS x")}
    with pytest.raises(ConnectionError):
        job.backfill(rows, epoch="x")
    job.backfill(rows, epoch="x")
    assert given == [0, 1, 1, 2, 3]


def test_sinks_are_given_each_epoch(spark: SparkSession, open_store: OpenStore) -> None:
    given: list[tuple[int, int]] = []
    sink = nosync.CallbackSink(lambda changes, t: given.append((t, changes.count())))
    job = nosync.Job(fused_by_a_computed_key(), open_store(), spark=spark, shards=SHARDS, sinks={"pairs": sink})
    job.backfill(all_rows(spark, range(4)), epoch="number")
    assert given == [(t, job.changes("pairs", t - 1, t).count()) for t in range(4)]


def test_epochs_of_each_source_and_in_the_sessions_time_zone(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("a", "x bigint")
    flow.source("b", "x bigint")
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    midnight = datetime.datetime(2013, 1, 2, tzinfo=datetime.UTC)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        a = spark.createDataFrame(
            [(1, midnight), (2, midnight + datetime.timedelta(hours=6))], "x bigint, ts timestamp"
        )
        job.backfill({"a": a, "b": spark.range(3).selectExpr("id AS x")}, epoch={"a": "dayofyear(ts) - 1", "b": "x"})
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert [row.x for row in job.changes("a", -1, 0).collect()] == [1], "it was still the first of January there"
    assert [row.x for row in job.changes("b", 1, 2).collect()] == [2]


def one_source(spark: SparkSession, open_store: OpenStore) -> nosync.Job:
    flow = nosync.Dataflow("f")
    flow.source("a", "x bigint").aggregate("n", key=["x"], n=count())
    return nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)


@pytest.mark.parametrize(
    ("epoch", "error", "message"),
    [
        ("y", nosync.InvalidInputError, r"source a: epoch='y': Spark cannot evaluate it over x: .*UNRESOLVED_COLUMN"),
        ("x +", nosync.InvalidInputError, r"source a: epoch='x \+': Spark cannot evaluate it over x: .*PARSE_SYNTAX"),
        ("x / 2", nosync.InvalidInputError, r"epoch='x / 2' is a double, expected a whole number such as"),
        ("max(x)", nosync.InvalidInputError, r"Spark cannot evaluate it"),
        ("CAST(10 * rand() AS INT)", nosync.InvalidInputError, r"is another one each time"),
        ("row_number() OVER (ORDER BY x)", nosync.InvalidInputError, r"depends on other rows"),
        ("CAST(concat('a', x) AS INT)", nosync.NosyncError, r"CAST_INVALID_INPUT"),
        (5, nosync.InvalidInputError, r"epoch='5' is a int, expected an expression"),
        ("datediff(current_date(), DATE'2013-01-01')", nosync.InvalidInputError, r"is another one each time"),
        ("nullif(x, 1)", nosync.InvalidInputError, r"source a: 1 rows have the epoch null, expected 0\.\."),
        ("x - 1", nosync.InvalidInputError, r"source a: 1 rows have the epoch -1, expected 0\.\."),
        ("20130131 + 70 * x", nosync.InvalidInputError, r"the epochs 20,130,132 to 20,130,200, .* or raise max_gap=60"),
        ({"b": "x"}, nosync.InvalidInputError, r"epoch has nothing for 'a'; sources: a"),
        ({"a": "x", "b": "x"}, nosync.InvalidInputError, r"epoch names 'b', which is not a source; sources: a"),
    ],
)
def test_epochs_that_do_not_do(
    spark: SparkSession, open_store: OpenStore, epoch: Any, error: type[Exception], message: str
) -> None:
    job = one_source(spark, open_store)
    with pytest.raises(error, match=message):
        job.backfill({"a": spark.range(3).selectExpr("id AS x")}, epoch=epoch)
    assert job.last_sealed() is None


def test_too_many_epochs_and_none(spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.spark.epoch_inputs.MOST_EPOCHS", 10)
    job = one_source(spark, open_store)
    rows = spark.range(11).selectExpr("id AS x")
    with pytest.raises(nosync.InvalidInputError, match="more than 10 epochs; an epoch is a batch of rows"):
        job.backfill({"a": rows}, epoch="x")
    with pytest.raises(nosync.InvalidInputError, match="no source has any row"):
        job.backfill({"a": rows.where("false")}, epoch="x")
    assert job.backfill({"a": rows}, epoch="x div 2").epochs == 6
    with pytest.raises(nosync.InvalidInputError, match=r"the epochs 6 to 8, .* raise max_gap=2"):
        job.backfill({"a": rows.where("x = 9")}, epoch="x", max_gap=2)
    assert job.backfill({"a": rows.where("x = 9")}, epoch="x", max_gap=3).epochs == 4


def test_rows_that_come_too_late_are_refused(spark: SparkSession, open_store: OpenStore) -> None:
    job = one_source(spark, open_store)
    some = spark.range(30).selectExpr("id AS x")
    job.backfill({"a": some}, epoch="x div 10 + 2")
    late = some.unionAll(spark.range(1).selectExpr("id AS x"))
    with pytest.raises(nosync.InvalidInputError, match="epoch 2 is sealed with 10 rows and is given 11"):
        job.backfill({"a": late}, epoch="x div 10 + 2")
    with pytest.raises(nosync.OutOfOrderError, match="rows of epoch 1 are given, .* the next one is 5"):
        job.backfill({"a": some}, epoch="x div 10 + 1")
    with pytest.raises(nosync.InvalidInputError, match="'b' is not a source"):
        job.backfill({"b": some}, epoch="x")
    assert job.last_sealed() == 4


def test_all_sources_of_a_sealed_epoch_are_compared(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(fused_join(), open_store(), spark=spark, shards=SHARDS)
    given = all_rows(spark, range(3))
    job.backfill(given, epoch="number")
    with pytest.raises(nosync.InvalidInputError, match="source items: epoch 1 is sealed with 2 rows and is given 0"):
        job.backfill({**given, "items": given["items"].where("number <> 1")}, epoch="number")


def test_dataframes_that_do_not_do(spark: SparkSession, open_store: OpenStore) -> None:
    job = one_source(spark, open_store)
    stream = spark.readStream.format("rate").load().selectExpr("value AS x")
    with pytest.raises(nosync.InvalidInputError, match=r"a streaming DataFrame was given; use stream\(\)"):
        job.backfill({"a": stream}, epoch="x")
    drawn = spark.range(9).selectExpr("CAST(3 * rand() AS BIGINT) AS x")
    with pytest.raises(nosync.InvalidInputError, match="or the DataFrame, is another one each time it is asked"):
        job.backfill({"a": drawn}, epoch="x")
    kept = drawn.persist()
    try:
        assert job.backfill({"a": kept}, epoch="x").rows_in == 9, "what is persisted stays as it is"
    finally:
        kept.unpersist()


def test_rows_that_are_others_each_time(spark: SparkSession, open_store: OpenStore, tmp_path: Any) -> None:
    """They are counted, and then come to be others: nothing is sealed that was not counted."""
    job = one_source(spark, open_store)
    (tmp_path / "reads").mkdir()

    def one_more_each_time(batches: Any) -> Any:
        reads = list((tmp_path / "reads").iterdir())
        (tmp_path / "reads" / str(len(reads))).touch()
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"x": [0, 1, *[1] * len(reads)]}, pa.schema([("x", pa.int64())]))

    rows = spark.range(1, numPartitions=1).mapInArrow(one_more_each_time, "x bigint")
    with pytest.raises(nosync.InvalidInputError, match="epoch 1 had 1 rows when they were counted and 2 when it ran"):
        job.backfill({"a": rows}, epoch="x")
    assert job.last_sealed() == 0
    written = spark.createDataFrame([(0,), (0,), (1,)], "x bigint")
    job.rewind(0)
    with pytest.raises(nosync.InvalidInputError, match="epoch 0 is sealed with 1 rows and is given 2"):
        job.backfill({"a": written}, epoch="x")
    assert job.backfill({"a": written.where("x = 1")}, epoch="x").rows_in == 1
