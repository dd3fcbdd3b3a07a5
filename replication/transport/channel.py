"""Channels of gRPC between daemons, and to them: how they are tuned, and the certificates of mutual TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from nosync.lsm.errors import ReplicationError
from nosync.replication.transport.codec import MAX_FRAME_BYTES
from nosync.replication.transport.revocation import Revocations
from nosync.replication.transport.sockets import SocketPath

CALL_TIMEOUT_S = 5.0
PLACE_KEY = "nosync-place"
"""In the metadata of calls: whose directory is meant: a daemon that took another one's address refuses."""
_FLIGHTS = 3
"""Of messages each way, until both sides of a TLS connection have seen the other's certificate."""

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # All three, or a peer whose host is gone is noticed after a minute. The protocol's heartbeats notice it before
    # these do, and on a slow link a ping waits behind the files that were sent before it.
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
                    f"{path} cannot be read by this user: who works beside the daemon of node {node} shows its "
                    "certificate, so let the group of both read it"
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
                f"{self.certificate}: peers would refuse it, with {self.ca}: {error.verify_message}. See to this "
                f"machine's clock, or {again}"
            ) from None
        found: Any = dialling.getpeercert()
        names = [value for part in found["subject"] for kind, value in part if kind == "commonName"]
        others = [value for kind, value in found.get("subjectAltName", ()) if kind == "DNS"]
        # Who is dialled goes by the common name; who dials, by the alternative names if there are any.
        if names[:1] != [node] or (others and node not in others):
            raise ReplicationError(
                f"{self.certificate} is of {', '.join(dict.fromkeys([*names, *others])) or 'nobody'}, and both its "
                f"common name and its alternative names, if it has any, have to say {node}: {again}"
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
        try:
            plain = socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_TIMEOUT_S)
        except (OSError, ValueError):
            return
        try:
            with plain, context.wrap_socket(plain) as secure:
                found: Any = secure.getpeercert()
                serial = int(found["serialNumber"], 16)
        except (OSError, ValueError) as error:  # who does not show it may have a reason
            raise ReplicationError(
                f"the daemon at {address} did not show its certificate, and {len(self.revocations.serials)} are revoked: {error}"
            ) from error
        self.revocations.check_serial(serial, f"the daemon at {address}")

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Returns what gRPC makes of the files, which would only say that it cannot listen where they are no good."""
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
                f"{self.certificate} and {self.key} are not a certificate and its key ({error.reason or error}): put "
                "back the pair, or make a new one with nosync certs"
            ) from None
        return context

    def as_client(self) -> ssl.SSLContext:
        """Returns what a handshake beside gRPC's needs. Raises ReplicationError as `of_directory` does."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())], self.ca.read_bytes(), require_client_auth=True
        )

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


def context_of(certificates: Certificates | None) -> ssl.SSLContext | None:
    return None if certificates is None else certificates.as_client()


def channel_to(
    address: str, certificates: Certificates | None, node: str | None = None, socket: SocketPath | None = None
) -> grpc.Channel:
    """Returns a channel to a daemon; with certificates to the daemon of that node and to no other, with a socket to who
    made that.

    Raises ReplicationError where its certificate is revoked.
    """
    if socket is not None:
        # gRPC shares the connections of channels with one target, which may just have stood for another directory.
        return grpc.insecure_channel(socket.target, [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
    if certificates is None:
        return grpc.insecure_channel(address, OPTIONS)
    certificates.check_server(address)
    named = [("grpc.ssl_target_name_override", node)] if node else []
    return grpc.secure_channel(address, certificates.of_channel(), [*OPTIONS, *named])
