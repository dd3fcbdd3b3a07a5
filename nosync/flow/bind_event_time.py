"""Binding of the operators that go by the event time of rows and have no windows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from nosync.flow.arguments import (
    AsofJoinArguments,
    DedupeArguments,
    IntervalJoinArguments,
    TimedJoinArguments,
    TimedUpdateArguments,
    arguments_of,
)
from nosync.flow.bind_keyed import check_join, check_key, check_time, hashed_options, watermark_schema
from nosync.flow.bindings import Bindings
from nosync.flow.bound_stage import (
    FIRST,
    INTERVAL_JOIN,
    INTERVAL_SIDE,
    LATE,
    OUTPUT,
    SEEN,
    TIMED_UPDATE,
    WATERMARK,
    BoundStage,
    InputEdge,
    SegmentOutput,
)
from nosync.flow.stage import Stage
from nosync.flow.stage_options import (
    FirstOptions,
    IntervalOptions,
    OutputOptions,
    TimedUpdateOptions,
    WatermarkOptions,
)
from nosync.kernels.asof_joins import AsofSpec
from nosync.kernels.interval_joins import IntervalSide, IntervalSpec, results_schema, side_schema
from nosync.kernels.join_types import JoinSpec
from nosync.kernels.windows import DUE_COLUMN, MAX, MIN, UNTIL_COLUMN, UNTIL_TYPE, Window
from nosync.lsm.columnar.columns import describe
from nosync.lsm.errors import FlowError, SchemaError

SIDES = ("left", "right")


def bind_first(bindings: Bindings, stage: Stage) -> None:
    """Binds a dedupe within a time: the watermark, the late rows, the keys that were seen, and the rows that were the
    first of theirs.
    """
    upstream = _growing(bindings, stage, stage.inputs[0])
    arguments = arguments_of(stage, DedupeArguments)
    window = replace(arguments.window, policy=bindings.inputs.policy(stage))
    key = stage.key or tuple(upstream.output.names)
    check_time(stage, window, upstream)
    check_key(stage, key, upstream)
    inputs = upstream.origins if window.policy == MIN else ()
    within_us = arguments.within_us
    described = f"{window} within {within_us} {hashed_options(key, of_inputs=inputs, idle_after=window.idle_after)}"
    parts = _times(bindings, stage, window, [(upstream, window, "late")], WatermarkOptions(inputs), key, described)
    seen = bindings.part(stage, "seen", SEEN, upstream.name)
    options = FirstOptions(key, within_us, seen.name)
    schema = pa.schema([*(upstream.output.field(name) for name in key), pa.field(UNTIL_COLUMN, UNTIL_TYPE)])
    parts.append(
        bindings.stage(
            seen, schema, changing=True, key=key, edge_key=key, window=window, options=options, described=described,
            forgets=True,
        )
    )  # fmt: skip
    first = replace(stage, kind=FIRST, key=())
    bound = bindings.stage(
        first, upstream.output, changing=False, edge_key=key, window=window, options=options, described=described
    )
    parts.append(replace(bound, beside=(seen.name,)))
    _add(bindings, parts, [_edge(bindings, upstream, key, window)])


def bind_interval_join(bindings: Bindings, stage: Stage) -> None:
    """Binds an interval join or an as-of join: the watermark, the late rows and the state of each side, and the joined rows."""
    left, right = (_growing(bindings, stage, name) for name in stage.inputs)
    if left.name == right.name:
        raise FlowError(
            f"stage {stage.name}: {left.name} is joined with itself: give one side another name, as "
            f'{left.name}.select("again", "*") does'
        )
    arguments = arguments_of(stage, TimedJoinArguments)
    spec = JoinSpec(arguments.on, arguments.how)
    interval, lasts_us = _spec_of(arguments, spec)
    check_join(stage, spec, left, right)
    policy = bindings.inputs.policy(stage)
    windows = tuple(replace(window, policy=policy) for window in arguments.windows)
    for side, window in zip((left, right), windows, strict=True):
        check_time(stage, window, side)
    sides, schemas = [], []
    for side, window, tracks, nulls, for_us in zip(
        (left, right), windows, interval.tracks, spec.needs_null_keys, lasts_us, strict=True
    ):
        schema, key = side_schema(side.output, spec.on, tracks=tracks)
        sides.append(IntervalSide(window, schema, for_us, tracks, nulls))
        schemas.append((schema, key))
    described = f"{windows} {interval} {hashed_options(spec.on, idle_after=windows[0].idle_after)}"
    if policy == MAX:  # which a window does not say of itself
        described += f" {MAX}"
    times = _watermark_of_sides(stage, (left, right), windows)
    late = [(side, window, f"late_{name}") for name, side, window in zip(SIDES, (left, right), windows, strict=True)]
    parts = _times(bindings, stage, windows[0], late, times, spec.on, described)
    states = [bindings.part(stage, f"kept_{name}", INTERVAL_SIDE, left.name) for name in SIDES]
    joined = results_schema(left.output, right.output, spec)
    options = IntervalOptions(
        interval, (sides[0], sides[1]), (states[0].name, states[1].name), joined, bindings.is_late_by_side(stage)
    )
    names = tuple(state.name for state in states)
    for state, (schema, key) in zip(states, schemas, strict=True):
        bound = bindings.stage(
            replace(state, inputs=(left.name, right.name)), schema, changing=True, key=key, edge_key=spec.on,
            window=windows[0], options=options, described=described, forgets=True,
        )  # fmt: skip
        parts.append(replace(bound, beside=names))
    bound = bindings.stage(
        replace(stage, kind=INTERVAL_JOIN), joined, changing=False, edge_key=spec.on, window=windows[0],
        options=options, described=described,
    )  # fmt: skip
    parts.append(replace(bound, beside=names))
    edges = [_edge(bindings, side, spec.on, window) for side, window in zip((left, right), windows, strict=True)]
    _add(bindings, parts, edges)


def _spec_of(arguments: TimedJoinArguments, spec: JoinSpec) -> tuple[IntervalSpec | AsofSpec, tuple[int, int]]:
    """Returns what a join by event time compares, and for how long after its time a row of each side waits."""
    if isinstance(arguments, AsofJoinArguments):
        return AsofSpec(spec, arguments.within_us), (0, 0)
    assert isinstance(arguments, IntervalJoinArguments), "there are two kinds"
    lower_us, upper_us = arguments.lower_us, arguments.upper_us
    return IntervalSpec(spec, lower_us, upper_us), (upper_us, -lower_us)


def bind_timed_update(bindings: Bindings, stage: Stage) -> None:
    """Binds an update by event time, or with several outputs: the watermark and the late rows, the state, and the
    outputs.
    """
    arguments = arguments_of(stage, TimedUpdateArguments)
    by_time = arguments.window is not None
    upstream = _growing(bindings, stage, stage.inputs[0]) if by_time else bindings.recorded(stage.inputs[0])
    check_key(stage, stage.key, upstream)
    timer, ttl_us, window = arguments.timer, arguments.ttl_us, arguments.window
    inputs: tuple[str, ...] = ()
    if window is not None:
        window = replace(window, policy=bindings.inputs.policy(stage))
        check_time(stage, window, upstream)
        inputs = upstream.origins if window.policy == MIN else ()
    state_columns = bindings.parse(stage)
    shown = pa.schema([*(upstream.output.field(name) for name in stage.key), *state_columns])
    if timer is not None and (
        timer not in state_columns.names or not pa.types.is_timestamp(state_columns.field(timer).type)
    ):
        raise SchemaError(
            f"stage {stage.name}: timer={timer!r} is no timestamp of its state ({describe(state_columns)})"
        )
    outputs = {
        name: bindings.parse(replace(bindings.part(stage, name, OUTPUT, upstream.name), schema=ddl))
        for name, ddl in arguments.outputs.items()
    }
    options = TimedUpdateOptions(shown, outputs, timer, ttl_us)
    more = hashed_options(stage.key, of_inputs=inputs, idle_after=window.idle_after if window else None)
    described = f"{window} {timer} {ttl_us} {arguments.outputs} {more}"
    parts = []
    if window is not None:
        times = WatermarkOptions(inputs)
        parts = _times(bindings, stage, window, [(upstream, window, "late")], times, stage.key, described)
    hidden = {UNTIL_COLUMN: ttl_us is not None, DUE_COLUMN: timer is not None}
    schema = pa.schema([*shown, *(pa.field(name, UNTIL_TYPE) for name, has in hidden.items() if has)])
    timed = replace(stage, kind=TIMED_UPDATE)
    state = bindings.stage(
        timed, schema, changing=True, key=stage.key, edge_key=stage.key, window=window, options=options,
        described=described, forgets=ttl_us is not None,
    )  # fmt: skip
    parts.append(state)
    for name, columns in outputs.items():
        part = replace(
            bindings.part(stage, name, OUTPUT, upstream.name), function=stage.function, version=stage.version
        )
        bound = bindings.stage(
            part, columns, changing=False, edge_key=stage.key, window=window, options=OutputOptions(name, state),
            described=f"{described} of {state.fingerprint}{bindings.named(part.name)}",
        )  # fmt: skip
        # Its rows lie in the shard of the key that they came of, and a column of that name may have any value.
        parts.append(replace(bound, beside=(state.name,), deterministic=stage.deterministic, placed_by=()))
    edge = bindings.edge(upstream.name, stage.key) if window is None else _edge(bindings, upstream, stage.key, window)
    _add(bindings, parts, [edge])


def _growing(bindings: Bindings, stage: Stage, name: str) -> BoundStage:
    upstream = bindings.recorded(name)
    if upstream.changing:
        raise FlowError(
            f"stage {stage.name}: its input {name} changes, and here rows may only be added: what was given once is "
            'never taken back. Give it windows with emit="final", or rows from before they are aggregated'
        )
    return upstream


def _watermark_of_sides(stage: Stage, sides: Sequence[BoundStage], windows: Sequence[Window]) -> WatermarkOptions:
    """Returns what the watermark of a join goes by: every input of both sides, each with the delay of its side."""
    of_sides = [side.origins or (side.name,) for side in sides]
    both = set(of_sides[0]) & set(of_sides[1])
    if both:
        raise FlowError(
            f"stage {stage.name}: rows of {sorted(both)[0]} come by both sides, whose watermarks are to be told apart: "
            "make what comes by one side a stage that keeps state, or a source of its own"
        )
    delays_us = {name: window.delay_us or 0 for names, window in zip(of_sides, windows, strict=True) for name in names}
    of_edges = tuple(side.name for side in sides)
    return WatermarkOptions(tuple(delays_us), of_edges, delays_us, tuple(windows))


def _times(
    bindings: Bindings,
    stage: Stage,
    window: Window,
    late: Sequence[tuple[BoundStage, Window, str]],
    options: WatermarkOptions,
    edge_key: tuple[str, ...],
    described: str,
) -> list[BoundStage]:
    """Returns the watermark of a stage and the late rows of its inputs, which only grow."""
    first = late[0][0]
    part = replace(
        bindings.part(stage, "watermark", WATERMARK, first.name), inputs=tuple(side.name for side, _, _ in late)
    )
    schema = watermark_schema(UNTIL_TYPE, options.inputs, window)
    found = [
        bindings.stage(
            part, schema, changing=False, edge_key=edge_key, window=window, options=options, described=described
        )
    ]
    if len(late) > 1:
        described += bindings.watched(stage, found[0])
    for side, times, name in late:
        part = bindings.part(stage, name, LATE, side.name)
        found.append(
            bindings.stage(part, side.output, changing=False, edge_key=edge_key, window=times, described=described)
        )
    return found


def _edge(bindings: Bindings, upstream: BoundStage, key: tuple[str, ...], window: Window) -> InputEdge:
    return replace(bindings.edge(upstream.name, key), output=SegmentOutput(upstream.name, window))


def _add(bindings: Bindings, parts: Sequence[BoundStage], edges: Sequence[InputEdge]) -> None:
    bindings.add_segment(parts[0], edges)
    for bound in parts[1:]:
        bindings.add_beside(bound, parts[0].name)
