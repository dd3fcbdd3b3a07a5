"""Strict mode with copies on other nodes: an answer comes when they are there, or when patience is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from nosync.checkpoints.door.app import DoorApp
from nosync.checkpoints.door.served_checkpoints import DoorSettings, ServedCheckpoints
from nosync.checkpoints.door.server import Server
from nosync.checkpoints.keep import Keep
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.query_through_door import QueryThroughDoor

SECRET = "ab" * 16


class Peer:
    """Has what it is told that it has."""

    def __init__(self) -> None:
        self.has: set[str] = set()
        self.wanted: set[str] = set()
        self.is_up = True
        self.asked = threading.Event()

    def copies(self, keep: Keep, paths: Collection[str]) -> int:
        assert keep.name == "q"
        self.wanted = set(paths)
        self.asked.set()
        if self.is_up:
            self.has.update(paths)
        return 1 + self.has.issuperset(paths)

    def is_asked(self, *, twice: bool = False) -> None:
        """Waits until it was asked. Twice: so the first answer, or what was before it, was of no avail."""
        for _ in range(1 + twice):
            self.asked.clear()
            assert self.asked.wait(10)


def with_door(tmp_path: Path, peer: Peer, patience_s: float, do: Callable[[ServedCheckpoints, str], None]) -> None:
    server = Server("127.0.0.1", 0)
    settings = DoorSettings(is_strict=True, nodes=2, patience_s=patience_s, copies=peer.copies)
    checkpoints = ServedCheckpoints(tmp_path / "data", f"{server.address}/{SECRET}", Env(), settings)
    server.start(DoorApp(checkpoints, SECRET))
    try:
        do(checkpoints, f"{server.address}/{SECRET}/q")
    finally:
        server.close()
        checkpoints.close()


def test_an_answer_waits_for_the_peer(tmp_path: Path) -> None:
    peer = Peer()

    def do(checkpoints: ServedCheckpoints, address: str) -> None:
        query = QueryThroughDoor(tmp_path / "ck", address, "hdfs")
        query.run(2)
        assert {"metadata", "offsets/1", "sources/0/1", "commits/0", "state/0/0/1.delta"} <= peer.has
        peer.is_up = False
        beginning = threading.Thread(target=query.begin)
        beginning.start()
        peer.is_asked(twice=True)
        assert beginning.is_alive(), "the answer is held"
        eventually("it is the batch that is asked for", lambda: "offsets/2" in peer.wanted)
        peer.has |= peer.wanted - {"state/0/0/2.delta"}
        peer.is_asked(twice=True)
        assert beginning.is_alive(), "a state of the batch before is not there"
        peer.has |= {"state/0/0/2.delta"}
        beginning.join(10)
        assert not beginning.is_alive()
        assert checkpoints.state("q") == "strict"

    with_door(tmp_path, peer, 30.0, do)


def test_a_peer_that_is_away_and_comes_back(tmp_path: Path) -> None:
    peer = Peer()
    peer.is_up = False

    def do(checkpoints: ServedCheckpoints, address: str) -> None:
        query = QueryThroughDoor(tmp_path / "ck", address, "hdfs")
        query.run(4)
        assert checkpoints.state("q") == "degraded"
        peer.has |= {"metadata", "sources/0/0", "offsets/0"}
        assert checkpoints.state("q") == "catching up"
        query.run()
        peer.is_up = True
        eventually("the gate is strict again", lambda: checkpoints.state("q") == "strict", 10.0)
        query.run()
        assert "offsets/5" in peer.has

    with_door(tmp_path, peer, 0.3, do)
