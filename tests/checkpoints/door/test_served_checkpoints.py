"""Strict mode with copies on other nodes: an answer comes when they are there, or when patience is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints import peers
from nosync.checkpoints.door.app import DoorApp
from nosync.checkpoints.door.served_checkpoints import DoorSettings, ServedCheckpoint, ServedCheckpoints
from nosync.checkpoints.door.server import Server
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.retention import kept_batches
from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.fake_query import FakeQuery

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


class SlowDaemon:
    """Has not all that its peers have within the patience."""

    def fetch_checkpoint(self, name: str, patience_s: float) -> tuple[bool, int]:
        return False, 3

    def close(self) -> None:
        """There is nothing to close."""


def test_what_peers_did_not_send_in_time_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came is whole up to batch 3, and peers have batches after it."""
    data = tmp_path / "data"
    FakeQuery(tmp_path / "ck", "changelog").run(4)
    with nosync.checkpoints.watch(tmp_path / "ck", data, name="q"):
        pass
    (data / PLACE_FILE).write_text("{}")
    monkeypatch.setattr(peers, "client_of_daemon", lambda _: SlowDaemon())
    said = "peers have more of it than came to .* within 20 s \\(3 files are here\\)"
    with pytest.raises(ReplicationError, match=said):
        ServedCheckpoint(data, "q", "webhdfs://x/q", Env(), DoorSettings(), lambda: None)
    assert not (data / "checkpoint-live" / "q").exists()
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "restore", "q", str(tmp_path / "again"), "--store", str(data)])
    assert ended.value.code
    assert "peers have more of it" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "again").exists()


def test_a_batch_that_is_not_whole_ends_strict_mode_and_not_the_query(tmp_path: Path) -> None:
    peer = Peer()

    def do(checkpoints: ServedCheckpoints, address: str) -> None:
        query = QueryThroughDoor(tmp_path / "ck", address, "hdfs")
        query.run(2)
        query.begin()
        query.commit()  # without its states
        query.begin()
        assert checkpoints.state("q") == "degraded"

    with_door(tmp_path, peer, 0.3, do)


def test_a_door_that_says_nothing_of_it_keeps_as_many_batches_as_before(tmp_path: Path) -> None:
    data = tmp_path / "data"
    FakeQuery(tmp_path / "ck", "changelog").run(2)
    with nosync.checkpoints.watch(tmp_path / "ck", data, name="q", keep_batches=1000):
        pass
    for settings, expected in ((DoorSettings(), 1000), (DoorSettings(keep_batches=7), 7)):
        served = ServedCheckpoint(data, "q", "webhdfs://x/q", Env(), settings, lambda: None)
        try:
            assert kept_batches(served.keep) == expected
        finally:
            served.close()


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
