"""Two nodes of the replication protocol, and what they hold."""

from __future__ import annotations

from collections import deque

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    Close,
    Effect,
    Message,
    Send,
    SessionId,
)
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica

N1, N2 = NodeId("n1"), NodeId("n2")


SESSION = SessionId(0)


def held(t: int, digest: str = "d", stage: str = "s", size_bytes: int = 1) -> FileVersion:
    return FileVersion(
        FileName.of_layer(LayerId(TraceId(stage, "f", Shard(0)), Description.of_epoch(t))), f"{digest}{t}", size_bytes
    )


def manifest(t: int, last: int | None = None) -> FileVersion:
    """Of an epoch; or an archive up to another one."""
    name = f"manifests/main/{t}.json" if last is None else f"manifests/main/{t}-{last}.json"
    return FileVersion(FileName(name), f"m{t}", 1)


class Pair:
    """Two nodes with one session. Every message arrives at once, and every file that was asked for."""

    def __init__(self) -> None:
        self.nodes = {n: Replica(n, f"life-of-{n}", "store", (N1, N2), replicas=2) for n in (N1, N2)}
        self.closed: list[str] = []
        self.sent: list[Message] = []
        self.now_s = 0.0
        self.connect()

    def connect(self) -> None:
        self._deliver([(node, hello) for node in (N1, N2) for hello in self.nodes[node].connected(SESSION)])

    def deliver(self, sender: NodeId, effects: list[Effect]) -> None:
        self._deliver([(sender, effect) for effect in effects])

    def _deliver(self, sent: list[tuple[NodeId, Effect]]) -> None:
        """In the order in which they were sent, until all is quiet."""
        waiting = deque(sent)
        while waiting:
            sender, effect = waiting.popleft()
            receiver = N2 if sender == N1 else N1
            if isinstance(effect, Send):
                self.sent.append(effect.message)
                answers = self.nodes[receiver].received(effect.session, effect.message)
            elif isinstance(effect, Close):
                self.closed.append(effect.reason)
                continue
            else:
                taken = [w.held for w in effect.files if self.nodes[receiver].planner.accepts(effect.session, w.held)]
                answers = self.nodes[receiver].holds(taken)
            waiting.extend((receiver, answer) for answer in answers)

    def holds(self, node: NodeId, *added: FileVersion, gone: tuple[str, ...] = ()) -> None:
        self.deliver(node, self.nodes[node].holds(added, gone))

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.2
            for node in (N1, N2):
                self.deliver(node, self.nodes[node].tick(self.now_s))

    def drop(self, node: NodeId, *names: str) -> None:
        """A branch was deleted."""
        self.nodes[node].unwanted(names)
        self.holds(node, gone=names)

    def has(self, node: NodeId) -> list[FileVersion]:
        return list(self.nodes[node].mine)
