"""The servers of a daemon: the streams between nodes, and the service that jobs and commands use.

Of two nodes the one whose id comes first dials. Keepalive pings notice a peer that is gone without a word; the
protocol's own beats notice one that is there and does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from nosync.lsm.errors import NosyncError, ReplicationError, described
from nosync.lsm.platform.env import Env
from nosync.proto.v1 import replication_pb2 as pb
from nosync.proto.v1 import replication_pb2_grpc as rpc
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.session import Session
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.addresses import check_addresses, check_free, is_loopback
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
from nosync.replication.transport.channel import OPTIONS, Certificates, context_of
from nosync.replication.transport.client import Ways
from nosync.replication.transport.handshake import Finding, look
from nosync.replication.transport.revocation import LOOK_EVERY_S, Revocations
from nosync.replication.transport.sockets import SOCKET_FILE, listen_at

log = logging.getLogger("nosync.replication")
# Bytes that are no frame end the stream; gRPC would log a stack trace for each.
logging.getLogger("grpc._common").setLevel(logging.CRITICAL)

REDIAL_S = 0.5
STOP_GRACE_S = 1.0
MOST_READING, MOST_WORKING = 16, 24
"""Calls at once that read files, and that take long, of readers, members and the owner each; the others' threads are for who asks
briefly."""
LOOK_S = 2.0
"""How often peers that no session comes about with are looked at, for why."""


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
                        found = look(address, context_of(self._ways.certificates), node)
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
