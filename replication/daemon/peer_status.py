"""How peers are, for whoever asks a daemon."""

from __future__ import annotations

from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.peer import Peer

NEVER_HEARD = "was never heard"
NEVER_HEARD_S = 10.0
"""So long after the start a peer is said never to have been heard."""
_TWIN_S = 30.0
"""So long another daemon of the same name is told of: it dials every few seconds."""


def peer_status(peer: Peer, now_s: float, files: int, size: int, *, was_time: bool) -> pb.PeerStatus:
    """Returns how a peer is. `files`, `size`: how far it is behind. `was_time`: this node was there long enough to be
    found.
    """
    why = peer.refused
    if not why and now_s - peer.twin_s < _TWIN_S:
        why = peer.twin
    if not why and peer.session is None and peer.heard_s == float("-inf") and was_time:
        why = f"{NEVER_HEARD}: its daemon is away, or names no such peer as this node (there nosync peers DIR --add)"
    if peer.session is not None:
        state = "up" if peer.is_up(now_s) else "suspect"
    else:
        state = "refused" if peer.refused else "silent" if peer.fell_silent else "away"
    silent_s = now_s - peer.heard_s if peer.heard_s > float("-inf") else -1.0
    return pb.PeerStatus(
        node=peer.node,
        state=state,
        incarnation=peer.incarnation or "",
        behind_files=files,
        behind_bytes=size,
        silent_s=silent_s,
        why=why,
    )
