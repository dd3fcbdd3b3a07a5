"""Runs a part of an epoch on Arrow, without Spark: the same tasks, in this process, one shard after the other, or in
others beside it (nosync.runtime.shard_workers).

What moves between tasks is what Spark's shuffle would bring: rows go to the shard of their key, or stay in theirs, and
marks go to every shard. Expressions on the way are those that tasks evaluate themselves (nosync.kernels.expressions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage, InputEdge, Segment, SegmentOutput
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.flow.stage_options import JvmOptions
from nosync.kernels.expressions import applied
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, as_array
from nosync.lsm.columnar.hashing import HASH_BITS, hash64, key_groups_of
from nosync.lsm.errors import ScanError
from nosync.operators.canonical import is_hashed_in_tasks
from nosync.runtime.epoch_parts import run_parts
from nosync.runtime.epoch_plan import EpochPlan, Part, PartPlan, Reports
from nosync.runtime.scan import SourceFiles, tables_by_shard
from nosync.runtime.segment_task import TAG_SHARD_BITS, SegmentTask, edge_schema, side_column
from nosync.runtime.shard_task import RunTask, ShardRows, run_task_of_shard

ByShard = list[pa.Table]
"""Rows, and reports among them, by the shard that they are in."""


def run_here(task: SegmentTask, given: Sequence[ShardRows]) -> ByShard:
    """Runs a task for every shard in this process."""
    return [run_task_of_shard(task, shard, of_shard) for shard, of_shard in enumerate(given)]


def run_epoch(
    flow: BoundFlow, plan: EpochPlan, inputs: Mapping[str, pa.Table], run_task: RunTask = run_here
) -> Reports:
    """Runs an epoch on the rows of its sources. Returns a report of every (stage, shard).

    Every expression of the flow is of a kind that tasks evaluate. Raises what `run_shard` raises, and ScanError where
    they cannot evaluate one of these rows.
    """
    flow = flow.at_epoch(plan.t).fused

    def run_part(part: Part, done: frozenset[str]) -> list[bytes]:
        part_plan = PartPlan(flow, [plan], part, inputs, dict.fromkeys(inputs, SourceFiles((), ())))
        return _LocalPart(part_plan, inputs, run_task).run(done)

    return run_parts(flow, [plan], run_part)[plan.t]


class _LocalPart:
    """Runs one part."""

    def __init__(self, plan: PartPlan, inputs: Mapping[str, pa.Table], run_task: RunTask) -> None:
        self._plan, self._inputs, self._run_task = plan, inputs, run_task
        self._emitted: dict[SegmentOutput, ByShard] = {}

    def run(self, done: frozenset[str]) -> list[bytes]:
        """Returns the reports of everything."""
        found: list[bytes] = []
        for segment in self._plan.ends(done):
            for rows in self._segment(segment, None):
                found += rows.column(0).to_pylist()
        return found

    def _segment(self, segment: Segment, output: SegmentOutput | None) -> ByShard:
        """Returns what leaves a segment, or only its reports."""
        (task,), absent = self._plan.tasks_of(segment, output)
        if task.scan is not None:
            of_shards = tables_by_shard(
                self._inputs, task.sources, task.edges, task.stages, task.shards, task.scan.key_groups
            )
            return self._run_task(task, [ShardRows(tables=tables) for tables in of_shards])
        if len(absent) < len(task.edges):
            rows = self._edge_rows(segment, list(task.edges), absent)
            return self._run_task(task, [ShardRows(of_shard) for of_shard in rows])
        return self._without_rows(task)  # nothing of what edges bring is needed

    def _without_rows(self, task: SegmentTask) -> ByShard:
        return self._run_task(task, [ShardRows()] * task.shards)

    def _edge_rows(self, segment: Segment, edges: list[InputEdge], absent: frozenset[int]) -> ByShard:
        """Returns the rows of a segment's edges, each in the shard that it belongs to."""
        come = {i: self._rows_of_edge(segment, edge) for i, edge in enumerate(edges) if i not in absent}
        if len(come) == 1:
            ((i, rows),) = come.items()
            return self._in_shards(edges[i], rows) if edges[i].key else rows
        placed = [[_beside(i, table) for table in self._in_shards(edges[i], rows)] for i, rows in come.items()]
        return [pa.concat_tables(of_shard, promote_options="default") for of_shard in zip(*placed, strict=True)]

    def _rows_of_edge(self, segment: Segment, edge: InputEdge) -> ByShard:
        """Returns an edge's rows where they come from."""
        if self._plan.flow.loops_back(segment, edge):
            (task,) = self._plan.tasks_of_round_before(edge)
            rows = self._without_rows(task)
        else:
            if edge.output not in self._emitted:
                home = self._plan.flow.segment_of(edge.output.stage)
                self._emitted[edge.output] = self._segment(home, edge.output)
            rows = self._emitted[edge.output]
        for name in edge.jvm:
            rows = [_expressed(self._plan.flow.stages[name], table) for table in rows]
        return rows

    def _in_shards(self, edge: InputEdge, rows: ByShard) -> ByShard:
        """Returns the rows by the shard that they go to. A report says in its tag which that is."""
        parts = [self._parted(edge, table) for table in rows]
        return [pa.concat_tables(of_shard) for of_shard in zip(*parts, strict=True)]

    def _parted(self, edge: InputEdge, rows: pa.Table) -> ByShard:
        is_row = pc.is_null(rows.column(REPORT_COLUMN)).to_numpy()
        tags = rows.column(TAG_COLUMN).to_numpy()
        shard: npt.NDArray[np.int64] = np.where(is_row, tags >> TAG_SHARD_BITS, tags)
        if edge.key:
            hashes = hash64([as_array(rows.column(name)) for name in edge.key])
            groups, shards = self._plan.flow.key_groups, self._plan.shards
            by_key = key_groups_of((hashes >> np.uint64(HASH_BITS)).astype(np.uint32), groups)
            shard = np.where(is_row, by_key * shards // groups, tags)
            if not is_hashed_in_tasks(edge_schema(self._plan.flow.stages, edge), edge.key):
                rows = rows.append_column(HASH64_COLUMN, pa.array(hashes.view(np.int64)))
        return [rows.filter(pa.array(shard == i)) for i in range(self._plan.shards)]


def _beside(index: int, rows: pa.Table) -> pa.Table:
    """Returns an edge's rows in a form in which those of other edges can stand below them."""
    ours = (TAG_COLUMN, REPORT_COLUMN, HASH64_COLUMN)
    named = rows.rename_columns([name if name in ours else side_column(index, name) for name in rows.column_names])
    return named.append_column(SIDE_COLUMN, pa.array(np.full(rows.num_rows, index, dtype=np.int32)))


def _expressed(stage: BoundStage, rows: pa.Table) -> pa.Table:
    """Returns what a stage's expressions make of rows. Reports pass as they are."""
    step = stage.options_as(JvmOptions).step
    assert step is not None, f"stage {stage.name}: its expressions are of a kind that tasks evaluate"
    is_row = pc.is_null(rows.column(REPORT_COLUMN))
    given, reports = rows.filter(is_row), rows.filter(pc.invert(is_row))
    keep = [name for name in (CHANGE_TYPE_COLUMN,) if stage.changing] + [TAG_COLUMN, REPORT_COLUMN]
    try:
        made, _ = applied([step], given)
        if step.condition is None:
            made = pa.table(
                {**dict(zip(made.column_names, made.columns, strict=True)), **{n: given.column(n) for n in keep}}
            )
    except pa.ArrowException as error:
        raise ScanError(
            f"stage {stage.name}: its expressions cannot be evaluated here: {error}", stage=stage.name
        ) from error
    names = made.column_names
    blank = [
        reports.column(name) if name in keep else pa.nulls(reports.num_rows, made.schema.field(name).type)
        for name in names
    ]
    return pa.concat_tables([made, pa.table(blank, schema=made.schema)])
