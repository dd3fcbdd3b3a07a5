"""The servers of a daemon: who may come in by which of its addresses, and what is served there."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from nosync.lsm.errors import ReplicationError
from nosync.lsm.platform.env import Env
from nosync.replication.daemon.links import LinkService, OpenLinks
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.service import Service
from nosync.replication.transport.addresses import check_free
from nosync.replication.transport.calls import (
    MOST_CALLS,
    SOCKET_THREADS,
    TCP_THREADS,
    Caller,
    Gate,
    calls_of,
    health_of,
    identity_of,
)
from nosync.replication.transport.channel import OPTIONS, Certificates
from nosync.replication.transport.client import Ways
from nosync.replication.transport.revocation import LOOK_EVERY_S
from nosync.replication.transport.sockets import SOCKET_FILE, listen_at

log = logging.getLogger("nosync.replication")

STOP_GRACE_S = 1.0


def check_not_revoked(context: grpc.ServicerContext, certificates: Certificates | None) -> bytes | None:
    """Returns the certificate of who calls; None without TLS. Raises ReplicationError where it is revoked."""
    found: Any = context.auth_context().get("x509_pem_cert")
    if certificates is None or not found:
        return None
    certificates.revocations.check(bytes(found[0]), repr(identity_of(context)))
    return bytes(found[0])


class Servers:
    """The servers of one daemon.

    Whoever gets through to `listen` may read; with TLS members open links there. What the owner of `data` may do is
    done through a socket in it. Without TLS peers of this user meet at sockets, too: on loopback nobody can tell who
    calls.
    """

    def __init__(
        self,
        service: Service,
        role_of: Callable[[Caller], str],
        replicator: Replicator,
        links: OpenLinks,
        listen: str,
        ways: Ways,
        data: Path,
        env: Env,
    ) -> None:
        """`role_of`: what a caller is to this node."""
        check_free(listen)
        self._replicator, self._links, self._ways = replicator, links, ways
        self._closing = threading.Event()
        self._gate = Gate(role_of, lambda context: check_not_revoked(context, ways.certificates))
        self._sockets: list[Path] = []
        self._health = health.HealthServicer()
        self._servers: list[grpc.Server] = []
        try:
            self.port = self._listen(service, listen)
            self.address = f"{listen.rpartition(':')[0]}:{self.port}"
            owner = self._server(SOCKET_THREADS, None, calls_of(service, self._gate, is_local=True))
            listen_at(data / SOCKET_FILE, env, owner.add_insecure_port)
            self._sockets.append(data / SOCKET_FILE)
            if ways.meeting is not None:
                local = LinkService(replicator, self._gate, links, is_local=True).handlers()
                meeting = self._server(SOCKET_THREADS, None, calls_of(service, self._gate, is_local=True), local)
                self._sockets.append(ways.meeting.listen_at(self.port, meeting.add_insecure_port))
        except BaseException:
            self.stop()
            raise

    def _listen(self, service: Service, listen: str) -> int:
        certificates = self._ways.certificates
        handlers = [
            calls_of(service, self._gate, is_local=False),
            health_of(lambda request, call: self._health.Check(request, call.context), self._gate),
        ]
        if certificates is not None:
            handlers.append(LinkService(self._replicator, self._gate, self._links, is_local=False).handlers())
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

    def _watch_revoked(self) -> None:
        assert self._ways.certificates is not None, "it is started with them"
        revocations = self._ways.certificates.revocations
        seen = revocations.additions
        while not self._closing.wait(LOOK_EVERY_S):
            revocations.look()  # whoever dials looks as well
            if revocations.additions != seen:
                seen = revocations.additions
                self._links.end_revoked(revocations)

    def stop(self) -> None:
        self._closing.set()
        self._health.enter_graceful_shutdown()
        for path in self._sockets:
            with contextlib.suppress(OSError):
                path.unlink()
        for stopped in [server.stop(STOP_GRACE_S) for server in self._servers]:
            stopped.wait()
        self._gate.stop()
