"""Calls of doors through daemons: a daemon that answers many is asked again, and nothing is asked twice that was done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nosync.lsm.errors import BusyError, RefusedError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.door_calls import AT_ONCE, DoorCalls

REQUEST = pb.CallDoorRequest(node="n2", method="GET", path="words", parameters={"op": "OPEN"}, patience_s=5.0)
PEERS = {"n2": "127.0.0.1:1"}


class Clock(Env):
    """Time goes by only where somebody waits."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wait_s(self, seconds: float) -> None:
        self.now_s += seconds


class Peer:
    """A peer's daemon, and who finds it. `busy`: so many calls are refused first."""

    def __init__(self, busy: int, error: str | Exception = "") -> None:
        self.busy, self.error = busy, ReplicationError(error) if isinstance(error, str) and error else error
        self.asked: list[tuple[Any, ...]] = []
        self.connected, self.closed = 0, 0

    def client(self, node: str, address: str) -> Peer:
        assert (node, address) == ("n2", "127.0.0.1:1")
        self.connected += 1
        return self

    def close(self) -> None:
        self.closed += 1

    def call_door(self, *arguments: Any) -> Iterator[pb.CallDoorReply]:
        self.asked.append(arguments)
        if len(self.asked) <= self.busy:
            raise BusyError("try again")
        yield pb.CallDoorReply(status=200)
        if isinstance(self.error, Exception):
            raise self.error
        yield pb.CallDoorReply(data=b"x")


def calls(tmp_path: Path, peer: Peer) -> DoorCalls:
    return DoorCalls(tmp_path, "n1", peer, Clock())  # type: ignore[arg-type]


def test_a_busy_peer_is_asked_again(tmp_path: Path) -> None:
    peer = Peer(busy=3)
    doors = calls(tmp_path, peer)
    assert [piece.data for piece in doors.of_peer(REQUEST, PEERS)] == [b"", b"x"]
    assert len(peer.asked) == 4
    assert peer.asked[-1][:4] == ("", "GET", "words", {"op": "OPEN", "through": "n1"})
    list(doors.of_peer(REQUEST, PEERS))
    assert peer.connected == 1, "the connection stays"


def test_patience_ends(tmp_path: Path) -> None:
    peer = Peer(busy=10**6)
    with pytest.raises(ReplicationError, match="the daemon of node n2 answers many calls"):
        list(calls(tmp_path, peer).of_peer(REQUEST, PEERS))
    assert 50 < len(peer.asked) < 150


@pytest.mark.parametrize(("op", "patience_s"), [("OPEN", 60.0), ("SPOOLED", 900.0)])
def test_a_large_file_has_the_time_that_it_is_given(tmp_path: Path, op: str, patience_s: float) -> None:
    peer = Peer(0)
    asked = pb.CallDoorRequest(node="n2", method="GET", path="words", parameters={"op": op}, patience_s=900.0)
    list(calls(tmp_path, peer).of_peer(asked, PEERS))
    assert peer.asked[0][-1] == patience_s


def test_a_call_that_was_begun_is_not_asked_again(tmp_path: Path) -> None:
    peer = Peer(busy=0, error="the network is cut")
    doors = calls(tmp_path, peer)
    with pytest.raises(ReplicationError, match="the network is cut"):
        list(doors.of_peer(REQUEST, PEERS))
    assert len(peer.asked) == 1
    peer.error = ""
    list(doors.of_peer(REQUEST, PEERS))
    assert peer.connected == 2, "a connection that failed is made again"


def test_a_peer_that_says_no_stays_connected(tmp_path: Path) -> None:
    peer = Peer(busy=0, error=RefusedError("no door is open"))
    doors = calls(tmp_path, peer)
    for _ in range(3):
        with pytest.raises(RefusedError, match="no door is open"):
            list(doors.of_peer(REQUEST, PEERS))
    assert (peer.connected, peer.closed) == (1, 0)
    doors.close()
    assert peer.closed == 1


def test_a_door_that_has_much_to_answer_says_so(tmp_path: Path) -> None:
    doors = calls(tmp_path, Peer(0))
    (tmp_path / "checkpoint-live").mkdir()
    (tmp_path / "checkpoint-live" / ".address").write_text("webhdfs://127.0.0.1:1/abc\n")
    begun = [doors._beside.acquire(blocking=False) for _ in range(AT_ONCE)]
    assert all(begun)
    asked = pb.CallDoorRequest(method="GET", path="words", parameters={"op": "OPEN", "through": "n2"}, patience_s=30)
    with pytest.raises(BusyError, match="answers many such calls"):
        next(doors.beside(asked))
    asked.parameters["op"] = "SERVES"
    with pytest.raises(ReplicationError, match="does not answer: ConnectionRefused"):  # it went there
        next(doors.beside(asked))


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ReplicationError, match="node n2 is not there"):
        list(calls(tmp_path, Peer(0)).of_peer(REQUEST, {}))


def test_no_door_or_one_off_loopback(tmp_path: Path) -> None:
    asked = pb.CallDoorRequest(method="GET", path="words", parameters={"op": "OPEN", "through": "n2"})
    with pytest.raises(ReplicationError, match="no door is open beside node n1"):
        list(calls(tmp_path, Peer(0)).beside(asked))
    (tmp_path / "checkpoint-live").mkdir()
    (tmp_path / "checkpoint-live" / ".address").write_text("swebhdfs://10.0.0.1:7502/abc\n")
    with pytest.raises(ReplicationError, match="is not on loopback"):
        list(calls(tmp_path, Peer(0)).beside(asked))
    (tmp_path / "checkpoint-live" / ".address").write_text("webhdfs://127.0.0.1:1/abc\n")
    with pytest.raises(ReplicationError, match="the door beside node n1 does not answer: ConnectionRefused"):
        list(calls(tmp_path, Peer(0)).beside(asked))
