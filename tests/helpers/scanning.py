"""Files whose rows tasks read, and jobs that are given them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import nosync
from tests.helpers.rows_by_two_ways import (
    ROWS,
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
