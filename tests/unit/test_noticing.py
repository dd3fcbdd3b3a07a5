"""What a job publishes reaches the daemon: by a watch of the system, without a call, or by a call where there is no watch."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest

import nosync
from nosync.replication import daemon
from nosync.replication.daemon import Daemon, DaemonConfig
from nosync.replication.transport import DaemonClient
from nosync.testing.daemons import eventually, free_ports


def no_watch(roots: Iterable[Path]) -> NoReturn:
    raise OSError(errno.EMFILE, "no more instances of inotify")


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_is_published_is_durable_soon(is_watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_watched:
        monkeypatch.setattr(daemon, "Watch", no_watch)
    monkeypatch.setattr(daemon, "SCAN_INTERVAL_S", 3600.0)  # listing would find it as well
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
