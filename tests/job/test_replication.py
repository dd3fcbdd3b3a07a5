"""A Spark job beside a daemon: copies on peers, the daemon's death, and another node that goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.replication.transport.channel import CALL_TIMEOUT_S
from nosync.testing.daemon_cluster import eventually, running
from nosync.testing.driver import make_flow, outcome

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

EPOCHS = 5


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    made = [(f"{'abcd'[i % 4]}{i % 3}", (i * 7 + t) % 11 - 2) for i in range(30)]
    return {"rows": spark.createDataFrame(made, "word string, n bigint")}


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run without faults and without daemons gives."""
    with nosync.open(tmp_path_factory.mktemp("fresh") / "s") as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        for t in range(EPOCHS):
            job.advance(t, rows(spark, t))
        return outcome(job, EPOCHS)


@pytest.mark.long
def test_a_job_goes_on_on_another_node(spark: SparkSession, tmp_path: Path, expected: list[Any]) -> None:
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2) as daemons:
        with daemons.open("n1") as store:
            with pytest.raises(nosync.FlowError, match=r"needs 3 nodes, and this store keeps 2 copies.*--replicas 3"):
                nosync.Job(make_flow(3), store, spark=spark, shards=2)
            job = nosync.Job(make_flow(2), store, spark=spark, shards=2)
            for t in range(3):
                job.advance(t, rows(spark, t))
            eventually("two copies of everything", lambda: job.safe_point() == 2)
            daemons.kill("n2")
            job.advance(3, rows(spark, 3))  # a dead peer holds nothing up
            store.sync()
            assert job.safe_point() == 2, "but nothing new is safe"
            daemons.start("n2")
            eventually("the peer caught up", lambda: job.safe_point() == 3)
            victims = [Path(layer.path) for layer in store.layers() if int(layer.lower) == 3]
            for victim in victims:
                victim.unlink()
            report = job.recover()
            # The daemon looks by itself every five seconds, and may have been quicker with some.
            assert 0 < report.lost == report.fetched <= len(victims)
            assert report.recomputed == 0
            assert all(victim.exists() for victim in victims)
        daemons.kill("n1")  # with its host, its directory and all
        with daemons.open("n2") as store:
            job = nosync.Job(make_flow(2), store, spark=spark, shards=2)
            assert job.last_sealed() == 3
            report = job.recover()
            assert (report.lost, report.recomputed) == (0, 0), "nothing is restored, and nothing computed again"
            for t in range(4, EPOCHS):
                job.advance(t, rows(spark, t))
            assert outcome(job, EPOCHS) == expected
            branch = job.branch("other", at=3)
            branch.replay()
            assert store.branches()["other"].at == 3
            store.delete_branch("other")
            job.rewind(3, keep_as="")
            assert job.last_sealed() == 3


@pytest.mark.long
def test_a_frozen_daemon_holds_no_epoch_up(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=2)
        job.advance(0, rows(spark, 0))  # with Spark's first steps
        healthy_s = max(_seconds_of(job, t, rows(spark, t)) for t in range(1, 3))
        daemons.signal("n1", signal.SIGSTOP)
        try:
            frozen_s = [_seconds_of(job, t, rows(spark, t)) for t in range(3, EPOCHS)]
        finally:
            daemons.signal("n1", signal.SIGCONT)
        assert max(frozen_s) < healthy_s + CALL_TIMEOUT_S / 2, "a call that is waited for takes all of its timeout"
        eventually("all is safe", lambda: job.safe_point() == EPOCHS - 1)


def _seconds_of(job: nosync.Job, t: int, inputs: Any) -> float:
    began_s = time.monotonic()
    job.advance(t, inputs)
    return time.monotonic() - began_s


@pytest.mark.long("make cluster")
def test_what_the_peer_did_not_have_yet_is_computed_again(
    spark: SparkSession, tmp_path: Path, expected: list[Any]
) -> None:
    """The host dies with layers and an epoch's end that no other node has: the job goes back to the last one it has."""
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2) as daemons:
        with daemons.open("n1") as store:
            job = nosync.Job(make_flow(2), store, spark=spark, shards=2)
            for t in range(3):
                job.advance(t, rows(spark, t))
            eventually("two copies of everything", lambda: job.safe_point() == 2)
            daemons.kill("n1")  # from here on nothing is replicated
            for t in range(3, EPOCHS):
                job.advance(t, rows(spark, t))
        with daemons.open("n2") as store:
            job = nosync.Job(make_flow(2), store, spark=spark, shards=2)
            assert job.last_sealed() == 2
            for t in range(3, EPOCHS):
                job.advance(t, rows(spark, t))
            assert outcome(job, EPOCHS) == expected
        daemons.start("n1")  # the host comes back with what it had: the same layers, because stages are functional
        eventually("both have everything", lambda: daemons.safe_point("n1") == EPOCHS - 1 == daemons.safe_point("n2"))
        assert dict(daemons.status("n2").problems) == {}
