"""What counts as safe, and what is released, where nodes are away, disagree, or are opened without their daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running
from tests.helpers.daemons import _inputs, _publish_with_input, expected, publish, rows, state

NODES = ("n1", "n2", "n3")


@pytest.mark.long("make cluster")
def test_what_one_node_keeps_is_kept_by_one_that_has_it(tmp_path: Path) -> None:
    """The node that is to keep it is away while the others make it safe."""
    first, *others = replica_set("rows/raw/0", [NodeId(n) for n in NODES], 3)
    with running(tmp_path, NODES, replicas=2, start=tuple(others)) as daemons, daemons.open(others[0]) as store:
        for t in range(3):
            _publish_with_input(store, t, "disk")
        store.sync()
        eventually("it is safe", lambda: [daemons.safe_point(n) for n in others] == [2, 2])
        eventually("one keeps it", lambda: sum(_inputs(daemons, n) for n in others) == 3)
        daemons.start(first)
        eventually("it has it", lambda: _inputs(daemons, first) == 3)
        eventually("the others released their rows", lambda: sum(_inputs(daemons, n) for n in others) == 0)
        assert store.missing() == []
        _publish_with_input(store, 3, "disk")
        eventually("it goes on", lambda: all(daemons.safe_point(n) == 3 for n in NODES))
        eventually("so it stays", lambda: sum(_inputs(daemons, n) for n in NODES) == 4)


def _seal(store: nosync.Store, t: int, value: int) -> None:
    store.append("rows", t=t, rows=rows(value), key=[])
    store.append("counts", t=t, rows=rows(value), key=["k"])
    ids = [LayerId(TraceId(stage, "raw", Shard(0)), Description.of_epoch(t)) for stage in ("counts", "rows")]
    store.node.seal(t, ids, meta={"at_safe_point": {"rows": "drop"}})


def test_who_sealed_other_contents_takes_nothing_for_safe(tmp_path: Path) -> None:
    with running(tmp_path, NODES, start=("n2",)) as daemons:
        with daemons.open("n2") as store:
            _seal(store, 0, 1)
            _seal(store, 1, 7)
            store.sync()
        daemons.kill("n2")
        daemons.start("n1")
        daemons.start("n3")
        with daemons.open("n1") as store:
            _seal(store, 0, 0)
            _seal(store, 1, 1)
            store.sync()
        eventually("it is safe", lambda: daemons.safe_point("n1") == 1)
        daemons.start("n2")
        eventually("they disagree", lambda: "has other contents" in str(daemons.status("n2").problems))
        heartbeats = daemons.status("n2").peers
        assert {peer.state for peer in heartbeats} <= {"up", "suspect"}
        for _ in range(5):
            assert daemons.safe_point("n2") is None
        assert _inputs(daemons, "n2") == 2, "nobody else has them"
        main(["conflicts", str(daemons.data("n2")), "--take-theirs"])
        eventually("it is safe there too", lambda: daemons.safe_point("n2") == 1)


def test_a_directory_without_its_daemon_is_one_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, ("n1", "n2"), start=("n1",)) as daemons:
        with daemons.open("n1") as store:
            for t in range(3):
                _publish_with_input(store, t, "drop")
            store.sync()
        assert daemons.safe_point("n1") is None
        daemons.stop("n1")
        main(["compact", str(daemons.data("n1")), "--alone"])
        main(["status", str(daemons.data("n1")), "--json"])
        assert '"safe_point": null' in capsys.readouterr().out
        with nosync.open(daemons.data("n1"), alone=True) as alone:
            alone.sync()
            assert alone.safe_point() is None
        assert _inputs(daemons, "n1") >= 1
        daemons.start("n1")
        assert daemons.safe_point("n1") is None
        daemons.start("n2")
        eventually("now it is", lambda: daemons.safe_point("n1") == 2)
        with daemons.open("n2") as store:
            assert state(store, 2) == expected(2)


def test_nodes_of_different_key_groups_do_not_meet(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path, ("n1", "n2"), 2, dict(zip(("n1", "n2"), free_ports(2), strict=True)))
    try:
        for node, other, key_groups in (("n1", "n2", 16), ("n2", "n1", 128)):
            fields = {"node": node, "data": node, "listen": f"127.0.0.1:{daemons.ports[node]}"}
            lines = [*(f'{name} = "{value}"' for name, value in fields.items()), f"key_groups = {key_groups}"]
            lines += ["[peers]", f'{other} = "127.0.0.1:{daemons.ports[other]}"']
            (tmp_path / f"{node}.toml").write_text("\n".join(lines))
            daemons.start(node, "--config", str(tmp_path / f"{node}.toml"))
            if node == "n1":  # so that n2 finds nobody whose store it could join
                daemons.kill("n1")
        daemons.start("n1", "--config", str(tmp_path / "n1.toml"))
        eventually("n1 says no", lambda: daemons.peer("n1", "n2").state == "refused")
        assert "key_groups" in daemons.peer("n1", "n2").why
    finally:
        for process in daemons.processes.values():
            process.kill()
            process.wait()


def test_a_wiped_node_that_is_refused_has_no_copies_any_more(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2")) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        store.sync()
        eventually("it is safe", lambda: daemons.safe_point("n1") == 0)
        daemons.kill("n2")
        daemons.wipe("n2")
        with nosync.open(daemons.data("n2"), key_groups=64):
            pass  # another store
        daemons.start("n2")
        eventually("it is refused", lambda: daemons.peer("n1", "n2").state == "refused")
        publish(store, 1)
        store.sync()
        assert daemons.safe_point("n1") == 0
        assert daemons.peer("n1", "n2").behind_files > 5, "nothing of what it had counts"


@pytest.mark.long("make cluster")
def test_what_another_history_merged_replaces_nothing_that_is_safe(tmp_path: Path) -> None:
    """A node that nobody reached went on alone, further than the others, and merged its epochs with those that all had."""

    def shown(node: str) -> list[list[tuple[int, int]]]:
        with daemons.open(node) as store:
            return [state(store, t) for t in range(6)]

    with running(tmp_path, NODES) as daemons:
        with daemons.open("n1") as store:
            for t in range(3):
                publish(store, t)
        for node in NODES:
            eventually("all have it", lambda node=node: daemons.safe_point(node) == 2)  # type: ignore[misc]
        with daemons.open("n3"):
            daemons.kill("n1")
            daemons.kill("n2")
        with daemons.open("n3") as store:
            for t in range(3, 18):
                publish(store, t, values_of=100 + t)
            eventually("n3 merged", lambda: any(int(layer.upper) - int(layer.lower) > 10 for layer in store.layers()))
        daemons.kill("n3")
        daemons.start("n1")
        daemons.start("n2")
        with daemons.open("n1") as store:
            for t in range(3, 6):
                publish(store, t)
        for node in ("n1", "n2"):
            eventually("they are safe", lambda node=node: daemons.safe_point(node) == 5)  # type: ignore[misc]
        right = [expected(t) for t in range(6)]
        daemons.start("n3")
        eventually("they disagree", lambda: "has other contents" in str(daemons.status("n1").problems))
        with daemons.open("n1") as store:
            publish(store, 6)
        for node in ("n1", "n2"):
            eventually("they go on", lambda node=node: daemons.safe_point(node) == 6)  # type: ignore[misc]
            assert shown(node) == right
            assert daemons.status(node).last_sealed == 6
        main(["conflicts", str(daemons.data("n3")), "--take-theirs"])
        eventually("n3 has what counts", lambda: daemons.safe_point("n3") == 6)
        for node in NODES:
            eventually("all are one", lambda node=node: "other contents" not in str(daemons.status(node).problems))  # type: ignore[misc]
            assert shown(node) == right
            assert daemons.status(node).last_sealed == 6


def test_branches_that_were_changed_on_both_sides_are_a_conflict_and_no_more(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2")) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
        eventually("both have it", lambda: daemons.safe_point("n2") == 0)
        daemons.kill("n2")
        with daemons.open("n1") as store:
            store.node.create_branch("a", "main", 0)
            store.delete_branch("a")
        daemons.kill("n1")
        daemons.start("n2")
        with daemons.open("n2") as store:
            store.node.create_branch("b", "main", 0)
        daemons.start("n1")
        eventually("they disagree", lambda: "branches/1.json" in str(daemons.status("n2").problems))
        daemons.stop("n2")
        daemons.start("n2")
        eventually("they still do", lambda: "branches/1.json" in str(daemons.status("n2").problems))
        with daemons.open("n2") as store:
            assert state(store, 0) == expected(0)
            assert set(store.branches()) == {"main", "b"}
        main(["conflicts", str(daemons.data("n2")), "--take-theirs"])
        eventually("n2 took them", lambda: "branches" not in str(daemons.status("n2").problems))
        with daemons.open("n2") as store:
            eventually("its branches are those", lambda: set(_branches(daemons, "n2")) == {"main"})
            publish(store, 1)
        eventually("they go on", lambda: daemons.safe_point("n1") == 1)


def _branches(daemons: Daemons, node: str) -> set[str]:
    with nosync.open(daemons.data(node), read_only=True) as store:
        return set(store.branches())


def test_a_job_that_starts_with_its_daemon_sees_what_peers_have(tmp_path: Path) -> None:
    """As after a reboot: it asks before any peer was spoken to."""
    with running(tmp_path, ("n1", "n2")) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
            eventually("both have it", lambda: daemons.safe_point("n2") == 0)
            daemons.kill("n2")
            for t in range(1, 6):
                publish(store, t)
        daemons.start("n2")
        with daemons.open("n2") as store:
            assert store.last_sealed() == 5
            assert state(store, 5) == expected(5)


def test_a_member_is_replaced_in_one_step(tmp_path: Path) -> None:
    with running(tmp_path, NODES, start=("n1", "n2"), know=("n1", "n2")) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
        eventually("it is safe", lambda: daemons.safe_point("n1") == 0)
        daemons.kill("n2")
        daemons.know = ("n1", "n3")
        daemons.start("n3")
        address = f"127.0.0.1:{daemons.ports['n3']}"
        main(["peers", str(daemons.data("n1")), "--add", f"n3={address}", "--remove", "n2"])
        assert [peer.node for peer in daemons.status("n1").peers] == ["n3"]
        with daemons.open("n1") as store:
            publish(store, 1)
        eventually("two copies again", lambda: daemons.safe_point("n1") == 1)
