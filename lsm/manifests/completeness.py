"""What sealed epochs list and no file holds, and up to where all of them are safe: asked of manifests and listings
alone.

Nothing here knows a catalog or a lock, so any process may ask. A run of epochs in an archive is answered at once where
merged layers stand for all that it lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nosync.lsm.manifests.archive import Run
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import Entry, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, TraceId
from nosync.lsm.model.timestamp import Epoch, end_of, epoch_of
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.presence import Presence


@dataclass(frozen=True, order=True)
class MissingLayer:
    """A layer that a manifest lists and no file holds."""

    entry: Entry
    t: Epoch
    timeline: str


def lost(timelines: Timelines, directory: LayerDirectory, released: Released, branch: str = MAIN) -> list[MissingLayer]:
    """Returns the layers that manifests of a branch list and that no file covers; inputs that were released may be gone."""
    presence = Presence(directory.descriptions)
    return [
        MissingLayer(entry, manifest.t, manifest.timeline)
        for manifest in to_look_at(timelines.manifests(branch), released, presence.listed)
        for entry in manifest.entries
        if not released.may_lack(manifest, entry) and not presence.has(entry.id)
    ]


def safe_from(
    sealed: ManifestLog, safe: Epoch, is_safe_run: Callable[[Run], bool], is_safe: Callable[[Manifest], bool]
) -> Epoch:
    """Returns the last epoch up to which all are safe, where those up to `safe` are. A run is asked about once, and
    then its epochs.
    """
    for piece in sealed.pieces(safe):
        if isinstance(piece, Run) and piece.first <= safe + 1 and is_safe_run(piece):
            safe = piece.last
            continue
        for manifest in sealed.of_run(piece) if isinstance(piece, Run) else (piece,):
            if manifest.t > safe:
                if manifest.t != safe + 1 or not is_safe(manifest):
                    return safe
                safe = manifest.t
    return safe


def to_look_at(
    sealed: ManifestLog, released: Released, held: Callable[[TraceId], Iterable[Description]]
) -> Iterator[Manifest]:
    """Yields all manifests but those of runs of which nothing can be missing, because merged layers stand for all that
    they list.

    `released`: which inputs may be gone. `held(trace)`: the time ranges of the layers that are there.
    """
    for piece in sealed.pieces():
        if isinstance(piece, Manifest):
            yield piece
        elif not is_whole(piece, released.until_of(piece.timeline), held):
            yield from sealed.of_run(piece)


def is_whole(run: Run, released_until: int, held: Callable[[TraceId], Iterable[Description]]) -> bool:
    """Returns whether merged layers alone stand for all that a run lists. A layer of one epoch is compared by whoever
    looks at it.
    """
    for one in run.listed:
        if one.trace.stage in run.policies and run.last <= released_until:
            continue
        reached = run.begin
        for d in sorted(held(one.trace)):
            is_merged = not d.is_of_rounds and d.upper > end_of(epoch_of(d.lower))
            if is_merged and d.lower <= reached < d.upper:
                reached = d.upper
        if reached < run.end:
            return False
    return True
