"""Binding of loops: the variable, and the edge by which the rows that the body returns go back to it. Pure."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from nosync.flow.arguments import LoopArguments, arguments_of
from nosync.flow.bind_keyed import check_key
from nosync.flow.bindings import Bindings
from nosync.flow.bound_flow import Loop
from nosync.flow.bound_stage import InputEdge, SegmentOutput
from nosync.flow.fingerprint import fingerprint
from nosync.flow.internal_columns import COUNT, LIVE
from nosync.flow.persistence import MEMORY
from nosync.flow.stage import Stage
from nosync.lsm.columnar.columns import describe
from nosync.lsm.errors import SchemaError


def bind_loop(bindings: Bindings, stage: Stage) -> None:
    """Binds a loop's variable. What goes back to it is known when the body is bound (see `close_loops`)."""
    start = bindings.stages[stage.inputs[0]]
    check_key(stage, start.output.names, start)
    members = [s for s in bindings.flow.stages if s.loop == stage.name]
    inside = {stage.name, *(s.name for s in members)}
    entering = {stage.inputs[0], *(name for s in members for name in s.inputs if name not in inside)}
    unknown = entering - bindings.stages.keys()
    assert not unknown, f"{unknown} are declared after the loop that uses them"
    growing = not any(bindings.stages[name].changing for name in entering)
    schema, key = loop_schema(start.output), tuple(start.output.names)
    outside = [f"{name} {bindings.stages[name].fingerprint}" for name in sorted(entering)]
    arguments = arguments_of(stage, LoopArguments)
    described = "; ".join([*map(_described, members), *outside, arguments.result])
    bound = bindings.stage(stage, schema, changing=not growing, key=key, edge_key=key, described=described)
    bindings.add_segment(bound, [bindings.edge(start.name, key)])
    bindings.loops[stage.name] = Loop(stage.name, arguments.result, growing, arguments.max_rounds)


def _described(stage: Stage) -> str:
    """Returns a text that changes with what a stage of a loop's body computes. The loop's variable is made of all of
    them.
    """
    code = stage.version if stage.version is not None else stage.function
    return fingerprint(stage.name, stage.kind, stage.inputs, code, stage.schema or "", stage.arguments.texts())


def close_loops(bindings: Bindings) -> None:
    """Lets the rows that each body returns go back to its variable."""
    for loop in bindings.loops.values():
        result = bindings.recorded(loop.result)
        if not result.recorded:
            result = bindings.stages[result.name] = replace(result, level=MEMORY)
        variable = bindings.stages[loop.name]
        if sorted(result.output.names) != sorted(variable.output.names) or any(
            result.output.field(f.name).type != f.type for f in variable.output
        ):
            raise SchemaError(
                f"stage {loop.name}: the loop's body returns ({describe(result.output)}), expected the columns of its "
                f"start ({describe(variable.output)})"
            )
        bindings.stages[loop.name] = replace(variable, inputs=(*variable.inputs, result.name))
        segment = bindings.segments[loop.name]
        edge = InputEdge(result.name, SegmentOutput(result.name), (), variable.key)
        bindings.segments[loop.name] = replace(segment, edges=(*segment.edges, edge))


def loop_schema(rows: pa.Schema) -> pa.Schema:
    """Returns the columns of the variable's layers: the row, its derivations, and whether it is in the set."""
    return pa.schema([*rows, pa.field(COUNT, pa.int64()), pa.field(LIVE, pa.bool_())])
