"""Who gets in, by which way, and how much of a daemon one caller may hold: strangers, readers, members, the owner."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.protocol.messages import PROTOCOL_VERSION
from nosync.replication.transport.addresses import is_of_this_host
from nosync.replication.transport.calls import MOST_OF_READER
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import OPTIONS, Certificates, channel_to
from nosync.replication.transport.client import DaemonClient, client_of
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running
from tests.helpers.daemons import expected, publish, rows, state

MANY = 70
"""More than there once were threads."""
HALF = ("Daemon/Status", "Daemon/Sync", "Daemon/ListFiles", "Daemon/Keep")
METHODS = (*HALF, "Replication/Link")


def _threads(daemons: Daemons, node: str) -> int:
    return len(list(Path(f"/proc/{daemons.processes[node].pid}/task").iterdir()))


@contextlib.contextmanager
def _begun(channel: grpc.Channel, method: str, many: int = MANY) -> Iterator[list[Any]]:
    """So many calls of which the first message never comes."""
    ended = threading.Event()

    def nothing() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    call = channel.stream_stream(f"/nosync.v1.{method}")
    calls = [call(nothing()) for _ in range(many)]
    try:
        yield calls
    finally:
        ended.set()
        for one in calls:
            one.cancel()


def _codes(calls: list[Any]) -> list[grpc.StatusCode]:
    return [call.code() for call in calls if call.done()]


def _nobody(daemons: Daemons, tls: Path | None) -> grpc.Channel:
    """A channel of one who may read at most."""
    certificates = None if tls is None else Certificates.of_directory(tls, "analyst")
    return channel_to(f"127.0.0.1:{daemons.ports['n1']}", certificates, "n1")


@pytest.fixture(params=["plain", "tls"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Daemons, Path | None]]:
    """Two daemons, on loopback without certificates, or with them."""
    tls = tmp_path / "tls" if request.param == "tls" else None
    if tls is not None:
        make_certificates(tls, ["n1", "n2", "analyst"])
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2, extra=(f"--tls={tls}",) if tls else ()) as daemons:
        yield daemons, tls


@pytest.mark.long("make cluster")
@pytest.mark.parametrize("two", ["plain", pytest.param("tls", marks=pytest.mark.long("make cluster"))], indirect=True)
def test_calls_of_which_half_comes_keep_nobody_out(two: tuple[Daemons, Path | None]) -> None:
    daemons, tls = two
    with daemons.open("n1") as store:
        publish(store, 0)
        eventually("they are linked", lambda: daemons.safe_point("n1") == 0)
        for method in HALF:
            with _nobody(daemons, tls) as channel, _begun(channel, method) as calls:
                eventually("all but a few are refused", lambda: len(_codes(calls)) >= MANY - MOST_OF_READER)
                assert set(_codes(calls)) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
                assert daemons.status("n1").node == "n1"
                eventually("nobody waits for the rest for ever", lambda: len(_codes(calls)) == MANY)
        publish(store, 1)
        eventually("the peer is still there", lambda: daemons.safe_point("n1") == 1)


def test_only_members_open_links(two: tuple[Daemons, Path | None]) -> None:
    daemons, tls = two
    with daemons.open("n1") as store:
        publish(store, 0)
        eventually("they are linked", lambda: daemons.safe_point("n1") == 0)
        with _nobody(daemons, tls) as channel:
            # A stream that is refused holds a thread for a moment only: of these no more than one at a time is begun.
            before = _threads(daemons, "n1")
            for _ in range(MANY):
                with _begun(channel, "Replication/Link", 1) as (call,):
                    refused = grpc.StatusCode.UNIMPLEMENTED if tls is None else grpc.StatusCode.PERMISSION_DENIED
                    assert call.code() == refused
            assert _threads(daemons, "n1") <= before + 10
            with _begun(channel, "Replication/Link") as calls:
                assert {call.code() for call in calls} <= {refused, grpc.StatusCode.RESOURCE_EXHAUSTED}
        publish(store, 1)
        eventually("the link of the other member lasts", lambda: daemons.safe_point("n1") == 1)


def test_a_member_says_who_it_is_soon_and_first(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ["n1", "n2"])
    with running(tmp_path / "nodes", ("n1", "n2"), extra=(f"--tls={tmp_path / 'tls'}",), start=("n1",)) as daemons:
        member = Certificates.of_directory(tmp_path / "tls", "n2")
        with channel_to(f"127.0.0.1:{daemons.ports['n1']}", member, "n1") as channel:
            with _begun(channel, "Replication/Link") as calls:
                eventually("those without a Hello end", lambda: len(_codes(calls)) == MANY)
            held = pb.Held(name="layers/s/f/0/0-1-0.layer", digest="ab" * 32, size_bytes=3)
            part = pb.Frame(inventory=pb.Inventory(seq=0, held=[held])).SerializeToString()
            call = channel.stream_stream("/nosync.v1.Replication/Link")
            told = [pb.Frame.FromString(frame).WhichOneof("kind") for frame in call(iter([part] * 10), timeout=20.0)]
            assert set(told) <= {"hello"}
        assert "begins with inventory, and not with a Hello" in daemons.log("n1")
        assert daemons.status("n1").node == "n1"


# --- who is who without certificates ------------------------------------------------------------------------------------


def test_without_certificates_whoever_calls_the_address_reads_and_no_more(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("they are linked", lambda: daemons.safe_point("n1") == 0)
        address = f"127.0.0.1:{daemons.ports['n1']}"
        with contextlib.closing(DaemonClient(address)) as stranger:
            assert stranger.status().node == "n1"
            assert stranger.layers()
            asked: list[Callable[[], object]] = [
                lambda: stranger.change_members({"n9": "127.0.0.1:1"}, ["n2"]),
                lambda: stranger.change_branches(pb.ChangeBranchesRequest(delete="main")),
                lambda: stranger.conflicts(take_theirs=True),
                lambda: stranger.attach(0.1),
                lambda: stranger.keep(["counts/raw/0"]),
                lambda: stranger.count_copies(["checkpoints/words/metadata"]),
                lambda: stranger.fetch_checkpoint("words", 0.1),
                lambda: list(
                    stranger.call_door("", "GET", "words/metadata", {"op": "OPEN", "through": "n2"}, b"", 1.0)
                ),
                lambda: list(stranger.call_door("n2", "GET", "words/metadata", {"op": "OPEN"}, b"", 1.0)),
                lambda: stranger.drop_rounds("counts", 0),
                lambda: stranger.fetch_rounds(["counts/raw/0"], 0),
                stranger.check,
                lambda: list(stranger.compact()),
            ]
            for ask in asked:
                with pytest.raises(ReplicationError, match="may read this store and not change it"):
                    ask()
        assert [peer.node for peer in daemons.status("n1").peers] == ["n2"]


def test_nobody_says_to_be_a_member_who_is_none(tmp_path: Path) -> None:
    """With n2 away a stranger says that he is n2, and holds all there is: no copy counts, and nothing becomes safe."""
    with running(tmp_path, ("n1", "n2"), replicas=2, start=("n1",)) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        store.sync()
        about = daemons.status("n1")
        hello = pb.Hello(
            node="n2", incarnation="77", store_id=about.store_id, replicas=2, version=PROTOCOL_VERSION,
            key_groups=about.key_groups,
        )  # fmt: skip
        with contextlib.closing(DaemonClient(f"127.0.0.1:{daemons.ports['n1']}")) as stranger:
            wanted = ["manifests/main/0.json", *(f"layers/{id.path}" for id in store.directory.layer_ids())]
            chunks = [frame.chunk for frame in stranger.fetch_files(wanted) if frame.HasField("chunk")]
        held = [pb.Held(name=c.name, digest=c.digest, size_bytes=c.size_bytes) for c in chunks if not c.offset]
        said = [
            pb.Frame(hello=hello),
            pb.Frame(summary=pb.Summary(seq=0, last=True)),
            pb.Frame(change=pb.Change(seq=1, added=held)),
        ]
        with grpc.insecure_channel(f"127.0.0.1:{daemons.ports['n1']}", OPTIONS) as channel:
            link = channel.stream_stream("/nosync.v1.Replication/Link")
            with pytest.raises(grpc.RpcError):
                list(link(iter([frame.SerializeToString() for frame in said]), timeout=10.0))
        assert daemons.peer("n1", "n2").incarnation == ""
        assert daemons.safe_point("n1") is None
        daemons.start("n2")
        eventually("the real one has them", lambda: daemons.safe_point("n1") == 0)


def test_sockets_are_of_their_user_alone_and_go_with_the_daemon(tmp_path: Path) -> None:
    data = tmp_path / ("long" * 40) / "n1"  # longer than the address of a socket may be
    data.parent.mkdir()
    (port,) = free_ports(1)
    one = Daemon(DaemonConfig("n1", data, f"127.0.0.1:{port}", {}, 1, sockets=tmp_path / "meet"))
    one.start()
    sockets = [data / "daemon.sock", tmp_path / "meet" / f"{port}.sock"]
    try:
        assert [path.stat().st_mode & 0o777 for path in (*sockets, tmp_path / "meet")] == [0o600, 0o600, 0o700]
        with contextlib.closing(client_of(data) or pytest.fail("it is there")) as client:
            client.attach(0.1)
    finally:
        one.stop()
    assert not any(path.exists() for path in sockets)
    assert not list((tmp_path / "meet").iterdir())


def test_where_others_could_put_sockets_nobody_meets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "meet").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "meet")
    (tmp_path / "file").write_text("mine")
    command = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1", "--listen", "127.0.0.1:0"]
    not_alone = "is not a directory of this user alone: expected mode 0700"
    for name, message in (
        ("open", not_alone),
        ("link", not_alone),
        ("file", not_alone),
        ("file/x", "give --sockets DIR"),
    ):
        for more in ([], ["--check"] if message == not_alone else []):
            with pytest.raises(SystemExit):
                main([*command, "--sockets", str(tmp_path / name), *more])
            assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "d").exists()


def test_a_link_to_another_socket_is_not_followed(tmp_path: Path) -> None:
    with running(tmp_path, ("n1",), replicas=1) as daemons:
        other = tmp_path / "received"
        with nosync.open(other):
            pass
        (other / "daemon.json").write_text((daemons.data("n1") / "daemon.json").read_text())
        (other / "daemon.sock").symlink_to(daemons.data("n1") / "daemon.sock")
        client = client_of(other)
        assert client is not None
        with contextlib.closing(client), pytest.raises(ReplicationError, match="may read this store and not change it"):
            client.change_members({"n9": "127.0.0.1:1"}, [])


def test_who_asks_one_daemon_after_another_is_answered_by_each(tmp_path: Path) -> None:
    """gRPC keeps connections by their addresses, and the descriptor in that of a socket is soon another directory's."""
    with running(tmp_path, ("n1", "n2"), replicas=1) as daemons:
        for n in range(20):
            node = f"n{n % 2 + 1}"
            with contextlib.closing(client_of(daemons.data(node)) or pytest.fail("it is there")) as client:
                assert client.status().node == node


@pytest.mark.parametrize("stage", ["../..", "..", "", "x/y", "\0", "x" * 5000, "."])
def test_a_member_names_stages_and_no_paths(tmp_path: Path, stage: str) -> None:
    """What a member calls a stage became a path, of which files were listed and removed."""
    make_certificates(tmp_path / "tls", ["n1", "n2"])
    extra = (f"--tls={tmp_path / 'tls'}",)
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=1, extra=extra, start=("n1",)) as daemons:
        member = Certificates.of_directory(tmp_path / "tls", "n2")
        address = f"127.0.0.1:{daemons.ports['n1']}"
        with contextlib.closing(DaemonClient(address, member, "n1")) as client:
            with pytest.raises(ReplicationError, match="stage"):
                client.drop_rounds(stage, 0)
            with pytest.raises(ReplicationError, match="epoch"):
                client.drop_rounds("counts", (1 << 64) - 1)
            client.drop_rounds("counts", 0)


def test_another_user_of_the_host_reads_over_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, ("n1",), replicas=1) as daemons:
        with daemons.open("n1") as store:
            publish(store, 0)
            store.sync()
        for module in ("client.remote_store", "transport.client"):  # he may not open the socket
            monkeypatch.setattr(f"nosync.replication.{module}.answers", lambda _: False)
        with nosync.connect(f"127.0.0.1:{daemons.ports['n1']}") as there:
            assert state(there, 0) == expected(0)
            with pytest.raises(nosync.StorageError, match="can be read and not written"):
                there.append("counts", t=1, rows=rows(1))
        main(["status", str(daemons.data("n1"))])


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "203.0.113.7:7500"},
        {"address": "evil.example:7500"},
        {"address": "203.0.113.7:7500", "tls": "/etc/nosync/tls"},
        {"address": "banana"},
        {"address": 7},
        {"address": "127.0.0.1:1", "node": 7},
        {"address": "127.0.0.1:1", "tls": ["x"]},
    ],
)
def test_a_received_store_leads_to_no_daemon_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sent it would be told of it, and be shown the certificate that it names."""

    def looked_up(*_: object, **__: object) -> object:
        raise AssertionError("a name that somebody else wrote was looked up")

    with nosync.open(tmp_path) as store:
        store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
    about = {"node": "n1", "pid": 1, "place": "x", "tls": "", **changed}
    (tmp_path / "daemon.json").write_text(json.dumps(about))
    monkeypatch.setattr("socket.getaddrinfo", looked_up)
    monkeypatch.setattr("socket.getfqdn", lambda: "here.example")
    assert client_of(tmp_path) is None
    is_named = isinstance(changed["address"], str) and not changed["address"].startswith("127.")
    assert ("no address of this host" in caplog.text) == is_named


def test_which_addresses_are_of_this_host() -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "0.0.0.0:1", f"{socket.gethostname()}:1"):
        assert is_of_this_host(address), address
    for address in ("203.0.113.7:1", "[2001:db8::7]:1", "evil.example:1", "banana"):
        assert not is_of_this_host(address), address


def test_a_cache_is_what_the_daemon_has_by_digest(tmp_path: Path) -> None:
    """Files under the same names and with the same times, whole and sealed, were read for those of the store."""
    with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        for t in range(3):
            publish(store, t)
        store.sync()
        eventually("safe", lambda: daemons.safe_point("n1") == 2)
        address, cache = f"127.0.0.1:{daemons.ports['n1']}", tmp_path / "cache"
        with nosync.connect(address, cache=cache) as there:
            assert [state(there, t) for t in range(3)] == [expected(t) for t in range(3)]
        with nosync.open(tmp_path / "theirs", settings=nosync.StoreSettings(background=False)) as theirs:
            for t in range(3):
                theirs.append("counts", t=t, rows=rows(t + 100), key=["k"])
                theirs.seal(t)
        replaced = 0
        for path in [
            *(tmp_path / "theirs" / "layers").rglob("*.layer"),
            *(tmp_path / "theirs").rglob("manifests/*/*.json"),
        ]:
            kept = cache / path.relative_to(tmp_path / "theirs")
            if kept.exists():
                written_ns = kept.stat().st_mtime_ns
                kept.write_bytes(path.read_bytes())
                os.utime(kept, ns=(written_ns, written_ns))
                replaced += 1
        assert replaced >= 4
        with nosync.connect(address, cache=cache) as again:
            assert [state(again, t) for t in range(3)] == [expected(t) for t in range(3)]


def test_what_a_cache_has_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        for t in range(3):
            publish(store, t)
        store.sync()
        eventually("safe", lambda: daemons.safe_point("n1") == 2)
        address, cache = f"127.0.0.1:{daemons.ports['n1']}", tmp_path / "cache"
        fetched: list[str] = []
        fetch = DaemonClient.fetch_files

        def counted(client: DaemonClient, names: Any, timeout_s: float = 60.0) -> Iterator[pb.Frame]:
            fetched.extend(names)
            return fetch(client, names, timeout_s)

        monkeypatch.setattr(DaemonClient, "fetch_files", counted)
        for is_first in (True, False):
            with nosync.connect(address, cache=cache) as there:
                assert state(there, 2) == expected(2)
            assert bool(fetched) == is_first
            fetched.clear()
