"""Views that get another query over the same history: on a branch, by an upgrade, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nosync
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, flow_over_inputs, frames
from tests.views.test_views import job_of, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def with_pages(spark: SparkSession, least: int) -> nosync.Dataflow:
    """A view of rows that only come, and two over it."""
    flow = flow_over_inputs()
    flow.sql("pages", f"SELECT page, weight FROM clicks WHERE weight > {least}", spark=spark)
    flow.sql("a_pages", "SELECT upper(page) AS page FROM pages WHERE page LIKE 'a%'", spark=spark)
    flow.sql("how_many", "SELECT page, count(*) AS n, max(weight) AS most FROM pages GROUP BY page", spark=spark)
    return flow


def test_a_view_that_only_filters_takes_back_what_its_query_gave_before(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    store, names = open_store(retain=100), ("pages", "a_pages", "how_many")
    out = tmp_path / "out"
    job = nosync.Job(with_pages(spark, 3), store, spark=spark, shards=2, sinks={"pages": nosync.ParquetSink(out)})
    for t in range(3):
        job.advance(t, frames(spark, Inputs(3 + t).epoch(t)))
    before = {name: rows(job, name) for name in names}
    branch = job.branch("other", views={"pages": "SELECT page, weight FROM clicks WHERE weight < 6"}, at=1)
    branch.replay()
    for name in names:
        assert branch.verify_view(name).is_equal, str(branch.verify_view(name))
        assert rows(job, name) == before[name]
    assert rows(branch, "pages") != before["pages"]
    job.upgrade(with_pages(spark, 5))
    inputs = Inputs(8)
    for t in (3, 4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    job.upgrade(with_pages(spark, 1))  # what went comes back
    job.advance(5, frames(spark, inputs.epoch(5)))
    assert net_of(spark.read.parquet(str(out)).collect()) == rows(job, "pages")
    for t in (2, 3, 4, 5):
        state = spark.read.format("nosync").option("path", store.directory.root).option("stage", "pages")
        seen = state.option("versionAsOf", t).load().collect()
        assert Counter(map(tuple, seen)) == Counter(map(tuple, job.read("pages", t).collect())), t
        assert net_of(job.changes("pages", -1, t).collect()) == Counter(map(tuple, seen)), t
    assert {name: rows(job, name, 2) for name in names} == before
    assert all(job.verify_view(name).is_equal for name in names)
    now = {name: rows(job, name) for name in names}
    store.sync()
    lose_epoch(store, 5, names)
    report = job.recover()
    assert report.recomputed
    assert not report.unrecoverable
    assert {name: rows(job, name) for name in names} == now


def lose_epoch(store: nosync.Store, t: int, stages: Collection[str]) -> None:
    manifest = store.node.timelines.manifest(t, "main")
    assert manifest is not None
    for entry in manifest.entries:
        if entry.id.trace.stage.partition("__")[0] in stages:
            store.directory.path_of(entry.id).unlink()
            store.directory.forget(entry.id)


def net_of(changes: list[Any]) -> Counter[Any]:
    net = Counter[Any]()
    for row in changes:
        net[row["page"], row["weight"]] += -1 if row["_change_type"] == "delete" else 1
    assert not -net, "no row goes that is not there"
    return +net


def with_internal_stages(spark: SparkSession, least: int) -> nosync.Dataflow:
    """Views whose queries become stages that are named by what they do."""
    flow = flow_over_inputs()
    flow.sql(
        "totals", f"SELECT item FROM orders WHERE price > {least} GROUP BY item HAVING sum(price) > 4", spark=spark
    )
    flow.sql("named", f"SELECT city, price FROM orders JOIN people ON person = pid WHERE price > {least}", spark=spark)
    ranked = "rank() OVER (PARTITION BY item ORDER BY price)"
    flow.sql("places", f"SELECT id, {ranked} AS place FROM orders WHERE price > {least}", spark=spark)
    return flow


def test_an_edit_that_is_undone(spark: SparkSession, open_store: OpenStore) -> None:
    """Stages that it dropped come back, over an epoch that they missed."""
    store, names = open_store(retain=100), ("totals", "named", "places")
    job, inputs = job_of(spark, store, with_internal_stages(spark, 2), epochs=2), Inputs(5)
    before = {name: rows(job, name) for name in names}
    dropped = job.upgrade(with_internal_stages(spark, 5)).dropped
    assert len(dropped) >= 3
    job.advance(2, frames(spark, inputs.epoch(2)))
    edited = {name: rows(job, name) for name in names}
    assert {*job.upgrade(with_internal_stages(spark, 2)).begins_anew} >= {*dropped, *names}
    for t in (3, 4):
        job.advance(t, frames(spark, inputs.epoch(t)))
    assert all(job.verify_view(name).is_equal for name in names)
    assert {name: rows(job, name, 1) for name in names} == before
    assert {name: rows(job, name, 2) for name in names} == edited
    now = {name: rows(job, name) for name in names}
    store.sync()
    lose_epoch(store, 3, dropped)
    report = job.recover()
    assert report.recomputed
    assert {name: rows(job, name) for name in names} == now


@pytest.mark.parametrize("shards", [2, 3])
def test_views_begin_anew_over_rows_that_lie_in_other_shards_now(
    spark: SparkSession, open_store: OpenStore, shards: int
) -> None:
    """Which aggregates there are says where the rows of a source go, and it says nothing of those that are recorded."""
    random = np.random.default_rng(5)

    def given(n: int) -> dict[str, Any]:
        rows = [
            ("abcdefghij"[k], int(x)) for k, x in zip(random.integers(0, 10, n), random.integers(0, 10, n), strict=True)
        ]
        return {"ev": spark.createDataFrame(rows, "k string, x bigint")}

    def flow_of(key: str | None, least: int, *, more: bool) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        source = flow.source("ev", "k string, x bigint")
        if key is not None:
            source.aggregate(f"by_{key}", key=[key], n=nosync.count())
        flow.sql("some", f"SELECT k, x FROM ev WHERE x > {least}", spark=spark)
        flow.sql("all_of_it", f"SELECT count(*) AS n, sum(x) AS total FROM ev WHERE x > {least}", spark=spark)
        if more:
            flow.sql("by_k", "SELECT k, count(*) AS n, sum(x) AS s FROM ev GROUP BY k", spark=spark)
            flow.sql("different", "SELECT DISTINCT k, x FROM ev", spark=spark)
        return flow

    job = nosync.Job(flow_of("x", 2, more=False), open_store(retain=100), spark=spark, shards=2)
    job.advance(0, given(40))
    if shards != 2:
        job.rescale(shards)
    job.upgrade(flow_of("k", 5, more=False))
    job.advance(1, given(5))
    assert all(job.verify_view(name).is_equal for name in ("some", "all_of_it"))
    job.upgrade(flow_of(None, 4, more=True))
    for t in (2, 3):
        job.advance(t, given(5))
    for name in ("some", "all_of_it", "by_k", "different"):
        assert job.verify_view(name).is_equal, str(job.verify_view(name))


def test_a_view_that_is_changed_after_it_was_rescaled(spark: SparkSession, open_store: OpenStore) -> None:
    """What goes may be in another shard then than what came: it is said, and what to do."""
    store = open_store(retain=100)
    job = job_of(spark, store, with_pages(spark, 3), epochs=2)
    job.upgrade(with_pages(spark, 5))
    job.advance(2, frames(spark, Inputs(3).epoch(2)))
    job.rescale(3)
    job.upgrade(with_pages(spark, 1))
    with pytest.raises(nosync.StageError, match=r"taken back when it had 2 shards.*rescale\(2\)"):
        job.advance(3, frames(spark, Inputs(3).epoch(3)))
    job.rescale(2)
    job.advance(3, frames(spark, Inputs(3).epoch(3)))
    job.rescale(3)
    job.advance(4, frames(spark, Inputs(3).epoch(4)))
    assert all(job.verify_view(name).is_equal for name in ("pages", "a_pages", "how_many"))
