"""A dataflow resolved against schemas: what every task needs to know of each stage. Pure; no Spark, no data.

A *segment* is a set of stages that work on the same shard of the same rows, so they run in one task: a source, or the
stages of a keyed operator, and the stateless stages after it. Between segments rows move along *feeds*: to the
shard of a key, or, after expressions that the JVM evaluates, within their shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nosync.aggregates import Plan
from nosync.dataflow import IN_JVM, LOOP, PART_SEPARATOR
from nosync.levels import NONE, Level
from nosync.lsm.columns import CHANGE_TYPE_COLUMN
from nosync.windows import Window

ARRANGE, WATERMARK, LATE, DISTINCT = "arrange", "watermark", "late", "distinct"
"""Kinds of the stages that joins, windows and dedupe are made of; the others are those of nosync.dataflow."""


def part_of(stage: str, part: str) -> str:
    """A part of an operator, such as the watermark of a window, given the operator or any of its parts."""
    return stage.partition(PART_SEPARATOR)[0] + PART_SEPARATOR + part


@dataclass(frozen=True)
class BoundStage:
    """A stage with its schemas and fingerprint."""

    name: str
    kind: str
    fingerprint: str
    inputs: tuple[str, ...]
    key: tuple[str, ...]
    """What its layers are sorted and looked up by; empty: a log."""
    function: Callable[..., object] | None = field(repr=False)
    schema: pa.Schema
    """The columns that its layers hold."""
    output: pa.Schema
    """The columns that consumers and readers see: without internal ones."""
    changing: bool
    """Whether its output rows can be updated or deleted later (then they carry `_change_type`)."""
    level: Level
    plan: Plan | None = None
    window: Window | None = None
    deterministic: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    loop: str | None = None
    """The loop that it is a part of; of the loop's variable its own name."""
    placed_by: tuple[str, ...] = ()
    """The columns by whose hash its rows are in their shards; empty: by something else."""

    @property
    def of_rounds(self) -> bool:
        """Recorded in rounds only: derived from the loop's variable, and dropped with the rounds."""
        return self.loop is not None and not self.keyed

    @property
    def keyed(self) -> bool:
        return bool(self.key)

    @property
    def recorded(self) -> bool:
        return self.level != NONE

    @property
    def in_jvm(self) -> bool:
        return self.kind in IN_JVM

    @property
    def rows_schema(self) -> pa.Schema:
        """What its consumers are given: its output, and the change type where its rows can change."""
        if self.changing:
            return pa.schema([*self.output, pa.field(CHANGE_TYPE_COLUMN, pa.string())])
        return self.output


@dataclass(frozen=True)
class Emission:
    """Rows that leave a segment: those of a stage, expanded to windows where the consumer is a window."""

    stage: str
    window: Window | None = None


@dataclass(frozen=True)
class Feed:
    """Rows that enter a segment."""

    input: str
    """The stage whose rows these are."""
    emission: Emission
    """What leaves the segment that they come from."""
    jvm: tuple[str, ...] = ()
    """Stages whose expressions the JVM evaluates on the way, in order."""
    key: tuple[str, ...] = ()
    """The columns whose hash says to which shard each row goes; empty: it stays in its shard."""


@dataclass(frozen=True)
class Segment:
    """Stages that run in one task, in topological order, and the feeds that their input comes by."""

    name: str
    stages: tuple[str, ...]
    feeds: tuple[Feed, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A loop: its variable, the stage whose rows go back to it, and how long it may take."""

    name: str
    result: str
    growing: bool
    """Nothing that enters the loop can be taken back."""
    max_rounds: int


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
        """By source, the columns that say to which shard its rows go."""
        return {stage.name: stage.placed_by for stage in self.sources}

    @property
    def recorded(self) -> list[BoundStage]:
        """The stages that have a layer at every epoch."""
        return [stage for stage in self.stages.values() if stage.recorded and not stage.of_rounds]

    def ancestors(self, name: str) -> set[str]:
        """All that a stage is computed from."""
        found: set[str] = set()
        left = [name]
        while left:
            fresh = set(self.stages[left.pop()].inputs) - found
            found |= fresh
            left += fresh
        return found

    def in_loop(self, name: str) -> list[BoundStage]:
        """The variable and the stages of a loop that are recorded in its rounds, in order."""
        return [stage for stage in self.stages.values() if stage.loop == name and stage.recorded]

    def loop_of(self, segment: Segment) -> str | None:
        return self.stages[segment.name].loop

    def feeds_back(self, segment: Segment, feed: Feed) -> bool:
        """Whether the feed brings the rows of the round before to the loop's variable."""
        loop = self.loop_of(segment)
        return loop == segment.name and feed.emission.stage == self.loops[loop].result

    def segment_of(self, stage: str) -> Segment:
        """The segment that computes a stage; KeyError for one that only the JVM computes."""
        return next(s for s in self.segments.values() if stage in s.stages)

    def emissions(self, segment: Segment, loop: str | None = None) -> list[Emission]:
        """What other segments take from this one, in a fixed order: those of a loop, or those outside of all loops."""
        takers = [s for s in self.segments.values() if self.loop_of(s) == loop]
        wanted = [feed.emission for s in takers for feed in s.feeds if not self.feeds_back(s, feed)]
        return list(dict.fromkeys(e for e in wanted if e.stage in segment.stages))

    def needed_for(self, segment: Segment, stage: str) -> tuple[str, ...]:
        """The stages of the segment that a stage is computed from, and itself, in order."""
        needed = {stage}
        for name in reversed(segment.stages):
            if name in needed and self.stages[name].kind != LOOP:
                needed.update(self.stages[name].inputs)
        return tuple(name for name in segment.stages if name in needed)

    def changes_from(self, stage: str) -> list[BoundStage]:
        """The recorded stages whose changes at an epoch give those of `stage`: itself, or what it is computed from."""
        bound = self.stages[stage]
        if bound.recorded:
            return [bound]
        return [found for name in bound.inputs for found in self.changes_from(name)]
