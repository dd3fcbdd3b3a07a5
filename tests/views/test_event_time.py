"""Views over rows with a watermark beside Structured Streaming: the same query, the same batches, the same rows."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore
from tests.parity.both_ways import APPEND, EPOCHS_AFTER, EVENTS, UPDATE, Batch, Case, at_sink, by_spark, one
from tests.parity.cases import CASES
from tests.parity.rows import batches_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SHORT = ("session-append",)
BY_VIEWS = (
    *SHORT, "tumbling-append", "tumbling-update", "sliding-append", "duplicates-in-time-append", "within-append",
    "interval-left-append",
    "interval-inner-append", "interval-right-append", "interval-full-append", "interval-left_semi-append",
    "window-of-windows-append", "dedupe-then-window-append",
)  # fmt: skip
ROUNDS = int(os.environ.get("NOSYNC_VIEWS", "1"))
WINDOW = ["k", "start", "end", "n", "total"]


def _filtered(streams: Any) -> DataFrame:
    from pyspark.sql import functions as F

    some = streams["events"].withWatermark("at", "5 minutes").where("x % 3 <> 0")
    counted = some.groupBy(F.window("at", "10 minutes", "4 minutes").alias("w"), F.upper("k").alias("k"))
    of_windows = counted.agg(F.count("*").alias("n"), F.sum(F.col("x") * 2).alias("total"))
    return of_windows.select("k", "w.start", "w.end", "n", "total")


def _only_a(streams: Any) -> DataFrame:
    """The filter is moved below the watermark, which only the rows that it leaves move then."""
    from pyspark.sql import functions as F

    windows = streams["events"].withWatermark("at", "5 minutes").groupBy("k", F.window("at", "10 minutes"))
    of_windows = windows.agg(F.count("*").alias("n"), F.sum("x").alias("total")).where("k = 'a'")
    return of_windows.select("k", "window.start", "window.end", "n", "total")


def _near(streams: Any) -> DataFrame:
    """Null keys are left out below both watermarks, and so are small values."""
    from pyspark.sql import functions as F

    left, right = (
        streams["events"].withWatermark("at", "5 minutes"),
        streams["others"].withWatermark("seen", "5 minutes"),
    )
    joined = left.join(
        right, F.expr("k = j AND seen BETWEEN at - INTERVAL 9 MINUTES AND at + INTERVAL 9 MINUTES"), "leftOuter"
    )
    return joined.where("x > 2").select("k", "at", "x", "seen", "y")


def _with_null_keys(random: np.random.Generator) -> list[Batch]:
    left, right = batches_of(random, "k", "x"), batches_of(random, "k", "x")
    return [{"events": a, "others": b.rename_columns(["seen", "j", "y"])} for a, b in zip(left, right, strict=True)]


MORE = [
    Case("only-a-append", APPEND, _only_a, nosync.Dataflow, WINDOW, one("k", "x")),
    Case("near-append", APPEND, _near, nosync.Dataflow, ["k", "at", "x", "seen", "y"], _with_null_keys),
    Case("filtered-append", APPEND, _filtered, nosync.Dataflow, WINDOW, one("k", "x")),
    Case("filtered-update", UPDATE, _filtered, nosync.Dataflow, WINDOW, one("k", "x"), ["k", "start", "end"]),
]


def by_view(spark: SparkSession, store: nosync.Store, case: Case, batches: list[Batch], added_after: int = 0) -> Any:
    """Returns the rows that a sink of a view is given. `added_after`: how many epochs run before it is there."""
    flow = _sources(batches)
    job = nosync.Job(_sources(batches), store, spark=spark, shards=2) if added_after else None
    emit = "final" if case.mode == APPEND else "changes"
    flow.view("out", lambda t: case.query(t).select(*case.columns), emit=emit, spark=spark)
    nothing = {name: table.slice(0, 0) for name, table in batches[0].items()}
    epochs = [*batches, *[nothing] * EPOCHS_AFTER]
    for t, batch in enumerate(epochs):
        if job is None:
            job = nosync.Job(flow, store, spark=spark, shards=2)
        elif t == added_after:
            job.upgrade(flow)
        job.advance(t, {name: spark.createDataFrame(table) for name, table in batch.items()})
    assert job is not None, "there are epochs"
    rows = job.changes("out", -1, len(epochs) - 1).toArrow().to_pylist()
    return case.counted(at_sink(case, rows))


def _sources(batches: list[Batch]) -> nosync.Dataflow:
    flow = nosync.Dataflow("parity")
    for name in batches[0]:
        flow.source(name, EVENTS if name == "events" else "seen timestamp, j string, y bigint")
    return flow


def _cases() -> Iterator[Any]:
    for case in [*(c for c in CASES if c.name in BY_VIEWS), *MORE]:
        marks = [] if case.name in SHORT else [pytest.mark.long("make views")]
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("case", list(_cases()))
def test_a_view_gives_the_rows_of_the_same_query_in_structured_streaming(
    spark: SparkSession, open_store: OpenStore, case: Case, number: int, tmp_path: Path
) -> None:
    batches = case.batches(np.random.default_rng(8 + number))
    expected = by_spark(spark, case, batches, tmp_path / "spark")
    assert by_view(spark, open_store(), case, batches) == expected


@pytest.mark.long("make views")
@pytest.mark.parametrize("case", list(_cases()))
def test_a_view_that_an_upgrade_adds_gives_what_spark_gives_of_all_rows_in_one_batch(
    spark: SparkSession, open_store: OpenStore, case: Case, tmp_path: Path
) -> None:
    batches = case.batches(np.random.default_rng(3))
    k = len(batches) // 2
    before = {name: pa.concat_tables([batch[name] for batch in batches[: k + 1]]) for name in batches[0]}
    expected = by_spark(spark, case, [before, *batches[k + 1 :]], tmp_path / "spark")
    assert by_view(spark, open_store(), case, batches, k) == expected


# --- one window, row by row -------------------------------------------------------------------------------------------

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
IN_MINUTES = [[(0, "a"), (4, "b"), (7, "a")], [(21, "a")], [], [(3, "a"), (22, "b")], [(45, "b")]]
"""The minutes and keys of clicks, by epoch. That of 12:03 comes when its window is closed."""


def _marked(tables: Any) -> DataFrame:
    clicks: DataFrame = tables["clicks"].withWatermark("at", "5 minutes")
    return clicks


def per_window(tables: Any) -> DataFrame:
    return per_window_of(_marked(tables))


def per_window_of(clicks: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return clicks.groupBy(F.window("at", "10 minutes"), "k").count().select("window.start", "k", "count")


def clicked(spark: SparkSession, store: nosync.Store, flow: nosync.Dataflow, epochs: int = 5) -> nosync.Job:
    job = nosync.Job(flow, store, spark=spark, shards=2)
    for t, clicks in enumerate(IN_MINUTES[:epochs]):
        rows = [(NOON + datetime.timedelta(minutes=m), k) for m, k in clicks]
        job.advance(t, {"clicks": spark.createDataFrame(rows, "at timestamp, k string")})
    return job


def flow_of_clicks() -> nosync.Dataflow:
    flow = nosync.Dataflow("clicks")
    flow.source("clicks", "at timestamp, k string")
    return flow


def minutes(job: nosync.Job, view: str) -> set[tuple[int, str, int]]:
    table = job.read(view).toArrow().to_pylist()
    return {(round((row["start"] - NOON).total_seconds() / 60), row["k"], row["count"]) for row in table}


@pytest.mark.long("make views")
def test_a_window_gives_its_row_as_it_changes_or_once(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_of_clicks()
    flow.view("updated", per_window, spark=spark)
    flow.view("once", per_window, emit="final", spark=spark)
    store = open_store()
    job = clicked(spark, store, flow)
    closed = {(0, "a", 2), (0, "b", 1)}
    assert minutes(job, "updated") == closed | {(20, "a", 1), (20, "b", 1), (40, "b", 1)}
    assert minutes(job, "once") == closed
    window = next(name for name in flow.views["updated"].stages if name.startswith("window-"))
    assert job.read(f"{window}__late").count() == 1
    assert f"{window}__late" in flow.views["updated"].notes[0]
    with pytest.raises(nosync.NotAvailableError, match="1 rows came after their window had closed"):
        job.verify_view("updated")
    with pytest.raises(nosync.NotAvailableError, match="depends on the watermark"):
        job.verify_view("once")
    assert job.verify_view("updated", 1).is_equal
    job.advance(
        5, {"clicks": spark.createDataFrame([(NOON + datetime.timedelta(hours=2), "z")], "at timestamp, k string")}
    )
    job.advance(6, {"clicks": spark.createDataFrame([], "at timestamp, k string")})
    assert minutes(job, "once") == closed | {(20, "a", 1), (20, "b", 1), (40, "b", 1)}


@pytest.mark.long("make views")
def test_another_query_begins_anew_on_a_branch(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_of_clicks()
    flow.view("counts", per_window, spark=spark)
    job = clicked(spark, open_store(), flow)
    branch = job.branch(
        "only-a", views={"counts": lambda t: per_window({"clicks": t["clicks"].where("k = 'a'")})}, at=2
    )
    branch.replay()
    assert minutes(branch, "counts") == {(0, "a", 3), (20, "a", 1)}, "of all rows, none is late"
    assert branch.verify_view("counts").is_equal
    assert minutes(job, "counts") >= {(0, "a", 2), (0, "b", 1)}


@pytest.mark.long("make views")
def test_rows_that_were_given_once_are_not_taken_back_on_a_branch(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_of_clicks()
    flow.view("once", per_window, emit="final", spark=spark)
    job = clicked(spark, open_store(), flow)
    of_a = {"once": lambda t: per_window({"clicks": t["clicks"].where("k = 'a'")})}
    with pytest.raises(nosync.FlowError, match="stage once cannot give other rows on a branch.*another name"):
        job.branch("only-a", views=of_a)
    assert minutes(job.branch("same"), "once") == minutes(job, "once")


@pytest.mark.few(1, "make views")
@pytest.mark.parametrize("emit", ["changes", "final"])
def test_an_upgrade_adds_one_over_all_rows(spark: SparkSession, open_store: OpenStore, emit: str) -> None:
    store = open_store()
    clicked(spark, store, flow_of_clicks())
    flow = flow_of_clicks()
    flow.view("counts", per_window, emit=emit, spark=spark)
    job = nosync.Job(flow_of_clicks(), store, spark=spark, shards=2)
    job.upgrade(flow)
    for t in (5, 6):  # with the first it sees how late it is
        job.advance(t, {"clicks": spark.createDataFrame([], "at timestamp, k string")})
    there = {(0, "a", 3), (0, "b", 1), (20, "a", 1), (20, "b", 1)}  # of all rows, none is late
    assert minutes(job, "counts") == there | (set() if emit == "final" else {(40, "b", 1)})


def test_rows_without_a_time_are_late_for_duplicates(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_of_clicks()
    flow.view("first", lambda t: _marked(t).dropDuplicatesWithinWatermark(["k"]), spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    job.advance(0, {"clicks": spark.createDataFrame([(NOON, "a"), (None, "b")], "at timestamp, k string")})
    assert [row["k"] for row in job.read("first").collect()] == ["a"]
    late = next(name for name in flow.views["first"].stages if name.startswith("dedupe-")) + "__late"
    assert [row["k"] for row in job.read(late).collect()] == ["b"]


@pytest.mark.parametrize("emit", ["final", "changes"])
@pytest.mark.parametrize("key", [[], ["k"]], ids=["all", "keyed"])
def test_a_window_of_windows_is_no_filter(spark: SparkSession, emit: str, key: list[str]) -> None:
    from pyspark.sql import functions as F

    def of_windows(tables: Any, second: Any) -> DataFrame:
        small = _marked(tables).groupBy(F.window("at", "10 minutes"), *key).count()
        return small.groupBy(F.window(second, "1 hour"), *key).agg(F.sum("count").alias("n")).select(*key, "n")

    flow = flow_of_clicks()
    flow.view("by_time", lambda tables: of_windows(tables, F.window_time("window")), emit=emit, spark=spark)
    flow.view("by_window", lambda tables: of_windows(tables, F.col("window")), emit=emit, spark=spark)
    sometimes = F.expr("CASE WHEN minute(at) > 30 THEN at END")
    with pytest.raises(nosync.FlowError, match="rows are left out after withWatermark"):
        flow.view(
            "filtered",
            lambda tables: _marked(tables).where(sometimes.isNotNull()).groupBy(F.window("at", "10 minutes")).count(),
            emit=emit,
            spark=spark,
        )


@pytest.mark.long("make views")
def test_a_window_of_windows_closes_with_the_next_of_them(spark: SparkSession, open_store: OpenStore) -> None:
    from pyspark.sql import functions as F

    def per_hour(tables: Any) -> DataFrame:
        small = _marked(tables).groupBy(F.window("at", "10 minutes")).count()
        return small.groupBy(F.window(F.window_time("window"), "1 hour")).agg(F.sum("count").alias("n")).select("n")

    flow = flow_of_clicks()
    flow.view("hours", per_hour, emit="final", spark=spark)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    given = []
    for t, minute in enumerate((5, 70, 80, 95, 96, 97)):
        rows = [(NOON + datetime.timedelta(minutes=minute), "a")]
        job.advance(t, {"clicks": spark.createDataFrame(rows, "at timestamp, k string")})
        given.append([row["n"] for row in job.read("hours").collect()])
    closed = given.index([1])
    assert closed > 2, "Spark closes it with 13:10 less 5 minutes"
    assert given[-1] == [1]


@pytest.mark.long("make views")
def test_sql_says_a_watermark_too(spark: SparkSession, open_store: OpenStore) -> None:
    flow = flow_of_clicks()
    query = (
        "SELECT window(at, '10 minutes').start AS start, k, count(*) AS count "
        "FROM clicks WATERMARK at DELAY OF INTERVAL 5 MINUTES GROUP BY window(at, '10 minutes'), k"
    )
    flow.sql("once", query, emit="final", spark=spark)
    assert minutes(clicked(spark, open_store(), flow), "once") == {(0, "a", 2), (0, "b", 1)}


def _joined(tables: Any, condition: str, how: str = "inner", delay: str = "8 minutes") -> DataFrame:
    from pyspark.sql import functions as F

    left, right = tables["clicks"].withWatermark("at", "5 minutes"), tables["others"].withWatermark("seen", delay)
    return left.join(right, F.expr(condition), how).select("at", "k")


def _windows(tables: Any, *window: str, **how: Any) -> Any:
    from pyspark.sql import functions as F

    return tables["clicks"].withWatermark("at", "5 minutes").groupBy(F.window("at", *window, **how))


BOTH = "k = j AND seen BETWEEN at AND at + INTERVAL 1 HOUR"
REFUSED: dict[str, tuple[Any, str]] = {
    "windows that begin elsewhere": (
        lambda t: _windows(t, "10 minutes", "10 minutes", "1 minute").count(), "leave startTime out",
    ),
    "several DISTINCT": (
        lambda t: _distinct(_windows(t, "10 minutes")), "not there in windows that a watermark closes",
    ),
    "a window after a filter by event time": (
        lambda t: per_window_of(_marked(t).where("at > '2020-01-01'")), "filter before withWatermark",
    ),
    "a window after a filter that says from when": (
        lambda t: per_window_of(_marked(t).where("at >= '2020-01-01'")), "filter before withWatermark",
    ),
    "duplicates dropped by other columns before the window": (
        lambda t: per_window_of(_marked(t).dropDuplicates(["k"])), "name the time as well",
    ),
    "a filter that leaves some times out by a null": (
        lambda t: per_window_of(_marked(t).where("nullif(minute(at), 5) IS NOT NULL")), "filter before withWatermark",
    ),
    "an explode of what may be empty": (
        lambda t: per_window_of(_marked(t).selectExpr("at", "explode(from_json(k, 'array<string>')) AS k")), "explode_outer",
    ),
    "an explode of a filtered list": (
        lambda t: per_window_of(_marked(t).selectExpr("at", "explode(filter(array(k), v -> v > minute(at))) AS k")),
        "explode_outer",
    ),
    "a filter by what an explode gives": (
        lambda t: per_window_of(_marked(t).selectExpr("at", "explode(array(k, null)) AS k").where("k IS NOT NULL")),
        "filter before withWatermark",
    ),
    "a join by time alone": (
        lambda t: _joined(t, "seen BETWEEN at AND at + INTERVAL 1 HOUR"), "takes columns that are equal too",
    ),
    "an outer join with a condition beside": (
        lambda t: _joined(t, f"{BOTH} AND length(k) > y", "left"), "compute it after an inner join",
    ),
    "windows after a join": (
        lambda t: _joined(t, BOTH, delay="5 minutes").groupBy(_window_of_at()).count(), "a join after withWatermark",
    ),
    "a join with a table before the window": (
        lambda t: per_window_of(_marked(t).join(t["others"].selectExpr("j AS k"), "k")), "a join after withWatermark",
    ),
    "a filter by what is made of the time": (
        lambda t: per_window_of(_marked(t).selectExpr("*", "minute(at) AS mm").where("mm < 35")), "filter before withWatermark",
    ),
    "a filter by the time under another name": (
        lambda t: per_window_of(_marked(t).selectExpr("at", "at AS t", "k").where("minute(t) < 35")),
        "filter before withWatermark",
    ),
    "a filter by a window, which Spark moves below it": (
        lambda t: per_window(t).where("start > '2020-01-01'"), "filter before withWatermark",
    ),
    "a UNION with rows that have no watermark": (
        lambda t: per_window_of(_marked(t).union(t["others"].select("seen", "j"))), "a UNION has rows without one",
    ),
    "one input by two ways": (
        lambda t: per_window_of(_marked(t).where("k = 'a'").union(_marked(t).where("k = 'b'"))), "come by two ways",
    ),
    "two parts with watermarks": (
        lambda t: per_window(t).union(per_window({"clicks": t["others"].selectExpr("seen AS at", "j AS k")})),
        "make them two views",
    ),
    "other delays in a UNION": (
        lambda t: per_window_of(_marked(t).union(t["others"].withWatermark("seen", "1 minute").select("seen", "j"))),
        "give them the same",
    ),
    "a watermark twice": (lambda t: per_window({"clicks": _marked(t)}), "say it once"),
    "ROLLUP": (lambda t: _marked(t).rollup("k", _window_of_at()).count(), "without CUBE or ROLLUP"),
    "the time as a group": (lambda t: _marked(t).groupBy("at").count(), "is there for window(...) alone"),
    "a window as a key of dropDuplicates": (
        lambda t: _marked(t).select(_window_of_at(), "k").dropDuplicates(["window", "k"]), "is there for window(...) alone",
    ),
    "a window in an aggregate": (
        lambda t: _least_start(_marked(t).withColumn("w", _window_of_at()).groupBy("w")), "compute it after the aggregate",
    ),
    "a join with one bound": (lambda t: _joined(t, "k = j AND seen >= at"), "needs bounds on both times"),
    "bounds that nothing is within": (
        lambda t: _joined(t, "k = j AND seen > at AND seen < at"), "no times are within its bounds",
    ),
    "rows that are taken back": (
        lambda t: t["clicks"].groupBy("k").count(), "given once and never taken back",
    ),
}  # fmt: skip


def _distinct(windows: Any) -> DataFrame:
    from pyspark.sql import functions as F

    counted: DataFrame = windows.agg(F.countDistinct("k", "at"))
    return counted


def _least_start(windows: Any) -> DataFrame:
    from pyspark.sql import functions as F

    least: DataFrame = windows.agg(F.min("w.start"))
    return least


def _window_of_at() -> Any:
    from pyspark.sql import functions as F

    return F.window("at", "10 minutes")


@pytest.mark.few(8, "make views")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_by_event_time_is_refused(spark: SparkSession, what: str) -> None:
    flow = flow_of_clicks()
    flow.source("others", "seen timestamp, j string, y bigint")
    query, why = REFUSED[what]
    with pytest.raises(nosync.FlowError, match=re.escape(why)) as error:
        flow.view("v", query, emit="final", spark=spark)
    assert str(error.value).startswith("view v: ")
    assert {stage.name for stage in flow.stages} == {"clicks", "others"}


def test_an_explode_that_gives_rows_for_all_passes_the_watermark_on(spark: SparkSession) -> None:
    flow = flow_of_clicks()
    for i, made in enumerate(("explode_outer(split(k, ','))", "explode(array(k, 'x'))")):
        flow.view(
            f"v{i}",
            lambda t, made=made: per_window_of(_marked(t).selectExpr("at", f"{made} AS k")),
            emit="final",
            spark=spark,
        )
    assert {"v0", "v1"} <= {stage.name for stage in flow.stages}


def test_a_table_has_no_watermark_and_the_view_is_named(spark: SparkSession) -> None:
    flow = nosync.Dataflow("f")
    flow.table("clicks", "at timestamp, k string", key=["k"])
    with pytest.raises(nosync.FlowError, match="view v: its input clicks changes"):
        flow.view("v", lambda t: _marked(t).dropDuplicatesWithinWatermark(["k"]), spark=spark)


def test_the_word_alone_is_no_watermark(spark: SparkSession) -> None:
    flow = flow_of_clicks()
    flow.source("others", "seen timestamp, j string, y bigint")
    flow.sql("v", "SELECT k AS watermark FROM clicks WHERE k IN (SELECT j FROM others) /* watermark */", spark=spark)
    assert flow.views["v"].columns == (("watermark", "STRING"),)


def test_a_day_is_not_always_as_long(spark: SparkSession) -> None:
    flow = flow_of_clicks()
    flow.source("others", "seen timestamp, j string, y bigint")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Zurich")
    try:
        with pytest.raises(nosync.FlowError, match="a day is not always 24 hours"):
            flow.view("v", lambda t: _joined(t, "k = j AND seen BETWEEN at AND at + INTERVAL 1 DAY"), spark=spark)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_join_goes_by_the_slower_stream(spark: SparkSession) -> None:
    flow = flow_of_clicks()
    flow.source("others", "seen timestamp, j string, y bigint")
    policy = "spark.sql.streaming.multipleWatermarkPolicy"
    spark.conf.set(policy, "max")
    try:
        with pytest.raises(nosync.FlowError, match=f"set {policy} to min"):
            flow.view("v", lambda t: _joined(t, BOTH), spark=spark)
    finally:
        spark.conf.unset(policy)


def test_an_unknown_way_to_emit_is_told(spark: SparkSession) -> None:
    with pytest.raises(nosync.FlowError, match="emit='append', expected 'changes' or 'final'"):
        flow_of_clicks().view("v", per_window, emit="append", spark=spark)
