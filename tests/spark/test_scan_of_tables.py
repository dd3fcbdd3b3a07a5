"""Changes of tables, and some columns of files, which tasks or the driver read themselves: as when the JVM reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.orders import digests
from tests.helpers.rows_by_two_ways import ROWS, by_id, job_of, rows_of
from tests.helpers.scanning import written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

TABLE = "id bigint, name string, n double"
CHANGES = f"{TABLE}, _change_type string"


def changes(t: int) -> pa.Table:
    """Each epoch deletes some of the keys of the one before, changes others, and adds some."""
    ids = list(range(10 * t, 10 * t + 40))
    kinds = ["insert" if t == 0 or i >= 10 * t + 30 else "delete" if i % 3 == 0 else "update_postimage" for i in ids]
    rows = {"id": ids, "name": [f"name {i}" for i in ids], "n": [i / (t + 1) for i in ids], "_change_type": kinds}
    return pa.table(
        rows, pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.float64()), ("_change_type", pa.string())])
    )


def with_changes(spark: SparkSession, path: Path, t: int) -> DataFrame:
    return spark.read.schema(CHANGES).parquet(str(written(path / f"{t}.parquet", changes(t))))


def upserts(spark: SparkSession, path: Path, t: int) -> DataFrame:
    """The rows say nothing of what they are, though the files have a column that does."""
    return spark.read.schema(TABLE).parquet(str(written(path / f"{t}.parquet", changes(t))))


def upserts_alone(spark: SparkSession, path: Path, t: int) -> DataFrame:
    rows = changes(t).drop_columns(["_change_type"])
    return spark.read.schema(TABLE).parquet(str(written(path / f"{t}.parquet", rows)))


def some_columns(spark: SparkSession, path: Path, t: int) -> DataFrame:
    more = changes(t).append_column("more", pa.repeat("x", 40))
    frame = spark.read.parquet(str(written(path / f"{t}.parquet", more)))
    return frame.select("_change_type", "n", "name", "id")


def beside_another_column(spark: SparkSession, path: Path, t: int) -> DataFrame:
    """A column of the name that the source has for the change types: the frame's own counts, and is left out."""
    more = changes(t).append_column("change_type", pa.repeat("delete", 40))
    return spark.read.parquet(str(written(path / f"{t}.parquet", more)))


def said_by_an_expression(spark: SparkSession, path: Path, t: int) -> DataFrame:
    from pyspark.sql import functions as F

    return upserts_alone(spark, path, t).withColumn("_change_type", F.lit("delete" if t == 2 else "insert"))


def computed(spark: SparkSession, path: Path, t: int) -> DataFrame:
    from pyspark.sql import functions as F

    return with_changes(spark, path, t).withColumn("n", F.col("n") + 1)


def run(
    job: nosync.Job, given: Callable[[SparkSession, Path, int], DataFrame], spark: SparkSession, path: Path
) -> None:
    for t in range(3):
        job.advance(t, {"items": given(spark, path, t)})


@pytest.mark.parametrize("max_bytes", ["0", "4m"])
@pytest.mark.parametrize(
    ("given", "is_scanned"),
    [(with_changes, True), (upserts, True), (upserts_alone, True), (some_columns, True), (beside_another_column, True),
     (said_by_an_expression, False), (computed, False)],
)  # fmt: skip
def test_a_table_has_the_same_layers_whoever_reads_its_changes(
    given: Callable[[SparkSession, Path, int], DataFrame],
    is_scanned: bool,
    max_bytes: str,
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    in_driver: list[int],
    tmp_path: Path,
) -> None:
    from nosync.spark.session import DRIVER_MAX_BYTES, SCAN_ENABLED, conf_set

    found, states = [], []
    for by_jvm in (False, True):
        flow = nosync.Dataflow("f")
        flow.table("items", TABLE, key=["id"]).aggregate("sums", key=["name"], n=nosync.sum("n"))
        with conf_set(spark, {DRIVER_MAX_BYTES: "0" if by_jvm else max_bytes, SCAN_ENABLED: str(not by_jvm).lower()}):
            store = open_store(f"by_jvm_{by_jvm}")
            run(nosync.Job(flow, store, spark=spark, shards=2), given, spark, tmp_path / str(by_jvm))
            found.append(digests(store))
            states.append(sorted(map(repr, store.read("items").to_pylist())))
    assert scans == [is_scanned] * 3
    assert in_driver == ([0, 1, 2] if max_bytes != "0" else [])
    assert found[0] == found[1]
    assert states[0] == states[1]
    assert states[0] or given is said_by_an_expression


def test_some_columns_of_files_are_read_without_the_jvm(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    found = []
    for by_jvm in (False, True):
        store = open_store(f"by_jvm_{by_jvm}")
        job = job_of(by_id, spark, store)
        for t in range(2):
            rows = rows_of(t).append_column("more", pa.repeat("x", rows_of(t).num_rows))
            frame = spark.read.parquet(str(written(tmp_path / f"{t}.parquet", rows)))
            names = [column.split()[0] for column in ROWS.split(", ")][::-1]
            job.advance(
                t, {"rows": frame.where("true").select(*names) if by_jvm else frame.select("more", *names).drop("more")}
            )
        found.append(digests(store))
    assert scans == [True, True, False, False]
    assert found[0] == found[1]
