"""Requests that are under way when a checkpoint is closed, goes back, or is removed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import nosync
from nosync.checkpoints.keep import Keep
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.door.client import Client, Refused
from tests.checkpoints.door.query_through_door import QueryThroughDoor
from tests.checkpoints.fake_query import FakeQuery


@pytest.fixture(params=["async", "strict"])
def door(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[nosync.checkpoints.Door]:
    with nosync.checkpoints.serve(tmp_path / "data", mode=request.param) as door:
        yield door


@contextlib.contextmanager
def under_way(address: str, path: str, body: bytes) -> Iterator[socket.socket]:
    """Yields a connection by which the first half of a file was sent."""
    found = urlsplit(address)
    target = f"/webhdfs/v1{found.path}/{path}?op=CREATE&overwrite=true&body=true"
    with socket.create_connection((found.hostname, found.port), timeout=30) as sent:
        sent.sendall(f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        sent.sendall(body[: len(body) // 2])
        yield sent


def test_a_removal_that_is_refused_loses_nothing(tmp_path: Path, door: nosync.checkpoints.Door) -> None:
    address, keep = door.address("words"), tmp_path / "data/checkpoints/words"
    query = QueryThroughDoor(tmp_path / "own", address, "hdfs")
    query.run(3)
    eventually("what ran is kept", (keep / "commits/2").exists)
    query.begin()
    state = b"S" * 1000
    with under_way(address, "state/0/0/4.delta", state) as sent:
        with pytest.raises(Refused, match="is kept, and a query would go on"):
            Client(address).delete("", recursive=True)
        assert Client(address).status("metadata")["length"]
        sent.sendall(state[len(state) // 2 :])
        assert sent.recv(100).startswith(b"HTTP/1.1 201")
    for operator, partition, name in query.stores:
        if (operator, partition) != (0, 0):
            query.client.publish(f"{query.directory(operator, partition, name)}/4.delta", b"state", overwrite=True)
    query.commit()
    eventually("the batch is kept", lambda: (keep / "commits/3").exists() and (keep / "state/0/0/4.delta").exists())
    eventually("it is whole", lambda: Keep(tmp_path / "data", "words", Env()).safe() == 3)


def test_a_directory_that_is_removed_under_a_query(tmp_path: Path, door: nosync.checkpoints.Door) -> None:
    """What is under way then gets no name. What follows goes on from what is kept, and not from what the query has."""
    address, data = door.address("words"), tmp_path / "data"
    query = QueryThroughDoor(tmp_path / "own", address, "hdfs")
    query.run(3)
    eventually("what ran is kept", (data / "checkpoints/words/commits/2").exists)
    state = b"S" * 1000
    with under_way(address, "state/0/0/9.delta", state) as sent:
        eventually("it is being written", lambda: any((data / "checkpoint-live/.writing").iterdir()))
        shutil.rmtree(data / "checkpoint-live/words")
        assert Client(address).status("metadata")["length"], "it is made of what is kept"
        sent.sendall(state[len(state) // 2 :])
        answer = b""
        while b"start the query again" not in answer and (piece := sent.recv(4000)):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 403")
        assert b"start the query again" in answer
    assert not (data / "checkpoint-live/words/state/0/0/9.delta").exists()
    for path in ("commits/9", "offsets/9"):
        with pytest.raises(Refused, match=f"/{path} does not follow what is there"):
            query.client.publish(path, b"v1\n{}", overwrite=False)
    query.run(2)
    eventually("it goes on", lambda: Keep(data, "words", Env()).safe() == 4)
    # With async progress tracking not every batch has entries: from the first that follows on, nothing is refused.
    for n in (9, 12):
        query.client.publish(f"offsets/{n}", b"v1\n{}\n{}", overwrite=False)


def test_a_checkpoint_is_copied_behind_the_door_in_any_order(tmp_path: Path, door: nosync.checkpoints.Door) -> None:
    """Hadoop copies by name, so commits come before offsets."""
    query = FakeQuery(tmp_path / "ck", "hdfs")
    query.run(3)
    client = Client(door.address("moved"))
    for path in sorted(path for path in query.root.rglob("*") if path.is_file()):
        client.create(path.relative_to(query.root).as_posix(), path.read_bytes())
    eventually("it is kept", lambda: Keep(tmp_path / "data", "moved", Env()).safe() == 2)


def test_what_nothing_is_kept_of_can_be_removed(tmp_path: Path, door: nosync.checkpoints.Door) -> None:
    client = Client(door.address("half"))
    client.create("state/0/0/1.delta", b"x")
    assert client.delete("", recursive=True)
    assert not (tmp_path / "data/checkpoint-live/half").exists()


def test_who_does_not_say_the_secret_keeps_no_connection(door: nosync.checkpoints.Door) -> None:
    for path, status in [("/?op=GETHOMEDIRECTORY", b"200"), ("/no-secret/words/metadata?op=OPEN", b"403")]:
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as sent:
            sent.sendall(f"GET /webhdfs/v1{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            begin_s, answer = time.monotonic(), b""
            while piece := sent.recv(1000):
                answer += piece
            assert answer.split()[1] == status
            assert time.monotonic() - begin_s < 8, "the door closed it, and not its patience with idle connections"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"port": "x"}, "port 'x': expected 0"), ({"keep_batches": "3"}, "'3' batches cannot be kept"),
     ({"keep_batches": 1.5}, "1.5 batches cannot be kept"), ({"patience_s": None}, "patience_s=None: expected seconds")],
)  # fmt: skip
def test_what_is_no_number_is_refused(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(nosync.InvalidInputError, match=said):
        nosync.checkpoints.serve(tmp_path / "data", **wrong)  # type: ignore[arg-type]
