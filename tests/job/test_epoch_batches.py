"""Recovery and replay of several epochs in one Spark job, against the same epochs one by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.orders import EPOCHS, ITEMS, ORDERS, SHARDS, counted, digests, make_flow, many, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def some(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(pc.bit_wise_and(rows["n"], 1), 0))


def some_until_five(rows: pa.Table) -> pa.Table:
    if pc.any(pc.equal(rows["item"], 50)).as_py():
        raise ValueError("item 50 came")
    return some(rows)


@pytest.fixture
def job(spark: SparkSession, open_store: OpenStore) -> nosync.Job:
    job = nosync.Job(make_flow(), open_store(), spark=spark, shards=SHARDS)
    for t in range(EPOCHS):
        job.advance(t, rows(spark, t))
    return job


def lose(store: nosync.Store, keep: Any) -> int:
    store.sync()
    lost = [layer for layer in store.layers() if not keep(layer)]
    for layer in lost:
        Path(layer.path).unlink()
    return len(lost)


@pytest.mark.long
def test_recovered_together(job: nosync.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    store = job._store
    before = digests(store)
    runs = counted(monkeypatch)
    sources = {"orders", "items"}

    lost = lose(store, lambda layer: layer.stage in sources)
    report = job.recover()
    assert digests(store) == before
    assert runs == [list(range(EPOCHS))], "one Spark job"
    assert (report.lost, report.recomputed) == (lost, lost)

    runs.clear()
    some_lost = {
        ("sums", 0, 1),
        ("sums", 0, 4),
        ("priced", 1, 4),
        ("by_kind", 0, 6),
        ("kept", 1, 2),
        ("customers", 1, 5),
    }
    lost = lose(store, lambda layer: (layer.stage, layer.shard, layer.lower) not in some_lost)
    report = job.recover()
    assert digests(store) == before
    assert runs == [[1, 2, 4, 5, 6]]
    assert (report.lost, report.recomputed) == (len(some_lost), len(some_lost)) == (lost, lost), (
        "what is missing, not more"
    )


@pytest.mark.long
def test_what_is_given_again_runs_by_itself(
    job: nosync.Job, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = job._store
    before = digests(store)
    runs = counted(monkeypatch)
    lose(store, lambda layer: layer.lower not in (2, 3, 4) or (layer.lower == 3) == (layer.stage == "items"))
    job.recover(lambda t: rows(spark, t))
    assert digests(store) == before
    assert sorted(t for run in runs for t in run) == [2, 3, 4]
    assert [2] in runs
    assert [3] in runs


@pytest.mark.long
def test_replayed_together(
    job: nosync.Job, spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = counted(monkeypatch)
    steps: list[tuple[int, int]] = []
    what_if = job.branch("what-if", at=1, replace={"kept": some})
    report = what_if.replay(progress=lambda done, of: steps.append((done, of)))
    assert runs == [list(range(2, EPOCHS))]
    assert steps == [(i + 1, EPOCHS - 2) for i in range(EPOCHS - 2)]
    monkeypatch.setattr("nosync.runtime.epoch_batches.MOST_EPOCHS", 1)
    runs.clear()
    alone = job.branch("alone", at=1, replace={"kept": some})
    assert alone.replay().layers_computed == 0, "the same code over the same rows: the layers are shared"
    store = open_store("other")
    other = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    for t in range(EPOCHS):
        other.advance(t, rows(spark, t))
    runs.clear()
    one_by_one = other.branch("what-if", at=1, replace={"kept": some}).replay()
    assert runs == [[t] for t in range(2, EPOCHS)]
    assert digests(store) == digests(job._store)
    assert (one_by_one.layers_computed, one_by_one.layers_shared) == (report.layers_computed, report.layers_shared)


@pytest.mark.long
def test_what_came_before_a_failure_is_sealed(job: nosync.Job) -> None:
    what_if = job.branch("what-if", at=1, replace={"kept": some_until_five})
    with pytest.raises(nosync.StageError, match=r"stage kept .* timestamp 5.*item 50 came"):
        what_if.replay()
    assert what_if.last_sealed() == 4
    assert what_if.read("by_kind").count() == 3


@pytest.mark.long
def test_what_nothing_is_computed_from_is_not_read(job: nosync.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is lost needs the segment before it, not those before that one."""
    from nosync.spark.epoch_frames import EpochFrames

    store, ran, segment_of = job._store, list[str](), EpochFrames.segment
    before = digests(store)

    def segment(self: Any, segment: Any, output: Any) -> Any:
        ran.append(segment.name)
        return segment_of(self, segment, output)

    monkeypatch.setattr(EpochFrames, "segment", segment)
    lose(store, lambda layer: layer.stage != "by_kind")
    job.recover()
    assert digests(store) == before
    assert set(ran) == {"by_kind", "priced__left"}
    ran.clear()
    lose(store, lambda layer: layer.stage not in ("by_kind", "customers") or layer.lower == 3)
    job.recover()
    assert digests(store) == before
    assert set(ran) == {"by_kind", "priced__left", "customers", "orders"}
    ran.clear()
    lose(store, lambda layer: (layer.stage, layer.lower) != ("kept", 2))
    job.recover()
    assert digests(store) == before
    assert set(ran) == {"orders"}


def numbered(rows: pa.Table) -> pa.Table:
    """With a column of a type that Spark does not have."""
    return rows.append_column("small", pc.cast(rows["n"], pa.uint32()))


def few(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.less(rows["n"], 2))


def test_a_stage_in_the_middle_of_a_segment_whose_rows_spark_could_not_have(
    spark: SparkSession, open_store: OpenStore
) -> None:
    flow = nosync.Dataflow("f")
    orders = flow.source("orders", ORDERS).select("chosen", "item", "n")
    orders.map("numbered", numbered).filter("few", lambda rows: pc.less(rows["n"], 2))
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    for t in range(3):
        job.advance(t, {"orders": rows(spark, t)["orders"]})
    before = digests(job._store)
    lost = lose(job._store, lambda layer: layer.stage != "few")
    report = job.recover()
    assert digests(job._store) == before
    assert (report.lost, report.recomputed) == (lost, lost)


@pytest.mark.long
def test_both_exits_of_a_window_and_epochs_before_and_after_a_fork(
    spark: SparkSession, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one exit needs of the epoch before it does not leave to the other; what is sealed keeps its history."""
    flow = nosync.Dataflow("f")
    orders, items = flow.source("orders", ORDERS), flow.source("items", ITEMS)
    hourly = orders.map("kept", many).window(
        "hourly", time="at", size="1 hour", watermark="30 minutes", key=["item"], n=nosync.count()
    )
    hourly.aggregate("by_count", key=["n"], windows=nosync.count())
    hourly.late.aggregate("late_by_item", key=["item"], n=nosync.count())
    items.aggregate("prices", key=["price"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=SHARDS)
    for t in range(EPOCHS):
        job.advance(t, rows(spark, t))
    runs = counted(monkeypatch)
    what_if = job.branch("what-if", at=1, replace={"kept": few})
    report = what_if.replay()
    assert runs == [list(range(2, EPOCHS))], "all together, at once"
    both = [job.flow.needed_for(job.flow.segment_of("hourly"), exit) for exit in ("hourly", "hourly__late")]
    assert all("hourly__watermark" in needed for needed in both), "of the epoch before, in the same task"
    assert report.layers_computed == (EPOCHS - 2) * SHARDS * 6

    before = digests(job._store)
    runs.clear()
    fork = {"prices": (0, 1), "hourly": (2, 3), "by_count": (3, 4), "late_by_item": (5,), "hourly__late": (5,)}
    lost = lose(job._store, lambda layer: layer.lower not in fork.get(layer.stage, ()))
    report_of_both = [line.recover() for line in (what_if, job)]
    assert digests(job._store) == before
    assert [len(run) for run in runs] == [6, 4]
    assert sum(found.recomputed for found in report_of_both) == lost
