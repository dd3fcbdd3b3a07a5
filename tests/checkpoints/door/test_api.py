"""A door from opening it to closing it: where queries go on, two drivers on one name, strict mode, who may listen."""

from __future__ import annotations

import logging
import shutil
import stat
import threading
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.door.api import Door, address_of
from nosync.lsm.errors import CorruptionError, InvalidInputError, StoreLockedError
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.client import Client, Refused
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.fake_query import KINDS
from tests.helpers.checkpoints import contents


def safe(data: Path) -> int | None:
    return nosync.checkpoint("q", data).status(last=0).safe


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["async", "strict"])
def test_a_query_goes_on_where_its_directory_is_lost(tmp_path: Path, kind: str, mode: str) -> None:
    data = tmp_path / "data"
    with nosync.checkpoints.serve(data, mode=mode) as door:  # type: ignore[arg-type]
        query = QueryThroughDoor(tmp_path / "ck", door.address("q"), kind)
        query.run(5)
        query.begin()
        assert door.state("q") == mode
    assert safe(data) == 4
    assert contents(data / "checkpoint-live" / "q") == contents(query.root), "it has got what was sent"
    shutil.rmtree(data / "checkpoint-live" / "q")
    with nosync.checkpoints.serve(data) as door:
        client = Client(door.address("q"))
        assert max(map(int, client.list("commits"))) == 4
        assert max(map(int, client.list("offsets"))) == 5
        assert client.read("offsets/5") == (query.root / "offsets/5").read_bytes()
        query.client = client
        query.states()
        query.commit()
        query.run(2)
    assert safe(data) == 7


def test_going_on_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nosync.checkpoints.serve(tmp_path) as door:
        QueryThroughDoor(tmp_path / "ck", door.address("q"), "hdfs").run(2)
    shutil.rmtree(tmp_path / "checkpoint-live" / "q")
    with caplog.at_level(logging.WARNING, "nosync"), nosync.checkpoints.serve(tmp_path) as door:
        Client(door.address("q")).status("metadata")
    assert "checkpoint q: goes on after batch 1" in caplog.text


def test_in_strict_mode_a_batch_begins_when_the_one_before_is_durable(tmp_path: Path) -> None:
    with nosync.checkpoints.serve(tmp_path / "data", mode="strict") as door:
        query = QueryThroughDoor(tmp_path / "ck", door.address("q"), "changelog")
        kept = tmp_path / "data" / "checkpoints" / "q"
        for t in range(6):
            query.begin()
            assert (kept / "offsets" / str(t)).exists()
            assert (safe(tmp_path / "data") or 0) == max(t - 1, 0)
            query.states()
            query.commit()


class SlowDisk(Env):
    """Does not make anything durable before it is told."""

    def __init__(self) -> None:
        self.may_sync = threading.Event()

    def sync_file(self, path: Path) -> None:
        assert self.may_sync.wait(30)
        super().sync_file(path)


def test_strict_mode_gives_up_before_the_client_does_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = SlowDisk()
    env.may_sync.set()
    monkeypatch.setattr("nosync.checkpoints.door.api.Env", lambda: env)
    with nosync.checkpoints.serve(tmp_path / "data", mode="strict", patience_s=0.3) as door:
        query = QueryThroughDoor(tmp_path / "ck", door.address("q"), "hdfs")
        query.run(2)
        assert door.state("q") == "strict"
        env.may_sync.clear()
        query.run()
        assert door.state("q") == "degraded"
        query.run(3)
        env.may_sync.set()
        eventually("the gate is strict again", lambda: door.state("q") == "strict", 10.0)
        query.run()
    assert safe(tmp_path / "data") == 6


@pytest.mark.parametrize("mode", ["async", "strict"])
def test_of_two_drivers_one_writes_a_batch(tmp_path: Path, mode: str) -> None:
    with nosync.checkpoints.serve(tmp_path / "data", mode=mode) as door:  # type: ignore[arg-type]
        QueryThroughDoor(tmp_path / "ck", door.address("q"), "hdfs").run(3)
        start, outcomes = threading.Barrier(8), [""] * 8

        def drive(i: int) -> None:
            client = Client(door.address("q"))
            client.create(f"offsets/.3.{i}.tmp", f"of driver {i}".encode())
            start.wait()
            try:
                client.rename(f"offsets/.3.{i}.tmp", "offsets/3")
                outcomes[i] = "won"
            except Refused as refused:
                outcomes[i] = refused.name

        drivers = [threading.Thread(target=drive, args=(i,)) for i in range(8)]
        for one in drivers:
            one.start()
        for one in drivers:
            one.join()
        assert sorted(outcomes) == ["FileAlreadyExistsException"] * 7 + ["won"]
        winner = f"of driver {outcomes.index('won')}".encode()
        assert Client(door.address("q")).read("offsets/3") == winner
        with pytest.raises(Refused):
            Client(door.address("q")).publish("offsets/3", b"later")
    assert (tmp_path / "data/checkpoints/q/offsets/3").read_bytes() == winner


def test_a_restart_goes_on_with_what_is_there(tmp_path: Path) -> None:
    with nosync.checkpoints.serve(tmp_path) as door:
        query = QueryThroughDoor(tmp_path / "ck", door.address("q"), "changelog")
        query.run(2)
    with nosync.checkpoints.serve(tmp_path) as door:
        query.client = Client(door.address("q"))
        query.run(2)
        assert contents(tmp_path / "checkpoint-live" / "q") == contents(query.root)
    assert safe(tmp_path) == 3


def test_a_rewound_query_goes_on_after_the_batch(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with nosync.checkpoints.serve(data) as door:
        query = QueryThroughDoor(tmp_path / "ck", door.address("q"), "changelog")
        query.run(5)
        eventually("all is kept", lambda: safe(data) == 4, 10.0)
        with pytest.raises(StoreLockedError):
            nosync.checkpoint("q", data).rewind(2, tmp_path / "scratch", sink_rewound=True)
    nosync.checkpoint("q", data).rewind(2, tmp_path / "scratch", sink_rewound=True)
    with nosync.checkpoints.serve(data) as door:
        assert max(map(int, Client(door.address("q")).list("commits"))) == 2
    assert safe(data) == 2
    aside = next(path for path in (data / "checkpoint-live").iterdir() if path.name.endswith(".old"))
    assert contents(aside) == contents(query.root)


def test_one_door_and_one_secret_for_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has had no door"):
        address_of("q", tmp_path)
    with nosync.checkpoints.serve(tmp_path) as door:
        first = door.address("q")
        assert address_of("q", tmp_path) == first
        with pytest.raises(StoreLockedError, match="has a door already"):
            nosync.checkpoints.serve(tmp_path)
        with pytest.raises(InvalidInputError, match="another process listens there"):
            nosync.checkpoints.serve(tmp_path / "other", port=door.port)
    with nosync.checkpoints.serve(tmp_path) as door:
        assert door.address("q").split("/")[3] == first.split("/")[3]
    for name in ("checkpoint-secret", "checkpoint-live/.address"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    (tmp_path / "checkpoint-secret").write_text("guess")
    with pytest.raises(CorruptionError, match="is not a secret"):
        nosync.checkpoints.serve(tmp_path)


def test_a_checkpoint_that_is_watched_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    with (
        nosync.checkpoints.watch(tmp_path / "q", tmp_path / "data"),
        nosync.checkpoints.serve(tmp_path / "data") as door,
        pytest.raises(Refused, match="is followed or changed by another process"),
    ):
        Client(door.address("q")).make_dirs("")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for arguments, why in (
        ({"mode": "lazy"}, "expected 'async' or 'strict'"),
        ({"host": "0.0.0.0"}, "give a certificate"),
        ({"host": "192.0.2.1", "port": 7502}, "give a certificate"),
        ({"host": "no.such.host.invalid"}, "give a certificate"),
        ({"port": 70000}, "expected 0"),
        ({"patience_s": 60.0}, "for which Spark waits"),
        ({"keep_batches": 0}, "number from 1 on"),
        ({"certificate": "c"}, "and its key"),
        ({"ca": "c"}, "and its key"),
        ({"certificate": tmp_path / "no", "key": tmp_path / "no"}, "cannot be used"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            nosync.checkpoints.serve(tmp_path / "data", **arguments)  # type: ignore[arg-type]
    with nosync.checkpoints.serve(tmp_path / "data") as door:
        assert isinstance(door, Door)
        with pytest.raises(InvalidInputError, match="not a valid name"):
            door.address("../x")
        assert "open" in repr(door)
        assert door.address("q").split("/")[3] not in repr(door)
    assert not door.is_open()
    door.close()
