"""NexMark's queries, all at once, kept up to date: after each epoch, after a loss, and over other numbers of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore
from tests.views.both_ways import differences, flow_over_inputs, frames
from tests.views.nexmark import KEYS, QUERIES, REFUSED, SCHEMAS, Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.long("make views")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shards", [1, 4])
def test_all_queries_are_what_spark_gives(spark: SparkSession, open_store: OpenStore, shards: int) -> None:
    flow, rows = flow_over_inputs("nexmark", SCHEMAS, KEYS), Rows(shards)
    for name, query in QUERIES.items():
        flow.sql(name, query, spark=spark)
    store = open_store(retain=100)
    job = nosync.Job(flow, store, spark=spark, shards=shards)
    for t in range(3):
        if t == 2:
            job.rescale(5 - shards)
        job.advance(t, frames(spark, rows.epoch(t)))
        found = list(differences(spark, job, QUERIES, rows.tables()))
        assert not found, f"epoch {t}:\n" + "\n".join(found)
    empty = [name for name in QUERIES if not job.read(name).count()]
    assert not empty, "a query without an answer shows nothing"
    store.close()
    for path in sorted((store.directory.root / "layers").rglob("*.layer"))[::3]:
        if path.relative_to(store.directory.root).parts[1] not in {*SCHEMAS, *(f"{name}_changes" for name in KEYS)}:
            path.unlink()
    again = nosync.Job(flow, open_store(retain=100), spark=spark, shards=5 - shards)
    report = again.recover()
    assert report.recomputed
    assert not report.unrecoverable
    found = list(differences(spark, again, QUERIES, rows.tables()))
    assert not found, "after a loss:\n" + "\n".join(found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_by_name(spark: SparkSession, name: str) -> None:
    query, said = REFUSED[name]
    with pytest.raises(nosync.FlowError, match=f"view {name}: .*{said}"):
        flow_over_inputs("nexmark", SCHEMAS, KEYS).sql(name, query, spark=spark)
