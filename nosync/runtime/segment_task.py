"""The work of one shard on one segment at one epoch. Runs in a Spark task, but knows nothing of Spark.

Invariants
- A layer that is recorded is yielded, not computed again; so retries, speculative copies and recovery are one thing.
- A function sees its input in canonical order, whatever order it was delivered in: equal inputs, equal layers.
- A stage's changes are yielded only after its layer is published.

Steps
1. Sort the rows by edge, and bring each edge's into canonical order: those of a source by content, others by
   the tag they got before the shuffle. In a fused segment one row says both, see nosync.runtime.fused_rows.
2. For each stage of the segment: recorded -> read its changes back where they are wanted; else compute, publish, derive
   its changes. A stage that is not recorded at all is computed when a later one wants its changes.
3. Yield the changes of the stage that leaves the segment, each row tagged (shard, position), a report of every layer,
   and to every shard of the next segment a mark that says "these were all of mine": a stage that gets its rows from
   several shards computes only with the marks of all of them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_flow import (
    ARRANGE,
    DISTINCT,
    LATE,
    WATERMARK,
    BoundFlow,
    BoundStage,
    InputEdge,
    SegmentOutput,
    part_of,
)
from nosync.flow.dataflow import AGGREGATE, FILTER, IN_JVM, JOIN, LOOP, MAP, SOURCE, UNION, UPDATE, WINDOW
from nosync.flow.event_time import INPUT_COLUMN, MOST_INPUTS, Watermarks, read_watermarks, with_input, without_input
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.kernels.joins import content_hash
from nosync.kernels.windows import END, NO_WATERMARK, START, newest_us, newest_us_by, window_type, with_windows
from nosync.lsm.columnar.columns import conformed, key_columns
from nosync.lsm.columnar.hashing import hash64
from nosync.lsm.errors import DeterminismError, HoleError, NotAvailableError
from nosync.lsm.facts.fencing import Instance, check_fence
from nosync.lsm.layers.writer import without_empty
from nosync.lsm.model.history import History, View, continued, span_at, view_at, views_of
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId, of_round
from nosync.lsm.model.timestamp import Time, end_of, pack
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.trace.trace import Trace, lost_tail
from nosync.operators.bootstrap import bootstrap_layer, net_changes, rows_of_shard
from nosync.operators.loops import apply_loop, changes_of_round, consolidate, recorded_changes
from nosync.operators.operators import (
    NO_WATERMARKS,
    OperatorInput,
    OperatorOutput,
    apply_aggregate,
    apply_arrange,
    apply_distinct,
    apply_filter,
    apply_join,
    apply_map,
    apply_union,
    apply_update,
    as_changes,
    changes_of,
    hashed,
    keep_rows,
    lone_updates_named,
    nothing_happened,
    source,
    stage_error,
    weights_of,
)
from nosync.operators.windows import apply_late, apply_watermark, apply_window
from nosync.replication.client.fetching_directory import FetchingDirectory
from nosync.replication.client.location import StoreLocation, open_directory
from nosync.runtime.fused_rows import no_rows, renamed, split
from nosync.runtime.scan import Scan

TAG_SHARD_BITS = 40
_TAG_INPUT_BITS = 33
"""Below the shard, where rows say by which input they came, that one's number; below it the position."""
_WHOLE_ROWS = 250_000
"""A shard's whole state goes to other tasks in batches of so many rows."""
_MARK = b"all-from:"


@dataclass(frozen=True)
class Report:
    """What a task says of one layer. Travels to the driver as a row beside the data."""

    stage: str
    shard: int
    t: int
    computed: bool
    """False: it was recorded already."""
    rows: int = 0
    changes: int = 0
    """Of a loop's variable: the rows that entered and left the set."""
    size_bytes: int = 0
    digest: str = ""
    """Of the layer's own file; empty where a merged one stands for it."""
    record_s: float = 0.0
    """Seconds spent writing and linking the layer."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Report:
        return cls(**json.loads(text))


def emitted_schema(stage: BoundStage, output: SegmentOutput) -> pa.Schema:
    """The rows that leave a segment: the stage's output, its windows and change type if any, tag and report."""
    return pa.schema(
        [*_rows_schema(stage, output), pa.field(TAG_COLUMN, pa.int64()), pa.field(REPORT_COLUMN, pa.binary())]
    )


def edge_schema(stages: Mapping[str, BoundStage], edge: InputEdge) -> pa.Schema:
    """The columns of an edge's rows, without tag, report and hash."""
    stage = stages[edge.jvm[-1]] if edge.jvm else stages[edge.output.stage]
    return _rows_schema(stage, SegmentOutput(stage.name, edge.output.window))


def _rows_schema(stage: BoundStage, output: SegmentOutput) -> pa.Schema:
    if output.window is None:
        return stage.rows_schema
    type_ = window_type(stage.output.field(output.window.time).type)
    return pa.schema([*stage.rows_schema, pa.field(START, type_), pa.field(END, type_)])


def _given(rows: pa.Table, source: BoundStage) -> pa.Table:
    """A source's rows as they came, with the hash of each."""
    return hashed(renamed(rows, source.schema, source.schema.names), source.schema.names, sent=rows)


REPORT_SCHEMA = pa.schema([pa.field(REPORT_COLUMN, pa.binary())])

OPERATORS: dict[str, Callable[[OperatorInput], OperatorOutput]] = {
    SOURCE: source,
    MAP: apply_map,
    FILTER: apply_filter,
    UNION: apply_union,
    AGGREGATE: apply_aggregate,
    UPDATE: apply_update,
    DISTINCT: apply_distinct,
    ARRANGE: apply_arrange,
    JOIN: apply_join,
    LOOP: apply_loop,
    WATERMARK: apply_watermark,
    LATE: apply_late,
    WINDOW: apply_window,
    **dict.fromkeys(IN_JVM, keep_rows),
}
_IDLE_WITHOUT_ROWS = frozenset({AGGREGATE, UPDATE, DISTINCT, ARRANGE, JOIN})


@dataclass(frozen=True)
class SegmentTask:
    """One epoch's work on one segment, for every shard. Pickled to Spark's workers."""

    location: StoreLocation
    t: int
    shards: int
    stages: Mapping[str, BoundStage]
    """The stages to run, in order, and those that feed them."""
    run: tuple[str, ...]
    edges: tuple[InputEdge, ...] = ()
    output: SegmentOutput | None = None
    """What leaves the segment; None: only reports do."""
    histories: Mapping[str, History] = field(default_factory=dict)
    """By stage, where its layers are; a stage that is new at this epoch has none."""
    compute: Mapping[str, frozenset[int]] | None = None
    """By stage, the shards that may be computed; None: all. Recovery computes only what it planned."""
    input_given: bool = True
    """Whether the rows of a source at the head are there; if not, its layer must be recorded."""
    round: int | None = None
    """Inside a loop: the round; None: the whole epoch."""
    rounds: int = 0
    """Of a loop that is done: how many rounds it took, which become the epoch's layers."""
    phase: str = ""
    fused: bool = False
    """See nosync.flow.bound_flow.Segment."""
    scan: Scan | None = None
    """What the task reads itself of its sources; None: their rows come."""
    emits: bool = True
    """Whether anybody wants the rows that leave the segment at this epoch."""
    absent: frozenset[int] = frozenset()
    """Feeds that bring nothing: from outside the loop after its first round."""
    recorded: frozenset[str] = frozenset()
    """Stages all of whose layers are recorded, on this host or on others."""
    timeline: str = "main"
    instance: Instance | None = None
    """Which instance of the job this is; one that was replaced publishes nothing."""
    sealed: Mapping[tuple[str, int], Digest] = field(default_factory=dict)
    """By (stage, shard), what the epoch's manifest lists, where it is sealed: nothing else is published under these
    names.
    """

    def edge_of(self, stage: str, input: str) -> int | None:
        """The edge that an input comes by; None where it is computed in this segment."""
        if input in self.run and self.stages[stage].kind != LOOP:
            return None
        key = self.stages[stage].options.get("edge_key", ())
        found = next((i for i, f in enumerate(self.edges) if (f.input, f.key) == (input, key)), None)
        if found is None:
            raise HoleError(
                f"stage {stage} timestamp {self.t}: its layer is recorded and not here; recover() computes it again",
                stage=stage, shard="", lower=str(self.t), upper=str(self.t + 1),
            )  # fmt: skip
        return found

    @property
    def sources(self) -> list[BoundStage]:
        """The sources whose rows come, in order; several in a fused segment."""
        return [self.stages[name] for name in self.run if self.stages[name].kind == SOURCE]

    def run_shard(self, index: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Raises StageError, DeterminismError, HoleError, CorruptionError or StorageError; then nothing was yielded."""
        return _ShardRun(self, Shard(index, self.shards)).run(list(batches))


def side_column(index: int, name: str) -> str:
    """What a column of edge `index` is called where the rows of several edges come together."""
    return f"_{index}_{name}"


@dataclass
class _Fed:
    """What came by one edge."""

    rows: pa.Table
    heard_from: set[int] = field(default_factory=set)
    newest_us: int | None = None
    newest_of: dict[str, int] = field(default_factory=dict)
    """By the input that the rows came by, where they say it."""

    def hear(self, mark: Mapping[str, Any]) -> None:
        """A shard has sent all of its rows."""
        self.heard_from.add(mark["from"])
        if "newest_us" in mark:
            self.newest_us = max(mark["newest_us"], NO_WATERMARK if self.newest_us is None else self.newest_us)
        for name, newest in mark.get("newest_of", {}).items():
            self.newest_of[name] = max(newest, self.newest_of.get(name, NO_WATERMARK))


class _ShardRun:
    def __init__(self, task: SegmentTask, shard: Shard) -> None:
        self._task = task
        self._shard = shard
        self._directory = open_directory(task.location)
        self._fetch_rounds()
        self._reports: list[bytes] = []
        self._changes: dict[str, pa.Table] = {}
        self._produced: dict[str, OperatorOutput] = {}  # changes are derived from it where they are wanted
        self._edges: list[_Fed] = []
        self._given: dict[str, pa.Table] = {}  # by source, its rows

    def _fetch_rounds(self) -> None:
        """The loop's rounds before this one may have run on other hosts, which alone have what they recorded."""
        task = self._task
        if isinstance(self._directory, FetchingDirectory) and (task.round is not None or task.rounds):
            stages = [task.stages[name] for name in task.run if task.stages[name].loop is not None]
            self._directory.fetch_rounds(
                [TraceId(stage.name, stage.fingerprint, self._shard) for stage in stages], task.t
            )

    def run(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._receive(batches)
        output = self._task.output
        for name in self._task.run:
            if self._task.stages[name].recorded:
                self._record(self._task.stages[name])
        reports = pa.array(self._reports, pa.binary())
        if output is None:
            yield pa.RecordBatch.from_arrays([reports], schema=REPORT_SCHEMA)
            return
        yield from self._emit(output, reports)

    def _emit(self, output: SegmentOutput, reports: pa.Array) -> Iterator[pa.RecordBatch]:
        """Step 3."""
        schema = emitted_schema(self._task.stages[output.stage], output)
        targets = [0] * len(reports)
        if self._task.emits and self._available(output.stage):
            rows = (self._whole_of if output.whole else self._changes_of)(output.stage)
            mark: dict[str, Any] = {"from": self._shard.index}
            first_tag: Any = self._shard.index << TAG_SHARD_BITS
            if output.window is not None:
                mark |= self._newest(output, rows)
                rows = with_windows(rows, output.window)
            elif self._task.stages[output.stage].origins:
                first_tag = first_tag + (rows.column(INPUT_COLUMN).to_numpy().astype(np.int64) << _TAG_INPUT_BITS)
            rows = rows.select(schema.names[:-2])
            marks = pa.array([_MARK + json.dumps(mark).encode()] * self._task.shards, pa.binary())
            reports = pa.concat_arrays([reports, marks])
            targets += range(self._task.shards)
            if rows.num_rows:
                tags = np.arange(rows.num_rows, dtype=np.int64) + first_tag
                columns = [*rows.columns, pa.array(tags), pa.nulls(rows.num_rows, pa.binary())]
                sent = pa.Table.from_arrays(columns, schema=schema).combine_chunks()
                yield from sent.to_batches(max_chunksize=_WHOLE_ROWS if output.whole else None)
        blank = [pa.nulls(len(reports), f.type) for f in list(schema)[:-2]]
        yield pa.RecordBatch.from_arrays([*blank, pa.array(targets, pa.int64()), reports], schema=schema)

    def _newest(self, output: SegmentOutput, rows: pa.Table) -> dict[str, Any]:
        """What a mark says of event time to a window: the newest, and that of each input where rows say by which they
        came.
        """
        window, origins = output.window, self._task.stages[output.stage].origins
        assert window is not None, "it goes to a window"
        newest = newest_us(rows, window)
        if newest is None or not origins:
            return {} if newest is None else {"newest_us": newest}
        of_input = newest_us_by(rows.column(INPUT_COLUMN).to_numpy(), rows, window)
        return {"newest_us": newest, "newest_of": {origins[i]: us for i, us in of_input.items()}}

    # --- step 1 -----------------------------------------------------------------------------------------------------

    def _receive(self, batches: list[pa.RecordBatch]) -> None:
        """Keeps the reports that came with the rows."""
        rows = pa.Table.from_batches(batches) if batches else None
        if self._task.fused or self._task.scan is not None:
            self._receive_fused(rows)
            return
        if not self._task.edges:
            self._given = {stage.name: _given(rows, stage) for stage in self._task.sources if rows is not None}
            return
        several = len(self._task.edges) - len(self._task.absent) > 1
        for i, edge in enumerate(self._task.edges):
            mine = None if i in self._task.absent else rows
            if mine is not None and several:
                mine = mine.filter(pc.equal(mine.column(SIDE_COLUMN), i))
            self._edges.append(self._edge_rows(i, edge, mine, several=several))

    def _receive_fused(self, rows: pa.Table | None) -> None:
        task, fed = self._task, dict[int, pa.Table]()
        if rows is not None or task.scan is not None:
            given, fed = self._of_sources(rows)
            self._given = {stage.name: of_stage for stage, of_stage in zip(task.sources, given, strict=True)}
        for i, edge in enumerate(task.edges):
            # One shuffle brought everything.
            self._edges.append(_Fed(fed.get(i, no_rows(edge_schema(task.stages, edge))), set(range(task.shards))))

    def _of_sources(self, rows: pa.Table | None) -> tuple[list[pa.Table], dict[int, pa.Table]]:
        task = self._task
        if task.scan is not None:
            return task.scan.rows(self._shard, task.sources, task.edges, task.stages)
        assert rows is not None, "its rows come"
        return split(rows, task.sources, task.edges, task.stages)

    def _edge_rows(self, index: int, edge: InputEdge, rows: pa.Table | None, *, several: bool) -> _Fed:
        schema = edge_schema(self._task.stages, edge)
        fed = _Fed(self._with_input(edge, no_rows(schema) if edge.key else schema.empty_table(), 0))
        if index in self._task.absent:
            fed.heard_from.update(range(self._task.shards))
        if rows is None:
            return fed
        reports = rows.column(REPORT_COLUMN)
        for report in reports.drop_null().to_pylist():
            if report.startswith(_MARK):
                fed.hear(json.loads(report[len(_MARK) :]))
            else:
                self._reports.append(report)
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
        table = self._with_input(edge, table, (tags >> _TAG_INPUT_BITS) & (MOST_INPUTS - 1))
        fed.rows = table.take(pa.array(order))
        if edge.jvm:
            fed.rows = lone_updates_named(fed.rows, tags[order])
        return fed

    def _with_input(self, edge: InputEdge, rows: pa.Table, came_by: Any) -> pa.Table:
        """An edge's rows, with the input that each came by where the stage says it, in tags."""
        stage = self._task.stages[edge.jvm[-1] if edge.jvm else edge.output.stage]
        return with_input(rows, came_by) if stage.origins and edge.output.window is None else rows

    # --- step 2 -----------------------------------------------------------------------------------------------------

    def _record(self, stage: BoundStage) -> None:
        """Sees to it that the stage's layer is recorded, unless it is neither recorded nor to be computed."""
        id = self._layer_id(stage)
        if self._is_recorded(stage, id) and not self._must_compare(stage, id):
            counted = len(self._changes_of(stage.name)) if self._counts(stage) else 0
            report = Report(stage.name, self._shard.index, self._task.t, computed=False, changes=counted)
            with contextlib.suppress(FileNotFoundError):  # a merged layer stands for it
                known = self._directory.recorded(id)
                report = replace(report, rows=known.rows, digest=known.digest)
            self._reports.append(report.to_json())
            return
        if self._task.compute is not None and self._shard.index not in self._task.compute.get(stage.name, ()):
            return
        produced = self._compute(stage, id)
        report, ours = self._publish(stage, id, produced)
        if ours:
            self._produced[stage.name] = produced
        if self._counts(stage):
            report = replace(report, changes=len(self._changes_of(stage.name)))
        self._reports.append(report.to_json())

    def _counts(self, stage: BoundStage) -> bool:
        """Whether the driver wants to know how much changed: that decides whether the loop goes on."""
        return stage.kind == LOOP and self._task.round is not None

    def _derived(self, stage: BoundStage, produced: OperatorOutput) -> pa.Table:
        if stage.kind == LOOP:
            return changes_of_round(produced, stage, self._begin)
        return changes_of(produced, stage, self._task.t)

    @property
    def _begin(self) -> Time:
        """The time of the epoch, or of the loop's round."""
        return pack(self._task.t, self._task.round or 0)

    def _layer_id(self, stage: BoundStage) -> LayerId:
        return LayerId(TraceId(stage.name, stage.fingerprint, self._shard), self._description)

    @property
    def _description(self) -> Description:
        if self._task.round is None:
            return Description.of_epoch(self._task.t)
        return of_round(self._task.t, self._task.round)

    def _is_recorded(self, stage: BoundStage, id: LayerId) -> bool:
        d = id.description
        if self._task.round is not None:  # the epoch's layer does not say what its rounds were
            return d in self._directory.descriptions(id.trace)
        if self._directory.holds(id):
            return True
        if not isinstance(self._directory, FetchingDirectory) or not self._is_not_computed(stage):
            return False
        return self._directory.fetch(id)

    def _is_not_computed(self, stage: BoundStage) -> bool:
        """Whether the layer is there, if not on this host; or it is lost, and not to be computed now."""
        if stage.name in self._task.recorded:
            return True
        if stage.kind == SOURCE and not self._task.input_given:
            return True
        compute = self._task.compute
        return compute is not None and self._shard.index not in compute.get(stage.name, ())

    def _must_compare(self, stage: BoundStage, id: LayerId) -> bool:
        """A source that is given its rows again publishes them again: other rows for a recorded epoch are an error."""
        if stage.kind != SOURCE or not self._task.input_given:
            return False
        # Merged since, it is not there under its own name any more, but its manifest remembers it.
        return self._directory.path_of(id).exists() or self._expected(id) is not None

    def _expected(self, id: LayerId) -> Digest | None:
        """What the epoch's manifest lists; of a loop's rounds it lists nothing."""
        return self._task.sealed.get((id.trace.stage, id.trace.shard.index)) if self._task.round is None else None

    def _available(self, name: str) -> bool:
        """Whether the changes of a stage can be had: it is recorded, or what it is computed from is."""
        stage = self._task.stages[name]
        if stage.recorded:
            return self._is_recorded(stage, self._layer_id(stage))
        edges = [self._task.edge_of(name, i) for i in stage.inputs]
        return all(
            self._available(i) if edge is None else not self._silent(edge)
            for i, edge in zip(stage.inputs, edges, strict=True)
        )

    def _changes_of(self, name: str) -> pa.Table:
        """The changes of a stage of this segment at this epoch."""
        found = self._changes.get(name)
        if found is None:
            stage = self._task.stages[name]
            produced = self._produced.pop(name, None)
            if produced is None and stage.recorded:
                found = self._recorded_changes(stage)
            else:
                found = self._derived(stage, produced or self._compute(stage, self._layer_id(stage)))
            self._changes[name] = found
        return found

    def _recorded_changes(self, stage: BoundStage) -> pa.Table:
        """The changes of a recorded layer, row for row as they were when it was computed."""
        before, last = Time(self._begin - 1), Time(self._description.upper - 1)
        if not stage.keyed:
            trace = self._directory.layer_at(self._layer_id(stage).trace, self._begin)
        elif self._task.round is not None:
            trace = self._directory.open_rounds(self._view(stage), self._task.t, self._task.round + 1)
        else:
            trace = self._directory.open_view(self._view(stage), until=end_of(self._task.t), as_of=before)
        if stage.kind == LOOP:
            return recorded_changes(trace, stage, before, last)
        if stage.keyed:
            trace = trace.read_as(stage.schema)
        return trace.changes(before, last).select(stage.carried.names)

    def _whole_of(self, name: str) -> pa.Table:
        """The rows of a stage that are there after this epoch, for those that begin anew with it."""
        stage = self._task.stages[name]
        if not stage.recorded:
            whole = replace(stage, bootstrap_at=self._task.t)
            return self._derived(whole, self._compute(whole, self._layer_id(whole)))
        time = Time(end_of(self._task.t) - 1)
        if not stage.keyed:
            return self._log_rows(stage, time).select(stage.carried.names)
        trace = self._directory.open_view(self._view(stage), until=end_of(self._task.t), as_of=time)
        rows = self._scanned(trace.read_as(stage.schema), time)
        return (as_changes(rows) if stage.changing else rows).select(stage.carried.names)

    def _log_rows(self, stage: BoundStage, as_of: Time) -> pa.Table:
        """This shard's part of a log's rows; of one that takes rows back, what is left of them."""
        history, groups = self._task.histories.get(stage.name, ()), self._task.location.key_groups
        if as_of >= self._begin:
            history = continued(history, stage.fingerprint, self._shard.count, self._begin)
        tables = [stage.schema.empty_table()]
        for view in views_of(history, stage.name, as_of, groups, log=True):
            mine = rows_of_shard(stage, view.id.shard, self._shard, groups)
            if mine is not None:
                trace = self._directory.open_view(view, until=Time(as_of + 1), as_of=as_of)
                tables.append(mine(self._scanned(trace.read_as(stage.schema), as_of).select(stage.schema.names)))
        rows = pa.concat_tables(tables)
        return net_changes(rows, weights_of(rows)) if stage.changing else rows

    @staticmethod
    def _scanned(trace: Trace, as_of: Time) -> pa.Table:
        return pa.Table.from_batches(trace.scan(as_of), schema=trace.schema)

    def _held_before(self, stage: BoundStage) -> pa.Table:
        """What a stage held before this epoch; of a log, this shard's part."""
        before = Time(self._begin - 1)
        if not stage.keyed:
            return self._log_rows(stage, before)
        return self._scanned(self._state_before(stage.name), before).select(stage.schema.names)

    def _nothing_before(self, name: str) -> Trace:
        stage = self._task.stages[name]
        id = TraceId(name, stage.fingerprint, self._shard)
        return Trace(id, (), self._task.location.key_groups, stage.schema, key=stage.key)

    def _view(self, stage: BoundStage) -> View:
        id = TraceId(stage.name, stage.fingerprint, self._shard)
        return view_at(self._task.histories.get(stage.name, ()), id, pack(self._task.t), self._task.location.key_groups)

    def _state_before(self, name: str) -> Trace:
        t, stage = pack(self._task.t), self._task.stages[name]
        view = self._view(stage)
        if self._task.round is not None:
            return self._directory.open_rounds(view, self._task.t, self._task.round)
        try:
            trace = self._directory.open_view(view, until=t, as_of=Time(t - 1))
        except NotAvailableError as error:  # and epochs run in order
            raise lost_tail(view.id, t, error) from None
        return trace.read_as(stage.schema) if stage.keyed else trace  # a branch may have added columns

    def _compute(self, stage: BoundStage, id: LayerId) -> OperatorOutput:
        produced = self._operated(stage, id)
        if not (self._is_anew(stage) and stage.recorded):
            return produced
        return bootstrap_layer(stage, id, produced, self._held_before(stage))

    def _is_anew(self, stage: BoundStage) -> bool:
        """Whether this is the epoch with which a stage begins anew."""
        return stage.bootstrap_at == self._task.t

    def _operated(self, stage: BoundStage, id: LayerId) -> OperatorOutput:
        """What a stage makes of its inputs."""
        if stage.loop is not None and self._task.round is None:
            trace = self._directory.open_rounds(self._view(stage), self._task.t, self._task.rounds)
            return consolidate(trace, stage, id)
        if stage.kind == SOURCE:
            if not self._task.input_given:
                raise HoleError(
                    f"{id}: the recorded input is lost, and it is not given again; recover(inputs=...) on the timeline that it "
                    "was recorded on",
                    stage=stage.name, shard=str(self._shard), lower=str(self._task.t), upper=str(self._task.t + 1),
                )  # fmt: skip
            inputs = [self._given.get(stage.name, no_rows(stage.schema))]
        else:
            inputs = [self._input(stage, name, id) for name in stage.inputs]
        idle = stage.kind in _IDLE_WITHOUT_ROWS and stage.options.get("ttl") is None
        if stage.plan is not None and stage.plan.is_over_all_rows:
            idle = False
        if idle and not any(rows.num_rows for rows in inputs):
            return nothing_happened(stage, id)
        state = self._nothing_before if self._is_anew(stage) else self._state_before
        work = OperatorInput(stage, id, tuple(inputs), state, phase=self._task.phase)
        if stage.window is not None:
            fed = self._edges[0]
            watermarks = self._watermarks(stage)
            work = replace(work, newest_us=fed.newest_us, newest_of=fed.newest_of, watermarks=watermarks)
        try:
            return OPERATORS[stage.kind](work)
        except (pa.ArrowException, ArithmeticError) as error:  # of values that Arrow cannot compute with
            raise stage_error(id, f"its {stage.kind} failed: {type(error).__name__}: {error}") from error

    def _input(self, stage: BoundStage, name: str, id: LayerId) -> pa.Table:
        rows = self._carried_input(stage, name, id)
        return rows if stage.origins else without_input(rows)

    def _carried_input(self, stage: BoundStage, name: str, id: LayerId) -> pa.Table:
        edge = self._task.edge_of(stage.name, name)
        if edge is None:
            rows = (self._whole_of if self._is_anew(stage) else self._changes_of)(name)
            key = stage.options.get("edge_key", ())
            if not key:
                return rows
            # What the JVM computes where rows change their shard.
            hashes = hash64(key_columns(rows, key, str(id))).view(np.int64)
            return rows.append_column(HASH64_COLUMN, pa.array(hashes))
        silent = self._silent(edge)
        if silent:
            raise stage_error(
                id, f"shards {sorted(silent)} of its input {name} sent nothing; nothing is computed from a part"
            )
        return self._edges[edge].rows

    def _silent(self, edge: int) -> set[int]:
        """The shards whose rows have not come."""
        expected = set(range(self._task.shards)) if self._task.edges[edge].key else {self._shard.index}
        return expected - self._edges[edge].heard_from

    def _watermarks(self, stage: BoundStage) -> Watermarks:
        """Those in force at the epoch before and at this one, and of each input, as the epoch before recorded them."""
        name = part_of(stage.name, WATERMARK)
        if name not in self._task.stages:
            return NO_WATERMARKS
        before = Time(pack(self._task.t) - 1)
        span = span_at(self._task.histories.get(name, ()), before)
        if span is None:
            return NO_WATERMARKS
        # Every shard recorded the same watermark: its own is read, which no other task writes.
        index = self._shard.index if span.shard_count == self._task.shards else 0
        row = self._directory.layer_at(span.trace(name, index), before).changes(
            Time(pack(self._task.t - 1) - 1), before
        )
        return read_watermarks(row)

    def _publish(self, stage: BoundStage, id: LayerId, produced: OperatorOutput) -> tuple[Report, bool]:
        """False where another computation of a nondeterministic stage was recorded first: that one counts."""
        started = time.perf_counter()
        check_fence(self._directory.root, self._task.timeline, self._task.instance, self._directory.env)
        ours = True
        layer = produced.layer if stage.plan is None else without_empty(produced.layer, stage.plan.rare)
        try:
            published = self._directory.publish(id, layer, self._expected(id) if stage.deterministic else None)
        except DeterminismError:
            if stage.deterministic:
                raise
            ours = False
            published = self._directory.recorded(id)
        if not stage.deterministic:
            self._make_durable(id)
        took = time.perf_counter() - started
        rows, size = published.rows, published.size_bytes
        return Report(
            stage.name, self._shard.index, self._task.t, not published.existed, rows, 0, size, published.digest, took
        ), ours

    def _make_durable(self, id: LayerId) -> None:
        """What will never be computed again is on disk before anything is computed from it."""
        path = self._directory.path_of(id)
        with storage_errors("sync", path):
            self._directory.env.sync_file(path)
            for parent in list(path.parents)[: len(id.path.parts)]:
                self._directory.env.sync_dir(parent)


def rows_in(reports: Mapping[tuple[str, int], Report], flow: BoundFlow) -> int:
    """Rows recorded by the sources in an epoch."""
    sources = {stage.name for stage in flow.sources}
    return sum(report.rows for (stage, _), report in reports.items() if stage in sources)
