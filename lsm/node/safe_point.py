"""The safe point: up to which epoch everything is durable, or with peers on as many nodes as its stages ask for.

Invariants
- An epoch is safe when its manifest is, and every layer in it whose stage asks for copies; and all epochs before it
  are.
- What was told is relied upon, here and by peers: inputs may have been let go of. So where there are peers, or inputs
  are let go of, it is written down and never goes back, unless an operator gives epochs up for those of another node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

from nosync.lsm.errors import CatalogError, StorageError
from nosync.lsm.manifests.archive import Run
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.completeness import is_whole, safe_from
from nosync.lsm.manifests.input_policy import NOTHING, policies
from nosync.lsm.manifests.lost_ends import lost_begin
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.remembered import SAFE_META
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.api import DurabilityListener
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.platform.env import Env
from nosync.lsm.status import StageProgress

_NOT_WRITTEN = "the safe point"


class Holder(Protocol):
    """What the safe point depends on: the node."""

    listener: DurabilityListener | None
    small: MetadataSync
    problems: dict[str, str]

    @property
    def timelines(self) -> Timelines:
        """The manifests."""

    def records_of(self, trace: TraceId) -> Mapping[Description, Record]:
        """The durable layers of a trace."""


class SafePoint:
    """Of one node. `replicated`: it has peers, so that without a listener that knows of them nothing new is safe."""

    def __init__(self, holder: Holder, catalog: Catalog, lock: threading.RLock, env: Env, *, replicated: bool) -> None:
        self._holder, self._catalog, self._lock, self._env = holder, catalog, lock, env
        self._replicated = replicated
        self._known: dict[str, Epoch] = {}  # by timeline, what was found last; emptied when something is lost
        announced = catalog.metas(SAFE_META)
        self._before = {
            name.removeprefix(SAFE_META): Epoch(int(t)) for name, t in announced.items()
        }  # this process began
        self._written: dict[str, Epoch] = {}
        self._conflicts: set[LayerId] = set()
        self._learned_s: dict[tuple[str, Epoch], float] = {}  # when epochs became known that are not safe yet

    def learned(self, manifests: Iterable[Manifest]) -> None:
        """These epochs were sealed."""
        with self._lock:
            self._learned_s |= {(manifest.timeline, manifest.t): self._env.monotonic_s() for manifest in manifests}

    def something_changed(self) -> None:
        """Layers were lost, or timelines are other ones: it is found anew."""
        with self._lock:
            self._known.clear()

    def conflict(self, ids: Iterable[LayerId]) -> None:
        """These were computed again with other rows than were sealed: their epochs are not passed over."""
        with self._lock:
            self._conflicts.update(ids)
            self._known.clear()

    def take_back(self, timeline: str, until: Epoch) -> None:
        """The epochs after this one were given up: what takes their place is not safe for that they were."""
        with self._lock:
            self._known.clear()
            if self._announced(timeline) > until:
                self._catalog.apply(meta={SAFE_META + timeline: str(until)})
                self._written[timeline] = until

    # --- the safe point ---------------------------------------------------------------------------------------------

    def point(self, branch: str = MAIN) -> Epoch | None:
        """The largest epoch up to which all are safe; None where the first one is not."""
        timelines = self._holder.timelines
        manifests, timeline = timelines.manifests(branch), timelines.timeline(branch).id
        first, last = manifests.first, manifests.last
        with self._lock:
            if first is None or last is None:
                return None
            if lost_begin(timelines, branch) is not None and self._announced(timeline) < first:
                return None
            safe = max(self._known.get(timeline, Epoch(first - 1)), min(self._announced(timeline), last))
            safe = max(safe, self._safe_elsewhere(manifests, timeline, safe))
            if safe < last:
                safe = safe_from(manifests, safe, self._is_safe_run, self._is_safe_epoch)
            if safe not in manifests:
                return None
            self._known[timeline] = safe
            self._learned_s = {at: s for at, s in self._learned_s.items() if at[0] != timeline or at[1] > safe}
            if (self._holder.listener is not None or policies(manifests[safe])) and safe > self._announced(timeline):
                return self._tell(timeline, safe, first)
            return safe

    def _tell(self, timeline: str, safe: Epoch, first: Epoch) -> Epoch | None:
        """Writes down a safe point. Returns it, or where nothing can be written the one that was told before."""
        try:
            self._catalog.apply(meta={SAFE_META + timeline: str(safe)})
        except (CatalogError, StorageError) as error:
            self._holder.problems[_NOT_WRITTEN] = (
                f"{safe} is safe, and is not told, for it cannot be written down: {error}"
            )
            announced = self._announced(timeline)
            return announced if announced >= first else None
        self._holder.problems.pop(_NOT_WRITTEN, None)
        self._written[timeline] = safe
        return safe

    def announced(self) -> dict[str, Epoch]:
        """By timeline, the safe points that hold whatever happens."""
        with self._lock:
            return {timeline: t for timeline, t in self._written.items() if t > NOTHING}

    def _safe_elsewhere(self, manifests: ManifestLog, timeline: str, safe: Epoch) -> Epoch:
        """The safe point that a peer told, or `safe` if that is larger: up to the last epoch whose manifest could be
        compared with the peer's. One that was sealed here just now may be of another history than the peer's.
        """
        listener, last = self._holder.listener, manifests.last
        if listener is None or last is None:
            return safe
        reached = min(listener.safe_elsewhere(timeline), last)
        while reached > safe:
            manifest = manifests.get(reached)
            if manifest is not None and listener.copies_of_file(manifest.path) > 0:
                break
            reached = Epoch(reached - 1)
        return max(safe, reached)

    def _announced(self, timeline: str) -> Epoch:
        if timeline not in self._written:
            self._written[timeline] = self._before.get(timeline, Epoch(-1))
        return self._written[timeline]

    def _is_safe_run(self, run: Run) -> bool:
        """Of epochs in an archive, without looking at each: all that they list was merged since, and is durable here."""
        if self._replicated or self._holder.listener is not None or any(one.copies > 1 for one in run.listed):
            return False
        archive = self._holder.timelines.of_timeline(run.timeline).archive_at(run.first)
        if archive is None or not self._holder.small.is_durable(archive.path):
            return False
        return is_whole(run.required(), NOTHING, self._holder.records_of)

    def _is_safe_epoch(self, manifest: Manifest) -> bool:
        listener = self._holder.listener
        if (self._replicated and listener is None) or not self._is_manifest_durable(manifest):
            return False
        if not all(self.is_safe(entry) for entry in manifest.entries) or not self._is_whole_before(manifest):
            return False
        required = max((entry.copies for entry in manifest.entries), default=1)
        return required <= 1 or listener is None or listener.copies_of_file(manifest.path) >= required

    def _is_whole_before(self, manifest: Manifest) -> bool:
        """Whether what was appended before an epoch was sealed at all, which no manifest lists, is durable here, too."""
        appended = [entry for entry in manifest.entries if entry.copies and not entry.id.trace.shard.count]
        if self._holder.listener is not None or not appended:
            return True  # with peers it may be on other nodes
        before = self._holder.timelines.of_timeline(manifest.timeline).get(Epoch(manifest.t - 1))
        known = {entry.id.trace for entry in before.entries} if before else set()
        for entry in appended:
            trace, reached = entry.id.trace, entry.origin
            if trace in known:
                continue
            for d in sorted(self._holder.records_of(trace)):
                reached = max(reached, d.upper) if d.lower <= reached else reached
            if reached < entry.id.description.lower:
                return False
        return True

    def _is_manifest_durable(self, manifest: Manifest) -> bool:
        small = self._holder.small
        archive = self._holder.timelines.of_timeline(manifest.timeline).archive_at(manifest.t)
        return small.is_durable(manifest.path) or (archive is not None and small.is_durable(archive.path))

    def is_durable(self, entry: Entry) -> bool:
        """Whether a layer is durable on this node, merged or not, as it was sealed."""
        d = entry.id.description
        with self._lock:
            records = self._holder.records_of(entry.id.trace)
            exact = records.get(d)
            if exact is not None:
                return exact.digest == entry.digest
            return any(other.covers(d) for other in records)

    def is_safe(self, entry: Entry) -> bool:
        """Durable, or of a stage that can be computed again; but other rows than were sealed are never passed over."""
        durable = self.is_durable(entry)
        replaced = entry.id in self._conflicts or entry.id.description in self._holder.records_of(entry.id.trace)
        if replaced and not durable:
            return False
        if self._holder.listener is not None and entry.copies:
            return self._holder.listener.copies(entry) >= entry.copies  # with peers, wherever they are
        # Opened without its daemon, this directory is one copy, whatever the peers may have.
        return (durable and entry.copies <= 1) or not entry.copies

    # --- what is on the way -----------------------------------------------------------------------------------------

    def progress(self, branch: str = MAIN) -> list[StageProgress]:
        """By stage of the newest epoch, how far it is. Looks at what is after the safe point only."""
        manifests, safe = self._holder.timelines.manifests(branch), self.point(branch)
        first, last = manifests.first, manifests.last
        if first is None or last is None:
            return []
        after = [manifests[t] for t in range(first if safe is None else safe + 1, last + 1) if t in manifests]
        found = []
        for stage in dict.fromkeys(e.id.trace.stage for e in manifests[last].entries):
            entries = [(m.t, e) for m in after for e in m.entries if e.id.trace.stage == stage]
            with self._lock:
                lacking = [t for t, e in entries if not self.is_durable(e)]
                waiting = [(t, e) for t, e in entries if not self.is_safe(e)]
                records = [self._holder.records_of(e.id.trace).get(e.id.description) for _, e in waiting]
            durable = min(lacking, default=last + 1) - 1
            replicated = min((t for t, _ in waiting), default=last + 1) - 1
            progress = StageProgress(
                stage,
                complete=last,
                durable=durable if durable >= first else None,
                replicated=replicated if replicated >= first else None,
                waiting_layers=len(waiting),
                waiting_bytes=sum(record.size_bytes for record in records if record is not None),
            )
            found.append(progress)
        return found

    def lag_s(self, branch: str = MAIN) -> float:
        """For how many seconds the first epoch after the safe point has been known here; 0 where there is none."""
        timeline = self._holder.timelines.timeline(branch).id
        self.point(branch)  # forgets those up to the safe point
        with self._lock:
            waiting = [s for at, s in self._learned_s.items() if at[0] == timeline]
        return self._env.monotonic_s() - min(waiting) if waiting else 0.0
