"""The work of one shard on one segment at one epoch. Runs in a Spark task, but knows nothing of Spark.

Invariants
- A layer that is recorded is yielded, not computed again; so retries, speculative copies and recovery are one thing.
- A function sees its input in canonical order, whatever order it was delivered in: equal inputs, equal layers.
- A stage's changes are yielded only after its layer is published.

Steps
1. Part the rows by source and edge, in canonical order: see `nosync.runtime.shard_inputs`.
2. For each stage of the segment: recorded -> read its changes back where they are wanted; else compute, publish, derive
   its changes. A stage that is not recorded at all is computed when a later one wants its changes.
3. Yield the changes of the stage that leaves the segment, each row tagged (shard, position), a report of every layer,
   and to every shard of the next segment a mark that says "these were all of mine".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from nosync.flow.bound_stage import (
    ARRANGE,
    DISTINCT,
    FINAL,
    FIRST,
    INTERVAL_JOIN,
    INTERVAL_SIDE,
    LATE,
    OUTPUT,
    SEEN,
    TIMED_UPDATE,
    WATERMARK,
    BoundStage,
    SegmentOutput,
    declared_of,
)
from nosync.flow.event_time import INPUT_COLUMN, without_input
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.kinds import AGGREGATE, FILTER, IN_JVM, JOIN, LOOP, MAP, PER_KEY, SOURCE, UNION, UPDATE, WINDOW
from nosync.flow.stage_options import WatermarkOptions
from nosync.kernels.windows import event_span_us, newest_us_by, with_windows
from nosync.lsm.columnar.columns import key_columns
from nosync.lsm.columnar.hashing import hash64
from nosync.lsm.errors import HoleError
from nosync.lsm.model.layer import LayerId, Shard
from nosync.operators.base import (
    OperatorInput,
    OperatorOutput,
    changes_of,
    nothing_happened,
    stage_error,
    without_expired,
)
from nosync.operators.bootstrap import bootstrap_layer
from nosync.operators.event_times import apply_first, apply_interval_join, apply_interval_side, apply_seen
from nosync.operators.loops import apply_loop, changes_of_round, consolidate
from nosync.operators.operators import (
    apply_aggregate,
    apply_arrange,
    apply_distinct,
    apply_filter,
    apply_join,
    apply_map,
    apply_union,
    apply_update,
    keep_rows,
    source,
)
from nosync.operators.per_key import apply_per_key
from nosync.operators.timed_updates import apply_output, apply_timed_update
from nosync.operators.windows import apply_final, apply_late, apply_watermark, apply_window, expired_before
from nosync.runtime.segment_task import (
    MARK,
    REPORT_SCHEMA,
    TAG_INPUT_BITS,
    TAG_SHARD_BITS,
    SegmentTask,
    emitted_schema,
)
from nosync.runtime.shard_inputs import ShardInputs, newest_of_all, oldest_of_all
from nosync.runtime.shard_state import ShardState

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
    PER_KEY: apply_per_key,
    LOOP: apply_loop,
    WATERMARK: apply_watermark,
    LATE: apply_late,
    WINDOW: apply_window,
    FINAL: apply_final,
    SEEN: apply_seen,
    FIRST: apply_first,
    INTERVAL_SIDE: apply_interval_side,
    INTERVAL_JOIN: apply_interval_join,
    TIMED_UPDATE: apply_timed_update,
    OUTPUT: apply_output,
    **dict.fromkeys(IN_JVM, keep_rows),
}
_IDLE_WITHOUT_ROWS = frozenset({AGGREGATE, UPDATE, DISTINCT, ARRANGE, JOIN, PER_KEY})
_KEEP_RESULTS = frozenset({AGGREGATE, UPDATE, WINDOW, WATERMARK, LATE, FINAL, SEEN, FIRST, TIMED_UPDATE, OUTPUT})
"""The kinds of stages whose results stay when rows expire that they were made of."""
_WHOLE_ROWS = 250_000
"""A shard's whole state goes to other tasks in batches of so many rows."""


def run_shard(task: SegmentTask, index: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs a task for one shard, on the rows that came.

    Raises StageError, DeterminismError, HoleError, CorruptionError or StorageError; then nothing was yielded.
    """
    shard = Shard(index, task.shards)
    state = ShardState(task, shard)
    return ShardRun(task, shard, ShardInputs(task, shard, list(batches)), state).run()


class ShardRun:
    """Computes and records the stages of a segment for one shard, and yields what leaves it."""

    def __init__(self, task: SegmentTask, shard: Shard, inputs: ShardInputs, state: ShardState) -> None:
        self._task, self._shard, self._inputs, self._state = task, shard, inputs, state
        self._reports = list(inputs.reports)
        self._changes: dict[str, pa.Table] = {}
        self._produced: dict[str, OperatorOutput] = {}  # changes are derived from it where they are wanted
        self._shared: dict[str, dict[str, Any]] = {}

    def run(self) -> Iterator[pa.RecordBatch]:
        """Runs steps 2 and 3."""
        output = self._task.output
        for name in self._task.run:
            if self._task.stages[name].recorded:
                self._record(self._task.stages[name])
        reports = pa.array(self._reports, pa.binary())
        if output is None:
            yield pa.RecordBatch.from_arrays([reports], schema=REPORT_SCHEMA)
            return
        yield from self._emit(output, reports)

    # --- step 2 -----------------------------------------------------------------------------------------------------

    def _record(self, stage: BoundStage) -> None:
        """Sees to it that the stage's layer is recorded, unless it is neither recorded nor to be computed."""
        id = self._state.layer_id(stage)
        if self._state.is_recorded(stage, id) and not self._state.must_compare(stage, id):
            counted = len(self._changes_of(stage.name)) if self._counts(stage) else 0
            self._reports.append(self._state.found(stage, id, counted).to_json())
            return
        if self._task.compute is not None and self._shard.index not in self._task.compute.get(stage.name, ()):
            return
        produced = self._compute(stage, id)
        report, ours = self._state.publish(stage, id, produced)
        if ours:
            self._produced[stage.name] = produced
        if self._counts(stage):
            report = replace(report, changes=len(self._changes_of(stage.name)))
        if stage.window is not None and not self._is_anew(stage):  # which sees the rows of all epochs
            edges = self._inputs.edges
            report = replace(report, oldest_us=oldest_of_all(edges), newest_us=newest_of_all(edges))
        self._reports.append(report.to_json())

    def _counts(self, stage: BoundStage) -> bool:
        """Returns whether the driver wants to know how much changed: that decides whether the loop goes on."""
        return stage.kind == LOOP and self._task.round is not None

    def _available(self, name: str) -> bool:
        """Returns whether the changes of a stage can be had: it is recorded, or what it is computed from is."""
        stage = self._task.stages[name]
        if stage.recorded:
            return self._state.is_recorded(stage, self._state.layer_id(stage))
        edges = [self._task.edge_of(name, i) for i in stage.inputs]
        return all(
            self._available(i) if edge is None else not self._inputs.silent(edge)
            for i, edge in zip(stage.inputs, edges, strict=True)
        )

    def _changes_of(self, name: str) -> pa.Table:
        """Returns the changes of a stage of this segment at this epoch."""
        found = self._changes.get(name)
        if found is None:
            stage = self._task.stages[name]
            produced = self._produced.pop(name, None)
            if produced is None and stage.recorded:
                found = self._state.changes_of(stage)
            else:
                found = self._derived(stage, produced or self._compute(stage, self._state.layer_id(stage)))
            self._changes[name] = found
        return found

    def _whole_of(self, name: str) -> pa.Table:
        """Returns the rows of a stage that are there after this epoch, for those that begin anew with it."""
        stage = self._task.stages[name]
        if stage.recorded:
            return self._state.rows_after(stage)
        whole = replace(stage, bootstrap_at=self._task.t)
        return self._derived(whole, self._compute(whole, self._state.layer_id(whole)))

    def _derived(self, stage: BoundStage, produced: OperatorOutput) -> pa.Table:
        if stage.kind == LOOP:
            return changes_of_round(produced, stage, self._state.begin)
        return changes_of(produced, stage, self._task.t)

    def _compute(self, stage: BoundStage, id: LayerId) -> OperatorOutput:
        produced = self._operated(stage, id)
        is_begun = self._is_anew(stage) and stage.recorded and self._task.round is None
        if not is_begun or (stage.given_once and stage.kind != LATE):
            return produced
        old = self._state.rows_before(stage)
        expired = expired_before(stage, old, self._state.watermarks(stage)) if stage.kind == WINDOW else None
        return bootstrap_layer(stage, id, produced, old, expired)

    def _is_anew(self, stage: BoundStage) -> bool:
        """Returns whether this is the epoch with which a stage begins anew."""
        return stage.bootstrap_at == self._task.t

    def _operated(self, stage: BoundStage, id: LayerId) -> OperatorOutput:
        """Returns what a stage makes of its inputs."""
        if stage.loop is not None and self._task.round is None:
            return consolidate(self._state.rounds(stage, self._task.rounds), stage, id)
        inputs = self._rows_of_inputs(stage, id)
        idle = stage.kind in _IDLE_WITHOUT_ROWS and stage.ttl is None
        if stage.plan is not None and stage.plan.is_over_all_rows:
            idle = False
        if idle and not any(rows.num_rows for rows in inputs):
            return nothing_happened(stage, id)
        is_anew = self._is_anew(stage)
        # Rounds of a loop go on from those before, also where the loop has nothing of earlier epochs.
        state = self._state.nothing_before if is_anew and self._task.round is None else self._state.before
        shared = self._shared.setdefault(declared_of(stage.name), {})
        work = OperatorInput(
            stage, id, tuple(inputs), state, phase=self._task.phase, shared=shared, is_anew=is_anew,
            was_there=is_anew and self._state.was_there(stage),
        )  # fmt: skip
        if stage.window is not None:
            work = self._with_times(work)
        try:
            return OPERATORS[stage.kind](work)
        except (pa.ArrowException, ArithmeticError) as error:  # of values that Arrow cannot compute with
            raise stage_error(id, f"its {stage.kind} failed: {type(error).__name__}: {error}") from error

    def _with_times(self, work: OperatorInput) -> OperatorInput:
        """Returns the input of an operator that goes by event time: with what came of it, and the watermarks."""
        edges = self._inputs.edges
        newest_of = {name: newest for edge in edges for name, newest in edge.newest_of.items()}
        if isinstance(work.stage.options, WatermarkOptions):
            for edge, name in zip(edges, work.stage.options.of_edges, strict=False):
                if edge.newest_us is not None and not edge.newest_of:
                    newest_of[name] = edge.newest_us
        watermarks = self._state.watermarks(work.stage)
        return replace(work, newest_us=newest_of_all(edges), newest_of=newest_of, watermarks=watermarks)

    def _rows_of_inputs(self, stage: BoundStage, id: LayerId) -> list[pa.Table]:
        if stage.kind != SOURCE:
            return [self._rows_of_input(stage, name, id) for name in stage.inputs]
        if self._task.input_given:
            return [self._inputs.of_source(stage)]
        raise HoleError(
            f"{id}: the recorded input is lost, and it is not given again; recover(inputs=...) on the timeline that it "
            "was recorded on",
            stage=stage.name, shard=str(self._shard), lower=str(self._task.t), upper=str(self._task.t + 1),
        )  # fmt: skip

    def _rows_of_input(self, stage: BoundStage, name: str, id: LayerId) -> pa.Table:
        rows = self._carried_input(stage, name, id)
        if self._task.stages[name].expires and stage.kind in _KEEP_RESULTS:
            rows = without_expired(rows)
        return rows if stage.origins else without_input(rows)

    def _carried_input(self, stage: BoundStage, name: str, id: LayerId) -> pa.Table:
        edge = self._task.edge_of(stage.name, name)
        if edge is None:
            goes_round = stage.loop is not None and self._task.stages[name].loop == stage.loop
            rows = (self._whole_of if self._is_anew(stage) and not goes_round else self._changes_of)(name)
            if not stage.edge_key:
                return rows
            # What the JVM computes where rows change their shard.
            hashes = hash64(key_columns(rows, stage.edge_key, str(id))).view(np.int64)
            return rows.append_column(HASH64_COLUMN, pa.array(hashes))
        silent = self._inputs.silent(edge)
        if silent:
            raise stage_error(
                id, f"shards {sorted(silent)} of its input {name} sent nothing; nothing is computed from a part"
            )
        return self._inputs.edges[edge].rows

    # --- step 3 -----------------------------------------------------------------------------------------------------

    def _emit(self, output: SegmentOutput, reports: pa.Array) -> Iterator[pa.RecordBatch]:
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
                first_tag = first_tag + (rows.column(INPUT_COLUMN).to_numpy().astype(np.int64) << TAG_INPUT_BITS)
            rows = rows.select(schema.names[:-2])
            marks = pa.array([MARK + json.dumps(mark).encode()] * self._task.shards, pa.binary())
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
        """Returns what a mark says of event time to a window: the oldest, the newest, and that of each input where rows
        say theirs.
        """
        window, origins = output.window, self._task.stages[output.stage].origins
        assert window is not None, "it goes to a window"
        rows = without_expired(rows)
        span = event_span_us(rows, window)
        if span is None:
            return {}
        times: dict[str, Any] = {"oldest_us": span[0], "newest_us": span[1]}
        if origins:
            of_input = newest_us_by(rows.column(INPUT_COLUMN).to_numpy(), rows, window)
            times["newest_of"] = {origins[i]: us for i, us in of_input.items()}
        return times
