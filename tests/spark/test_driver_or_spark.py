"""Which epochs the driver runs by itself, and which are left to Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync import Stage
from nosync.replication.client.location import StoreLocation
from nosync.runtime.epoch_plan import EpochPlan
from nosync.spark.schemas import parse_ddl
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import ROWS, by_id, by_nothing, job_of, rows_of
from tests.helpers.scanning import written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


PLAN = EpochPlan(StoreLocation("state", 1024), 3, 2)


@pytest.mark.parametrize(
    ("plans", "is_of_driver"),
    [
        ([PLAN], True),
        ([PLAN, replace(PLAN, t=4)], False),
        ([replace(PLAN, compute={"out": frozenset({0})})], False),
        ([replace(PLAN, skip=frozenset({"rows"}))], False),
        ([replace(PLAN, location=StoreLocation("state", 1024, store_id="of daemons"))], False),
    ],
    ids=["an epoch", "a backfill", "a recovery", "a replay", "with daemons"],
)
def test_only_new_epochs_of_one_directory_are_run_by_the_driver(
    plans: list[EpochPlan], is_of_driver: bool, spark: SparkSession, open_store: OpenStore
) -> None:
    from nosync.spark.driver_epochs import DriverEpochs

    flow = job_of(by_id, spark, open_store()).flow
    assert DriverEpochs().may_run(spark, flow.fused, plans) == is_of_driver
    begins_anew = replace(flow, stages={**flow.stages, "out": replace(flow.stages["out"], bootstrap_at=3)})
    assert not DriverEpochs().may_run(spark, begins_anew.fused, plans)


def many_rows(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(rows_of(0, 400))


def rows_of_unknown_number(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(rows_of(0, 10).to_pylist(), ROWS)


@pytest.mark.parametrize(
    ("make", "rows", "size", "why"),
    [
        (by_id, many_rows, "2k", "bytes, by what is known of them, and the driver runs 2,048"),
        (by_id, many_rows, "0", "spark.nosync.driver.maxBytes is 0"),
        (by_id, rows_of_unknown_number, "1g", "nothing is known of how many rows it has"),
        (
            by_nothing,
            many_rows,
            "64m",
            "stage same has a function, and spark.nosync.driver.functions.enabled is not true",
        ),
    ],
)
def test_spark_runs_what_is_large_or_needs_it(
    make: Callable[[nosync.Dataflow], None],
    rows: Callable[[SparkSession], DataFrame],
    size: str,
    why: str,
    spark: SparkSession,
    open_store: OpenStore,
    in_driver: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "nosync")
    job = job_of(make, spark, open_store())
    with driver_runs(spark, size):
        job.advance(0, {"rows": rows(spark)})
    assert in_driver == []
    assert why in caplog.text


@pytest.mark.parametrize(
    ("columns", "make"),
    [
        ("id bigint, tags array<string>", lambda rows: rows.aggregate("out", key=["id"], n=nosync.count())),
        (
            "id bigint, x double",
            lambda rows: rows.where("w", "sqrt(x) > 1").aggregate("o", key=["id"], n=nosync.count()),
        ),
        ("id bigint, x double", lambda rows: rows.update("u", key=["id"], state="x double", fn=lambda new, old: new)),
    ],
)
def test_flows_of_other_kinds_are_run_by_spark(
    columns: str, make: Callable[[Stage], Any], spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    flow = nosync.Dataflow("f")
    make(flow.source("rows", columns))
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    with driver_runs(spark):
        job.advance(0, {"rows": spark.createDataFrame(parse_ddl(columns).empty_table())})
    assert in_driver == []


def test_functions_that_come_with_views_are_run_by_the_driver(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, open_store: OpenStore
) -> None:
    from nosync.spark.driver_epochs import DriverEpochs

    caplog.set_level("DEBUG", "nosync")
    flow = nosync.Dataflow("f")
    flow.table("t", "id bigint, k string, x bigint", key=["id"])
    queries = [
        "SELECT id FROM t ORDER BY x, id LIMIT 3",
        "SELECT id, sum(x) OVER (PARTITION BY k) AS s FROM t",
        "SELECT id FROM t WHERE x > (SELECT x FROM t WHERE id = 1)",
        "SELECT k FROM t INTERSECT ALL SELECT k FROM t WHERE x > 1",
        "SELECT count(*) AS n FROM t",
    ]
    for i, query in enumerate(queries):
        flow.sql(f"v{i}", query, spark=spark)
    bound = nosync.Job(flow, open_store(), spark=spark, shards=2).flow.fused
    assert DriverEpochs().may_run(spark, bound, [PLAN]), caplog.text


def test_workers_run_shards_where_epochs_take_a_while(
    spark: SparkSession,
    open_store: OpenStore,
    workers_asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not the functions of users, which see the driver's process, or a single shard."""
    from nosync.spark import driver_epochs

    monkeypatch.setattr(driver_epochs, "_WORTH_EPOCHS", 2)
    job = job_of(by_id, spark, open_store())
    for took, epochs in ((1000.0, range(3)), (0.0, range(3, 7))):
        monkeypatch.setattr(driver_epochs, "_WORTH_S", took)
        for t in epochs:
            with driver_runs(spark, cores="4"):
                job.advance(t, {"rows": spark.createDataFrame(rows_of(t, 20))})
    assert set(workers_asked) == {5, 6}
    workers_asked.clear()
    monkeypatch.setattr(driver_epochs, "_WORTH_EPOCHS", 0)
    for i, (make, shards, cores) in enumerate(((by_nothing, 2, "4"), (by_id, 1, "4"), (by_id, 2, "1"))):
        flow = nosync.Dataflow("f")
        make(flow)
        job = nosync.Job(flow, open_store(str(i)), spark=spark, shards=shards)
        with driver_runs(spark, functions=True, cores=cores):
            job.advance(0, {"rows": spark.createDataFrame(rows_of(0, 20))})
    assert workers_asked == []


@pytest.mark.parametrize(
    ("master", "settings", "cores"),
    [
        ("local[2]", {}, 2),
        ("local[*]", {}, 8),
        ("local[64, 2]", {}, 8),
        ("local", {}, 1),
        ("local[4]", {"spark.nosync.driver.cores": "3"}, 3),
        ("yarn", {}, 1),
        ("k8s://https://host:443", {"spark.driver.cores": "4"}, 4),
        ("spark://host:7077", {"spark.driver.cores": "4", "spark.nosync.driver.cores": "1"}, 1),
    ],
)
def test_the_driver_has_as_many_cores_as_spark_gives_it(
    master: str, settings: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosync.spark import driver_epochs

    monkeypatch.setattr(driver_epochs.os, "sched_getaffinity", lambda _: set(range(8)))
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master), conf=settings)
    assert driver_epochs._cores(session) == cores


def test_a_setting_that_is_no_number_of_cores_is_an_error_that_names_it(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosync.spark import driver_epochs

    monkeypatch.setattr(driver_epochs, "_WORTH_EPOCHS", 0)
    job = job_of(by_id, spark, open_store())
    for value in ("0", "two", "-1", "1.5"):
        with driver_runs(spark, cores=value), pytest.raises(nosync.FlowError, match="expected a number of cores"):
            job.advance(0, {"rows": spark.createDataFrame(rows_of(0, 20))})
    job.advance(0, {"rows": spark.createDataFrame(rows_of(0, 20))})


def test_a_setting_that_is_no_size_is_an_error_that_names_it(spark: SparkSession, open_store: OpenStore) -> None:
    job = job_of(by_id, spark, open_store())
    with (
        driver_runs(spark, "many"),
        pytest.raises(nosync.FlowError, match=r"spark.nosync.driver.maxBytes is 'many', expected a size such as '4m'"),
    ):
        job.advance(0, {"rows": many_rows(spark)})
    with driver_runs(spark, "4m"):
        job.advance(0, {"rows": many_rows(spark)})


def test_replays_and_recoveries_are_run_by_spark(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    store = open_store(retain=100)
    job = job_of(by_id, spark, store)
    with driver_runs(spark):
        for t in range(2):
            job.advance(t, {"rows": spark.createDataFrame(rows_of(t))})
        before = digests(store)
        lost = [path for path in store.directory.root.rglob("*.layer") if "out" in str(path)]
        for path in lost:
            path.unlink()
        assert job.recover().recomputed == len(lost)
    assert in_driver == [0, 1]
    assert digests(store) == before


def of_a_constant(flow: nosync.Dataflow) -> None:
    rows = flow.source("rows", "id bigint, day date").where("w", "day = CAST(TIMESTAMP '2020-01-01 00:00:00Z' AS DATE)")
    rows.select("said", "id", "CAST(TIMESTAMP '2020-01-01 00:00:00Z' AS STRING) AS text").dedupe("out", key=["id"])


@pytest.mark.parametrize("by_scan", [False, True])
def test_constants_are_computed_in_the_zone_of_epochs(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], tmp_path: Path, by_scan: bool
) -> None:
    """Epochs run in UTC, whatever the zone is of the session that a job is made in."""
    from nosync.spark.session import conf_set

    days = [dt.date(2020, 1, 1), dt.date(2019, 12, 31)]
    table = pa.table({"id": [1, 2], "day": pa.array(days, pa.date32())})
    rows = spark.createDataFrame(table)
    if by_scan:
        rows = spark.read.schema("id bigint, day date").parquet(str(written(tmp_path / "0.parquet", table)))
    with conf_set(spark, {"spark.sql.session.timeZone": "America/New_York"}):
        store = open_store()
        job = job_of(of_a_constant, spark, store)
        with driver_runs(spark, "0" if by_scan else "64m"):
            job.advance(0, {"rows": rows})
    assert store.read("out").to_pylist() == [{"id": 1, "text": "2020-01-01 00:00:00"}]
    assert in_driver == ([] if by_scan else [0])


def test_a_cached_table_with_old_statistics_is_not_taken_to_be_empty(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    from nosync.spark.session import conf_set

    path = str(tmp_path / "t")
    spark.range(0).write.parquet(path)
    spark.sql(f"CREATE TABLE of_old_statistics (id BIGINT) USING parquet LOCATION '{path}'")
    try:
        spark.sql("ANALYZE TABLE of_old_statistics COMPUTE STATISTICS")
        spark.range(10).write.mode("append").parquet(path)
        spark.sql("REFRESH TABLE of_old_statistics")
        flow = nosync.Dataflow("f")
        flow.source("rows", "id bigint").dedupe("out", key=["id"])
        store = open_store()
        job = nosync.Job(flow, store, spark=spark, shards=2)
        with driver_runs(spark), conf_set(spark, {"spark.sql.cbo.enabled": "true"}):
            rows = spark.table("of_old_statistics").persist()
            job.advance(0, {"rows": rows})
        rows.unpersist()
        assert store.read("out").num_rows == 10
    finally:
        spark.sql("DROP TABLE of_old_statistics")


def test_spark_runs_the_epoch_after_a_large_one(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "nosync")
    job = job_of(by_id, spark, open_store())
    with driver_runs(spark, "4k"):
        for t, n in enumerate([10, 2_000, 10, 10]):
            job.advance(t, {"rows": spark.createDataFrame(rows_of(t, n))})
    assert in_driver == [0, 3]
    assert "the epoch before had many" in caplog.text


def of_one_row(spark: SparkSession) -> DataFrame:
    return spark.range(1).selectExpr("explode(sequence(id, id + 2000000)) AS id")


def of_small_files(spark: SparkSession, path: Path) -> DataFrame:
    spark.range(0, 2_000_000, 1, 1).selectExpr("id * 0 AS id").write.parquet(str(path))
    return spark.read.parquet(str(path)).where("id >= 0")


@pytest.mark.long
@pytest.mark.parametrize("is_file", [pytest.param(False, marks=pytest.mark.long), True])
def test_more_rows_than_spark_knows_of_are_not_fetched(
    is_file: bool, spark: SparkSession, open_store: OpenStore, in_driver: list[int],
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    """Files of equal rows are small, and of a function that makes rows Spark knows nothing."""
    caplog.set_level("DEBUG", "nosync")
    flow = nosync.Dataflow("f")
    flow.source("rows", "id bigint").where("few", "id < 3").aggregate("out", key=["id"], n=nosync.count())
    store = open_store()
    with driver_runs(spark, "64k"):
        nosync.Job(flow, store, spark=spark, shards=2).advance(
            0, {"rows": of_small_files(spark, tmp_path / "small") if is_file else of_one_row(spark)}
        )
    assert in_driver == []
    assert "source rows has more than 1,638 rows, which is more than was known" in caplog.text
    assert store.read("out").num_rows == (1 if is_file else 3)


@pytest.mark.parametrize(("letters", "is_of_driver"), [(1, True), (200, False)])
def test_files_count_by_what_their_rows_take_in_memory(
    letters: int, is_of_driver: bool, spark: SparkSession, open_store: OpenStore, in_driver: list[int], tmp_path: Path
) -> None:
    """Equal texts are next to nothing in a file. By their columns alone as many rows would be too many either way."""
    names = [f"c{i}" for i in range(20)]
    flow = nosync.Dataflow("f")
    flow.source("rows", "id bigint, " + ", ".join(f"{name} string" for name in names)).aggregate(
        "out", key=["id"], n=nosync.count()
    )
    table = pa.table({"id": list(range(1_000)), **dict.fromkeys(names, ["x" * letters] * 1_000)})
    frame = spark.read.parquet(str(written(tmp_path / "wide.parquet", table)))
    with driver_runs(spark, "256k"):
        nosync.Job(flow, open_store(), spark=spark, shards=1).advance(0, {"rows": frame})
    assert in_driver == ([0] if is_of_driver else [])


def test_batches_of_which_nothing_is_known_are_few_where_the_one_before_had_few(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The first is run by Spark, for nothing was before it. A large one is, too, and so is the next."""
    caplog.set_level("DEBUG", "nosync")
    store = open_store()
    job, sizes = job_of(by_id, spark, store), [20, 30, 0, 1_000, 5_000, 10, 10]
    with driver_runs(spark, "200k"):
        for t, n in enumerate(sizes):
            job.advance(t, {"rows": spark.createDataFrame(rows_of(t, n).to_pylist(), ROWS)})
    assert in_driver == [1, 2, 3, 6]
    assert "source rows has more than 4,000 rows, which is more than was known, or than before" in caplog.text
    assert store.read("rows").num_rows == sum(sizes)


def test_sources_are_fetched_as_jobs_of_the_callers_group(
    spark: SparkSession, open_store: OpenStore, in_driver: list[int]
) -> None:
    """They are fetched at once, in threads of their own. Of three cached ones, the empty one needs no job."""
    flow = nosync.Dataflow("f")
    tables = {name: flow.table(name, "id bigint, x bigint", key=["id"]) for name in ("a", "b", "c")}
    tables["a"].join("ab", tables["b"].select("renamed", "id", "x AS y"), on=["id"])
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    rows = pa.table({"id": range(9), "x": range(9)})
    given = {name: spark.createDataFrame(rows.slice(0, n)).persist() for name, n in (("a", 9), ("b", 7), ("c", 0))}
    for frame in given.values():
        frame.count()
    context = spark.sparkContext
    context.setJobGroup("an epoch of tables", "")
    try:
        with driver_runs(spark):
            job.advance(0, given)
        jobs = context.statusTracker().getJobIdsForGroup("an epoch of tables")
    finally:
        context._jsc.clearJobGroup()
        for frame in given.values():
            frame.unpersist()
    assert in_driver == [0]
    assert job.read("ab").count() == 7
    # A limit, of rows whose number is not known, would make it two for each.
    assert len(jobs) == 2
