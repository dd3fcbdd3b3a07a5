"""A Spark job over three hosts, each with a worker, a daemon and a directory of its own; and what happens to hosts meanwhile.

Whatever happens, the outcome is that of a run without faults on one machine, and the safe point never goes back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.testing.driver import SHARDS, make_flow, outcome, rows
from nosync.testing.hosts import can_make_namespaces
from nosync.testing.spark_hosts import Driver, SparkHosts, cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

EPOCHS = 8
DETECTION_S = 30.0
"""An epoch that loses a host takes less: Spark by itself would wait 120 s. The figures are in bench/takeover_hosts.py."""
long = pytest.mark.skipif(not os.environ.get("NOSYNC_LONG"), reason="of the long suite: make cluster")


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run without faults, daemons or hosts gives."""
    with nosync.open(tmp_path_factory.mktemp("fresh") / "s") as store:
        job = nosync.Job(make_flow(1), store, spark=spark, shards=SHARDS)
        for t in range(EPOCHS):
            job.advance(t, rows(spark, t))
        return outcome(job, EPOCHS)


def check(end: dict[str, Any], driver: Driver, expected: list[Any]) -> None:
    assert end["outcome"] == expected
    safe = [-1 if line["safe"] is None else line["safe"] for line in driver.epochs()]
    assert safe == sorted(safe), "the safe point went back"


def seconds_of(driver: Driver, t: int) -> float:
    return float(next(line["seconds"] for line in driver.epochs() if line["t"] == t))


def test_a_frozen_host_a_dead_driver_and_a_lost_host(tmp_path: Path, expected: list[Any]) -> None:
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(1)
        made.hosts.signal("n3", signal.SIGSTOP)
        driver.wait_for_epoch(3)
        assert max(seconds_of(driver, t) for t in (2, 3)) < DETECTION_S
        made.hosts.signal("n3", signal.SIGCONT)
        driver.kill()
        driver = made.start_driver("n1", epochs=EPOCHS, executors=2)
        driver.wait_for_epoch(5)
        made.hosts.kill("n2")
        check(driver.finish(), driver, expected)
        assert max(seconds_of(driver, t) for t in (6, 7)) < DETECTION_S
        begun = [line["started"] for line in driver.lines() if "started" in line]
        assert len(begun) == 2
        assert begun[1] >= 4, "the second driver goes on where the first one was"


@long
@pytest.mark.skipif(not can_make_namespaces(), reason="links can be cut in network namespaces only (root, ip)")
def test_a_host_that_hears_and_is_not_heard(tmp_path: Path, expected: list[Any]) -> None:
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(2)
        made.hosts.cut_off("n3")
        driver.wait_for_epoch(5)
        assert max(seconds_of(driver, t) for t in (3, 4, 5)) < DETECTION_S
        made.hosts.cut_off("n3", connected=True)
        check(driver.finish(), driver, expected)


@long
def test_what_only_a_lost_host_had_is_computed_again(tmp_path: Path, expected: list[Any]) -> None:
    """The daemon of n3 is gone, so nothing that is computed there reaches the others; then the host is, too."""
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(2)
        made.kill_daemon("n3")
        driver.wait_for_epoch(4)
        made.hosts.kill("n3")
        end = driver.finish()
        check(end, driver, expected)
        assert all(lost == recomputed and not hopeless for lost, recomputed, hopeless in end["recoveries"])


@long
def test_another_host_takes_the_job_over(tmp_path: Path, expected: list[Any]) -> None:
    """The host of driver and master dies. A new driver on n2 begins with the directory that is there."""
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(3)
        made.hosts.kill("n1")
        take_over(made, expected)


def take_over(made: SparkHosts, expected: list[Any]) -> None:
    for host in ("n2", "n3"):  # workers know the master that died
        made.stop_spark(host)
    made.start_master("n2")
    for host in ("n2", "n3"):
        made.start_worker(host)
    driver = made.start_driver("n2", epochs=EPOCHS, executors=2)
    check(driver.finish(), driver, expected)
    begun = [line for line in driver.lines() if "started" in line][-1]
    assert begun["started"] >= 3
    assert begun["recovered"] <= 16, "at most what was not replicated yet"
