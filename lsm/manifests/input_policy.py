"""Releasing inputs at the safe point: up to there no stage has to be computed from them again (the poster's input
downgrade).

What happens to a source's layers then is declared with the source, and written into every manifest, so that all nodes
know: `keep` (the default: they can be replayed and explained), `disk` (one node keeps them, the others drop their
copies), `drop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import KEEP, RELEASING, Entry, Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Epoch, Time, pack
from nosync.lsm.platform.layout import RELEASED
from nosync.lsm.trace.directory import LayerDirectory

POLICIES = (KEEP, *RELEASING)
NOTHING = Epoch(-1)


def policies(manifest: Manifest | None) -> Mapping[str, str]:
    """Returns by source what is done with its layers at the safe point. Sources whose layers are kept are left out."""
    return manifest.policies if manifest is not None else {}


def releasable_until(timelines: Timelines, safe: int | None) -> Epoch:
    """Returns the epoch up to which inputs may be released, given the main timeline's safe point.

    A branch holds what came after its fork, which it may still replay.
    """
    if safe is None:
        return NOTHING
    refs = timelines.refs
    main = refs.names[MAIN]
    shared = [refs.shared_until(main, id) for name, id in refs.names.items() if name != MAIN]
    return Epoch(min([safe, *(at for at in shared if at is not None)]))


def is_released(manifest: Manifest, entry: Entry, until: int) -> bool:
    """Returns whether a layer need not be there any more."""
    return manifest.t <= until and entry.id.trace.stage in policies(manifest)


@dataclass(frozen=True)
class Releasable:
    """What may go of a source's trace, by its policy."""

    trace: TraceId
    policy: str
    layers: list[LayerId]
    since: Time
    """Before it layers stay: the source was declared otherwise then."""


def inputs_to_release(directory: LayerDirectory, timelines: Timelines, until: int) -> Iterator[Releasable]:
    """Yields the traces of the main timeline's sources with their layers that lie before the end of epoch `until`.

    Each epoch goes by its own manifest: what was sealed to be kept is kept, whatever the source says since.
    """
    releasing = policies(timelines.manifest(until))
    kept: dict[str, list[tuple[Time, Time]]] = {stage: [] for stage in releasing}
    for piece in timelines.manifests(MAIN).pieces() if releasing else ():
        for stage in releasing.keys() - piece.policies.keys():
            begin = kept[stage].pop()[0] if kept[stage] and kept[stage][-1][1] == piece.begin else piece.begin
            kept[stage].append((begin, piece.end))
    for stage, policy in releasing.items():
        fingerprints = {span.fingerprint for span in timelines.histories(MAIN).get(stage, ())}
        for trace in directory.traces(stage):
            if trace.fingerprint in fingerprints:
                before = [d for d in directory.descriptions(trace) if d.upper <= pack(until + 1)]
                gone = [d for d in before if not any(low < d.upper and d.lower < high for low, high in kept[stage])]
                since = max((high for low, high in kept[stage] if low <= pack(until)), default=Time(0))
                yield Releasable(trace, policy, [LayerId(trace, d) for d in gone], since)


class MayBeGone:
    """Says whether layers of a source may be gone, by its policy in any epoch so far. All epochs are looked at once, and the
    newest each time.
    """

    def __init__(self, directory: LayerDirectory, timelines: Timelines) -> None:
        self._released, self._env, self._timelines = directory.root / RELEASED, directory.env, timelines
        self._known: dict[tuple[str, str], bool] = {}  # by timeline and stage

    def __call__(self, stage: str) -> bool:
        timelines, at = self._timelines, (self._timelines.timeline().id, stage)
        newest = timelines.last_sealed()
        if newest is not None and stage in policies(timelines.manifest(newest)):
            self._known[at] = True
        if at not in self._known:
            pieces = timelines.manifests(MAIN).pieces() if self._env.exists(self._released) else ()
            self._known[at] = any(stage in piece.policies for piece in pieces)
        return self._known[at]
