"""Says what is wrong with the manifests of a directory: which are lost, and what of them this version does not know."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.manifests.input_policy import POLICIES
from nosync.lsm.manifests.lost_ends import LOST_END, LOST_MANIFEST, log_problem, lost_manifests
from nosync.lsm.manifests.remembered import Remembered
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.layout import BRANCHES
from nosync.lsm.trace.directory import LayerDirectory

_POLICIES = "policies of inputs"


class ManifestChecks:
    """`problems`: gets an entry for each thing that is wrong."""

    def __init__(
        self,
        directory: LayerDirectory,
        timelines: Timelines,
        remembered: Remembered,
        safe_points: SafePoint,
        problems: MutableMapping[str, str],
    ) -> None:
        self._root, self._env, self._timelines, self._remembered = directory.root, directory.env, timelines, remembered
        self._safe_points, self._problems = safe_points, problems

    def note_problems(self) -> None:
        """Looks at all manifests."""
        self.note_gaps()
        self._note_unknown_policies()

    def sealed(self) -> None:
        """An epoch was sealed, which may be one whose manifest was lost."""
        if any(at.startswith((LOST_MANIFEST, LOST_END)) for at in self._problems):
            self.note_gaps()

    def note_gaps(self) -> None:
        """A manifest that is lost stops the safe point, and no layer is missing for it. Nor is one for an entry of the
        log.
        """
        found: dict[str, str] = {}
        for name in list(self._timelines.refs.names):
            with suppress(InvalidInputError):  # the branch was deleted meanwhile
                found |= lost_manifests(self._timelines, name, self._safe_points.point(name))
        problem = None
        if self._timelines.refs.entries < self._remembered.last_entry:
            problem = log_problem(self._timelines, self._root, self._env)
        found |= {} if problem is None else {BRANCHES: problem}
        for at in [at for at in self._problems if at.startswith((LOST_MANIFEST, LOST_END)) or at == BRANCHES]:
            if at not in found:
                self._problems.pop(at, None)
        self._problems.update(found)

    def _note_unknown_policies(self) -> None:
        """A newer version, or a stranger, says what this one does not know: inputs are kept then, and somebody is told."""
        last = self._timelines.last_sealed()
        manifest = None if last is None else self._timelines.manifest(last)
        unknown = manifest.unknown_policies if manifest is not None else {}
        if unknown:
            said = ", ".join(f"{stage}: {policy!r}" for stage, policy in unknown.items())
            self._problems[_POLICIES] = (
                f"manifests say at_safe_point= of sources what this nosync does not know ({said}; it knows "
                f"{', '.join(POLICIES)}): their layers are kept. Upgrade nosync, or see who wrote it"
            )
        else:
            self._problems.pop(_POLICIES, None)
