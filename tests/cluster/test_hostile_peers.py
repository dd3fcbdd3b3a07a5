"""Strangers change nothing: malformed and hostile frames, certificates, sizes; and what operators look at."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import zstandard
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import example, given
from hypothesis import strategies as st

import nosync
from nosync.cli import main
from nosync.lsm.errors import ReplicationError
from nosync.proto.v1 import replication_pb2 as pb
from nosync.proto.v1 import replication_pb2_grpc as rpc
from nosync.replication.daemon.service import MOST_READING
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, in_order
from nosync.replication.protocol.messages import PROTOCOL_VERSION, Message
from nosync.replication.transport.addresses import is_loopback
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import OPTIONS, Certificates, channel_to
from nosync.replication.transport.client import DaemonClient, client_of
from nosync.replication.transport.codec import CHUNK_BYTES, Chunk, Decoder, Encoder
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports, running
from tests.helpers.daemons import expected, publish, rows, state

DIGEST = "ab" * 32
LAYER = "layers/s/f/0/0-1-0.layer"


# --- the parser -------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
@example(b"")
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    # Protobuf refuses it before us, or we do; nothing else may be raised, and what comes out is what a node says.
    try:
        found = Decoder().decode(pb.Frame.FromString(data))
    except (DecodeError, ReplicationError):
        return
    assert found is None or isinstance(found, Message | Chunk)


names = st.one_of(
    st.text(max_size=40),
    st.sampled_from([
        LAYER, "../../etc/passwd", "layers/../../x.layer", "/etc/passwd", "layers//f/0/0-1-0.layer", "manifests/main/1.json",
        "manifests/../1.json", "branches/1.json", "pins/x.json", "layers/s/f/0/1-0-0.layer", "layers/s/f/9of2/0-1-0.layer",
        "manifests/main/0-999.json", "manifests/main/5-3.json", "manifests/main/5-5.json", "manifests/main/0-9999999999999.json",
        "manifests/main/9999999999999.json", "catalog/CURRENT", "layers/S/f/0/0-1-0.layer", "LOCK", "NOSYNC",
    ]),
)  # fmt: skip


@given(names)
def test_only_names_that_a_store_writes_are_taken(name: str) -> None:
    frame = pb.Frame(not_there=pb.NotThere(name=name))
    try:
        Decoder().decode(frame)
    except ReplicationError:
        assert name not in (LAYER, "manifests/main/1.json", "manifests/main/0-999.json", "branches/1.json")
    else:
        path = Path("/data") / name
        assert path.resolve().is_relative_to("/data")
        assert path.parts[2] in ("layers", "manifests", "branches")
        assert name not in ("manifests/main/5-3.json", "manifests/main/5-5.json")
        assert len(Inventory([FileVersion(FileName(name), "d")])) == 1
        assert in_order([FileVersion(FileName(name), "d")])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (pb.Chunk(name=LAYER, digest="x", size_bytes=1, data=b"a"), "a digest or a size that no file has"),
        (pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=1 << 60, data=b"a"), "a digest or a size that no file has"),
        (pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=1, offset=1, data=b"a"), "beyond the end"),
        (pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=1 << 30, data=bytes(CHUNK_BYTES + 1)), "larger than"),
        (pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=9, data=b"not zstd", zstd=True), "no frame of zstandard"),
        (
            pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=1 << 30, zstd=True,
                     data=zstandard.ZstdCompressor().compress(bytes(CHUNK_BYTES * 50))),
            "a compressed piece of",
        ),
    ],
)  # fmt: skip
def test_pieces_that_no_node_sends(chunk: pb.Chunk, message: str) -> None:
    with pytest.raises(ReplicationError, match=message):
        Decoder().decode(pb.Frame(chunk=chunk))


# --- a daemon ---------------------------------------------------------------------------------------------------------


_WHEN_ASKED = pb.Frame()


def _talk(channel: grpc.Channel, sent: list[pb.Frame]) -> list[pb.Frame]:
    """Sends frames, ends its side, and returns what came until the daemon ended the stream."""
    waiting: queue.Queue[pb.Frame | None] = queue.Queue()
    asked = threading.Event()
    for frame in [*sent, None]:
        waiting.put(frame)

    def out() -> Iterator[pb.Frame]:
        while (frame := waiting.get()) is not None:
            if frame is _WHEN_ASKED:
                assert asked.wait(timeout=10.0), "the daemon was told of a file and does not ask for it"
            else:
                yield frame

    call = rpc.ReplicationStub(channel).Link(out(), timeout=15.0)
    found = []
    try:
        for frame in call:
            found.append(frame)
            if frame.WhichOneof("kind") == "want":
                asked.set()
    except grpc.RpcError:
        pass
    return found


def _claim(held: pb.Held) -> list[pb.Frame]:
    """Says that a file is held: a summary of nothing, and then a change."""
    return [
        pb.Frame(summary=pb.Summary(seq=0, last=True)),
        pb.Frame(change=pb.Change(seq=1, added=[held])),
    ]


def _hello(daemons: Daemons, **changed: object) -> pb.Frame:
    about = daemons.status("n1")
    fields = {
        "node": "n2",
        "incarnation": "0123",
        "store_id": about.store_id,
        "replicas": 2,
        "version": PROTOCOL_VERSION,
    } | changed
    return pb.Frame(hello=pb.Hello(**fields))  # type: ignore[arg-type]


def test_a_hostile_client_kills_and_changes_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        daemons.kill("n2")
        before = {path: path.read_bytes() for path in daemons.data("n1").rglob("*.layer")}
        held = pb.Held(name=LAYER, digest=DIGEST, size_bytes=3)
        # Whole layers of another store: one under a digest that it does not have, one with a bit flipped.
        with nosync.open(tmp_path / "theirs", settings=nosync.StoreSettings(background=False)) as theirs:
            theirs.append("evil", t=0, rows=rows(0), key=["k"])
            layer = theirs.layers()[0]
        whole = Path(layer.path).read_bytes()
        name = "layers/evil/raw/0/0-1-0.layer"
        other = pb.Chunk(name=name, digest=DIGEST, size_bytes=len(whole), data=whole)
        flipped = bytearray(whole)
        flipped[len(whole) // 4] ^= 1
        torn = pb.Chunk(name=name, digest=layer.digest, size_bytes=len(whole), data=bytes(flipped))
        attacks = [
            [_hello(daemons, node="evil")],
            [_hello(daemons, version=9)],
            [_hello(daemons, store_id="other")],
            [pb.Frame()],
            [pb.Frame(want=pb.Want(files=[pb.Held(name="../../../etc/passwd", digest=DIGEST)]))],
            # As n2, for it runs as the same user: it claims files, then sends other bytes for them.
            [
                _hello(daemons),
                *_claim(held),
                pb.Frame(chunk=pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=3, data=b"abc")),
            ],
            [_hello(daemons), pb.Frame(chunk=pb.Chunk(name=LAYER, digest=DIGEST, size_bytes=3, data=b"abc"))],
            *(
                [
                    _hello(daemons),
                    *_claim(pb.Held(name=name, digest=chunk.digest, size_bytes=len(whole))),
                    _WHEN_ASKED,
                    pb.Frame(chunk=chunk),
                ]
                for chunk in (other, torn)
            ),
            [
                _hello(daemons),
                *[pb.Frame(beat=pb.Beat(seq=int(i), root="x")) for i in random.integers(0, 1 << 40, 200)],
            ],
        ]
        way = daemons.way_of_peers("n1")
        with contextlib.closing(way), channel_to("", None, socket=way) as channel:
            for attack in attacks:
                _talk(channel, attack)
            call = channel.stream_stream("/nosync.v1.Replication/Link")
            for _ in range(20):  # not even protobuf
                with pytest.raises(grpc.RpcError):
                    list(call(iter([random.bytes(500)]), timeout=1.0))
        publish(store, 1)
        assert state(store, 1) == expected(1)
        after = {path: path.read_bytes() for path in daemons.data("n1").rglob("*.layer")}
        assert before.items() <= after.items()
        assert not (daemons.data("n1") / LAYER).exists()
        assert not (daemons.data("n1") / name).exists()
        assert daemons.log("n1").count("not kept: layers/evil") == 2, "both were asked for, and refused"
        assert not list((daemons.data("n1") / "tmp").iterdir())
        daemons.start("n2")
        eventually("all goes on", lambda: daemons.safe_point("n1") == 1)


def test_mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_certificates(tmp_path / "tls", ["n1", "n2"])
    make_certificates(tmp_path / "theirs", ["n1", "n2"])  # another authority
    assert (tmp_path / "tls" / "n1.key").stat().st_mode & 0o077 == 0
    extra = ("--tls", str(tmp_path / "tls"))
    with running(tmp_path / "nodes", ("n1", "n2"), replicas=2, extra=extra) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        address = f"127.0.0.1:{daemons.ports['n1']}"
        ours = Certificates.of_directory(tmp_path / "tls", "n2")
        theirs = Certificates.of_directory(tmp_path / "theirs", "n2")
        for certificates in (None, theirs):
            with channel_to(address, certificates, "n1") as channel, pytest.raises(grpc.RpcError):
                rpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=3.0)
        with channel_to(address, ours, "n1") as channel:
            assert rpc.DaemonStub(channel).Status(pb.StatusRequest(), timeout=3.0).node == "n1"
            about = _hello(daemons, node="n1", incarnation="9")  # n2's certificate, and says that it is n1
            assert all(frame.WhichOneof("kind") == "hello" for frame in _talk(channel, [about]))
        eventually("it is logged", lambda: "has the certificate of n2" in daemons.log("n1"))
        make_certificates(tmp_path / "tls", ["analyst"])
        address = f"127.0.0.1:{daemons.ports['n1']}"
        of_analyst = {"tls": tmp_path / "tls", "identity": "analyst", "cache": tmp_path / "cache"}
        with nosync.connect(address, node="n1", **of_analyst) as there:  # type: ignore[arg-type]
            assert state(there, 0) == expected(0)
        for name, value in (("TLS", str(tmp_path / "tls")), ("IDENTITY", "analyst"), ("NODE", "n1")):
            monkeypatch.setenv(f"NOSYNC_{name}", value)
        main(["get", address, "counts", "--as-of", "0", "--json"])
        assert len(json.loads(capsys.readouterr().out)) == len(expected(0))
        with pytest.raises(ReplicationError, match="the daemon there is not node n2"):
            nosync.connect(address, node="n2", **of_analyst)  # type: ignore[arg-type]
        theirs_too = {"tls": tmp_path / "theirs", "identity": "n2", "cache": tmp_path / "cache"}
        with pytest.raises(ReplicationError, match="certificates are not of one authority"):
            nosync.connect(address, node="n1", **theirs_too)  # type: ignore[arg-type]
        # A reader reads, and changes nothing; a member neither decides for this node.
        for identity in ("analyst", "n2"):
            certificates = Certificates.of_directory(tmp_path / "tls", identity)
            with contextlib.closing(DaemonClient(address, certificates, "n1")) as client:
                assert client.status().node == "n1"
                assert client.layers()
                change = pb.ChangeBranchesRequest(delete="main")
                for call in (
                    lambda: client.change_members({}, ["n2"]),
                    lambda: client.change_branches(change),  # noqa: B023
                    lambda: client.conflicts(take_theirs=True),
                    lambda: client.attach(0.1),
                    lambda: client.keep(["counts/raw/0"]),
                    client.check,
                    lambda: list(client.compact()),
                ):
                    with pytest.raises(ReplicationError, match="may read this store and not change it"):
                        call()
        with daemons.open("n1") as mine:
            assert [peer.node for peer in daemons.status("n1").peers] == ["n2"]
            mine.sync()
        for name in ("TLS", "IDENTITY", "NODE"):
            monkeypatch.delenv(f"NOSYNC_{name}", raising=False)
        with pytest.raises(ReplicationError, match="does not answer without certificates .* NOSYNC_TLS"):
            nosync.connect(address)
        with pytest.raises(ReplicationError, match=r"n7.pem is not there: make certificates with nosync certs"):
            Certificates.of_directory(tmp_path / "tls", "n7")


def test_what_is_loopback() -> None:
    assert is_loopback("127.0.0.1:1")
    assert is_loopback("[::1]:1")
    assert is_loopback("localhost:1")
    assert not is_loopback("0.0.0.0:1")
    assert not is_loopback("10.1.2.3:1")
    assert not is_loopback("node7:1")


# --- what operators look at ---------------------------------------------------------------------------------------------


def test_status_metrics_and_health(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (metrics,) = free_ports(1)
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        daemons.stop("n1")
        daemons.start("n1", "--metrics", f"127.0.0.1:{metrics}")
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        eventually("linked", lambda: daemons.peer("n1", "n2").state == "up")
        main(["status", str(daemons.data("n1")), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["safe_point"] == 0
        assert found["daemon"]["replicas"] == 2
        counts = found["daemon"]["stages"][0]
        assert [counts[name] for name in ("stage", "complete", "durable", "replicated")] == ["counts", 0, 0, 0]
        assert (counts["waiting_layers"], found["daemon"]["lag_s"]) == (0, 0)
        assert [(p["node"], p["state"], p["behind_files"]) for p in found["daemon"]["peers"]] == [("n2", "up", 0)]
        main(["status", str(daemons.data("n1"))])
        shown = capsys.readouterr().out
        assert "keeps 2 copies" in shown
        assert "layers waiting" in shown
        assert "n2" in shown
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5).read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values["nosync_safe_point_epoch"]) == 0
        assert float(values['nosync_peer_up{peer="n2"}']) == 1
        assert float(values['nosync_stage_replicated_epoch{stage="counts"}']) == 0
        assert float(values["nosync_safe_point_lag_seconds"]) == 0
        assert float(values["nosync_sent_files_total"]) >= 3
        with channel_to(f"127.0.0.1:{daemons.ports['n1']}", None) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        daemons.kill("n1")
        main(["status", str(daemons.data("n1"))])
        assert "does not answer" in " ".join(capsys.readouterr().err.split())


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(30.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running(tmp_path / "nodes", ("n1",), replicas=1) as daemons:
            assert told.recv(100) == b"READY=1"
            daemons.stop("n1")
            assert told.recv(100) == b"STOPPING=1"


def test_a_configuration_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    monkeypatch.chdir(tmp_path)
    file = Path("etc/node.toml")
    file.write_text('node = "n1"\ndata = "d"\nreplicas = 2\n[peers]\nn2 = "127.0.0.1:7502"\n')
    main(["daemon", "--config", str(file), "--check"])
    shown = "".join(capsys.readouterr().out.split())  # the table folds long values
    for text in ("noden1", "replicas2", "Onhowmanynodes", "dataetc/dThedata", "127.0.0.1:7500"):
        assert text in shown
    for text, message in (
        ("node = ", "is not TOML"),
        ('node = "n1"', "data is not given"),
        ('node = "n1"\ndata = "d"\nreplica = 2', "unknown field 'replica'; fields: node, data, listen"),
        ('node = "n1"\ndata = "d"\nreplicas = "2"', "replicas is '2', expected int"),
        ('node = "N 1"\ndata = "d"\nreplicas = 1', "'N 1' is not a node id"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            main(["daemon", "--config", str(file), "--check"])
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["daemon", "--config", str(tmp_path / "none.toml")])
    assert "cannot read" in capsys.readouterr().err


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    """Drift between proto/v1/replication.proto and what is committed beside it."""
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    subprocess.run(
        ["sh", "tools/generate-protos.sh", str(tmp_path)],
        cwd=root,
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    for made in tmp_path.glob("replication_pb2*"):
        assert made.read_text() == (root / "proto" / "v1" / made.name).read_text(), made.name
    assert len(list(tmp_path.glob("replication_pb2*"))) == 3


def test_only_a_stores_own_files_are_served(tmp_path: Path) -> None:
    with running(tmp_path, ("n1",), replicas=1) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        client = client_of(daemons.data("n1"))
        assert client is not None
        assert list(client.list_files("manifests/main")) == ["0.json"]
        for directory in ("..", "", ".", "catalog", "/etc", "layers/../../..", "quarantine"):
            with pytest.raises(nosync.ReplicationError, match="not"):
                client.list_files(directory)
        for name in ("NOSYNC", "daemon.json", "../n1.log", "/etc/passwd", "catalog/CURRENT", "layers/x"):
            with pytest.raises(nosync.ReplicationError, match="not"):
                list(client.fetch_files([name]))
        (gone,) = client.fetch_files(["manifests/main/7.json"])
        assert gone.not_there.name == "manifests/main/7.json"
        client.close()


def test_a_large_inventory_comes_in_parts() -> None:
    from nosync.replication.protocol.messages import Have, Summary

    held = tuple(FileVersion(FileName(f"manifests/main/{i}.json"), DIGEST, i) for i in range(12_345))
    groups = tuple((f"manifests/main/{i}", f"1000:{i:x}") for i in range(12_345))
    messages: list[Message] = [Have(7, ("manifests/main/0",), held), Summary(7, groups)]
    decoder = Decoder()
    for message in messages:
        sent = list(Encoder().frames(message))
        assert len(sent) == 13
        assert [decoder.decode(frame) for frame in sent] == [*[None] * 12, message]
    for empty in (Have(1, (), ()), Summary(1, ())):
        (frame,) = Encoder().frames(empty)
        assert decoder.decode(frame) == empty
    for bad in (pb.Group(name="../x", root="1:a"), pb.Group(name="pins", root="many")):
        with pytest.raises(nosync.ReplicationError, match="group of files"):
            decoder.decode(pb.Frame(summary=pb.Summary(seq=1, groups=[bad], last=True)))
    with pytest.raises(nosync.NosyncError):
        decoder.decode(pb.Frame(hello=pb.Hello(node="N1")))


def test_a_proxy_for_the_web_is_not_for_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.settimeout(0.2)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with running(tmp_path, ("n1", "n2")) as daemons:
            with daemons.open("n1") as store:
                publish(store, 0)
                store.sync()
            eventually("they are linked", lambda: daemons.safe_point("n2") == 0)
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_a_daemon_that_took_the_address_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    with running(tmp_path / "a", ("n1",), replicas=1) as mine:
        with mine.open("n1") as store:
            publish(store, 0)
            store.sync()
        mine.kill("n1")
        theirs = Daemons(tmp_path / "b", ("n1",), 1, dict(mine.ports))
        theirs.root.mkdir()
        theirs.start("n1")
        try:
            client = client_of(mine.data("n1"))
            assert client is not None, "daemon.json was left there"
            with contextlib.closing(client), pytest.raises(ReplicationError, match="has its address now"):
                client.change_members({"n9": "127.0.0.1:1"}, [])
            assert not theirs.status("n1").peers
            assert mine.data("n1").joinpath("daemon.json").exists()
        finally:
            theirs.kill("n1")
        mine.start("n1")
        with mine.open("n1") as store:
            assert state(store, 0) == expected(0)


def test_readers_that_take_nothing_keep_nobody_out(tmp_path: Path) -> None:
    large = rows(0).append_column("x", [[os.urandom(400_000) for _ in range(rows(0).num_rows)]])
    with running(tmp_path, ("n1",), replicas=1) as daemons:
        with daemons.open("n1") as store:
            store.append("large", t=0, rows=large, key=["k"])
            store.seal(0)
            store.sync()
            name = next(f"layers/{id.path}" for id in store.directory.layer_ids())
        address = f"127.0.0.1:{daemons.ports['n1']}"
        with contextlib.ExitStack() as held:
            refused, calls = 0, []  # gRPC cancels a call that nobody refers to any more
            for _ in range(80):
                # Windows that stay small: where gRPC lets them grow with the link's speed, the whole file fits into one at times,
                # and then the reader has taken it.
                channel = held.enter_context(grpc.insecure_channel(address, [*OPTIONS, ("grpc.http2.bdp_probe", 0)]))
                calls.append(rpc.DaemonStub(channel).FetchFiles(pb.FetchFilesRequest(names=[name])))
                try:
                    next(calls[-1])
                except grpc.RpcError as error:
                    refused += "answers many such calls" in str(error)
            assert refused == 80 - MOST_READING
            assert daemons.status("n1").node == "n1"
            with daemons.open("n1") as store:
                store.append("large", t=1, rows=large.slice(0, 1), key=["k"])
                store.seal(1)
                store.sync()


def test_an_address_that_cannot_be_had_is_said_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    make_certificates(tmp_path / "tls", ["n1"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for listen, message in (
            (f"127.0.0.1:{port}", "address already in use; another program has this port"),
            ("203.0.113.7:7501", "no interface of this machine has that address"),
        ):
            common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1"]
            with pytest.raises(SystemExit):
                main([*common, "--listen", listen, "--tls", str(tmp_path / "tls")])
            shown = " ".join(capfd.readouterr().err.split())
            assert message in shown
            assert "add_port.cc" not in shown, "gRPC's own words"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "banana"], "listen: address 'banana' is not HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "is not HOST:PORT"),
        (["--listen", "0.0.0.0:7510"], "off loopback both sides need certificates"),
        (["--metrics", "x"], "metrics: address 'x'"),
        (["--peer", "n2=host"], "peers.n2: address 'host'"),
        (["--listen", "127.0.0.1:7510", "--peer", "n2=127.0.0.1:7510"], "an address of its own"),
        (["--tls", "nope"], "make certificates with nosync certs"),
        (["--peer", "n2=127.0.0.1:1", "--peer", "n2=127.0.0.1:2"], "names node n2 twice"),
        (
            ["--peer", "n2=127.0.0.1:1", "--peer", "n3=127.0.0.1:1"],
            "two peers of node n1 are said to listen on 127.0.0.1:1",
        ),
        (["--archive-epochs", "1"], "--archive-epochs"),
    ],
)
def test_what_a_start_refuses_a_check_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1", *arguments]
    for more in (["--check"], []):
        with pytest.raises(SystemExit):
            main([*common, *more])
        assert message in " ".join(capsys.readouterr().err.split())


def test_certificates_that_peers_would_refuse_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today = datetime.datetime.now(datetime.UTC)
    for name, at in (("good", 0), ("old", -1000), ("early", 10)):
        make_certificates(tmp_path / name, ["n1", "n2"], now=today + datetime.timedelta(days=at))
    make_certificates(tmp_path / "other", ["n1"])
    make_certificates(tmp_path / "outlived", [], now=today - datetime.timedelta(days=1000))
    make_certificates(tmp_path / "outlived", ["n1"])
    for name, source, node in (("strange", "other", "n1"), ("renamed", "good", "n2")):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        for end in ("pem", "key"):
            shutil.copy(tmp_path / source / f"{node}.{end}", tmp_path / name / f"n1.{end}")
    common = ["daemon", "--node", "n1", "--data", str(tmp_path / "d"), "--replicas", "1"]
    main([*common, "--tls", str(tmp_path / "good"), "--check"])
    capsys.readouterr()
    for name, message in (
        ("old", "certificate has expired"),
        ("early", "certificate is not yet valid"),
        ("outlived", "certificate has expired"),
        ("renamed", "n1.pem is of n2, and both its common name"),
        ("strange", "unable to get local issuer certificate"),
    ):
        for more in (["--check"], []):
            with pytest.raises(SystemExit):
                main([*common, "--tls", str(tmp_path / name), *more])
            assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "d").exists()


def test_certificates_of_other_tools(tmp_path: Path) -> None:
    """What gRPC would take is taken, with authorities between; and what it would not is refused."""
    usages = x509.oid.ExtendedKeyUsageOID
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("root", "between", "n1")}

    def made(name: str, by: str, *extensions: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        subject, issuer = (x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, n)]) for n in (name, by))
        builder = (
            x509.CertificateBuilder(issuer, subject, keys[name].public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(keys[by], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (tmp_path / "n1.key").write_bytes(
        keys["n1"].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    root, between = made("root", "root", is_authority), made("between", "root", is_authority)
    plain = made("n1", "between")
    names, both = x509.SubjectAlternativeName, x509.ExtendedKeyUsage([usages.SERVER_AUTH, usages.CLIENT_AUTH])
    good = made("n1", "between", names([x509.DNSName("host1"), x509.DNSName("n1")]), both)
    elsewhere = made("n1", "between", names([x509.DNSName("host1")]))
    one_sided = made("n1", "between", x509.ExtendedKeyUsage([usages.SERVER_AUTH]))
    for ca, certificate, message in (
        (root, plain + between, None),
        (b"the authority\n" + root, good + root + between, None),
        (between, good + between, None),
        (made("n1", "n1") + between, good, None),
        (root, plain, "unable to get local issuer certificate"),
        (root, elsewhere + between, "is of n1, host1, and both"),
        (root, one_sided + between, "certificate purpose"),
        (b"no certificate", plain, "holds no certificate of an authority"),
        (root, b"no certificate", "are not a certificate and its key"),
    ):
        (tmp_path / "ca.pem").write_bytes(ca)
        (tmp_path / "n1.pem").write_bytes(certificate)
        with pytest.raises(ReplicationError, match=message) if message else contextlib.nullcontext():
            Certificates.of_directory(tmp_path, "n1").check_as_peers_do("n1")


def test_a_start_that_is_refused_leaves_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    common = ["daemon", "--node", "n1", "--replicas", "1", "--data"]
    for data, message in (("foreign", "is not empty (notes.txt"), ("file", "is a file, not a store directory")):
        for more in (["--check"], []):
            with pytest.raises(SystemExit):
                main([*common, str(tmp_path / data), *more])
            assert message in " ".join(capsys.readouterr().err.split())
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(SystemExit):
            main([*common, str(tmp_path / "new"), "--listen", f"127.0.0.1:{other.getsockname()[1]}"])
        assert "another program has this port" in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "foreign", "notes.txt"]


def test_no_node_is_called_as_the_authority_is(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    authority = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(ReplicationError, match="no node can be called 'ca'"):
        make_certificates(tmp_path, ["n2", "ca"])
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert not (tmp_path / "n2.pem").exists()


def test_files_of_a_daemon_that_are_damaged_or_say_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, ("n1", "n2"), replicas=1) as daemons:
        data = daemons.data("n1")
        daemons.stop("n1")
        (data / "place.json").write_text("")
        (data / "members.json").write_text('{"n1": "127.0.0.1:1", "n3": "127.0.0.1:2"}')
        main(["daemon", "--node", "n1", "--data", str(data), "--peer", "n2=127.0.0.1:3", "--replicas", "1", "--check"])
        told = capsys.readouterr()
        assert "as nosync peers left them: n3=127.0.0.1:2" in " ".join(told.err.split())
        assert "127.0.0.1:3" not in told.out
        daemons.start("n1")
        assert [peer.node for peer in daemons.status("n1").peers] == ["n3"]
        assert json.loads((data / "place.json").read_text())


def test_half_an_authority_is_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["n1"])
    key = (tmp_path / "ca.key").read_bytes()
    for name in ("ca.key", "ca.pem"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(ReplicationError, match=f"{name} is not there"):
            make_certificates(tmp_path, ["n2"])
        (tmp_path / name).write_bytes(b"junk")
        with pytest.raises(ReplicationError, match="not PEM files of an authority"):
            make_certificates(tmp_path, ["n2"])
        (tmp_path / name).write_bytes(kept)
    make_certificates(tmp_path, ["n2"])
    assert (tmp_path / "ca.key").read_bytes() == key


def test_an_authority_is_replaced_while_daemons_run(tmp_path: Path) -> None:
    """With both in ca.pem, nodes that have certificates of either understand each other."""
    for directory in ("old", "new"):
        make_certificates(tmp_path / directory, ["n1", "n2"])
    both = b"".join((tmp_path / directory / "ca.pem").read_bytes() for directory in ("old", "new"))
    for directory in ("old", "new"):
        (tmp_path / directory / "ca.pem").write_bytes(both)
    with running(tmp_path / "nodes", ("n1",), replicas=1, extra=(f"--tls={tmp_path / 'new'}",)) as daemons:
        for directory in ("old", "new"):
            certificates = Certificates.of_directory(tmp_path / directory, "n2")
            address = f"127.0.0.1:{daemons.ports['n1']}"
            with contextlib.closing(DaemonClient(address, certificates, "n1")) as client:
                assert client.status().node == "n1"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("n1.pem", "garbage", "are not a certificate and its key"), ("n1.key", "n2.key", "are not a certificate and its key"),
        ("ca.pem", "garbage", "holds no certificate of an authority"),
    ],
)  # fmt: skip
def test_a_certificate_that_is_none_is_not_called_an_address_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, message: str
) -> None:
    tls = tmp_path / "tls"
    main(["certs", str(tls), "n1", "n2"])
    (tls / file).chmod(0o600)
    (tls / file).write_text((tls / content).read_text() if content.endswith(".key") else content)
    command = [
        "daemon",
        "--node",
        "n1",
        "--data",
        str(tmp_path / "n1"),
        "--listen",
        "127.0.0.1:0",
        "--replicas",
        "1",
        "--tls",
        str(tls),
    ]
    for more in (["--check"], []):
        with pytest.raises(SystemExit):
            main([*command, *more])
        assert message in " ".join(capsys.readouterr().err.split())
