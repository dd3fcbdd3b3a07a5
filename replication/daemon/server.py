"""gRPC: the streams between nodes, and the service that jobs and commands use. With `calls.py` the only module that speaks gRPC.

Of two nodes the one whose id comes first dials. Keepalive pings notice a peer that is gone without a word; the
protocol's own beats notice one that is there and does nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2

from nosync.lsm.errors import NosyncError, ReplicationError, described
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env
from nosync.proto.v1 import replication_pb2 as pb
from nosync.proto.v1 import replication_pb2_grpc as rpc
from nosync.replication.daemon.replicator import Replicator, Session
from nosync.replication.protocol.inventory import NodeId
from nosync.replication.transport.calls import (
    MOST_CALLS,
    SOCKET_THREADS,
    TCP_THREADS,
    Caller,
    Gate,
    calls_of,
    first_of,
    health_of,
    identity_of,
)
from nosync.replication.transport.codec import MAX_FRAME_BYTES
from nosync.replication.transport.handshake import Finding, look
from nosync.replication.transport.revocation import LOOK_EVERY_S, Revocations
from nosync.replication.transport.sockets import SOCKET_FILE, Meeting, SocketPath, listen_at

log = logging.getLogger("nosync.replication")
# Bytes that are no frame end the stream; gRPC would log a stack trace for each.
logging.getLogger("grpc._common").setLevel(logging.CRITICAL)

REDIAL_S = 0.5
STOP_GRACE_S = 1.0
CALL_TIMEOUT_S = 5.0
PLACE_KEY = "nosync-place"
"""In the metadata of calls: whose directory is meant: a daemon that took another one's address refuses."""
MOST_READING, MOST_WORKING = 16, 24
"""Calls at once that read files, and that take long, of readers, members and the owner each; the others' threads are for who asks
briefly."""
TOLD_PATIENCE_S = 1.0
"""How long a client that closes waits for what it told to arrive."""

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # All three, or a peer whose host is gone is noticed after a minute. The protocol's beats notice it before these do, and on a
    # slow link a ping waits behind the files that were sent before it.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 20000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise two daemons share a port without a word.
    ("grpc.so_reuseport", 0),
    # A connection that says nothing, or on which nobody calls, would keep its descriptor.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Nodes reach each other directly: a proxy for the web, which the environment may name, is not for them.
    ("grpc.enable_http_proxy", 0),
]


_GIVE_YOURS = ": if it is a daemon with --tls, give yours: NOSYNC_TLS and NOSYNC_IDENTITY, or tls= and identity="
LOOK_S = 2.0
"""How often peers that no session comes about with are looked at, for why."""
_FLIGHTS = 3
"""Of messages each way, until both sides of a TLS connection have seen the other's certificate."""


@dataclass(frozen=True)
class Certificates:
    """Files of mutual TLS, as `nosync certs` makes them. The certificate's common name is the node's id."""

    ca: Path
    certificate: Path
    key: Path
    revocations: Revocations = field(compare=False)

    @classmethod
    def of_directory(cls, directory: Path, node: str) -> Certificates:
        """`ca.pem`, `<node>.pem` and `<node>.key`. Raises ReplicationError naming what is not there."""
        files = directory / "ca.pem", directory / f"{node}.pem", directory / f"{node}.key"
        found = cls(*files, Revocations(directory))
        for path in (found.ca, found.certificate, found.key):
            if not path.is_file():
                raise ReplicationError(f"{path} is not there: make certificates with nosync certs {directory} {node}")
            if not os.access(path, os.R_OK):
                raise ReplicationError(
                    f"{path} cannot be read by this user: who works beside the daemon of node {node} shows its certificate, so "
                    "let the group of both read it"
                )
        found._context(ssl.PROTOCOL_TLS_CLIENT)
        return found

    def check_as_peers_do(self, node: str) -> None:
        """Raises ReplicationError where peers would refuse this node: it shakes hands with itself."""
        client, server = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        dialled = server.wrap_bio(to_server, to_client, server_side=True)
        dialling = client.wrap_bio(to_client, to_server)
        again = f"make another one with nosync certs, for node {node}"
        self.revocations.check(self.certificate.read_bytes(), f"node {node}, {self.certificate},")
        try:
            for _ in range(_FLIGHTS):
                for side in (dialling, dialled):
                    with contextlib.suppress(ssl.SSLWantReadError):
                        side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise ReplicationError(
                f"{self.certificate}: peers would refuse it, with {self.ca}: {error.verify_message}. See to this machine's "
                f"clock, or {again}"
            ) from None
        found: Any = dialling.getpeercert()
        names = [value for part in found["subject"] for kind, value in part if kind == "commonName"]
        others = [value for kind, value in found.get("subjectAltName", ()) if kind == "DNS"]
        # Who is dialled goes by the common name; who dials, by the alternative names if there are any.
        if names[:1] != [node] or (others and node not in others):
            raise ReplicationError(
                f"{self.certificate} is of {', '.join(dict.fromkeys([*names, *others])) or 'nobody'}, and both its common name "
                f"and its alternative names, if it has any, have to say {node}: {again}"
            )

    def check_server(self, address: str) -> None:
        """Raises ReplicationError where the daemon at an address shows a revoked certificate: it shakes hands with it.

        gRPC tells who calls, and not who was called. Where nothing answers gRPC says so, too.
        """
        self.revocations.look()
        if not self.revocations.serials:
            return
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secure,
        ):
            found: Any = secure.getpeercert()
            self.revocations.check_serial(int(found["serialNumber"], 16), f"the daemon at {address}")

    def _context(self, protocol: int) -> ssl.SSLContext:
        """What gRPC makes of the files, which would only say that it cannot listen where they are no good."""
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ReplicationError(
                f"{self.ca}: holds no certificate of an authority ({error.reason or error})"
            ) from None
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise ReplicationError(
                f"{self.certificate} and {self.key} are not a certificate and its key ({error.reason or error}): put back the "
                "pair, or make a new one with nosync certs"
            ) from None
        return context

    def as_client(self) -> ssl.SSLContext:
        """For a handshake beside gRPC's. Raises ReplicationError as `of_directory` does."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())], self.ca.read_bytes(), require_client_auth=True
        )

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


def _context_of(certificates: Certificates | None) -> ssl.SSLContext | None:
    return None if certificates is None else certificates.as_client()


def host_of(address: str) -> str:
    """The host of HOST:PORT. Raises ReplicationError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not is_number(port) or int(port) > 65535:
        raise ReplicationError(f"address {address!r} is not HOST:PORT, with a port up to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ReplicationError(f"address {address!r}: write an IPv6 address as [{host}]:{port}")
    return host.strip("[]")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    host = host_of(address)
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_of_this_host(address: str) -> bool:
    """Whether an address is one of this machine's. Names are not looked up: who wrote one would hear of it."""
    try:
        host = host_of(address)
    except ReplicationError:
        return False
    if is_loopback(address):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host in (socket.gethostname(), socket.getfqdn())
    if ip.is_unspecified:
        return True
    try:
        with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def check_addresses(me: str, listen: str, peers: Iterable[str], *, is_secure: bool) -> None:
    """Raises ReplicationError for what is no HOST:PORT, and off loopback without certificates."""
    peers = list(peers)
    reached = [is_loopback(address) for address in (listen, *peers)]
    twice = next((address for i, address in enumerate(peers) if address in peers[:i]), None)
    if twice is not None:
        raise ReplicationError(
            f"two peers of node {me} are said to listen on {twice}: each node has an address of its own. To replace a node by "
            "another one in its place, give nosync peers --remove and --add in one call"
        )
    if listen in peers and not listen.endswith(":0"):
        raise ReplicationError(
            f"node {me} listens on {listen}, and a peer is said to: each node has an address of its own"
        )
    if not is_secure and not all(reached):
        raise ReplicationError(
            f"node {me} listens on {listen} with peers {', '.join(peers) or 'none'}: off loopback both sides need "
            "certificates: make them with nosync certs, and give --tls DIR"
        )


def channel_to(
    address: str, certificates: Certificates | None, node: str | None = None, socket: SocketPath | None = None
) -> grpc.Channel:
    """A channel to a daemon; with certificates to the daemon of that node and to no other, with a socket to who made that.

    Raises ReplicationError where its certificate is revoked.
    """
    if socket is not None:
        # gRPC shares the connections of channels with one target, and this one may have stood for another directory just now.
        return grpc.insecure_channel(socket.target, [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
    if certificates is None:
        return grpc.insecure_channel(address, OPTIONS)
    certificates.check_server(address)
    named = [("grpc.ssl_target_name_override", node)] if node else []
    return grpc.secure_channel(address, certificates.of_channel(), [*OPTIONS, *named])


@dataclass(frozen=True)
class Ways:
    """How a daemon reaches its peers: with certificates, or without TLS by sockets, which only daemons of this user make."""

    certificates: Certificates | None
    meeting: Meeting | None

    def socket_of(self, address: str) -> SocketPath | None:
        """None: peers are reached by TLS. Raises ReplicationError where others may have put sockets there."""
        if self.meeting is None:
            return None
        self.meeting.check()
        return SocketPath(self.meeting.socket_of(int(address.rpartition(":")[2])))

    @contextlib.contextmanager
    def channel(self, address: str, node: str) -> Iterator[grpc.Channel]:
        socket = self.socket_of(address)
        try:
            with channel_to(address, self.certificates, node, socket) as channel:
                yield channel
        finally:
            if socket is not None:
                socket.close()

    def client(self, address: str, node: str) -> DaemonClient:
        return DaemonClient(address, self.certificates, node, socket=self.socket_of(address))


def check_not_revoked(context: grpc.ServicerContext, certificates: Certificates | None) -> bytes | None:
    """The certificate of who calls; None without TLS. Raises ReplicationError where it is revoked."""
    found: Any = context.auth_context().get("x509_pem_cert")
    if certificates is None or not found:
        return None
    certificates.revocations.check(bytes(found[0]), repr(identity_of(context)))
    return bytes(found[0])


class _Linked:
    """The open links, so that those whose certificate is revoked can be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Session, bytes | None]] = {}

    @contextlib.contextmanager
    def __call__(self, session: Session, shown: bytes | None) -> Iterator[None]:
        """A link is open. `shown`: the certificate of the other side; None: this one dialled, and looks when it dials again."""
        with self._lock:
            self._open[session.id] = session, shown
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(session.id, None)

    def end_revoked(self, revocations: Revocations) -> None:
        """Ends links of the revoked, and all that this side dialled: they come about again unless the other side is."""
        with self._lock:
            found = list(self._open.values())
        for session, shown in found:
            try:
                if shown is not None:
                    revocations.check(shown, "a linked node")
                    continue
            except ReplicationError as error:
                log.warning("stream ended: %s", error)
            session.close()


class _Links:
    """The service of streams between nodes, of one server."""

    def __init__(self, replicator: Replicator, gate: Gate, linked: _Linked, *, is_local: bool) -> None:
        self._replicator, self._gate, self._linked, self._is_local = replicator, gate, linked, is_local

    def handlers(self) -> grpc.GenericRpcHandler:
        link = grpc.stream_stream_rpc_method_handler(self.link, pb.Frame.FromString, pb.Frame.SerializeToString)
        return grpc.method_handlers_generic_handler("nosync.v1.Replication", {"Link": link})

    def link(self, incoming: Iterator[pb.Frame], context: grpc.ServicerContext) -> Iterator[pb.Frame]:
        shown = self._gate.certificate_of(context)
        caller = Caller(identity_of(context), self._is_local)
        self._gate.enter_link(caller, context)
        incoming = first_of(incoming, self._gate, context)
        session = self._replicator.open_session(caller.identity)
        if not context.add_callback(session.close):
            session.close()  # it has ended already
        reader = threading.Thread(target=self._read, args=(session, incoming), daemon=True)
        reader.start()
        try:
            with self._linked(session, shown):
                yield from self._replicator.frames_of(session)
        finally:
            self._replicator.close_session(session)

    def _read(self, session: Session, incoming: Iterator[pb.Frame]) -> None:
        _read_all(self._replicator, session, incoming)
        session.close()


def _read_all(replicator: Replicator, session: Session, incoming: Iterator[pb.Frame]) -> None:
    """Hands on what comes until the stream ends. What no node would send ends it."""
    try:
        for frame in incoming:
            replicator.received(session, frame)
    except grpc.RpcError:
        pass  # the stream broke; whoever dialled dials again
    except ReplicationError as error:
        log.warning("stream ended: %s", error)
    except NosyncError as error:
        log.error("stream ended: %s", error)
    except Exception:
        if session.is_open:
            log.error("stream ended", exc_info=True)


def cancel_when_closed(session: Session, call: grpc.Call) -> None:
    """Waits for the end of a session, and ends the call that carries it."""
    session.closed.wait()
    call.cancel()


class Transport:
    """The servers of one daemon and its calls to others.

    Whoever gets through to `listen` may read; with TLS members open links there. What the owner of `data` may do is done through
    a socket in it. Without TLS peers of this user meet at sockets, too: on loopback nobody can tell who calls.
    """

    def __init__(
        self,
        replicator: Replicator,
        daemon: Any,
        me: NodeId,
        listen: str,
        peers: Mapping[NodeId, str],
        ways: Ways,
        data: Path,
        env: Env,
    ) -> None:
        """`daemon` has the methods of the service Daemon, and `role_of` a caller."""
        check_addresses(me, listen, peers.values(), is_secure=ways.certificates is not None)
        check_free(listen)
        self._replicator, self._me, self._peers, self._ways = replicator, me, dict(peers), ways
        self._closing = threading.Event()
        self._findings: dict[str, Finding | None] = {}
        self._linked = _Linked()
        self._gate = Gate(daemon.role_of, lambda context: check_not_revoked(context, ways.certificates))
        self._sockets: list[Path] = []
        self._health = health.HealthServicer()
        self._servers: list[grpc.Server] = []
        try:
            self.port = self._listen(daemon, listen)
            self.address = f"{listen.rpartition(':')[0]}:{self.port}"
            owner = self._server(SOCKET_THREADS, None, calls_of(daemon, self._gate, is_local=True))
            listen_at(data / SOCKET_FILE, env, owner.add_insecure_port)
            self._sockets.append(data / SOCKET_FILE)
            if ways.meeting is not None:
                links = _Links(replicator, self._gate, self._linked, is_local=True).handlers()
                meeting = self._server(SOCKET_THREADS, None, calls_of(daemon, self._gate, is_local=True), links)
                self._sockets.append(ways.meeting.listen_at(self.port, meeting.add_insecure_port))
        except BaseException:
            self.stop()
            raise

    def _listen(self, daemon: Any, listen: str) -> int:
        certificates = self._ways.certificates
        handlers = [
            calls_of(daemon, self._gate, is_local=False),
            health_of(lambda request, call: self._health.Check(request, call.context), self._gate),
        ]
        if certificates is not None:
            handlers.append(_Links(self._replicator, self._gate, self._linked, is_local=False).handlers())
        server = self._server(TCP_THREADS, MOST_CALLS, *handlers)
        try:
            if certificates is None:
                return int(server.add_insecure_port(listen))
            return int(server.add_secure_port(listen, certificates.of_server()))
        except RuntimeError as error:
            raise ReplicationError(f"cannot listen on {listen}: {error}") from None

    def _server(self, threads: int, most_calls: int | None, *handlers: grpc.GenericRpcHandler) -> grpc.Server:
        pool = futures.ThreadPoolExecutor(max_workers=threads)
        server = grpc.server(pool, handlers=list(handlers), options=OPTIONS, maximum_concurrent_rpcs=most_calls)
        self._servers.append(server)
        return server

    def start(self) -> None:
        for server in self._servers:
            server.start()
        if self._ways.certificates is not None:
            threading.Thread(target=self._watch_revoked, name="nosync-revoked", daemon=True).start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        for node in list(self._peers):
            self._begin_to_dial(node)
        threading.Thread(target=self._look_at_peers, name="nosync-look", daemon=True).start()

    def _look_at_peers(self) -> None:
        """Whoever dials: a server does not learn whose certificate gRPC refused."""
        while not self._closing.wait(LOOK_S):
            for node, address in list(self._peers.items()):
                found = None
                if not self._replicator.is_linked(node):
                    with contextlib.suppress(ReplicationError, OSError):  # certificates that are being replaced
                        found = look(address, _context_of(self._ways.certificates), node)
                self._findings[node] = found

    def finding(self, node: str) -> Finding | None:
        """Why no session comes about with a peer, as far as that can be seen from here."""
        return self._findings.get(node)

    def _watch_revoked(self) -> None:
        assert self._ways.certificates is not None, "it is started with them"
        revocations = self._ways.certificates.revocations
        while not self._closing.wait(LOOK_EVERY_S):
            if revocations.look():
                self._linked.end_revoked(revocations)

    def stop(self) -> None:
        self._closing.set()
        self._health.enter_graceful_shutdown()
        for path in self._sockets:
            with contextlib.suppress(OSError):
                path.unlink()
        for stopped in [server.stop(STOP_GRACE_S) for server in self._servers]:
            stopped.wait()
        self._gate.stop()

    def add_peer(self, node: NodeId, address: str) -> None:
        """From now on there is such a node. Raises ReplicationError off loopback without certificates."""
        if self._ways.certificates is None and not is_loopback(address):
            raise ReplicationError(
                f"node {node} at {address} is off loopback: both sides need certificates (nosync certs)"
            )
        if self._peers.get(node) == address:
            return
        self._peers[node] = address  # who dialled another address of it stops
        self._begin_to_dial(node)

    def remove_peer(self, node: NodeId) -> None:
        """There is no such node any more."""
        self._peers.pop(node, None)

    def _begin_to_dial(self, node: NodeId) -> None:
        if self._me < node:
            address = self._peers[node]
            threading.Thread(target=self._dial, args=(node, address), name=f"nosync-dial-{node}", daemon=True).start()

    def _dial(self, node: NodeId, address: str) -> None:
        while not self._closing.is_set() and self._peers.get(node) == address:
            if not self._replicator.is_linked(node):
                try:
                    with self._ways.channel(address, node) as channel:
                        self._link(channel, node)
                except Exception as error:  # noqa: BLE001 - certificates that are being replaced, say; only this side dials
                    log.error("cannot dial node %s at %s, which is tried again: %s", node, address, described(error))
            self._closing.wait(REDIAL_S)

    def _link(self, channel: grpc.Channel, node: NodeId) -> None:
        session = self._replicator.open_session(node if self._ways.certificates is not None else None)
        try:
            incoming = rpc.ReplicationStub(channel).Link(self._replicator.frames_of(session), wait_for_ready=False)
            watch = threading.Thread(target=cancel_when_closed, args=(session, incoming), daemon=True)
            watch.start()
            with self._linked(session, None):
                _read_all(self._replicator, session, incoming)
        finally:
            self._replicator.close_session(session)


class Listed(NamedTuple):
    """What a daemon says of a file."""

    written_ns: int
    """When it was written; zero: not known."""
    digest: str
    """Of what is durable there; empty: not known."""


class DaemonClient:
    """Calls to the daemon of a data directory. Raises ReplicationError where it does not answer."""

    def __init__(
        self,
        address: str,
        certificates: Certificates | None = None,
        node: str | None = None,
        place: str | None = None,
        socket: SocketPath | None = None,
    ) -> None:
        """`place`: the token of the directory whose daemon is meant; another one at the address refuses. `socket`: calls go
        there, and `address` is what messages say; it is closed with the client.
        """
        self.address, self.node = address, node or ""
        self._certificates, self._socket = certificates, socket
        self._asked = [(PLACE_KEY, place)] if place else []
        self._channel = channel_to(address, certificates, node, socket)
        self._stub = rpc.DaemonStub(self._channel)
        self._told: set[grpc.Future[pb.Done]] = set()  # gRPC cancels a call that nobody refers to any more

    def status(self, branch: str = "", *, lag: bool = True, timeout_s: float = CALL_TIMEOUT_S) -> pb.StatusReply:
        """Node, safe point, problems, peers; and how far these are behind, which takes longer."""
        with self._errors("status"):
            request = pb.StatusRequest(branch=branch, lag=lag)
            reply: pb.StatusReply = self._stub.Status(request, timeout=timeout_s, metadata=self._asked)
        return reply

    def attach(self, patience_s: float) -> pb.AttachReply:
        """A job is to run beside the daemon: waits until everything that peers have is here."""
        with self._errors("attach"):
            reply: pb.AttachReply = self._stub.Attach(
                pb.AttachRequest(patience_s=patience_s), timeout=patience_s + CALL_TIMEOUT_S, metadata=self._asked
            )
        return reply

    def keep(self, traces: list[str]) -> bool:
        """Asks that what peers have of these traces is fetched. Returns whether they have, or may have, what is not here."""
        with self._errors("keep"):
            request = pb.KeepRequest(traces=traces)
            return bool(self._stub.Keep(request, timeout=CALL_TIMEOUT_S, metadata=self._asked).peers)

    def note(self, layers: list[str]) -> None:
        """Tells of published layers; not waited for, because the daemon finds them anyway."""
        call = self._stub.Note.future(pb.NoteRequest(layers=layers), timeout=CALL_TIMEOUT_S, metadata=self._asked)
        self._told.add(call)
        call.add_done_callback(self._told.discard)

    def sync(self, timeout_s: float = 600.0) -> None:
        with self._errors("sync"):
            self._stub.Sync(pb.SyncRequest(), timeout=timeout_s, metadata=self._asked)

    def check(self, timeout_s: float = 3600.0) -> list[str]:
        with self._errors("check"):
            return list(self._stub.Check(pb.CheckRequest(), timeout=timeout_s, metadata=self._asked).errors)

    def compact(self, stage: str = "", timeout_s: float = 3600.0) -> Iterator[int]:
        with self._errors("compact"):
            for progress in self._stub.Compact(pb.CompactRequest(stage=stage), timeout=timeout_s, metadata=self._asked):
                yield int(progress.merges)

    def fetch_rounds(self, traces: Sequence[str], t: int) -> None:
        """Returns when what other hosts recorded of an epoch's rounds in these traces is here."""
        with self._errors("fetch the rounds of a loop"):
            self._stub.FetchRounds(pb.FetchRoundsRequest(traces=traces, t=t), timeout=60.0, metadata=self._asked)

    def drop_rounds(self, stage: str, t: int, *, everywhere: bool = False, at_once: bool = False) -> None:
        """`everywhere`: on the daemon's peers, too. `at_once`: without a grace period, for the rounds run again."""
        with self._errors("drop the rounds of a loop"):
            self._stub.DropRounds(
                pb.DropRoundsRequest(stage=stage, t=t, everywhere=everywhere, at_once=at_once),
                timeout=CALL_TIMEOUT_S,
                metadata=self._asked,
            )

    def conflicts(self, *, take_theirs: bool = False) -> list[str]:
        """The files of which peers hold other contents. `take_theirs`: those count, and ours were given up."""
        with self._errors("conflicts"):
            return list(
                self._stub.Conflicts(
                    pb.ConflictsRequest(take_theirs=take_theirs), timeout=60.0, metadata=self._asked
                ).names
            )

    def list_files(self, directory: str, timeout_s: float = 60.0) -> dict[str, Listed]:
        """The names in a directory of the daemon's, and what it says of the file of each."""
        with self._errors("list"):
            replies = self._stub.ListFiles(
                pb.ListFilesRequest(directory=directory), timeout=timeout_s, metadata=self._asked
            )
            found: dict[str, Listed] = {}
            for reply in replies:  # a daemon of an earlier version says less
                times, digests = reply.written_ns or itertools.repeat(0), reply.digests or itertools.repeat("")
                found.update(zip(reply.names, map(Listed, times, digests), strict=False))
            return found

    def fetch_files(self, names: Sequence[str], timeout_s: float = 3600.0) -> Iterator[pb.Frame]:
        """The contents of files, as they go between nodes."""
        with self._errors("fetch"):
            yield from self._stub.FetchFiles(pb.FetchFilesRequest(names=names), timeout=timeout_s, metadata=self._asked)

    def layers(self) -> list[pb.Layer]:
        with self._errors("list layers"):
            return list(self._stub.Layers(pb.LayersRequest(), timeout=600.0, metadata=self._asked))

    def change_members(self, add: Mapping[str, str], remove: Sequence[str]) -> None:
        with self._errors("change members"):
            self._stub.ChangeMembers(
                pb.ChangeMembersRequest(add=add, remove=remove), timeout=CALL_TIMEOUT_S, metadata=self._asked
            )

    def change_branches(self, change: pb.ChangeBranchesRequest) -> int:
        with self._errors("change branches"):
            return int(self._stub.ChangeBranches(change, timeout=60.0, metadata=self._asked).layers_dropped)

    def close(self) -> None:
        end_s = time.monotonic() + TOLD_PATIENCE_S
        for call in list(self._told):
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                call.result(timeout=max(0.0, end_s - time.monotonic()))
        self._channel.close()
        if self._socket is not None:
            self._socket.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except ValueError:  # what gRPC raises for a channel that was closed
            raise ReplicationError(f"the connection to the daemon at {self.address} is closed") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise ReplicationError(str(details)) from None
            is_silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if is_silent and self._socket is None:
                found = look(self.address, _context_of(self._certificates), self.node)
                if found is not None:
                    advice = "" if self._certificates is not None or not found.is_refusal else _GIVE_YOURS
                    raise ReplicationError(
                        f"something takes connections at {self.address}, and {found.text} ({what}){advice}"
                    ) from None
            raise ReplicationError(
                f"the daemon at {self.address} does not answer ({what}: {code.name.lower()}): start it again with "
                "nosync daemon; what jobs publish meanwhile is kept"
            ) from None


def check_free(listen: str) -> None:
    """gRPC would print a line of its own, and tell no reason. Raises ReplicationError."""
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        refused: list[OSError] = []
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:  # a name may stand for an address that this machine has not, such as that of IPv6
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refused.append(error)
        if found and len(refused) == len(found):
            raise refused[0]
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "another program has this port, a daemon that still runs perhaps: stop it, or --listen on another",
            errno.EACCES: "ports below 1024 are for root: --listen on a higher one",
            errno.EADDRNOTAVAIL: "no interface of this machine has that address: --listen on one that has, or 0.0.0.0 for all",
        }.get(error.errno or 0, "give --listen an address of this machine")
        raise ReplicationError(
            f"cannot listen on {listen}: {(error.strerror or str(error)).lower()}; {advice}"
        ) from None
