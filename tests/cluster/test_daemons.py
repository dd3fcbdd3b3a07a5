"""Daemons as real processes: replication, death, freezing, wiped and cloned directories, branches, damage."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.facts.fencing import Instance, check_fence, take_over
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.branches import ChangedStages, Refs
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId, of_round
from nosync.lsm.platform.env import Env
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.client.fetching_directory import FetchingDirectory, wait_for_peers
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import eventually, free_ports, running
from tests.helpers.daemons import expected, publish, rows, state


def test_another_node_goes_on_without_a_restore(tmp_path: Path) -> None:
    with running(tmp_path) as daemons:
        with daemons.open("n1") as store:
            for t in range(5):
                publish(store, t)
            eventually("n1 is safe", lambda: daemons.safe_point("n1") == 4)
            assert store.safe_point() == 4
        daemons.kill("n1")
        eventually("n2 knows of epoch 4", lambda: daemons.status("n2").last_sealed == 4)
        with daemons.open("n2") as store:
            assert [state(store, t) for t in range(5)] == [expected(t) for t in range(5)]
            assert store.missing() == []
            for t in (5, 6):  # with n1 gone, n2 and n3 are enough for two copies
                publish(store, t)
            eventually("n2 is safe", lambda: daemons.safe_point("n2") == 6)
        daemons.start("n1")
        eventually("n1 caught up", lambda: daemons.safe_point("n1") == 6)
        with daemons.open("n1") as store:
            assert state(store, 6) == expected(6)
            assert store.missing() == []


def test_what_only_a_peer_holds_is_fetched_when_it_is_read(tmp_path: Path) -> None:
    """The host that wrote is gone before the other two have told each other what they hold."""
    with running(tmp_path) as daemons:
        eventually(
            "n2 and n3 have met", lambda: daemons.peer("n2", "n3").state == daemons.peer("n3", "n2").state == "up"
        )
        for t in range(4):
            with daemons.open("n1") as store:
                publish(store, t)
                eventually("n1 is safe", lambda t=t: daemons.safe_point("n1") == t)  # type: ignore[misc]
            daemons.kill("n1")
            for node in ("n2", "n3"):
                with daemons.open(node) as store:
                    assert state(store, t) == expected(t), (node, t)
            daemons.start("n1")


def test_nobody_waits_for_what_no_peer_has(tmp_path: Path) -> None:
    """Peers are asked what is on their disks. One that does not answer is waited for until it is suspected."""
    with running(tmp_path) as daemons, contextlib.ExitStack() as stack:
        client = client_of(daemons.data("n2"))
        assert client is not None
        stack.callback(client.close)
        for other in ("n1", "n3"):
            eventually(f"n2 has met {other}", lambda other=other: daemons.peer("n2", other).state == "up")  # type: ignore[misc]
        asked: list[bool] = []

        class Counted:
            def keep(self, traces: list[str]) -> bool:
                asked.append(client.keep(traces))
                return asked[-1]

        def waited(*traces: str) -> list[bool]:
            asked.clear()
            assert not wait_for_peers(Counted(), Env(), list(traces), lambda: False, patience_s=600.0)
            return list(asked)

        assert waited("counts/raw/0", "counts/raw/1") == [False]
        with daemons.open("n1") as store:
            publish(store, 0)
        here = FetchingDirectory(daemons.data("n2"), 128)
        ids = [LayerId(TraceId("counts", "raw", Shard(i)), Description.of_epoch(0)) for i in (0, 1)]
        assert [here.fetch(id) for id in ids] == [True, True]
        assert not here.fetch(LayerId(ids[0].trace, Description.of_epoch(1)))
        assert waited("counts/raw/0") == [False], "there is more of it, and all of that is here"

        def is_frozen_one_waited_for() -> bool:
            """Asked before it is suspected; on a busy machine that may be too late, or it may answer before it stands
            still.
            """
            eventually("n1 is up", lambda: daemons.peer("n2", "n1").state == "up")
            daemons.signal("n1", signal.SIGSTOP)
            found = waited("counts/raw/0")
            daemons.signal("n1", signal.SIGCONT)
            assert not found[-1]
            return found[0]

        eventually("one that does not answer is waited for", is_frozen_one_waited_for)
        with pytest.raises(nosync.ReplicationError, match=r"\.\."):
            client.keep(["../.."])


def test_who_publishes_keeps_the_processor(tmp_path: Path) -> None:
    """The daemon's threads take it from nobody in the middle of a turn, and are no less than others, unless that is
    wanted.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with running(tmp_path, ("n1",), replicas=1, start=()) as daemons:
        for more, priority in ((), own), (("--nice", "5"), min(own + 5, 19)):
            daemons.start("n1", *more)
            pid, expected_turns = daemons.processes["n1"].pid, {(priority, os.SCHED_BATCH)}
            eventually("all give way", lambda pid=pid, all=expected_turns: set(_turns(pid)) == all)  # type: ignore[misc]
            daemons.stop("n1")


def _turns(pid: int) -> list[tuple[int, int]]:
    """Of each thread of a process: its priority, and how it is scheduled."""
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    return [(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)) for thread in threads]


def test_the_safe_point_waits_for_copies_and_nothing_else_does(tmp_path: Path) -> None:
    """A frozen peer is suspected, slows nothing, and is filled when it thaws."""
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("both have it", lambda: daemons.safe_point("n1") == 0)
        healthy_s = _publish_seconds(store, range(1, 11))
        daemons.signal("n2", signal.SIGSTOP)
        frozen_at = time.monotonic()
        frozen_s = _publish_seconds(store, range(11, 21))
        eventually("n2 is suspected", lambda: daemons.peer("n1", "n2").state != "up")
        noticed_s = time.monotonic() - frozen_at
        store.sync()
        assert daemons.safe_point("n1") <= 10
        assert daemons.peer("n1", "n2").behind_files > 0
        daemons.signal("n2", signal.SIGCONT)
        eventually("n2 has all", lambda: daemons.safe_point("n1") == 20)
        eventually("n2 is up", lambda: daemons.peer("n1", "n2").state == "up")
        assert noticed_s < 10, "at default settings it is 2 s; machines here are slow"
        assert frozen_s < 20 * healthy_s + 1.0, "it would take seconds if anything waited for the peer"


@pytest.mark.long("make cluster")
def test_old_manifests_are_archived_on_every_node_and_a_new_node_gets_them_so(tmp_path: Path) -> None:
    def files(node: str) -> list[str]:
        directory = daemons.data(node) / "manifests" / "main"
        return sorted(
            (path.name for path in directory.glob("*.json")), key=lambda name: int(name.split("-")[0].split(".")[0])
        )

    archived = ["0-3.json", "4-7.json", *(f"{t}.json" for t in range(8, 14))]
    with running(tmp_path, replicas=2, extra=("--archive-epochs", "4")) as daemons:
        daemons.kill("n3")
        with daemons.open("n1") as store:
            for t in range(14):
                publish(store, t)
            eventually("n1 is safe", lambda: daemons.safe_point("n1") == 13)
            for node in ("n1", "n2"):
                eventually(f"{node} has archives", lambda node=node: files(node) == archived)  # type: ignore[misc]
            shutil.rmtree(daemons.data("n3"))
            daemons.start("n3")
            eventually("n3 is filled", lambda: files("n3") == archived)
            publish(store, 14)
            eventually("n1 is safe again", lambda: daemons.safe_point("n1") == 14)
            store.rewind(5, keep_as="")
            for node in daemons.nodes:
                eventually(
                    f"{node} is cut", lambda node=node: files(node) == ["0-3.json", "4.json", "5.json"]  # type: ignore[misc]
                )  # fmt: skip
        daemons.kill("n1")
        assert daemons.status("n3").last_sealed == 5
        with daemons.open("n3") as store:
            assert [state(store, t) for t in range(6)] == [expected(t) for t in range(6)]
            assert store.missing() == []
            assert store.verify().ok


def test_pins_instances_and_marks_reach_the_other_nodes(tmp_path: Path) -> None:
    """A pin holds history on every node; a job that another node's has replaced is refused; marks of sinks are known."""
    with (
        running(tmp_path, ("n1", "n2"), replicas=2, extra=("--retain", "2")) as daemons,
        daemons.open("n1") as one,
        daemons.open("n2") as other,
    ):
        env = one.directory.env
        for t in range(3):
            publish(one, t)
        one.pin("before", 1)
        first = take_over(one.directory.root, "main", env)
        DeliveryLog(one.directory.root, "counts", "main", Refs(), env).mark(2)
        eventually("n2 has the pin", lambda: other.pins() == {"before": 1})
        second = take_over(other.directory.root, "main", env)
        assert second.number in (1, 2), "the other's file may not be there yet"
        marks = DeliveryLog(other.directory.root, "counts", "main", Refs(), env)
        eventually("n2 knows what was given", lambda: marks.delivered(2))
        if second > first:
            eventually("n1 is fenced", lambda: _is_fenced(one, first))
        else:
            eventually("n2 is fenced", lambda: _is_fenced(other, second))
        for t in range(3, 12):
            publish(one, t)
        eventually("n2 has all", lambda: daemons.safe_point("n2") == 11)
        for store in (one, other):
            store.compact()
            assert store.since() <= 1
            assert state(store, 1) == expected(1), "pinned"
        other.unpin("before")
        eventually("n1 knows of it", lambda: one.pins() == {})
        eventually("history goes on", lambda: one.since() == 9)


def test_a_store_is_read_over_a_connection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is fetched is what is there, a cache is used again, and damage and strangers are refused."""
    with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        address, cache = f"127.0.0.1:{daemons.ports['n1']}", tmp_path / "cache"
        for t in range(4):
            publish(store, t)
        store.sync()
        store.pin("two", 2)
        with nosync.connect(address, cache=cache) as there:
            assert [state(there, t) for t in range(4)] == [expected(t) for t in range(4)]
            assert there.changes("counts", 1, 3).equals(store.changes("counts", 1, 3))
            assert there.lookup("counts", pa.table({"k": [3, 7]})).num_rows == 2
            assert there.pins() == {"two": 2}
            assert (there.last_sealed(), there.since(), there.schema("counts")) == (3, 0, store.schema("counts"))
            eventually("safe", lambda: there.safe_point() == 3)
            assert [layer.digest for layer in there.layers()] == [layer.digest for layer in store.layers()]
            assert there.status().stages == store.status().stages
            publish(store, 4)  # seen without connecting again
            assert state(there, 4) == expected(4)
            assert there.compact() > 0
            assert state(there, 1) == expected(1), "merged away there meanwhile"
            assert there.verify().errors == ()
            for write in (lambda: there.pin("x", 1), lambda: there.append("counts", t=5, rows=rows(5))):
                with pytest.raises(nosync.StorageError, match="can be read and not written"):
                    write()
        with nosync.connect(address, cache=cache) as again:
            assert state(again, 3) == expected(3)
        kept = [path for path in cache.rglob("*") if path.suffix in (".layer", ".json")]
        assert {path.suffix for path in kept} == {".layer", ".json"}
        for torn in (b"", b"torn"):  # by a crash of the machine: nothing of a cache is synced
            for path in kept:
                written_ns = path.stat().st_mtime_ns
                path.write_bytes(torn)
                os.utime(path, ns=(written_ns, written_ns))
            with nosync.connect(address, cache=cache) as mended:
                assert [state(mended, t) for t in range(5)] == [expected(t) for t in range(5)]
        with nosync.connect(address) as here:
            assert here.directory.root == daemons.data("n1"), "on the daemon's host it is the store itself"
            publish(here, 5)
        main(["get", address, "counts", "--key", "k=7", "--as-of", "3", "--json"])
        assert '"v": 3007' in capsys.readouterr().out
        about = daemons.data("n1") / "daemon.json"
        of_n1 = about.read_text()
        about.write_text(of_n1.replace('"n1"', '"n2"'))  # as where a path of this host is another node's
        with nosync.connect(address) as there:
            assert there.directory.root != daemons.data("n1")
            kept = there.directory.root
            assert state(there, 5) == expected(5)
        assert not kept.exists(), "what was fetched goes with the connection"
        main(["status", address, "--json"])
        assert json.loads(capsys.readouterr().out)["daemon"]["node"] == "n1"
        about.write_text(of_n1)
        daemons.stop("n1")
        with pytest.raises(nosync.ReplicationError, match="does not answer"):
            nosync.connect(address)
    with (
        running(tmp_path / "others", ("n9",), replicas=1) as others,
        pytest.raises(nosync.ReplicationError, match="give another cache="),
    ):
        nosync.connect(f"127.0.0.1:{others.ports['n9']}", cache=cache)


def test_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(nosync.InvalidInputError, match="belong together"):
        nosync.connect("127.0.0.1:1", tls="certs")
    with pytest.raises(nosync.ReplicationError, match="not HOST:PORT"):
        nosync.connect("somewhere")


def _is_fenced(store: nosync.Store, instance: Instance) -> bool:
    try:
        check_fence(store.directory.root, "main", instance, store.directory.env)
    except nosync.FencedError:
        return True
    return False


def _publish_seconds(store: nosync.Store, epochs: range) -> float:
    started = time.monotonic()
    for t in epochs:
        publish(store, t)
    return (time.monotonic() - started) / len(epochs)


def test_a_wiped_node_counts_no_more_until_it_is_filled_again(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        for t in range(3):
            publish(store, t)
        eventually("both have them", lambda: daemons.safe_point("n1") == 2)
        before = daemons.status("n2").incarnation
        daemons.kill("n2")
        daemons.wipe("n2")
        publish(store, 3)
        daemons.start("n2")
        assert daemons.status("n2").incarnation != before
        eventually("n2 has all again", lambda: daemons.safe_point("n1") == 3 == daemons.safe_point("n2"))
        with daemons.open("n2") as other:
            assert [state(other, t) for t in range(4)] == [expected(t) for t in range(4)]


def test_a_damaged_layer_is_fetched_again(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        for t in range(3):
            publish(store, t)
        eventually("both have them", lambda: daemons.safe_point("n1") == 2)
        with daemons.open("n2") as other:
            victim = Path(other.layers()[0].path)
            whole = victim.read_bytes()
            flipped = bytearray(whole)
            flipped[len(whole) // 3] ^= 0x10
            victim.write_bytes(flipped)
            client = client_of(daemons.data("n2"))
            assert client is not None
            assert len(client.check()) == 1
            client.close()
            eventually("it is whole again", lambda: victim.exists() and victim.read_bytes() == whole)
            eventually("and counts", lambda: daemons.peer("n1", "n2").behind_files == 0)


@pytest.mark.long("make cluster")
def test_rounds_of_a_loop_are_fetched_by_who_asks_and_dropped_everywhere(tmp_path: Path) -> None:
    trace = TraceId("reached", "f", Shard(0, 1))
    ids = [LayerId(trace, of_round(5, r)) for r in range(3)]
    of_next = LayerId(trace, of_round(6, 0))
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons:
        eventually("they are linked", lambda: daemons.peer("n2", "n1").state == "up")
        here = LayerDirectory(daemons.data("n1"), 128)
        for r, id in enumerate([*ids, of_next]):
            here.publish(id, arrange(pa.table({"k": pa.array([r], pa.int64())}), ["k"], whose="test"))
        flip(here.path_of(ids[2]))
        there = FetchingDirectory(daemons.data("n2"), 128)
        for _ in range(2):
            there.fetch_rounds([TraceId("other", "f", Shard(0, 1)), trace], 5)
            assert [there.path_of(id).exists() for id in (*ids, of_next)] == [True, True, False, False]
        assert [there.recorded(id).digest for id in ids[:2]] == [here.recorded(id).digest for id in ids[:2]]
        with daemons.open("n1") as store:
            store.node.drop_rounds("reached", 5)
        eventually("they are gone here", lambda: here.layer_ids() == [of_next], 30.0)
        eventually("and there", lambda: there.layer_ids() == [], 30.0)
        daemons.kill("n1")
        there.fetch_rounds([trace], 6)  # nobody has them any more: that is for the job to find out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_branches_and_merges_reach_the_others(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        for t in range(6):
            publish(store, t)
        both = ("counts", "other")
        store.node.create_branch("try", "main", 3, ChangedStages(both, both, ("other",)))
        eventually("n2 knows the branch", lambda: "try" in nosync.open(daemons.data("n2"), read_only=True).branches())
        lines = [store.branches()["try"], nosync.open(daemons.data("n2"), read_only=True).branches()["try"]]
        assert {(line.at, line.changed, line.anew, line.replaced) for line in lines} == {(3, both, both, ("other",))}
        eventually("safe", lambda: daemons.safe_point("n1") == 5)
        assert sum(1 for _ in store.node.compact("counts")) >= 0
        client = client_of(daemons.data("n1"))
        assert client is not None
        list(client.compact())
        client.close()
        maps = Path(f"/proc/{daemons.processes['n1'].pid}/maps").read_text()
        assert "/pyarrow/" in maps
        assert "/pandas/" not in maps, "Arrow loads it for nothing"
        eventually("nothing is behind", lambda: daemons.peer("n1", "n2").behind_files == 0)
        assert daemons.safe_point("n1") == 5, "a merged layer counts for what it covers"
        store.delete_branch("try")
        eventually("n2 forgot it", lambda: "try" not in nosync.open(daemons.data("n2"), read_only=True).branches())
        with daemons.open("n2") as other:
            assert [state(other, t) for t in range(6)] == [expected(t) for t in range(6)]


def test_nodes_join_and_leave_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("n1", "n2", "n3")
    with (
        running(tmp_path, nodes, replicas=2, start=("n1", "n2"), know=("n1", "n2")) as daemons,
        daemons.open("n1") as store,
    ):
        for t in range(4):
            publish(store, t)
        eventually("safe", lambda: daemons.safe_point("n1") == 3)
        daemons.know = nodes
        daemons.start("n3")
        for node in ("n1", "n2"):
            main(["peers", str(daemons.data(node)), "--add", f"n3=127.0.0.1:{daemons.ports['n3']}"])
        assert "n3" in capsys.readouterr().out
        eventually(
            "n3 is filled",
            lambda: daemons.peer("n1", "n3").state == "up" and daemons.peer("n1", "n3").behind_files == 0,
        )
        daemons.kill("n2")
        daemons.wipe("n2")
        for node in ("n1", "n3"):
            main(["peers", str(daemons.data(node)), "--remove", "n2", "--json"])
        assert '"n2"' not in capsys.readouterr().out
        publish(store, 4)
        eventually("two copies without n2", lambda: daemons.safe_point("n1") == 4)
        with daemons.open("n3") as other:
            assert [state(other, t) for t in range(5)] == [expected(t) for t in range(5)]
        with pytest.raises(SystemExit):
            main(["peers", str(daemons.data("n1")), "--remove", "n3"])
        assert "1 nodes would be left for replicas=2: add one first" in " ".join(capsys.readouterr().err.split())
        daemons.kill("n1")
        daemons.start("n1")  # with n2 still in its configuration
        assert [peer.node for peer in daemons.status("n1").peers] == ["n3"]


def test_a_peer_that_was_away_is_sent_less_than_was_written(tmp_path: Path) -> None:
    """What waits is merged meanwhile, and goes over merged; nothing waits for the peer, and it catches up."""
    (port,) = free_ports(1)

    def sent(what: str) -> float:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        return float(re.search(rf"^nosync_sent_{what}_total (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    with running(tmp_path, ("n1", "n2"), replicas=2, start=("n2",)) as daemons:
        daemons.start("n1", "--metrics", f"127.0.0.1:{port}")
        with daemons.open("n1") as store:
            publish(store, 0)
            eventually("safe", lambda: daemons.safe_point("n1") == 0)
            of_epoch = sum(layer.bytes for layer in store.layers())
            daemons.signal("n2", signal.SIGSTOP)
            # Until it is noticed, small new layers are sent to it unasked.
            eventually("n2 is away", lambda: daemons.peer("n1", "n2").state != "up")
            before = {what: sent(what) for what in ("files", "bytes")}
            for t in range(1, 61):
                publish(store, t)
            client = client_of(daemons.data("n1"))
            assert client is not None
            list(client.compact())
            manifests = [path for path in (daemons.data("n1") / "manifests").rglob("*.json") if path.stem != "0"]
            daemons.signal("n2", signal.SIGCONT)
            eventually("n2 caught up", lambda: daemons.safe_point("n1") == 60)
            client.close()
            written = 60 * of_epoch + sum(path.stat().st_size for path in manifests)
            assert sent("files") - before["files"] < 60 + 2 * 60 / 2 + 60 / 4, (
                "a manifest an epoch, two shards' layers merged, and times of several epochs each"
            )
            assert sent("bytes") - before["bytes"] < 0.75 * written
        with daemons.open("n2") as other:
            assert [state(other, t) for t in (0, 30, 60)] == [expected(t) for t in (0, 30, 60)]
