"""Which nodes keep a trace, each trace ranked once, and what this node keeps for other reasons. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import NewType

from blake3 import blake3

from nosync.lsm.model.timestamp import Time
from nosync.replication.protocol.file_names import FileName

NodeId = NewType("NodeId", str)


def replica_set(trace: str, members: Iterable[NodeId], replicas: int) -> list[NodeId]:
    """Returns the nodes that keep a trace: rendezvous hashing, so that a member more or less moves as little as
    possible.

    (Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.)
    """
    return sorted(members, key=lambda node: rank(node, trace), reverse=True)[:replicas]


@functools.lru_cache(maxsize=1 << 14)
def rank(node: NodeId, trace: str) -> bytes:
    """Returns a rank: the higher it is, the earlier a node is one of those that keep a trace."""
    return blake3(f"{node}\0{trace}".encode()).digest()


class Placement:
    """The nodes that are up, `me` always, and which of them keep a trace: while one is away the next one stands in for
    it. The files of a kept checkpoint are placed together, as the layers of a trace are.

    Beside these this node keeps the traces that a task here asked for, and not the inputs that it has released.

    What is asked again and again is whether this node keeps a trace. So how many nodes rank before it is counted once
    for each, and a node that comes or goes is ranked against this one alone: the other nodes are not looked at.
    """

    def __init__(self, me: NodeId, replicas: int) -> None:
        self._me, self._replicas = me, replicas
        self._others: set[NodeId] = set()  # that are up
        self._before_me: dict[str, int] = {}
        self._replica_sets: dict[str, frozenset[NodeId]] = {}
        self.keep_all = False
        """This node keeps what others keep as well."""
        self.kept_until_s: dict[str, float] = {}
        """The traces that tasks here asked for, and until when they are kept."""
        self.released_until: dict[str, Time] = {}
        """By trace of inputs, the time up to which its layers are not kept here any more, unless a task asks for them.
        """
        self.released_since: dict[str, Time] = {}
        """The time before which they are kept all the same: the source was declared otherwise then."""

    def is_up(self, node: NodeId) -> bool:
        return node == self._me or node in self._others

    def __contains__(self, trace: str) -> bool:
        """Returns whether a trace was ranked."""
        return trace in self._before_me or trace in self._replica_sets

    def is_replica(self, name: FileName) -> bool:
        """Returns whether this node is one of those that keep a file."""
        if name.placed is None:
            return True
        if name.layer is None:  # a checkpoint is not what a job reads, so it is kept where it is placed, or asked for
            return name.placed in self.kept_until_s or self.is_mine(name.placed)
        description, since = name.layer.description, self.released_since.get(name.place, 0)
        is_released = since <= description.lower and description.upper <= self.released_until.get(name.place, 0)
        return self.keeps_trace(name.place) and (not is_released or name.place in self.kept_until_s)

    def keeps_trace(self, trace: str) -> bool:
        """Returns whether this node keeps the layers of a trace that were not released."""
        return self.keep_all or trace in self.kept_until_s or self.is_mine(trace)

    def keep(self, traces: Iterable[str], until_s: float) -> Collection[str]:
        """A task asks for these traces. Returns those that no task has asked for lately."""
        asked = dict.fromkeys(traces, until_s)
        new = asked.keys() - self.kept_until_s.keys()
        self.kept_until_s |= asked
        return new

    def keep_no_longer(self, now_s: float) -> Collection[str]:
        """Traces are not kept for tasks any more that none has asked for since. Returns these."""
        over = [trace for trace, until_s in self.kept_until_s.items() if until_s <= now_s]
        for trace in over:
            del self.kept_until_s[trace]
        return over

    def release(self, trace: str, since: Time, until: Time) -> None:
        """Layers of this trace that lie between two times are not kept any more."""
        self.released_since[trace] = since
        self.released_until[trace] = max(until, self.released_until.get(trace, until))

    def take_back_release(self, after: Time) -> Collection[str]:
        """Inputs are needed again that end after a time. Returns the traces of which more is kept than before."""
        more = [trace for trace, until in self.released_until.items() if until > after]
        self.released_until = {trace: min(until, after) for trace, until in self.released_until.items()}
        return more

    def is_mine(self, trace: str) -> bool:
        """Returns whether this node is one of those that keep a trace."""
        before = self._before_me.get(trace)
        if before is None:
            mine = rank(self._me, trace)
            before = self._before_me[trace] = sum(rank(node, trace) > mine for node in self._others)
        return before < self._replicas

    def replica_set(self, trace: str) -> frozenset[NodeId]:
        """Returns the nodes that keep a trace."""
        found = self._replica_sets.get(trace)
        if found is None:
            found = self._replica_sets[trace] = frozenset(replica_set(trace, [self._me, *self._others], self._replicas))
        return found

    def changed(self, node: NodeId, *, is_up: bool) -> list[str]:
        """Another node is up, or is not. Returns the traces of which this node keeps others than before."""
        if is_up == (node in self._others):
            return []
        (self._others.add if is_up else self._others.remove)(node)
        self._replica_sets.clear()
        step, found = 1 if is_up else -1, []
        for trace, before in self._before_me.items():
            if rank(node, trace) > rank(self._me, trace):
                self._before_me[trace] = before + step
                if min(before, before + step) == self._replicas - 1:
                    found.append(trace)
        return found

    def forget(self, trace: str) -> None:
        """Nobody holds anything of this trace any more."""
        self._before_me.pop(trace, None)
        self._replica_sets.pop(trace, None)
