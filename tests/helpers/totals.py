"""A flow that sums values by key, and what its store has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nosync

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "k string, v bigint"


def flow_of(name: str = "f") -> nosync.Dataflow:
    flow = nosync.Dataflow(name)
    flow.source("rows", SCHEMA).aggregate("sums", key=["k"], total=nosync.sum("v"))
    return flow


def given(spark: SparkSession, *rows: tuple[str, int]) -> dict[str, DataFrame]:
    return {"rows": spark.createDataFrame(list(rows), SCHEMA)}


def totals(store: nosync.Store, t: int | None = None, branch: str = "main") -> dict[str, int]:
    return {row["k"]: row["total"] for row in store.read("sums", as_of=t, branch=branch).to_pylist()}
