"""A Spark job whose only directory is lost: it goes on with one that was restored from an object store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.lsm.node.node import Node
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.hydration import Hydration
from nosync.replication.remote.level import RemoteLevel
from nosync.replication.remote.restore import restore
from nosync.testing.daemon_cluster import eventually
from nosync.testing.driver import make_flow, outcome
from nosync.testing.simulated_bucket import Fault, SimulatedBucket
from tests.helpers.s3 import moto

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

EPOCHS = 5


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    made = [(f"{'abcd'[i % 4]}{i % 3}", (i * 7 + t) % 11 - 2) for i in range(30)]
    return {"rows": spark.createDataFrame(made, "word string, n bigint")}


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run without faults and without copies gives."""
    with nosync.open(tmp_path_factory.mktemp("fresh") / "s") as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        for t in range(EPOCHS):
            job.advance(t, rows(spark, t))
        return outcome(job, EPOCHS)


@pytest.mark.few(1)
def test_a_job_goes_on_with_a_restored_store(
    spark: SparkSession, tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto(monkeypatch) as s3:
        url = f"{s3}/state"
        with nosync.open(tmp_path / "state", remote=url) as store:
            job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
            for t in range(4):
                job.advance(t, rows(spark, t))
            store.sync_remote()
            assert store.status().remotes[0].safe_point == 3
        shutil.rmtree(tmp_path / "state")  # all nodes at once
        report = restore(open_bucket(url), tmp_path / "state")
        assert report.epoch == 3
        with nosync.open(tmp_path / "state", remote=url) as store:
            job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
            recovered = job.recover()
            assert (recovered.lost, recovered.recomputed) == (0, 0)
            assert job.last_sealed() == 3
            for t in range(4, EPOCHS):
                job.advance(t, rows(spark, t))
            assert outcome(job, EPOCHS) == expected
            store.sync_remote()
            assert store.status().remotes[0].safe_point == EPOCHS - 1


def test_a_job_goes_on_while_its_layers_are_still_in_the_object_store(
    spark: SparkSession, tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fetches the rest: what an epoch reads comes when tasks read it."""
    monkeypatch.setattr(Hydration, "start", lambda self: None)
    url = f"file://{tmp_path}/bucket"  # tasks have the environment that Spark began with, so no credentials of a test's
    with nosync.open(tmp_path / "state", remote=url) as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        for t in range(4):
            job.advance(t, rows(spark, t))
        store.sync_remote()
    shutil.rmtree(tmp_path / "state")
    report = restore(open_bucket(url), tmp_path / "state", lazy=True)
    assert report.lazy_layers > 0
    with nosync.open(tmp_path / "state", remote=url) as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        recovered = job.recover()
        assert (recovered.lost, recovered.recomputed) == (0, 0)
        job.advance(4, rows(spark, 4))
        assert 0 < store.status().lazy_layers < report.lazy_layers
        assert outcome(job, EPOCHS) == expected
        store.sync_remote()
        assert store.status().remotes[0].safe_point == EPOCHS - 1


@pytest.mark.long
def test_inputs_wait_for_the_object_store(spark: SparkSession, tmp_path: Path) -> None:
    flow = nosync.Dataflow("words", persist=nosync.remote())
    source = flow.source("rows", "word string, n bigint", at_safe_point="drop")
    source.aggregate("sums", key=["word"], n=nosync.count())
    is_away, asked = True, 0

    def fault(call: str, name: str) -> Fault:
        nonlocal asked
        asked += 1
        return "before" if is_away else ""

    with (
        nosync.open(tmp_path / "without") as store,
        pytest.raises(nosync.FlowError, match=r"nosync\.open\(\.\.\., remote=URL\)"),
    ):
        nosync.Job(flow, store, spark=spark, shards=2)
    with nosync.open(tmp_path / "state", settings=nosync.StoreSettings(scan_interval_s=0.05, grace_s=0.0)) as store:
        assert isinstance(store.node, Node)
        settings = nosync.RemoteSettings("memory://copies", flush_s=0.05, close_s=0.0)
        RemoteLevel(store.node, settings, bucket=SimulatedBucket(fault=fault)).start()
        job = nosync.Job(flow, store, spark=spark, shards=2)
        for t in range(3):
            job.advance(t, rows(spark, t))
        store.sync()
        assert job.safe_point() == 2
        before = asked
        eventually("the bucket was asked again, and is away", lambda: asked > before)
        kept = [layer for layer in store.layers() if layer.stage == "rows" and layer.rows]
        assert kept, "the bucket is away"
        is_away = False
        eventually(
            "inputs are released", lambda: not [one for one in store.layers() if one.stage == "rows" and one.rows]
        )
        assert store.status().remotes[0].safe_point == 2
        assert job.read("sums").count() == len({row[0] for row in rows(spark, 0)["rows"].collect()})


@pytest.mark.long
def test_spark_reads_copies(spark: SparkSession, tmp_path: Path) -> None:
    """A directory stands for the bucket: workers of this session have no credentials."""
    url = f"file://{tmp_path}/bucket"
    with nosync.open(tmp_path / "state", remote=url) as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        for t in range(3):
            job.advance(t, rows(spark, t))
        store.sync_remote()
        expected = sorted(map(str, job.read("sums", as_of=1).collect()))
    shutil.rmtree(tmp_path / "state")
    frame = spark.read.format("nosync").option("stage", "sums").option("asOf", 1).load(url)
    assert sorted(map(str, frame.collect())) == expected
    feed = spark.read.format("nosync").option("stage", "sums").option("readChangeFeed", "true").load(url)
    assert feed.count() > 0
