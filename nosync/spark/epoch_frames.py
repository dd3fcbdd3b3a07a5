"""Runs a plan by a query: the DataFrames that bring rows to their shards, and map them by tasks.

    source rows -> hash in the JVM -> repartitionById(shard) -> segment task -> hash -> repartitionById -> ... -> reports

Each segment is one `mapInArrow`; only reports reach the driver. Where several epochs share a job (see `epoch_batches`),
each row says in `_epoch` of which it is, those of sources as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.flow.bound_stage import BoundStage, InputEdge, Segment, SegmentOutput
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.columnar.hashing import HASH_BITS
from nosync.lsm.errors import NosyncError, encode_failure
from nosync.operators.canonical import is_hashed_in_tasks
from nosync.runtime.epoch_batches import run_epochs_of_shard
from nosync.runtime.epoch_plan import PartPlan
from nosync.runtime.file_shuffle import Exchange
from nosync.runtime.segment_task import (
    REPORT_SCHEMA,
    TAG_SHARD_BITS,
    SegmentTask,
    edge_schema,
    emitted_schema,
    side_column,
)
from nosync.runtime.shard_run import run_shard
from nosync.spark.arrow_transfer import ArrowFunction, Handover
from nosync.spark.expressions import hash_of, jvm_rows, place_of, quoted
from nosync.spark.fused_inputs import Given, given_rows
from nosync.spark.selecting import selected
from nosync.spark.worker import task_in_worker


class EpochFrames:
    """Builds the DataFrames of one Spark job."""

    def __init__(
        self,
        plan: PartPlan,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame],
        handover: Handover,
        exchanged: Mapping[str, Exchange],
    ) -> None:
        """`exchanged`: by segment, where its rows are that went to their shards by files."""
        self._plan, self._spark, self._inputs = plan, spark, inputs
        self._handover, self._exchanged = handover, exchanged
        self._of_epoch: tuple[str, ...] = (EPOCH_COLUMN,) if plan.has_several else ()
        self._beside = (*self._of_epoch, TAG_COLUMN, REPORT_COLUMN)
        self._shared: dict[SegmentOutput, DataFrame] = {}

    def release(self) -> None:
        """Releases the rows that were kept for the epoch."""
        for rows in self._shared.values():
            rows.unpersist()

    def segment(self, segment: Segment, output: SegmentOutput | None) -> DataFrame:
        """Returns what leaves a segment, or only its reports."""
        flow = self._plan.flow
        tasks, absent = self._plan.tasks_of(segment, output)
        edges = list(tasks[0].edges)
        if tasks[0].scan is not None or tasks[0].edge_scans is not None or segment.name in self._exchanged:
            return self._mapped(segment, self._blank(), tasks)
        if self._plan.is_given(segment):
            rows = self._shuffled(self.given(segment, tasks[0]))
        elif len(absent) < len(edges):
            rows = self._edge_rows(segment, edges, absent)
        elif flow.loop_of(segment) is not None or segment.edges:
            rows = self._blank()  # nothing of what they bring is needed
        else:
            rows = self._no_rows(flow.stages[segment.name])
        return self._mapped(segment, rows, tasks)

    def _mapped(self, segment: Segment, rows: DataFrame, tasks: Sequence[SegmentTask]) -> DataFrame:
        output, schema = tasks[0].output, REPORT_SCHEMA
        if output is not None:
            schema = emitted_schema(self._plan.flow.stages[output.stage], output)
            if len(tasks) > 1:
                schema = pa.schema([pa.field(EPOCH_COLUMN, pa.int64()), *schema])
        return self._handover.mapped(rows, self.work_of(segment, tasks), schema)

    def work_of(self, segment: Segment, tasks: Sequence[SegmentTask]) -> ArrowFunction:
        """Returns what Spark runs for every shard of a segment."""
        return _work_of(tasks, self._exchanged.get(segment.name))

    def _blank(self) -> DataFrame:
        """Returns a partition for each shard, for tasks that only look at what is recorded."""
        return self._spark.range(0, self._plan.shards, 1, self._plan.shards).toDF("shard")

    # --- rows that the epoch is given -------------------------------------------------------------------------------

    def given(self, segment: Segment, task: SegmentTask) -> Given:
        """Returns the rows of a segment's sources."""
        if segment.fused:
            return given_rows(task.sources, task.edges, self._plan.flow.stages, self._inputs, self._of_epoch)
        return self._source_rows(self._plan.flow.stages[segment.name])

    def _source_rows(self, head: BoundStage) -> Given:
        given = self._inputs[head.name]
        columns = [*self._of_epoch, *(quoted(name) for name in head.schema.names)]
        if not head.is_placed_by_columns:
            given = given.alias("__given")  # no name of it can be taken for that of a column
        if is_hashed_in_tasks(head.schema, head.schema.names):
            placed_by = (head.placed_by or head.schema.names) if head.is_placed_by_columns else ()
            return Given(selected(given, columns), place_of(head), placed_by=placed_by)
        columns.append(f"{hash_of(head.schema.names)} AS {HASH64_COLUMN}")
        return Given(selected(given, columns), place_of(head) if head.placed_by else HASH64_COLUMN)

    def _no_rows(self, head: BoundStage) -> DataFrame:
        schema = from_arrow_schema(head.schema.append(pa.field(HASH64_COLUMN, pa.int64())))
        return self._spark.createDataFrame([], schema).repartitionById(self._plan.shards, F.lit(0))

    # --- rows of other segments -------------------------------------------------------------------------------------

    def _edge_rows(self, segment: Segment, edges: list[InputEdge], absent: frozenset[int]) -> DataFrame:
        """Returns the rows of a segment's edges, each in the shard that it belongs to."""
        frames = {i: self._rows_of_edge(segment, edge) for i, edge in enumerate(edges) if i not in absent}
        keyed = [i for i in frames if edges[i].key]
        several = len(frames) > 1
        if len(frames) == 1:
            (rows,) = frames.values()
            if not keyed:
                return rows  # they are in their shards already
        else:
            rows = reduce(DataFrame.unionAll, [_beside(i, frames, self._beside) for i in frames])
        # Reports and marks carry the shard they go to in the tag; rows that stay in their shard have it there as well.
        home = f"shiftright({TAG_COLUMN}, {TAG_SHARD_BITS})"
        homes = [self.shard_of(self._hash_column(edges[i], i, several=several)) if i in keyed else home for i in frames]
        cases = " ".join(f"WHEN {i} THEN {of_side}" for i, of_side in zip(frames, homes, strict=True))
        by_key = f"CASE {SIDE_COLUMN} {cases} END" if several else homes[0]
        shard = f"CASE WHEN {REPORT_COLUMN} IS NULL THEN {by_key} ELSE {TAG_COLUMN} END"
        return self._in_shards(rows, shard)

    def _rows_of_edge(self, segment: Segment, edge: InputEdge) -> DataFrame:
        """Returns an edge's rows, with the hash of their key where tasks do not compute it."""
        rows = self._replayed(edge) if self._plan.flow.loops_back(segment, edge) else self._emitted(edge.output)
        for name in edge.jvm:
            rows = jvm_rows(self._plan.flow.stages[name], rows, keep=self._beside)
        if edge.key and not self._is_hashed_in_tasks(edge):
            rows = rows.withColumn(HASH64_COLUMN, F.expr(hash_of(edge.key)))
        return rows

    def _is_hashed_in_tasks(self, edge: InputEdge) -> bool:
        return is_hashed_in_tasks(edge_schema(self._plan.flow.stages, edge), edge.key)

    def _hash_column(self, edge: InputEdge, index: int, *, several: bool) -> str:
        """Returns the column, or the expression, that holds the hash of the key of an edge's rows."""
        if not self._is_hashed_in_tasks(edge):
            return HASH64_COLUMN
        return hash_of([side_column(index, name) if several else name for name in edge.key])

    def _replayed(self, edge: InputEdge) -> DataFrame:
        """Returns the rows that a loop's body returned in the round before, read back."""
        segment = self._plan.flow.segment_of(edge.output.stage)
        return self._mapped(segment, self._blank(), self._plan.tasks_of_round_before(edge))

    def _emitted(self, output: SegmentOutput) -> DataFrame:
        """Returns the rows that leave a segment; kept for the epoch where several take them, so that it runs once."""
        found = self._shared.get(output)
        if found is None:
            found = self.segment(self._plan.flow.segment_of(output.stage), output)
            takers = [s for s in self._plan.flow.segments.values() if any(f.output == output for f in s.edges)]
            edges = sum(f.output == output for s in takers for f in s.edges)
            if edges > 1 or sum(len(self._plan.outputs(s)) > 1 for s in takers):
                found = found.persist()
            self._shared[output] = found
        return found

    # --- to their shards --------------------------------------------------------------------------------------------

    def _shuffled(self, given: Given) -> DataFrame:
        return self._in_shards(given.rows, self.shard_of(given.place)).drop(*given.only_for_place)

    def _in_shards(self, rows: DataFrame, shard: str) -> DataFrame:
        placed = rows.repartitionById(self._plan.shards, F.expr(f"CAST({shard} AS INT)"))
        return placed.sortWithinPartitions(EPOCH_COLUMN) if self._plan.has_several else placed

    # Expressions are texts: those built of Column objects ask the JVM once for each part, which adds up in every epoch.

    def shard_of(self, hash64: str) -> str:
        """Returns the shard of a key hash, in SQL: hash32 -> key group -> shard, as `lsm.hashing` and `Shard.groups`
        have it.
        """
        groups, shards = self._plan.flow.key_groups, self._plan.shards
        group = f"shiftright(shiftrightunsigned({hash64}, {HASH_BITS}) * {groups}, {HASH_BITS})"
        return f"floor({group} * {shards} / {groups})"


def _work_of(tasks: Sequence[SegmentTask], exchange: Exchange | None) -> ArrowFunction:
    """Returns what Spark runs for every shard of a segment. `exchange`: where its rows are; None: they come."""
    task = tasks[0]

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "runs inside a Spark task"
        # In a union of several ends of the flow, the partitions of each follow those of the one before.
        shard = context.partitionId() % task.shards
        try:
            with task_in_worker():
                if exchange is not None:
                    deque(batches, maxlen=0)  # they say nothing
                    batches = exchange.rows_of(shard)
                if len(tasks) == 1:
                    yield from run_shard(task, shard, batches)
                else:
                    yield from run_epochs_of_shard(tasks, shard, batches)
        except NosyncError as error:
            raise RuntimeError(encode_failure(error)) from None

    return work


def _beside(index: int, frames: Mapping[int, DataFrame], ours: Sequence[str]) -> DataFrame:
    """Returns an edge's rows in a form that has columns for the rows of all edges. `ours`: columns that all have.

    Other edges' columns are null here; in the union they have those edges' types.
    """
    columns = [f"{index} AS {quoted(SIDE_COLUMN)}"]
    for i, frame in frames.items():
        names = [name for name in frame.columns if name not in (*ours, HASH64_COLUMN)]
        columns += [f"{quoted(name) if i == index else 'NULL'} AS {quoted(side_column(i, name))}" for name in names]
    columns += map(quoted, ours)
    if any(HASH64_COLUMN in frame.columns for frame in frames.values()):
        hashed = quoted(HASH64_COLUMN) if HASH64_COLUMN in frames[index].columns else "CAST(NULL AS BIGINT)"
        columns.append(f"{hashed} AS {quoted(HASH64_COLUMN)}")
    return selected(frames[index], columns)
