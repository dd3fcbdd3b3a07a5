"""A dataflow that is bound: its stages with schemas and fingerprints, and the segments that they run in. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from nosync.flow.bound_stage import WATERMARK, BoundStage, InputEdge, Segment, SegmentOutput, part_of
from nosync.flow.fusion import fused_segments, placed_stages
from nosync.flow.kinds import LOOP


@dataclass(frozen=True)
class Loop:
    """A loop of a flow."""

    name: str
    """The stage that is the loop's variable."""
    result: str
    """The stage whose rows go back to the variable."""
    growing: bool
    """Says whether nothing that enters the loop can be taken back."""
    max_rounds: int
    """After how many rounds a loop that is not done is an error."""


@dataclass(frozen=True)
class BoundFlow:
    """A dataflow that is ready to run."""

    name: str
    key_groups: int
    stages: dict[str, BoundStage]
    segments: dict[str, Segment]
    loops: dict[str, Loop] = field(default_factory=dict)

    @property
    def sources(self) -> list[BoundStage]:
        return [stage for stage in self.stages.values() if not stage.inputs]

    @property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """Returns, by source, the columns that say to which shard its rows go."""
        return {stage.name: stage.placed_by for stage in self.sources}

    @property
    def recorded(self) -> list[BoundStage]:
        """Returns the stages that have a layer at every epoch."""
        return [stage for stage in self.stages.values() if stage.recorded and not stage.of_rounds]

    @property
    def sums(self) -> dict[str, tuple[str, ...]]:
        """Returns, by stage, the columns whose values may be added up over its keys: counts and sums."""
        return {
            stage.name: stage.plan.sums for stage in self.stages.values() if stage.plan is not None and stage.plan.sums
        }

    def ancestors(self, name: str) -> set[str]:
        """Returns the names of all stages that a stage is computed from."""
        found: set[str] = set()
        left = [name]
        while left:
            fresh = set(self.stages[left.pop()].inputs) - found
            found |= fresh
            left += fresh
        return found

    def in_loop(self, name: str) -> list[BoundStage]:
        """Returns the variable and the stages of a loop that are recorded in its rounds, in order."""
        return [stage for stage in self.stages.values() if stage.loop == name and stage.recorded]

    def bootstraps_at(self, t: int) -> bool:
        """Returns whether stages begin anew with an epoch."""
        return any(stage.bootstrap_at == t for stage in self.stages.values())

    def at_epoch(self, t: int) -> BoundFlow:
        """Returns the flow as it runs at an epoch: stages that begin anew with it are fed all rows that are there."""
        if not self.bootstraps_at(t):
            return self
        return replace(self, segments={name: self._bootstrapped(s, t) for name, s in self.segments.items()})

    def _bootstrapped(self, segment: Segment, t: int) -> Segment:
        """Returns the segment, where edges to stages that begin anew with an epoch bring all rows."""
        bootstrapped = {stage.name for stage in self.stages.values() if stage.bootstrap_at == t}
        edges = []
        for edge in segment.edges:
            whole = self.takes_whole(segment, edge, bootstrapped)
            assert len(whole) == 1, f"what takes {edge.input} in {segment.name} begins anew together"
            edges.append(replace(edge, output=replace(edge.output, whole=whole == {True})))
        return replace(segment, edges=tuple(edges))

    def takes_whole(self, segment: Segment, edge: InputEdge, bootstrapped: Collection[str]) -> set[bool]:
        """Returns whether the stages that take an edge are to have all rows that are there, if the stages
        `bootstrapped` begin anew. Both answers are in it if only some of them are. Inside of a loop rows go from round
        to round.
        """
        if self.stages[edge.input].loop is not None and self.stages[edge.input].loop == self.loop_of(segment):
            return {False}
        takers = [name for name in segment.stages if edge.input in self.stages[name].inputs]
        return {whole for name in takers for whole in self._is_whole(name, bootstrapped)}

    def _is_whole(self, name: str, bootstrapped: Collection[str]) -> set[bool]:
        """Returns whether a stage is to have all rows. One that is not recorded passes on what those that take its rows
        are to have.
        """
        if self.stages[name].recorded:
            return {name in bootstrapped}
        takers = [stage.name for stage in self.stages.values() if name in stage.inputs]
        return {whole for taker in takers for whole in self._is_whole(taker, bootstrapped)}

    def loop_of(self, segment: Segment) -> str | None:
        """Returns the loop whose rounds a segment runs in, if it is inside of one."""
        return self.stages[segment.name].loop

    def loops_back(self, segment: Segment, edge: InputEdge) -> bool:
        """Returns whether the edge brings the rows of the round before to the loop's variable."""
        loop = self.loop_of(segment)
        return loop == segment.name and edge.output.stage == self.loops[loop].result

    def segment_of(self, stage: str) -> Segment:
        """Returns the segment that computes a stage. There is none for a stage that only the JVM computes."""
        return next(s for s in self.segments.values() if stage in s.stages)

    def outputs(self, segment: Segment, loop: str | None = None) -> list[SegmentOutput]:
        """Returns the outputs that other segments take from this one, in a fixed order. Those segments are in `loop`,
        or outside of all loops.
        """
        takers = [s for s in self.segments.values() if self.loop_of(s) == loop and not s.fused]
        wanted = [edge.output for s in takers for edge in s.edges if not self.loops_back(s, edge)]
        return list(dict.fromkeys(e for e in wanted if e.stage in segment.stages))

    def needed_for(self, segment: Segment, stage: str) -> tuple[str, ...]:
        """Returns the stages of the segment that a stage is computed from, and itself, in order."""
        needed = {stage}
        for name in reversed(segment.stages):
            if name in needed and self.stages[name].kind != LOOP:
                needed.update(self.stages[name].inputs)
            if name in needed:
                needed.update(self.stages[name].beside)
            if name in needed and self.stages[name].window is not None:
                needed.add(part_of(name, WATERMARK))  # of the epoch before, which may run in the same task
        return tuple(name for name in segment.stages if name in needed)

    def changes_from(self, stage: str) -> list[BoundStage]:
        """Returns the recorded stages whose changes at an epoch give those of `stage`: itself, or what it is computed
        from.
        """
        bound = self.stages[stage]
        if bound.recorded:
            return [bound]
        return [found for name in bound.inputs for found in self.changes_from(name)]

    @property
    def placed(self) -> BoundFlow:
        """Returns the same flow, in which the rows of some sources go where that lets those sources be fused.

        It is only for epochs to come: what is recorded stays where it is.
        """
        return self if self.loops else replace(self, stages=placed_stages(self.stages, self.segments))

    @functools.cached_property
    def fused(self) -> BoundFlow:
        """Returns the same stages in fewer tasks, for epochs whose inputs are given (see `fusion`)."""
        return self if self.loops else replace(self, segments=fused_segments(self.stages, self.segments))


@dataclass(frozen=True)
class Step:
    """One epoch to run."""

    t: int
    compute: Mapping[str, frozenset[int]]
    """The shards to compute, by stage."""
    needs_input: frozenset[str]
    """The sources whose rows must be given again."""
