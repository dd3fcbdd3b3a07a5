"""Inputs that are let go of when they are safe, and what keeps them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.testing.daemon_cluster import eventually, running
from tests.helpers.daemons import _inputs, _publish_with_input, expected, state


@pytest.mark.long("make cluster")
@pytest.mark.parametrize(("policy", "nodes_that_keep"), [("drop", 0), ("disk", 1)])
def test_inputs_go_from_all_nodes_when_they_are_safe(tmp_path: Path, policy: str, nodes_that_keep: int) -> None:
    nodes = ("n1", "n2")
    with running(tmp_path, nodes, replicas=2) as daemons:
        daemons.kill("n2")
        with daemons.open("n1") as store:
            for t in range(3):
                _publish_with_input(store, t, policy)
            store.sync()
            assert daemons.safe_point("n1") is None
            assert _inputs(daemons, "n1") == 3, "one copy is not what was asked for"
            progress = {stage.stage: stage for stage in daemons.status("n1").stages}
            assert [(s.durable, s.HasField("replicated")) for s in progress.values()] == [(2, False)] * 2
            assert [progress[stage].waiting_layers for stage in ("counts", "rows")] == [6, 3]
            assert progress["rows"].waiting_bytes > 0
            assert daemons.status("n1").lag_s > 0
            daemons.start("n2")
            eventually("both know it is safe", lambda: [daemons.safe_point(n) for n in nodes] == [2, 2])
            kept = nodes_that_keep * 3
            eventually("they released their rows", lambda: sum(_inputs(daemons, n) for n in nodes) == kept)
            assert store.missing() == []
            # A node that comes with nothing is told what is safe, and does not ask for what is gone.
            daemons.kill("n2")
            daemons.wipe("n2")
            daemons.start("n2")
            eventually("n2 is filled", lambda: daemons.safe_point("n2") == 2)
            _publish_with_input(store, 3, policy)
            eventually("it goes on", lambda: [daemons.safe_point(n) for n in nodes] == [3, 3])
            assert sum(_inputs(daemons, n) for n in nodes) >= kept
        with daemons.open("n2") as store:
            assert store.missing() == []
            assert state(store, 2) == expected(2)


@pytest.mark.long("make cluster")
def test_a_peer_that_does_not_know_this_node_is_named(tmp_path: Path) -> None:
    """n1 dials nobody that it does not know, and n2 nobody whose name comes before its own."""
    with running(tmp_path, ("n1", "n2"), replicas=1, start=("n1",)) as daemons:
        main(["peers", str(daemons.data("n1")), "--remove", "n2"])
        daemons.start("n2")
        eventually("n2 says what may be", lambda: daemons.peer("n2", "n1").why)
        peer = daemons.peer("n2", "n1")
        assert (peer.state, "names no such peer as this node" in peer.why) == ("away", True)
        main(["peers", str(daemons.data("n1")), "--add", f"n2=127.0.0.1:{daemons.ports['n2']}"])
        eventually("they meet", lambda: daemons.peer("n2", "n1").state == "up")
        assert daemons.peer("n2", "n1").why == ""


def test_the_node_of_a_job_keeps_everything_after_its_daemon_was_restarted(tmp_path: Path) -> None:
    shards = range(6)

    def seal(store: nosync.Store, t: int) -> None:
        for i in shards:
            store.append("counts", shard=i, t=t, rows=pa.table({"k": [i], "v": [t]}), key=["k"])
        store.seal(t)

    def layers(node: str) -> int:
        with nosync.open(daemons.data(node), read_only=True) as store:
            return sum(layer.upper - layer.lower for layer in store.layers())

    with running(tmp_path, ("n1", "n2", "n3"), replicas=1) as daemons, daemons.open("n1") as store:
        with nosync.open(daemons.data("n2")) as of_tasks:
            seal(of_tasks, 0)
            eventually("n1 has all", lambda: layers("n1") == 6)
            daemons.kill("n1")
            daemons.start("n1")
            eventually("the job's store finds it", lambda: store.safe_point() == 0)
            seal(of_tasks, 1)
            eventually("n1 has all of that", lambda: layers("n1") == 12)
            daemons.kill("n2")
        assert sorted(store.read("counts", 1).column("v").to_pylist()) == [1] * 6
