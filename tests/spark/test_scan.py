"""Files that tasks read themselves: the same layers as when the JVM reads them, and the JVM reads whatever tasks cannot."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.lsm.errors import NosyncError
from tests.conftest import OpenStore
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import (
    FLOWS,
    ROWS,
    ROWS_NAMES,
    SHARDS,
    WIDE,
    by_expression,
    by_id,
    job_of,
    joined,
    rows_of,
    wide_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each run of an epoch that may scan, whether its tasks were to read the files."""
    from nosync.spark import epoch_run as epoch

    found: list[bool] = []
    decide = epoch.files_to_scan

    def spied(*about: Any) -> Any:
        files = decide(*about)
        found.append(bool(files))
        return files

    monkeypatch.setattr(epoch, "files_to_scan", spied)
    return found


def written(path: Path, rows: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, row_group_size=150, **options)
    return path


def advanced(job: nosync.Job, spark: SparkSession, files: Path, sources: list[str], t: int, *, by_jvm: bool) -> None:
    inputs = {}
    for name in sources:
        frame = spark.read.schema(ROWS).parquet(str(written(files / name / f"{t}.parquet", rows_of(t))))
        inputs[name] = frame.select("*") if by_jvm else frame
    job.advance(t, inputs)


@pytest.mark.parametrize("make", FLOWS)
@pytest.mark.long
def test_layers_are_the_same_as_when_the_jvm_reads_the_files(
    make: Callable[[nosync.Dataflow], None],
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    tmp_path: Path,
) -> None:
    found = []
    for by_jvm in (False, True):
        store = open_store(f"by_jvm_{by_jvm}")
        job = job_of(make, spark, store)
        sources = ["rows", "others"] if make is joined else ["rows"]
        for t in range(2):
            advanced(job, spark, tmp_path, sources, t, by_jvm=by_jvm)
        found.append(digests(store))
    assert scans == [True, True, False, False]
    assert found[0] == found[1]
    assert len(found[0]) >= SHARDS * 2 * 2


def test_a_setting_of_the_session_has_the_jvm_read_the_files(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    from nosync.spark.session import conf_set

    job = job_of(by_id, spark, open_store())
    for t, value in enumerate(["true", "false", "true"]):
        with conf_set(spark, {"spark.nosync.scan.enabled": value}):
            advanced(job, spark, tmp_path, ["rows"], t, by_jvm=False)
    assert scans == [True, True]  # it is not even asked what could be scanned in the second one


@pytest.mark.parametrize(
    "key", ["", *[column.split()[0] for column in WIDE.split(", ") if column[0] not in "fd"], "day"]
)
def test_every_type_is_read_and_hashed_as_by_the_jvm(
    key: str, spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    files = str(written(tmp_path / "0.parquet", wide_rows()))
    found = []
    for by_jvm in (False, True):
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", WIDE)
        if key:
            rows.aggregate("out", key=[key], n=nosync.count(), most=nosync.max("d"))
        store = open_store(f"by_jvm_{by_jvm}")
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        frame = spark.read.schema(WIDE).parquet(files)
        job.advance(0, {"rows": frame.select("*") if by_jvm else frame})
        found.append(digests(store))
        assert store.read("rows").num_rows == 300
    assert scans == [True, False]
    assert found[0] == found[1]


@pytest.mark.parametrize("unit", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_files_that_spark_wrote_are_read_as_by_the_jvm(
    unit: str, spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    """Milliseconds are another type."""
    name = "spark.sql.parquet.outputTimestampType"
    spark.conf.set(name, unit)
    try:
        spark.createDataFrame(wide_rows(), WIDE).repartition(3).write.parquet(str(tmp_path / "files"))
    finally:
        spark.conf.unset(name)
    found = []
    for by_jvm in (False, True):
        flow = nosync.Dataflow("f")
        flow.source("rows", WIDE).aggregate("out", key=["at"], n=nosync.count(), most=nosync.max("large"))
        store = open_store(f"by_jvm_{by_jvm}")
        frame = spark.read.schema(WIDE).parquet(str(tmp_path / "files"))
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        job.advance(0, {"rows": frame.select("*") if by_jvm else frame})
        found.append(digests(store))
        assert store.read("rows").num_rows == 300
    assert scans == [unit != "TIMESTAMP_MILLIS", False]
    assert found[0] == found[1]


def test_wide_timestamps_that_others_wrote_are_read_by_the_jvm(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    columns = "id bigint, at timestamp"
    rows = pa.table(
        {"id": [1], "at": pa.array([dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))}
    )
    path = written(tmp_path / "0.parquet", rows, use_deprecated_int96_timestamps=True)
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    store = open_store()
    nosync.Job(flow, store, spark=spark, shards=SHARDS).advance(
        0, {"rows": spark.read.schema(columns).parquet(str(path))}
    )
    assert scans == [False]
    assert store.read("rows").column("at").to_pylist() == rows.column("at").to_pylist()


EXPRESSIONS = [
    "id = 3", "id <> 3", "3 < id", "id <= n", "id >= -5", "n > 2147483647", "name = 'näme 2'", "name < 'näme 3'", "name >= ''",
    "flag", "NOT flag", "flag = true", "flag AND n > 2", "flag OR n IS NULL", "NOT (flag AND n > 2)", "n IN (1, -3, 20)",
    "n IN (id, 3)", "NOT n IN (id, 3)", "3 IN (1, n)",
    "CAST(n AS INT) = 3", "CAST(n AS BIGINT) = 3", f"id IN ({', '.join(map(str, range(-40, 40)))})",
    "NOT n IN (1, 2)", "name IN ('', 'näme 1')", "id IS NULL", "name IS NOT NULL", "id % 10 = 3", "id % 7 = -2",
    "(id + n) % 4 = 1", "id - n > 3", "id * n < -100", "n * 3 = 9", "true", "false"
    ]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_tasks_evaluate_an_expression_as_spark_does(expression: str, spark: SparkSession, tmp_path: Path) -> None:
    from nosync.kernels.expressions import applied
    from nosync.spark.expression_translation import step_of
    from nosync.spark.expressions import analyzed

    rows = rows_of(0)
    frame = spark.createDataFrame([], ROWS)
    for query in (frame.where(expression), frame.selectExpr("*", f"{expression} AS made", "1 AS one")):
        step = step_of(analyzed(query))
        assert step is not None
        given = spark.createDataFrame(rows)
        there = (
            given.where(expression) if step.condition else given.selectExpr("*", f"{expression} AS made", "1 AS one")
        )
        made, numbers = applied([step], rows)
        assert made.to_pylist() == there.toArrow().to_pylist()
        assert made.select(rows.column_names).equals(rows.take(pa.array(numbers)))


OTHERS = [
    "id = 1.5", "d > 1", "id / 2 > 1", "id % n = 1", "id % 0 = 1", "id % -3 = 1", "upper(name) = 'A'", "id = NULL", "id <=> 3",
    "n IN (1, NULL)", "CAST(id AS INT) = 3", "name = 3", "name LIKE 'n%'", "day > '2020-01-01'", "name || 'x' = 'x'", "-id > 3",
    "IF(flag, id, n) = 3", " + ".join(["id"] * 60) + " > 3", "try_add(id, n) = 3", "id BETWEEN -3 AND 17",
]  # fmt: skip


@pytest.mark.parametrize("terms", [300, 2000])
def test_a_long_expression_costs_nothing_and_fails_nowhere(
    terms: int, spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    is_sum = terms == 300
    expression = " + ".join(["id"] * terms) + " > 3" if is_sum else f"id IN ({', '.join(map(str, range(terms)))})"
    flow = nosync.Dataflow("f")
    flow.source("rows", ROWS).where("wanted", expression).dedupe("out", key=["id"])
    store = open_store()
    advanced(nosync.Job(flow, store, spark=spark, shards=SHARDS), spark, tmp_path, ["rows"], 0, by_jvm=False)
    assert scans == [False]
    ids = {id for id in rows_of(0).column("id").to_pylist() if id is not None and id >= is_sum}
    assert {*store.read("out").column("id").to_pylist()} == ids


@pytest.mark.parametrize("expression", OTHERS)
def test_other_expressions_are_left_to_spark(expression: str, spark: SparkSession) -> None:
    from nosync.spark.expression_translation import step_of
    from nosync.spark.expressions import analyzed

    frame = spark.createDataFrame([], f"{ROWS}, d double, day date")
    assert step_of(analyzed(frame.where(expression))) is None
    assert step_of(analyzed(frame.selectExpr(f"{expression} AS made"))) is None


def test_columns_are_found_by_whatever_case_they_are_asked_for(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    found = []
    for by_jvm in (False, True):
        flow = nosync.Dataflow("f")
        rows = flow.source("rows", ROWS).where("some", "N > 3").select("few", "ID", "Name AS label", "ID % 7 AS w")
        rows.dedupe("out", key=["w"])
        store = open_store(f"by_jvm_{by_jvm}")
        advanced(nosync.Job(flow, store, spark=spark, shards=SHARDS), spark, tmp_path, ["rows"], 0, by_jvm=by_jvm)
        assert store.read("out").column_names == ["w", "ID", "label"]
        found.append(digests(store))
    assert scans == [True, False]
    assert found[0] == found[1]


def test_columns_that_others_of_the_same_select_make_are_left_to_spark(spark: SparkSession) -> None:
    from nosync.spark.expression_translation import step_of
    from nosync.spark.expressions import analyzed

    assert step_of(analyzed(spark.createDataFrame([], ROWS).selectExpr("id + 1 AS more", "more + 1 AS most"))) is None


# --- what the JVM reads -----------------------------------------------------------------------------------------------


def plain(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(ROWS).parquet(str(written(path / "plain.parquet", rows_of(0))))


def csv(spark: SparkSession, path: Path) -> DataFrame:
    plain(spark, path).write.csv(str(path / "csv"))
    return spark.read.schema(ROWS).csv(str(path / "csv"))


def cached(spark: SparkSession, path: Path) -> DataFrame:
    """What was cached stays what it is."""
    frame = plain(spark, path)
    spark.read.schema(ROWS).parquet(str(path / "plain.parquet")).cache().count()
    written(path / "plain.parquet", rows_of(0).slice(0, 7))
    return frame


def filtered(spark: SparkSession, path: Path) -> DataFrame:
    return plain(spark, path).where("id > 3")


def of_partitions(spark: SparkSession, path: Path) -> DataFrame:
    """Where a column is both in the files and in the directory's name, the name counts."""
    written(path / "parts" / "n=7" / "a.parquet", rows_of(0))
    return spark.read.parquet(str(path / "parts")).select("id", "name", "n", "flag")


def of_partitions_alone(spark: SparkSession, path: Path) -> DataFrame:
    written(path / "parts" / "n=7" / "a.parquet", rows_of(0))
    return spark.read.schema(ROWS).parquet(str(path / "parts"))


def widened(spark: SparkSession, path: Path) -> DataFrame:
    rows = rows_of(0)
    narrow = rows.set_column(0, "id", rows.column("id").cast(pa.int32()))
    return spark.read.schema(ROWS).parquet(str(written(path / "narrow.parquet", narrow)))


def without_a_column(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(ROWS).parquet(str(written(path / "less.parquet", rows_of(0).drop_columns(["n"]))))


def in_another_case(spark: SparkSession, path: Path) -> DataFrame:
    upper = rows_of(0).rename_columns(["ID", "name", "n", "flag"])
    return spark.read.schema(ROWS).parquet(str(written(path / "upper.parquet", upper)))


def one_file_of_two(spark: SparkSession, path: Path) -> DataFrame:
    written(path / "two" / "a.parquet", rows_of(0))
    written(path / "two" / "b.parquet", rows_of(0).drop_columns(["n"]))
    return spark.read.schema(ROWS).parquet(str(path / "two"))


def beside_metadata(spark: SparkSession, path: Path) -> DataFrame:
    """Which Spark lists, and does not read."""
    written(path / "some" / "a.parquet", rows_of(0))
    pq.write_metadata(rows_of(0).schema, path / "some" / "_common_metadata")
    return spark.read.schema(ROWS).parquet(str(path / "some"))


def longer_by_now(spark: SparkSession, path: Path) -> DataFrame:
    """Spark reads as much of a file as it had when the DataFrame was made."""
    frame = plain(spark, path)
    written(path / "plain.parquet", pa.concat_tables([rows_of(t) for t in range(20)]))
    return frame


def many_files(spark: SparkSession, path: Path) -> DataFrame:
    for i in range(17):
        written(path / "many" / f"{i}.parquet", rows_of(i, 3))
    return spark.read.schema(ROWS).parquet(str(path / "many"))


@pytest.mark.parametrize(
    "given",
    [csv, cached, filtered, of_partitions, of_partitions_alone, widened, without_a_column, in_another_case, one_file_of_two,
     many_files, beside_metadata, longer_by_now],
)  # fmt: skip
@pytest.mark.long
def test_the_jvm_reads_what_is_not_just_such_files(
    given: Callable[[SparkSession, Path], DataFrame],
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The log says why."""
    caplog.set_level("DEBUG", "nosync")
    frame = given(spark, tmp_path)
    expected = sorted(map(repr, frame.toArrow().select(ROWS_NAMES).to_pylist()))
    store = open_store()
    try:
        job_of(by_id, spark, store).advance(0, {"rows": frame})
    finally:
        spark.catalog.clearCache()
    assert scans == [False]
    assert "flow f: its input is read by the JVM: " in caplog.text
    assert sorted(map(repr, store.read("rows").to_pylist())) == expected


@pytest.mark.parametrize("what", ["_INDEX", "_FORMAT"])
def test_tables_whose_files_are_parquet_are_read_by_the_jvm(
    what: str,
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those of Delta show as Parquet in a plan, and know which rows of their files count. Here Spark's own stand for them."""
    from nosync.spark import parquet_inputs as files

    monkeypatch.setattr(files, what, "another")
    advanced(job_of(by_id, spark, open_store()), spark, tmp_path, ["rows"], 0, by_jvm=False)
    assert scans == [False]


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("MOST_SHARDS", SHARDS - 1, "each of 3 shards would read all"), ("MOST_BYTES", 1000, "bytes")],
)
def test_what_would_be_too_much_for_each_task_is_read_by_the_jvm(
    limit: str,
    value: int,
    reason: str,
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    from nosync.spark import parquet_inputs as files

    caplog.set_level("DEBUG", "nosync")
    monkeypatch.setattr(files, limit, value)
    advanced(job_of(by_id, spark, open_store()), spark, tmp_path, ["rows"], 0, by_jvm=False)
    assert scans == [False]
    assert reason in caplog.text


@pytest.mark.parametrize("type_", ["array<bigint>", "struct<a: bigint>"])
def test_columns_that_tasks_do_not_hash_are_read_by_the_jvm(
    type_: str, spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    columns = f"id bigint, more {type_}"
    spark.range(9).selectExpr("id", f"CAST(NULL AS {type_}) AS more").write.parquet(str(tmp_path / "files"))
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    job.advance(0, {"rows": spark.read.schema(columns).parquet(str(tmp_path / "files"))})
    assert scans == [False]
    assert store.read("rows").num_rows == 9


def test_files_with_dates_of_another_calendar_are_read_by_the_jvm(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    """Which they have by what is written in them, or by what Spark is told of those in which nothing is written."""
    columns, default = "id bigint, day date", "spark.sql.parquet.datetimeRebaseModeInRead"
    rows = pa.table({"id": [1, 2], "day": [dt.date(1500, 3, 1), dt.date(2026, 1, 1)]})
    written_by = {
        "rebased": {b"org.apache.spark.version": b"4.1.0", b"org.apache.spark.legacyDateTime": b""},
        "before": {b"org.apache.spark.version": b"2.4.8"},
        "unclear": {b"org.apache.spark.version": b"4.x"},
        "now": {b"org.apache.spark.version": b"4.1.0"},
        "others": {},
    }
    paths = [
        str(written(tmp_path / f"{name}.parquet", rows.replace_schema_metadata(m))) for name, m in written_by.items()
    ]
    reader = spark.read.schema(columns)
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    days = []

    def advance(frame: DataFrame) -> None:
        t = len(days)
        expected = sorted(row["day"] for row in frame.toArrow().to_pylist())
        job.advance(t, {"rows": frame})
        days.append(sorted(store.changes("rows", t - 1, t).column("day").to_pylist()))
        assert days[-1] == expected

    for path in paths:
        advance(reader.parquet(path))
    spark.conf.set(default, "LEGACY")
    try:
        advance(reader.parquet(paths[-1]))
    finally:
        spark.conf.unset(default)
    advance(spark.read.schema(columns).option("datetimeRebaseMode", "LEGACY").parquet(paths[-1]))
    assert scans == [False, False, False, True, True, False, False]
    as_written = sorted(rows.column("day").to_pylist())
    assert [day == as_written for day in days[:2]] == [False, False]
    assert days[3:5] == [as_written] * 2


# --- what tasks cannot read after all ---------------------------------------------------------------------------------


def test_where_a_task_cannot_compute_what_spark_does_not_ask_for_the_jvm_does(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    """The sum of two numbers overflows, but only where the first condition has failed. Later epochs do not try again."""
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", ROWS).where("small", "id < 8 AND id + 9223372036854775800 > 5")
    rows.dedupe("out", key=["id"])
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    for t in range(2):
        rows_of_epoch = pa.table(
            {**{n: rows_of(t).column(n) for n in ROWS_NAMES}, "id": pa.array(range(400), pa.int64())}
        )
        frame = spark.read.schema(ROWS).parquet(str(written(tmp_path / f"{t}.parquet", rows_of_epoch)))
        job.advance(t, {"rows": frame})
    assert scans == [True]
    assert sorted(store.read("out").column("id").to_pylist()) == list(range(8))
    assert store.read("rows").num_rows == 800


def test_spark_says_what_is_wrong_where_an_expression_overflows(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", ROWS).where("large", "id + 9223372036854775800 > 5").dedupe("out", key=["id"])
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    frame = spark.read.schema(ROWS).parquet(str(written(tmp_path / "0.parquet", rows_of(0))))
    with pytest.raises(NosyncError, match="overflow"):
        job.advance(0, {"rows": frame})


def test_a_file_that_changes_meanwhile_is_not_read_in_two_versions(
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    from nosync.spark import parquet_inputs as files

    caplog.set_level("INFO", "nosync")

    store = open_store()
    job = job_of(by_id, spark, store)
    path = written(tmp_path / "0.parquet", rows_of(0))
    look = files._size_bytes

    def replaced_after(*about: Any, **more: Any) -> Any:
        size = look(*about, **more)
        written(tmp_path / "new.parquet", rows_of(1))
        os.replace(tmp_path / "new.parquet", path)
        return size

    monkeypatch.setattr(files, "_size_bytes", replaced_after)
    job.advance(0, {"rows": spark.read.schema(ROWS).parquet(str(path))})
    assert scans == [True]
    assert "0.parquet is not the file any more that it was when the epoch began; the JVM reads them" in caplog.text
    assert sorted(map(repr, store.read("rows").to_pylist())) == sorted(map(repr, rows_of(1).to_pylist()))


def test_a_damaged_page_is_told_by_spark(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    job = job_of(by_id, spark, open_store())
    path = written(tmp_path / "0.parquet", rows_of(0), compression="zstd")
    frame = spark.read.schema(ROWS).parquet(str(path))
    damaged = bytearray(path.read_bytes())
    damaged[40:80] = bytes(40)
    path.write_bytes(damaged)
    with pytest.raises(NosyncError, match="Spark job failed"):
        job.advance(0, {"rows": frame})
    assert scans == [True]


def test_a_file_that_is_gone_is_told_by_spark(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    job = job_of(by_id, spark, open_store())
    path = written(tmp_path / "0.parquet", rows_of(0))
    frame = spark.read.schema(ROWS).parquet(str(path))
    path.unlink()
    with pytest.raises(NosyncError, match=r"0\.parquet"):
        job.advance(0, {"rows": frame})
    assert scans == [False]


def test_no_rows_at_all(spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path) -> None:
    store = open_store()
    job = job_of(by_expression, spark, store)
    (tmp_path / "empty").mkdir()
    job.advance(0, {"rows": spark.read.schema(ROWS).parquet(str(tmp_path / "empty"))})
    job.advance(1, {"rows": spark.read.schema(ROWS).parquet(str(written(tmp_path / "1.parquet", rows_of(0, 0))))})
    assert scans == [True, True]
    assert store.read("out").num_rows == 0


def test_a_path_with_special_characters(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    store = open_store()
    job = job_of(by_id, spark, store)
    path = written(tmp_path / "of März, 100% + more" / "#0.parquet", rows_of(0))
    job.advance(0, {"rows": spark.read.schema(ROWS).parquet(str(path))})
    assert scans == [True]
    assert store.read("rows").num_rows == 400


def test_a_lost_source_is_recovered_from_the_files(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    store = open_store()
    job = job_of(by_id, spark, store)
    advanced(job, spark, tmp_path, ["rows"], 0, by_jvm=False)
    before = digests(store)
    for layer in list(store.layers()):
        if "rows" in str(layer.path):
            Path(layer.path).unlink()
    store.close()
    store = open_store()
    job = job_of(by_id, spark, store)
    job.recover(inputs={0: {"rows": spark.read.schema(ROWS).parquet(str(tmp_path / "rows" / "0.parquet"))}})
    assert digests(store) == before
    assert scans == [True, True]
