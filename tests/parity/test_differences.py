"""What differs from Structured Streaming on purpose, as docs/convert.md lists it: it differs in just that way."""

from __future__ import annotations

import datetime
import decimal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from tests.parity.both_ways import Case, by_nosync, by_spark, flow_of, plain
from tests.parity.cases import CASES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
BY_NAME = {case.name: case for case in CASES}
TYPES = {"at": pa.timestamp("us", "UTC"), "k": pa.string(), "x": pa.int64()}


def rows(*given: tuple[datetime.datetime, str, int]) -> pa.Table:
    return pa.table({name: pa.array([row[i] for row in given], type_) for i, (name, type_) in enumerate(TYPES.items())})


@pytest.mark.long("make parity")
def test_times_before_1970_are_late_in_spark_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Its watermark begins there, and not with the first row."""
    case = BY_NAME["tumbling-append"]
    before, after = (datetime.datetime(year, 6, 1, tzinfo=datetime.UTC) for year in (1969, 1971))
    batches = [{"events": rows((before, "a", 1))}, {"events": rows((after, "a", 2))}, {"events": rows((after, "b", 3))}]
    there = by_spark(spark, case, batches, tmp_path / "spark")
    here = by_nosync(case, batches, tmp_path / "nosync", 1)
    assert there == Counter()
    assert [row[-1] for row in here] == [1]


@pytest.mark.long("make parity")
def test_null_keys_match_nothing_in_a_full_interval_join(spark: SparkSession, tmp_path: Path) -> None:
    """As in SQL, and in a batch of Spark. In a stream Spark joins them with each other."""
    case = BY_NAME["interval-full-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    left = pa.table({"at": pa.array([day], TYPES["at"]), "k": pa.array([None], pa.string()), "x": pa.array([1])})
    right = left.rename_columns(["seen", "j", "y"])
    batches = [{"events": left, "others": right}]
    assert [row[-1] for row in by_spark(spark, case, batches, tmp_path / "spark")] == [1], "a pair"
    assert by_nosync(case, batches, tmp_path / "nosync", 1) == Counter(), "neither is over yet"


@pytest.mark.long("make parity")
def test_a_null_key_moves_the_watermark_of_a_join(spark: SparkSession, tmp_path: Path) -> None:
    """Spark leaves it out before the watermark, so what it would make final is not final there."""
    case = BY_NAME["interval-left-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    events = rows((day, "a", 1), (day + datetime.timedelta(hours=2), "b", 2))
    others = pa.table(
        {
            "seen": pa.array([day, day + datetime.timedelta(hours=2)], TYPES["at"]),
            "j": pa.array(["z", None], pa.string()),
            "y": [1, 2],
        }
    )
    batches = [{"events": events, "others": others}]
    assert by_spark(spark, case, batches, tmp_path / "spark") == Counter()
    assert [row[0] for row in by_nosync(case, batches, tmp_path / "nosync", 1)] == ["a"], "its time is over"


def test_late_rows_are_recorded_and_not_dropped(tmp_path: Path) -> None:
    case = BY_NAME["tumbling-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    hour = datetime.timedelta(hours=1)
    batches = [{"events": rows((day + hour * n, "a", n))} for n in (5, 6, 0)]
    here = by_nosync(case, batches, tmp_path / "nosync", 1)
    assert {row[-1] for row in here} == {5}
    with nosync.open(tmp_path / "nosync") as store:
        assert store.read("w__late").column("x").to_pylist() == [0]


@pytest.mark.long("make parity")
def test_a_row_behind_the_newest_watermark_counts_once_more(spark: SparkSession, tmp_path: Path) -> None:
    """As in a query of Spark that takes what is there. One that waits for its rows runs a batch without any in between."""
    case = BY_NAME["tumbling-append"]
    # Behind the watermark of minute 55 that the second batch left, and not behind the one before.
    batches = [{"events": rows((minute(n), "a", n))} for n in (20, 60, 41, 300)]
    here = by_nosync(case, batches, tmp_path / "nosync", 1)
    assert here == by_spark(spark, case, batches, tmp_path / "spark")
    assert 41 in {row[-1] for row in here}
    waiting = by_waiting_spark(spark, case, [batch["events"] for batch in batches], tmp_path / "waiting")
    assert waiting == Counter({row: n for row, n in here.items() if row[-1] != 41})


@pytest.mark.long("make parity")
def test_final_rows_come_an_epoch_later(spark: SparkSession, tmp_path: Path) -> None:
    """Spark runs a batch without rows once the watermark has moved."""
    case = BY_NAME["tumbling-append"]
    batches = [rows((minute(n), "a", n)) for n in (20, 60)]
    there = by_waiting_spark(spark, case, batches, tmp_path)
    assert [row[-1] for row in there] == [20]
    tester = nosync.testing.FlowTester(case.flow())
    for batch in batches:
        tester.advance({"events": batch})
    assert tester.read("out").num_rows == 0
    tester.advance()
    assert tester.read("out").select(case.columns).to_pydict()[case.columns[-1]] == [20]


@pytest.mark.long("make parity")
def test_a_window_behind_a_window_closes_later(spark: SparkSession, tmp_path: Path) -> None:
    """Its watermark comes from the rows that it is given, which are those of closed windows."""
    case = BY_NAME["window-of-windows-append"]
    batches = [{"events": rows((minute(n), "a", n))} for n in (0, 60)]
    assert sum(by_spark(spark, case, batches, tmp_path / "spark").values()) == 1
    tester = nosync.testing.FlowTester(case.flow())
    for batch in (*batches, {}, {}, {}):
        tester.advance(batch)
    assert tester.read("small").num_rows == 1
    assert tester.read("large").num_rows == 0
    tester.advance({"events": rows((minute(120), "a", 1))})
    for _ in range(3):
        tester.advance()
    assert tester.read("large").num_rows == 1


@pytest.mark.long("make parity")
def test_a_row_that_having_leaves_out_later_is_deleted(spark: SparkSession, tmp_path: Path) -> None:
    """A sink of Spark's mode update keeps it."""

    def query(streams: dict[str, DataFrame]) -> DataFrame:
        return streams["events"].groupBy("k").count().where("count < 2")

    case = Case("having", "update", query, flow_of(lambda e: e), ("k", "count"), lambda _: [], key=["k"])  # type: ignore[arg-type]
    batches = [{"events": rows((minute(n), k, n))} for n, k in enumerate(("a", "b", "a"))]
    assert by_spark(spark, case, batches, tmp_path / "spark") == Counter({("a", 1): 1, ("b", 1): 1})
    flow = nosync.Dataflow("f")
    flow.source("events", "at timestamp, k string, x bigint")
    flow.sql("out", "SELECT k, count(*) AS n FROM events GROUP BY k HAVING count(*) < 2", spark=spark)
    tester = nosync.testing.FlowTester(flow)
    for batch in batches:
        tester.advance(batch)
    assert tester.read("out").to_pylist() == [{"k": "b", "n": 1}]
    assert [(row["k"], row["_change_type"]) for row in tester.changes("out").to_pylist()] == [("a", "delete")]


def by_waiting_spark(spark: SparkSession, case: Case, batches: list[pa.Table], root: Path) -> Counter[tuple[Any, ...]]:
    """Returns the rows of a query that waits for each batch, and is through with it before the next one comes."""
    there = root / "events"
    there.mkdir(parents=True)
    found: Counter[tuple[Any, ...]] = Counter()

    def keep(rows: DataFrame, _: int) -> None:
        found.update(tuple(map(plain, row)) for row in rows.collect())

    pq.write_table(batches[0], root / "0.parquet")
    schema = spark.read.parquet(str(root / "0.parquet")).schema
    query = case.query({"events": spark.readStream.schema(schema).parquet(str(there))}).select(*case.columns)
    writer = query.writeStream.outputMode(case.mode).foreachBatch(keep)
    running = writer.option("checkpointLocation", str(root / "checkpoint")).start()
    try:
        for i, batch in enumerate(batches):
            pq.write_table(batch, root / f"{i}.parquet")
            (root / f"{i}.parquet").rename(there / f"{i}.parquet")
            running.processAllAvailable()
    finally:
        running.stop()
    return found


@pytest.mark.long("make parity")
def test_the_earliest_of_duplicates_counts_and_not_the_first_that_came(spark: SparkSession, tmp_path: Path) -> None:
    case = BY_NAME["within-append"]
    batches = [{"events": rows(*((minute(n), k, n) for k, n in batch))} for batch in UNSORTED]
    there, here = by_spark(spark, case, batches, tmp_path / "spark"), by_nosync(case, batches, tmp_path / "nosync", 1)
    of_a = [sorted(row[-1].minute for row in found if "a" in row) for found in (there, here)]
    assert of_a == [[8], [0, 14]]


@pytest.mark.long("make parity")
def test_duplicates_by_columns_alone_take_late_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Spark leaves out what is behind the watermark, though its state of such duplicates never ends."""

    def query(streams: dict[str, DataFrame]) -> DataFrame:
        return streams["events"].withWatermark("at", "1 minute").dropDuplicates(["k"])

    case = Case(
        "late-duplicates",
        "append",
        query,
        flow_of(lambda e: e.dedupe("out", key=["k"])),
        ("at", "k", "x"),
        lambda _: [],
    )  # type: ignore[arg-type]
    batches = [
        {"events": rows((minute(60), "a", 1))},
        {"events": rows((minute(61), "b", 2))},
        {"events": rows((minute(0), "c", 3))},
    ]
    there, here = by_spark(spark, case, batches, tmp_path / "spark"), by_nosync(case, batches, tmp_path / "nosync", 1)
    assert sorted(row[1] for row in there) == ["a", "b"]
    assert sorted(row[1] for row in here) == ["a", "b", "c"]


def test_a_mean_of_decimals_is_a_double(tmp_path: Path) -> None:
    tester = nosync.testing.FlowTester(
        flow_of(lambda e: e.aggregate("out", key=[], m=nosync.mean("d")), "d decimal(20,2)")()
    )
    values = [decimal.Decimal("123456789012345678.91"), decimal.Decimal("123456789012345678.93")]
    tester.advance({"events": pa.table({"d": pa.array(values, pa.decimal128(20, 2))})})
    assert tester.read("out").column("m").to_pylist() == [float(sum(values) / 2)]


UNSORTED = [[("a", 8), ("a", 0)], [("z", 20)], [("z", 20)], [("a", 14)], [("z", 200)]]
"""The later one comes first. The next one of `a` is a duplicate of that alone."""


def minute(n: int) -> datetime.datetime:
    return datetime.datetime(2024, 6, 1, 12, tzinfo=datetime.UTC) + datetime.timedelta(minutes=n)


def _watched(streams: dict[str, DataFrame], timeout: str, due: bool) -> DataFrame:
    import pandas as pd

    def watch(key: Any, tables: Any, state: Any) -> Any:
        if state.hasTimedOut:
            yield pd.DataFrame({"k": [key[0]], "n": [state.get[0]]})
            state.remove()
            return
        tables = list(tables)
        n = sum(map(len, tables)) + (state.get[0] if state.exists else 0)
        state.update((n,))
        if due:
            state.setTimeoutTimestamp(int(max(table["at"].max().value for table in tables) // 1_000_000) + 7 * 60_000)
        else:
            yield pd.DataFrame({"k": [key[0]], "n": [n]})

    events = streams["events"].withWatermark("at", "5 minutes").groupBy("k")
    return events.applyInPandasWithState(
        watch, "k string, n bigint", "n bigint", "append" if due else "update", timeout
    )


def _count(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    return {"n": len(changes) + (state["n"] if state else 0)}


@pytest.mark.long("make parity")
def test_rows_without_a_time_reach_the_function_in_spark_alone(spark: SparkSession, tmp_path: Path) -> None:
    flow = flow_of(
        lambda s: s.update_per_key("out", key=["k"], state="n bigint", fn=_count, time="at", watermark="5 minutes")
    )
    case = Case(
        "no-time", "update", lambda s: _watched(s, "NoTimeout", False), flow, ["k", "n"], lambda random: [], ["k"]
    )
    batch = rows((minute(0), "a", 1)), pa.table({"at": pa.array([None], TYPES["at"]), "k": ["a"], "x": [2]})
    batches = [{"events": pa.concat_tables(batch)}]
    assert by_spark(spark, case, batches, tmp_path / "spark") == Counter([("a", 2)])
    assert by_nosync(case, batches, tmp_path / "nosync", 1) == Counter([("a", 1)])


@pytest.mark.long("make parity")
def test_a_timer_fires_at_the_watermark_and_a_timeout_of_spark_after_it(spark: SparkSession, tmp_path: Path) -> None:
    def watch(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> Any:
        if state and state["_timer_fired"]:
            return None, {"silent": [{"k": key[0], "n": state["n"]}]}
        due = max(row["at"] for row in changes) + datetime.timedelta(minutes=7)
        return {"n": len(changes) + (state["n"] if state else 0), "due": due}, {}

    def build(source: nosync.Stage) -> object:
        watched = source.update_per_key(
            "watched", key=["k"], state="n bigint, due timestamp", fn=watch, time="at", watermark="5 minutes", timer="due",
            outputs={"silent": "k string, n bigint"},
        )  # fmt: skip
        return watched.output("silent").map("out", lambda table: table, persist="disk")

    case = Case(
        "timeout",
        "append",
        lambda s: _watched(s, "EventTimeTimeout", True),
        flow_of(build),
        ["k", "n"],
        lambda random: [],
    )
    batches = [{"events": rows((minute(n), k, n))} for k, n in (("a", 0), ("z", 12), ("z", 12), ("z", 12))]
    assert by_spark(spark, case, batches, tmp_path / "spark") == Counter()
    assert by_nosync(case, batches, tmp_path / "nosync", 1) == Counter([("a", 1)])
