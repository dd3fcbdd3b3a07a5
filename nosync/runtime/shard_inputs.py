"""The rows that came to one shard's task, by source or by edge, each in canonical order.

A source's rows are ordered by content, those of an edge by the tag that they got before the shuffle. In a fused segment
one row says both, see `nosync.runtime.fused_rows`. To every shard a task also sends a mark that says "these were all of
mine": a stage computes only when the marks of all shards that its rows come from are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage, InputEdge
from nosync.flow.event_time import MOST_INPUTS, with_input
from nosync.flow.internal_columns import REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.kernels.windows import NO_WATERMARK
from nosync.lsm.columnar.columns import conformed
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.model.layer import Shard
from nosync.operators.canonical import hashed
from nosync.operators.operators import lone_updates_named
from nosync.runtime.edge_scan import EdgeScan
from nosync.runtime.fused_rows import no_rows, renamed, split
from nosync.runtime.segment_task import MARK, TAG_INPUT_BITS, SegmentTask, edge_schema, side_column


@dataclass
class EdgeRows:
    """Holds what came by one edge."""

    rows: pa.Table
    heard_from: set[int] = field(default_factory=set)
    """The shards that sent all of their rows."""
    oldest_us: int | None = None
    newest_us: int | None = None
    newest_of: dict[str, int] = field(default_factory=dict)
    """The newest event time by the input that the rows came by, where they say it."""

    def hear(self, mark: Mapping[str, Any]) -> None:
        """Takes notice that a shard has sent all of its rows."""
        self.heard_from.add(mark["from"])
        if "oldest_us" in mark:
            oldest = mark["oldest_us"]
            self.oldest_us = oldest if self.oldest_us is None else min(oldest, self.oldest_us)
        if "newest_us" in mark:
            self.newest_us = max(mark["newest_us"], NO_WATERMARK if self.newest_us is None else self.newest_us)
        for name, newest in mark.get("newest_of", {}).items():
            self.newest_of[name] = max(newest, self.newest_of.get(name, NO_WATERMARK))


def oldest_of_all(edges: Sequence[EdgeRows]) -> int | None:
    """Returns the oldest event time of what came by some edges."""
    return min((edge.oldest_us for edge in edges if edge.oldest_us is not None), default=None)


def newest_of_all(edges: Sequence[EdgeRows]) -> int | None:
    """Returns the newest event time of what came by some edges."""
    return max((edge.newest_us for edge in edges if edge.newest_us is not None), default=None)


class ShardInputs:
    """Parts what came to a shard by source and edge, and brings it into order."""

    def __init__(self, task: SegmentTask, shard: Shard, batches: list[pa.RecordBatch]) -> None:
        self._task, self._shard = task, shard
        self.reports: list[bytes] = []
        """The reports of the tasks before, which came with the rows."""
        self.edges: list[EdgeRows] = []
        self._given: dict[str, pa.Table] = {}
        self._receive(pa.Table.from_batches(batches) if batches else None)

    def of_source(self, stage: BoundStage) -> pa.Table:
        """Returns the rows that a source is given."""
        return self._given.get(stage.name, no_rows(stage.schema))

    def silent(self, edge: int) -> set[int]:
        """Returns the shards whose rows have not come by an edge."""
        expected = set(range(self._task.shards)) if self._task.edges[edge].key else {self._shard.index}
        return expected - self.edges[edge].heard_from

    def _receive(self, rows: pa.Table | None) -> None:
        task = self._task
        if task.fused or task.scan is not None:
            self._receive_fused(rows)
            return
        if task.edge_scans is not None:
            self.edges = [self._scanned(scan) for scan in task.edge_scans]
            return
        if not task.edges:
            self._given = {stage.name: _as_given(rows, stage) for stage in task.sources if rows is not None}
            return
        several = len(task.edges) - len(task.absent) > 1
        for i, edge in enumerate(task.edges):
            mine = None if i in task.absent else rows
            if mine is not None and several:
                mine = mine.filter(pc.equal(mine.column(SIDE_COLUMN), i))
            self.edges.append(self._edge_rows(i, edge, mine, several=several))

    def _scanned(self, scan: EdgeScan) -> EdgeRows:
        rows, span = scan.rows(self._shard)
        oldest_us, newest_us = (None, None) if span is None else span
        return EdgeRows(rows, set(range(self._task.shards)), oldest_us, newest_us)

    def _receive_fused(self, rows: pa.Table | None) -> None:
        task, fed = self._task, dict[int, pa.Table]()
        if rows is not None or task.scan is not None:
            given, fed = self._of_sources(rows)
            self._given = {stage.name: of_stage for stage, of_stage in zip(task.sources, given, strict=True)}
        for i, edge in enumerate(task.edges):
            # One shuffle brought everything.
            self.edges.append(EdgeRows(fed.get(i, no_rows(edge_schema(task.stages, edge))), set(range(task.shards))))

    def _of_sources(self, rows: pa.Table | None) -> tuple[list[pa.Table], dict[int, pa.Table]]:
        task = self._task
        if task.scan is not None:
            return task.scan.rows(self._shard, task.sources, task.edges, task.stages)
        assert rows is not None, "its rows come"
        return split(rows, task.sources, task.edges, task.stages)

    def _edge_rows(self, index: int, edge: InputEdge, rows: pa.Table | None, *, several: bool) -> EdgeRows:
        schema = edge_schema(self._task.stages, edge)
        fed = EdgeRows(self._with_input(edge, no_rows(schema) if edge.key else schema.empty_table(), 0))
        if index in self._task.absent:
            fed.heard_from.update(range(self._task.shards))
        if rows is None:
            return fed
        reports = rows.column(REPORT_COLUMN)
        for report in reports.drop_null().to_pylist():
            if report.startswith(MARK):
                fed.hear(json.loads(report[len(MARK) :]))
            else:
                self.reports.append(report)
        rows = rows.filter(pc.is_null(reports))
        columns = [rows.column(side_column(index, f.name) if several else f.name) for f in schema]
        tags = rows.column(TAG_COLUMN).to_numpy()
        order = np.argsort(tags, kind="stable")
        table = pa.Table.from_arrays(
            [conformed(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
        )
        if len(order) and (np.diff(tags[order]) == 0).any():  # a join in the JVM made several rows of one
            order = np.lexsort((content_hash(table), tags))
        if edge.key:
            table = hashed(table, edge.key, sent=rows)
        table = self._with_input(edge, table, (tags >> TAG_INPUT_BITS) & (MOST_INPUTS - 1))
        fed.rows = table.take(pa.array(order))
        if edge.jvm:
            fed.rows = lone_updates_named(fed.rows, tags[order])
        return fed

    def _with_input(self, edge: InputEdge, rows: pa.Table, came_by: Any) -> pa.Table:
        """Returns an edge's rows with the input that each came by, where the stage says it in tags."""
        stage = self._task.stages[edge.jvm[-1] if edge.jvm else edge.output.stage]
        return with_input(rows, came_by) if stage.origins and edge.output.window is None else rows


def _as_given(rows: pa.Table, source: BoundStage) -> pa.Table:
    """Returns a source's rows as they came, with the hash of each."""
    return hashed(renamed(rows, source.schema, source.schema.names), source.schema.names, sent=rows)
