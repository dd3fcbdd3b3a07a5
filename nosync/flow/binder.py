"""Binding: resolves a declared dataflow into stages with schemas, fingerprints and segments. Pure.

`parse_ddl` turns Spark DDL into an Arrow schema, and `analyze` says what the JVM's expressions return; both come from
the Spark side, so that this module needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa

from nosync.flow.bound_flow import (
    ARRANGE,
    DISTINCT,
    LATE,
    WATERMARK,
    BoundFlow,
    BoundStage,
    InputEdge,
    Loop,
    Segment,
    SegmentOutput,
)
from nosync.flow.dataflow import (
    AGGREGATE,
    DEDUPE,
    FILTER,
    IN_JVM,
    JOIN,
    LOOP,
    MAP,
    PART_SEPARATOR,
    SOURCE,
    STATELESS,
    STATIC_JOIN,
    UNION,
    UPDATE,
    WINDOW,
    Dataflow,
    Stage,
)
from nosync.flow.event_time import (
    INPUT_FIELD,
    LATE_ROWS,
    WATERMARK_AFTER,
    WATERMARK_BEFORE,
    inputs_field,
)
from nosync.flow.fingerprint import fingerprint
from nosync.flow.internal_columns import COUNT, LIVE, TOUCHED_COLUMN, is_ours
from nosync.flow.persistence import MEMORY, NONE, Level, parse_level
from nosync.flow.stage_options import (
    NO_OPTIONS,
    ArrangeOptions,
    ExpressionOptions,
    JoinOptions,
    StageOptions,
    StaticJoinOptions,
    UnionOptions,
    UpdateOptions,
    WatermarkOptions,
)
from nosync.flow.window_inputs import WindowInputs
from nosync.kernels.aggregates import ALL_ROWS, ALL_ROWS_TYPE, Aggregate, Plan
from nosync.kernels.expressions import Step
from nosync.kernels.joins import (
    JoinSpec,
    arranged_schema,
    joined_schema,
)
from nosync.kernels.windows import END, MIN, START, Window, is_time, window_type
from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    INTERNAL_PREFIX,
    RESERVED,
    describe,
    nullable,
    plain,
)
from nosync.lsm.columnar.hashing import check_key_type
from nosync.lsm.errors import FlowError, NosyncError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean

_CHANGE_FIELD = pa.field(CHANGE_TYPE_COLUMN, pa.string())
ParseDdl = Callable[[str], pa.Schema]


@dataclass(frozen=True)
class Analysis:
    """What the JVM says of a stage of expressions."""

    schema: pa.Schema
    """Of its output."""
    described: str
    """A text that changes with what it computes."""
    kept: Mapping[str, str]
    """By column of its output the column of its input that it is, if it is one."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """By column of its output the expression over columns of its input that makes it, where one alone does."""
    plain: bool = True
    """It calls no function of users, and nothing that depends on when it is asked."""
    step: Step | None = None
    """The same for tasks that evaluate it themselves, if they can."""


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
    anew: Mapping[str, int] | None = None,
    policies: Mapping[str, str] | None = None,
) -> BoundFlow:
    """Resolves schemas, fingerprints and segments. Raises FlowError or SchemaError naming the stage.

    `salt` enters the fingerprints of sources, for a branch with inputs of its own; `sources` states them, for one that
    shares the recorded inputs of another. `placements` says by which columns the rows of sources are in their shards,
    where they were recorded (default: by the first key that the flow asks of them). `begins`: of stages that go on from
    another timeline's state, from which; it enters their fingerprints. `anew`: see `BoundStage.bootstrap_at`.
    `policies`: by window, the one that the store was written with, which counts where the window does not say which it
    wants (default: MIN).
    """
    if not flow.sources:
        raise FlowError(f"dataflow {flow.name} has no source")
    binder = _Binder(
        flow, parse_ddl, analyze, salt, sources or {}, placements, begins or {}, anew or {}, policies or {}
    )
    for stage in flow.stages:
        for name in stage.inputs:
            if name not in binder.bound:
                raise FlowError(f"stage {stage.name}: its input {name!r} is not a stage of dataflow {flow.name}")
        binder.add(stage)
    binder.close_loops()
    for stage in flow.stages:
        if not binder.bound[stage.name].recorded and not binder.taken(stage.name):
            raise FlowError(
                f"stage {stage.name}: persist='none', and no stage takes its rows: it would compute nothing"
            )
    return BoundFlow(flow.name, flow.key_groups, binder.bound, binder.segments, binder.loops)


def source_fingerprints(flow: Dataflow, parse_ddl: ParseDdl, *, salt: str = "") -> dict[str, str]:
    """By source, the fingerprint that `bind` gives it, without binding the rest."""
    binder = _Binder(flow, parse_ddl, _no_jvm, salt, {}, {}, {}, {}, {})
    for stage in flow.sources:
        binder.add(stage)
    return {name: bound.fingerprint for name, bound in binder.bound.items()}


class _Binder:
    def __init__(
        self,
        flow: Dataflow,
        parse_ddl: ParseDdl,
        analyze: Analyze,
        salt: str,
        sources: Mapping[str, str],
        placements: Mapping[str, Sequence[str]] | None,
        begins: Mapping[str, str],
        anew: Mapping[str, int],
        policies: Mapping[str, str],
    ) -> None:
        self._salt, self._sources, self._placements = salt, sources, placements
        self._begins, self._anew = begins, anew
        self._flow, self._parse_ddl, self._analyze = flow, parse_ddl, analyze
        self.bound: dict[str, BoundStage] = {}
        self.segments: dict[str, Segment] = {}
        self.loops: dict[str, Loop] = {}
        self._segment_of: dict[str, str] = {}
        self._inputs = WindowInputs(flow, policies, self.bound)

    def taken(self, name: str) -> bool:
        """Whether any stage takes the rows of this one."""
        return bool(self._flow.consumers(name)) or any(loop.result == name for loop in self.loops.values())

    def add(self, stage: Stage) -> None:
        handlers = {SOURCE: self._source, UNION: self._union, JOIN: self._join, WINDOW: self._window, LOOP: self._loop}
        for name in stage.inputs:
            if self.bound[name].kind == LATE and self.bound[name].changing:
                raise FlowError(
                    f"stage {stage.name}: {name} can only be read, for the window's input changes: it lists changes that came "
                    "too late, and what they take back may not be in it"
                )
        handler = handlers.get(stage.kind)
        if handler is not None:
            handler(stage)
        elif stage.kind in IN_JVM:
            self._jvm(stage)
        elif stage.kind in STATELESS:
            self._stateless(stage)
        else:
            self._keyed(stage)

    # --- each kind of stage -----------------------------------------------------------------------------------------

    def _source(self, stage: Stage) -> None:
        schema = self._parse(stage)
        for column in schema:
            if _has_map(column.type):
                raise SchemaError(
                    f"source {stage.name}: column {column.name!r} is {column.type}, whose rows Spark can neither compare nor "
                    "hash: give it as array<struct<key, value>>, as map_entries(column) has it"
                )
        bound = self._stage(stage, schema, changing=False, described=str(schema) + self._salt)
        bound = replace(bound, fingerprint=self._sources.get(stage.name, bound.fingerprint))
        if self._placements is None:
            placed_by = self._first_key(stage.name, schema)
        else:
            placed_by = tuple(self._placements.get(stage.name, ()))
        self._new_segment(replace(bound, placed_by=placed_by))

    def _first_key(self, name: str, schema: pa.Schema) -> tuple[str, ...]:
        """The key of the first stage that takes a source's rows by key: its rows go to their shards at once."""
        for stage in self._flow.consumers(name):
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
        upstream = self.bound[stage.inputs[0]]
        schema = upstream.rows_schema if stage.kind == FILTER else self._map_schema(stage, upstream)
        bound = self._stage(stage, schema, changing=upstream.changing, origins=self._inputs.origins(stage))
        if stage.kind == FILTER:
            bound = replace(bound, placed_by=upstream.placed_by)
        if upstream.name in self._segment_of and upstream.loop == stage.loop:
            self._join_segment(bound, upstream.name)
        else:
            self._new_segment(bound, [self._edge(upstream.name)])

    def _jvm(self, stage: Stage) -> None:
        upstream = self.bound[stage.inputs[0]]
        found = self._analyze(stage, upstream.rows_schema)
        _check_names(stage, found.schema, upstream.rows_schema)
        schema = plain(found.schema.empty_table(), allow=frozenset({CHANGE_TYPE_COLUMN})).schema
        origins = self._inputs.origins(stage)
        options = replace(
            jvm_options(stage), kept=found.kept, computed=found.computed, plain=found.plain, step=found.step
        )
        bound = self._stage(
            stage, schema, changing=upstream.changing, options=options, described=found.described, origins=origins
        )
        if bound.recorded:
            edge = self._edge(upstream.name)
            self._new_segment(bound, [replace(edge, jvm=(*edge.jvm, stage.name))])
        else:
            self.bound[stage.name] = bound

    def _union(self, stage: Stage) -> None:
        inputs = [self.bound[name] for name in stage.inputs]
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
        changing = any(i.changing for i in inputs)
        # Where one of them may hold null inside, so may what they are together.
        alike = [all(other.output.field(f.name).type == f.type for other in inputs) for f in first]
        together = [f if same else f.with_type(nullable(f.type)) for f, same in zip(first, alike, strict=True)]
        fields = [*together, *([pa.field(CHANGE_TYPE_COLUMN, pa.string())] if changing else [])]
        origins = self._inputs.origins(stage)
        numbers = [tuple(map(origins.index, self._inputs.of(name))) for name in stage.inputs] if origins else []
        options = UnionOptions(tuple(numbers)) if origins else NO_OPTIONS
        bound = self._stage(stage, pa.schema(fields), changing=changing, options=options, origins=origins)
        homes = {self._segment_of.get(name) for name in stage.inputs}
        same_loop = {self.bound[name].loop for name in stage.inputs} == {stage.loop}
        if len(homes) == 1 and None not in homes and same_loop:
            self._join_segment(bound, stage.inputs[0])
        else:
            self._new_segment(bound, [self._edge(name) for name in dict.fromkeys(stage.inputs)])

    def _keyed(self, stage: Stage) -> None:
        if stage.kind == AGGREGATE and not stage.key:
            stage = self._over_all_rows(stage)
        upstream = self.bound[stage.inputs[0]]
        key = stage.key or tuple(upstream.output.names)  # a dedupe without a key is one by whole rows
        self._check_key(stage, key, upstream)
        changing, plan, options = True, None, NO_OPTIONS
        if stage.kind == AGGREGATE:
            plan = Plan(stage.name, key, stage.aggregates, upstream.output, retracts=upstream.changing)
            schema = plan.schema
        elif stage.kind == DEDUPE:
            rest = [name for name in upstream.output.names if name not in key]
            if upstream.changing:
                plan = Plan.of_rows(stage.name, key, rest, upstream.output)
                schema = plan.schema
            else:
                schema = pa.schema([upstream.output.field(name) for name in (*key, *rest)])
                changing = False
        else:
            assert stage.kind == UPDATE
            fields = [*(upstream.output.field(name) for name in key), *self._parse(stage)]
            options = UpdateOptions(stage.options.get("ttl"))
            if options.ttl is not None:
                fields.append(pa.field(TOUCHED_COLUMN, pa.int64()))
            schema = pa.schema(fields)
        origins = () if changing else self._inputs.origins(stage)
        bound = self._stage(
            stage, schema, changing=changing, key=key, edge_key=key, plan=plan, options=options, origins=origins
        )
        kind = DISTINCT if stage.kind == DEDUPE and plan is None else AGGREGATE if stage.kind == DEDUPE else stage.kind
        bound = replace(bound, kind=kind)
        if upstream.placed_by == key and upstream.name in self._segment_of and upstream.loop is None:
            self._join_segment(bound, upstream.name)  # the rows of each key are in its shard already
        else:
            self._new_segment(bound, [self._edge(upstream.name, key)])

    def _over_all_rows(self, stage: Stage) -> Stage:
        """The aggregate by a key that is the same in all rows, which a stage before it adds to them."""
        upstream = self.bound[stage.inputs[0]]
        output = pa.schema([*upstream.output, pa.field(ALL_ROWS, ALL_ROWS_TYPE)])
        schema = pa.schema([*output, *(f for f in upstream.rows_schema if f.name == CHANGE_TYPE_COLUMN)])
        part = self._part(stage, "all", MAP, schema, (upstream.name,), described="None {}", changing=upstream.changing)
        part = replace(part, function=with_one_key, output=output, level=NONE)
        if upstream.name in self._segment_of:
            self._join_segment(part, upstream.name)
        else:
            self._new_segment(part, [self._edge(upstream.name)])
        return replace(stage, key=(ALL_ROWS,), inputs=(part.name,))

    def _window(self, stage: Stage) -> None:
        """Three stages on the same rows: the watermark, the late rows, and the aggregates."""
        upstream = self._recorded_input(stage.inputs[0])
        window: Window = stage.options["window"]
        if window.time not in upstream.output.names:
            raise SchemaError(
                f"stage {stage.name}: time column {window.time!r} is not in its input {upstream.name} "
                f"({describe(upstream.output)}){did_you_mean(window.time, upstream.output.names)}"
            )
        time_type = upstream.output.field(window.time).type
        if not is_time(time_type):
            raise SchemaError(
                f"stage {stage.name}: time column {window.time!r} is {time_type}, expected a timestamp or date"
            )
        if window.session and (upstream.changing or not stage.key):
            why = "needs a key" if not stage.key else f"needs an input that only grows, and {upstream.name} changes"
            raise FlowError(f"stage {stage.name}: a session window {why}")
        self._check_key(stage, stage.key, upstream)
        bounds = [pa.field(name, window_type(time_type)) for name in (START, END)]
        expanded = pa.schema([*upstream.output, *bounds])
        _check_clash(stage, upstream.output, [START, END])
        key = (*stage.key, START) if window.session else (*stage.key, START, END)
        plan = Plan(stage.name, key, stage.aggregates, expanded, retracts=upstream.changing)
        schema = pa.schema([*plan.schema, bounds[1]]) if window.session else plan.schema
        edge_key = stage.key if window.session else key
        window = replace(window, policy=self._inputs.policy(stage))
        inputs = upstream.origins if window.policy == MIN else ()
        of_inputs = {"of_inputs": inputs, "idle_after": window.idle_after} if inputs else {}
        described = f"{window} {_hashed_options(edge_key, **of_inputs)}"
        logs = []
        if window.delay_us is not None:
            stamps = [pa.field(name, bounds[0].type) for name in (WATERMARK_BEFORE, WATERMARK_AFTER)]
            fields = [*stamps, pa.field(LATE_ROWS, pa.int64())]
            schema_of = pa.schema([*fields, inputs_field(bounds[0].type)] if inputs else fields)
            logs.append(
                self._part(
                    stage, "watermark", WATERMARK, schema_of, (upstream.name,), edge_key=edge_key,
                    options=WatermarkOptions(inputs), window=window, described=described,
                )
            )  # fmt: skip
        late = pa.schema([*expanded, *(f for f in upstream.rows_schema if f.name == CHANGE_TYPE_COLUMN)])
        logs.append(
            self._part(
                stage, "late", LATE, late, (upstream.name,), edge_key=edge_key, window=window, described=described,
                changing=upstream.changing,
            )
        )  # fmt: skip
        bound = self._stage(
            stage, schema, changing=True, key=key, edge_key=edge_key, plan=plan, window=window,
            described=described if inputs else repr(window),
        )  # fmt: skip
        edge = replace(self._edge(upstream.name, edge_key), output=SegmentOutput(upstream.name, window))
        self._new_segment(logs[0], [edge])
        for part in [*logs[1:], bound]:
            self._join_segment(part, logs[0].name)

    def _recorded_input(self, name: str) -> BoundStage:
        """The stage, recorded from now on: what takes its rows has to see them leave a task."""
        stage = self.bound[name]
        if not stage.recorded and stage.in_jvm:
            stage = replace(stage, level=MEMORY)
            upstream = stage.inputs[0]
            edge = self._edge(upstream)
            self._new_segment(stage, [replace(edge, jvm=(*edge.jvm, name))])
        return stage

    def _join(self, stage: Stage) -> None:
        """Three stages in one segment: the two sides, arranged by key, and the joined rows."""
        left, right = (self.bound[name] for name in stage.inputs)
        spec = JoinSpec(stage.options["on"], stage.options["how"])
        for side in (left, right):
            self._check_key(stage, spec.on, side)
        for name in spec.on:
            types = [side.output.field(name).type for side in (left, right)]
            if types[0] != types[1]:
                raise SchemaError(
                    f"stage {stage.name}: join column {name!r} is {types[0]} in {left.name} "
                    f"and {types[1]} in {right.name}: cast one"
                )
        clash = [n for n in left.output.names if n in right.output.names and n not in spec.on]
        if clash:
            raise SchemaError(
                f"stage {stage.name}: {left.name} and {right.name} both have a column {clash[0]!r}; rename one with select or map"
            )
        parts = []
        for side, part in ((left, "left"), (right, "right")):
            schema, key = arranged_schema(side.output, spec.on)
            drops_nulls = spec.how == "inner" or (spec.how == "left" and part == "right")
            # Versions before took rows that differ in which of their columns is null for equal ones.
            described = f"None {_hashed_options(spec.on, drop_nulls=drops_nulls)}{' nulls' if side.changing else ''}"
            bound = self._part(
                stage, part, ARRANGE, schema, (side.name,), edge_key=spec.on, options=ArrangeOptions(drops_nulls),
                described=described, changing=side.changing, key=key,
            )  # fmt: skip
            parts.append(replace(bound, output=schema))
        schema, key = joined_schema(left.output, right.output, spec)
        options = JoinOptions(spec, schema, key)
        changing = left.changing or right.changing or spec.how != "inner"
        if stage.loop is not None:
            schema, key = pa.schema([*visible(schema), *([_CHANGE_FIELD] if changing else [])]), ()
        declared = replace(stage, inputs=tuple(part.name for part in parts))
        for side_stage in parts:
            self.bound[side_stage.name] = side_stage
        bound = self._stage(declared, schema, changing=changing, key=key, options=options, described=repr(spec))
        bound = replace(bound, placed_by=spec.on)
        edges = list(dict.fromkeys(self._edge(side.name, spec.on) for side in (left, right)))
        self._new_segment(parts[0], edges)
        self._join_segment(parts[1], parts[0].name)
        self._join_segment(bound, parts[0].name)

    def _loop(self, stage: Stage) -> None:
        """The variable. What goes back to it is known when the body was bound."""
        start = self.bound[stage.inputs[0]]
        self._check_key(stage, start.output.names, start)
        members = [s for s in self._flow.stages if s.loop == stage.name]
        inside = {stage.name, *(s.name for s in members)}
        entering = {stage.inputs[0], *(name for s in members for name in s.inputs if name not in inside)}
        unknown = entering - self.bound.keys()
        assert not unknown, f"{unknown} are declared after the loop that uses them"
        growing = not any(self.bound[name].changing for name in entering)
        schema, key = loop_schema(start.output), tuple(start.output.names)
        outside = [f"{name} {self.bound[name].fingerprint}" for name in sorted(entering)]
        described = "; ".join([*(self._described(s) for s in members), *outside, stage.options["result"]])
        bound = self._stage(stage, schema, changing=not growing, key=key, edge_key=key, described=described)
        self._new_segment(bound, [self._edge(start.name, key)])
        self.loops[stage.name] = Loop(stage.name, stage.options["result"], growing, stage.options["max_rounds"])

    def _described(self, stage: Stage) -> str:
        """A text that changes with what a stage of a loop's body computes: the loop's variable is made of all of them."""
        code = stage.version if stage.version is not None else stage.function
        options = {k: str(v) for k, v in stage.options.items()}
        return fingerprint(stage.name, stage.kind, stage.inputs, code, stage.schema or "", options)

    def close_loops(self) -> None:
        """Lets the rows that each body returns go back to its variable."""
        for loop in self.loops.values():
            result = self._recorded_input(loop.result)
            if not result.recorded:
                result = self.bound[result.name] = replace(result, level=MEMORY)
            variable = self.bound[loop.name]
            if sorted(result.output.names) != sorted(variable.output.names) or any(
                result.output.field(f.name).type != f.type for f in variable.output
            ):
                raise SchemaError(
                    f"stage {loop.name}: the loop's body returns ({describe(result.output)}), expected the columns of its "
                    f"start ({describe(variable.output)})"
                )
            self.bound[loop.name] = replace(variable, inputs=(*variable.inputs, result.name))
            segment = self.segments[loop.name]
            edge = InputEdge(result.name, SegmentOutput(result.name), (), variable.key)
            self.segments[loop.name] = replace(segment, edges=(*segment.edges, edge))

    # --- what they share --------------------------------------------------------------------------------------------

    def _stage(
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
    ) -> BoundStage:
        code = stage.version if stage.version is not None else stage.function
        keeps_state = bool(key) or stage.kind in (WATERMARK, LATE) or stage.name in self._anew
        if stage.name in self._begins and keeps_state:
            described += f" from {self._begins[stage.name]}"
        if origins:
            schema = pa.schema([*schema, INPUT_FIELD])
            described += f" by {origins}"
        fp = fingerprint(
            stage.kind,
            key or stage.key,
            code,
            stage.schema or "",
            {name: _aggregate_parts(a) for name, a in stage.aggregates.items()},
            [described, stage.options.get("ttl")],
            [self.bound[name].fingerprint for name in stage.inputs],
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
            bootstrap_at=self._anew.get(stage.name),
            loop=stage.name if stage.kind == LOOP else stage.loop,
            placed_by=edge_key,
            origins=origins,
        )

    def _part(
        self,
        stage: Stage,
        part: str,
        kind: str,
        schema: pa.Schema,
        inputs: tuple[str, ...],
        *,
        described: str,
        changing: bool = False,
        key: tuple[str, ...] = (),
        edge_key: tuple[str, ...] = (),
        window: Window | None = None,
        options: StageOptions = NO_OPTIONS,
    ) -> BoundStage:
        declared = Stage(
            self._flow, f"{stage.name}{PART_SEPARATOR}{part}", kind, inputs, persist=stage.persist, loop=stage.loop
        )
        return self._stage(
            declared,
            schema,
            changing=changing,
            key=key,
            edge_key=edge_key,
            window=window,
            options=options,
            described=described,
        )

    def _level(self, stage: Stage) -> Level:
        if stage.persist is not None:
            return parse_level(stage.persist, f"stage {stage.name}")
        if stage.kind in IN_JVM:
            return NONE if self._flow.consumers(stage.name) or stage.loop else MEMORY
        if stage.kind in STATELESS and stage.deterministic:
            return MEMORY
        return parse_level(self._flow.persist, f"dataflow {self._flow.name}")

    def _edge(self, name: str, key: tuple[str, ...] = ()) -> InputEdge:
        """Rows of a stage, from the segment that they leave by way of expressions in the JVM."""
        jvm: list[str] = []
        origin = name
        while origin not in self._segment_of:
            jvm.insert(0, origin)
            origin = self.bound[origin].inputs[0]
        return InputEdge(name, SegmentOutput(origin), tuple(jvm), key)

    def _new_segment(self, stage: BoundStage, edges: Sequence[InputEdge] = ()) -> None:
        self.bound[stage.name] = stage
        self.segments[stage.name] = Segment(stage.name, (stage.name,), tuple(edges))
        self._segment_of[stage.name] = stage.name

    def _join_segment(self, stage: BoundStage, member: str) -> None:
        self.bound[stage.name] = stage
        home = self._segment_of[stage.name] = self._segment_of[member]
        segment = self.segments[home]
        self.segments[home] = replace(segment, stages=(*segment.stages, stage.name))

    def _check_key(self, stage: Stage, key: Sequence[str], upstream: BoundStage) -> None:
        for name in key:
            if name not in upstream.output.names:
                raise SchemaError(
                    f"stage {stage.name}: key column {name!r} is not in its input {upstream.name} ({describe(upstream.output)})"
                    f"{did_you_mean(name, upstream.output.names)}"
                )
            try:
                check_key_type(name, upstream.output.field(name).type)
            except SchemaError as error:
                raise SchemaError(f"stage {stage.name}: {error}") from None

    def _parse(self, stage: Stage) -> pa.Schema:
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
                    f"stage {stage.name}: column {name!r} of its schema is a key column, or a name that nosync uses itself"
                )
        return plain(schema.empty_table()).schema

    def _map_schema(self, stage: Stage, upstream: BoundStage) -> pa.Schema:
        given = upstream.rows_schema
        kept_change = [f for f in given if f.name == CHANGE_TYPE_COLUMN]
        if stage.schema is not None:
            return pa.schema([*self._parse(stage), *kept_change])
        assert stage.kind == MAP
        assert stage.function is not None
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
        if upstream.changing and CHANGE_TYPE_COLUMN not in result.column_names:
            raise SchemaError(
                f"stage {stage.name}: its input changes, so its function must keep the column {CHANGE_TYPE_COLUMN!r}"
            )
        kept = [name for name in result.column_names if name != CHANGE_TYPE_COLUMN]
        for name in kept:
            if is_ours(name):
                raise SchemaError(
                    f"stage {stage.name}: its function makes a column {name!r}, a name that nosync uses itself: rename it"
                )
        unknown = [name for name in kept if pa.types.is_null(result.schema.field(name).type)]
        if unknown:
            raise SchemaError(
                f"stage {stage.name}: on an empty table its function makes a column {unknown[0]!r} without a type: say which it "
                'has, as in pa.array(values, pa.float64()), or state schema="..."'
            )
        return pa.schema([*plain(result.select(kept)).schema, *kept_change])


def visible(schema: pa.Schema) -> pa.Schema:
    """The columns that consumers and readers see."""
    return pa.schema([f for f in schema if not f.name.startswith(INTERNAL_PREFIX) and f.name != CHANGE_TYPE_COLUMN])


def jvm_options(stage: Stage) -> ExpressionOptions | StaticJoinOptions:
    """The options of a stage that the JVM evaluates, as far as its declaration says them."""
    if stage.kind == STATIC_JOIN:
        return StaticJoinOptions(table=stage.options["table"], on=stage.options["on"], how=stage.options["how"])
    return ExpressionOptions(expressions=stage.options["expressions"])


def _hashed_options(edge_key: tuple[str, ...], **others: object) -> str:
    """The text of options that fingerprints have, under the names that options had when stores were first written."""
    return str({"feed_key": edge_key, **others})


def _aggregate_parts(aggregate: Aggregate) -> tuple[Any, ...]:
    parts = (aggregate.function, aggregate.column, aggregate.by, aggregate.limit)
    return parts if parts[2:] != (None, None) else parts[:2]


def _check_names(stage: Stage, schema: pa.Schema, given: pa.Schema) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise SchemaError(f"stage {stage.name}: two of its columns have the same name: {', '.join(schema.names)}")
    for name in schema.names:
        mine = (name in RESERVED or name.startswith("_")) and name not in given.names
        if mine:
            raise SchemaError(f"stage {stage.name}: column {name!r}: names that begin with _ are kept for nosync")


def _check_clash(stage: Stage, schema: pa.Schema, added: Sequence[str]) -> None:
    for name in added:
        if name in schema.names:
            raise SchemaError(f"stage {stage.name}: its input has a column {name!r}, which the window adds: rename it")


def _has_map(type_: pa.DataType) -> bool:
    """Whether a type has a map at any depth."""
    if pa.types.is_map(type_):
        return True
    return any(_has_map(type_.field(i).type) for i in range(type_.num_fields))


def loop_schema(rows: pa.Schema) -> pa.Schema:
    """What the variable's layers hold: the row, how many derivations it has, and whether it is in the set."""
    return pa.schema([*rows, pa.field(COUNT, pa.int64()), pa.field(LIVE, pa.bool_())])


def with_one_key(rows: pa.Table) -> pa.Table:
    """Rows with the key that all of them have."""
    return rows.append_column(ALL_ROWS, pa.repeat(pa.scalar(0, ALL_ROWS_TYPE), rows.num_rows))
