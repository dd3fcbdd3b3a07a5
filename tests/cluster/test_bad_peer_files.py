"""What keeps nodes from hearing the truth of each other: files that are no store's, news out of order, what came for
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.model.layer import parse_path
from nosync.lsm.platform.env import Env
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import FileRequest, Have, Hello, Summary
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport import codec as wire
from nosync.replication.transport.addresses import check_free, host_of
from nosync.testing.daemon_cluster import eventually, free_ports, running
from tests.helpers.daemons import publish


def held_layers(daemon: Daemon) -> set[str]:
    return {held.name for held in daemon.replicator._replica.mine if held.name.startswith("layers/")}


def durable_layers(daemon: Daemon) -> set[str]:
    return {FileName.of_layer(record.id) for record in daemon.node.durable_records()}


def test_a_file_that_is_not_a_stores_stops_nothing(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2")) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("the first epoch is safe", lambda: daemons.safe_point("n1") == 0)
        manifests = daemons.data("n1") / "manifests/main"
        shutil.copy(manifests / "0.json", manifests / "0.bak.json")
        shutil.copytree(manifests, manifests.with_name("main.bak"))
        publish(store, 1)
        eventually("the next one, too", lambda: daemons.safe_point("n1") == 1)
        assert daemons.peer("n1", "n2").state == "up"
        with nosync.connect(f"127.0.0.1:{daemons.ports['n1']}", cache=tmp_path / "cache") as there:
            assert there.read("counts", 1).num_rows


def test_a_node_says_that_it_holds_what_it_holds(tmp_path: Path) -> None:
    """Also where a layer is merged away while its listener has yet to hear of it."""
    one, other = free_ports(2)
    config = DaemonConfig("n1", tmp_path / "n1", f"127.0.0.1:{one}", {"n2": f"127.0.0.1:{other}"}, 2, new_store=True)
    daemon = Daemon(config)
    daemon.start()
    try:
        tell = daemon.replicator.announcements.held

        def late(added: Any, gone: Any, *, dropped: bool = False) -> None:
            if added and not gone:
                time.sleep(0.2)  # not a wait: a slow listener, so that merges come before what it hears
            tell(added, gone, dropped=dropped)

        daemon.replicator.announcements.held = late  # type: ignore[method-assign]
        with nosync.open(tmp_path / "n1") as store:
            for t in range(16):
                store.append("c", t=t, rows=pa.table({"k": list(range(20)), "v": [t] * 20}), key=["k"])
                store.seal(t)
        eventually("layers were merged", lambda: any("/0-" in n and "/0-1-" not in n for n in durable_layers(daemon)))
        eventually("it says what it has", lambda: held_layers(daemon) == durable_layers(daemon))
        daemon.node.make_durable_now()
        assert held_layers(daemon) == durable_layers(daemon) != set()
    finally:
        daemon.stop()


def test_a_layer_that_comes_for_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """Another one that covers it became durable meanwhile."""
    files: dict[str, bytes] = {}

    def look() -> None:
        files.update({path.name: path.read_bytes() for path in (tmp_path / "a").rglob("*.layer")})

    with nosync.open(tmp_path / "a", settings=nosync.StoreSettings(merge=False)) as store:
        for t in range(6):
            store.append("c", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
            store.seal(t)
        look()
        store.compact()
        look()
        trace = FileName.of_layer(next(iter(store.node.durable_ids()))).rpartition("/")[0]
    single = next(name for name in files if name.startswith("1-2"))
    merged = next(name for name in files if name.startswith("0-6"))
    daemon = Daemon(DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {"n2": "127.0.0.1:1"}, 2, new_store=True))
    daemon.start()
    try:
        replicator = daemon.replicator
        ids = {name: parse_path(PurePosixPath(trace.removeprefix("layers/"), name)) for name in (single, merged)}
        path = tmp_path / single
        path.write_bytes(files[single])
        held = FileVersion(
            FileName(f"{trace}/{single}"), LayerReader.open(path, Env(), ids[single]).digest, len(files[single])
        )
        session = replicator.open_session()

        def say(message: Any) -> None:
            for frame in wire.Encoder().frames(message):
                replicator.received(session, frame)

        say(Hello(NodeId("n2"), "another", daemon.store_id, 2, key_groups=128))
        say(Summary(0, ((trace, "1:1"),)))
        say(Have(0, (trace,), (held,)))
        assert held.name in replicator._replica.state.fetching
        (tmp_path / "n1" / trace).mkdir(parents=True)
        (tmp_path / merged).write_bytes(files[merged])
        os.link(tmp_path / merged, tmp_path / "n1" / trace / merged)  # whole at once: the daemon looks there by itself
        id = ids[merged]
        assert id is not None
        daemon.node.note([id])
        eventually("the merged one is durable", lambda: id in daemon.node.durable_ids())
        for frame in wire.Encoder().chunks(FileRequest(held), io.BytesIO(files[single])):
            replicator.received(session, frame)
        eventually("nothing is waited for", lambda: held.name not in replicator._replica.state.fetching, 3.0)
    finally:
        daemon.stop()


def addresses(*hosts: str) -> Callable[..., list[Any]]:
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in hosts]


def test_a_name_may_stand_for_addresses_that_this_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` stands for `::1`, where IPv6 is off."""
    monkeypatch.setattr(socket, "getaddrinfo", addresses("192.0.2.200", "127.0.0.1"))
    check_free("localhost:0")
    monkeypatch.setattr(socket, "getaddrinfo", addresses("192.0.2.200"))
    with pytest.raises(nosync.NosyncError, match="no interface of this machine"):
        check_free("localhost:0")


def test_an_address_of_ipv6_has_brackets() -> None:
    assert host_of("[::1]:7501") == "::1"
    with pytest.raises(nosync.NosyncError, match=r"write an IPv6 address as \[::1\]:7501"):
        host_of("::1:7501")


class FailsOnce(Env):
    """Fails to read the first file that came."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: Path | None = None

    def read(self, path: Path) -> bytes:
        if self.failed is None and path.parent.name == "tmp":
            self.failed = path
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().read(path)


def test_a_disk_that_fails_once_while_a_file_comes_ends_no_link(tmp_path: Path) -> None:
    env, (one, two) = FailsOnce(), free_ports(2)
    settings = {"sockets": tmp_path / "s"}
    sender = Daemon(
        DaemonConfig("n1", tmp_path / "n1", f"127.0.0.1:{one}", {"n2": f"127.0.0.1:{two}"}, new_store=True, **settings)
    )
    receiver = Daemon(
        DaemonConfig("n2", tmp_path / "n2", f"127.0.0.1:{two}", {"n1": f"127.0.0.1:{one}"}, **settings), env=env
    )
    with contextlib.ExitStack() as stack:
        for daemon in (sender, receiver):
            daemon.start()
            stack.callback(daemon.stop)
        eventually("they are linked", lambda: sender.replicator.peers()[0].state == "up")
        with nosync.open(tmp_path / "n1") as store:
            publish(store, 0)
            eventually("it came all the same", lambda: store.safe_point() == 0)
        assert env.failed is not None


def test_an_empty_file_comes_and_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), start=("n1",)) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
            store.sync()
        layer = min((daemons.data("n1") / "layers").rglob("*.layer"))
        layer.unlink()
        os.mkfifo(layer)
        kept = daemons.data("n1") / "checkpoints/q/offsets"
        kept.mkdir(parents=True)
        for name, contents in (("0", b"text"), ("1", b"")):
            made = daemons.data("n1") / "tmp" / name
            made.write_bytes(contents)
            made.rename(kept / name)
        daemons.start("n2")
        there = daemons.data("n2") / "checkpoints/q/offsets"
        eventually("both came", lambda: there.exists() and {p.name for p in there.iterdir()} == {"0", "1"})
        assert (there / "1").read_bytes() == b""
        for _ in range(20):
            assert daemons.peer("n2", "n1").state == "up"
            time.sleep(0.1)
