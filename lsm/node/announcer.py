"""The node tells its listener, which is replication, what it durably holds. A node that is alone has nobody to tell.

Invariant
- The node's lock comes first and the listener's inside it: where layers are told of, and where copies are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from nosync.lsm.manifests.manifest import Entry
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.node.api import DurabilityListener
from nosync.lsm.platform.opaque import OpaqueRecord

Observer = Callable[[Sequence[Record], Sequence[PurePosixPath]], None]


class Alone:
    """Stands for the peers of a node that has none, or does not know them yet. It counts this node alone."""

    def __init__(self, *, replicated: bool) -> None:
        self._replicated = replicated

    def held(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        """Nobody is told."""

    def held_files(self, paths: Sequence[PurePosixPath]) -> None:
        """Nobody is told."""

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        """Nobody is told."""

    def lost_files(self, paths: Sequence[PurePosixPath], layers: Sequence[LayerId] = ()) -> None:
        """Nobody is told."""

    def held_opaque(self, added: Sequence[OpaqueRecord]) -> None:
        """Nobody is told."""

    def gone_opaque(self, paths: Sequence[PurePosixPath], *, dropped: bool) -> None:
        """Nobody is told."""

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """Nobody is told."""

    def inputs_released(self, trace: TraceId, since: Time, until: Time) -> None:
        """Nobody is told."""

    def safe_elsewhere(self, timeline: str) -> Epoch:
        """No peer told a safe point."""
        return Epoch(-1)

    def is_first_replica(self, trace: TraceId) -> bool:
        """With peers nobody knows, yet, whether another node keeps the trace."""
        return not self._replicated

    def has_earlier_replica(self, record: Record) -> bool:
        """No other node said that it holds anything."""
        return False

    def copies(self, entry: Entry) -> int:
        """What is durable here is one copy."""
        return 1

    def copies_of_file(self, path: PurePosixPath) -> int:
        """What is durable here is one copy."""
        return 1


class Announcer:
    """Whom one node tells of its layers and files. `replicated`: the node has peers, whether a listener knows them yet or not."""

    def __init__(self, *, replicated: bool) -> None:
        self._alone = Alone(replicated=replicated)
        self.peers: DurabilityListener = self._alone
        self._observers: tuple[Observer, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Nobody listens."""
        return self.peers is self._alone

    def listen(self, listener: DurabilityListener | None) -> None:
        """This one is told from now on; None: nobody is."""
        self.peers = self._alone if listener is None else listener

    def observe(self, observer: Observer) -> None:
        """This one is told of layers and small files that became durable, too, perhaps inside the node's lock. It counts
        as no copy, and must not wait for anything.
        """
        self._observers = (*self._observers, observer)

    def leave(self, observer: Observer) -> None:
        """This one is told of nothing more."""
        self._observers = tuple(one for one in self._observers if one != observer)

    def layers(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        """These layers are durable here, and those are not any more. `dropped`: nobody needs them."""
        for observer in self._observers if added else ():
            observer(added, ())
        if added or gone:
            self.peers.held(added, gone, dropped=dropped)

    def files(self, paths: Sequence[PurePosixPath]) -> None:
        """These small files are durable here."""
        for observer in self._observers if paths else ():
            observer((), paths)
        if paths:
            self.peers.held_files(paths)
