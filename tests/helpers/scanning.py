"""Files whose rows tasks read, and jobs that are given them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import nosync
from tests.conftest import OpenStore
from tests.helpers.orders import Digests, digests
from tests.helpers.rows_by_two_ways import (
    ROWS,
    job_of,
    rows_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def written(path: Path, rows: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, row_group_size=150, **options)
    return path


def advanced(job: nosync.Job, spark: SparkSession, files: Path, sources: list[str], t: int, *, by_jvm: bool) -> None:
    inputs = {}
    for name in sources:
        frame = spark.read.schema(ROWS).parquet(str(written(files / name / f"{t}.parquet", rows_of(t))))
        inputs[name] = frame.where("true") if by_jvm else frame
    job.advance(t, inputs)


def by_both_ways(
    make: Callable[[nosync.Dataflow], Any], spark: SparkSession, open_store: OpenStore, files: Path, sources: list[str],
    epochs: int,
) -> list[Digests]:  # fmt: skip
    """Returns the digests of a flow's layers where tasks read the files of its epochs, and where the JVM reads them."""
    found = []
    for by_jvm in (False, True):
        store = open_store(f"by_jvm_{by_jvm}")
        job = job_of(make, spark, store)
        for t in range(epochs):
            advanced(job, spark, files, sources, t, by_jvm=by_jvm)
        found.append(digests(store))
    return found
