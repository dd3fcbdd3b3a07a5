"""What a job publishes reaches the daemon: by a watch of the system, without a call, or by a call where there is no watch."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest

import nosync
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon import config, daemon, published_files
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.daemon.service import Service
from nosync.replication.transport.client import DaemonClient, client_of
from nosync.testing.daemon_cluster import eventually, free_ports


def no_watch(roots: Iterable[Path]) -> NoReturn:
    raise OSError(errno.EMFILE, "no more instances of inotify")


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_is_published_is_durable_soon(is_watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_watched:
        monkeypatch.setattr(published_files, "Watch", no_watch)
    for module in (config, daemon):
        monkeypatch.setattr(module, "SCAN_INTERVAL_S", 3600.0)  # listing would find it as well
    told: list[str] = []
    tell = DaemonClient.note

    def note(client: DaemonClient, layers: list[str]) -> None:
        told.extend(layers)
        tell(client, layers)

    monkeypatch.setattr(DaemonClient, "note", note)
    (port,) = free_ports(1)
    mine = Daemon(DaemonConfig("n1", tmp_path, f"127.0.0.1:{port}", {}, 1))
    mine.start()
    try:
        with nosync.open(tmp_path) as store:
            for t in range(3):
                store.append("counts", t=t, rows=pa.table({"k": [t]}), key=["k"])
                store.seal(t)
            eventually("all is safe", lambda: mine.node.safe_point() == 2)
    finally:
        mine.stop()
    assert bool(told) != is_watched


def test_whatever_a_job_tells_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for these calls, and gRPC cancels a call when the last reference to it goes."""
    told: list[str] = []

    def note(_: Service, request: pb.NoteRequest, context: object) -> pb.Done:
        told.extend(request.layers)
        return pb.Done()

    monkeypatch.setattr(Service, "Note", note)
    (port,) = free_ports(1)
    mine = Daemon(DaemonConfig("n1", tmp_path, f"127.0.0.1:{port}", {}, 1))
    mine.start()
    try:
        client = client_of(tmp_path)
        assert client is not None
        for i in range(300):
            client.note([str(i)])
        client.close()
        assert sorted(told, key=int) == [str(i) for i in range(300)]
    finally:
        mine.stop()
