"""A stream that is joined with a table: it runs in the JVM here too, so the flow runs in a job on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nosync
from tests.parity.both_ways import APPEND, EVENTS, Case, Rows, Streams, at_sink, by_spark, one
from tests.parity.test_parity import FIRST_SEED, ROUNDS, settings_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ["k", "at", "x", "label"]


def _table(spark: SparkSession) -> DataFrame:
    return spark.sql(
        "SELECT * FROM VALUES ('a', 'first'), ('b', 'second'), ('b', 'twice'), (NULL, 'none') AS t(k, label)"
    )


@pytest.mark.few(1, "make parity")
@pytest.mark.spark
@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_stream_joined_with_a_table_is_that_of_spark(
    spark: SparkSession, tmp_path: Path, how: Any, number: int
) -> None:
    seed = FIRST_SEED + number

    def query(streams: Streams) -> DataFrame:
        return streams["events"].join(_table(spark), ["k"], how).select(*COLUMNS)

    case = Case(f"static-{how}", APPEND, query, lambda: nosync.Dataflow("unused"), COLUMNS, one("k", "x"))
    batches = case.batches(np.random.default_rng(seed))
    with settings_of(spark, case):
        expected = by_spark(spark, case, batches, tmp_path / "spark")
    flow = nosync.Dataflow("parity")
    flow.source("events", EVENTS).join_static("out", _table(spark), on=["k"], how=how)
    with nosync.open(tmp_path / "nosync", retain=100) as store:
        job = nosync.Job(flow, store, spark=spark, shards=2)
        for t, batch in enumerate(batches):
            job.advance(t, {"events": spark.createDataFrame(batch["events"])})
        feed = store.changes("out", -1, len(batches) - 1).to_pylist()
    found: Rows = at_sink(case, feed)
    assert found == expected, (
        f"NOSYNC_PARITY_SEED={seed}: only here {found - expected}, only in Spark {expected - found}"
    )
