"""The layers that one shard's stages have recorded: looking for layers, reading them, and publishing new ones."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import pyarrow as pa

from nosync.flow.bound_stage import WATERMARK, BoundStage, part_of
from nosync.flow.event_time import Watermarks, read_watermarks
from nosync.flow.kinds import LOOP, SOURCE
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import DeterminismError, NotAvailableError
from nosync.lsm.facts.fencing import check_fence
from nosync.lsm.layers.writer import without_empty
from nosync.lsm.model.history import History, View, counting, span_at, view_at, views_of
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId, of_round
from nosync.lsm.model.timestamp import Time, end_of, pack
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.trace.change_feed import rows_left
from nosync.lsm.trace.cover import lost_tail
from nosync.lsm.trace.trace import Trace
from nosync.operators.base import NO_WATERMARKS, OperatorOutput, as_changes, stage_error, weights_of
from nosync.operators.bootstrap import net_changes, rows_of_shard
from nosync.operators.loops import recorded_changes
from nosync.replication.client.location import open_directory
from nosync.runtime.segment_task import Report, SegmentTask


class ShardState:
    """The layers of one shard at the epoch of a task, or at its round of a loop, and those before."""

    def __init__(self, task: SegmentTask, shard: Shard) -> None:
        self._task, self._shard = task, shard
        self._directory = open_directory(task.location)
        self.begin: Time = pack(task.t, task.round or 0)
        """The time of the epoch, or of the loop's round."""
        self._description = Description.of_epoch(task.t) if task.round is None else of_round(task.t, task.round)
        self._fetch_rounds()

    def _fetch_rounds(self) -> None:
        """Has the loop's rounds before this one fetched: other hosts, where they ran, alone have what they recorded."""
        task = self._task
        if task.round is not None or task.rounds:
            stages = [task.stages[name] for name in task.run if task.stages[name].loop is not None]
            self._directory.fetch_rounds([self._trace_of(stage) for stage in stages], task.t)

    def _trace_of(self, stage: BoundStage) -> TraceId:
        return TraceId(stage.name, stage.fingerprint, self._shard)

    def layer_id(self, stage: BoundStage) -> LayerId:
        """Returns the name of the layer that a stage records."""
        return LayerId(self._trace_of(stage), self._description)

    # --- looking ----------------------------------------------------------------------------------------------------

    def is_recorded(self, stage: BoundStage, id: LayerId) -> bool:
        """Returns whether a layer is there. One that is not to be computed is asked of peers."""
        if self._task.round is not None:  # the epoch's layer does not say what its rounds were
            return id.description in self._directory.descriptions(id.trace)
        if self._directory.holds(id):
            return True
        return self._is_not_computed(stage) and self._directory.fetch(id)

    def _is_not_computed(self, stage: BoundStage) -> bool:
        """Returns whether the layer is there, if not on this host; or it is lost, and not to be computed now."""
        if stage.name in self._task.recorded:
            return True
        if stage.kind == SOURCE and not self._task.input_given:
            return True
        compute = self._task.compute
        return compute is not None and self._shard.index not in compute.get(stage.name, ())

    def must_compare(self, stage: BoundStage, id: LayerId) -> bool:
        """Returns whether a recorded layer is published again, as that of a source that is given its rows again is.

        Other rows for a recorded epoch are an error.
        """
        if stage.kind != SOURCE or not self._task.input_given:
            return False
        # Merged since, it is not there under its own name any more, but its manifest remembers it.
        return self._directory.has_file(id) or self._expected(id) is not None

    def _expected(self, id: LayerId) -> Digest | None:
        """Returns what the epoch's manifest lists; it lists nothing of a loop's rounds."""
        return self._task.sealed.get((id.trace.stage, id.trace.shard.index)) if self._task.round is None else None

    def found(self, stage: BoundStage, id: LayerId, changes: int) -> Report:
        """Returns the report of a layer that was recorded already."""
        report = Report(stage.name, self._shard.index, self._task.t, computed=False, changes=changes)
        with contextlib.suppress(FileNotFoundError):  # a merged layer stands for it
            known = self._directory.recorded(id)
            report = replace(report, rows=known.rows, digest=known.digest)
        return report

    # --- reading ----------------------------------------------------------------------------------------------------

    def changes_of(self, stage: BoundStage) -> pa.Table:
        """Returns the changes of a recorded layer, row for row as they were when it was computed."""
        task, before, last = self._task, Time(self.begin - 1), Time(self._description.upper - 1)
        if not stage.keyed:
            trace = self._directory.layer_at(self._trace_of(stage), self.begin)
        elif task.round is not None:
            trace = self.rounds(stage, task.round + 1)
        else:
            trace = self._directory.open_view(self._view(stage), until=end_of(task.t), as_of=before)
        if stage.kind == LOOP:
            return recorded_changes(trace, stage, before, last)
        return trace.read_as(stage.schema).changes(before, last).select(stage.carried.names)

    def rows_after(self, stage: BoundStage) -> pa.Table:
        """Returns the rows of a recorded stage that are there after this epoch."""
        time = Time(end_of(self._task.t) - 1)
        if not stage.keyed:
            return self._log_rows(stage, time).select(stage.carried.names)
        trace = self._directory.open_view(self._view(stage), until=end_of(self._task.t), as_of=time)
        rows = _scanned(trace.read_as(stage.schema), time)
        return (as_changes(rows) if stage.changing else rows).select(stage.carried.names)

    def rows_before(self, stage: BoundStage) -> pa.Table:
        """Returns the rows of a recorded stage that were there before this epoch; of a log, this shard's part."""
        before = Time(self.begin - 1)
        if not stage.keyed:
            return self._log_rows(stage, before)
        return _scanned(self.before(stage.name), before).select(stage.schema.names)

    def _log_rows(self, stage: BoundStage, as_of: Time) -> pa.Table:
        """Returns this shard's part of a log's rows; of one that takes rows back, what is left of them."""
        history, groups, before = self._history(stage), self._task.location.key_groups, Time(self.begin - 1)
        tables = [stage.schema.empty_table()]
        for view in views_of(history, stage.name, before, groups, log=True):
            mine = rows_of_shard(stage, view.id, self._shard, groups)
            if mine is not None:
                trace = self._directory.open_view(view, until=self.begin, as_of=before).read_as(stage.schema)
                self._check_belongs(stage, trace)
                tables.append(mine(_scanned(trace, before)))
        if as_of >= self.begin:  # of this epoch other tasks may not have recorded theirs yet
            own = self._directory.layer_at(self._trace_of(stage), self.begin).read_as(stage.schema)
            tables.append(own.changes(before, as_of).drop_columns([EPOCH_COLUMN]))
        rows = pa.concat_tables(tables, promote_options="default")
        if stage.changing:
            return net_changes(rows, weights_of(rows).to_numpy()).select(stage.schema.names)
        if CHANGE_TYPE_COLUMN in rows.column_names:
            rows = rows_left(rows)
        return rows.select(stage.schema.names)

    def _history(self, stage: BoundStage) -> History:
        """Returns the spans that count at this epoch. One that replaces what was before begins with it."""
        return counting(self._task.histories.get(stage.name, ()), self.begin)

    def _check_belongs(self, stage: BoundStage, trace: Trace) -> None:
        """Raises StageError where a row that goes and the one that came are dealt out to different shards."""
        count = trace.id.shard.count
        by_columns = stage.placed_by and stage.is_placed_by_columns
        if (
            not stage.changing
            and CHANGE_TYPE_COLUMN in trace.schema.names
            and count != self._shard.count
            and not by_columns
        ):
            raise stage_error(
                self.layer_id(stage),
                f"some of its rows were taken back when it had {count} shards, so what follows it can begin anew with {count} "
                f"shards only: rescale({count}), run the epoch, then rescale again",
            )

    def before(self, name: str) -> Trace:
        """Returns the state of a stage before this epoch, or before this round."""
        t, stage = pack(self._task.t), self._task.stages[name]
        if self._task.round is not None:
            return self.rounds(stage, self._task.round)
        view = self._view(stage)
        try:
            trace = self._directory.open_view(view, until=t, as_of=Time(t - 1))
        except NotAvailableError as error:  # and epochs run in order
            raise lost_tail(view.id, t, error) from None
        return trace.read_as(stage.schema) if stage.keyed else trace  # a branch may have added columns

    def nothing_before(self, name: str) -> Trace:
        """Returns the state of a stage that begins anew with this epoch: there is none."""
        stage = self._task.stages[name]
        return nothing_held(stage, self._trace_of(stage), self._task.location.key_groups)

    def was_there(self, stage: BoundStage) -> bool:
        """Returns whether an epoch before has the stage."""
        return any(span.lower < self.begin for span in self._history(stage))

    def rounds(self, stage: BoundStage, count: int) -> Trace:
        """Returns the state of a loop's stage after so many rounds of this epoch; of one that begins anew with it, what
        these alone made.
        """
        before = self.nothing_before(stage.name) if stage.bootstrap_at == self._task.t else None
        return self._directory.open_rounds(self._view(stage), self._task.t, count, before)

    def _view(self, stage: BoundStage) -> View:
        return view_at(self._history(stage), self._trace_of(stage), pack(self._task.t), self._task.location.key_groups)

    def watermarks(self, stage: BoundStage) -> Watermarks:
        """Returns the watermarks of a window at the epoch before, and of each input, as that epoch recorded them."""
        name = part_of(stage.name, WATERMARK)
        if name not in self._task.stages:
            return NO_WATERMARKS
        before = Time(pack(self._task.t) - 1)
        span = span_at(self._task.histories.get(name, ()), before)
        if span is None:
            return NO_WATERMARKS
        # Every shard recorded the same watermark: its own is read, which no other task writes.
        index = self._shard.index if span.shard_count == self._task.shards else 0
        layer = self._directory.layer_at(span.trace(name, index), before)
        return read_watermarks(layer.changes(Time(pack(self._task.t - 1) - 1), before))

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(self, stage: BoundStage, id: LayerId, produced: OperatorOutput) -> tuple[Report, bool]:
        """Publishes what a stage produced.

        False: another computation of a nondeterministic stage was recorded first, and that one counts.
        """
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
        """Puts a layer on disk that will never be computed again, before anything is computed from it."""
        path = self._directory.path_of(id)
        with storage_errors("sync", path):
            self._directory.env.sync_file(path)
            for parent in list(path.parents)[: len(id.path.parts)]:
                self._directory.env.sync_dir(parent)


def nothing_held(stage: BoundStage, id: TraceId, key_groups: int) -> Trace:
    """Returns the state of a stage that has none yet."""
    return Trace(id, (), key_groups, stage.schema, key=stage.key)


def _scanned(trace: Trace, as_of: Time) -> pa.Table:
    return pa.Table.from_batches(trace.scan(as_of), schema=trace.schema)
