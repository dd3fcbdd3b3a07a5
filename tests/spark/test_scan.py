"""Files that tasks read themselves: the same layers as when the JVM reads them, and the JVM reads whatever tasks cannot."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
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
from tests.helpers.scanning import advanced, by_both_ways, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("make", FLOWS)
@pytest.mark.long
def test_layers_are_the_same_as_when_the_jvm_reads_the_files(
    make: Callable[[nosync.Dataflow], None],
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    tmp_path: Path,
) -> None:
    sources = ["rows", "others"] if make is joined else ["rows"]
    by_tasks, by_jvm = by_both_ways(make, spark, open_store, tmp_path, sources, epochs=2)
    assert scans == [True, True, False, False]
    assert by_tasks == by_jvm
    assert len(by_tasks) >= SHARDS * 2 * 2


def test_a_setting_of_the_session_has_the_jvm_read_the_files(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    from nosync.spark.session import conf_set

    job = job_of(by_id, spark, open_store())
    for t, value in enumerate(["true", "false", "true"]):
        with conf_set(spark, {"spark.nosync.scan.enabled": value}):
            advanced(job, spark, tmp_path, ["rows"], t, by_jvm=False)
    assert scans == [True, True]  # it is not even asked what could be scanned in the second one


@pytest.mark.few(5)
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
        job.advance(0, {"rows": frame.where("true") if by_jvm else frame})
        found.append(digests(store))
        assert store.read("rows").num_rows == 300
    assert scans == [True, False]
    assert found[0] == found[1]


@pytest.mark.few(1)
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
        job.advance(0, {"rows": frame.where("true") if by_jvm else frame})
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


@pytest.mark.few(1)
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


@pytest.mark.long
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
