"""Which of Spark's Python workers tasks run in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SIMPLIFIED = "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
HIDDEN = "spark.sql.execution.pyspark.udf.hideTraceback.enabled"


def daemons_of_query(spark: SparkSession) -> set[int]:
    """The processes that forked the workers."""

    def of_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"pid": [os.getppid()]})

    return {row.pid for row in spark.range(0, 2, 1, 2).mapInArrow(of_task, "pid bigint").collect()}


def parents(spark: SparkSession) -> RDD[int]:
    return spark.sparkContext.parallelize(range(2), 2).map(lambda _: os.getppid())


@pytest.mark.parametrize(("simplified", "hidden"), [("true", "false"), ("false", "false"), ("true", "true")])
def test_jobs_without_a_query_run_in_the_workers_of_queries(spark: SparkSession, simplified: str, hidden: str) -> None:
    from nosync.spark.session import conf_set, in_workers_of_queries

    before = dict(spark.sparkContext.environment)
    with conf_set(spark, {SIMPLIFIED: simplified, HIDDEN: hidden}):
        of_query = daemons_of_query(spark)
        assert len(of_query) == 1
        assert set(in_workers_of_queries(spark, parents(spark)).collect()) == of_query
        assert (set(parents(spark).collect()) == of_query) == (simplified == hidden == "false")
    assert spark.sparkContext.environment == before


def with_daemon(rows: pa.Table) -> pa.Table:
    return rows.append_column("pid", pa.array([os.getppid()] * rows.num_rows))


def test_an_epoch_whose_rows_go_by_files_has_both_its_jobs_in_the_same_workers(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nosync.spark import file_shuffle as exchanges

    monkeypatch.setattr(exchanges, "LEAST_ROWS", 1)
    monkeypatch.setattr(exchanges, "LEAST_ROWS_A_TASK", 0)
    flow = nosync.Dataflow("workers")
    flow.source("rows", "id bigint").map("ran", with_daemon, schema="id bigint, pid bigint")
    with open_store() as store:
        job = nosync.Job(flow, store, spark=spark, shards=2)
        for t in range(2):  # the second one goes by files
            job.advance(t, {"rows": spark.range(8)})
        assert set(store.read("ran").column("pid").to_pylist()) == daemons_of_query(spark)
