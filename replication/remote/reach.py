"""Up to which epoch what is in a bucket is whole: the remotely safe epoch of each timeline.

Invariants
- An epoch is remotely safe when its manifest is in the bucket, or an archive that stands for it, and every layer that
  it lists and that the safe point waits for, merged or not; and all epochs before it are.
- The state as of the epoch that is said can be read: no layer was merged past it whose parts are not there. While copies
  catch up after an outage the epoch before stays the one that is said, and what serves it stays in the bucket.
- Nothing is said of a log of branches of which an entry is missing, or of a branch that begins at an epoch that is not
  safe yet: what was said before holds on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import PurePosixPath

from nosync.lsm.manifests.archive import Run
from nosync.lsm.manifests.branches import MAIN, Refs
from nosync.lsm.manifests.completeness import is_whole, safe_from
from nosync.lsm.manifests.input_policy import policies
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import counting
from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time, end_of, last_of
from nosync.lsm.platform.layout import BRANCHES
from nosync.lsm.trace.cover import is_merged_away
from nosync.replication.protocol.file_names import FileName
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.remote.others import Together
from nosync.replication.remote.pack import Reached


class Reach:
    """Finds up to where an inventory is whole. What was found is not looked at again."""

    def __init__(self, timelines: Timelines, digest_of: Callable[[PurePosixPath], str | None]) -> None:
        """`digest_of`: says the digest of a small file of this node; None where that is gone."""
        self._timelines, self._digest_of = timelines, digest_of
        self._known: dict[str, Epoch] = {}

    def forget(self) -> None:
        """Something was dropped or replaced, so all is looked at again."""
        self._known.clear()

    def of(self, held: Inventory | Together, before: Reached, released: Released) -> Reached:
        """Returns up to where all is held. `released`: which inputs may be gone here."""
        refs = self._timelines.refs
        entries = (PurePosixPath(f"{BRANCHES}/{n}.json") for n in range(1, refs.entries + 1))
        if not all(_has_file(held, path, self._digest_of) for path in entries):
            return before
        look = _Look(held, self._timelines, self._digest_of, released)
        epochs: dict[str, int] = {}
        for branch in (MAIN, *sorted(set(refs.names) - {MAIN})):
            log = self._timelines.manifests(branch)
            safe_here = look.last_safe(log, self._known.get(log.timeline, Epoch(-1)))
            self._known[log.timeline] = safe_here
            said = newest_safe(refs, log.timeline, before)
            if safe_here >= 0 and safe_here != said and not look.is_exact(branch, safe_here):
                safe_here = Epoch(-1 if said is None else said)
            begins_at = refs.timelines[log.timeline].at
            if begins_at is not None and safe_here < begins_at:
                return before
            if safe_here < 0:
                continue
            for of_timeline, end in log.until(safe_here):
                epochs[of_timeline.timeline] = max(epochs.get(of_timeline.timeline, -1), end)
        return Reached(epochs, refs.entries)


class _Look:
    def __init__(
        self,
        held: Inventory | Together,
        timelines: Timelines,
        digest_of: Callable[[PurePosixPath], str | None],
        released: Released,
    ) -> None:
        self._held, self._timelines, self._digest_of, self._released = held, timelines, digest_of, released

    def last_safe(self, log: ManifestLog, known: Epoch) -> Epoch:
        first = log.first
        if first is None:
            return Epoch(-1)
        return safe_from(log, max(Epoch(first - 1), known), self._is_safe_run, self._is_safe)

    def is_exact(self, branch: str, t: Epoch) -> bool:
        return next(merged_past(self._timelines, branch, t, self._descriptions), None) is None

    def _is_safe_run(self, run: Run) -> bool:
        archive = self._timelines.of_timeline(run.timeline).archive_at(run.first)
        if archive is None or not _has_file(self._held, archive.path, self._digest_of):
            return False
        return is_whole(run.required(), self._released.until_of(run.timeline), self._descriptions)

    def _descriptions(self, trace: TraceId) -> Collection[Description]:
        return self._held.layers(str(trace.directory)).keys()

    def _is_safe(self, manifest: Manifest) -> bool:
        if not _has_file(self._held, manifest.path, self._digest_of):
            return False
        return all(
            self._has(manifest, entry)
            for entry in manifest.entries
            if entry.copies and not self._released.may_lack(manifest, entry)
        )

    def _has(self, manifest: Manifest, entry: Entry) -> bool:
        return self._held.holds(FileName.of_layer(entry.id), entry.digest) and self._has_before(manifest, entry)

    def _has_before(self, manifest: Manifest, entry: Entry) -> bool:
        """Returns whether the trace is there from its origin on: rows that were appended before the first epoch was
        sealed are listed by no manifest. Inputs that were released need not be.
        """
        lower = entry.id.description.lower
        if entry.id.trace.shard.count or entry.origin >= lower or entry.id.trace.stage in policies(manifest):
            return True
        before = FileName.of_layer(LayerId(entry.id.trace, Description(entry.origin, lower)))
        return before in self._held or self._held.holds(before, "")


def _has_file(
    held: Inventory | Together, path: PurePosixPath, digest_of: Callable[[PurePosixPath], str | None]
) -> bool:
    """Returns whether a small file is held as this node has it."""
    name, digest = FileName(str(path)), digest_of(path)
    if digest is None:
        return name in held or held.has_archived(name)
    return held.holds(name, digest)


def merged_past(
    timelines: Timelines, branch: str, t: Epoch, descriptions: Callable[[TraceId], Collection[Description]]
) -> Iterator[TraceId]:
    """Yields the traces whose state as of an epoch cannot be read of some layers, because these were merged further. What
    is missing is none of this.
    """
    manifest = timelines.manifest(t, branch)
    listed = sorted({entry.id.trace for entry in manifest.entries} if manifest is not None else ())
    histories, end, as_of = timelines.histories(branch), end_of(t), last_of(t)
    for stage in sorted({trace.stage for trace in listed}):
        for span in counting(histories.get(stage, ()), as_of):
            traces = [span.trace(stage, i) for i in range(span.shard_count)]
            until = min(span.upper, end)
            for trace in traces or [one for one in listed if one.stage == stage]:
                if is_merged_away(trace, [*descriptions(trace)], until, Time(min(as_of, until - 1))):
                    yield trace


def exact_from(timelines: Timelines, reached: Reached) -> Time:
    """Returns the time as of which, and later, states are read of what is in a bucket: the newest epoch that is safe there
    of the branch that is furthest behind. The end of time: no branch is behind, so it is as here.
    """
    behind = [END_OF_TIME]
    for branch in timelines.refs.names:
        last, safe = timelines.last_sealed(branch), remotely_safe(timelines, reached, branch)
        if last is not None and safe != last:
            behind.append(Time(0) if safe is None else last_of(safe))
    return min(behind)


def remotely_safe(timelines: Timelines, reached: Reached, branch: str = MAIN) -> int | None:
    """Returns the newest epoch of a branch that is remotely safe; None where none is."""
    return newest_safe(timelines.refs, timelines.timeline(branch).id, reached)


def newest_safe(refs: Refs, timeline: str, reached: Reached) -> int | None:
    """Returns the newest epoch of what a timeline and those that it left have that is remotely safe; None: none is."""
    found = [
        t if end is None else min(t, end)
        for timeline, end in refs.left(timeline).items()
        if (t := reached.epochs.get(timeline)) is not None
    ]
    return max(found, default=None)
