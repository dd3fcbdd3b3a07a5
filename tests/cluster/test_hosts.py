"""A Spark job over three hosts, each with a worker, a daemon and a directory of its own; and what happens to hosts meanwhile.

Whatever happens, the outcome is that of a run without faults on one machine, and the safe point never goes back.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.lsm.model.layer import parse_file_name
from nosync.lsm.model.timestamp import epoch_of, round_of
from nosync.testing.daemon_cluster import eventually
from nosync.testing.driver import SHARDS, STAGES, link_rows, make_flow, make_loop, outcome, rows
from nosync.testing.namespaces import can_make_namespaces, hosts
from nosync.testing.spark_hosts import Driver, SparkHosts, cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

EPOCHS = 7
DETECTION_S = 30.0
"""An epoch that loses a host takes less: Spark by itself would wait 120 s. The figures are in bench/takeover_hosts.py."""
in_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs links of its own: network namespaces (root, ip)"
)
long = pytest.mark.long("make cluster")


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


@pytest.mark.long("make cluster")
def test_a_frozen_host_and_a_lost_host(tmp_path: Path, expected: list[Any]) -> None:
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(1)
        made.hosts.signal("n3", signal.SIGSTOP)
        driver.wait_for_epoch(3)
        made.hosts.signal("n3", signal.SIGCONT)
        driver.wait_for_epoch(4)
        made.hosts.kill("n2")
        check(driver.finish(), driver, expected)
        assert max(seconds_of(driver, t) for t in range(2, EPOCHS)) < DETECTION_S


@long
def test_a_dead_driver_and_a_lost_host(tmp_path: Path, expected: list[Any]) -> None:
    with cluster(tmp_path, "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=EPOCHS)
        driver.wait_for_epoch(3)
        driver.kill()
        driver = made.start_driver("n1", epochs=EPOCHS, executors=2)
        driver.wait_for_epoch(5)
        made.hosts.kill("n2")
        check(driver.finish(), driver, expected)
        assert seconds_of(driver, 6) < DETECTION_S
        begun = [line["started"] for line in driver.lines() if "started" in line]
        assert len(begun) == 2
        assert begun[1] >= 4, "the second driver goes on where the first one was"


@long
@in_namespaces
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


@long
@pytest.mark.parametrize("how", ["lost", "frozen"])
def test_a_loop_over_several_hosts_one_of_which_goes_away(spark: SparkSession, tmp_path: Path, how: str) -> None:
    """In the middle of an epoch's rounds; a frozen one comes back when the others are done."""
    epochs, stages = 6, STAGES["loop"]
    with nosync.open(tmp_path / "alone") as store:
        job = nosync.Job(make_loop(1), store, spark=spark, shards=SHARDS)
        for t in range(epochs):
            job.advance(t, link_rows(spark, t))
        alone = outcome(job, epochs, stages)
    assert [len(reached) for reached in alone[:epochs]] == [13, 25, 11, 11, 25, 25]
    with cluster(tmp_path / "hosts", "n1", "n2", "n3") as made:
        driver = made.start_driver("n1", epochs=epochs, loop=True)
        driver.wait_for_epoch(2, 200.0)

        def rounds(t: int | None = None) -> list[Path]:
            """The files of rounds, of an epoch or of any."""
            layers = [path for n in ("n1", "n2") for path in made.data(n).glob("layers/*/*/*/*.layer")]
            of = [(path, parse_file_name(path.name)) for path in layers]
            found = [(path, d) for path, d in of if d is not None and (round_of(d.lower) or round_of(d.upper))]
            return [path for path, d in found if t is None or epoch_of(d.lower) == t]

        eventually("epoch 3 is at its second round", lambda: len(rounds(3)) > 2 * SHARDS, 60.0)
        if how == "lost":
            made.hosts.kill("n3")
        else:
            made.hosts.signal("n3", signal.SIGSTOP)
        check(driver.finish(), driver, alone)
        if how == "frozen":
            made.hosts.signal("n3", signal.SIGCONT)
            eventually("n3 has all of it", lambda: made.status("n3").safe_point == epochs - 1, 60.0)

        eventually(
            "the rounds are gone on both hosts, some seconds after they were dropped", lambda: not rounds(), 60.0
        )


# --- a slow link ------------------------------------------------------------------------------------------------------

PUBLISH = """
import json, sys, time
import numpy as np, pyarrow as pa, nosync
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId

random = np.random.default_rng(1)
seconds = []
with nosync.open(sys.argv[1]) as store:
    for t in range(int(sys.argv[2]), int(sys.argv[3])):
        # The keys of the one come again, so that merging helps; those of the other do not.
        keys = {"dear": random.permutation(100_000)[:60_000], "cheap": random.permutation(60_000) + 60_000 * t}
        values = random.integers(0, 1 << 62, 60_000)
        began = time.perf_counter()
        for stage, k in keys.items():
            store.append(stage, t=t, rows=pa.table({"k": k, "v": values}), key=["k"])
        ids = [LayerId(TraceId(stage, "raw", Shard(0)), Description.of_epoch(t)) for stage in ("dear", "cheap")]
        store.node.seal(t, ids, copies={"dear": 2, "cheap": 0})
        seconds.append(time.perf_counter() - began)
        time.sleep(0.1)  # not a wait: epochs come at a steady rate
print(json.dumps(sorted(seconds)[len(seconds) // 2]))
"""
LAYER_BYTES = 60_000 * 16


@long
@in_namespaces
def test_a_slow_peer_slows_nobody_and_gets_less_until_it_has_caught_up(tmp_path: Path) -> None:
    """What can be computed again waits, the rest goes over merged, and in the end everything is there."""
    with hosts("n1", "n2") as found:
        made = SparkHosts(found, tmp_path, replicas=2)
        for host in ("n1", "n2"):
            made.start_daemon(host, "--retain", "2")
        data = str(made.data("n1"))
        healthy_s = float(made.run_program("n1", PUBLISH, data, "0", "10"))
        eventually("both have it", lambda: made.status("n2").safe_point == 9)
        found.throttle("n2", 4)
        before = found.received_bytes("n2")
        slow_s = float(made.run_program("n1", PUBLISH, data, "10", "80"))
        assert slow_s < 3 * healthy_s + 0.02, "nothing waits for the peer"
        behind = made.status("n2")
        assert behind.backlog_bytes > 20 * LAYER_BYTES
        assert behind.loaded
        eventually("all is safe", lambda: made.status("n1").safe_point == 79, 240.0)
        assert found.received_bytes("n2") - before < 0.5 * 70 * 2 * LAYER_BYTES
        found.throttle("n2", None)
        eventually("it has caught up", lambda: made.status("n1").peers[0].behind_files == 0)
        reply = made.status("n2")
        assert (reply.backlog_bytes, reply.loaded, dict(reply.problems)) == (0, False, {})
        for host in ("n1", "n2"):
            assert made.daemon_memory_bytes(host) < 500 << 20
