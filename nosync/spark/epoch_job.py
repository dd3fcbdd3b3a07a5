"""The Spark jobs of an epoch: one for each round of a loop, and one for all the rest.

Each builds the DataFrame that computes and records its stages, and runs it:

    source rows -> hash in the JVM -> repartitionById(shard) -> segment task -> hash -> repartitionById -> ... -> reports

Each segment is one `mapInArrow`; only reports reach the driver. Several epochs can share a job (see `epoch_batches`):
then each row says in `_epoch` of which it is, those of sources as well.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import pyarrow as pa
from pyspark import RDD, SparkContext, TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.flow.bound_flow import WATERMARK, BoundFlow, BoundStage, InputEdge, Loop, Segment, SegmentOutput, part_of
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.columnar.hashing import HASH_BITS
from nosync.lsm.errors import FlowError, NosyncError
from nosync.lsm.facts.fencing import Instance
from nosync.lsm.failures import encode_failure
from nosync.lsm.model.history import History, view_at
from nosync.lsm.model.layer import Description, Digest, Shard, TraceId, of_round
from nosync.lsm.model.timestamp import Time, pack, round_of
from nosync.operators.loops import Phase, next_phase, recorded_changes, rounds_done
from nosync.operators.operators import is_hashed_in_tasks
from nosync.replication.client.location import StoreLocation, open_directory
from nosync.runtime.epoch_batches import run_epochs_of_shard
from nosync.runtime.file_shuffle import Exchange, Placement
from nosync.runtime.scan import ParquetFile, Scan
from nosync.runtime.segment_task import (
    REPORT_SCHEMA,
    TAG_SHARD_BITS,
    Report,
    SegmentTask,
    edge_schema,
    emitted_schema,
    side_column,
)
from nosync.spark.arrow_transfer import ArrowFunction, Handover, handover, selected
from nosync.spark.errors import task_errors
from nosync.spark.expressions import for_tasks, hash_of, jvm_rows, place_of, quoted
from nosync.spark.file_shuffle import SHARD_COLUMN, Exchanges, Exchanging
from nosync.spark.fused_inputs import Given, given_rows
from nosync.spark.parquet_inputs import files_to_scan
from nosync.spark.session import (
    EXCHANGE_ENABLED,
    SCAN_ENABLED,
    conf_set,
    in_own_zone,
    in_workers_of_queries,
    is_enabled,
    session_settings,
    turn_of,
)
from nosync.spark.worker import task_in_worker

_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_RULES_TO_EXCLUDE = (
    # It would drop the tasks over an empty input, which have empty layers to record.
    "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
)


@dataclass(frozen=True)
class EpochPlan:
    """What one run of an epoch is to do."""

    location: StoreLocation
    t: int
    shards: int
    histories: Mapping[str, History] = field(default_factory=dict)
    compute: Mapping[str, frozenset[int]] | None = None
    """By stage, the shards to compute; None: whatever is not recorded."""
    skip: frozenset[str] = frozenset()
    """Stages that need not be looked at: all of their layers are recorded."""
    timeline: str = "main"
    instance: Instance | None = None
    sealed: Mapping[tuple[str, int], Digest] = field(default_factory=dict)
    """By (stage, shard), what the manifest of the epoch lists, where it is sealed."""


Reports = dict[tuple[str, int], Report]
"""Of an epoch, by (stage, shard)."""


def run_epochs(
    spark: SparkSession,
    flow: BoundFlow,
    plans: Sequence[EpochPlan],
    inputs: Mapping[str, DataFrame],
    *,
    has_wide_rows: bool = False,
    may_scan: bool = True,
    exchanges: Exchanges | None = None,
    settings: Mapping[str, str],
) -> dict[int, Reports]:
    """Runs epochs: one Spark job for each round of each loop, and one for all the rest.

    Several epochs have one number of shards and skip the same stages, and have no loops; rows that they are given have
    `_epoch`. `exchanges`: what epochs before tell of how rows should go to their shards. `settings`: of the session
    meanwhile.

    Returns for each epoch a report of every (stage, shard) that was computed or yielded. Raises whatever a task raised,
    as the NosyncError it was: WideRowError where they can be run again with `has_wide_rows`, and ScanError without
    `may_scan`.
    """
    flow = flow.at_epoch(plans[0].t)
    # Under foreachBatch the rows belong to a session of the query's own.
    spark = next((frame.sparkSession for frame in inputs.values()), spark)
    if plans[0].compute is None and all(source.name in inputs for source in flow.sources):
        flow = flow.fused
    with task_errors(), turn_of(spark):
        may_scan = is_enabled(spark, SCAN_ENABLED) and may_scan
        exchanges = exchanges if is_enabled(spark, EXCHANGE_ENABLED) else None
        planned = {name: in_own_zone(frame) for name, frame in inputs.items()}
        files = files_to_scan(flow, plans[0].shards, inputs) if may_scan and len(plans) == 1 else {}
        over = handover(spark, flow, {} if files else inputs, has_wide_rows=has_wide_rows)
        by_files = exchanges if exchanges is not None and not files and exchanges.is_next_by_files(spark) else None
        run = _EpochRun(_Work(spark, flow, plans, planned, over, files, by_files))
        with settings_for_epochs(spark, {**over.settings, **settings}):
            for loop in flow.loops.values():
                run.loop(loop)
            run.rest()
    for plan in plans:
        if plan.compute is not None:
            wanted = [(name, i) for name, shards in plan.compute.items() for i in shards]
        else:
            names = [stage.name for stage in flow.recorded if stage.name not in plan.skip]
            wanted = [(name, i) for name in names for i in range(plan.shards)]
        silent = [at for at in wanted if at not in run.reports[plan.t]]
        if silent:
            raise NosyncError(
                f"epoch {plan.t}: Spark ran no task for {silent[:3]} ({len(silent)} in all); run the epoch again"
            )
    return run.reports


class _Work(NamedTuple):
    """What all Spark jobs of a run have in common."""

    spark: SparkSession
    flow: BoundFlow
    plans: Sequence[EpochPlan]
    inputs: Mapping[str, DataFrame]
    handover: Handover
    files: Mapping[str, Sequence[ParquetFile]]
    """By source, those that tasks read themselves; empty: the JVM reads them."""
    exchanges: Exchanges | None
    """What to tell of rows that go to their shards by files; None: Spark shuffles them."""


class _EpochRun:
    """The Spark jobs of one epoch, one after the other; or the one of several epochs."""

    def __init__(self, work: _Work) -> None:
        assert len(work.plans) == 1 or not work.flow.loops, "such epochs run alone"
        self._work, self._flow, self._plan = work, work.flow, work.plans[0]
        self.reports: dict[int, Reports] = {plan.t: {} for plan in work.plans}
        self._rounds: dict[str, int] = {}
        self._directory = open_directory(replace(self._plan.location, store_id=""))

    def rest(self) -> None:
        """Everything but the rounds of loops."""
        self._collect(self._job(_Part(rounds=self._rounds)))

    def loop(self, loop: Loop) -> None:
        """The rounds of a loop; those that an attempt before left behind are not run again."""
        self._rounds[loop.name] = 0
        kept = [stage for stage in self._flow.in_loop(loop.name) if not stage.of_rounds]
        if self._plan.compute is not None and not any(stage.name in self._plan.compute for stage in kept):
            return
        if all(self._has(stage, Description.of_epoch(self._plan.t)) for stage in kept):
            return
        counts = self._recorded_rounds(loop)
        phase = rounds_done(counts, growing=loop.growing)
        while phase is not None:
            round = len(counts)
            if round >= loop.max_rounds:
                raise FlowError(
                    f"stage {loop.name} timestamp {self._plan.t}: the loop did not come to an end in {loop.max_rounds} rounds; "
                    "if it needs more, raise max_rounds"
                )
            part = _Part(loop.name, round, phase, self._rounds)
            found = self._collect(self._job(part))
            counts.append(sum(report.changes for report in found if report.stage == loop.name))
            phase = next_phase(phase, round, counts[-1])
        self._rounds[loop.name] = len(counts)

    def _recorded_rounds(self, loop: Loop) -> list[int]:
        """How many rows changed in each of the first rounds that are recorded completely."""
        counts: list[int] = []
        stages = self._flow.in_loop(loop.name)
        variable = self._flow.stages[loop.name]
        t, history = self._plan.t, self._plan.histories.get(loop.name, ())
        while all(self._has(stage, of_round(t, len(counts))) for stage in stages):
            round, changed = len(counts), 0
            for i in range(self._plan.shards):
                id = TraceId(variable.name, variable.fingerprint, Shard(i, self._plan.shards))
                view = view_at(history, id, pack(t), self._flow.key_groups)
                trace = self._directory.open_rounds(view, t, round + 1)
                d = of_round(t, round)
                changed += len(recorded_changes(trace, variable, Time(d.lower - 1), Time(d.upper - 1)))
            counts.append(changed)
        return counts

    def _has(self, stage: BoundStage, d: Description) -> bool:
        """Whether every shard has a layer for a round (that very one), or for the epoch."""
        ids = [TraceId(stage.name, stage.fingerprint, Shard(i, self._plan.shards)) for i in range(self._plan.shards)]
        found = [self._directory.descriptions(id) for id in ids]
        if round_of(d.upper):
            return all(d in of_shard for of_shard in found)
        return all(any(o.covers(d) for o in of_shard) for of_shard in found)

    def _job(self, part: _Part) -> _EpochJob:
        return _EpochJob(self._work, part)

    def _collect(self, job: _EpochJob) -> list[Report]:
        try:
            texts = job.run(self._plan.skip.union(name for of in self.reports.values() for name, _ in of))
        finally:
            job.release()
        found = [Report.from_json(text) for text in texts]
        for report in found:
            at = (report.stage, report.shard)
            if job.part.round is not None and self._flow.stages[report.stage].loop == job.part.loop:
                continue  # of a round, not of the epoch
            # A segment with several exits runs once for each; the first to come computes, the others find its layers.
            reports = self.reports[report.t]
            reports[at] = max(report, reports.get(at, report), key=lambda r: r.computed)
        return found


@dataclass(frozen=True)
class _Part:
    """Which part of an epoch a Spark job is: a round of a loop, or (without a loop) all the rest."""

    loop: str | None = None
    round: int | None = None
    phase: Phase | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Of the loops that are done, how many rounds they took."""


class _EpochJob:
    def __init__(self, work: _Work, part: _Part) -> None:
        self._spark, self._flow, self._plans, self._inputs, self._handover, self._files, self._exchanges = work
        self._shards = work.plans[0].shards
        self.part = part
        self._of_epoch: tuple[str, ...] = (EPOCH_COLUMN,) if self._has_several else ()
        self._beside = (*self._of_epoch, TAG_COLUMN, REPORT_COLUMN)
        self._wanted_at = self._wanted_emissions()
        self._wanted = None if self._wanted_at is None else set[SegmentOutput]().union(*self._wanted_at)
        self._shared: dict[SegmentOutput, DataFrame] = {}
        self._exchanging: Exchanging | None = None
        self._exchanged: dict[str, Exchange] = {}

    @property
    def _has_several(self) -> bool:
        return len(self._plans) > 1

    def run(self, done: frozenset[str]) -> list[bytes]:
        """The reports of everything. `done`: stages that reported before."""
        ends = self._ends(done)
        if not ends:
            return []
        self._exchange()
        if all(self._is_scanned(segment) or segment.name in self._exchanged for segment in ends):
            return self._without_query(ends)
        rows = reduce(DataFrame.unionAll, [self._segment(segment, None) for segment in ends]).collect()
        return [bytes(row[0]) for row in rows]

    def _ends(self, done: frozenset[str]) -> list[Segment]:
        """Those from which nothing is emitted. The reports of the others travel with the rows that they emit."""
        segments = [
            s
            for s in self._flow.segments.values()
            if self._takes_part(s)
            and not self._emissions(s)
            and (self._wanted is None or self._has_work(s, self._plans))
        ]
        if self.part.round is None:
            segments = [s for s in segments if not done.issuperset(self._run_of(s))]
        return [s for s in segments if self._run_of(s)]

    def _is_scanned(self, segment: Segment) -> bool:
        """Whether its tasks read its sources themselves."""
        return any(name in self._files for name in segment.stages)

    def _exchange(self) -> None:
        """Has the rows that the epoch is given written to files by shard, if that is how they are to go."""
        if self._exchanges is None or self._has_several or self._flow.loops or self._plans[0].compute is not None:
            return
        given = [s for s in self._flow.segments.values() if self._is_given(s)]
        if len(given) != 1 or len(self._emissions(given[0])) > 1:
            return  # one more job for each of them
        (segment,) = given
        output = next(iter(self._emissions(segment)), None)
        rows = self._given(segment, self._tasks_of(segment, output)[0][0])
        placed = rows.rows
        if not rows.placed_by:
            shard = f"CAST({self._shard_of(rows.place)} AS INT) AS {SHARD_COLUMN}"
            placed = placed.selectExpr("*", shard).drop(*rows.only_for_place)
        self._exchanging = Exchanging(self._spark, self._exchanges)
        placement = Placement(self._shards, self._flow.key_groups, rows.placed_by)
        self._exchanged[segment.name] = self._exchanging.run(placed, placement, self._handover)

    def _without_query(self, segments: Sequence[Segment]) -> list[bytes]:
        """What tasks report that are given nothing. To plan a query takes longer than such tasks often do, so there is
        none.
        """
        context = self._spark.sparkContext
        works = [self._work_of(segment, self._tasks_of(segment, None)[0]) for segment in segments]

        def run(index: int, nothing: Iterable[object]) -> Iterator[bytes]:
            deque(nothing, maxlen=0)  # else Spark takes the worker for a failed one, and starts another
            for batch in works[index // shards](iter(())):
                yield from batch.column(0).to_pylist()

        shards = self._shards
        reports = _partitions(context, shards * len(works)).mapPartitionsWithIndex(run)
        return in_workers_of_queries(self._spark, reports).collect()

    def _emissions(self, segment: Segment) -> list[SegmentOutput]:
        """What leaves the segment."""
        found = self._flow.outputs(segment, self.part.loop)
        return found if self._wanted is None else [output for output in found if output in self._wanted]

    def _wanted_emissions(self) -> list[set[SegmentOutput]] | None:
        """By epoch those that something is computed from, in a recovery or a replay; None: all (a loop's go round)."""
        if self._flow.loops or not (self._plans[0].skip or any(plan.compute is not None for plan in self._plans)):
            return None
        found = []
        for plan in self._plans:
            wanted = set[SegmentOutput]()
            for segment in reversed(self._flow.segments.values()):
                if self._has_work(segment, [plan]) or wanted.intersection(self._flow.outputs(segment)):
                    wanted.update(edge.output for edge in self._edges_for(segment, segment.stages, [plan]))
            found.append(wanted)
        return found

    def _has_work(self, segment: Segment, plans: Sequence[EpochPlan]) -> bool:
        return any(self._flow.stages[name].recorded and self._is_computed(name, plans) for name in segment.stages)

    def _is_computed(self, name: str, plans: Sequence[EpochPlan]) -> bool:
        """Whether a stage may be computed here, rather than read back; one that is not recorded always is."""
        if not self._flow.stages[name].recorded:
            return True
        may = any(plan.compute is None or name in plan.compute for plan in plans)
        return may and name not in plans[0].skip

    def _edges_for(self, segment: Segment, run: Sequence[str], plans: Sequence[EpochPlan]) -> list[InputEdge]:
        """The edges whose rows something is computed from."""
        inputs = {i for name in run if self._is_computed(name, plans) for i in self._flow.stages[name].inputs}
        return [edge for edge in segment.edges if edge.input in inputs]

    def _edges(self, segment: Segment, run: Sequence[str]) -> list[InputEdge]:
        if self._wanted is not None:
            return self._edges_for(segment, run, self._plans)
        return [f for f in segment.edges if any(f.input in self._flow.stages[name].inputs for name in run)]

    def _takes_part(self, segment: Segment) -> bool:
        return self.part.round is None or self._flow.loop_of(segment) == self.part.loop

    def _run_of(self, segment: Segment) -> tuple[str, ...]:
        """The stages that a task of the segment runs: of a loop that is done those that are kept."""
        loop = self._flow.loop_of(segment)
        if loop is None or self.part.loop == loop:
            return segment.stages
        return tuple(name for name in segment.stages if not self._flow.stages[name].of_rounds)

    def _tasks_of(self, segment: Segment, output: SegmentOutput | None) -> tuple[list[SegmentTask], frozenset[int]]:
        """A segment's tasks, and which of their edges bring nothing."""
        flow = self._flow
        loop = flow.loop_of(segment)
        inside = loop is not None and loop == self.part.loop
        run = self._run_of(segment)
        # The first to leave the segment computes all of it; the others what they need, which they find recorded.
        outputs = self._emissions(segment)
        if output is not None and outputs and output != outputs[0]:
            needed = flow.needed_for(segment, output.stage)
            run = tuple(name for name in run if name in needed)
        edges = self._edges(segment, run)
        if loop is not None and not inside:
            edges = []  # its rounds become the layers of the epoch
        absent = frozenset(i for i, f in enumerate(edges) if inside and not self._comes_in_round(segment, f))
        round = self.part.round if inside else None
        tasks = self._tasks(run, edges, output, round=round, absent=absent, head=segment.name)
        scan = None
        if self._is_scanned(segment):
            scan = Scan({source.name: self._files[source.name] for source in tasks[0].sources}, flow.key_groups)
        return [replace(task, fused=segment.fused, scan=scan) for task in tasks], absent

    def _segment(self, segment: Segment, output: SegmentOutput | None) -> DataFrame:
        """What leaves a segment, or only its reports."""
        flow = self._flow
        tasks, absent = self._tasks_of(segment, output)
        edges = list(tasks[0].edges)
        if tasks[0].scan is not None or segment.name in self._exchanged:
            return self._mapped(segment, self._blank(), tasks)
        if self._is_given(segment):
            rows = self._shuffled(self._given(segment, tasks[0]))
        elif len(absent) < len(edges):
            rows = self._edge_rows(segment, edges, absent)
        elif flow.loop_of(segment) is not None or segment.edges:
            rows = self._blank()  # nothing of what they bring is needed
        else:
            rows = self._no_rows(flow.stages[segment.name])
        return self._mapped(segment, rows, tasks)

    def _is_given(self, segment: Segment) -> bool:
        """Whether its rows are those that the epoch is given."""
        return segment.fused or (not segment.edges and segment.name in self._inputs)

    def _given(self, segment: Segment, task: SegmentTask) -> Given:
        """The rows of a segment's sources."""
        if segment.fused:
            return given_rows(task.sources, task.edges, self._flow.stages, self._inputs, self._of_epoch)
        return self._source_rows(self._flow.stages[segment.name])

    def _comes_in_round(self, segment: Segment, edge: InputEdge) -> bool:
        assert self.part.round is not None, "only in a round"
        if self._flow.loops_back(segment, edge):
            return self.part.round > 0
        return self.part.round == 0 or self._flow.stages[edge.output.stage].loop == self.part.loop

    def _tasks(
        self,
        run: tuple[str, ...],
        edges: list[InputEdge],
        output: SegmentOutput | None,
        *,
        round: int | None,
        absent: frozenset[int] = frozenset(),
        head: str,
    ) -> list[SegmentTask]:
        """One for each epoch."""
        flow = self._flow
        named = {*run, *(name for f in edges for name in (f.output.stage, *f.jvm))}
        named |= {part_of(name, WATERMARK) for name in run} & flow.stages.keys()
        plan = self._plans[0]
        first = SegmentTask(
            location=plan.location,
            t=plan.t,
            shards=plan.shards,
            stages={name: for_tasks(flow.stages[name]) for name in flow.stages if name in named},
            run=run,
            edges=tuple(edges),
            output=output,
            histories={name: plan.histories[name] for name in named if name in plan.histories},
            compute=_may_compute(plan, round),
            input_given=head in self._inputs,
            round=round,
            rounds=self.part.rounds.get(flow.stages[head].loop or "", 0),
            phase=self.part.phase.value if self.part.phase else "",
            absent=absent,
            recorded=plan.skip,
            timeline=plan.timeline,
            instance=plan.instance,
            sealed=plan.sealed,
        )
        emits = [self._wanted_at is None or output in self._wanted_at[i] for i in range(len(self._plans))]
        return [
            replace(
                first,
                t=plan.t,
                compute=_may_compute(plan, round),
                emits=output is None or emits[i],
                sealed=plan.sealed,
            )
            for i, plan in enumerate(self._plans)
        ]

    def _mapped(self, segment: Segment, rows: DataFrame, tasks: Sequence[SegmentTask]) -> DataFrame:
        output, schema = tasks[0].output, REPORT_SCHEMA
        if output is not None:
            schema = emitted_schema(self._flow.stages[output.stage], output)
            if len(tasks) > 1:
                schema = pa.schema([pa.field(EPOCH_COLUMN, pa.int64()), *schema])
        return self._handover.mapped(rows, self._work_of(segment, tasks), schema)

    def _work_of(self, segment: Segment, tasks: Sequence[SegmentTask]) -> ArrowFunction:
        return _work_of(tasks, self._exchanged.get(segment.name))

    def _blank(self) -> DataFrame:
        """A partition for each shard, for tasks that only look at what is recorded."""
        return self._spark.range(0, self._shards, 1, self._shards).toDF("shard")

    def _edge_rows(self, segment: Segment, edges: list[InputEdge], absent: frozenset[int]) -> DataFrame:
        """The rows of a segment's edges, each in the shard that it belongs to."""
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
        homes = [
            self._shard_of(self._hash_column(edges[i], i, several=several)) if i in keyed else home for i in frames
        ]
        cases = " ".join(f"WHEN {i} THEN {of_side}" for i, of_side in zip(frames, homes, strict=True))
        by_key = f"CASE {SIDE_COLUMN} {cases} END" if several else homes[0]
        shard = f"CASE WHEN {REPORT_COLUMN} IS NULL THEN {by_key} ELSE {TAG_COLUMN} END"
        return self._in_shards(rows, shard)

    def _rows_of_edge(self, segment: Segment, edge: InputEdge) -> DataFrame:
        """An edge's rows, with the hash of their key where tasks do not compute it."""
        rows = self._replayed(edge) if self._flow.loops_back(segment, edge) else self._emitted(edge.output)
        for name in edge.jvm:
            rows = jvm_rows(self._flow.stages[name], rows, keep=self._beside)
        if edge.key and not self._is_hashed_in_tasks(edge):
            rows = rows.withColumn(HASH64_COLUMN, F.expr(hash_of(edge.key)))
        return rows

    def _is_hashed_in_tasks(self, edge: InputEdge) -> bool:
        return is_hashed_in_tasks(edge_schema(self._flow.stages, edge), edge.key)

    def _hash_column(self, edge: InputEdge, index: int, *, several: bool) -> str:
        """The column, or the expression, that holds the hash of the key of an edge's rows."""
        if not self._is_hashed_in_tasks(edge):
            return HASH64_COLUMN
        return hash_of([side_column(index, name) if several else name for name in edge.key])

    def _replayed(self, edge: InputEdge) -> DataFrame:
        """The rows that a loop's body returned in the round before, read back."""
        assert self.part.round, "the first round has none before it"
        stage = edge.output.stage
        tasks = self._tasks((stage,), [], edge.output, round=self.part.round - 1, head=stage)
        return self._mapped(self._flow.segment_of(stage), self._blank(), tasks)

    def release(self) -> None:
        if self._exchanging is not None:
            self._exchanging.release()
        for rows in self._shared.values():
            rows.unpersist()

    def _emitted(self, output: SegmentOutput) -> DataFrame:
        """The rows that leave a segment; kept for the epoch where several take them, so that it runs once."""
        found = self._shared.get(output)
        if found is None:
            found = self._segment(self._flow.segment_of(output.stage), output)
            takers = [s for s in self._flow.segments.values() if any(f.output == output for f in s.edges)]
            edges = sum(f.output == output for s in takers for f in s.edges)
            if edges > 1 or sum(len(self._emissions(s)) > 1 for s in takers):
                found = found.persist()
            self._shared[output] = found
        return found

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
        return self._spark.createDataFrame([], schema).repartitionById(self._shards, F.lit(0))

    def _shuffled(self, given: Given) -> DataFrame:
        return self._in_shards(given.rows, self._shard_of(given.place)).drop(*given.only_for_place)

    def _in_shards(self, rows: DataFrame, shard: str) -> DataFrame:
        placed = rows.repartitionById(self._shards, F.expr(f"CAST({shard} AS INT)"))
        return placed.sortWithinPartitions(EPOCH_COLUMN) if self._has_several else placed

    # Expressions are texts: those built of Column objects ask the JVM once for each part, which adds up in every epoch.

    def _shard_of(self, hash64: str) -> str:
        """The shard of a key hash: hash32 -> key group -> shard, as `lsm.hashing` and `Shard.groups` have it."""
        groups, shards = self._flow.key_groups, self._shards
        group = f"shiftright(shiftrightunsigned({hash64}, {HASH_BITS}) * {groups}, {HASH_BITS})"
        return f"floor({group} * {shards} / {groups})"


def _work_of(tasks: Sequence[SegmentTask], exchange: Exchange | None) -> ArrowFunction:
    """What Spark runs for every shard of a segment. `exchange`: where its rows are; None: they come."""
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
                    yield from task.run_shard(shard, batches)
                else:
                    yield from run_epochs_of_shard(tasks, shard, batches)
        except NosyncError as error:
            raise RuntimeError(encode_failure(error)) from None

    return work


@functools.lru_cache(maxsize=4)
def _partitions(context: SparkContext, count: int) -> RDD[object]:
    """So many, with nothing in them."""
    return context.parallelize([], count)


def _may_compute(plan: EpochPlan, round: int | None) -> dict[str, frozenset[int]] | None:
    return None if plan.compute is None or round is not None else dict(plan.compute)


def _beside(index: int, frames: Mapping[int, DataFrame], ours: Sequence[str]) -> DataFrame:
    """An edge's rows in a form that has columns for the rows of all edges. `ours`: columns that all have."""
    common: list[str | Column] = [*ours]
    columns: list[Column] = [F.lit(index).alias(SIDE_COLUMN)]
    for i, frame in frames.items():
        for f in frame.schema:
            if f.name not in (*ours, HASH64_COLUMN):
                value = F.col(quoted(f.name)) if i == index else F.lit(None).cast(f.dataType)
                columns.append(value.alias(side_column(i, f.name)))
    if any(HASH64_COLUMN in frame.columns for frame in frames.values()):
        hashed = F.col(HASH64_COLUMN) if HASH64_COLUMN in frames[index].columns else F.lit(None).cast("long")
        common.append(hashed.alias(HASH64_COLUMN))
    return frames[index].select(*columns, *common)


def settings_for_epochs(spark: SparkSession, more: Mapping[str, str]) -> AbstractContextManager[None]:
    """The session's settings while an epoch is planned and run; the user's come back afterwards."""
    excluded = spark.conf.get(_EXCLUDED_RULES, None)
    rules = ",".join(filter(None, [excluded, *_RULES_TO_EXCLUDE]))
    return conf_set(spark, {**session_settings(), **more, _EXCLUDED_RULES: rules})
