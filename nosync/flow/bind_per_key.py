"""Binding of `per_key`: the rows of each key, arranged, and beside them what its function makes of these. Pure."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from nosync.flow.bind_keyed import check_key, hashed_options, over_all_rows
from nosync.flow.bindings import Bindings, check_made, on_no_rows, visible
from nosync.flow.bound_stage import ARRANGE, BoundStage
from nosync.flow.stage import Stage
from nosync.flow.stage_options import ArrangeOptions, PerKeyOptions
from nosync.kernels.aggregate_plan import ALL_ROWS
from nosync.kernels.joins import arranged_schema
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, plain
from nosync.lsm.errors import FlowError, SchemaError

ROWS = "kept_rows"
"""The part that has the rows of each key."""


def bind_per_key(bindings: Bindings, stage: Stage) -> None:
    """Binds the rows that are kept, and what is made of them, in one segment."""
    given = bindings.stages[stage.inputs[0]]
    if given.expires:
        raise FlowError(
            f"stage {stage.name}: {given.name} forgets rows (ttl=, keep=), and what is made of a key's rows is made anew "
            'without them: say expiry="retract" where they are forgotten'
        )
    columns = _columns(bindings, stage, given)
    if not stage.key:
        stage = over_all_rows(bindings, stage)
    upstream = bindings.stages[stage.inputs[0]]
    check_key(stage, stage.key, upstream)
    kept = _kept(bindings, stage, upstream)
    bindings.add_segment(kept, [bindings.edge(upstream.name, stage.key)])
    output = pa.schema([*(upstream.output.field(name) for name in stage.key), *columns])
    schema, key = arranged_schema(output, stage.key)
    bound = bindings.stage(
        replace(stage, inputs=(kept.name,)), schema, changing=True, key=key, options=PerKeyOptions(stage.key),
        described=f"rows of a key {hashed_options(stage.key)}",
    )  # fmt: skip
    bindings.add_beside(replace(bound, placed_by=stage.key, beside=(kept.name,)), kept.name)


def _kept(bindings: Bindings, stage: Stage, upstream: BoundStage) -> BoundStage:
    schema, key = arranged_schema(upstream.output, stage.key)
    described = f"None {hashed_options(stage.key, drop_nulls=False)}"
    bound = bindings.stage(
        bindings.part(stage, ROWS, ARRANGE, upstream.name), schema, changing=upstream.changing, key=key, edge_key=stage.key,
        options=ArrangeOptions(drops_nulls=False), described=described,
    )  # fmt: skip
    return replace(bound, output=schema)


def _columns(bindings: Bindings, stage: Stage, given: BoundStage) -> list[pa.Field]:
    """Returns the columns that the function makes beside the key: those that are declared, or seen on an empty table."""
    if stage.schema is not None:
        return list(bindings.parse(stage))
    check_key(stage, stage.key, given)
    made = on_no_rows(stage, given.output)
    if CHANGE_TYPE_COLUMN in made.column_names:
        raise SchemaError(
            f"stage {stage.name}: its function makes a column {CHANGE_TYPE_COLUMN!r}: it returns rows, no changes"
        )
    check_made(stage, made.schema)
    found = plain(made).schema
    for name in stage.key:
        if name not in found.names or found.field(name).type != given.output.field(name).type:
            raise SchemaError(
                f"stage {stage.name}: its function must return the key column {name!r} as it was given "
                f"({given.output.field(name).type}); it returned {', '.join(f'{f.name} {f.type}' for f in found)}"
            )
    return [field for field in visible(found) if field.name not in stage.key and field.name != ALL_ROWS]
