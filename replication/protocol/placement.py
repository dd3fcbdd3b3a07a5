"""Which of the nodes that are up keep a trace, each trace ranked once. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NewType

from blake3 import blake3

NodeId = NewType("NodeId", str)


def replica_set(trace: str, members: Iterable[NodeId], replicas: int) -> list[NodeId]:
    """The nodes that keep a trace: rendezvous hashing, so that a member more or less moves as little as possible.

    (Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.)
    """
    return sorted(members, key=lambda node: rank(node, trace), reverse=True)[:replicas]


@functools.lru_cache(maxsize=1 << 14)
def rank(node: NodeId, trace: str) -> bytes:
    """The higher, the earlier a node is one of those that keep a trace."""
    return blake3(f"{node}\0{trace}".encode()).digest()


class Placement:
    """The nodes that are up, `me` always, and which of them keep a trace: while one is away the next one stands in for
    it.

    What is asked again and again is whether this node keeps a trace. So how many nodes rank before it is counted once
    for each, and a node that comes or goes is ranked against this one alone: the other nodes are not looked at.
    """

    def __init__(self, me: NodeId, replicas: int) -> None:
        self._me, self._replicas = me, replicas
        self._others: set[NodeId] = set()  # that are up
        self._before_me: dict[str, int] = {}
        self._replica_sets: dict[str, frozenset[NodeId]] = {}

    def is_up(self, node: NodeId) -> bool:
        return node == self._me or node in self._others

    def __contains__(self, trace: str) -> bool:
        """Whether a trace was ranked."""
        return trace in self._before_me or trace in self._replica_sets

    def is_mine(self, trace: str) -> bool:
        """Whether this node is one of those that keep a trace."""
        before = self._before_me.get(trace)
        if before is None:
            mine = rank(self._me, trace)
            before = self._before_me[trace] = sum(rank(node, trace) > mine for node in self._others)
        return before < self._replicas

    def replica_set(self, trace: str) -> frozenset[NodeId]:
        """Those that keep a trace."""
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
