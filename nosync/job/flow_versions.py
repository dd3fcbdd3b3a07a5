"""A dataflow on one timeline of a store: bound as it goes on from here, and as it ran at each epoch before.

The same timeline goes on only with the same code, else old and new results would mix silently; what differs is named.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from nosync.flow.binder import Analyze, bind, source_fingerprints
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import declared_of
from nosync.flow.dataflow import Dataflow
from nosync.flow.persistence import DISK, show_level
from nosync.job.meanings import recorded_meanings
from nosync.job.position import Position
from nosync.lsm.errors import FlowError
from nosync.lsm.manifests.branches import MAIN, Refs
from nosync.lsm.manifests.manifest import KEEP, MAIN_TIMELINE, Manifest
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.api import StoreBackend

PLACED = "placed"
"""The key, in a manifest, of the columns of each source that say to which shard its rows went."""


class FlowVersions:
    """Binds a flow for each epoch of a timeline.

    Raises FlowError where the flow is not that of the timeline's last epoch, or asks for what the store does not keep.
    """

    def __init__(
        self,
        declared: Dataflow,
        node: StoreBackend,
        position: Position,
        parse_ddl: Callable[[str], pa.Schema],
        analyze: Analyze,
        *,
        check: bool = True,
    ) -> None:
        """With `check=False` the flow may be another one than that of the last epoch, as it is before an upgrade."""
        self.declared = declared
        """The flow as its author wrote it."""
        self._node, self._position = node, position
        self._parse_ddl, self._analyze = parse_ddl, analyze
        self._bound: dict[tuple[object, ...], BoundFlow] = {}
        timeline = node.timelines.timeline(self._position.branch)
        salt = "" if timeline.id == MAIN_TIMELINE else timeline.id
        last = self._position.last_sealed()
        self._meanings = recorded_meanings(None if last is None else self._position.manifest(last))
        self._begins, self._anew = node.timelines.refs.begins(timeline.id), node.timelines.refs.anew(timeline.id)
        self.flow: BoundFlow = self._where_placed_alike(self._bind(declared, salt=salt).placed)
        """The flow with the fingerprints of epochs that bring inputs of their own; `at` has those of others."""
        if check:
            self._check_code()
            self._check_levels()

    def at(self, t: int) -> BoundFlow:
        """Returns the flow as it ran, or will run, at an epoch: a branch shares the recorded inputs of its parent."""
        manifest = self.manifest(t)
        if manifest is None:
            return self.flow
        recorded = fingerprints_of(manifest)
        sources = {stage.name: recorded[stage.name] for stage in self.flow.sources if stage.name in recorded}
        placed = manifest.meta.get(PLACED)  # None: of an older version, which placed by keys that are asked directly
        at = (*sorted(sources.items()), json.dumps(placed, sort_keys=True))
        if at not in self._bound:
            self._bound[at] = self._where_placed_alike(self._bind(self.declared, sources=sources, placements=placed))
        return self._bound[at]

    def manifest(self, t: int) -> Manifest | None:
        """Returns what this timeline sealed at an epoch, or else the one that it came from."""
        return self._position.manifest(t) or self.parents_manifest(t)

    def bound(self, other: Dataflow, sources: Mapping[str, str], timeline: str | None = None) -> BoundFlow:
        """Returns another flow as it would be on a timeline (default: this one), from recorded sources of these
        fingerprints.
        """
        if timeline is None:
            return self._bind(other, sources=sources)
        refs = self._node.timelines.refs
        return self._bind(other, sources=sources, begins=refs.begins(timeline), bootstrap_at=refs.anew(timeline))

    def as_recorded(self, other: Dataflow, manifest: Manifest, stages: Collection[str]) -> BoundFlow:
        """Returns another flow where each stage has the fingerprint that it had in an epoch if its own code is the same.

        `stages` are those that it records.
        """
        refs = self._node.timelines.refs
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries if e.id.trace.stage in stages}
        begins, anew = refs.begins(manifest.timeline), refs.anew(manifest.timeline)
        sources = {stage.name: recorded[stage.name] for stage in other.sources if stage.name in recorded}
        return self._bind(other, sources=sources, pinned=recorded, begins=begins, bootstrap_at=anew)

    def _bind(self, flow: Dataflow, **how: Any) -> BoundFlow:
        on_this_line = {"begins": self._begins, "bootstrap_at": self._anew, "meanings": self._meanings}
        return bind(flow, self._parse_ddl, self._analyze, **{**on_this_line, **how})

    def _where_placed_alike(self, flow: BoundFlow) -> BoundFlow:
        """Returns the flow, which says of its sources whether all epochs before placed their rows as it does. Only stages
        that begin anew want to know.
        """
        if not self._anew:
            return flow
        alike = {
            name
            for name, columns in flow.placements.items()
            if all(by is not None and by.get(name, [*columns]) == [*columns] for by in self._placements_before)
        }
        stages = {name: replace(s, placed_alike=True) if name in alike else s for name, s in flow.stages.items()}
        return replace(flow, stages=stages)

    @functools.cached_property
    def _placements_before(self) -> list[Mapping[str, Any] | None]:
        """Returns how the epochs before placed the rows of sources; None where nobody knows. A timeline has the same stages
        from its first epoch to its last, so these two say it.
        """
        timelines, found = self._node.timelines, list[Mapping[str, Any] | None]()
        mine = timelines.timeline(self._position.branch).id
        for id, end in timelines.refs.left(mine).items():
            log = timelines.of_timeline(id)
            first, last = next(log.own(), None), log.last_own
            if first is None or last is None:
                found += [] if id == mine else [None]
                continue
            manifests = [log.get(t) for t in (first, last if end is None else min(last, end))]
            found += [None if manifest is None else manifest.meta.get(PLACED) for manifest in manifests]
        return found

    def parents_manifest(self, t: int) -> Manifest | None:
        """Returns what the parent sealed at an epoch after the fork; None once this timeline has its own inputs."""
        timeline = self._node.timelines.timeline(self._position.branch)
        if timeline.parent is None or self.has_own_inputs():
            return None
        return self._node.timelines.of_timeline(timeline.parent).get(Epoch(t))

    def has_own_inputs(self) -> bool:
        last = self._position.last_sealed()
        manifest = self._position.manifest(last) if last is not None else None
        own = {(stage.name, stage.fingerprint) for stage in self.flow.sources}
        return manifest is not None and any((e.id.trace.stage, e.id.trace.fingerprint) in own for e in manifest.entries)

    def _check_code(self) -> None:
        """Raises FlowError for other code than the timeline's: old and new results would mix silently."""
        last = self._position.last_sealed()
        manifest = self._position.manifest(last) if last is not None else None
        if manifest is None:
            return
        timeline = self._node.timelines.timeline(self._position.branch)
        may_differ = set(timeline.changed) if manifest.timeline != timeline.id else set()
        self._check_sources(manifest)
        if manifest.timeline == timeline.parent:
            self._check_is_other_code(manifest, may_differ)
        assert last is not None, "there is a manifest"
        stages = self.at(last).stages
        recorded = fingerprints_of(manifest)
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
                f"{' (and so did ' + ', '.join(changed[1:]) + ')' if changed[1:] else ''}. To go on with the new code "
                "from the next epoch: job.upgrade(flow), Job(..., upgrade=True) or `nosync upgrade`. If it computes the "
                "same, give the stage the version= it had; to see what it would have made of the past, branch()"
            )
        if added or dropped:
            raise FlowError(
                f"the store was written by another flow: stages added {added or 'none'}, dropped {dropped or 'none'}. "
                "Use the recorded flow; or go on with this one from the next epoch: job.upgrade(flow), "
                "Job(..., upgrade=True) or `nosync upgrade`"
            )

    def _check_is_other_code(self, manifest: Manifest, changed: Collection[str]) -> None:
        """Raises FlowError where a new timeline is said to have other code than its parent, and the flow has the parent's."""
        flow = bound_as_on(manifest, self.declared, self._node.timelines.refs, self._parse_ddl, self._analyze)
        before, new = flow.stages, {n for n in changed if n in flow.stages} - fingerprints_of(manifest).keys()
        recorded = fingerprints_of(manifest)
        sources = {source.name for source in self.flow.sources}
        both = {n for n in changed if n in recorded and n in before} - sources
        other = {declared_of(n) for n in both if before[n].fingerprint != recorded[n]}
        # A part of an operator may be the same, and begin anew with the others; and what follows one that is new.
        same = {n for n in both if declared_of(n) not in other and not flow.ancestors(n) & new}
        if same:
            raise FlowError(
                f"{self._position.branch} has other code after epoch {manifest.t} than before it, in stage {min(same)}, and this "
                "flow has the code before: give the flow that the branch, or the upgrade, was made with"
            )

    def _check_sources(self, manifest: Manifest) -> None:
        """Raises FlowError where no timeline of this lineage gives a source its fingerprint: its columns changed."""
        timeline = self._node.timelines.timeline(self._position.branch)
        salts = ["" if o.id == MAIN_TIMELINE else o.id for o in self._node.timelines.refs.lineage(timeline.id)]
        recorded = fingerprints_of(manifest)
        known = [source_fingerprints(self.declared, self._parse_ddl, self._meanings, salt=salt) for salt in salts]
        for stage in self.flow.sources:
            fingerprint = recorded.get(stage.name)
            if fingerprint is None or any(of[stage.name] == fingerprint for of in known):
                continue
            if manifest.timeline != timeline.id and stage.name in timeline.changed:
                continue  # an upgrade gave the source more columns
            advice = (
                "To go on with more columns from the next epoch: job.upgrade(flow), Job(..., upgrade=True) or `nosync upgrade`"
                if self._position.branch == MAIN
                else "An upgrade after that epoch added some: branch from the job of the code before it, Job(its flow, store, "
                "branch='before-upgrade-<epoch>')"
            )
            raise FlowError(
                f"stage {stage.name} was recorded with fingerprint {fingerprint} and is now {stage.fingerprint}: "
                f"the columns of the source changed. {advice}"
            )

    def _check_levels(self) -> None:
        for source in self.declared.sources:
            lossy = [s.name for s in self.flow.recorded if not s.level and source.name in self.flow.ancestors(s.name)]
            if source.at_safe_point != KEEP and lossy:
                raise FlowError(
                    f"source {source.name}: at_safe_point={source.at_safe_point!r}, and stage {lossy[0]} has persist='memory': "
                    "what is lost of it could not be computed again; persist it on disk, or keep the source"
                )
        if self.declared.asks_for_remote and not any(True for _ in self._node.remotes):
            raise FlowError(
                f"dataflow {self.declared.name} asks for copies in an object store, and the store is opened without: give "
                "nosync.open(..., remote=URL), or the daemon --remote URL (docs/remote.md); or use persist='disk'"
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


def fingerprints_of(manifest: Manifest) -> dict[str, str]:
    """Returns, by stage, with which fingerprint it was recorded."""
    return {entry.id.trace.stage: entry.id.trace.fingerprint for entry in manifest.entries}


def bound_as_on(
    manifest: Manifest, flow: Dataflow, refs: Refs, parse_ddl: Callable[[str], pa.Schema], analyze: Analyze
) -> BoundFlow:
    """Returns a flow as it is on the timeline of an epoch, from the sources that the epoch has."""
    recorded, timeline = fingerprints_of(manifest), manifest.timeline
    return bind(
        flow, parse_ddl, analyze, sources={one.name: recorded[one.name] for one in flow.sources if one.name in recorded},
        begins=refs.begins(timeline), bootstrap_at=refs.anew(timeline), meanings=recorded_meanings(manifest),
    )  # fmt: skip


def check_recorded_by(flow: BoundFlow, manifest: Manifest, stage: str) -> None:
    """Raises FlowError where a stage, or what it is computed from, has other code than what recorded an epoch. `flow`: as
    `bound_as_on` returns it.
    """
    recorded = fingerprints_of(manifest)
    for name in (stage, *flow.ancestors(stage)):
        if name in recorded and recorded[name] != flow.stages[name].fingerprint:
            raise FlowError(
                f"stage {name} was recorded with fingerprint {recorded[name]} at epoch {manifest.t} and is now "
                f"{flow.stages[name].fingerprint}: its code, settings or inputs changed. Give the flow that recorded it"
            )
