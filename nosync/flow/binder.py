"""Binding: resolves a declared dataflow into stages with schemas, fingerprints and segments. Pure.

`parse_ddl` turns Spark DDL into an Arrow schema, and `analyze` says what the JVM's expressions return. Both come from
the Spark side, so that this module needs no Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from nosync.flow.arguments import (
    DedupeArguments,
    ExpressionArguments,
    StaticJoinArguments,
    TableArguments,
    TimedJoinArguments,
    TimedUpdateArguments,
    arguments_of,
)
from nosync.flow.bind_event_time import bind_first, bind_interval_join, bind_timed_update
from nosync.flow.bind_keyed import bind_join, bind_keyed, bind_window
from nosync.flow.bind_loops import bind_loop, close_loops
from nosync.flow.bind_per_key import bind_per_key
from nosync.flow.bindings import Bindings, ParseDdl, change_fields, check_made, on_no_rows
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import LATE, BoundStage
from nosync.flow.dataflow import Dataflow
from nosync.flow.internal_columns import is_kept
from nosync.flow.kinds import (
    AGGREGATE,
    DEDUPE,
    FILTER,
    IN_JVM,
    JOIN,
    LOOP,
    MAP,
    PER_KEY,
    SOURCE,
    STATIC_JOIN,
    UNION,
    UPDATE,
    WINDOW,
)
from nosync.flow.meanings import TODAYS, Meanings
from nosync.flow.stage import Stage
from nosync.flow.stage_options import NO_OPTIONS, ExpressionOptions, StaticJoinOptions, TableOptions, UnionOptions
from nosync.kernels.expressions import Step
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, describe, nullable, plain
from nosync.lsm.columnar.types import has_part
from nosync.lsm.errors import FlowError, SchemaError


@dataclass(frozen=True)
class Analysis:
    """Holds what the JVM says of a stage of expressions. `JvmOptions` has the same fields, and says what they are."""

    schema: pa.Schema
    """The columns of its output."""
    described: str
    """A text that changes with what it computes."""
    kept: Mapping[str, str]
    computed: Mapping[str, str] = field(default_factory=dict)
    plain: bool = True
    step: Step | None = None


class Analyze(Protocol):
    """Asks the JVM about a stage of expressions over rows of `given`."""

    def __call__(self, stage: Stage, given: pa.Schema) -> Analysis: ...


def _no_jvm(stage: Stage, given: pa.Schema) -> Analysis:
    raise FlowError(f"stage {stage.name}: a {stage.kind} runs in the JVM, and there is no Spark session here")


def bind(
    flow: Dataflow,
    parse_ddl: ParseDdl,
    analyze: Analyze = _no_jvm,
    *,
    salt: str = "",
    sources: Mapping[str, str] | None = None,
    placements: Mapping[str, Sequence[str]] | None = None,
    begins: Mapping[str, str] | None = None,
    bootstrap_at: Mapping[str, int] | None = None,
    meanings: Meanings = TODAYS,
    pinned: Mapping[str, str] | None = None,
) -> BoundFlow:
    """Resolves schemas, fingerprints and segments. Raises FlowError or SchemaError naming the stage.

    `salt` enters the fingerprints of sources, for a branch with inputs of its own. `sources` states these fingerprints,
    for a branch that shares the recorded inputs of another one. `placements` says by which columns the rows of sources
    are in their shards, where they were recorded (default: by the first key that the flow asks of them). `begins` has,
    for stages that go on from another timeline's state, which one that is; it enters their fingerprints. `bootstrap_at`
    has `BoundStage.bootstrap_at` by stage.
    `meanings` are those that the store was written with. `pinned` has fingerprints by stage, which those that take its
    rows go by: so a stage whose own code is the same has the fingerprint that it had, whatever is before it.
    """
    if not flow.sources:
        raise FlowError(f"dataflow {flow.name} has no source")
    bindings = Bindings(
        flow, parse_ddl, begins=begins or {}, bootstrap_at=bootstrap_at or {}, meanings=meanings, pinned=pinned or {}
    )
    binder = _Binder(bindings, analyze, salt, sources or {}, placements)
    for stage in flow.stages:
        for name in stage.inputs:
            if name not in bindings.stages:
                raise FlowError(f"stage {stage.name}: its input {name!r} is not a stage of dataflow {flow.name}")
        binder.add(stage)
    close_loops(bindings)
    for stage in flow.stages:
        if not bindings.stages[stage.name].recorded and not bindings.is_taken(stage.name):
            raise FlowError(
                f"stage {stage.name}: persist='none', and no stage takes its rows: it would compute nothing"
            )
    return BoundFlow(flow.name, flow.key_groups, bindings.stages, bindings.segments, bindings.loops)


def source_fingerprints(flow: Dataflow, parse_ddl: ParseDdl, meanings: Meanings, *, salt: str = "") -> dict[str, str]:
    """Returns, by source, the fingerprint that `bind` gives it, without binding the rest."""
    bindings = Bindings(flow, parse_ddl, begins={}, bootstrap_at={}, meanings=meanings, pinned={})
    binder = _Binder(bindings, _no_jvm, salt, {}, {})
    for stage in flow.sources:
        binder.add(stage)
    return {name: bound.fingerprint for name, bound in bindings.stages.items()}


class _Binder:
    """Adds stages to bindings: sources and stateless stages itself, and others by `bind_keyed` and `bind_loops`."""

    def __init__(
        self,
        bindings: Bindings,
        analyze: Analyze,
        salt: str,
        sources: Mapping[str, str],
        placements: Mapping[str, Sequence[str]] | None,
    ) -> None:
        """`salt`, `sources` and `placements` are those of `bind`."""
        self._bindings, self._analyze = bindings, analyze
        self._salt, self._sources, self._placements = salt, sources, placements

    def add(self, stage: Stage) -> None:
        """Binds a stage whose inputs are bound."""
        for name in stage.inputs:
            given = self._bindings.stages[name]
            if given.kind == LATE and given.changing:
                raise FlowError(
                    f"stage {stage.name}: {name} can only be read, for the window's input changes: it lists changes "
                    "that came "
                    "too late, and what they take back may not be in it"
                )
        if stage.kind == SOURCE:
            self._source(stage)
        elif stage.kind in (MAP, FILTER):
            self._stateless(stage)
        elif stage.kind in IN_JVM:
            self._jvm(stage)
        elif stage.kind == UNION:
            self._union(stage)
        elif isinstance(stage.arguments, TimedUpdateArguments):
            bind_timed_update(self._bindings, stage)
        elif isinstance(stage.arguments, DedupeArguments):
            bind_first(self._bindings, stage)
        elif isinstance(stage.arguments, TimedJoinArguments):
            bind_interval_join(self._bindings, stage)
        else:
            _WITH_STATE[stage.kind](self._bindings, stage)

    def _source(self, stage: Stage) -> None:
        schema = self._bindings.parse(stage)
        for column in schema:
            if has_part(column.type, pa.types.is_map):
                raise SchemaError(
                    f"source {stage.name}: column {column.name!r} is {column.type}, whose rows Spark can neither "
                    "compare nor hash: give it as array<struct<key, value>>, as map_entries(column) has it; in a pipelines "
                    "project, read it with a schema that leaves the column out, or has it as a string"
                )
        options = TableOptions(stage.arguments.table) if isinstance(stage.arguments, TableArguments) else NO_OPTIONS
        described = str(self._bindings.declared(stage)) + self._bindings.named(stage.name) + self._salt
        bound = self._bindings.stage(stage, schema, changing=False, options=options, described=described)
        bound = replace(bound, fingerprint=self._sources.get(stage.name, bound.fingerprint))
        if self._placements is None:
            placed_by = self._first_key(stage.name, schema)
        else:
            placed_by = tuple(self._placements.get(stage.name, ()))
        self._bindings.add_segment(replace(bound, placed_by=placed_by))

    def _first_key(self, name: str, schema: pa.Schema) -> tuple[str, ...]:
        """Returns the key of the first stage that takes a source's rows by key: its rows go to their shards at once."""
        for stage in self._bindings.flow.consumers(name):
            key: tuple[str, ...] = ()
            if stage.kind in (AGGREGATE, UPDATE):
                key = stage.key
            elif stage.kind == DEDUPE:
                key = stage.key or tuple(schema.names)
            elif stage.kind == FILTER:
                key = self._first_key(stage.name, schema)
            if key and set(key) <= set(schema.names):
                return key
        return ()

    def _stateless(self, stage: Stage) -> None:
        upstream = self._bindings.stages[stage.inputs[0]]
        schema = upstream.rows_schema if stage.kind == FILTER else self._map_schema(stage, upstream)
        origins = self._bindings.inputs.origins(stage)
        bound = self._bindings.stage(stage, schema, changing=upstream.changing, origins=origins)
        if stage.kind == FILTER:
            bound = replace(bound, placed_by=upstream.placed_by)
        if upstream.loop == stage.loop:
            self._bindings.add_after(bound, upstream.name)
        else:
            self._bindings.add_segment(bound, [self._bindings.edge(upstream.name)])

    def _jvm(self, stage: Stage) -> None:
        upstream = self._bindings.stages[stage.inputs[0]]
        found = self._analyze(stage, upstream.rows_schema)
        _check_names(stage, found.schema, upstream.rows_schema)
        schema = plain(found.schema.empty_table(), allow=frozenset({CHANGE_TYPE_COLUMN})).schema
        options = replace(
            jvm_options(stage), kept=found.kept, computed=found.computed, plain=found.plain, step=found.step
        )
        bound = self._bindings.stage(
            stage,
            schema,
            changing=upstream.changing,
            options=options,
            described=found.described,
            origins=self._bindings.inputs.origins(stage),
        )
        if bound.recorded:
            self._bindings.add_evaluated(bound)
        else:
            self._bindings.stages[stage.name] = bound

    def _union(self, stage: Stage) -> None:
        bindings = self._bindings
        inputs = [bindings.stages[name] for name in stage.inputs]
        _check_same_columns(stage, inputs)
        changing = any(i.changing for i in inputs)
        # Where one of them may hold null inside, so may what they are together.
        first = inputs[0].output
        alike = [all(other.output.field(f.name).type == f.type for other in inputs) for f in first]
        together = [f if same else f.with_type(nullable(f.type)) for f, same in zip(first, alike, strict=True)]
        schema = pa.schema([*together, *([pa.field(CHANGE_TYPE_COLUMN, pa.string())] if changing else [])])
        origins = bindings.inputs.origins(stage)
        numbers = [tuple(map(origins.index, bindings.inputs.of(name))) for name in stage.inputs] if origins else []
        options = UnionOptions(tuple(numbers)) if origins else NO_OPTIONS
        bound = bindings.stage(stage, schema, changing=changing, options=options, origins=origins)
        homes = {bindings.segment_of.get(name) for name in stage.inputs}
        same_loop = {one.loop for one in inputs} == {stage.loop}
        if len(homes) == 1 and None not in homes and same_loop:
            bindings.add_beside(bound, stage.inputs[0])
        else:
            bindings.add_segment(bound, [bindings.edge(name) for name in dict.fromkeys(stage.inputs)])

    def _map_schema(self, stage: Stage, upstream: BoundStage) -> pa.Schema:
        """Returns the columns of a map: those that it declares, or those that its function makes of an empty table."""
        kept_change = change_fields(upstream.rows_schema)
        if stage.schema is not None:
            return pa.schema([*self._bindings.parse(stage), *kept_change])
        result = on_no_rows(stage, upstream.rows_schema)
        if upstream.changing and CHANGE_TYPE_COLUMN not in result.column_names:
            raise SchemaError(
                f"stage {stage.name}: its input changes, so its function must keep the column {CHANGE_TYPE_COLUMN!r}"
            )
        kept = [name for name in result.column_names if name != CHANGE_TYPE_COLUMN]
        twice = next((name for name in kept if kept.count(name) > 1), None)
        if twice is not None:
            raise SchemaError(
                f"stage {stage.name}: its function returned two columns of the name {twice!r}: rename one"
            )
        check_made(stage, result.select(kept).schema)
        return pa.schema([*plain(result.select(kept)).schema, *kept_change])


_WITH_STATE = {
    AGGREGATE: bind_keyed,
    UPDATE: bind_keyed,
    PER_KEY: bind_per_key,
    DEDUPE: bind_keyed,
    WINDOW: bind_window,
    JOIN: bind_join,
    LOOP: bind_loop,
}
"""The functions that bind the stages that keep state."""


def jvm_options(stage: Stage) -> ExpressionOptions | StaticJoinOptions:
    """Returns the options of a stage that the JVM evaluates, as far as its declaration says them."""
    if stage.kind == STATIC_JOIN:
        join = arguments_of(stage, StaticJoinArguments)
        return StaticJoinOptions(table=join.table, on=join.on, how=join.how)
    return ExpressionOptions(expressions=arguments_of(stage, ExpressionArguments).expressions)


def _check_same_columns(stage: Stage, inputs: Sequence[BoundStage]) -> None:
    """Raises SchemaError where a union's inputs have different columns."""
    first = inputs[0].output
    for other in inputs[1:]:
        same = sorted(other.output.names) == sorted(first.names) and all(
            nullable(other.output.field(f.name).type) == nullable(f.type) for f in first
        )
        if not same:
            raise SchemaError(
                f"stage {stage.name}: its inputs have different columns: {inputs[0].name} has ({describe(first)}), "
                f"{other.name} has ({describe(other.output)}); bring them together with map or select"
            )


def _check_names(stage: Stage, schema: pa.Schema, given: pa.Schema) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise SchemaError(f"stage {stage.name}: two of its columns have the same name: {', '.join(schema.names)}")
    for name in schema.names:
        if is_kept(name) and name not in given.names:
            raise SchemaError(f"stage {stage.name}: column {name!r}: names that begin with _ are kept for nosync")
