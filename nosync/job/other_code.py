"""At which epochs stages were computed by other code than they have now: before an upgrade, or before a branch forked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nosync.flow.bound_stage import BoundStage
from nosync.flow.kinds import SOURCE
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import Manifest


class Manifests(Protocol):
    """Says what was sealed."""

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        """Returns the manifest of an epoch."""


def epochs_of_other_code(
    leading: Sequence[BoundStage],
    inputs: Callable[[BoundStage], Sequence[str]],
    manifests: Manifests,
    branch: str,
    epochs: range,
) -> Mapping[str, set[int]]:
    """Returns, by stage, the epochs at which its rows were made by other code, of those that lead to a stage.

    `leading`: these stages, each after those that are computed from it. A stage that began anew is made by the code that it
    has, whenever its rows came. One that is not recorded had other code where what is recorded of it had.
    """
    found: dict[str, set[int]] = defaultdict(set)
    stages = [s for s in leading if s.recorded and s.kind != SOURCE and not _began_anew(s, epochs)]
    for t in epochs if stages else ():
        manifest = manifests.manifest(t, branch)
        if manifest is None:
            continue
        recorded = {entry.id.trace.stage: entry.id.trace.fingerprint for entry in manifest.entries}
        for stage in stages:
            if recorded.get(stage.name, stage.fingerprint) != stage.fingerprint:
                found[stage.name].add(t)
    by_name = {stage.name: stage for stage in leading}
    for stage in leading:
        for name in inputs(stage):
            below = by_name.get(name)
            if found.get(stage.name) and below is not None and not below.recorded:
                found[name] |= found[stage.name]
    return found


def _began_anew(stage: BoundStage, epochs: range) -> bool:
    return stage.bootstrap_at is not None and stage.bootstrap_at < epochs.stop
