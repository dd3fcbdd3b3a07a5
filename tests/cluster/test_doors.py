"""Doors on several hosts: tasks write and read through the door of their own host, and the files are one checkpoint."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints import serve
from nosync.checkpoints.door import api
from nosync.checkpoints.door.api import Door
from nosync.checkpoints.door.other_doors import OtherDoors, Server
from nosync.checkpoints.door.served_checkpoints import DoorSettings
from nosync.lsm.errors import RefusedError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.checkpoints.door.client import Client, Refused
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.fake_query import KINDS
from tests.helpers.checkpoints import contents

NODES = ("n1", "n2", "n3")
STATE = re.compile(r"state/(\d+)/(\d+)/")


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemons]:
    """Every file of a state stays where it is written at first, however small it is."""
    monkeypatch.setattr(api, "DoorSettings", functools.partial(DoorSettings, small_bytes=0))
    with running(tmp_path / "cluster", NODES, replicas=2) as found:
        for node in NODES:
            eventually(
                f"{node} has met its peers",
                lambda node=node: all(p.state == "up" for p in found.status(node).peers),  # type: ignore[misc]
            )
        yield found


class Doors:
    """The doors of some hosts."""

    def __init__(self, daemons: Daemons, mode: str = "async") -> None:
        self.daemons, self.mode = daemons, mode
        self.doors: dict[str, Door] = {}

    def open(self, *nodes: str) -> None:
        for node in nodes:
            self.doors[node] = serve(self.daemons.data(node), mode=self.mode)  # type: ignore[arg-type]

    def client(self, node: str, name: str = "words") -> Client:
        return Client(self.doors[node].address(name))

    def lose(self, node: str) -> None:
        """The host is gone, and its disk."""
        self.daemons.kill(node)
        self.doors.pop(node).close()
        self.daemons.wipe(node)

    def close(self) -> None:
        for door in self.doors.values():
            door.close()


IS_LONG = bool(os.environ.get("NOSYNC_LONG"))


@pytest.fixture(params=["strict", pytest.param("async", marks=pytest.mark.long("make cluster"))])
def doors(request: pytest.FixtureRequest, daemons: Daemons) -> Iterator[Doors]:
    found = Doors(daemons, request.param)
    found.open(*NODES)
    yield found
    found.close()


class Spread(QueryThroughDoor):
    """A query whose partitions move from host to host with each batch. Where a state is read, it is what was written."""

    def __init__(self, root: Path, doors: Doors, kind: str, driver: str = "n1", nodes: tuple[str, ...] = NODES) -> None:
        self.doors, self.nodes, self.clients = doors, nodes, {node: doors.client(node) for node in nodes}
        self.driver = driver
        super().__init__(root, doors.doors[driver].address("words"), kind, partitions=3)

    def node_of(self, path: str) -> str:
        found = STATE.match(path)
        return self.driver if found is None else self.nodes[(int(found[2]) + self.batch) % len(self.nodes)]

    def write(self, path: str, data: str | bytes) -> None:
        self.client = self.clients[self.node_of(path)]
        super().write(path, data)

    def states(self) -> None:
        self.read_states()
        super().states()

    def read_states(self) -> None:
        """Reads the state before the batch on the host where the partition is now, as a task does that begins there."""
        for operator, partition, name in self.stores:
            directory = self.directory(operator, partition, name)
            client = self.clients[self.node_of(f"{directory}/")]
            on_disk = sorted(p.name for p in (self.root / directory).iterdir() if p.is_file())
            listed = [n for n in client.list(directory) if n not in ("SSTs", "_metadata") and "lost" not in n]
            assert sorted(listed) == on_disk
            for found in (self.root / directory).rglob(f"{self.batch}*"):
                path = str(found.relative_to(self.root))
                assert client.status(path)["length"] == found.stat().st_size
                assert client.read(path) == found.read_bytes()
                assert client.read(path, offset=3, length=4) == found.read_bytes()[3:7]


def is_safe(daemons: Daemons, t: int, node: str) -> bool:
    return nosync.checkpoint("words", daemons.data(node)).status(last=0).safe == t


@pytest.mark.long("make cluster")
@pytest.mark.parametrize("kind", KINDS if IS_LONG else ("v2",))
def test_partitions_move_from_host_to_host(doors: Doors, tmp_path: Path, kind: str) -> None:
    query = Spread(tmp_path / "ck", doors, kind)
    for _ in range(5):
        query.run()
    query.begin()
    if doors.mode == "strict":
        assert doors.doors["n1"].state("words") == "strict"
        assert is_safe(doors.daemons, 4, "n1"), "the answer to the offsets of batch 5 waited for that"
    eventually("all of batch 4 is on two nodes", lambda: is_safe(doors.daemons, 4, "n1"))
    there = contents(tmp_path / "ck")
    kept = nosync.checkpoint("words", doors.daemons.data("n1")).restore(tmp_path / "restored")
    assert kept.batch == 4
    assert contents(kept.path) == {path: there[path] for path in contents(kept.path)}
    for node in NODES:
        assert sorted(doors.client(node).list("state/0")) == ["0", "1", "2", "_metadata"]
        assert doors.client(node).list("commits") == [str(t) for t in range(5)]
        spool = doors.daemons.data(node) / "checkpoint-live" / ".spool"
        eventually("what has come is not kept twice", lambda s=spool: not [p for p in s.rglob("*") if p.is_file()])  # type: ignore[misc]


def test_a_state_is_read_elsewhere_before_its_batch_is_committed(doors: Doors, tmp_path: Path) -> None:
    first, second, third = (doors.client(node) for node in NODES)
    first.publish("metadata", b'{"id": "4c0c1a0e-0000-4000-8000-000000000000"}')
    second.publish("state/0/0/1.delta", b"written on n2", overwrite=True)
    assert third.list("state/0/0") == ["1.delta"]
    assert third.status("state/0/0/1.delta")["length"] == 13
    third.publish("state/0/0/1.delta", b"again, on n3", overwrite=True)
    assert [c.read("state/0/0/1.delta") for c in (first, second, third)] == [b"again, on n3"] * 3
    second.publish("state/0/0/1.delta", b"the last one counts", overwrite=True)
    assert [c.read("state/0/0/1.delta") for c in (first, second, third)] == [b"the last one counts"] * 3
    with pytest.raises(Refused, match="is there already"):
        third.publish("state/0/0/1.delta", b"without leave")
    assert third.delete("state/0/0/1.delta")
    assert not second.delete("state/0/0/1.delta")
    left = [c.list("state/0/0") for c in (first, second, third)]
    assert left[0] == left[1] == left[2]
    assert [name for name in left[0] if not name.endswith(".tmp")] == []


def test_two_drivers_on_two_hosts_do_not_both_write_a_batch(doors: Doors, tmp_path: Path) -> None:
    query = Spread(tmp_path / "ck", doors, "hdfs")
    query.run(2)
    doors.client("n1").publish("offsets/2", b"v1\n{}\n1")
    with pytest.raises(Refused, match="offsets/2: is there already"):
        doors.client("n2").publish("offsets/2", b"v1\n{}\n2")
    assert doors.client("n3").read("offsets/2") == b"v1\n{}\n1"


@pytest.mark.long("make cluster")
@pytest.mark.parametrize("kind", ["hdfs", "v2"] if IS_LONG else ["v2"])
def test_the_host_of_the_driver_is_lost(doors: Doors, tmp_path: Path, kind: str) -> None:
    """Nothing is restored by hand: the driver starts on another host, and goes on from what is kept."""
    query = Spread(tmp_path / "ck", doors, kind)
    query.run(4)
    query.begin()  # and dies in the middle of the batch
    eventually("batch 3 is safe", lambda: is_safe(doors.daemons, 3, "n1"))
    expected = (tmp_path / "ck" / "offsets" / "4").read_bytes()
    first = client_of(doors.daemons.data("n1"))
    assert first is not None
    eventually("so are the offsets", lambda: first.count_copies(["checkpoints/words/offsets/4"]) >= [2])
    first.close()
    doors.lose("n1")
    # Spark looks for the query's id first.
    assert b"4c0c1a0e" in doors.client("n2").read("metadata")
    assert doors.client("n2").list("commits")[-1] == "3"
    assert doors.client("n2").read("offsets/4") == expected
    query.nodes, query.driver = ("n2", "n3"), "n2"
    query.clients = {node: doors.client(node) for node in query.nodes}
    for operator, partition, name in query.stores:
        directory = query.directory(operator, partition, name)
        for node in query.nodes:
            for path in (tmp_path / "ck" / directory).glob("4*"):
                found = str(path.relative_to(tmp_path / "ck"))
                assert query.clients[node].read(found) == path.read_bytes()
    QueryThroughDoor.states(query)
    query.commit()
    eventually("batch 4 is safe", lambda: is_safe(doors.daemons, 4, "n2"))


def test_the_door_that_serves_is_opened_again_in_the_middle_of_a_batch(doors: Doors, tmp_path: Path) -> None:
    query = Spread(tmp_path / "ck", doors, "changelog")
    query.run(2)
    query.begin()
    query.states()
    doors.doors.pop("n1").close()
    doors.open("n1")
    query.clients["n1"] = doors.client("n1")
    for partition in range(3):  # the door is to serve it again, whoever asks first on its host
        path = f"state/0/{partition}/3.changelog"
        assert query.clients["n1"].read(path) == (tmp_path / "ck" / path).read_bytes()
        assert query.clients["n2"].read(path) == (tmp_path / "ck" / path).read_bytes()
    query.commit()
    query.run(2)
    eventually("batch 4 is safe", lambda: is_safe(doors.daemons, 4, "n1"))


@pytest.mark.long("make cluster")
def test_a_host_of_tasks_is_lost_in_the_middle_of_a_batch(doors: Doors, tmp_path: Path) -> None:
    query = Spread(tmp_path / "ck", doors, "v2")
    query.run(3)
    query.begin()
    doors.client("n3").publish(
        "state/0/0/4_lost-attempt.changelog", b"of a task that ends with its host", overwrite=True
    )
    eventually("batch 2 is safe", lambda: is_safe(doors.daemons, 2, "n1"))
    doors.lose("n3")
    query.nodes = ("n1", "n2")
    query.states()  # reads on the others what was written on the lost one
    query.commit()
    query.run(2)
    eventually("batch 5 is safe", lambda: is_safe(doors.daemons, 5, "n1"))
    assert not any("lost" in name for name in doors.client("n2").list("state/0/0"))


@pytest.mark.long("make cluster")
def test_what_a_lost_host_alone_had_of_a_committed_batch_lets_the_query_go_back(
    daemons: Daemons, tmp_path: Path
) -> None:
    doors = Doors(daemons)
    doors.open(*NODES)
    query = Spread(tmp_path / "ck", doors, "hdfs")
    query.run(2)
    eventually("batch 1 is safe", lambda: is_safe(daemons, 1, "n1"))
    query.begin()
    query.states()
    doors.doors.pop("n3").close()  # with what it has, just before the batch is committed
    query.commit()
    eventually(
        "a part of the batch does not come",
        lambda: "does not come from the host" in str(doors.doors["n1"].problem("words")),
    )
    daemons.kill("n3")
    daemons.wipe("n3")
    query.nodes = ("n1", "n2")
    (lost,) = [p for p in range(3) if NODES[(p + 2) % 3] == "n3"]
    with pytest.raises(Refused, match="n3"):
        doors.client("n2").read(f"state/0/{lost}/3.delta")
    assert doors.client("n1").list("commits") == ["0", "1", "2"], "the query runs, and is not changed under it"
    began_s = time.monotonic()
    assert doors.client("n1").read("metadata"), "it starts again"
    assert time.monotonic() - began_s < 40
    assert doors.client("n2").list("commits")[-1] == "1"
    assert doors.client("n1").read("offsets/2") == (tmp_path / "ck/offsets/2").read_bytes(), "with what it had read"
    for partition in range(3):
        path = f"state/0/{partition}/2.delta"
        assert doors.client("n2").read(path) == (tmp_path / "ck" / path).read_bytes()
    QueryThroughDoor.states(query)
    query.commit()
    eventually("batch 2 is safe", lambda: is_safe(daemons, 2, "n1"))
    doors.close()


def test_a_door_that_was_cut_off_takes_no_more_offsets(daemons: Daemons, tmp_path: Path) -> None:
    """Another one went on meanwhile. The query of the first one ends, and goes on through the other door."""
    doors = Doors(daemons)
    doors.open("n1", "n2")
    query = Spread(tmp_path / "ck", doors, "hdfs", nodes=("n1",))
    query.run(3)
    eventually("batch 2 is safe", lambda: is_safe(daemons, 2, "n1"))
    daemons.stop("n1")  # its door is there, and nobody meets it
    eventually("n2 notices", lambda: daemons.peer("n2", "n1").state != "up")
    second = doors.client("n2")
    assert second.read("metadata")
    second.publish("offsets/3", b"v1\n{}\n0")
    daemons.start("n1")
    eventually("they meet again", lambda: daemons.peer("n1", "n2").state == "up")
    first = doors.client("n1")
    # Whichever n1 hears of first: the other door, or what its query wrote.
    with pytest.raises(
        Refused, match="is served by the door of node n2 by now|has gone on elsewhere, into generation 1"
    ):
        first.publish("offsets/3", b"another one")
    assert first.read("offsets/3") == b"v1\n{}\n0"
    doors.close()


def test_an_executor_does_not_make_a_door_serve_a_checkpoint(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nosync.checkpoints.door.who_serves.COMES_BACK_S", 1.0)
    doors = Doors(daemons)
    doors.open("n1", "n2")
    with pytest.raises(Refused, match="no door serves checkpoint words at the moment"):
        doors.client("n2").make_dirs("state/0/0")
    assert not (daemons.data("n2") / "checkpoint-live" / "words").exists()
    doors.client("n1").make_dirs("")
    doors.client("n2").make_dirs("state/0/0")
    assert doors.client("n1").list("state/0") == ["0"]
    doors.close()


def test_calls_of_doors_by_way_of_daemons(daemons: Daemons) -> None:
    client = client_of(daemons.data("n1"))
    assert client is not None
    asked = {"op": "SERVES"}
    with pytest.raises(ReplicationError, match="no door is open beside node n2"):
        list(client.call_door("n2", "GET", "words", asked, b"", 5.0))
    with pytest.raises(ReplicationError, match="node n9 is not there"):
        list(client.call_door("n9", "GET", "words", asked, b"", 5.0))
    with pytest.raises(ReplicationError, match="is no call of a door"):
        list(client.call_door("", "POST", "words", {"op": "SERVES", "through": "n2"}, b"", 5.0))
    with pytest.raises(ReplicationError, match="of nobody is no call of a door"):
        list(client.call_door("", "GET", "words", asked, b"", 5.0))
    doors = Doors(daemons)
    doors.open("n2")
    assert next(iter(client.call_door("n2", "GET", "words", asked, b"", 5.0))).status == 404, "nobody asked for it yet"
    doors.client("n2").make_dirs("")
    pieces = list(client.call_door("n2", "GET", "words", asked, b"", 5.0))
    assert (pieces[0].status, b"".join(p.data for p in pieces)) == (200, b'{"generation":0}')
    for path in ("../../etc/passwd", "words/../../x", "words/.door/elsewhere/x"):
        assert next(iter(client.call_door("n2", "GET", path, {"op": "OPEN"}, b"", 5.0))).status == 400
    with ThreadPoolExecutor(40) as pool:  # more than the daemon lets in at once: the rest waits
        answers = pool.map(
            lambda _: list(client.call_door("n2", "GET", "words", {"op": "LISTSTATUS"}, b"", 30.0)), range(80)
        )
        assert [answer[0].status for answer in answers] == [200] * 80
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(RefusedError, match="no door is open beside node n3"):
            list(client.call_door("n3", "GET", "words", asked, b"", 5.0))
    others = OtherDoors(daemons.data("n1"), Env())
    for _ in range(20):
        assert others.servers("words") == ([Server(0, "n2")], True)
    assert len(os.listdir("/proc/self/fd")) < before + 10, "who says no costs nothing"
    others.close()
    with pytest.raises(Refused, match="SPOOLED is not done here"):
        doors.client("n2").do("GET", "x", "SPOOLED")
    for method, operation in (("DELETE", "RELEASE"), ("GET", "SPOOLED")):
        answer = list(client.call_door("n2", method, "words/no-token", {"op": operation}, b"", 5.0))
        assert answer[0].status == 404, "what is no token is nobody's file"
    doors.close()
    client.close()
