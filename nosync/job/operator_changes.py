"""Which stages of a flow have no use for what is recorded of them: other operators, functions, windows or columns. Pure.

What they hold was made by other code of another kind. They begin anew, from all rows that are there, or are refused where
that would not be right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import (
    ARRANGE,
    DISTINCT,
    FIRST,
    INTERVAL_JOIN,
    TIMED_UPDATE,
    WATERMARK,
    BoundStage,
    declared_of,
    part_of,
)
from nosync.flow.kinds import AGGREGATE, FINAL, JOIN, PER_KEY, UPDATE, WINDOW
from nosync.flow.stage_options import FinalOptions, IntervalOptions
from nosync.job.meanings import (
    CHANGES_OF_ROWS,
    DEDUPE_OF_CHANGES,
    OVER_CHANGES,
    ROWS,
    SESSION_WINDOW,
    RecordedStates,
    operator_of,
    times_of,
)
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.errors import FlowError

BY_CONTENTS = (AGGREGATE, ARRANGE, DISTINCT, JOIN, PER_KEY)
"""Kinds of stages that may hold rows of an input that changes, and find the one that goes by what is in it."""
_BY_ARRIVAL = (DISTINCT, FIRST, FINAL, INTERVAL_JOIN, TIMED_UPDATE)
"""Kinds of stages that cannot be made of all rows that are there: they give rows once, or go by which came first."""
_ANOTHER_NAME = "Give it another name (drop= the old one, add= the new), and it begins with no state"
_SHOWN = {
    AGGREGATE: "an aggregate",
    UPDATE: "an update",
    JOIN: "a join",
    WINDOW: "a window",
    SESSION_WINDOW: "a session window",
    PER_KEY: "a per_key",
    ROWS: "one that treats rows by themselves",
    CHANGES_OF_ROWS: "one that treats changes by themselves",
    DISTINCT: "a dedupe",
    DEDUPE_OF_CHANGES: "a dedupe of what changes",
    FIRST: "a dedupe by event time",
    FINAL: "a window with emit='final'",
    INTERVAL_JOIN: "a join by event time",
}
"""What operators are called."""
Shapes = Mapping[str, tuple[tuple[str, ...], pa.Schema]]
"""The key and the columns that are recorded of stages."""


def by_other_operators(
    flow: BoundFlow, changed: Collection[str], shapes: Shapes, was: RecordedStates, of_views: Collection[str]
) -> set[str]:
    """Returns the stages that are other operators than those that had their names, whether or not these or those are recorded;
    or the same over rows that change, and did not, or the other way round. What follows them begins anew. `changed`: the
    recorded ones with other fingerprints; `of_views`: what views are made of that begin anew by themselves.

    Raises FlowError where rows that were given cannot be taken back, or are needed and may have gone.
    """
    found = set()
    for stage in (one for one in flow.stages.values() if one.name in changed or not one.recorded):
        before, now = _operator_before(stage.name, shapes, was), operator_of(stage, flow)
        if stage.loop is not None or now is None or before in (None, now):
            continue
        if stage.recorded and stage.name not in of_views and (now == ROWS or stage.kind in _BY_ARRIVAL):
            why = "what it gave cannot be taken back" if now == ROWS else "what it makes depends on when rows came"
            raise FlowError(
                f"stage {stage.name} was {_shown(before)} and is now {_shown(now)}, and cannot go on from what it holds: {why}. "
                f"{_ANOTHER_NAME}"
            )
        found.add(stage.name)
    return found


def _operator_before(stage: str, shapes: Shapes, was: RecordedStates) -> str | None:
    """Returns which operator a stage was; None where a version before does not tell."""
    key, schema = shapes.get(stage, ((), None))
    if stage in was.operators or key or schema is None:
        return was.operators.get(stage)
    return CHANGES_OF_ROWS if CHANGE_TYPE_COLUMN in schema.names else ROWS


def _shown(operator: str) -> str:
    kind = operator.removesuffix(OVER_CHANGES)
    return _SHOWN.get(kind, kind) + (" over what changes" if kind != operator else "")


def of_other_shape(flow: BoundFlow, shapes: Shapes, was: RecordedStates) -> set[str]:
    """Returns the stages that have no use for what they hold: who find a row that goes by all that is in it, and hold other
    columns now, or in another order; and aggregates by other functions. With another key these are refused.

    Raises FlowError for other functions of windows that were given for good.
    """
    found = set()
    for stage in (flow.stages[name] for name in shapes):
        key, schema = shapes[stage.name]
        finds_by_contents = stage.kind in BY_CONTENTS and changing_input(flow, stage) is not None
        # A layer has columns that are rare only where a row of it has a value there.
        rare = stage.plan.rare if stage.plan is not None else frozenset()
        before, now = ([name for name in names if name not in rare] for names in (schema.names, stage.schema.names))
        has_other_functions = key == stage.key and _has_other_functions(stage, was.functions.get(stage.name, {}))
        if has_other_functions and _gives_final_windows(flow, stage):
            raise FlowError(
                f"stage {declared_of(stage.name)} has other aggregate functions than before, and cannot go on from what it "
                f"holds: it gave its windows for good. {_ANOTHER_NAME}"
            )
        if has_other_functions or (finds_by_contents and before != now):
            found.add(stage.name)
    return found


def by_other_times(flow: BoundFlow, shapes: Shapes, was: RecordedStates) -> set[str]:
    """Returns the stages whose windows are others than those that they hold. Raises FlowError where these were given for good,
    and for joins by event time whose times, bounds or type are others: rows that they need may have gone.
    """
    found = set()
    for stage in (flow.stages[name] for name in shapes if name in was.times):
        if times_of(stage) == was.times[stage.name]:
            continue
        if stage.kind != WINDOW or _gives_final_windows(flow, stage):
            what = "it gave its windows for good" if stage.kind == WINDOW else "rows that it would need may have gone"
            raise FlowError(
                f"stage {declared_of(stage.name)} goes by other windows, times or bounds than before, or is another join, and "
                f"cannot go on from what it holds: {what}. {_ANOTHER_NAME}"
            )
        found.add(stage.name)
    return found


def check_late_rows(flow: BoundFlow, changed: Collection[str]) -> None:
    """Raises FlowError where epochs are computed again in which other rows would be late, and a store of an earlier version
    cannot tell them from those that were: of one side of a join by event time, where only the other side has other code.
    """
    for join in flow.stages.values():
        if join.kind != INTERVAL_JOIN or not join.options_as(IntervalOptions).late_by_side:
            continue
        late = (part_of(join.name, f"late_{side}") for side in ("left", "right"))
        if part_of(join.name, WATERMARK) in changed and not all(part in changed for part in late):
            raise FlowError(
                f"stage {join.name}: one side of it has other code, and an earlier version began this store, which cannot keep "
                f"the late rows of the other side apart from those of the code before. {_ANOTHER_NAME}"
            )


def with_parts(flow: BoundFlow, reshaped: Collection[str], others: Collection[str]) -> set[str]:
    """Returns the stages, and with a window its watermark and its late rows, which are fed the same rows. What was another
    operator (`others`) has no parts yet: all of them begin with it.
    """
    whole = {declared_of(name) for name in reshaped if flow.stages[name].kind == WINDOW or name in others}
    return {*reshaped, *(name for name in flow.stages if declared_of(name) in whole)}


def changing_input(flow: BoundFlow, stage: BoundStage) -> str | None:
    """Returns an input that changes. For a side of a join it may be an input of the other side."""
    inputs = list(stage.inputs)
    if stage.kind == ARRANGE:
        inputs = [name for side in flow.stages[declared_of(stage.name)].inputs for name in flow.stages[side].inputs]
    return next((name for name in inputs if flow.stages[name].changing), None)


def _gives_final_windows(flow: BoundFlow, stage: BoundStage) -> bool:
    """Returns whether a stage has the open windows of one that gives each when it is closed."""
    stages = flow.stages.values()
    return any(isinstance(one.options, FinalOptions) and one.options.windows.name == stage.name for one in stages)


def _has_other_functions(stage: BoundStage, before: Mapping[str, Any]) -> bool:
    """Returns whether an aggregate would go on from the state of another function. `before`: the functions, by output."""
    now = stage.plan.functions if stage.plan is not None else {}
    return any(before.get(output, function) != function for output, function in now.items())
