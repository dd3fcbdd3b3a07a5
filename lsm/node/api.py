"""The roles around a data directory: what its keeper offers to stores and jobs, and who is told of what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from nosync.lsm.errors import DeterminismError, NosyncError
from nosync.lsm.facts.pins import Pin
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.manifests.manifest import Content, Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time


class DurabilityListener(Protocol):
    """Who is told of what this node durably holds: replication."""

    def held(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        """These layers are durable here, and those are not any more. `dropped`: nobody needs them."""

    def held_files(self, paths: Sequence[PurePosixPath]) -> None:
        """Manifests, or entries of the log of branches, are durable here."""

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        """These manifests were removed, because no branch needs them."""

    def lost_files(self, paths: Sequence[PurePosixPath], layers: Sequence[LayerId] = ()) -> None:
        """These small files and layers are not here any more, and should be. Told as one: without its manifests a peer
        could take a layer for what they are not.
        """

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """These contents count no more, all that were given up so far; inputs of epochs from `before` on are needed
        again.
        """

    def safe_elsewhere(self, timeline: str) -> Epoch:
        """The largest safe point that a peer told; -1 where none did."""

    def inputs_released(self, trace: TraceId, until: Time) -> None:
        """Layers of this trace that end before a time are not kept here any more, merged or not."""

    def is_first_replica(self, trace: TraceId) -> bool:
        """Whether this node is the one that keeps a trace of which one copy is kept."""

    def has_earlier_replica(self, record: Record) -> bool:
        """Whether a node that is to keep a layer before this one is there, and said that it holds it."""

    def copies(self, entry: Entry) -> int:
        """On how many nodes a layer is durable."""

    def copies_of_file(self, path: PurePosixPath) -> int:
        """On how many nodes a manifest is durable."""


class StoreBackend(Protocol):
    """What a store and a job need of whoever keeps the directory: a `Node` in this process, or a daemon."""

    problems: dict[str, str]
    """What keeps layers from being durable, by path; empty when all is well."""

    @property
    def timelines(self) -> Timelines:
        """The timelines of the store."""

    def notice_changes(self, timeline: str | None = None) -> None:
        """Looks whether others changed the branches, or gave up what a timeline (default: any) had."""

    @property
    def replicas(self) -> int:
        """On how many nodes layers can be kept, this one included."""

    @property
    def store_id(self) -> str:
        """Of a store whose tasks find it on several nodes; empty: there is one directory."""

    @property
    def node_id(self) -> str:
        """Which of these nodes this is."""

    def lost_hosts(self) -> frozenset[str]: ...
    def note(self, ids: Iterable[LayerId]) -> None: ...
    def origin(self, trace: TraceId) -> Time | None: ...
    def histories(self, branch: str = MAIN) -> dict[str, History]: ...
    def manifests(self, branch: str = MAIN) -> ManifestLog: ...
    def last_sealed(self, branch: str = MAIN) -> Epoch | None: ...
    def check_sealable(self, t: int, branch: str = MAIN) -> None: ...
    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str = MAIN,
        meta: dict[str, Any] | None = None,
        copies: Mapping[str, int] | None = None,
        contents: Mapping[LayerId, Content] | None = None,
    ) -> Manifest: ...
    def conflict(self, error: DeterminismError, branch: str = MAIN) -> None: ...
    def missing(self, branch: str = MAIN) -> list[MissingLayer]:
        """What is lost here and does not come from peers either: `fetch(lost(branch))`."""

    def lost(self, branch: str = MAIN) -> list[MissingLayer]:
        """The layers that manifests of the branch list and no file here holds, by epoch."""

    def fetch(self, lost: list[MissingLayer]) -> list[MissingLayer]:
        """Has peers send these layers. Returns those that do not come."""

    def pins(self) -> dict[str, Pin]: ...
    def pin(self, pin: Pin) -> None: ...
    def unpin(self, name: str) -> None: ...
    def durable_ids(self) -> set[LayerId]: ...
    def safe_point(self, branch: str = MAIN) -> Epoch | None: ...
    def since(self) -> Time: ...
    def make_durable_now(self) -> None: ...
    def sync(self) -> None: ...
    def check(self) -> list[NosyncError]: ...
    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]: ...
    def compact(self, stage: str | None = None) -> Iterator[int]: ...
    def drop_rounds(self, stage: str, t: int, *, at_once: bool = False) -> None: ...
    def create_branch(
        self, name: str, parent: str, at: int, changed: Iterable[str], anew: Iterable[str] = ()
    ) -> None: ...
    def promote(self, name: str, keep_as: str | None) -> None: ...
    def rewind(self, t: int, keep_as: str | None) -> None: ...
    def release_first_attempt(self) -> None: ...
    def delete_branch(self, name: str) -> int: ...
    def close(self) -> None: ...
