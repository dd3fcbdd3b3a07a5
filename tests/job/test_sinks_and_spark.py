"""What Spark reads of sinks, and in which order a topic has it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.job.kafka_sink import _messages
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("where", ["directory", "bucket"])
def test_spark_reads_its_own_types(spark: SparkSession, open_store: OpenStore, tmp_path: Path, where: str) -> None:
    columns = "k int, s struct<i: interval day to second>, t timestamp_ntz"
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    path = tmp_path / "out"
    path.mkdir()
    sink = nosync.ParquetSink(path if where == "directory" else f"file://{path}")
    rows = spark.createDataFrame([(1, (dt.timedelta(days=1, seconds=3),), dt.datetime(2026, 1, 1))], columns)
    nosync.Job(flow, open_store(), spark=spark, shards=1, sinks={"rows": sink}).advance(0, {"rows": rows})
    found = spark.read.parquet(str(path)).select("k", "s", "t")
    assert found.schema == rows.schema
    assert found.collect() == rows.collect()


def test_the_last_message_of_a_key_is_what_it_has(spark: SparkSession) -> None:
    feed = [
        ("a", 6, "insert", 2),
        ("a", 3, "delete", 2),
        ("b`c", 1, "update_postimage", 2),
        ("b`c", 0, "update_preimage", 2),
    ]
    changes = spark.createDataFrame(feed, "`k``` string, n int, _change_type string, _epoch long")
    found = [(key, headers["nosync.change_type"]) for key, _, headers in _messages(changes, ["k`"], 2)]
    kept = dict(found)
    assert len(found) == 4
    assert kept == {b'{"k`":"a"}': b"insert", b'{"k`":"b`c"}': b"update_postimage"}


def test_a_key_that_is_no_column_is_refused_before_an_epoch(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k int")
    sink = nosync.KafkaSink("t", ["K"], {"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(nosync.SchemaError, match="KafkaSink of stage rows: 'K' is none of the columns"):
        nosync.Job(flow, open_store(), spark=spark, sinks={"rows": sink})
