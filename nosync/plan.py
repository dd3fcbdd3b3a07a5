"""A dataflow resolved against schemas: what every task needs to know of each stage. Pure; no Spark, no data.

Segments: a source or keyed stage and the stateless stages after it work on the same shard, so they run in one task.
Between segments rows move to the shard of the next key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from nosync.aggregates import Plan
from nosync.dataflow import AGGREGATE, FILTER, MAP, SOURCE, STATELESS, UPDATE, Dataflow, Stage
from nosync.fingerprint import fingerprint
from nosync.lsm.columns import CHANGE_TYPE_COLUMN, INTERNAL_PREFIX, RESERVED, describe, plain
from nosync.lsm.errors import FlowError, NosyncError, SchemaError
from nosync.lsm.hashing import check_key_type

ParseDdl = Callable[[str], pa.Schema]


@dataclass(frozen=True)
class BoundStage:
    """A stage with its schemas and fingerprint."""

    name: str
    kind: str
    fingerprint: str
    input: str | None
    key: tuple[str, ...]
    function: Callable[..., object] | None = field(repr=False)
    schema: pa.Schema
    """The columns that its layers hold."""
    output: pa.Schema
    """The columns that consumers and readers see: without internal ones."""
    changing: bool
    """Whether its output rows can be updated or deleted later (then they carry `_change_type`)."""
    plan: Plan | None = None

    @property
    def keyed(self) -> bool:
        return bool(self.key)


@dataclass(frozen=True)
class BoundFlow:
    """A dataflow that is ready to run."""

    name: str
    key_groups: int
    stages: dict[str, BoundStage]

    def consumers(self, name: str) -> list[BoundStage]:
        return [stage for stage in self.stages.values() if stage.input == name]

    def path(self, name: str) -> tuple[BoundStage, ...]:
        """From the head of the stage's segment to the stage."""
        stage = self.stages[name]
        path = [stage]
        while path[0].kind in STATELESS:
            assert path[0].input is not None
            path.insert(0, self.stages[path[0].input])
        return tuple(path)

    def exits(self) -> list[tuple[BoundStage, list[BoundStage]]]:
        """The stages where rows leave their segment, each with the keyed stages they go to (none: an end of the flow)."""
        found = []
        for stage in self.stages.values():
            consumers = self.consumers(stage.name)
            keyed = [consumer for consumer in consumers if consumer.keyed]
            if keyed or not consumers:
                found.append((stage, keyed))
        return found


def bind(flow: Dataflow, parse_ddl: ParseDdl) -> BoundFlow:
    """Resolves schemas and fingerprints. Raises FlowError or SchemaError naming the stage."""
    if not flow.sources:
        raise FlowError(f"dataflow {flow.name} has no source")
    bound: dict[str, BoundStage] = {}
    for stage in flow.stages:
        if stage.input is not None and stage.input not in bound:
            raise FlowError(f"stage {stage.name}: its input {stage.input!r} is not a stage of dataflow {flow.name}")
        bound[stage.name] = _bind_stage(stage, bound[stage.input] if stage.input else None, parse_ddl)
    return BoundFlow(flow.name, flow.key_groups, bound)


def _bind_stage(stage: Stage, upstream: BoundStage | None, parse_ddl: ParseDdl) -> BoundStage:
    plan: Plan | None = None
    if upstream is None:
        schema = _parse(stage, parse_ddl)
        changing = False
    else:
        changing = upstream.changing or stage.kind in (AGGREGATE, UPDATE)
        for name in stage.key:
            if name not in upstream.output.names:
                raise SchemaError(
                    f"stage {stage.name}: key column {name!r} is not in its input {upstream.name} ({describe(upstream.output)})"
                )
            check_key_type(name, upstream.output.field(name).type)
        if stage.kind == AGGREGATE:
            plan = Plan(stage.name, stage.key, stage.aggregates, upstream.output, retracts=upstream.changing)
            schema = plan.schema
        elif stage.kind == UPDATE:
            keys = [upstream.output.field(name) for name in stage.key]
            schema = pa.schema([*keys, *_parse(stage, parse_ddl)])
        elif stage.kind == FILTER:
            schema = input_schema(upstream)
        else:
            schema = _map_schema(stage, upstream, parse_ddl)
    output = pa.schema([f for f in schema if not f.name.startswith(INTERNAL_PREFIX) and f.name != CHANGE_TYPE_COLUMN])
    code = stage.version if stage.version is not None else stage.function
    described = str(schema) if stage.kind == SOURCE else ""
    fp = fingerprint(
        stage.kind,
        stage.key,
        code,
        stage.schema or "",
        {name: (a.function, a.column) for name, a in stage.aggregates.items()},
        described,
        upstream.fingerprint if upstream else "",
    )
    return BoundStage(
        stage.name, stage.kind, fp, stage.input, stage.key, stage.function, schema, output, changing, plan
    )


def input_schema(upstream: BoundStage) -> pa.Schema:
    """What a stateless stage after `upstream` is given: its output, and the change type where rows can change."""
    if upstream.changing:
        return pa.schema([*upstream.output, pa.field(CHANGE_TYPE_COLUMN, pa.string())])
    return upstream.output


def _parse(stage: Stage, parse_ddl: ParseDdl) -> pa.Schema:
    try:
        schema = parse_ddl(stage.schema or "")
    except NosyncError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the parser raises, the user's schema is at fault
        reason = str(error).strip().splitlines()[0]
        raise SchemaError(f"stage {stage.name}: cannot read the schema {stage.schema!r}: {reason}") from None
    for name in schema.names:
        if name in RESERVED or name.startswith(INTERNAL_PREFIX) or name in stage.key:
            raise SchemaError(
                f"stage {stage.name}: column {name!r} of its schema is a key column, or a name that nosync uses itself"
            )
    return plain(schema.empty_table()).schema


def _map_schema(stage: Stage, upstream: BoundStage, parse_ddl: ParseDdl) -> pa.Schema:
    given = input_schema(upstream)
    if stage.schema is not None:
        schema = _parse(stage, parse_ddl)
        return pa.schema([*schema, *(f for f in given if f.name == CHANGE_TYPE_COLUMN)])
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
    schema = plain(result.select(kept)).schema
    return pa.schema([*schema, *(f for f in given if f.name == CHANGE_TYPE_COLUMN)])
