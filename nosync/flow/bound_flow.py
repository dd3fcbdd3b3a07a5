"""A dataflow resolved against schemas: what every task needs to know of each stage. Pure; no Spark, no data.

A *segment* is a set of stages that work on the same shard of the same rows, so they run in one task: a source, or the
stages of a keyed operator, and the stateless stages after it. Between segments rows move along *edges*: to the
shard of a key, or, after expressions that the JVM evaluates, within their shard.
"""

from __future__ import annotations

import functools
import graphlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from nosync.flow.dataflow import IN_JVM, LOOP, PART_SEPARATOR, SELECT, SOURCE, WHERE
from nosync.flow.event_time import INPUT_FIELD
from nosync.flow.persistence import NONE, Level
from nosync.flow.stage_options import NO_OPTIONS, ExpressionOptions, JvmOptions, StageOptions, UpdateOptions
from nosync.kernels.aggregates import Plan
from nosync.kernels.windows import Window
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN

ARRANGE, WATERMARK, LATE, DISTINCT = "arrange", "watermark", "late", "distinct"
"""Kinds of the stages that joins, windows and dedupe are made of; the others are those of nosync.flow.dataflow."""

_SUBQUERY = re.compile(r"\bselect\b", re.IGNORECASE)
Options = TypeVar("Options", bound=StageOptions)


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
    options: StageOptions = field(default=NO_OPTIONS, repr=False)
    """What its kind needs to know beside (see `stage_options`)."""
    edge_key: tuple[str, ...] = ()
    """The key of the edges that its input comes by: the hash of these columns says to which shard a row goes. It is empty if
    the rows stay in their shard.
    """
    bootstrap_at: int | None = None
    """The first epoch of the branch on which its code changed, if it then takes all rows of its inputs that are there,
    because such as came before may be taken back. What it holds from then on is what this code makes of them. Its layer
    of that epoch leads there from what the stage held before.
    """

    loop: str | None = None
    """The loop that it is a part of; of the loop's variable its own name."""
    placed_by: tuple[str, ...] = ()
    """By the hash of what its rows are in their shards: names of columns, and of a source also `=` and an expression
    over its columns; with `?` and a condition at the end only rows that fulfil it, others by all of their columns.
    Empty: by something else.
    """
    origins: tuple[str, ...] = ()
    """The inputs, each with a watermark of its own, that its rows came by; each row says which (see `event_time`).
    Empty: there is only one, or no window after it wants to know.
    """

    @property
    def is_placed_by_columns(self) -> bool:
        """Of a source: by columns that it has, by all where `placed_by` is empty, and not by an expression."""
        return {*self.placed_by} <= {*self.schema.names}

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
    def ttl(self) -> int | None:
        """The epochs without changes after which an update deletes a key; None for all other stages."""
        return self.options.ttl if isinstance(self.options, UpdateOptions) else None

    def options_as(self, kind: type[Options]) -> Options:
        """The options of a stage that is known to be of the kind that has such."""
        assert isinstance(self.options, kind), f"stage {self.name}, a {self.kind}, has no {kind.__name__}"
        return self.options

    @property
    def rows_schema(self) -> pa.Schema:
        """What its consumers are given: its output, and the change type where its rows can change."""
        if self.changing:
            return pa.schema([*self.output, pa.field(CHANGE_TYPE_COLUMN, pa.string())])
        return self.output

    @property
    def carried(self) -> pa.Schema:
        """What goes from stage to stage: as `rows_schema`, and by which input each row came where that is known."""
        return pa.schema([*self.rows_schema, INPUT_FIELD]) if self.origins else self.rows_schema


@dataclass(frozen=True)
class SegmentOutput:
    """Rows that leave a segment: those of a stage, expanded to windows where the consumer is a window."""

    stage: str
    window: Window | None = None
    whole: bool = False
    """All rows that are there after the epoch, as insertions, and not what changed in it."""


@dataclass(frozen=True)
class InputEdge:
    """Rows that enter a segment."""

    input: str
    """The stage whose rows these are."""
    output: SegmentOutput
    """What leaves the segment that they come from."""
    jvm: tuple[str, ...] = ()
    """Stages whose expressions the JVM evaluates on the way, in order."""
    key: tuple[str, ...] = ()
    """The columns whose hash says to which shard each row goes; empty: it stays in its shard."""


@dataclass(frozen=True)
class Segment:
    """Stages that run in one task, in topological order, and the edges that their input comes by."""

    name: str
    stages: tuple[str, ...]
    edges: tuple[InputEdge, ...] = ()
    fused: bool = False
    """All that comes to it is from sources in it: the JVM sends their rows, and beside them what it makes of them for the
    edges.
    """


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

    @property
    def sums(self) -> dict[str, tuple[str, ...]]:
        """By stage, the columns whose values may be added up over its keys: counts and sums."""
        return {
            stage.name: stage.plan.sums for stage in self.stages.values() if stage.plan is not None and stage.plan.sums
        }

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

    def begins_anew_at(self, t: int) -> bool:
        """Whether stages begin anew with an epoch."""
        return any(stage.bootstrap_at == t for stage in self.stages.values())

    def at_epoch(self, t: int) -> BoundFlow:
        """The flow as it runs at an epoch: stages that begin anew with it are fed all rows that are there."""
        if not self.begins_anew_at(t):
            return self
        return replace(self, segments={name: self._fed_anew(s, t) for name, s in self.segments.items()})

    def _fed_anew(self, segment: Segment, t: int) -> Segment:
        anew = {stage.name for stage in self.stages.values() if stage.bootstrap_at == t}
        edges = []
        for edge in segment.edges:
            whole = self.takes_whole(segment, edge, anew)
            assert len(whole) == 1, f"what takes {edge.input} in {segment.name} begins anew together"
            edges.append(replace(edge, output=replace(edge.output, whole=whole == {True})))
        return replace(segment, edges=tuple(edges))

    def takes_whole(self, segment: Segment, edge: InputEdge, anew: Collection[str]) -> set[bool]:
        """Whether what takes an edge is to have all rows that are there, if the stages `anew` begin anew; both, if a
        part is.
        """
        takers = [name for name in segment.stages if edge.input in self.stages[name].inputs]
        return {whole for name in takers for whole in self._is_whole(name, anew)}

    def _is_whole(self, name: str, anew: Collection[str]) -> set[bool]:
        """Of a stage that is not recorded: whether what takes its rows is to have all of them."""
        if self.stages[name].recorded:
            return {name in anew}
        takers = [stage.name for stage in self.stages.values() if name in stage.inputs]
        return {whole for taker in takers for whole in self._is_whole(taker, anew)}

    def loop_of(self, segment: Segment) -> str | None:
        return self.stages[segment.name].loop

    def loops_back(self, segment: Segment, edge: InputEdge) -> bool:
        """Whether the edge brings the rows of the round before to the loop's variable."""
        loop = self.loop_of(segment)
        return loop == segment.name and edge.output.stage == self.loops[loop].result

    def segment_of(self, stage: str) -> Segment:
        """The segment that computes a stage; KeyError for one that only the JVM computes."""
        return next(s for s in self.segments.values() if stage in s.stages)

    def outputs(self, segment: Segment, loop: str | None = None) -> list[SegmentOutput]:
        """What other segments take from this one, in a fixed order: those of a loop, or those outside of all loops."""
        takers = [s for s in self.segments.values() if self.loop_of(s) == loop and not s.fused]
        wanted = [edge.output for s in takers for edge in s.edges if not self.loops_back(s, edge)]
        return list(dict.fromkeys(e for e in wanted if e.stage in segment.stages))

    def needed_for(self, segment: Segment, stage: str) -> tuple[str, ...]:
        """The stages of the segment that a stage is computed from, and itself, in order."""
        needed = {stage}
        for name in reversed(segment.stages):
            if name in needed and self.stages[name].kind != LOOP:
                needed.update(self.stages[name].inputs)
            if name in needed and self.stages[name].window is not None:
                needed.add(part_of(name, WATERMARK))  # of the epoch before, which may run in the same task
        return tuple(name for name in segment.stages if name in needed)

    def changes_from(self, stage: str) -> list[BoundStage]:
        """The recorded stages whose changes at an epoch give those of `stage`: itself, or what it is computed from."""
        bound = self.stages[stage]
        if bound.recorded:
            return [bound]
        return [found for name in bound.inputs for found in self.changes_from(name)]

    # --- fusing ---------------------------------------------------------------------------------------------------------

    @property
    def placed(self) -> BoundFlow:
        """The same flow, in which sources of which no stage takes rows by key as they are go where that lets them be
        fused.

        Only for epochs to come: what is recorded stays where it is.
        """
        flow = self
        for taker in self.segments.values():
            from_sources = [edge for edge in taker.edges if not self._stays_in_shard(edge)]
            keys = {edge.output.stage: self._key_at_source(edge) for edge in from_sources}
            if keys and all(key and flow.stages[name].placed_by in ((), key) for name, key in keys.items()):
                there = {name: replace(flow.stages[name], placed_by=key) for name, key in keys.items()}
                candidate = replace(flow, stages={**flow.stages, **there})
                if any(segment.fused and taker.name in segment.stages for segment in candidate.fused.segments.values()):
                    flow = candidate
        return flow

    @functools.cached_property
    def fused(self) -> BoundFlow:
        """The same stages in fewer tasks, for epochs whose inputs are given.

        What expressions make of a source's rows can be sent to the task of a keyed stage together with the rows
        themselves, where both are in the shards of the same key. Then one task records the source and computes the
        keyed stage, and rows are shuffled once; and so does the next keyed stage in it, if its rows are in those shards
        too. Recorded inputs, which the JVM does not see before a task has read them, take the longer way.
        """
        if self.loops:
            return self
        eager = self._fused(eager=True)
        # A segment runs once for each of its exits.
        if all(len(eager.outputs(segment)) <= 1 for segment in eager.segments.values() if segment.fused):
            return eager
        return self._fused(eager=False)

    def _fused(self, *, eager: bool) -> BoundFlow:
        """`eager`: with segments of several exits, on the chance that what takes those rows becomes part of them."""
        segments = dict(self.segments)
        for taker in self.segments.values():
            homes = self._homes_of(taker, segments)
            if homes and (eager or self._exits([*homes, taker], segments) <= 1):
                for segment in (*homes, taker):
                    del segments[segment.name]
                stages = tuple(name for home in homes for name in home.stages) + taker.stages
                brought = (edge for home in homes for edge in home.edges)
                edges = (*brought, *(edge for edge in taker.edges if not self._stays_in_shard(edge)))
                segments[homes[0].name] = Segment(homes[0].name, stages, edges, fused=True)
        return replace(self, segments=_in_order(segments))

    def _homes_of(self, taker: Segment, segments: Mapping[str, Segment]) -> list[Segment]:
        """The segments from which alone a segment is fed, if it can be one with them: those of sources, and fused ones."""
        if any(edge.output.whole for edge in taker.edges):
            return []  # what is there is not among the rows that are given
        homes: dict[str, Segment] = {}
        expressed = set[str]()
        for edge in taker.edges:
            name = edge.output.stage
            home = next(segment for segment in segments.values() if name in segment.stages)
            if home.edges and not home.fused:
                return []
            if not self._stays_in_shard(edge):
                key = self._key_at_source(edge)
                # What expressions make of a source's rows is sent for one edge only.
                if not key or key != self.stages[name].placed_by or name in expressed:
                    return []
                expressed.add(name)
            homes[home.name] = home
        if expressed.intersection(edge.output.stage for home in homes.values() for edge in home.edges):
            return []
        return list(homes.values())

    @staticmethod
    def _exits(together: Sequence[Segment], segments: Mapping[str, Segment]) -> int:
        """How many emissions others would take from these segments, were they one."""
        inside = {name for segment in together for name in segment.stages}
        others = [s for s in segments.values() if s not in together and not s.fused]
        return len({edge.output for s in others for edge in s.edges if edge.output.stage in inside})

    def _stays_in_shard(self, edge: InputEdge) -> bool:
        """Whether the rows of a keyed edge are in the shards of its key already, and no expression comes in between."""
        home = self.stages[edge.output.stage]
        return not edge.jvm and edge.output.window is None and bool(edge.key) and home.placed_by == edge.key

    def _key_at_source(self, edge: InputEdge) -> tuple[str, ...]:
        """The columns of a source that an edge's key is, where expressions that can be put together as one text pass
        them on.
        """
        if self.stages[edge.output.stage].kind != SOURCE or edge.output.window is not None:
            return ()
        if not all(_is_text(self.stages[name]) for name in edge.jvm):
            return ()
        kept = kept_through(self.stages, edge)
        if kept.keys() >= {*edge.key}:
            return tuple(kept[column] for column in edge.key)
        computed = computed_through(self.stages, edge)
        if not {*kept, *computed} >= {*edge.key}:
            return ()
        conditions = conditions_of(self.stages, edge)
        key = (kept[column] if column in kept else f"={computed[column]}" for column in edge.key)
        return (*key, f"?{all_hold(conditions)}") if conditions else tuple(key)


def _in_order(segments: Mapping[str, Segment]) -> dict[str, Segment]:
    """Each after those that feed it."""
    home_of = {name: segment.name for segment in segments.values() for name in segment.stages}
    before = {
        s.name: [home_of[f.output.stage] for f in s.edges if home_of[f.output.stage] != s.name]
        for s in segments.values()
    }
    return {name: segments[name] for name in graphlib.TopologicalSorter(before).static_order()}


def _is_text(stage: BoundStage) -> bool:
    """Whether a stage's expressions can be a part of one SQL text: it is no join with a table, and has no Column objects and
    no subqueries.
    """
    texts = stage.options.texts if isinstance(stage.options, ExpressionOptions) else None
    return texts is not None and not any(map(_SUBQUERY.search, texts))


def computed_through(stages: Mapping[str, BoundStage], edge: InputEdge) -> dict[str, str]:
    """By column of an edge that one expression over the columns of its source makes, that expression.

    Not where a condition comes after it: it might fail on rows of which, the longer way, Spark would ask the condition
    first.
    """
    *before, last = (stages[name] for name in edge.jvm)
    if last.kind != SELECT or any(stage.kind == SELECT or not stage.options_as(JvmOptions).plain for stage in before):
        return {}
    return dict(last.options_as(JvmOptions).computed)


def conditions_of(stages: Mapping[str, BoundStage], edge: InputEdge) -> list[str] | None:
    """What an edge's rows must fulfil, said of columns of the source. None where that is said of columns that a select
    returns.
    """
    of_jvm = [stages[name] for name in edge.jvm]
    at_source = list(itertools.takewhile(lambda stage: stage.kind == WHERE, of_jvm))
    if any(stage.kind == WHERE for stage in of_jvm[len(at_source) :]):
        return None
    return [stage.options_as(ExpressionOptions).expressions[0] for stage in at_source]


def all_hold(conditions: Sequence[str]) -> str:
    """A later condition is not asked of rows that an earlier one does not let pass: it may fail on them."""
    if not conditions:
        return "TRUE"
    first = f"coalesce(({conditions[0]}\n), FALSE)"
    return f"IF({first}, {all_hold(conditions[1:])}, FALSE)" if len(conditions) > 1 else first


def kept_through(stages: Mapping[str, BoundStage], edge: InputEdge) -> dict[str, str]:
    """By column of an edge, the column that it is of the stage that the edge comes from, if no expression made it."""
    names = {name: name for name in stages[edge.output.stage].output.names}
    for stage in edge.jvm:
        kept = stages[stage].options_as(JvmOptions).kept
        names = {name: names[of] for name, of in kept.items() if of in names}
    return names


Evaluate = Callable[[BoundStage, pa.Table, Sequence[str]], pa.Table]
"""Evaluates a stage of expressions over rows; the named columns are kept beside its output."""


@dataclass(frozen=True)
class Step:
    """One epoch to run: by stage, the shards to compute. `needs_input`: sources whose rows must be given again."""

    t: int
    compute: Mapping[str, frozenset[int]]
    needs_input: frozenset[str]
