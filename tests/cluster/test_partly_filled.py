"""A node that lost its disk, and that a peer which was away itself has filled with a part."""

from __future__ import annotations

from pathlib import Path

import pytest

import nosync
from nosync.replication.client import remote_node
from nosync.testing.daemon_cluster import eventually, running
from tests.helpers.daemons import publish, state


def test_no_job_goes_on_from_a_part_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n3 has epochs that were safe with n1, and n2 has not: what n2 has is not all."""
    with running(tmp_path, ("n1", "n2", "n3"), replicas=2) as daemons:
        daemons.new_store = False
        with daemons.open("n1") as store:
            for t in range(2):
                publish(store, t)
            eventually("all have them", lambda: all(daemons.safe_point(node) == 1 for node in daemons.nodes))
            daemons.kill("n2")
            for t in range(2, 5):
                publish(store, t)
            eventually("n3 has the rest", lambda: daemons.safe_point("n1") == 4 == daemons.safe_point("n3"))
        daemons.kill("n3")
        daemons.kill("n1")
        daemons.wipe("n1")
        daemons.start("n2")
        daemons.start("n1")
        eventually("n2 gave what it has", lambda: daemons.status("n1").last_sealed == 1)
        mark = daemons.data("n1") / "being-filled.json"
        for _ in range(2):
            assert mark.exists()
            daemons.kill("n1")
            daemons.start("n1")  # a new life of the daemon does not forget it
        with monkeypatch.context() as patch:
            patch.setattr(remote_node, "FILL_PATIENCE_S", 0.5)
            with pytest.raises(nosync.ReplicationError, match="has only a part of what its peers have yet"):
                daemons.open("n1")
        daemons.start("n3")
        eventually("all is here", lambda: not mark.exists())
        with daemons.open("n1") as store:
            assert store.last_sealed() == 4
            assert state(store, 4)


def test_nothing_is_dropped_that_a_node_which_is_away_may_go_on_with(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        for t in range(5):
            publish(store, t)
        eventually("both have them", lambda: all(daemons.safe_point(node) == 4 for node in daemons.nodes))
        daemons.kill("n2")
        eventually("n1 sees that n2 is away", lambda: daemons.peer("n1", "n2").state != "up")
        with pytest.raises(nosync.NosyncError, match="would be dropped while n2 may go on with it"):
            store.rewind(2, keep_as="")
        assert store.last_sealed() == 4
        store.rewind(2, keep_as="kept")
        with pytest.raises(nosync.NosyncError, match="would be dropped while n2 may go on with it"):
            store.promote("kept", keep_as="")
        daemons.start("n2")
        eventually("n2 is back", lambda: daemons.peer("n1", "n2").state == "up")
        store.promote("kept", keep_as="")
        assert store.last_sealed() == 4
