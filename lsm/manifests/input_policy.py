"""Releasing inputs at the safe point: up to there no stage has to be computed from them again (the poster's input
downgrade).

What happens to a source's layers then is declared with the source, and written into every manifest, so that all nodes
know: `keep` (the default: they can be replayed and explained), `disk` (one node keeps them, the others drop their
copies), `drop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import KEEP, RELEASING, Entry, Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Epoch, pack
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


def inputs_to_release(
    directory: LayerDirectory, timelines: Timelines, until: int
) -> Iterator[tuple[str, TraceId, list[LayerId]]]:
    """Yields the traces of the main timeline's sources, each with its policy and its layers that lie before the end of
    epoch `until`.
    """
    for stage, policy in policies(timelines.manifest(until)).items():
        fingerprints = {span.fingerprint for span in timelines.histories(MAIN).get(stage, ())}
        for trace in directory.traces(stage):
            if trace.fingerprint in fingerprints:
                before = [d for d in directory.descriptions(trace) if d.upper <= pack(until + 1)]
                yield policy, trace, [LayerId(trace, d) for d in before]
