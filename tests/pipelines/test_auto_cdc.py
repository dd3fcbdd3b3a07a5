"""AUTO CDC: the newest row of each key, and the history of each key, beside slow oracles and Spark's own code."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from packaging.version import Version

import nosync
from tests.pipelines.projects import Project

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SPARK = Version(importlib.metadata.version("pyspark"))
HAS_HISTORY = pytest.mark.skipif(Version("4.3") > SPARK, reason="SCD type 2 is of Spark 4.3")
SCHEMA = "k string, city string, visits int, seq int, op string"
FEED = f"""
@dp.table
def feed():
    return spark.readStream.schema("{SCHEMA}").json("data/feed")
"""
CDC = """
dp.create_streaming_table("people")
dp.create_auto_cdc_flow(
    target="people", source="feed", keys=["k"], sequence_by="seq", apply_as_deletes="op = 'D'",
    except_column_list=["op", "seq"], {more}
)
"""
Event = dict[str, Any]
Rows = Counter[tuple[Any, ...]]


def event(k: str, seq: int, city: str | None = "Rome", visits: int = 1, op: str = "U") -> Event:
    return {"k": k, "city": city, "visits": visits, "seq": seq, "op": op}


def history(events: list[Event], tracked: tuple[str, ...]) -> Rows:
    """Returns the rows of a history: columns in the order of their names, as `Project.rows` has them."""
    found: Rows = Counter()
    for key in {one["k"] for one in events}:
        run: list[Any] | None = None  # when it began, and its newest event
        for one in sorted((one for one in events if one["k"] == key), key=lambda one: one["seq"]):
            is_deleted = one["op"] == "D"
            if run is not None and not is_deleted and all(run[1][c] == one[c] for c in tracked):
                run[1] = one
                continue
            if run is not None:
                found[one["seq"], run[0], run[1]["city"], key, run[1]["visits"]] += 1
            run = None if is_deleted else [one["seq"], one]
        if run is not None:
            found[None, run[0], run[1]["city"], key, run[1]["visits"]] += 1
    return found


def of_spark(spark: SparkSession, events: list[Event], tracked: tuple[str, ...]) -> Rows:
    """Returns the rows that Spark's own code has of a table to which all events come in one batch."""
    rows = spark.createDataFrame([tuple(one.values()) for one in events], SCHEMA)
    jvm: Any = spark._jvm
    cdc = jvm.org.apache.spark.sql.pipelines.autocdc
    f = jvm.org.apache.spark.sql.functions

    def seq(values: Any) -> Any:
        return jvm.scala.jdk.javaapi.CollectionConverters.asScala(values).toSeq()

    def names(*given: str) -> Any:
        found = jvm.java.util.ArrayList()
        for name in given:
            found.add(cdc.UnqualifiedColumnName(name))
        return seq(found)

    def some(value: Any) -> Any:
        return jvm.scala.Option.apply(value)

    includes, excludes = (getattr(cdc, f"ColumnSelection${kind}Columns") for kind in ("Include", "Exclude"))
    args = cdc.ChangeArgs(
        names("k"), f.col("seq"), getattr(getattr(cdc, "ScdType$Type2$"), "MODULE$"), some(f.expr("op = 'D'")),
        some(excludes(names("op", "seq"))), some(includes(names(*tracked))),
    )  # fmt: skip
    processor = cdc.Scd2BatchProcessor(args, jvm.org.apache.spark.sql.types.DataTypes.IntegerType)
    batch = processor.preprocessMicrobatch(rows._jdf)
    for step in (
        "decomposeOutOfOrderRows", "dropRedundantRowsPostDecomposition", "reconcileStartAndEndAt",
        "dropLeftoverDeletesPostReconciliation", "promoteDecompositionTailsToTombstones", "identifyAndTagAuxRows",
    ):  # fmt: skip
        batch = getattr(processor, step)(batch)
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    frame: DataFrame = ClassicDataFrame(batch, spark)
    flag = next(name for name in frame.columns if "aux" in name)
    shown = frame.where(f"NOT `{flag}` AND (__END_AT IS NULL OR __START_AT < __END_AT)")
    return Counter(map(tuple, shown.select("__END_AT", "__START_AT", "city", "k", "visits").collect()))


def events_of_chance(seed: int, many: int) -> list[Event]:
    """Events in the order in which they come, which is not that of `seq`. No two of a key have the same."""
    chance = np.random.default_rng(seed)
    return [
        event("abc"[chance.integers(3)], int(at), ["Rome", "Bern", None][chance.integers(3)], int(chance.integers(2)),
              "UUUD"[chance.integers(4)])
        for at in chance.permutation(many)
    ]  # fmt: skip


@HAS_HISTORY
def test_the_oracle_is_what_spark_has(spark: SparkSession) -> None:
    events = events_of_chance(1, 30)
    for tracked in (("city",), ("city", "visits")):
        assert history(events, tracked) == of_spark(spark, events, tracked)


@HAS_HISTORY
@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "tracked"),
    [
        ("stored_as_scd_type=2", ("city", "visits")),
        ("stored_as_scd_type='2', track_history_column_list=['city']", ("city",)),
        ("stored_as_scd_type=2, track_history_except_column_list=[F.col('city')]", ("visits",)),
    ],
)
def test_a_history_is_that_of_spark_in_whatever_order_events_come(
    spark: SparkSession, tmp_path: Path, more: str, tracked: tuple[str, ...]
) -> None:
    events = events_of_chance(2, 40)
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=CDC.format(more=more))
    for until in (25, 26, 40):
        project.give("feed", events[project.given : until])
        project.run(shards=2)
        assert project.rows("people") == history(events[:until], tracked), f"after {until} events"
    assert project.rows("people", as_of=0) == history(events[:25], tracked)


@HAS_HISTORY
def test_a_history_in_sql_of_which_an_edit_asks_for_other_columns(spark: SparkSession, tmp_path: Path) -> None:
    text = """CREATE STREAMING TABLE people FLOW AUTO CDC FROM STREAM(feed) KEYS (k) APPLY AS DELETE WHEN op = 'D'
    SEQUENCE BY seq COLUMNS * EXCEPT (op, seq) STORED AS SCD TYPE 2{};"""
    events = [
        event("a", 1),
        event("a", 3, visits=2),
        event("a", 5, op="D"),
        event("a", 4, "Bern"),
        event("b", 2, "Bern"),
    ]
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=text.format(" TRACK HISTORY ON (city)"))
    project.give("feed", events)
    project.run()
    expected = Counter({(4, 1, "Rome", "a", 2): 1, (5, 4, "Bern", "a", 1): 1, (None, 2, "Bern", "b", 1): 1})
    assert project.rows("people") == expected == history(events, ("city",))
    project.write("cdc", text.format(""))
    project.give("feed", [event("b", 3, "Rome")])
    project.run()
    assert project.rows("people") == history([*events, event("b", 3, "Rome")], ("city", "visits"))
    assert project.rows("people", as_of=0) == expected


@HAS_HISTORY
def test_of_events_of_one_time_a_deletion_counts(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=CDC.format(more="stored_as_scd_type=2"))
    project.give("feed", [event("a", 1, op="D"), event("a", 1), event("b", 1), event("b", 2), event("b", 2, op="D")])
    project.run()
    assert project.rows("people") == Counter({(2, 1, "Rome", "b", 1): 1})


@HAS_HISTORY
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("stored_as_scd_type=2, track_history_column_list=['town']", "has no column 'town'"),
        ("stored_as_scd_type=2, track_history_column_list=['seq']", "has no column 'seq'; it has city, visits"),
    ],
)
def test_columns_that_are_not_there_cannot_be_tracked(
    spark: SparkSession, tmp_path: Path, more: str, message: str
) -> None:
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=CDC.format(more=more))
    project.give("feed", [event("a", 1)])
    with pytest.raises(nosync.FlowError, match=message):
        project.declare()


@HAS_HISTORY
def test_a_source_with_the_columns_of_a_history_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = FEED.replace('"data/feed")', '"data/feed").withColumn("__END_AT", F.lit(1))')
    project = Project(tmp_path / "p", spark, feed=feed, cdc=CDC.format(more="stored_as_scd_type=2"))
    project.give("feed", [event("a", 1)])
    with pytest.raises(nosync.FlowError, match=r"has a column '__END_AT', and a history adds one of this name"):
        project.declare()


@pytest.mark.skipif(Version("4.2") > SPARK, reason="AUTO CDC is of Spark 4.2")
def test_a_sequence_of_several_columns(spark: SparkSession, tmp_path: Path) -> None:
    cdc = CDC.replace('sequence_by="seq"', 'sequence_by="struct(seq div 3 AS day, seq % 3 AS part)"')
    more = "stored_as_scd_type=2" if Version("4.3") <= SPARK else ""
    events = events_of_chance(3, 30)
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=cdc.format(more=more))
    for until in (20, 30):
        project.give("feed", events[project.given : until])
        project.run(shards=2)
        with nosync.open(project.root / "store", read_only=True) as store:
            rows = store.read("people").to_pylist()
        if more:
            times = [[row[name] for name in ("__END_AT", "__START_AT")] for row in rows]
            numbers = [[None if at is None else 3 * at["day"] + at["part"] for at in both] for both in times]
            found = [(*both, row["city"], row["k"], row["visits"]) for row, both in zip(rows, numbers, strict=True)]
            assert Counter(found) == history(events[:until], ("city", "visits"))
        else:
            newest = [row[1:] for row in history(events[:until], ("city", "visits")) if row[0] is None]
            assert Counter((row["city"], row["k"], row["visits"]) for row in rows) == Counter(row[1:] for row in newest)


@pytest.mark.skipif(Version("4.2") > SPARK, reason="AUTO CDC is of Spark 4.2")
def test_a_key_that_is_null_is_refused_as_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", spark, feed=FEED, cdc=CDC.format(more=""))
    project.give("feed", [{**event("a", 1), "k": None}])
    with pytest.raises(nosync.NosyncError, match="AUTO CDC people: a key is null in a row: KEYS are k"):
        project.run()
