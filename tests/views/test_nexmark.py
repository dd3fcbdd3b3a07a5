"""NexMark's queries, all at once, kept up to date: after each epoch, after a loss, and over other numbers of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.driver import driver_runs
from tests.views.both_ways import differences, flow_over_inputs, frames
from tests.views.nexmark import KEYS, Q11, QUERIES, SCHEMAS, Rows, sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


BY_SPARK_ALONE = ("q7", "q21", "q22")
"""The queries with functions that only Spark evaluates."""


@pytest.mark.long("make views")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shards", [1, 4])
def test_all_queries_are_what_spark_gives(
    spark: SparkSession, open_store: OpenStore, shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With four shards the driver runs the later epochs, of those queries that it can run."""
    caplog.set_level("DEBUG", "nosync")
    flow, rows = flow_over_inputs("nexmark", SCHEMAS, KEYS), Rows(shards)
    queries = {name: query for name, query in QUERIES.items() if shards == 1 or name not in BY_SPARK_ALONE}
    for name, query in queries.items():
        flow.sql(name, query, spark=spark)
    flow.view("q11", sessions, spark=spark)
    queries = {**queries, "q11": Q11}
    store = open_store(retain=100)
    job = nosync.Job(flow, store, spark=spark, shards=shards)
    for t in range(3):
        if t == 2:
            job.rescale(5 - shards)
        with driver_runs(spark, "64m" if t else "0"):
            job.advance(t, frames(spark, rows.epoch(t)))
        found = list(differences(spark, job, queries, rows.tables()))
        assert not found, f"epoch {t}:\n" + "\n".join(found)
    assert ("is run by the driver" in caplog.text) == (shards == 4)
    empty = [name for name in queries if not job.read(name).count()]
    assert not empty, "a query without an answer shows nothing"
    store.close()
    for path in sorted((store.directory.root / "layers").rglob("*.layer"))[::3]:
        if path.relative_to(store.directory.root).parts[1] not in {*SCHEMAS, *(f"{name}_changes" for name in KEYS)}:
            path.unlink()
    again = nosync.Job(flow, open_store(retain=100), spark=spark, shards=5 - shards)
    report = again.recover()
    assert report.recomputed
    assert not report.unrecoverable
    found = list(differences(spark, again, queries, rows.tables()))
    assert not found, "after a loss:\n" + "\n".join(found)


def test_sessions_without_a_watermark_are_refused_by_name(spark: SparkSession) -> None:
    with pytest.raises(nosync.FlowError, match=r"view q11: session_window.*withWatermark"):
        flow_over_inputs("nexmark", SCHEMAS, KEYS).sql("q11", Q11, spark=spark)
