"""What tasks of keyed stages, and of expressions, read of Parquet files themselves: without the JVM, and without a shuffle.

A segment takes by a key what expressions make of a source's rows. Where tasks read the source's files (`runtime.scan`), each
shard's task of such a segment reads them as well, makes the same of them, and keeps what belongs to its shard. It sees all rows
of the source, so it knows their newest event time, too.

Invariant: a task comes to the same rows, in the same order, as when they are sent to it from where they are recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage, InputEdge, Segment
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.kinds import IN_JVM, SOURCE
from nosync.flow.stage_options import JvmOptions
from nosync.kernels.expressions import Step
from nosync.kernels.windows import Window, event_span_us, with_windows
from nosync.lsm.columnar.columns import Indices
from nosync.lsm.columnar.hashing import HASH_BITS, key_groups_of
from nosync.lsm.errors import ScanError
from nosync.lsm.model.layer import Shard
from nosync.operators.canonical import canonical_order, hashed, is_hashed_alike
from nosync.runtime.fused_rows import renamed
from nosync.runtime.scan import SourceFiles, hashes_of, parts_of, results_of, steps_of

_NUMBER = "__number"
"""The column, on the way, of the number of the source's row that a row is made of."""


class OriginOfEdge(NamedTuple):
    """Says which source's rows an edge brings, and by way of which expressions. Some of these may be recorded stages."""

    source: BoundStage
    by: tuple[str, ...]


def origin_of(flow: BoundFlow, edge: InputEdge) -> OriginOfEdge | None:
    """Returns where an edge's rows come from, if tasks can make them of a source's files; else None."""
    by = edge.jvm
    stage = flow.stages[edge.output.stage]
    while stage.kind in IN_JVM and stage.loop is None:
        home, made = flow.segment_of(stage.name), stage.name  # whose task may have others, of several sources
        before = next(one for one in home.edges if one.jvm and one.jvm[-1] == made)
        by = (*before.jvm, *by)
        stage = flow.stages[before.output.stage]
    on_the_way = [flow.stages[name] for name in by]
    can_be_read = (
        stage.kind == SOURCE
        and stage.is_placed_by_columns
        and not edge.output.whole
        and not (edge.output.window is not None and edge.jvm)
        and not any(one.changing or one.origins for one in (stage, *on_the_way))
        and all(one.options_as(JvmOptions).step is not None for one in on_the_way)
    )
    rows = on_the_way[-1].rows_schema if on_the_way else stage.rows_schema
    keys = [rows.field(name).type for name in edge.key if name in rows.names]  # those of windows are timestamps
    return OriginOfEdge(stage, by) if can_be_read and is_hashed_alike(keys) else None


def scanned_segments(
    flow: BoundFlow, scanned: Mapping[str, SourceFiles], shards: int, most_tasks: int
) -> frozenset[str]:
    """Returns the names of the segments behind sources whose tasks read these themselves. `scanned`: the sources that tasks
    read. `most_tasks`: so many may read each row.
    """
    most = most_tasks // shards - 1  # beside the task of the source
    if flow.loops or most < 1:
        return frozenset()
    near = [one for one in flow.segments.values() if one.edges and not one.fused and _is_near(flow, one, scanned)]
    found = [one.name for one in near if any(edge.key for edge in one.edges)][:most]
    readers = len(found)
    # What a source's task records as well reads nothing more.
    for segment in (one for one in near if not any(edge.key for edge in one.edges)):
        reads = segment.name in with_their_sources(flow, [*found, segment.name]).segments
        if readers + reads <= most:
            found.append(segment.name)
            readers += reads
    return frozenset(found)


def _is_near(flow: BoundFlow, segment: Segment, scanned: Collection[str]) -> bool:
    """Returns whether tasks can make all that comes to a segment of files that they read."""
    origins = [origin_of(flow, edge) for edge in segment.edges]
    return all(origin is not None and origin.source.name in scanned for origin in origins)


def with_their_sources(flow: BoundFlow, readers: Collection[str]) -> BoundFlow:
    """Returns the flow, where what expressions make of a source's rows is recorded by the task that reads the source, if only
    `readers` take it: the rows are in the same shard, and are read and put into order once.
    """
    segments = dict(flow.segments)
    for segment in flow.segments.values():
        if segment.name not in readers or len(segment.edges) != 1 or segment.edges[0].key:
            continue
        edge = segment.edges[0]
        home = next(one for one in segments.values() if edge.output.stage in one.stages)
        takers = [one for one in flow.segments.values() if one.name not in readers and one.name != home.name]
        is_sent = any(of.output.stage in (*segment.stages, *home.stages) for one in takers for of in one.edges)
        is_expressed = any(of.jvm and of.output == edge.output for of in home.edges)
        if flow.stages[edge.output.stage].kind == SOURCE and not is_sent and not is_expressed:
            del segments[segment.name]
            stages, edges = (*home.stages, *segment.stages), (*home.edges, edge)
            segments[home.name] = replace(home, stages=stages, edges=edges, fused=True)
    return replace(flow, segments=segments)


@dataclass(frozen=True)
class EdgeScan:
    """Says how a task makes an edge's rows of a source's files."""

    files: SourceFiles
    source: BoundStage
    steps: tuple[Step, ...]
    by: tuple[str, ...]
    """The stages whose expressions the steps are."""
    window: Window | None
    key: tuple[str, ...]
    """By which rows go to their shards; empty: they stay in the source's."""
    schema: pa.Schema
    key_groups: int

    @classmethod
    def of(cls, flow: BoundFlow, edge: InputEdge, schema: pa.Schema, files: Mapping[str, SourceFiles]) -> EdgeScan:
        """Returns how the tasks of one of the `scanned_segments` make an edge's rows, whose columns are `schema`."""
        origin = origin_of(flow, edge)
        assert origin is not None, f"what takes {edge.input} is scanned"
        return cls(
            files[origin.source.name], origin.source, tuple(steps_of(origin.by, flow.stages)), origin.by,
            edge.output.window, edge.key, schema, flow.key_groups,
        )  # fmt: skip

    def rows(self, shard: Shard) -> tuple[pa.Table, tuple[int, int] | None]:
        """Returns the rows of a shard, with `_hash64` of their key if they have one; and the oldest and the newest event time
        of all shards' rows, in microseconds, where they go to windows.

        Raises ScanError as `Scan.rows` does.
        """
        of_source, made, spans = [self.source.schema.empty_table()], list[pa.Table](), list[tuple[int, int]]()
        known = 0
        try:
            for part in parts_of(self.files, self.source.schema):
                mine, span = self._of_shard(part, shard)
                spans += [] if span is None else [span]
                numbers = mine.column(_NUMBER).to_numpy()
                used, place = np.unique(numbers, return_inverse=True)
                of_source.append(part.take(pa.array(used)))
                at = mine.schema.get_field_index(_NUMBER)
                made.append(mine.set_column(at, _NUMBER, pa.array(place.astype(np.int64) + known)))
                known += len(used)
            rows = self._in_order(pa.concat_tables(of_source).combine_chunks(), made, shard)
        except (OSError, pa.ArrowException) as error:
            raise ScanError(f"a source's rows cannot be read here: {type(error).__name__}: {error}") from error
        return rows, (min(o for o, _ in spans), max(n for _, n in spans)) if spans else None

    def _of_shard(self, part: pa.Table, shard: Shard) -> tuple[pa.Table, tuple[int, int] | None]:
        """Returns what belongs to a shard of what is made of some rows, with the number of the row that each is made of."""
        made, numbers = results_of(self.by, self.steps, part)
        span = None if self.window is None else event_span_us(made, self.window)
        made = made.append_column(_NUMBER, pa.array(numbers))
        if self.window is not None:
            made = with_windows(made, self.window)
        groups = shard.groups(self.key_groups)
        if len(groups) < self.key_groups:
            of_key = key_groups_of(hashes_of(made, self.key), self.key_groups) if self.key else None
            found = self._homes(part)[numbers] if of_key is None else of_key
            made = made.filter(pa.array((found >= groups.start) & (found < groups.stop)))
        return made, span

    def _homes(self, rows: pa.Table, hashed_rows: pa.Table | None = None) -> Indices:
        """Returns the key groups in which a source's rows are. `hashed_rows`: with the hash of each, if that is known."""
        by = self.source.placed_by
        if by or hashed_rows is None:
            hashes = hashes_of(rows, by or rows.column_names)
        else:
            of_rows = hashed_rows.column(HASH64_COLUMN).to_numpy().view(np.uint64)
            hashes = (of_rows >> np.uint64(HASH_BITS)).astype(np.uint32)
        found: Indices = key_groups_of(hashes, self.key_groups)
        return found

    def _in_order(self, of_source: pa.Table, made: list[pa.Table], shard: Shard) -> pa.Table:
        """Returns rows in the order in which they would come: by the shard of the source's row, and its place there."""
        given = hashed(of_source, of_source.column_names, sent=of_source)
        order = canonical_order(given)
        if self.key:
            shards = (self._homes(of_source, given) * shard.count // self.key_groups).astype(np.uint16)
            # NumPy sorts numbers of 16 bits by their digits.
            order = order[np.argsort(shards[order], kind="stable")]
        rows = self.schema.empty_table()
        if made:
            found = pa.concat_tables(made).combine_chunks()
            numbers = found.column(_NUMBER).to_numpy()
            if len(numbers) != len(order):  # a row is in several windows
                place: Indices = np.empty(len(order), dtype=np.int64)
                place[order] = np.arange(len(order))
                order = np.argsort(place[numbers], kind="stable")
            rows = renamed(found.take(pa.array(order)), self.schema, self.schema.names)
        return hashed(rows, self.key, sent=rows) if self.key else rows
