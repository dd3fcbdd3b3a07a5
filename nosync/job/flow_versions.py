"""A dataflow on one line of a store: bound as it goes on from here, and as it ran at each epoch before.

The same line goes on only with the same code, else old and new results would mix silently; what differs is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from nosync.flow.binder import Analyze, bind, source_fingerprints
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.dataflow import Dataflow
from nosync.flow.persistence import DISK, show_level
from nosync.job.watermarks import recorded_policies
from nosync.lsm.errors import FlowError
from nosync.lsm.manifests.manifest import KEEP, MAIN_LINE, Manifest
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.api import StoreNode

PLACED = "placed"
"""In a manifest: by source, the columns that say to which shard its rows went."""


class LineFlow:
    """Raises FlowError where the flow is not that of the line's last epoch, or asks for what the store does not keep."""

    def __init__(
        self,
        declared: Dataflow,
        node: StoreNode,
        branch: Callable[[], str],
        parse_ddl: Callable[[str], pa.Schema],
        analyze: Analyze,
    ) -> None:
        """`branch`: its name, which may become another one when the branch is promoted."""
        self._declared, self._node, self._branch = declared, node, branch
        self._parse_ddl, self._analyze = parse_ddl, analyze
        self._bound: dict[tuple[object, ...], BoundFlow] = {}
        line = node.lines.line(self._branch())
        salt = "" if line.id == MAIN_LINE else line.id
        self._policies = self._recorded_policies()
        self._begins, self._anew = node.lines.refs.begins(line.id), node.lines.refs.anew(line.id)
        self.flow: BoundFlow = self._bind(declared, salt=salt).placed
        """With the fingerprints of epochs that bring inputs of their own; `at` has those of others."""
        self._check_code()
        self._check_levels()

    def at(self, t: int) -> BoundFlow:
        """The flow as it ran, or will run, at an epoch: a branch shares the recorded inputs of the line that it came from."""
        manifest = self._node.lines.manifest(t, self._branch()) or self.parents_manifest(t)
        if manifest is None:
            return self.flow
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        sources = {stage.name: recorded[stage.name] for stage in self.flow.sources if stage.name in recorded}
        placed = manifest.meta.get(PLACED)  # None: of an older version, which placed by keys that are asked directly
        at = (*sorted(sources.items()), json.dumps(placed, sort_keys=True))
        if at not in self._bound:
            self._bound[at] = self._bind(self._declared, sources=sources, placements=placed)
        return self._bound[at]

    def bound(self, other: Dataflow, sources: Mapping[str, str]) -> BoundFlow:
        """Another flow as it would be on this line, from recorded sources of these fingerprints."""
        return self._bind(other, sources=sources)

    def _bind(self, flow: Dataflow, **how: Any) -> BoundFlow:
        return bind(
            flow, self._parse_ddl, self._analyze, begins=self._begins, anew=self._anew, policies=self._policies, **how
        )

    def _recorded_policies(self) -> dict[str, str]:
        """Those of windows that the line has; new ones go by the minimum."""
        last = self._node.last_sealed(self._branch())
        return recorded_policies(None if last is None else self._node.lines.manifest(last, self._branch()))

    def parents_manifest(self, t: int) -> Manifest | None:
        """What the line that this one came from sealed at an epoch after the fork; None once this one has its own inputs."""
        line = self._node.lines.line(self._branch())
        if line.parent is None or self.has_own_inputs():
            return None
        return self._node.lines.of_line(line.parent).get(Epoch(t))

    def has_own_inputs(self) -> bool:
        last = self._node.last_sealed(self._branch())
        manifest = self._node.lines.manifest(last, self._branch()) if last is not None else None
        own = {(stage.name, stage.fingerprint) for stage in self.flow.sources}
        return manifest is not None and any((e.id.trace.stage, e.id.trace.fingerprint) in own for e in manifest.entries)

    def _check_code(self) -> None:
        """The same line goes on only with the same code: otherwise old and new results would mix silently."""
        last = self._node.last_sealed(self._branch())
        manifest = self._node.lines.manifest(last, self._branch()) if last is not None else None
        if manifest is None:
            return
        line = self._node.lines.line(self._branch())
        may_differ = set(line.changed) if manifest.line != line.id else set()
        self._check_sources(manifest)
        assert last is not None, "there is a manifest"
        stages = self.at(last).stages
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        changed = [
            n for n, s in stages.items() if n in recorded and recorded[n] != s.fingerprint and n not in may_differ
        ]
        added = [s.name for s in self.flow.recorded if s.name not in recorded and s.name not in may_differ]
        dropped = [n for n in recorded if n not in stages and n not in may_differ]
        if changed:
            first = changed[0]
            raise FlowError(
                f"stage {first} was recorded with fingerprint {recorded[first]} and is now {stages[first].fingerprint}: "
                f"its code, settings or inputs changed"
                f"{' (and so did ' + ', '.join(changed[1:]) + ')' if changed[1:] else ''}. Go back to the recorded code; "
                "or, if it computes the same, give the stage the version= it had; or branch(); or use a new store"
            )
        if added or dropped:
            raise FlowError(
                f"the store was written by another flow: stages added {added or 'none'}, dropped {dropped or 'none'}. "
                "Use the recorded flow, or branch() with add= and drop=, or a new store"
            )

    def _check_sources(self, manifest: Manifest) -> None:
        """A source's fingerprint is one that a line of this lineage gives it; otherwise its columns changed."""
        line = self._node.lines.line(self._branch())
        salts = ["" if o.id == MAIN_LINE else o.id for o in self._node.lines.refs.lineage(line.id)]
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        known = [source_fingerprints(self._declared, self._parse_ddl, salt=salt) for salt in salts]
        for stage in self.flow.sources:
            fingerprint = recorded.get(stage.name)
            if fingerprint is not None and all(of[stage.name] != fingerprint for of in known):
                raise FlowError(
                    f"stage {stage.name} was recorded with fingerprint {fingerprint} and is now {stage.fingerprint}: "
                    "the columns of the source changed"
                )

    def _check_levels(self) -> None:
        for source in self._declared.sources:
            lossy = [s.name for s in self.flow.recorded if not s.level and source.name in self.flow.ancestors(s.name)]
            if source.at_safe_point != KEEP and lossy:
                raise FlowError(
                    f"source {source.name}: at_safe_point={source.at_safe_point!r}, and stage {lossy[0]} has persist='memory': "
                    "what is lost of it could not be computed again; persist it on disk, or keep the source"
                )
        for stage in self.flow.stages.values():
            if stage.level > max(DISK, self._node.replicas):
                kept = (
                    "is embedded, without peers" if self._node.replicas == 1 else f"keeps {self._node.replicas} copies"
                )
                raise FlowError(
                    f"stage {stage.name}: persist={show_level(stage.level)!r} needs {stage.level} nodes, and this store "
                    f"{kept}: use persist='disk', or run daemons with --replicas {stage.level} (docs/daemons.md)"
                )
