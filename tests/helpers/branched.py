"""A flow whose stages follow rows that change, and what branches of it are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

import nosync

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "word string, n bigint"
EPOCHS, FORK = 6, 3


def positive(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["n"], 0))


def even(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(pc.bit_wise_and(rows["n"], 1), 0))


def either(rows: pa.Table, t_of_row: int | None = None) -> pa.Table:
    """What a run that changed its code at the fork would do: the rows carry their epoch in the word's number."""
    late = pc.greater(pc.cast(pc.utf8_slice_codeunits(rows["word"], 1, 2), pa.int64()), FORK)
    kept = pc.if_else(late, pc.equal(pc.bit_wise_and(rows["n"], 1), 0), pc.greater(rows["n"], 0))
    return rows.filter(kept)


def make_flow(fn: Any = positive) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    kept = flow.source("rows", SCHEMA).map("kept", fn)
    sums = kept.aggregate("sums", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    sums.where("big", "total > 10").aggregate("how_big", key=["n"], words=nosync.count())
    flow["rows"].aggregate("untouched", key=["word"], n=nosync.count())
    return flow


def rows(spark: SparkSession, t: int, salt: int = 0) -> dict[str, DataFrame]:
    made = [(f"{'abc'[i % 3]}{t}{i % 2}", (i * 7 + t + salt) % 11 - 3) for i in range(20)]
    return {"rows": spark.createDataFrame(made, SCHEMA)}


def state(job: nosync.Job, stage: str, t: int) -> list[tuple[Any, ...]]:
    """Without Spark, which takes longer to read than all the rest."""
    return sorted(tuple(row.values()) for row in job._store.read(stage, as_of=t, branch=job.branch_name).to_pylist())
