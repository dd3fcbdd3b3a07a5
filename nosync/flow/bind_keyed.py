"""Binding of the stages that keep state by key: aggregates, updates, dedupes, windows and joins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from nosync.flow.arguments import JoinArguments, WindowArguments, arguments_of
from nosync.flow.bindings import Bindings, change_fields, visible
from nosync.flow.bound_stage import ARRANGE, DISTINCT, FINAL, LATE, WATERMARK, BoundStage, SegmentOutput
from nosync.flow.event_time import LATE_ROWS, LATE_UNTIL, WATERMARK_AFTER, WATERMARK_BEFORE, inputs_field
from nosync.flow.internal_columns import TOUCHED_COLUMN
from nosync.flow.kinds import AGGREGATE, DEDUPE, MAP, UPDATE, WINDOW
from nosync.flow.persistence import NONE
from nosync.flow.stage import Stage
from nosync.flow.stage_options import (
    NO_OPTIONS,
    ArrangeOptions,
    FinalOptions,
    JoinOptions,
    UpdateOptions,
    WatermarkOptions,
)
from nosync.kernels.aggregate_plan import ALL_ROWS, ALL_ROWS_TYPE, Plan
from nosync.kernels.join_types import JoinSpec
from nosync.kernels.joins import arranged_schema, joined_schema
from nosync.kernels.own_function import OwnFunction
from nosync.kernels.windows import END, MIN, START, Window, is_time, window_type
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, describe
from nosync.lsm.columnar.hashing import check_key_type
from nosync.lsm.errors import FlowError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean

_CHANGE_FIELD = pa.field(CHANGE_TYPE_COLUMN, pa.string())


def check_key(stage: Stage, key: Sequence[str], upstream: BoundStage) -> None:
    """Raises SchemaError for a key column that the input does not have, or whose type cannot be one."""
    for name in key:
        if name not in upstream.output.names:
            raise SchemaError(
                f"stage {stage.name}: key column {name!r} is not in its input {upstream.name} "
                f"({describe(upstream.output)})"
                f"{did_you_mean(name, upstream.output.names)}"
            )
        try:
            check_key_type(name, upstream.output.field(name).type)
        except SchemaError as error:
            raise SchemaError(f"stage {stage.name}: {error}") from None


def hashed_options(edge_key: tuple[str, ...], **others: object) -> str:
    """Returns the text that fingerprints have of a part's options, under the names that these had when stores were
    first written.
    """
    return str({"feed_key": edge_key, **others})


# --- aggregates, updates and dedupes ----------------------------------------------------------------------------------


def bind_keyed(bindings: Bindings, stage: Stage) -> None:
    """Binds an aggregate, an update or a dedupe."""
    if stage.kind == AGGREGATE and not stage.key:
        stage = over_all_rows(bindings, stage)
    upstream = bindings.stages[stage.inputs[0]]
    key = stage.key or tuple(upstream.output.names)  # a dedupe without a key is one by whole rows
    check_key(stage, key, upstream)
    kind, changing, plan, options, forgets = stage.kind, True, None, NO_OPTIONS, False
    if stage.kind == AGGREGATE:
        plan = Plan(stage.name, key, stage.aggregates, upstream.output, retracts=upstream.changing)
        schema = plan.schema
    elif stage.kind == DEDUPE:
        rest = [name for name in upstream.output.names if name not in key]
        if upstream.changing:
            kind, plan = AGGREGATE, Plan.of_rows(stage.name, key, rest, upstream.output)
            schema = plan.schema
        else:
            kind, changing = DISTINCT, False
            schema = pa.schema([upstream.output.field(name) for name in (*key, *rest)])
    else:
        assert stage.kind == UPDATE
        options = UpdateOptions(stage.arguments.expires_after)
        forgets = options.ttl is not None and bindings.forgets(stage)
        touched = [pa.field(TOUCHED_COLUMN, pa.int64())] if options.ttl is not None else []
        schema = pa.schema([*(upstream.output.field(name) for name in key), *bindings.parse(stage), *touched])
    origins = () if changing else bindings.inputs.origins(stage)
    bound = bindings.stage(
        stage, schema, changing=changing, key=key, edge_key=key, plan=plan, options=options, origins=origins,
        forgets=forgets,
    )  # fmt: skip
    bound = replace(bound, kind=kind)
    if upstream.placed_by == key and upstream.name in bindings.segment_of and upstream.loop is None:
        bindings.add_beside(bound, upstream.name)  # the rows of each key are in its shard already
    else:
        bindings.add_segment(bound, [bindings.edge(upstream.name, key)])


def over_all_rows(bindings: Bindings, stage: Stage) -> Stage:
    """Returns the aggregate by a key that is the same in all rows, which a stage before it adds to them."""
    upstream = bindings.stages[stage.inputs[0]]
    output = pa.schema([*upstream.output, pa.field(ALL_ROWS, ALL_ROWS_TYPE)])
    schema = pa.schema([*output, *change_fields(upstream.rows_schema)])
    described = "None {}"  # fingerprints have a window and options of every part, and this one has neither
    part = bindings.part(stage, "all", MAP, upstream.name)
    bound = bindings.stage(part, schema, changing=upstream.changing, described=described)
    bindings.add_after(replace(bound, function=WithOneKey(), output=output, level=NONE), upstream.name)
    return replace(stage, key=(ALL_ROWS,), inputs=(part.name,))


class WithOneKey(OwnFunction):
    """Gives rows the key that all of them have."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        return rows.append_column(ALL_ROWS, pa.repeat(pa.scalar(0, ALL_ROWS_TYPE), rows.num_rows))


# --- windows ----------------------------------------------------------------------------------------------------------


def bind_window(bindings: Bindings, stage: Stage) -> None:
    """Binds a window as three stages on the same rows: the watermark, the late rows, and the aggregates."""
    upstream = bindings.recorded(stage.inputs[0])
    arguments = arguments_of(stage, WindowArguments)
    window = arguments.window
    _check_window(stage, window, upstream)
    time_type = window_type(upstream.output.field(window.time).type)
    bounds = [pa.field(name, time_type) for name in (START, END)]
    expanded = pa.schema([*upstream.output, *bounds])
    key = (*stage.key, START) if window.session else (*stage.key, START, END)
    edge_key = stage.key if window.session else key
    plan = Plan(stage.name, key, stage.aggregates, expanded, retracts=upstream.changing)
    schema = pa.schema([*plan.schema, bounds[1]]) if window.session else plan.schema

    is_final = arguments.is_final
    window = replace(
        window, policy=bindings.inputs.policy(stage), is_lenient=bindings.is_lenient(stage, window), is_final=is_final,
        keep_us=0 if is_final else window.keep_us,
    )  # fmt: skip
    inputs = upstream.origins if window.policy == MIN else ()
    of_inputs = {"of_inputs": inputs, "idle_after": window.idle_after} if inputs else {}
    text = f"{window!r}{' lenient' if window.is_lenient else ''}{' final' if is_final else ''}"
    described = f"{text} {hashed_options(edge_key, **of_inputs)}"
    parts = []
    if window.delay_us is not None:
        part = bindings.part(stage, "watermark", WATERMARK, upstream.name)
        parts.append(
            bindings.stage(
                part, watermark_schema(time_type, inputs, window), changing=False, edge_key=edge_key, window=window,
                options=WatermarkOptions(inputs), described=described,
            )
        )  # fmt: skip
    part = bindings.part(stage, "late", LATE, upstream.name)
    late = pa.schema([*expanded, *change_fields(upstream.rows_schema)])
    parts.append(
        bindings.stage(part, late, changing=upstream.changing, edge_key=edge_key, window=window, described=described)
    )
    described = described if inputs else text
    windows = _open_windows(bindings, stage, upstream) if is_final else stage
    forgets = is_final or (window.keep_us is not None and bindings.forgets(stage))
    parts.append(
        bindings.stage(
            windows, schema, changing=True, key=key, edge_key=edge_key, plan=plan, window=window, described=described,
            forgets=forgets,
        )
    )  # fmt: skip
    edge = replace(bindings.edge(upstream.name, edge_key), output=SegmentOutput(upstream.name, window))
    bindings.add_segment(parts[0], [edge])
    for bound in parts[1:]:
        bindings.add_beside(bound, parts[0].name)
    if is_final:
        final = replace(stage, kind=FINAL, key=())
        bound = bindings.stage(
            final, visible(schema), changing=False, edge_key=edge_key, window=window, described=described,
            options=FinalOptions(bindings.stages[windows.name]),
        )  # fmt: skip
        bindings.add_beside(replace(bound, beside=(windows.name,)), parts[0].name)


def _open_windows(bindings: Bindings, stage: Stage, upstream: BoundStage) -> Stage:
    """Returns the part of a window stage that has the windows which are not closed yet."""
    part = bindings.part(stage, "open", WINDOW, upstream.name)
    return replace(part, key=stage.key, aggregates=stage.aggregates)


def check_time(stage: Stage, window: Window, upstream: BoundStage) -> None:
    """Raises SchemaError where the input has no column of event time under the name that was given."""
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


def _check_window(stage: Stage, window: Window, upstream: BoundStage) -> None:
    check_time(stage, window, upstream)
    if window.session and (upstream.changing or not stage.key):
        why = "needs a key" if not stage.key else f"needs an input that only grows, and {upstream.name} changes"
        raise FlowError(f"stage {stage.name}: a session window {why}")
    check_key(stage, stage.key, upstream)
    for name in (START, END):
        if name in upstream.output.names:
            raise SchemaError(f"stage {stage.name}: its input has a column {name!r}, which the window adds: rename it")


def watermark_schema(time_type: pa.DataType, inputs: Sequence[str], window: Window) -> pa.Schema:
    """Returns what a window records of its watermark at each epoch. `inputs` are those that have a watermark each."""
    fields = [pa.field(name, time_type) for name in (WATERMARK_BEFORE, WATERMARK_AFTER)]
    fields.append(pa.field(LATE_ROWS, pa.int64()))
    fields += [inputs_field(time_type)] if inputs else []
    fields += [pa.field(LATE_UNTIL, time_type)] if window.is_lenient else []
    return pa.schema(fields)


# --- joins ------------------------------------------------------------------------------------------------------------


def bind_join(bindings: Bindings, stage: Stage) -> None:
    """Binds a join as three stages in one segment: the two sides, arranged by key, and the joined rows."""
    left, right = (bindings.stages[name] for name in stage.inputs)
    arguments = arguments_of(stage, JoinArguments)
    spec = JoinSpec(arguments.on, arguments.how)
    check_join(stage, spec, left, right)
    parts = [
        _arranged(bindings, stage, part, side, spec, drops_nulls=not needs_nulls)
        for part, side, needs_nulls in zip(("left", "right"), (left, right), spec.needs_null_keys, strict=True)
    ]
    schema, key = joined_schema(left.output, right.output, spec)
    options = JoinOptions(spec, schema, key, sides_expire=left.expires or right.expires)
    changing = left.changing or right.changing or not spec.only_grows
    if stage.loop is not None:
        schema, key = pa.schema([*visible(schema), *([_CHANGE_FIELD] if changing else [])]), ()
    declared = replace(stage, inputs=tuple(part.name for part in parts))
    bindings.add_segment(parts[0], list(dict.fromkeys(bindings.edge(side.name, spec.on) for side in (left, right))))
    bindings.add_beside(parts[1], parts[0].name)
    bound = bindings.stage(declared, schema, changing=changing, key=key, options=options, described=repr(spec))
    beside = tuple(part.name for part in parts)
    bindings.add_beside(replace(bound, placed_by=spec.on, beside=beside), parts[0].name)


def check_join(stage: Stage, spec: JoinSpec, left: BoundStage, right: BoundStage) -> None:
    for side in (left, right):
        check_key(stage, spec.on, side)
    for name in spec.on:
        types = [side.output.field(name).type for side in (left, right)]
        if types[0] != types[1]:
            raise SchemaError(
                f"stage {stage.name}: join column {name!r} is {types[0]} in {left.name} "
                f"and {types[1]} in {right.name}: cast one"
            )
    if spec.is_one_sided:
        forgets = next((side.name for side in (left, right) if side.expires), None)
        if forgets is not None:
            raise FlowError(
                f"stage {stage.name}: a {spec.how} join cannot know whether a row had a match that {forgets} has "
                'forgotten (ttl=, keep=): say expiry="retract" where rows are forgotten, or use a left join'
            )
        return
    clash = [n for n in left.output.names if n in right.output.names and n not in spec.on]
    if clash:
        raise SchemaError(
            f"stage {stage.name}: {left.name} and {right.name} both have a column {clash[0]!r}; rename one with select "
            "or map"
        )


def _arranged(
    bindings: Bindings, stage: Stage, part: str, side: BoundStage, spec: JoinSpec, *, drops_nulls: bool
) -> BoundStage:
    """Returns one side of a join, by the join's key."""
    schema, key = arranged_schema(side.output, spec.on)
    # Versions before took rows that differ in which of their columns is null for equal ones.
    described = f"None {hashed_options(spec.on, drop_nulls=drops_nulls)}{' nulls' if side.changing else ''}"
    bound = bindings.stage(
        bindings.part(stage, part, ARRANGE, side.name), schema, changing=side.changing, key=key, edge_key=spec.on,
        options=ArrangeOptions(drops_nulls), described=described,
    )  # fmt: skip
    return replace(bound, output=schema)
