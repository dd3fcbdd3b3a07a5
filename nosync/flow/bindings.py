"""What is bound of a flow so far, and how stages, edges and segments are added to it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from nosync.flow.arguments import UpdateArguments, WindowArguments
from nosync.flow.bound_flow import Loop
from nosync.flow.bound_stage import (
    ARRANGE,
    FINAL,
    FIRST,
    INTERVAL_JOIN,
    LATE,
    OUTPUT,
    WATERMARK,
    BoundStage,
    InputEdge,
    Segment,
    SegmentOutput,
)
from nosync.flow.dataflow import Dataflow
from nosync.flow.event_time import INPUT_FIELD
from nosync.flow.fingerprint import fingerprint
from nosync.flow.internal_columns import is_ours
from nosync.flow.kinds import FORGET, IN_JVM, LOOP, PART_SEPARATOR, SOURCE, STATELESS, UPDATE
from nosync.flow.meanings import Meanings
from nosync.flow.persistence import MEMORY, NONE, Level, parse_level
from nosync.flow.stage import Stage
from nosync.flow.stage_options import NO_OPTIONS, StageOptions
from nosync.flow.window_inputs import WindowInputs
from nosync.kernels.aggregate_plan import Plan
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.windows import Window
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, is_internal, nullable, plain
from nosync.lsm.errors import FlowError, NosyncError, SchemaError

ParseDdl = Callable[[str], pa.Schema]


class Bindings:
    """The stages, segments and loops of a flow that are bound so far."""

    def __init__(
        self,
        flow: Dataflow,
        parse_ddl: ParseDdl,
        *,
        begins: Mapping[str, str],
        bootstrap_at: Mapping[str, int],
        meanings: Meanings,
        pinned: Mapping[str, str],
    ) -> None:
        """The arguments are those of `binder.bind`."""
        self._parse_ddl, self._begins, self._bootstrap_at = parse_ddl, begins, bootstrap_at
        self._meanings, self._pinned = meanings, pinned
        self.flow = flow
        self.stages: dict[str, BoundStage] = {}
        self.segments: dict[str, Segment] = {}
        self.loops: dict[str, Loop] = {}
        self.inputs = WindowInputs(flow, meanings.policies, self.stages)
        self.segment_of: dict[str, str] = {}
        """The names of the segments that stages are computed in. A stage that only the JVM computes has none."""

    # --- stages -------------------------------------------------------------------------------------------------------

    def stage(
        self,
        stage: Stage,
        schema: pa.Schema,
        *,
        changing: bool,
        key: tuple[str, ...] = (),
        edge_key: tuple[str, ...] = (),
        plan: Plan | None = None,
        window: Window | None = None,
        options: StageOptions = NO_OPTIONS,
        described: str = "",
        origins: tuple[str, ...] = (),
        forgets: bool = False,
    ) -> BoundStage:
        """Returns a bound stage, which is in no segment yet. `described` is what its fingerprint has of it beside its
        code. `forgets` says that its state is bounded, and that what is made of its rows stays when they expire.
        """
        code = stage.version if stage.version is not None else stage.function
        described += self._begun(stage, key)
        if forgets:
            described += " forgets"
        if origins:
            schema = pa.schema([*schema, INPUT_FIELD])
            described += f" by {origins}"
        fp = fingerprint(
            stage.kind,
            key or stage.key,
            code,
            stage.schema or "",
            {name: _aggregate_parts(a) for name, a in stage.aggregates.items()},
            [described, stage.arguments.expires_after],
            [self._pinned.get(name, self.stages[name].fingerprint) for name in stage.inputs],
        )
        return BoundStage(
            stage.name,
            stage.kind,
            fp,
            stage.inputs,
            key,
            stage.function,
            schema,
            visible(schema),
            changing,
            self._level(stage),
            plan,
            window,
            stage.deterministic,
            options,
            edge_key,
            bootstrap_at=self._bootstrap_at.get(stage.name),
            loop=stage.name if stage.kind == LOOP else stage.loop,
            placed_by=edge_key,
            origins=origins,
            expires=forgets or self._passes_expiries(stage),
            unnamed=stage.kind in (SOURCE, OUTPUT) and stage.name in self._meanings.unnamed,
        )

    def named(self, stage: str) -> str:
        """Returns what a fingerprint has of the name of a source, or of an output of a function."""
        return "" if stage in self._meanings.unnamed else f" named {stage}"

    def watched(self, stage: Stage, watermark: BoundStage) -> str:
        """Returns what a fingerprint of late rows has of the watermark of several inputs, which says what is late."""
        return "" if self.is_late_by_side(stage) else f" by {self._pinned.get(watermark.name, watermark.fingerprint)}"

    def is_late_by_side(self, stage: Stage) -> bool:
        """Returns whether fingerprints of a join's late rows are without the other side."""
        return stage.name in self._meanings.late_by_side

    def _begun(self, stage: Stage, key: tuple[str, ...]) -> str:
        """Returns what a fingerprint has of where a stage begins, if that is not with the first epoch."""
        keeps_state = (
            bool(key)
            or stage.kind in (WATERMARK, LATE, FINAL, FIRST, INTERVAL_JOIN, OUTPUT)
            or stage.name in self._bootstrap_at
        )
        text = f" from {self._begins[stage.name]}" if stage.name in self._begins and keeps_state else ""
        if stage.kind == UPDATE and stage.name in self._bootstrap_at:
            text += " anew"  # a version before let it begin without a state, on a branch with the same code
        return text

    def forgets(self, stage: Stage) -> bool:
        """Returns whether rows of a stage whose state is bounded are forgotten when they expire, and not taken back."""
        said = stage.arguments.expiry if isinstance(stage.arguments, UpdateArguments | WindowArguments) else None
        return said == FORGET if said is not None else stage.name not in self._meanings.taken_back

    def is_lenient(self, stage: Stage, window: Window) -> bool:
        """Returns whether rows of a window are late by the watermark of the epoch before."""
        return window.delay_us is not None and stage.name not in self._meanings.strict

    def _passes_expiries(self, stage: Stage) -> bool:
        """Returns whether rows of a stage expire with those of its inputs. Raises FlowError for a loop."""
        expiring = next((name for name in stage.inputs if self.stages[name].expires), None)
        if expiring is not None and (stage.loop is not None or stage.kind == LOOP):
            raise FlowError(
                f"stage {stage.name}: {expiring} forgets rows (ttl=, keep=), and a loop takes back what it derived from "
                'rows that go: say expiry="retract" where they are forgotten'
            )
        return expiring is not None and stage.kind in (*STATELESS, ARRANGE)

    def part(self, stage: Stage, part: str, kind: str, input: str) -> Stage:
        """Returns the declaration of a part of an operator, which is a stage of its own."""
        name = f"{stage.name}{PART_SEPARATOR}{part}"
        return Stage(self.flow, name, kind, (input,), persist=stage.persist, loop=stage.loop)

    def parse(self, stage: Stage) -> pa.Schema:
        """Returns the columns that a stage's DDL declares. What is inside of a column may be null, also where the DDL says
        NOT NULL: a null struct has null in all of its fields.
        """
        return pa.schema([field.with_type(nullable(field.type)) for field in self.declared(stage)])

    def declared(self, stage: Stage) -> pa.Schema:
        """Returns the columns just as a stage's DDL says them."""
        try:
            schema = self._parse_ddl(stage.schema or "")
        except NosyncError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the parser raises, the user's schema is at fault
            reason = str(error).strip().splitlines()[0]
            raise SchemaError(f"stage {stage.name}: cannot read the schema {stage.schema!r}: {reason}") from None
        for name in schema.names:
            if is_ours(name) or name in stage.key:
                raise SchemaError(
                    f"stage {stage.name}: column {name!r} of its schema is a key column, or a name that nosync uses "
                    "itself"
                )
        return plain(schema.empty_table()).schema

    def recorded(self, name: str) -> BoundStage:
        """Returns the stage, recorded from now on: what takes its rows has to see them leave a task."""
        stage = self.stages[name]
        if not stage.recorded and stage.in_jvm:
            stage = replace(stage, level=MEMORY)
            self.add_evaluated(stage)
        return stage

    def is_taken(self, name: str) -> bool:
        """Returns whether any stage takes the rows of this one."""
        return bool(self.flow.consumers(name)) or any(loop.result == name for loop in self.loops.values())

    def _level(self, stage: Stage) -> Level:
        if stage.persist is not None:
            return parse_level(stage.persist, f"stage {stage.name}")
        if stage.kind in IN_JVM:
            return NONE if self.flow.consumers(stage.name) or stage.loop else MEMORY
        if stage.kind in STATELESS and stage.deterministic:
            return MEMORY
        return parse_level(self.flow.persist, f"dataflow {self.flow.name}")

    # --- segments -----------------------------------------------------------------------------------------------------

    def edge(self, name: str, key: tuple[str, ...] = ()) -> InputEdge:
        """Returns the edge that brings a stage's rows, from the segment that they leave by way of expressions in the
        JVM.
        """
        jvm: list[str] = []
        origin = name
        while origin not in self.segment_of:
            jvm.insert(0, origin)
            origin = self.stages[origin].inputs[0]
        return InputEdge(name, SegmentOutput(origin), tuple(jvm), key)

    def add_segment(self, stage: BoundStage, edges: Sequence[InputEdge] = ()) -> None:
        """Adds a stage, as the first one of a segment."""
        self.stages[stage.name] = stage
        self.segments[stage.name] = Segment(stage.name, (stage.name,), tuple(edges))
        self.segment_of[stage.name] = stage.name

    def add_evaluated(self, stage: BoundStage) -> None:
        """Adds a stage that the JVM evaluates and a segment records."""
        edge = self.edge(stage.inputs[0])
        self.add_segment(stage, [replace(edge, jvm=(*edge.jvm, stage.name))])

    def add_beside(self, stage: BoundStage, member: str) -> None:
        """Adds a stage to the segment of another one."""
        self.stages[stage.name] = stage
        home = self.segment_of[stage.name] = self.segment_of[member]
        segment = self.segments[home]
        self.segments[home] = replace(segment, stages=(*segment.stages, stage.name))

    def add_after(self, stage: BoundStage, name: str) -> None:
        """Adds a stage that takes the rows of another one in the shards where they are."""
        if name in self.segment_of:
            self.add_beside(stage, name)
        else:
            self.add_segment(stage, [self.edge(name)])


def visible(schema: pa.Schema) -> pa.Schema:
    """Returns the columns that consumers and readers see."""
    return pa.schema([f for f in schema if not is_internal(f.name) and f.name != CHANGE_TYPE_COLUMN])


def change_fields(rows: pa.Schema) -> list[pa.Field]:
    """Returns the column of the change type, if rows have it."""
    return [f for f in rows if f.name == CHANGE_TYPE_COLUMN]


def _aggregate_parts(aggregate: Aggregate) -> tuple[Any, ...]:
    parts = (aggregate.function, aggregate.column, aggregate.by, aggregate.limit)
    return parts if parts[2:] != (None, None) else parts[:2]


def on_no_rows(stage: Stage, given: pa.Schema) -> pa.Table:
    """Returns what the function of a map, or of a stage like it, makes of an empty table."""
    assert stage.function is not None, "it has a function"
    try:
        result = stage.function(given.empty_table())
    except Exception as error:
        raise FlowError(
            f"stage {stage.name}: cannot infer its output: on an empty table its function raised "
            f'{type(error).__name__}: {error}. Make it work on no rows, or state schema="..."'
        ) from error
    if not isinstance(result, pa.Table):
        raise SchemaError(
            f"stage {stage.name}: its function returned {type(result).__name__}, expected a pyarrow.Table"
        )
    return result


def check_made(stage: Stage, made: pa.Schema) -> None:
    """Raises SchemaError where a function makes columns that cannot be recorded under their names, or have no type."""
    for field in made:
        if is_ours(field.name):
            raise SchemaError(
                f"stage {stage.name}: its function makes a column {field.name!r}, a name that nosync uses itself: rename it"
            )
        if pa.types.is_null(field.type):
            raise SchemaError(
                f"stage {stage.name}: on an empty table its function makes a column {field.name!r} without a type: say which "
                'it has, as in pa.array(values, pa.float64()), or state schema="..."'
            )
