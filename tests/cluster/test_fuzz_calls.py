"""Every call of a daemon with bytes that nobody sends: from nobody, a reader, a member and the owner. NOSYNC_FUZZ says how many.

Whatever comes, the daemon lives, answers its owner, keeps its files, and holds no more threads, descriptors and memory for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.messages import PROTOCOL_VERSION
from nosync.replication.transport.calls import SOCKET_THREADS, TCP_THREADS
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import OPTIONS, Certificates, channel_to
from nosync.replication.transport.sockets import SOCKET_FILE, SocketPath
from nosync.testing.daemon_cluster import Daemons, eventually, running
from tests.helpers.daemons import expected, publish, state

INPUTS = int(os.environ.get("NOSYNC_FUZZ", "2000"))
MOST_MEMORY_BYTES = 256 << 20
"""By which the daemon may grow, whatever the number of inputs."""
PATIENCE_S = 5.0
DIGEST = "ab" * 32
LAYER = "layers/s/raw/0/0-1-0.layer"
MAY_LAST = ("Replication/Link", "Daemon/Attach")
UNARY = [method.name for method in pb.DESCRIPTOR.services_by_name["Daemon"].methods]
HARMLESS_TO_OWNER = sorted(
    {"Status", "Note", "Keep", "ListFiles", "FetchFiles", "Layers", "Conflicts", "FetchRounds", "CountCopies"}
)
"""What else the owner asks for, he gets: branches are deleted and members changed."""
TEXTS = (
    "", "main", "counts", "n2", "..", "/", "layers", "layers/counts/raw/0", "../../etc/passwd", "x" * 5000, "\x00", "\u00e9",
    "checkpoints/words/commits/0", "checkpoints/words", LAYER,
    "manifests/main", "manifests/main/0.json", "127.0.0.1:1", "counts/raw/0", "9" * 30, "-1", DIGEST,
)  # fmt: skip
NUMBERS = (0, 1, 2, 7, 1 << 13, (1 << 31) - 1, (1 << 63) - 1)


class Inputs:
    """Messages of the wire, and what becomes of them by mutation."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def one_of(self, choices: object) -> object:
        return choices[int(self.random.integers(len(choices)))]  # type: ignore[arg-type,index]

    def message(self, kind: object, depth: int = 0) -> object:
        """A message with some fields that say something."""
        made = kind()  # type: ignore[operator]
        for field in made.DESCRIPTOR.fields:
            if self.random.random() < 0.4:
                continue
            with contextlib.suppress(ValueError, TypeError):  # a number that the field does not take
                self._set(made, field, depth)
        return made

    def _set(self, made: object, field: object, depth: int) -> None:
        name, repeated = field.name, field.is_repeated  # type: ignore[attr-defined]
        times = int(self.random.integers(1, 4)) if repeated else 1
        for _ in range(times):
            if field.message_type is not None:  # type: ignore[attr-defined]
                if field.message_type.GetOptions().map_entry:  # type: ignore[attr-defined]
                    key, value = field.message_type.fields  # type: ignore[attr-defined]
                    getattr(made, name)[self._value(key)] = self._value(value)
                elif depth < 3:
                    part = self.message(field.message_type._concrete_class, depth + 1)  # type: ignore[attr-defined]
                    (getattr(made, name).append if repeated else getattr(made, name).CopyFrom)(part)
            elif repeated:
                getattr(made, name).append(self._value(field))
            else:
                setattr(made, name, self._value(field))

    def _value(self, field: object) -> object:
        kind = field.cpp_type  # type: ignore[attr-defined]
        if kind == field.CPPTYPE_STRING:  # type: ignore[attr-defined]
            text = self.one_of(TEXTS)
            return text.encode() if field.type == field.TYPE_BYTES else text  # type: ignore[attr-defined]
        if kind == field.CPPTYPE_BOOL:  # type: ignore[attr-defined]
            return bool(self.random.integers(2))
        if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):  # type: ignore[attr-defined]
            return 0.01
        return self.one_of(NUMBERS)

    def bytes_of(self, kind: object) -> bytes:
        """Random bytes, a message, or one of which bits were flipped, bytes cut out, or parts said again."""
        how = self.random.random()
        if how < 0.1:
            return self.random.bytes(int(self.random.integers(0, 200)))
        data = bytearray(self.message(kind).SerializeToString())  # type: ignore[attr-defined]
        if how < 0.5 or not data:
            return bytes(data)
        for _ in range(int(self.random.integers(1, 6))):
            at, to = sorted(int(i) for i in self.random.integers(0, len(data) + 1, 2))
            what = self.random.random()
            if what < 0.5 and at < len(data):
                data[at] ^= 1 << int(self.random.integers(8))
            elif what < 0.75:
                del data[at:to]
            else:
                data[at:at] = data[at:to] * 3
            if not data:
                break
        return bytes(data[:100_000])


def _memory_bytes(daemons: Daemons) -> int:
    pages = Path(f"/proc/{daemons.processes['n1'].pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _count(daemons: Daemons, what: str) -> int:
    return len(list(Path(f"/proc/{daemons.processes['n1'].pid}/{what}").iterdir()))


@contextlib.contextmanager
def _channels(daemons: Daemons, tls: Path | None) -> Iterator[dict[str, grpc.Channel]]:
    """By who calls."""
    address, data = f"127.0.0.1:{daemons.ports['n1']}", daemons.data("n1")
    with contextlib.ExitStack() as held:
        ways = {"owner": SocketPath(data / SOCKET_FILE)}
        if tls is None:
            ways["member"] = daemons.way_of_peers("n1")
        found = {}
        for who, way in ways.items():
            held.callback(way.close)
            found[who] = held.enter_context(channel_to(address, None, socket=way))
        if tls is None:
            found["nobody"] = held.enter_context(grpc.insecure_channel(address, OPTIONS))
        else:
            for who, name in (("reader", "analyst"), ("member", "n2")):
                found[who] = held.enter_context(channel_to(address, Certificates.of_directory(tls, name), "n1"))
        yield found


def _call(channel: grpc.Channel, method: str, sent: list[bytes]) -> None:
    """Whatever is answered, at least something is, or the call ends."""
    call = channel.stream_stream(f"/nosync.v1.{method}")(iter(sent), timeout=PATIENCE_S)
    code = None
    try:
        for n, _ in enumerate(call):
            if n >= 20:
                break
    except grpc.RpcError as error:
        code = error.code()
    call.cancel()
    assert code != grpc.StatusCode.DEADLINE_EXCEEDED or method in MAY_LAST, method


@pytest.mark.few(1, "make cluster")
@pytest.mark.timeout(0 if INPUTS > 100_000 else 600)
@pytest.mark.parametrize("is_secure", [False, True])
def test_whatever_is_sent_the_daemon_goes_on(tmp_path: Path, is_secure: bool) -> None:
    tls = tmp_path / "tls" if is_secure else None
    if tls is not None:
        make_certificates(tls, ["n1", "n2", "analyst"])
    inputs = Inputs(INPUTS + is_secure)
    extra = (f"--tls={tls}",) if tls else ()
    with running(tmp_path / "nodes", ("n1", "n2"), 1, extra, start=("n1",)) as daemons, daemons.open("n1") as store:
        publish(store, 0)
        store.sync()
        hello = pb.Hello(
            node="n2", incarnation="77", store_id=daemons.status("n1").store_id, replicas=1, version=PROTOCOL_VERSION
        )
        greeting = pb.Frame(hello=hello).SerializeToString()
        files = {path: path.read_bytes() for path in daemons.data("n1").rglob("*.layer")}
        memory_bytes = 0
        with _channels(daemons, tls) as channels:
            for n in range(INPUTS // 2):
                who = str(inputs.one_of(list(channels)))
                if inputs.random.random() < 0.3:
                    frames = [inputs.bytes_of(pb.Frame) for _ in range(int(inputs.random.integers(1, 5)))]
                    _call(
                        channels[who],
                        "Replication/Link",
                        [greeting, *frames] if inputs.random.random() < 0.7 else frames,
                    )
                else:
                    is_trusted = who == "owner" or (who == "member" and not is_secure)
                    method = str(inputs.one_of(HARMLESS_TO_OWNER if is_trusted else UNARY))
                    kind = pb.DESCRIPTOR.services_by_name["Daemon"].methods_by_name[method].input_type._concrete_class
                    if method == "Conflicts" and is_trusted:
                        continue
                    _call(channels[who], f"Daemon/{method}", [inputs.bytes_of(kind)])
                if n == INPUTS // 20:
                    memory_bytes = _memory_bytes(daemons)
        assert daemons.processes["n1"].poll() is None
        eventually("few descriptors are held", lambda: _count(daemons, "fd") < 300)
        assert _count(daemons, "task") < TCP_THREADS + 2 * SOCKET_THREADS + 100
        assert _memory_bytes(daemons) < memory_bytes + MOST_MEMORY_BYTES
        assert "Traceback" not in daemons.log("n1")
        for path, contents in files.items():
            assert path.read_bytes() == contents
        publish(store, 1)
        assert state(store, 1) == expected(1)
        eventually("it goes on", lambda: daemons.safe_point("n1") == 1)
