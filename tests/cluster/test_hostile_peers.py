"""Strangers change nothing: malformed and hostile frames, certificates, sizes; and what operators look at."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
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
from nosync.testing.daemon_cluster import Daemons, eventually, running
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


def _attacks(daemons: Daemons, name: str, chunks: Sequence[pb.Chunk], numbers: Iterable[int]) -> list[list[pb.Frame]]:
    """`chunks`: whole layers of another store, under `name`. `numbers`: of beats."""
    held = pb.Held(name=LAYER, digest=DIGEST, size_bytes=3)
    return [
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
                *_claim(pb.Held(name=name, digest=chunk.digest, size_bytes=len(chunk.data))),
                _WHEN_ASKED,
                pb.Frame(chunk=chunk),
            ]
            for chunk in chunks
        ),
        [
            _hello(daemons),
            *[pb.Frame(beat=pb.Beat(seq=int(i), root="x")) for i in numbers],
        ],
    ]


def test_a_hostile_client_kills_and_changes_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    with running(tmp_path, ("n1", "n2"), replicas=2) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        eventually("safe", lambda: daemons.safe_point("n1") == 0)
        daemons.kill("n2")
        before = {path: path.read_bytes() for path in daemons.data("n1").rglob("*.layer")}
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
        attacks = _attacks(daemons, name, (other, torn), random.integers(0, 1 << 40, 200))
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
