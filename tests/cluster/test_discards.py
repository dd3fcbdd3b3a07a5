"""`nosync conflicts --take-theirs` with three nodes, two of which are wrong: nothing wrong comes back, or is taken for safe."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import ReplicationError
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import Daemons, eventually, running

NODES = ("n1", "n2", "n3")


def seal(store: nosync.Store, t: int, value: int) -> None:
    store.append("c", t=t, rows=pa.table({"k": [1, 2], "v": [value, t]}), key=["k"])
    store.seal(t)


def seal_two_copies(store: nosync.Store, t: int, value: int) -> None:
    """Fewer than the daemons keep."""
    store.append("c", t=t, rows=pa.table({"k": [1, 2], "v": [value, t]}), key=["k"])
    store.node.seal(t, [LayerId(TraceId("c", "raw", Shard(0)), Description.of_epoch(t))], copies={"c": 2})


def conflicts(daemons: Daemons, node: str, *, take_theirs: bool = False) -> list[str]:
    client = client_of(daemons.data(node))
    assert client is not None
    with contextlib.closing(client):
        return client.conflicts(take_theirs=take_theirs)


def values(daemons: Daemons, node: str) -> list[int | None]:
    """What a node's own files say of the disputed key at each epoch."""
    with nosync.open(daemons.data(node), read_only=True) as store:
        last = store.last_sealed()
        epochs = range(0 if last is None else last + 1)
        return [store.lookup("c", pa.table({"k": [1]}), t).column("v")[0].as_py() for t in epochs]


@pytest.mark.long("make cluster")
@pytest.mark.parametrize("right", ["n1", "n2", "n3"])
def test_what_two_nodes_give_up_comes_back_from_neither(tmp_path: Path, right: str) -> None:
    first, second = (node for node in NODES if node != right)
    with running(tmp_path, NODES, replicas=3) as daemons:
        with daemons.open(first) as store:
            for t in range(3):
                seal_two_copies(store, t, t)
            eventually("all have it", lambda: all(daemons.safe_point(node) == 2 for node in NODES))
            daemons.stop(right)
            for t in (3, 4, 5):
                seal_two_copies(store, t, 10 * t)
            eventually("it is safe", lambda: daemons.safe_point(first) == daemons.safe_point(second) == 5)
        daemons.stop(first)
        daemons.stop(second)
        daemons.start(right)
        with daemons.open(right) as store:
            for t in (3, 4, 5):
                seal_two_copies(store, t, 100 * t)
            store.sync()
        daemons.start(first)
        daemons.start(second)
        expected = [0, 1, 2, 300, 400, 500]
        eventually("they disagree", lambda: all(len(conflicts(daemons, node)) >= 3 for node in NODES))
        for node in (first, second):
            gone = conflicts(daemons, node, take_theirs=True)
            assert {f"manifests/main/{t}.json" for t in (3, 4, 5)} <= set(gone)
            assert any(name.startswith("layers/") for name in gone), "all that went is told"
            eventually(f"{node} has the others'", lambda node=node: values(daemons, node) == expected)
        eventually("all agree", lambda: [conflicts(daemons, node) for node in NODES] == [[], [], []])
        eventually("it is safe again", lambda: all(daemons.safe_point(node) == 5 for node in NODES))
        eventually("nobody complains", lambda: not any(daemons.status(node).problems for node in NODES))
        daemons.stop(first)
        daemons.start(first)
        eventually("it is back", lambda: daemons.safe_point(first) == 5)
        with daemons.open(first) as store:
            assert store.missing() == []
            assert store.verify().errors == ()
        assert [values(daemons, node) for node in NODES] == [expected] * 3


def test_what_was_safe_of_the_one_is_not_for_the_other(tmp_path: Path) -> None:
    with running(tmp_path, NODES, replicas=3) as daemons:
        with daemons.open("n1") as store:
            for t in range(4):
                seal(store, t, t)
        eventually("all is safe", lambda: all(daemons.safe_point(node) == 3 for node in NODES))
        for node in NODES:
            daemons.stop(node)
        # n3 is put back from a backup of before epoch 3, and a job there seals another one.
        (daemons.data("n3") / "manifests" / "main" / "3.json").unlink()
        for path in (daemons.data("n3") / "layers" / "c" / "raw" / "0").glob("3-4-*"):
            path.unlink()
        shutil.rmtree(daemons.data("n3") / "catalog")
        daemons.start("n3")
        with daemons.open("n3") as store:
            seal(store, 3, 33)
            store.sync()
        daemons.start("n1")
        eventually("they disagree", lambda: conflicts(daemons, "n1"))
        conflicts(daemons, "n1", take_theirs=True)
        eventually("n1 has n3's", lambda: values(daemons, "n1") == [0, 1, 2, 33])
        for _ in range(5):
            assert daemons.safe_point("n1") == 2, "of three copies there are two"
            assert daemons.safe_point("n3") in (None, 2)
        daemons.start("n2")
        eventually("n2 disagrees", lambda: conflicts(daemons, "n2"))
        conflicts(daemons, "n2", take_theirs=True)
        eventually("now it is", lambda: all(daemons.safe_point(node) == 3 for node in NODES))


def test_the_only_copy_is_not_discarded(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2, start=()) as daemons:
        for node, value in (("n1", 1), ("n2", 2)):
            daemons.start(node)
            with daemons.open(node) as store:
                seal(store, 0, value)
                store.sync()
            daemons.stop(node)
        for node in ("n1", "n2"):
            daemons.start(node)
        eventually("they disagree", lambda: conflicts(daemons, "n2"))
        daemons.kill("n1")
        eventually("n1 is away", lambda: daemons.peer("n2", "n1").state != "up")
        with pytest.raises(ReplicationError, match="are on n1, which is away: .* would leave nothing"):
            conflicts(daemons, "n2", take_theirs=True)
        assert values(daemons, "n2") == [2]
        daemons.start("n1")
        eventually("n1 is back", lambda: daemons.peer("n2", "n1").state == "up" and conflicts(daemons, "n2"))
        conflicts(daemons, "n2", take_theirs=True)
        eventually("they agree", lambda: values(daemons, "n2") == [1] and daemons.safe_point("n2") == 0)
