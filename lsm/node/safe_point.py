"""The safe point: up to which epoch everything is durable, or with peers on as many nodes as its stages ask for.

Invariants
- An epoch is safe when its manifest is, and every layer in it whose stage asks for copies; and all epochs before it
  are.
- What was told is relied upon, here and by peers: inputs may have been released. So where there are peers, or inputs
  are released, it is written down and never goes back, unless an operator replaces epochs by those of another node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import CatalogError, StorageError
from nosync.lsm.manifests.archive import Run
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.catalog import Catalog, recorded_layers
from nosync.lsm.manifests.completeness import is_whole, safe_from
from nosync.lsm.manifests.input_policy import NOTHING, policies
from nosync.lsm.manifests.lost_ends import lost_begin
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.remembered import SAFE_META, catalog_metas
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.platform.env import Env
from nosync.lsm.status import StageProgress

_NOT_WRITTEN = "the safe point"

RecordsOf = Callable[[TraceId], Mapping[Description, Record]]


class EpochSafety:
    """Says of single epochs whether they are safe, from what is durable here and what peers said."""

    def __init__(
        self,
        timelines: Timelines,
        records_of: RecordsOf,
        is_file_durable: Callable[[PurePosixPath], bool],
        announcer: Announcer,
        *,
        replicated: bool,
    ) -> None:
        """`replicated`: the node has peers, so that without a listener that knows of them nothing new is safe."""
        self._timelines, self._records_of, self._is_file_durable = timelines, records_of, is_file_durable
        self._announcer, self._replicated = announcer, replicated
        self._conflicts: set[LayerId] = set()

    def conflict(self, ids: Iterable[LayerId]) -> None:
        """These were computed again with other rows than were sealed: their epochs are not passed over."""
        self._conflicts.update(ids)

    def last_safe(self, branch: str, manifests: ManifestLog, announced: Epoch, known: Epoch) -> Epoch | None:
        """Returns the largest epoch of a branch, which has these manifests, up to which all are safe; None where the
        first one is not.

        `announced`: the safe point that was written down, which holds whatever happens. `known`: what was found before.
        """
        first, last = manifests.first, manifests.last
        if first is None or last is None:
            return None
        if lost_begin(self._timelines, branch) is not None and announced < first:
            return None
        safe = max(Epoch(first - 1), known, min(announced, last))
        safe = max(safe, self._safe_elsewhere(manifests, safe, last))
        if safe < last:
            safe = safe_from(manifests, safe, self._is_safe_run, self._is_safe_epoch)
        return safe if safe in manifests else None

    def _safe_elsewhere(self, manifests: ManifestLog, safe: Epoch, last: Epoch) -> Epoch:
        """Returns the safe point that a peer told, or `safe` if that is larger: up to the last epoch whose manifest
        could be compared with the peer's. One that was sealed here just now may be of another history than the peer's.
        """
        peers = self._announcer.peers
        reached = min(peers.safe_elsewhere(manifests.timeline), last)
        while reached > safe:
            manifest = manifests.get(reached)
            if manifest is not None and peers.copies_of_file(manifest.path) > 0:
                break
            reached = Epoch(reached - 1)
        return max(safe, reached)

    def _is_safe_run(self, run: Run) -> bool:
        """Answers for epochs in an archive, without looking at each: all that they list was merged, and is durable
        here.
        """
        if self._replicated or not self._announcer.is_alone or any(one.copies > 1 for one in run.listed):
            return False
        archive = self._timelines.of_timeline(run.timeline).archive_at(run.first)
        if archive is None or not self._is_file_durable(archive.path):
            return False
        return is_whole(run.required(), NOTHING, self._records_of)

    def _is_safe_epoch(self, manifest: Manifest) -> bool:
        if (self._replicated and self._announcer.is_alone) or not self._is_manifest_durable(manifest):
            return False
        if not all(self.is_safe(entry) for entry in manifest.entries) or not self._is_whole_before(manifest):
            return False
        required = max((entry.copies for entry in manifest.entries), default=1)
        return required <= 1 or self._announcer.peers.copies_of_file(manifest.path) >= required

    def _is_whole_before(self, manifest: Manifest) -> bool:
        """Returns whether what was appended before an epoch was sealed at all, which no manifest lists, is durable
        here, too.
        """
        appended = [entry for entry in manifest.entries if entry.copies and not entry.id.trace.shard.count]
        if not self._announcer.is_alone or not appended:
            return True  # with peers it may be on other nodes
        before = self._timelines.of_timeline(manifest.timeline).get(Epoch(manifest.t - 1))
        known = {entry.id.trace for entry in before.entries} if before else set()
        for entry in appended:
            trace, reached = entry.id.trace, entry.origin
            if trace in known:
                continue
            for d in sorted(self._records_of(trace)):
                reached = max(reached, d.upper) if d.lower <= reached else reached
            if reached < entry.id.description.lower:
                return False
        return True

    def _is_manifest_durable(self, manifest: Manifest) -> bool:
        archive = self._timelines.of_timeline(manifest.timeline).archive_at(manifest.t)
        return self._is_file_durable(manifest.path) or (archive is not None and self._is_file_durable(archive.path))

    def is_durable(self, entry: Entry) -> bool:
        """Returns whether a layer is durable on this node, merged or not, as it was sealed."""
        d = entry.id.description
        records = self._records_of(entry.id.trace)
        exact = records.get(d)
        if exact is not None:
            return exact.digest == entry.digest
        return any(other.covers(d) for other in records)

    def is_safe(self, entry: Entry) -> bool:
        """Returns whether a layer is durable, or of a stage that can be computed again. Other rows than were sealed are
        never passed over.
        """
        durable = self.is_durable(entry)
        replaced = entry.id in self._conflicts or entry.id.description in self._records_of(entry.id.trace)
        if replaced and not durable:
            return False
        if not entry.copies:
            return True
        # With peers, wherever the copies are. Without its daemon this directory is one copy, whatever peers may have.
        return (durable or not self._announcer.is_alone) and self._announcer.peers.copies(entry) >= entry.copies


def safe_point_on_disk(timelines: Timelines, root: Path) -> Epoch | None:
    """Returns the safe point of the main timeline, for a process that only reads: as the catalog on disk says it now."""
    records: dict[TraceId, dict[Description, Record]] = {}
    for record in recorded_layers(root):
        records.setdefault(record.id.trace, {})[record.id.description] = record
    safety = EpochSafety(
        timelines,
        lambda trace: records.get(trace, {}),
        lambda path: True,  # it is there, and more cannot be known
        Announcer(replicated=False),
        replicated=False,
    )
    told = {name.removeprefix(SAFE_META): t for name, t in catalog_metas(root).items() if name.startswith(SAFE_META)}
    announced = announced_on(timelines, timelines.timeline().id, {name: Epoch(int(t)) for name, t in told.items()})
    return safety.last_safe(MAIN, timelines.manifests(), announced, NOTHING)


def announced_on(timelines: Timelines, timeline: str, announced: Mapping[str, Epoch]) -> Epoch:
    """Returns the safe point that holds for a timeline whatever happens: what was told of it, or of those that it left up to
    there, as a rewind, a promotion or an upgrade leaves one.
    """
    left = timelines.refs.left(timeline) if timeline in timelines.refs.timelines else {timeline: None}
    told = ((announced.get(one, NOTHING), end) for one, end in left.items())
    return max((t if end is None else min(t, end) for t, end in told), default=NOTHING)


class SafePoint:
    """The safe points of one node, by branch. What was told is written down."""

    def __init__(
        self,
        layers: DurableLayers,
        timelines: Timelines,
        small: MetadataSync,
        announcer: Announcer,
        catalog: Catalog,
        env: Env,
        problems: MutableMapping[str, str],
        *,
        replicated: bool,
    ) -> None:
        self._layers, self._lock, self._timelines, self._announcer = layers, layers.lock, timelines, announcer
        self._catalog, self._env, self._problems = catalog, env, problems
        self._safety = EpochSafety(timelines, layers.of, small.is_durable, announcer, replicated=replicated)
        self._known: dict[str, Epoch] = {}  # by timeline, what was found last; emptied when something is lost
        announced = catalog.metas(SAFE_META)
        self._before = {
            name.removeprefix(SAFE_META): Epoch(int(t)) for name, t in announced.items()
        }  # this process began
        self._written: dict[str, Epoch] = {}
        self._learned_s: dict[tuple[str, Epoch], float] = {}  # when epochs became known that are not safe yet

    def learned(self, manifests: Iterable[Manifest]) -> None:
        """These epochs were sealed."""
        with self._lock:
            self._learned_s |= {(manifest.timeline, manifest.t): self._env.monotonic_s() for manifest in manifests}

    def begin(self) -> None:
        """The node begins: epochs of main that are not safe wait from now on, as far as this process can say."""
        manifests, safe, now_s = self._timelines.manifests(MAIN), self.point(MAIN), self._env.monotonic_s()
        waiting = range(0 if safe is None else safe + 1, 0 if manifests.last is None else manifests.last + 1)
        with self._lock:
            self._learned_s |= {(manifests.timeline, Epoch(t)): now_s for t in waiting}

    def something_changed(self) -> None:
        """Layers were lost, or timelines are other ones: the safe point is looked for again."""
        with self._lock:
            self._known.clear()

    def conflict(self, ids: Iterable[LayerId]) -> None:
        """These were computed again with other rows than were sealed: their epochs are not passed over."""
        with self._lock:
            self._safety.conflict(ids)
            self._known.clear()

    def take_back(self, timeline: str, until: Epoch) -> None:
        """The epochs after this one were discarded: what takes their place is not safe for that they were."""
        with self._lock:
            self._known.clear()
            if self._announced(timeline) > until:
                self._catalog.apply(meta={SAFE_META + timeline: str(until)})
                self._written[timeline] = until

    # --- the safe point ---------------------------------------------------------------------------------------------

    def point(self, branch: str = MAIN) -> Epoch | None:
        """Returns the largest epoch up to which all are safe; None where the first one is not."""
        manifests, timeline = self._timelines.manifests(branch), self._timelines.timeline(branch).id
        with self._lock:
            announced, known = self._announced(timeline), self._known.get(timeline, NOTHING)
            safe = self._safety.last_safe(branch, manifests, announced, known)
            first = manifests.first
            if safe is None or first is None:
                return None
            self._known[timeline] = safe
            self._learned_s = {at: s for at, s in self._learned_s.items() if at[0] != timeline or at[1] > safe}
            if (not self._announcer.is_alone or policies(manifests[safe])) and safe > announced:
                return self._tell(timeline, safe, first)
            return safe

    def _tell(self, timeline: str, safe: Epoch, first: Epoch) -> Epoch | None:
        """Writes down a safe point. Returns it, or where nothing can be written the one that was told before."""
        try:
            self._catalog.apply(meta={SAFE_META + timeline: str(safe)})
        except (CatalogError, StorageError) as error:
            self._problems[_NOT_WRITTEN] = f"{safe} is safe, and is not told, for it cannot be written down: {error}"
            announced = self._announced(timeline)
            return announced if announced >= first else None
        self._problems.pop(_NOT_WRITTEN, None)
        self._written[timeline] = safe
        return safe

    def announced(self) -> dict[str, Epoch]:
        """Returns, by timeline, the safe points that hold whatever happens."""
        with self._lock:
            return {timeline: t for timeline, t in self._written.items() if t > NOTHING}

    def _announced(self, timeline: str) -> Epoch:
        if timeline not in self._written:
            self._written[timeline] = announced_on(self._timelines, timeline, self._before | self._written)
        return self._written[timeline]

    def is_durable(self, entry: Entry) -> bool:
        """Returns whether a layer is durable on this node, merged or not, as it was sealed."""
        with self._lock:
            return self._safety.is_durable(entry)

    # --- what is on the way -----------------------------------------------------------------------------------------

    def progress(self, branch: str = MAIN) -> list[StageProgress]:
        """Returns, by stage of the newest epoch, how far it is. Looks at what is after the safe point only."""
        manifests, safe = self._timelines.manifests(branch), self.point(branch)
        first, last = manifests.first, manifests.last
        if first is None or last is None:
            return []
        after = [manifests[t] for t in range(first if safe is None else safe + 1, last + 1) if t in manifests]
        found = []
        for stage in dict.fromkeys(e.id.trace.stage for e in manifests[last].entries):
            entries = [(m.t, e) for m in after for e in m.entries if e.id.trace.stage == stage]
            with self._lock:
                lacking = [t for t, e in entries if not self._safety.is_durable(e)]
                waiting = [(t, e) for t, e in entries if not self._safety.is_safe(e)]
                records = [self._layers.of(e.id.trace).get(e.id.description) for _, e in waiting]
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
        """Returns for how many seconds the first epoch after the safe point has been known here; 0 where there is none."""
        timeline = self._timelines.timeline(branch).id
        self.point(branch)  # forgets those up to the safe point
        with self._lock:
            waiting = [s for at, s in self._learned_s.items() if at[0] == timeline]
        return self._env.monotonic_s() - min(waiting) if waiting else 0.0
