"""Unit tests of flows, without Spark and without a directory to clean up.

    from nosync.testing import FlowTester

    tester = FlowTester(flow)
    tester.advance({"orders": [("ann", 3), ("bob", 5)]})
    assert tester.read("spending").to_pylist() == [...]
    tester.assert_deterministic()

It runs the code of tasks, shard by shard, in this process: layers have the digests that they have on Spark.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage
from nosync.flow.dataflow import Dataflow
from nosync.flow.ddl import columns_of
from nosync.flow.kinds import is_shown
from nosync.flow.stage_options import JvmOptions
from nosync.flow.tables import GIVEN_CHANGE_TYPE
from nosync.job.epoch_layout import EpochLayout
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position, location_of
from nosync.job.reading import why_not_recorded
from nosync.job.reports import EpochReport, epoch_report
from nosync.job.sealing import Sealing
from nosync.kernels.expressions import applied
from nosync.kernels.python_rows import column_of, table_of
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN, as_array, nullable
from nosync.lsm.errors import (
    FlowError,
    InvalidInputError,
    NosyncError,
    NotAvailableError,
    OutOfOrderError,
    ScanError,
    SchemaError,
    StageError,
    UnknownStageError,
)
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.timestamp import pack
from nosync.lsm.node.node import Node
from nosync.lsm.platform.nearest import did_you_mean, named_stages
from nosync.lsm.settings import StoreSettings
from nosync.lsm.store.opened import abandon
from nosync.lsm.store.opening import open_store
from nosync.lsm.trace.change_feed import INSERT
from nosync.runtime.epoch_plan import EpochPlan
from nosync.runtime.local_part import run_epoch
from nosync.testing import determinism
from nosync.testing.expressions import analyze

Rows: TypeAlias = "pa.Table | Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]] | Mapping[str, Sequence[Any]]"
"""The rows of a source: an Arrow table, a list of dictionaries or of tuples, or a dictionary of columns."""

_IN_MEMORY = Path("/dev/shm")


class FlowTester:
    """Runs a flow epoch by epoch. Use as a context manager, or let it go: nothing is left behind.

    Of expressions (`select`, `where`) it evaluates what tasks do by themselves: see nosync.testing.expressions. Raises
    FlowError for a flow that needs Spark, and whatever a Job raises for one that is wrong.
    """

    def __init__(self, flow: Dataflow, *, shards: int = 2) -> None:
        if not isinstance(flow, Dataflow):
            raise InvalidInputError(f"FlowTester({type(flow).__name__}): expected a nosync.Dataflow")
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= flow.key_groups:
            raise FlowError(f"shards is {shards!r}, expected 1 to {flow.key_groups} (the flow's key groups)")
        self._declared, self._shards = flow, shards
        self._given: list[dict[str, pa.Table]] = []
        within = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        directory = tempfile.TemporaryDirectory(prefix="nosync-tester-", dir=within, ignore_cleanup_errors=True)
        settings = StoreSettings(background=False, merge=False, archive_epochs=None)
        self._store = open_store(Path(directory.name) / "store", key_groups=flow.key_groups, settings=settings)
        self._close = weakref.finalize(self, _closed, self._store.node, directory)
        position = Position(self._store, MAIN)
        self._versions = FlowVersions(flow, self._store.node, position, _parsed, analyze)
        position.take_over(self._store.node.timelines.timeline().id)
        layout = EpochLayout(self._store.directory, position, self._versions, shards)
        self._position, self._sealing = position, Sealing(self._store.node, position, self._versions, layout)

    def advance(self, rows: Mapping[str, Rows] | None = None, *, t: int | None = None) -> EpochReport:
        """Runs the next epoch, and seals it. A source that is not named gets no rows.

        `t`: its number (default: the one after the last; the first is 0). Raises what `Job.advance` raises; then the epoch was
        not run, and may be given other rows.
        """
        started = time.perf_counter()
        last = self.last_sealed()
        t = (0 if last is None else last + 1) if t is None else t
        if last is not None and t != last + 1:
            raise OutOfOrderError(f"epoch {t} cannot run: the next one is {last + 1}")
        flow, node = self._versions.flow, self._store.node
        given = self._tables(rows or {})
        plan = EpochPlan(
            location=location_of(self._store),
            t=t,
            shards=self._shards,
            histories=node.histories(),
            timeline=self._position.timeline,
            instance=self._position.instance,
        )
        try:
            reports = run_epoch(flow, plan, given)
            self._sealing.seal(flow, t, reports)
        except ScanError as error:
            self._forget_attempt(last)
            raise StageError(f"timestamp {t}: {error}", stage=error.stage, shard="", t=str(t)) from error
        except NosyncError:
            self._forget_attempt(last)
            raise
        self._given.append(given)
        return epoch_report(t, reports, flow, time.perf_counter() - started, self._position.sealed_at(t))

    def _forget_attempt(self, last: int | None) -> None:
        """Forgets what an epoch that failed has recorded. A rewind would begin another timeline, of other digests."""
        node, first = self._store.node, pack(0 if last is None else last + 1)
        assert isinstance(node, Node), "its store is embedded"
        attempt = [id for id in self._store.directory.layer_ids() if id.description.lower >= first]
        node.parts.garbage.forget(attempt, grace=False)
        node.collect_garbage()

    def read(self, stage: str, as_of: int | None = None) -> pa.Table:
        """Returns the state of a stage as of an epoch (default: the last one), its rows in order of their columns."""
        t = self._sealed(as_of)
        below, steps = self._recorded(stage)
        rows = self._store.read(below.name, t).select(below.output.names)
        for one in steps:
            rows = _applied(one, rows)
        return _ordered(rows)

    def changes(
        self, stage: str, after: int | None = None, until: int | None = None, *, include_expired: bool = False
    ) -> pa.Table:
        """Returns what an epoch changed in a stage (default: the last one), with `_change_type` and `_epoch`.

        `after`, `until`: what turns the state as of one epoch into that of the other, as in `Job.changes`.
        `include_expired`: rows that expired come, too, as `expire`.
        """
        until = self._sealed(until)
        below, steps = self._recorded(stage)
        if steps:
            raise NotAvailableError(
                f"stage {stage} is not recorded (persist='none'): read its changes from {below.name}, or persist it"
            )
        after = until - 1 if after is None else after
        names = [*below.output.names, CHANGE_TYPE_COLUMN, EPOCH_COLUMN]
        return self._store.changes(stage, after, until, include_expired=include_expired).select(names)

    def digests(self) -> dict[tuple[int, str, int], str]:
        """Returns the digest of every layer, by epoch, stage and shard. They are the same on Spark."""
        manifests = self._store.node.manifests().values()
        return {(m.t, e.id.trace.stage, e.id.trace.shard.index): str(e.digest) for m in manifests for e in m.entries}

    def last_sealed(self) -> int | None:
        """Returns the number of the last epoch."""
        return self._store.last_sealed()

    @property
    def stages(self) -> list[str]:
        """Returns the stages that can be read, in the order in which they are declared."""
        found = []
        for name in self._versions.flow.stages:
            if not is_shown(name):
                continue
            with contextlib.suppress(NotAvailableError):
                self._recorded(name)
                found.append(name)
        return found

    def assert_deterministic(self, *, cuts: bool = True) -> None:
        """Runs the same rows again, and raises AssertionError where something else comes of them: with the rows of each
        epoch shuffled, with other numbers of shards, and cut into other epochs.

        `cuts`: whether to try other epochs, which is done for the stages that do not depend on them by their kind: those
        up to the first `update`, `dedupe`, `window` or loop.
        """
        first = self._store.first_sealed()
        if first is None:
            raise InvalidInputError("there is nothing to run again: advance() first")

        def again(shards: int, drop: Sequence[str]) -> FlowTester:
            return FlowTester(self._declared.changed(drop=drop) if drop else self._declared, shards=shards)

        run = determinism.Run(self, again, self._given, first)
        determinism.check(run, self._versions.flow, self._shards, cuts=cuts)

    def close(self) -> None:
        """Removes what was recorded. It goes by itself when the tester does."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sealed(self, t: int | None) -> int:
        if isinstance(t, bool) or not isinstance(t, int | None):
            raise InvalidInputError(
                f"{t!r} is no epoch: a tester's epochs are asked for by number, for they run at once"
            )
        last = self.last_sealed()
        if last is None:
            raise NotAvailableError("no epoch was run yet: call advance() first")
        if t is not None and t > last:
            raise NotAvailableError(f"epoch {t} was not run yet; the newest is {last}")
        return last if t is None else t

    def _recorded(self, stage: str) -> tuple[BoundStage, list[BoundStage]]:
        """Returns the recorded stage that a stage is, or is made of by the expressions that come with it."""
        stages = self._versions.flow.stages
        if stage not in stages:
            raise UnknownStageError(
                f"no stage {stage!r} in {self._declared.name}; stages: {named_stages(stages)}{did_you_mean(stage, stages)}"
            )
        below, steps = stages[stage], list[BoundStage]()
        while not below.recorded and below.in_jvm and below.loop is None:
            steps.insert(0, below)
            below = stages[below.inputs[0]]
        if not below.recorded or below.of_rounds:
            raise NotAvailableError(why_not_recorded(stage, below))
        return below, steps

    def _tables(self, rows: Mapping[str, Rows]) -> dict[str, pa.Table]:
        sources = {stage.name: stage.schema for stage in self._versions.flow.sources}
        tables = {stage.table: stage.name for stage in self._versions.flow.sources if stage.table is not None}
        named = dict.fromkeys([*tables, *(name for name in sources if name not in tables.values())])
        unknown = next((name for name in rows if name not in sources and name not in tables), None)
        if unknown is not None:
            raise InvalidInputError(
                f"{unknown!r} is not a source of {self._declared.name}; sources: {', '.join(named)}"
                f"{did_you_mean(unknown, named)}"
            )
        given = {
            tables.get(name, name): _changes(of_one) if name in tables else of_one for name, of_one in rows.items()
        }
        whose = {name: f"table {table}" for table, name in tables.items()}
        return {
            name: _table(given.get(name, ()), schema, whose.get(name, f"source {name}"))
            for name, schema in sources.items()
        }


def _closed(node: Any, directory: tempfile.TemporaryDirectory[str]) -> None:
    with contextlib.suppress(NosyncError):
        abandon(node)
    directory.cleanup()


def _parsed(text: str) -> pa.Schema:
    """Returns the columns that a text declares, without Spark."""
    columns = columns_of(text, "a schema")
    unknown = next((name for name, type_ in columns.items() if type_ is None), None)
    if unknown is not None:
        raise SchemaError(f"column {unknown!r} of {text!r}: only Spark knows its type; declare it as another one")
    return pa.schema([pa.field(name, type_) for name, type_ in columns.items()])


def _changes(rows: Rows) -> Rows:
    """Returns rows of a table as the source of its changes has them."""
    if isinstance(rows, pa.Table | Mapping):
        names = rows.column_names if isinstance(rows, pa.Table) else list(rows)
        columns = {GIVEN_CHANGE_TYPE if name == CHANGE_TYPE_COLUMN else name: rows[name] for name in names}
        n = len(next(iter(columns.values()), ()))
        table: Rows = {GIVEN_CHANGE_TYPE: [INSERT] * n, **columns}
        return pa.table(table) if isinstance(rows, pa.Table) else table
    return [
        {GIVEN_CHANGE_TYPE: INSERT} | {GIVEN_CHANGE_TYPE if n == CHANGE_TYPE_COLUMN else n: v for n, v in row.items()}
        if isinstance(row, Mapping)
        else (*row, INSERT)
        for row in rows
    ]


def _cleared(column: pa.Array) -> pa.Array:
    """Returns a column that has nulls under its nulls."""
    type_ = column.type
    if pa.types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        nothing = (pa.scalar(None, field.type) for field in fields)
        below = (_cleared(column.field(i)) for i in range(len(fields)))
        made = [pc.if_else(column.is_valid(), *pair) for pair in zip(below, nothing, strict=True)]
        return pa.StructArray.from_arrays(made, fields=fields, mask=column.is_null())
    if pa.types.is_list(type_):
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False))
        offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
        return pa.ListArray.from_arrays(offsets, _cleared(column.flatten()), type=type_, mask=column.is_null())
    return column


def _table(rows: Any, schema: pa.Schema, whose: str) -> pa.Table:
    """Returns rows as a table of the source's columns. Raises SchemaError for rows that do not fit."""
    try:
        if isinstance(rows, pa.Table):
            table = rows
        elif isinstance(rows, Mapping):
            table = pa.table({name: column_of(values, _field(schema, name, whose)) for name, values in rows.items()})
        elif all(isinstance(row, Mapping) for row in rows):
            for name in {name for row in rows for name in row}:
                _field(schema, name, whose)
            table = table_of(list(rows), schema)
        else:
            short = next((row for row in rows if len(row) != len(schema)), None)
            if short is not None:
                raise SchemaError(f"{whose}: {short!r} has {len(short)} values, expected {', '.join(schema.names)}")
            columns = zip(*rows, strict=True)
            table = pa.table([column_of(c, f) for c, f in zip(columns, schema, strict=True)], schema=schema)
    except SchemaError as error:
        raise SchemaError(f"{whose}: {str(error).removeprefix(f'{whose}: ')}") from error
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"{whose}: its rows do not fit {', '.join(map(str, schema))}: {error}") from error
    missing = next((name for name in schema.names if name not in table.column_names), None)
    if missing is not None:
        raise SchemaError(f"{whose}: column {missing!r} is missing; found {', '.join(table.column_names)}")
    table = table.select(schema.names)
    for field in schema:
        if nullable(table.schema.field(field.name).type) != nullable(field.type):
            raise SchemaError(
                f"{whose}: column {field.name!r} is {table.schema.field(field.name).type}, expected {field.type}: cast it"
            )
    # Values under nulls, which Arrow makes of Python's rows and Spark does not, would be part of a layer's bytes.
    return pa.Table.from_arrays([_cleared(as_array(column)) for column in table.cast(schema).columns], schema=schema)


def _field(schema: pa.Schema, name: str, whose: str) -> pa.Field:
    if name not in schema.names:
        raise SchemaError(
            f"{whose} has no column {name!r}; it has {', '.join(schema.names)}{did_you_mean(name, schema.names)}"
        )
    return schema.field(name)


def _applied(stage: BoundStage, rows: pa.Table) -> pa.Table:
    step = stage.options_as(JvmOptions).step
    assert step is not None, "such a flow is refused"
    made, _ = applied([step], rows)
    return made


def _ordered(rows: pa.Table) -> pa.Table:
    """Returns rows in order of those of their columns that have an order."""
    names = [f.name for f in rows.schema if not (pa.types.is_nested(f.type) or pa.types.is_null(f.type))]
    return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in names])) if names else rows
