"""Why no session comes about with a peer, as far as that can be seen from here."""

from __future__ import annotations

import contextlib
import threading

from nosync.lsm.errors import ReplicationError
from nosync.replication.daemon.members import Members
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.channel import context_of
from nosync.replication.transport.client import Ways
from nosync.replication.transport.handshake import Finding, look

LOOK_S = 2.0
"""How often peers that no session comes about with are looked at, for why."""


class PeerFindings:
    """Looks at the peers, whoever dials: a server does not learn whose certificate gRPC refused."""

    def __init__(self, replicator: Replicator, members: Members, ways: Ways) -> None:
        self._replicator, self._members, self._ways = replicator, members, ways
        self._found: dict[str, Finding | None] = {}
        self._closing = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="nosync-look", daemon=True).start()

    def stop(self) -> None:
        self._closing.set()

    def of(self, node: str) -> Finding | None:
        """Returns what was found of a peer when it was looked at last."""
        return self._found.get(node)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            for node, address in self._members.peers.items():
                found = None
                if not self._replicator.is_linked(NodeId(node)):
                    with contextlib.suppress(ReplicationError, OSError):  # certificates that are being replaced
                        found = look(address, context_of(self._ways.certificates), node)
                self._found[node] = found
