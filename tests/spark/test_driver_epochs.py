"""Epochs of few rows that the driver runs by itself: the same layers as by Spark, which runs all others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync import Stage
from nosync.lsm.errors import NosyncError
from nosync.spark.schemas import parse_ddl
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import (
    ROWS,
    SHARDS,
    WIDE,
    by_expression,
    by_id,
    job_of,
    joined,
    rows_of,
    wide_rows,
)
from tests.helpers.scanning import written
from tests.testing.flows import FLOWS as MANY
from tests.testing.flows import INPUTS, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
EVENTS = "word string, n bigint, at timestamp"


def placed_by_a_text(flow: nosync.Dataflow) -> None:
    """Expressions between two stages that are both recorded, and several that take the rows of one."""
    sums = flow.source("rows", ROWS).aggregate("sums", key=["name"], n=nosync.sum("n"), of=nosync.count())
    sums.where("large", "n > 0").select("named", "name", "n % 5 AS rest", "of").aggregate(
        "by_rest", key=["rest"], n=nosync.count()
    )
    sums.select("halves", "CAST(n AS DECIMAL(20, 2)) / nullif(CAST(of AS DECIMAL(20, 0)), 0) AS mean", "name").dedupe(
        "means", key=["mean"]
    )


def of_event_time(flow: nosync.Dataflow) -> None:
    events = flow.source("events", EVENTS)
    events.window("tumbling", key=["word"], time="at", size="10 minutes", watermark="5 minutes", n=nosync.sum("n"))
    events.window("sessions", key=["word"], time="at", gap="5 minutes", watermark="10 minutes", rows=nosync.count())
    events.dedupe("once", key=["word"], time="at", watermark="5 minutes", within="20 minutes")


def of_a_loop(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", ROWS)
    links = rows.where("valid", "id IS NOT NULL AND n IS NOT NULL").select("links", "id AS node", "n AS next")

    def follow(reached: Stage) -> Stage:
        return reached.join("hops", links, on=["node"]).select("following", "CAST(next AS BIGINT) AS node")

    roots = rows.where("roots_there", "id = 3").select("roots", "id AS node")
    roots.iterate("reached", follow).aggregate("count", key=[], nodes=nosync.count())


def of_a_table(flow: nosync.Dataflow) -> None:
    flow.table("rows", ROWS, key=["id", "n"]).aggregate("out", key=["flag"], n=nosync.count(), most=nosync.max("name"))


def given(name: str, t: int) -> pa.Table:
    if name == "events":
        at = [pa.scalar(1_750_000_000_000_000 + (t * 900 + i * 37 % 1100) * 1_000_000).as_py() for i in range(60)]
        words = [["a", "b", None, "c"][i % 4] for i in range(60)]
        return pa.table({"word": words, "n": range(60), "at": pa.array(at, pa.timestamp("us", "UTC"))})
    return rows_of(t, 150) if name == "rows" else rows_of(t + 7, 90)


def of_structs(flow: nosync.Dataflow) -> None:
    """Keys that are structs, some with nulls in them."""
    rows = flow.source("rows", ROWS).select("pairs", "named_struct('a', id % 3, 'b', name) AS pair", "n")
    rows.aggregate("by_pair", key=["pair"], n=nosync.count()).select("a", "pair.a AS a", "n").aggregate(
        "by_a", key=["a"], n=nosync.sum("n")
    )


def of_times(flow: nosync.Dataflow) -> None:
    events = flow.source("events", EVENTS)
    placed = events.select("placed", "named_struct('at', at, 'word', word) AS place", "hour(at) AS h", "n")
    placed.aggregate("by_place", key=["place"], n=nosync.sum("n"), h=nosync.max("h"))


FLOWS = [by_id, by_expression, joined, placed_by_a_text, of_event_time, of_a_loop, of_a_table, of_structs, of_times]


def advance(job: nosync.Job, spark: SparkSession, t: int) -> None:
    if job.flow.sources[0].table is not None:
        rows = rows_of(t, 150).group_by(["id", "n"]).aggregate([("name", "max"), ("flag", "max")])
        rows = rows.rename_columns(["id", "n", "name", "flag"]).filter(pc.is_valid(pc.add(rows["id"], rows["n"])))
        job.advance(t, {"rows": spark.createDataFrame(rows)})
        return
    job.advance(t, {source.name: spark.createDataFrame(given(source.name, t)) for source in job.flow.sources})


@pytest.mark.few(1)
@pytest.mark.parametrize("make", FLOWS)
def test_layers_are_the_same_as_by_spark(
    make: Callable[[nosync.Dataflow], None], spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    """The second store's epochs are run by the one and by the other in turn."""
    found = []
    for way in ("spark", "both"):
        store = open_store(way)
        job = job_of(make, spark, store)
        for t in range(3):
            with driver_runs(spark, "64m" if way == "both" and t != 1 else "0"):
                advance(job, spark, t)
        found.append(digests(store))
    assert in_driver == [0, 2]
    assert found[0] == found[1]
    assert len(found[0]) >= SHARDS * 3


@pytest.mark.few(1)
@pytest.mark.parametrize("make", FLOWS)
def test_layers_are_the_same_by_worker_processes(
    make: Callable[[nosync.Dataflow], None], spark: SparkSession, open_store: OpenStore, workers_asked: list[int]
) -> None:
    """The second store's epochs are run by workers, too, but for the first."""
    found = []
    for cores in ("1", "2"):
        store = open_store(cores)
        job = job_of(make, spark, store)
        for t in range(3):
            with driver_runs(spark, cores="1" if t == 0 else cores):
                advance(job, spark, t)
        found.append(digests(store))
    assert set(workers_asked) == {1, 2}
    assert found[0] == found[1]


@pytest.mark.long
def test_windows_of_a_query_are_run_by_the_driver(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    query = "SELECT window(at, '3 minutes') AS w, word, sum(n) AS n, max(hour(at)) AS h FROM events GROUP BY 1, 2"
    found = []
    for size in ("64m", "0"):
        flow = nosync.Dataflow("f")
        flow.source("events", EVENTS)
        flow.sql("windows", query, spark=spark)
        store = open_store(size)
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        for t in range(2):
            with driver_runs(spark, size):
                job.advance(t, {"events": spark.createDataFrame(given("events", t))})
        found.append(digests(store))
    assert in_driver == [0, 1]
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "loop" else [pytest.mark.long]) for name in MANY]
)
def test_functions_of_users_may_run_in_the_driver(
    name: str, spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    found = []
    for way in ("spark", "both"):
        store = open_store(way)
        job = nosync.Job(MANY[name](), store, spark=spark, shards=2)
        for t, rows in enumerate(INPUTS[name]):
            tables = {
                source: pa.Table.from_pylist(
                    [dict(zip(schema.names, row, strict=True)) for row in rows[source]], schema
                )
                for source, schema in ((source, parse_ddl(SCHEMAS[source])) for source in rows)
            }
            with driver_runs(spark, "64m" if way == "both" else "0", functions=True):
                job.advance(t, {source: spark.createDataFrame(table) for source, table in tables.items()})
        found.append(digests(store))
    assert in_driver == list(range(len(INPUTS[name])))
    assert found[0] == found[1]


def breaks(rows: pa.Table) -> pa.Table:
    if rows.num_rows:
        raise ValueError(f"{rows.num_rows} rows are too many")
    return rows


def test_a_function_that_fails_is_told_as_by_spark(spark: SparkSession, open_store: OpenStore) -> None:
    told = []
    for size in ("64m", "0"):
        flow = nosync.Dataflow("f")
        flow.source("rows", ROWS).map("broken", breaks)
        job = nosync.Job(flow, open_store(size), spark=spark, shards=1)
        with (
            driver_runs(spark, size, functions=True),
            pytest.raises(nosync.StageError, match="rows are too many") as error,
        ):
            job.advance(0, {"rows": spark.createDataFrame(rows_of(0))})
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.few(4)
@pytest.mark.parametrize("key", ["b", "l", "flag", "text", "bytes", "day", "at", "local", "amount", "large"])
def test_every_type_is_fetched_and_hashed_as_by_spark(
    key: str, spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    found = []
    for size in ("64m", "0"):
        flow = nosync.Dataflow("f")
        flow.source("rows", WIDE).select("few", key, "s").aggregate("out", key=[key], n=nosync.count())
        store = open_store(size)
        with driver_runs(spark, size):
            nosync.Job(flow, store, spark=spark, shards=SHARDS).advance(
                0, {"rows": spark.createDataFrame(wide_rows(), WIDE)}
            )
        found.append(digests(store))
    assert in_driver == [0]
    assert found[0] == found[1]


def test_files_are_read_by_the_driver_itself(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], tmp_path: Path
) -> None:
    """No Spark job makes rows of them. Those that are large, by bytes or by rows, are read by tasks."""
    found = []
    for size in ("64m", "0"):
        store = open_store(size)
        job = job_of(by_expression, spark, store)
        for t in range(3):
            path = written(tmp_path / size / f"{t}.parquet", rows_of(t, 2_000 if t == 2 else 50))
            spark.sparkContext.setJobGroup(f"nosync-files-{size}-{t}", "")
            with driver_runs(spark, "40k" if size == "64m" and t == 2 else size):
                job.advance(t, {"rows": spark.read.schema(ROWS).parquet(str(path))})
        found.append(digests(store))
    tracker = spark.sparkContext.statusTracker()
    jobs = [len(tracker.getJobIdsForGroup(f"nosync-files-{size}-{t}")) for size in ("64m", "0") for t in range(3)]
    assert jobs[:2] == [0, 0]
    assert all(jobs[2:])
    assert in_driver == [0, 1]
    assert found[0] == found[1]


def test_a_file_that_is_broken_is_told_as_by_spark(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], tmp_path: Path
) -> None:
    path = written(tmp_path / "0.parquet", rows_of(0), compression="zstd")
    frame = spark.read.schema(ROWS).parquet(str(path))
    damaged = bytearray(path.read_bytes())
    damaged[40:80] = bytes(40)
    path.write_bytes(damaged)
    with driver_runs(spark), pytest.raises(NosyncError, match="Spark job failed"):
        job_of(by_id, spark, open_store()).advance(0, {"rows": frame})
    assert in_driver == []


def test_no_rows_are_not_asked_for(spark: SparkSession, open_store: OpenStore, in_driver: list[int]) -> None:
    """Neither of what is in memory and empty, nor to find out how much there is of the rest."""
    job, nothing = job_of(joined, spark, open_store()), rows_of(0).slice(0, 0)
    cached = spark.createDataFrame(nothing).persist()
    cached.count()
    spark.sparkContext.setJobGroup("nosync-no-rows", "")
    with driver_runs(spark):
        job.advance(0, {"rows": spark.createDataFrame(nothing), "others": cached})
    tracker = spark.sparkContext.statusTracker()
    assert tracker.getJobIdsForGroup("nosync-no-rows") == []
    assert in_driver == [0]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def of_doubles(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", "id bigint, x double").where("large", "x > 1")
    rows.aggregate("out", key=["id"], n=nosync.count())


def of_doubles_later(flow: nosync.Dataflow) -> None:
    """What cannot be computed is between two stages; the first has recorded its layers by then."""
    means = flow.source("rows", "id bigint, x double").aggregate("means", key=["id"], mean=nosync.mean("x"))
    means.where("large", "mean > 1").select("named", "id", "id % 2 AS odd").aggregate(
        "of_all", key=["odd"], n=nosync.count()
    )
    means.where("larger", "mean > 1").aggregate("out", key=["id"], n=nosync.count())


def doubles(spark: SparkSession, *values: float) -> DataFrame:
    return spark.createDataFrame(pa.table({"id": range(len(values)), "x": pa.array(values, pa.float64())}))


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [of_doubles, of_doubles_later])
def test_an_epoch_that_the_driver_cannot_compute_is_run_by_spark_and_so_are_later_ones(
    make: Callable[[nosync.Dataflow], None],
    spark: SparkSession,
    open_store: OpenStore,
    in_driver: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A NaN is larger than all else in Spark, and than nothing in Arrow."""
    caplog.set_level("INFO", "nosync")
    store = open_store()
    job = job_of(make, spark, store)
    with driver_runs(spark):
        job.advance(0, {"rows": doubles(spark, 0.5, 2.0)})
        job.advance(1, {"rows": doubles(spark, 0.5, float("nan"), 3.0)})
        job.advance(2, {"rows": doubles(spark, 7.0)})
    assert in_driver == [0, 1]
    assert "a NaN is left to Spark; Spark computes it, and the job's later epochs" in caplog.text
    out = {row["id"]: row["n"] for row in store.read("out").to_pylist()}
    assert out == ({0: 1, 1: 2, 2: 1} if make is of_doubles else {0: 1, 1: 1, 2: 1})


def test_rows_that_are_others_each_time_are_not_asked_for_again(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    """Where the driver finds that it cannot compute them, some are recorded."""
    flow, store = nosync.Dataflow("f"), open_store()
    rows = flow.source("rows", "id bigint, x double, at timestamp")
    rows.where("large", "x > 1").aggregate("out", key=["id"], n=nosync.count())
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    given = doubles(spark, *[0.5, 2.0] * 20, float("nan"), 1.5).selectExpr("*", "current_timestamp() AS at")
    with driver_runs(spark):
        job.advance(0, {"rows": given})
    assert in_driver == [0]
    assert store.read("rows").num_rows == 42
    assert store.read("out").num_rows == 22


@pytest.mark.parametrize(
    ("condition", "told"),
    [("id > CAST('a' AS INT)", "CAST_INVALID_INPUT"), ("id + 9223372036854775800 > 5", "ARITHMETIC_OVERFLOW")],
)
def test_what_cannot_be_computed_is_told_as_spark_tells_it(
    condition: str, told: str, spark: SparkSession, open_store: OpenStore
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", ROWS).where("wanted", condition).dedupe("out", key=["id"])
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    with driver_runs(spark), pytest.raises(NosyncError, match=told):
        job.advance(0, {"rows": spark.createDataFrame(rows_of(0))})


def test_rows_that_spark_cannot_make_are_told_as_elsewhere(spark: SparkSession, open_store: OpenStore) -> None:
    job = job_of(of_doubles, spark, open_store())
    broken = doubles(spark, 1.0).selectExpr("id", "CAST(raise_error('it is broken') AS DOUBLE) AS x")
    with driver_runs(spark), pytest.raises(NosyncError, match="it is broken"):
        job.advance(0, {"rows": broken})


def test_what_an_epoch_that_died_in_the_driver_left_is_used(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosync.runtime import shard_task

    clean, store = open_store("clean"), open_store("died")
    advance(job_of(placed_by_a_text, spark, clean), spark, 0)
    job, run, calls = job_of(placed_by_a_text, spark, store), shard_task.run_shard, []

    def dies(task: Any, shard: int, batches: Any) -> Any:
        calls.append(shard)
        if len(calls) > SHARDS + 1:
            raise KeyboardInterrupt
        return run(task, shard, batches)

    with driver_runs(spark):
        with monkeypatch.context() as patched:
            patched.setattr(shard_task, "run_shard", dies)
            with pytest.raises(KeyboardInterrupt):
                advance(job, spark, 0)
        assert 0 < len(digests(store)) < len(digests(clean))
        with pytest.raises(nosync.DeterminismError, match=r"job.rewind\(-1\) first"):
            job.advance(0, {"rows": spark.createDataFrame(rows_of(9, 150))})
        advance(job, spark, 0)
    assert digests(store) == digests(clean)
    assert in_driver == [0, 0, 0]


def test_batches_of_a_stream_are_run_by_the_driver(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], tmp_path: Path
) -> None:
    """Spark knows how large the files are that a batch is made of."""
    (tmp_path / "in").mkdir()
    store = open_store()
    job = job_of(by_id, spark, store)
    for t in range(3):
        spark.createDataFrame(rows_of(t, 50)).coalesce(1).write.mode("append").json(str(tmp_path / "in"))
    stream = spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    with driver_runs(spark):
        job.stream({"rows": stream}, checkpoint=tmp_path / "cp", trigger={"availableNow": True}).awaitTermination()
    assert in_driver == [0, 1, 2]
    assert store.read("rows").num_rows == 150
