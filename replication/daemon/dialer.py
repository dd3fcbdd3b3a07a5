"""Links to peers that this node begins. Of two nodes the one whose id comes first dials.

Keepalive pings notice a peer that is gone without a word; the protocol's own heartbeats notice one that is there and
does nothing.
"""

from __future__ import annotations

import logging
import threading
import time

import grpc

from nosync.lsm.errors import described
from nosync.proto.v1 import replication_pb2_grpc as rpc
from nosync.replication.daemon.links import OpenLinks, cancel_when_closed, read_all
from nosync.replication.daemon.members import Members
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.shared_replica import LOG_AGAIN_S
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.client import Ways

log = logging.getLogger("nosync.replication")

REDIAL_S = 0.5


class Dialer:
    """Dials the members of one node's store, again and again, while there is no session with them."""

    def __init__(self, replicator: Replicator, me: NodeId, members: Members, ways: Ways, links: OpenLinks) -> None:
        self._replicator, self._me, self._members, self._ways, self._links = replicator, me, members, ways, links
        self._dialled: dict[NodeId, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def stop(self) -> None:
        """Links end with their sessions."""
        self._closing.set()

    def dial_members(self) -> None:
        """Begins to dial the members that are not dialled at their address. Who dials another one by then stops."""
        with self._lock:
            peers = {NodeId(node): address for node, address in self._members.peers.items() if self._me < node}
            new = {node: address for node, address in peers.items() if self._dialled.get(node) != address}
            self._dialled = peers
        for node, address in new.items():
            threading.Thread(target=self._dial, args=(node, address), name=f"nosync-dial-{node}", daemon=True).start()

    def _dial(self, node: NodeId, address: str) -> None:
        logged_s = float("-inf")
        while not self._closing.is_set() and self._dialled.get(node) == address:
            if not self._replicator.is_linked(node):
                try:
                    with self._ways.channel(address, node) as channel:
                        self._link(channel, node)
                except Exception as error:  # noqa: BLE001 - certificates that are being replaced, say
                    if time.monotonic() - logged_s >= LOG_AGAIN_S:
                        logged_s = time.monotonic()
                        log.error(
                            "cannot dial node %s at %s, which is tried again: %s", node, address, described(error)
                        )
            self._closing.wait(REDIAL_S)

    def _link(self, channel: grpc.Channel, node: NodeId) -> None:
        session = self._replicator.open_session(node if self._ways.certificates is not None else None)
        try:
            incoming = rpc.ReplicationStub(channel).Link(self._replicator.frames_of(session), wait_for_ready=False)
            watch = threading.Thread(target=cancel_when_closed, args=(session, incoming), daemon=True)
            watch.start()
            with self._links(session, None):
                read_all(self._replicator, session, incoming)
        finally:
            self._replicator.close_session(session)
