"""Connections, descriptors and disks: what strangers hold of a daemon, and a daemon of its clients, is bounded."""

from __future__ import annotations

import contextlib
import gc
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from blake3 import blake3

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.daemon.metrics import MOST_CONNECTIONS
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import channel_to
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.download import fetch_files
from nosync.replication.transport.sockets import SOCKET_FILE, SocketPath
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running

MANY = 100


def _has(daemons: Daemons, what: str) -> int:
    """How many descriptors or threads (fd, task) the process of n1 has."""
    return len(list(Path(f"/proc/{daemons.processes['n1'].pid}/{what}").iterdir()))


@contextlib.contextmanager
def _silent(port: int, many: int = MANY) -> Iterator[None]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(many):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
        yield


@pytest.mark.few(1, "make cluster")
@pytest.mark.parametrize("is_secure", [False, True])
def test_connections_that_say_nothing_are_ended(tmp_path: Path, is_secure: bool) -> None:
    """They lasted 112 s before TLS, and the descriptors were gone."""
    if is_secure:
        make_certificates(tmp_path / "tls", ["n1"])
    extra = (f"--tls={tmp_path / 'tls'}",) if is_secure else ()
    with running(tmp_path / "nodes", ("n1",), replicas=1, extra=extra) as daemons:
        daemons.status("n1")
        before = _has(daemons, "fd")
        with _silent(daemons.ports["n1"]):
            eventually("it has them", lambda: _has(daemons, "fd") >= before + MANY // 2)
            eventually("they go by themselves", lambda: _has(daemons, "fd") <= before + 10, patience_s=40.0)


@pytest.mark.long("make cluster")
def test_metrics_hold_a_few_threads_and_keep_nobody_out(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(tmp_path, ("n1",), replicas=1, extra=(f"--metrics=127.0.0.1:{port}",)) as daemons:
        eventually("it serves them", lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0))
        before = _has(daemons, "task")
        with _silent(port):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0).read().decode()
            assert "nosync_backlog_bytes" in text
            eventually("few threads are held", lambda: _has(daemons, "task") <= before + MOST_CONNECTIONS + 4)
        for _ in range(3):
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0).status == 200


# --- what a daemon sends to who reads from it ---------------------------------------------------------------------------


NAME = "branches/0.json"


class _Sender:
    """A daemon that sends what it likes."""

    address = "127.0.0.1:1"

    def __init__(self, chunks: Sequence[pb.Chunk]) -> None:
        self._chunks = chunks

    def fetch_files(self, names: Sequence[str]) -> Iterator[pb.Frame]:
        for chunk in self._chunks:
            yield pb.Frame(chunk=chunk)


def _chunk(offset: int, data: bytes, **changed: Any) -> pb.Chunk:
    fields = {"name": NAME, "digest": blake3(b"abcd").hexdigest(), "size_bytes": 4} | changed
    return pb.Chunk(offset=offset, data=data, **fields)


def _fetched(root: Path, *chunks: pb.Chunk) -> None:
    fetch_files(cast(DaemonClient, _Sender(chunks)), root, [NAME], Env())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    create_store(tmp_path / "cache", 128, Env(), store_id="s")
    return tmp_path / "cache"


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_a_daemon_sends_a_file_that_was_asked_for_once_and_in_order(cache: Path) -> None:
    before = _files(cache)
    whole = [_chunk(0, b"ab"), _chunk(2, b"cd")]
    for chunks, message in (
        ([_chunk(0, b"ab")] * 1000, "do not follow each other"),
        ([_chunk(2, b"cd")], "do not follow each other"),
        ([_chunk(0, b"ab"), _chunk(2, b"cd", size_bytes=1 << 20)], "do not follow each other"),
        ([_chunk(0, b"ab"), _chunk(0, b"xy", name="branches/1.json")], "do not follow each other"),
        ([_chunk(0, b"abcd", name="branches/1.json")], "which nobody asked for"),
        ([_chunk(0, b"ab"), _chunk(2, b"xx")], "came with digest"),
    ):
        with pytest.raises(CorruptionError, match=message):
            _fetched(cache, *chunks)
        assert _files(cache) == before
    with pytest.raises(CorruptionError, match="which nobody asked for"):
        _fetched(cache, *whole, *whole)
    assert (cache / NAME).read_bytes() == b"abcd"


def test_a_daemon_does_not_fill_the_disk(cache: Path) -> None:
    layer = _chunk(0, b"x", name="layers/s/raw/0/0-1-0.layer", size_bytes=1 << 40)
    with pytest.raises(StorageError, match="has 1,099,511,627,776 bytes, and .* are free"):
        fetch_files(cast(DaemonClient, _Sender([layer])), cache, [layer.name], Env())
    assert not list((cache / "tmp").iterdir())


def _calls_in_memory() -> int:
    gc.collect()
    return sum(type(one).__name__ == "_RPCState" for one in gc.get_objects())


@pytest.mark.few(2, "make cluster")
@pytest.mark.parametrize(
    "call",
    [
        ("Daemon/Note", [b"\xff\xff\xff"]),
        ("Daemon/Layers", [b"\xff\xff\xff"]),
        ("Daemon/Note", []),
        ("Replication/Link", [b"\xff\xff\xff"]),
        ("Replication/Link", [b"", b"\xff\xff\xff"]),
        ("Daemon/Note", [b"\x0a\x80\x80\x80\x40" + bytes(128 << 20)]),
    ],
    ids=["unary", "answered by a stream", "nothing", "first frame", "second frame", "too large"],
)
def test_a_call_that_was_refused_leaves_nothing_in_memory(tmp_path: Path, call: tuple[str, list[bytes]]) -> None:
    """gRPC keeps what it knows of a call for good where both it and the method end the call: a stranger could fill memory."""
    config = DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {}, 1, sockets=tmp_path / "sockets")
    daemon = Daemon(config)
    daemon.start()
    method, sent = call
    times = 3 if sum(map(len, sent)) > 1 << 20 else 60
    try:
        way = SocketPath(tmp_path / "n1" / SOCKET_FILE)
        with contextlib.closing(way), channel_to("", None, socket=way) as channel:
            before = _calls_in_memory()
            for _ in range(times):
                with contextlib.suppress(grpc.RpcError):
                    list(channel.stream_stream(f"/nosync.v1.{method}")(iter(sent), timeout=5.0))
        eventually("calls are forgotten", lambda: _calls_in_memory() <= before + times // 10 + 1, 10.0)
    finally:
        daemon.stop()
