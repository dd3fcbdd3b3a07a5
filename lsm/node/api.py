"""What a node offers to stores and jobs, and who is told of what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from nosync.lsm.errors import DeterminismError, NosyncError
from nosync.lsm.facts.pins import Pin
from nosync.lsm.facts.seal_times import EventSpan, SealTimes
from nosync.lsm.manifests.branches import MAIN, SAME_CODE, ChangedStages
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.manifests.manifest import Content, Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.platform.opaque import OpaqueRecord
from nosync.lsm.status import RemoteStatus


class DurabilityListener(Protocol):
    """Replication, which is told of what this node durably holds."""

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

    def held_opaque(self, added: Sequence[OpaqueRecord]) -> None:
        """These files of kept checkpoints are durable here."""

    def gone_opaque(self, paths: Sequence[PurePosixPath], *, dropped: bool) -> None:
        """These files of kept checkpoints are not here any more. `dropped`: nobody needs them; else they are lost."""

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """These contents count no more, all that were discarded so far; inputs of epochs from `before` on are needed
        again.
        """

    def safe_elsewhere(self, timeline: str) -> Epoch:
        """Returns the largest safe point that a peer told; -1 where none did."""

    def inputs_released(self, trace: TraceId, since: Time, until: Time) -> None:
        """Layers of this trace that lie between two times are not kept here any more, merged or not."""

    def is_first_replica(self, trace: TraceId) -> bool:
        """Returns whether this node is the one that keeps a trace of which one copy is kept."""

    def has_earlier_replica(self, record: Record) -> bool:
        """Returns whether a node that is to keep a layer before this one is there, and said that it holds it."""

    def copies(self, entry: Entry) -> int:
        """Returns on how many nodes a layer is durable."""

    def copies_of_file(self, path: PurePosixPath) -> int:
        """Returns on how many nodes a manifest is durable."""


class RemoteCopies(Protocol):
    """Copies of a store in an object store, which are made in the background. Nobody waits for them but who says so."""

    def status(self) -> RemoteStatus:
        """Returns how far they are."""

    def push(self, patience_s: float) -> bool:
        """Puts what is durable here now. Returns whether all of it is there within `patience_s`. Raises RemoteError."""

    def finish(self) -> None:
        """Puts what is left, for as long as settings say, and ends."""

    def abandon(self) -> None:
        """Ends at once."""


class StoreBackend(Protocol):
    """Is what a store and a job need of whoever owns the directory: a `Node` in this process, or a daemon."""

    problems: dict[str, str]
    """What keeps layers from being durable, by path; empty when all is well."""

    @property
    def timelines(self) -> Timelines:
        """Returns the timelines of the store."""

    @property
    def times(self) -> SealTimes:
        """Returns when epochs were sealed, as far as this process knows."""

    @property
    def remotes(self) -> Iterable[RemoteCopies]:
        """Returns the copies in object stores that this process makes."""

    def notice_changes(self, timeline: str | None = None) -> None:
        """Looks whether others changed the branches, or discarded what a timeline (default: any) had."""

    @property
    def replicas(self) -> int:
        """Returns on how many nodes layers can be kept, this one included."""

    @property
    def store_id(self) -> str:
        """Returns the id of a store whose tasks find it on several nodes; empty: there is one directory."""

    @property
    def node_id(self) -> str:
        """Returns which of these nodes this is; empty: it has no peers that would matter to a job."""

    def lost_hosts(self) -> frozenset[str]:
        """Returns the hosts of nodes that are gone, where tasks are of no use. An embedded node has none."""

    def note(self, ids: Iterable[LayerId]) -> None:
        """Tells whoever makes layers durable that these were published. It would find them by itself, later."""

    # --- epochs -------------------------------------------------------------------------------------------------------

    def origin(self, trace: TraceId) -> Time | None:
        """Returns where a trace first begins, as far as manifests say."""

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        """Returns, by stage, which fingerprint and number of shards wrote each stretch of the branch's sealed epochs."""

    def manifests(self, branch: str = MAIN) -> ManifestLog:
        """Returns the manifests by epoch, in order; those of the parent up to the fork are included."""

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        """Returns the newest sealed epoch of a branch."""

    def check_sealable(self, t: int, branch: str = MAIN) -> None:
        """Raises OutOfOrderError unless epoch `t` is the next one of the branch, or sealed already."""

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str = MAIN,
        meta: dict[str, Any] | None = None,
        copies: Mapping[str, int] | None = None,
        contents: Mapping[LayerId, Content] | None = None,
        span: EventSpan | None = None,
    ) -> Manifest:
        """Writes the manifest of epoch `t` with these layers, which must exist. The same again is a success.

        `copies`: by stage, how many durable copies the safe point waits for (default: the number that the node was made
        with; 0: it does not wait).
        `contents`: what the writers of layers said of them; of the others the files are looked into.
        `span`: the event time of the epoch's rows; it is recorded with the time at which the epoch is sealed.
        Raises OutOfOrderError unless `t` is the next one to be sealed or sealed already, DeterminismError when it was
        sealed with other layers.
        """

    def conflict(self, error: DeterminismError, branch: str = MAIN) -> None:
        """A layer of a sealed epoch was computed again with other rows: the safe point does not pass over it."""

    def safe_point(self, branch: str = MAIN) -> Epoch | None:
        """Returns the largest epoch up to which every manifest exists and every layer in it is durable; None if there
        is none.

        With peers: has as many copies as its stage asks for. Then it never goes back, a restart included: inputs may
        have been released. What peers lost since is filled again, and until then shown as what they are behind.
        """

    def missing(self, branch: str = MAIN) -> list[MissingLayer]:
        """Returns what is lost here and does not come from peers either: `fetch(lost(branch))`."""

    def lost(self, branch: str = MAIN) -> list[MissingLayer]:
        """Returns the layers that manifests of the branch list and no file here holds, by epoch."""

    def fetch(self, lost: list[MissingLayer]) -> list[MissingLayer]:
        """Has peers send these layers. Returns those that do not come."""

    # --- what is kept -------------------------------------------------------------------------------------------------

    def pins(self) -> dict[str, Pin]:
        """Returns the pins by name."""

    def pin(self, pin: Pin) -> None:
        """Keeps the state as of an epoch readable."""

    def unpin(self, name: str) -> None:
        """Takes a pin back."""

    def since(self) -> Time:
        """Returns the compaction frontier: reads as of this time and later are exact."""

    def durable_ids(self) -> set[LayerId]:
        """Returns every durable layer."""

    def make_durable_now(self) -> None:
        """Looks at what is on disk and makes it durable where that succeeds; what is torn goes to quarantine."""

    def sync(self) -> None:
        """Makes everything durable that was published before the call. Raises StorageError when that fails."""

    def check(self) -> list[NosyncError]:
        """Verifies every byte of every layer; what is bad goes to quarantine. Returns an error for each."""

    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]:
        """Verifies every byte of these layers, and that they are what sealed epochs list. Returns an error for each."""

    def compact(self, stage: str | None = None) -> Iterator[int]:
        """Merges each trace into one layer and removes what that replaced. Yields the number of merges done so far."""

    def drop_rounds(self, stage: str, t: int, *, at_once: bool = False) -> None:
        """Forgets and deletes a stage's layers of single rounds inside epoch `t`. `at_once`: they run again now."""

    # --- branches -----------------------------------------------------------------------------------------------------

    def create_branch(self, name: str, parent: str, at: int, stages: ChangedStages = SAME_CODE) -> None:
        """Makes a branch of `parent` at a sealed epoch. Durable when this returns."""

    def promote(self, name: str, keep_as: str | None) -> None:
        """Lets `main` be the timeline of a branch; the old timeline is kept as another branch, or dropped."""

    def rewind(self, t: int, keep_as: str | None) -> None:
        """Lets `main` be a new timeline that begins at a sealed epoch; the old timeline is kept as a branch, or
        dropped.
        """

    def release_first_attempt(self) -> None:
        """Forgets all layers of a store that has no sealed epochs, so that its first one can be given other rows.

        Raises LostEpochError where it had some, and their manifests are lost.
        """

    def delete_branch(self, name: str) -> int:
        """Deletes a branch with what nothing else needs. Returns the number of layers."""

    def close(self) -> None:
        """Makes everything published durable and gives the directory back. Raises StorageError if something is not
        durable.
        """
