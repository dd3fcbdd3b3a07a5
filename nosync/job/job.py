"""A job: one dataflow, one store and one Spark session, advanced an epoch at a time.

job = nosync.Job(flow, store, spark=spark, shards=4)
job.advance(t, {"flights": df})
job.read("delays", as_of=t)
job.recover()
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nosync.flow.bound_flow import BoundFlow, BoundStage, Step
from nosync.flow.dataflow import PART_SEPARATOR, Dataflow
from nosync.flow.persistence import DISK
from nosync.job.backfill import MAX_GAP, BackfillReport, check_counted, epochs_to_run
from nosync.job.delivery import Delivery, check_sinks
from nosync.job.epoch_layout import EpochLayout
from nosync.job.explain import Explanation, explain
from nosync.job.flow_versions import PLACED, FlowVersions
from nosync.job.kept_inputs import KeptInputs
from nosync.job.recovery_planner import Cell, RecordedCells, RecoveryPlan, lost_manifest, plan
from nosync.job.replay import (
    Progress,
    ReplayPlan,
    ReplayReport,
    changed_stages,
    check_rows_are_kept,
    check_same_sources,
    check_states_fit,
    stages_to_bootstrap,
)
from nosync.job.reports import EpochReport, Recovered, RecoveryReport, Stopwatch, epoch_report
from nosync.job.sinks import Sink
from nosync.job.stream_checks import STREAMS_FROM, check_batch, check_stream, streamed_from
from nosync.job.watermarks import WATERMARK_POLICIES, policies_to_record, window_status
from nosync.lsm.columnar.columns import describe
from nosync.lsm.errors import (
    CompactedError,
    DeterminismError,
    FencedError,
    FlowError,
    InvalidInputError,
    NodeLostError,
    NosyncError,
    NotAvailableError,
    OutOfOrderError,
    UnknownStageError,
)
from nosync.lsm.facts.fencing import check_fence, take_over
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.manifests.lost_ends import check_there, lost_begin
from nosync.lsm.manifests.manifest import AT_SAFE_POINT, KEEP, SUMS, Content, Manifest
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import Digest, LayerId, TraceId
from nosync.lsm.model.timestamp import Epoch, epoch_of, pack
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.status import StoreStatus
from nosync.lsm.store.store import BEFORE_FIRST_EPOCH, Store, check_range
from nosync.replication.client.fetching_directory import MISSING_LAYER_ERRORS
from nosync.replication.client.location import StoreLocation
from nosync.runtime.epoch_batches import MOST_GIVEN_ROWS, ScheduledEpoch, batch_epochs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from nosync.runtime.segment_task import Report
    from nosync.spark.derived import DerivedReader
    from nosync.spark.epoch_inputs import EpochOf, GivenEpochs
    from nosync.spark.stage_reader import StageReader

    Reports = dict[tuple[str, int], Report]

InputsAt = Callable[[int], "Mapping[str, DataFrame]"]

log = logging.getLogger("nosync")

_ATTEMPTS = 4
"""Of an epoch, where hosts are lost while it runs."""
_LOOKS = 4
"""How often `recover` looks for what is missing: what it brought back may be lost again while it runs."""


def _contents(ids: Sequence[LayerId], reports: Reports) -> dict[LayerId, Content]:
    """What tasks said is in the layers that they wrote or found."""
    reported = {id: reports.get((id.trace.stage, id.trace.shard.index)) for id in ids}
    return {id: Content(Digest(r.digest), r.rows) for id, r in reported.items() if r is not None and r.digest}


def _why_not_recorded(stage: str, below: BoundStage) -> str:
    """Why a stage cannot be read. `below`: what it would be computed from by expressions alone, which may be itself."""
    if below.loop is not None:
        return (
            f"stage {stage} is computed in the rounds of the loop {below.loop}, which are not kept: read {below.loop}"
        )
    of = "" if below.name == stage else f" is computed from {below.name}, which"
    return (
        f"stage {stage}{of} is not recorded (persist='none'), and a {below.kind} is not an expression over what is: read what "
        "it is computed from, or persist it"
    )


class Job:
    """Runs a dataflow over a store. One job at a time per store. `sinks`: by stage, where its changes go.

    `shards` may differ from what the store was written with: from the next epoch on there are so many, over the same
    files. Making a job fences the one before: it can neither publish nor seal any more (FencedError).

    Raises FlowError where flow, store and settings do not fit together: another number of key groups than
    the store was made with, or stages whose code changed since; or where Spark's executors run a Python without nosync.
    """

    def __init__(
        self,
        flow: Dataflow,
        store: Store,
        *,
        spark: SparkSession,
        shards: int = 4,
        sinks: Mapping[str, Sink] | None = None,
        branch: str = MAIN,
    ) -> None:
        from nosync.spark import schemas  # noqa: PLC0415 - the store works without pyspark; a job is where it is needed
        from nosync.spark.session import check_session, expression_settings  # noqa: PLC0415

        check_session(spark)
        if not isinstance(flow, Dataflow) or not isinstance(store, Store):
            raise InvalidInputError(
                f"Job({type(flow).__name__}, {type(store).__name__}): expected a nosync.Dataflow and a store, as "
                "nosync.open(path) returns it"
            )
        from nosync.spark.executors import check_workers  # noqa: PLC0415
        from nosync.spark.expressions import Analyzer  # noqa: PLC0415
        from nosync.spark.pickling import frozen  # noqa: PLC0415
        from nosync.spark.runner import Runner  # noqa: PLC0415

        self._schemas = schemas
        self._spark, self._store, self._shards = spark, store, shards
        self._node = store.node
        self._directory = store.directory
        self.branch_name = branch
        """The branch that this job runs on."""
        self._check_shape(flow)
        schemas.check_names(flow, spark)
        check_workers(spark)
        self._expression_settings = expression_settings(spark)
        self._declared, self._analyze = frozen(flow, spark), Analyzer(spark, self._expression_settings)
        self._sinks = dict(sinks or {})
        if self._sinks and branch != MAIN:
            raise FlowError(
                f"sinks are given the epochs of {MAIN!r}, and this job is on branch {branch!r}, whose epochs would get into "
                "their output: leave sinks= out, and promote() the branch when its output is wanted"
            )
        self._kept = KeptInputs(self._node, lambda: self.branch_name)
        self._runner = Runner(spark, self._node, self._location, self._expression_settings)
        self.recoveries: list[RecoveryReport] = []
        """What `advance` had to compute again because a node was lost."""
        check_sinks(self._sinks, flow)
        self._open_timeline()

    def _open_timeline(self) -> None:
        """Binds the flow for the branch's timeline, and takes it over from whoever ran it before."""
        timeline = self._node.timelines.timeline(self.branch_name)
        self._timeline = timeline.id
        self._on_timeline = FlowVersions(
            self._declared, self._node, lambda: self.branch_name, self._schemas.parse_ddl, self._analyze
        )
        self._epochs = EpochLayout(
            self._node, self._directory, self._on_timeline, lambda: self.branch_name, self._shards
        )
        self.flow: BoundFlow = self._on_timeline.flow
        """With the fingerprints of epochs that bring inputs of their own; `flow_at` has those of others."""
        self._schemas.warn_of_unreadable(self.flow)
        self.instance = take_over(self._directory.root, timeline.id, self._directory.env)
        """Which instance of the job on this timeline this is; making a newer one stops this one from writing."""
        self._delivery = Delivery(self._sinks, self._store, timeline.id, lambda: self.branch_name, self.changes)
        last = self._node.last_sealed(self.branch_name)
        self._delivery.note_new(last)
        if last is not None:
            self._drop_rounds(last)  # where the instance before died between sealing and this
            if self.branch_name == MAIN:
                self._delivery.catch_up(last)

    def _check_open(self) -> None:
        """Raises StorageError where the store was closed, for nothing would make durable what is published; FencedError
        where the branch is on another timeline since, whose code and instances are not this job's.
        """
        _ = self._store.node
        self._node.notice_changes(self._timeline)
        timelines = self._node.timelines
        if self.branch_name not in timelines.refs.names or timelines.timeline(self.branch_name).id != self._timeline:
            raise FencedError(
                f"branch {self.branch_name} was rewound, promoted or deleted since this job was made: it publishes nothing more. "
                "Make a new Job on the store"
            )

    def _check_shape(self, flow: Dataflow) -> None:
        groups = self._directory.key_groups
        if flow.key_groups != groups:
            raise FlowError(
                f"dataflow {flow.name} has key_groups={flow.key_groups}, the store {groups}: declare "
                f"Dataflow({flow.name!r}, key_groups={groups})"
            )
        if isinstance(self._shards, bool) or not isinstance(self._shards, int) or not 1 <= self._shards <= groups:
            raise FlowError(f"shards is {self._shards!r}, expected 1 to {groups} (the store's key groups)")

    def flow_at(self, t: int) -> BoundFlow:
        """The flow as it ran, or will run, at an epoch: a branch shares the recorded inputs of the timeline that it
        came from.
        """
        return self._on_timeline.at(t)

    # --- running --------------------------------------------------------------------------------------------------

    def advance(self, t: int, inputs: Mapping[str, DataFrame]) -> EpochReport:
        """Runs epoch `t` on the given rows (one DataFrame a source) and seals it.

        After an attempt that failed in the middle, call it again with the same rows: what was recorded is used. A
        sealed `t` again with the same rows changes nothing; rewind() to the last sealed epoch first to give other rows
        than those of an attempt that failed. Raises OutOfOrderError unless `t` is the next epoch (the first may be
        any), DeterminismError for other rows than recorded, SchemaError, StageError, StorageError.
        """
        return self._advance(t, inputs)

    def _advance(self, t: int, inputs: Mapping[str, DataFrame], streams_from: int | None = None) -> EpochReport:
        started = time.perf_counter()
        self._check_open()
        self._check_epoch(t)
        checked = self._check_inputs(inputs)
        flow = self.flow if self._node.timelines.manifest(t, self.branch_name) is None else self.flow_at(t)
        self._kept.keep(t, lambda: checked)
        reports = self._run_surely(flow, t, checked)
        self._finish(flow, t, reports, streams_from)
        return epoch_report(t, reports, self.flow, time.perf_counter() - started)

    def _finish(self, flow: BoundFlow, t: int, reports: Reports, streams_from: int | None = None) -> None:
        """Seals an epoch that ran, and gives its changes to the sinks."""
        self._seal(flow, t, reports, streams_from)
        self._delivery.deliver(t)
        self._kept.release()

    def backfill(
        self,
        inputs: Mapping[str, DataFrame],
        *,
        epoch: EpochOf,
        max_gap: int = MAX_GAP,
        progress: Progress | None = None,
    ) -> BackfillReport:
        """Runs all epochs that the given rows are of, many in each Spark job: what `advance` would do one by one.

        `inputs`: one DataFrame a source. `epoch`: the number of a row's epoch as an expression over its columns, those
        included that the source does not have, such as `"datediff(day, '2013-01-01') div 7"`; or one for each source.
        Epochs between that have no rows run without any, up to `max_gap` in a row. Each is sealed on its own, so that a
        backfill which was interrupted goes on where it was when it is called again; epochs that are sealed are not run,
        but must have as many rows. The DataFrames are read once to count and again for each Spark job: persist() what
        is costly. After a failure rewind() to the last sealed epoch before giving other rows: some are recorded
        already.

        Raises what `advance` raises, after sealing the epochs before; InvalidInputError for an expression that does not
        do.
        """
        from nosync.spark.epoch_inputs import GivenEpochs  # noqa: PLC0415 - the store works without pyspark

        started = time.perf_counter()
        self._check_open()
        columns = {stage.name: stage.schema.names for stage in self.flow.sources}
        given = GivenEpochs(self._spark, self._check_inputs(inputs), columns, epoch)
        counts = given.counts()
        last = self._node.last_sealed(self.branch_name)
        todo = epochs_to_run(
            counts, list(columns), lambda t: self._node.timelines.manifest(t, self.branch_name), last, max_gap
        )
        if last in counts:
            self._delivery.deliver(last)  # to sinks that an attempt before left without it
        rows = {t: sum(counts.get(t, {}).values()) for t in todo}
        epochs = (ScheduledEpoch(Step(t, {}, frozenset()), self.flow, self._shards, rows[t]) for t in todo)
        reports: list[EpochReport] = []
        for batch in batch_epochs(epochs, MOST_GIVEN_ROWS):
            for t, found in self._run_given(batch, given):
                report = epoch_report(t, found, self.flow, seconds=0.0)
                check_counted(t, rows[t], report.rows_in)
                self._finish(self.flow, t, found)
                reports.append(report)
                if progress:
                    progress(len(reports), len(todo))
        return BackfillReport(
            first=todo.start,
            last=todo.stop - 1,
            sealed_before=sum(t not in rows for t in counts),
            rows_in=sum(report.rows_in for report in reports),
            layers_computed=sum(report.layers_computed for report in reports),
            layers_reused=sum(report.layers_reused for report in reports),
            bytes_recorded=sum(report.bytes_recorded for report in reports),
            seconds=time.perf_counter() - started,
        )

    def _run_given(self, batch: Sequence[ScheduledEpoch], given: GivenEpochs) -> Iterator[tuple[int, Reports]]:
        """Runs epochs together; where that fails one by one, so that those before the failure come."""
        epochs = [one.step.t for one in batch]
        for t in epochs:
            self._kept.keep(t, partial(given.at, t))
        rows = given.between(epochs[0], epochs[-1])
        together = self._runner.run_together(batch, rows, self.branch_name, self.instance, everything=True)
        for t in epochs:
            yield t, together[t] if together else self._run_surely(self.flow, t, given.at(t))

    def _run_surely(self, flow: BoundFlow, t: int, inputs: Mapping[str, DataFrame]) -> Reports:
        """Runs an epoch; without the hosts that are lost meanwhile, and after computing again what only they had."""
        hole: NosyncError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                if hole is not None:
                    report = self.recover(self._kept)
                    self.recoveries.append(report)
                    if report.unrecoverable:
                        raise hole
                one = ScheduledEpoch(Step(t, {}, frozenset()), flow, self._epochs.shards_at(flow, t), 0)
                return self._runner.run([one], inputs, self.branch_name, self.instance, everything=True)[t]
            except DeterminismError as error:
                raise self._other_rows(t, error) from None
            except NodeLostError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                log.warning("epoch %d runs again: %s", t, error)
            except MISSING_LAYER_ERRORS as error:
                if attempt + 1 == _ATTEMPTS or not self._node.store_id or error is hole:
                    raise
                log.warning("epoch %d needs what a lost node had, which is computed again: %s", t, error)
                hole = error
        raise AssertionError("the last attempt returns or raises")

    def _other_rows(self, t: int, error: DeterminismError) -> DeterminismError:
        """The error of an epoch whose rows are others than an attempt before recorded, with what to do about it first."""
        last = self._node.last_sealed(self.branch_name)
        is_of_rows = error.stage in {stage.name for stage in self.flow.sources}
        if not is_of_rows or self.branch_name != MAIN or (last is not None and t <= last):
            return error
        before = BEFORE_FIRST_EPOCH if last is None else last
        return DeterminismError(
            f"job.rewind({before}) first, then epoch {t} can be given these rows: an attempt that failed has recorded other ones "
            f"for it. {error}",
            stage=error.stage,
            shard=error.shard,
            t=error.t,
            recorded_digest=error.recorded_digest,
            rejected_digest=error.rejected_digest,
        )

    def _seal(self, flow: BoundFlow, t: int, reports: Reports, streams_from: int | None = None) -> None:
        self._check_open()
        check_fence(self._directory.root, self._timeline, self.instance, self._directory.env)
        meta: dict[str, Any] = {
            "flow": flow.name,
            "shards": self._epochs.shards_at(flow, t),
            PLACED: {name: list(columns) for name, columns in flow.placements.items()},
            SUMS: {name: list(columns) for name, columns in flow.sums.items()},
        }
        if policies := policies_to_record(flow):
            meta[WATERMARK_POLICIES] = policies
        if streams_from is not None:
            meta[STREAMS_FROM] = streams_from
        release = {stage.name: stage.at_safe_point for stage in self._declared.sources if stage.at_safe_point != KEEP}
        if release:
            meta[AT_SAFE_POINT] = release
        ids = self._epochs.ids(flow, t)
        self._node.seal(t, ids, self.branch_name, meta=meta, copies=self._copies(), contents=_contents(ids, reports))
        self._drop_rounds(t)

    def stream(
        self,
        inputs: Mapping[str, DataFrame],
        *,
        checkpoint: str | Path,
        trigger: Mapping[str, Any] | None = None,
        name: str | None = None,
        first: int = 0,
    ) -> StreamingQuery:
        """Runs the flow under Structured Streaming: one epoch per micro-batch, with the batch id added to `first` as
        its number.

        `inputs`: one streaming DataFrame per source. `checkpoint`: where Spark keeps the offsets; start again with the
        same one to go on, after any failure. `trigger`: as for writeStream.trigger, such as `{"availableNow": True}`.
        `first`: the epoch of the checkpoint's first batch, such as the one after a backfill; the same at each start.
        The sources must be replayable, as for any exactly-once query. Sinks are part of the Job.
        """
        from nosync.spark.structured_streaming import last_batch, start_stream  # noqa: PLC0415

        if trigger is not None and not isinstance(trigger, Mapping):
            raise InvalidInputError(
                f"trigger is {trigger!r}, expected the arguments of writeStream.trigger() as a dictionary, such as "
                "{'availableNow': True} or {'processingTime': '10 seconds'}"
            )
        checked = self._check_inputs(inputs)
        pack(first)
        last = self._node.last_sealed(self.branch_name)
        before = None if last is None else streamed_from(self._manifest(last))
        check_stream(checkpoint, first, last, before, lambda: last_batch(self._spark, checkpoint))

        def run_batch(batch: int, rows: Mapping[str, DataFrame]) -> EpochReport:
            t, newest = first + batch, self._node.last_sealed(self.branch_name)
            check_batch(batch, t, newest)
            return self._advance(t, rows, first)

        query_name = name or f"nosync-{self.flow.name}"
        return start_stream(run_batch, checked, checkpoint, trigger or {}, query_name)

    def _check_epoch(self, t: int) -> None:
        pack(t)
        last = self._node.last_sealed(self.branch_name)
        if last is not None and t > last + 1:
            raise OutOfOrderError(f"epoch {t} cannot run yet: the next one is {last + 1}")
        manifests = self._node.manifests(self.branch_name)
        if last is not None and manifests.first is not None and t < manifests.first:
            begin = lost_begin(self._node.timelines, self.branch_name)
            if begin is None or t < begin:
                raise OutOfOrderError(
                    f"epoch {t} is before the first one, {manifests.first}; the next one is {last + 1}"
                )
        self._node.check_sealable(t, self.branch_name)  # before anything runs

    def _check_inputs(self, inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        sources = {stage.name: stage for stage in self.flow.sources}
        if not isinstance(inputs, Mapping):
            raise InvalidInputError(
                f"{type(inputs).__name__} was given where a DataFrame is expected for each source: "
                f"{{{', '.join(f'{name!r}: ...' for name in sources)}}}"
            )
        for name in inputs:
            if name not in sources:
                raise InvalidInputError(
                    f"{name!r} is not a source of {self.flow.name}; sources: {', '.join(sources)}{did_you_mean(name, sources)}"
                )
        for name in sources:
            if name not in inputs:
                raise InvalidInputError(
                    f"source {name} has no input: pass {{{name!r}: dataframe}} (an empty one for no rows)"
                )
        return {name: self._schemas.check_input(sources[name], frame) for name, frame in inputs.items()}

    def _manifest(self, t: int) -> Manifest | None:
        """Of an epoch of this timeline, or of the one that it is a branch of."""
        return self._node.timelines.manifest(t, self.branch_name) or self._on_timeline.parents_manifest(t)

    def _rows_at(self, t: int) -> int:
        """How many rows the sources of a sealed epoch had."""
        manifest = self._manifest(t)
        sources = {stage.name for stage in self.flow.sources}
        return sum(entry.rows for entry in manifest.entries if entry.id.trace.stage in sources) if manifest else 0

    def _drop_rounds(self, t: int, *, at_once: bool = False) -> None:
        """Deletes the rounds of an epoch's loops, which the layers of the epoch stand for."""
        for loop in self.flow.loops:
            for stage in self.flow.in_loop(loop):
                self._node.drop_rounds(stage.name, t, at_once=at_once)

    def _copies(self) -> dict[str, int]:
        """By stage, the copies that the safe point waits for, where the flow says so; else the ledger knows."""
        said = {stage.name for stage in self._declared.stages if stage.persist is not None}
        is_all_said = self._declared.persist_given is not None
        return {
            stage.name: int(stage.level)
            for stage in self.flow.recorded
            if is_all_said or stage.level != DISK or stage.name.partition(PART_SEPARATOR)[0] in said
        }

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self, stage: str, as_of: int | None = None) -> DataFrame:
        """The state of a stage as of an epoch (default: the last sealed one) as a DataFrame.

        A select, where or join_static that is not recorded is this job's expressions over what is recorded below it.
        """
        t = self._sealed(as_of)
        return self._reader(stage).state(self._spark, t)

    def changes(self, stage: str, after: int, until: int) -> DataFrame:
        """The change feed of a stage: what turns its state as of `after` into the one as of `until`.

        The stage's columns, `_change_type` (insert, update_preimage, update_postimage, delete) and `_epoch`.
        `after=-1` is the empty state before the first epoch.
        """
        check_range(after, until)
        until = self._sealed(until)
        return self._reader(stage).changes(self._spark, after, until)

    def _reader(self, stage: str) -> StageReader | DerivedReader:
        from nosync.spark.derived import DerivedReader  # noqa: PLC0415
        from nosync.spark.expressions import for_tasks  # noqa: PLC0415
        from nosync.spark.stage_reader import StageReader  # noqa: PLC0415 - the store works without pyspark

        below = self._stage(stage)
        expressions: list[BoundStage] = []
        while not below.recorded and below.in_jvm and below.loop is None:
            expressions.insert(0, below)
            below = self.flow.stages[below.inputs[0]]
        if not below.recorded or below.of_rounds:
            raise NotAvailableError(_why_not_recorded(stage, below))
        self._schemas.check_readable(below)
        reader = StageReader(self._location, for_tasks(below), self._history(below.name))
        return DerivedReader(reader, tuple(expressions), self._expression_settings) if expressions else reader

    def _history(self, stage: str) -> History:
        return self._node.histories(self.branch_name).get(stage, ())

    @property
    def _location(self) -> StoreLocation:
        """Where tasks find the store."""
        return StoreLocation(
            str(self._directory.root.absolute()), self._directory.key_groups, self._node.store_id, self._node.node_id
        )

    def stage(self, name: str) -> BoundStage:
        """A stage with its schemas. Raises UnknownStageError."""
        return self._stage(name)

    def last_sealed(self) -> int | None:
        """The newest epoch of this job's branch."""
        return self._node.last_sealed(self.branch_name)

    def sums_of(self, stage: str) -> tuple[str, ...]:
        """The columns of a stage whose values may be added up over its rows: counts and sums."""
        return self.flow.sums.get(self.stage(stage).name, ())

    def shared_until(self, other: Job, stage: str) -> int:
        """The last epoch up to which a stage's layers are the same files here and on another branch; -1: none are."""
        here, there = (j._node.manifests(j.branch_name) for j in (self, other))
        epochs = [t for t in here if t in there]

        def same(t: int) -> bool:
            mine, theirs = ({e for e in m[Epoch(t)].entries if e.id.trace.stage == stage} for m in (here, there))
            return mine == theirs

        # Once they differ, fingerprints do, and those never become equal again: so the point can be bisected.
        low, high = -1, len(epochs)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if same(epochs[middle]) else (low, middle)
        return epochs[low] if low >= 0 else BEFORE_FIRST_EPOCH

    def _stage(self, name: str) -> BoundStage:
        if name not in self.flow.stages:
            raise UnknownStageError(
                f"no stage {name!r} in {self.flow.name}; stages: {', '.join(self.flow.stages)}"
                f"{did_you_mean(name, self.flow.stages)}"
            )
        return self.flow.stages[name]

    def _sealed(self, t: int | None) -> int:
        if t is not None:
            pack(t)
        check_there(self._node.timelines, self.branch_name, t)
        last = self._node.last_sealed(self.branch_name)
        if last is None:
            raise NotAvailableError("no epoch was run yet: call advance() first")
        if t is None:
            return last
        if t > last:
            raise NotAvailableError(f"epoch {t} was not run yet; the newest is {last}")
        return t

    def safe_point(self) -> int | None:
        """The largest epoch up to which everything is complete and durable."""
        return self._store.safe_point(self.branch_name)

    def status(self) -> StoreStatus:
        """As `Store.status()`, with the watermarks of the branch's windows, and which inputs hold them back."""
        return dataclasses.replace(self._store.status(), windows=window_status(self._store, self.branch_name))

    def __repr__(self) -> str:
        return f"<nosync.Job {self.flow.name} on {self._directory.root}, branch {self.branch_name}, epoch {self.last_sealed()}>"

    def explain(
        self, stage: str, key: Mapping[str, Any], t: int | None = None, *, progress: Progress | None = None
    ) -> Explanation:
        """Why a key has its value as of an epoch (default: the last one): the input rows that led to it, stage by
        stage.

        `key`: the key's columns and values. Raises UnknownStageError, SchemaError, NotAvailableError.
        """
        from nosync.spark.expressions import evaluator  # noqa: PLC0415 - the store works without pyspark

        at = self._sealed(t)
        flow, evaluate = self.flow_at(at), evaluator(self._spark, self._expression_settings)
        return explain(flow, self._store, stage, key, at, evaluate=evaluate, branch=self.branch_name, progress=progress)

    def _repr_html_(self) -> str:
        facts = {
            "store": self._directory.root, "branch": self.branch_name, "epoch": self.last_sealed(),
            "safe point": self.safe_point(), "shards": self._shards,
        }  # fmt: skip
        stages = [
            (s.name, s.kind, ", ".join(s.inputs), ", ".join(s.key), describe(s.output)) for s in self.flow.recorded
        ]
        return facts_html(
            f"nosync.Job {self.flow.name}", facts, rows_html(["stage", "kind", "inputs", "key", "columns"], stages)
        )

    # --- branches -------------------------------------------------------------------------------------------------

    def branch(
        self,
        name: str,
        *,
        at: int | None = None,
        replace: Mapping[str, Any] | None = None,
        add: Callable[[Dataflow], object] | None = None,
        drop: Sequence[str] = (),
    ) -> Job:
        """A branch of this one at epoch `at` (default: the last sealed one), with other code from the next epoch on.

        Nothing is copied: it shares all layers up to `at`, and later those of stages whose code is the same. `replace`:
        by stage a function (map, filter, update), expressions (select, where) or a dictionary of aggregates; a changed
        stage goes on from its parent's state. `add(flow)` builds more stages, which begin with no state; `drop` leaves
        stages out. Where its input changes, as behind an aggregate, a stage with other code, or a new one, begins anew
        instead: with the first epoch it is what its code makes of all rows that are there, and so is what follows it.
        The job that is returned has nothing after `at` yet: `replay()` computes it from the recorded inputs.

        The same call again opens the branch that it made. Raises InvalidInputError for a name in use, FlowError or
        SchemaError where the changed flow does not fit, CompactedError where `at` is below `since`.
        """
        t = self._sealed(at)
        if t < self._store.since():
            raise CompactedError(
                f"cannot branch at {t}: the history before {self._store.since()} was merged away. Keep more with retain=, or "
                "hold a point with pin()"
            )
        flow = self._declared.changed(replace, add, drop)
        check_same_sources(self._declared, flow)
        manifest = self._node.timelines.manifest(t, self.branch_name)
        assert manifest is not None, "it is sealed"
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        sources = {stage.name: recorded[stage.name] for stage in self.flow.sources}
        bound = self._on_timeline.bound(flow, sources)
        changed = changed_stages(bound, recorded)
        traces = {e.id.trace.stage: e.id.trace for e in manifest.entries}
        # What is dropped and added again under its name is replaced as well.
        touched = [name for name in {*(replace or {}), *drop} if name in bound.stages and name in self.flow.stages]
        own = [name for name in touched if bound.stages[name].fingerprint != self.flow.stages[name].fingerprint]
        anew = stages_to_bootstrap(bound, changed, own, self._known_at(t, recorded))
        check_rows_are_kept(bound, anew, flow)
        check_states_fit(bound, changed, anew, lambda stage: self._recorded_schema(traces.get(stage)))
        gone = [name for name in recorded if name not in bound.stages]
        refs = self._node.timelines.refs
        known = refs.timeline_of(name) if name in refs.names else None
        wanted = (
            self._node.timelines.timeline(self.branch_name).id,
            t,
            tuple(sorted([*changed, *gone])),
            tuple(sorted(anew)),
        )
        if known is None or (known.parent, known.at, known.changed, known.anew) != wanted:
            self._node.create_branch(name, self.branch_name, t, [*changed, *gone], anew)
        from nosync.spark.session import conf_set  # noqa: PLC0415

        with conf_set(self._spark, self._expression_settings):  # its expressions mean what this job's do
            return Job(flow, self._store, spark=self._spark, shards=self._shards, branch=name)

    def _known_at(self, t: int, recorded: Collection[str]) -> set[str]:
        """The stages that were there at an epoch as this job has them, as far as it matters to what follows rows that
        change.
        """
        refs = self._node.timelines.refs
        steps = [refs.timelines[id] for id in refs.left(self._node.timelines.timeline(self.branch_name).id)]
        later = {name for step in steps if step.at is not None and step.at >= t for name in step.anew}
        return {name for name, stage in self.flow.stages.items() if name in recorded or not stage.recorded} - later

    def _recorded_schema(self, trace: TraceId | None) -> tuple[tuple[str, ...], Any] | None:
        if trace is None:
            return None
        reader = self._directory.reader_of_any(trace)
        return reader.info.key, reader.schema

    def plan_replay(self, to: int | None = None) -> ReplayPlan:
        """What `replay(to)` will compute and from where, without doing it."""
        return self._epochs.plan_replay(to)

    def replay(self, to: int | None = None, *, progress: Progress | None = None) -> ReplayReport:
        """Computes the branch's epochs up to `to` (default: all that its parent has) from the recorded inputs.

        Only stages with other code, and what is computed from them, run. Interrupted, it goes on where it was. Raises
        HoleError where a recorded input is lost (recover it on the parent), StageError from changed functions.
        """
        started = time.perf_counter()
        self._check_open()
        first, last = self._epochs.replay_range(to)
        computed, shared = 0, 0
        epochs = (self._scheduled(t) for t in range(first, last + 1))
        ran_all = self._runner.run_all(epochs, lambda _: {}, self.branch_name, self.instance, everything=True)
        for one, reports in ran_all:
            self._seal(one.flow, one.step.t, reports, streamed_from(self._manifest(one.step.t)))
            ran = sum(report.computed for report in reports.values())
            computed += ran
            shared += len(one.flow.recorded) * one.shards - ran
            if progress:
                progress(one.step.t - first + 1, last - first + 1)
        return ReplayReport(self.branch_name, first, last, computed, shared, time.perf_counter() - started)

    def _scheduled(self, t: int) -> ScheduledEpoch:
        """An epoch of a replay."""
        flow = self.flow_at(t)
        recorded = self._epochs.recorded_stages(flow, t)
        return ScheduledEpoch(
            Step(t, {}, frozenset()), flow, self._epochs.shards_at(flow, t), self._rows_at(t), recorded
        )

    def promote(self, branch: Job, *, keep_as: str | None = None) -> None:
        """Lets the main timeline be that of a branch: an upgrade, or a bug fix applied from its fork on.

        This job goes on with the branch's code and state. The timeline that was main is kept as branch `keep_as`, or
        dropped with what only it has. Sinks withdraw what they were given after the fork and get the branch's changes
        instead. Raises FlowError where the branch is not replayed up to the main timeline's last epoch.
        """
        if not isinstance(branch, Job):
            raise InvalidInputError(
                f"promote({branch!r}): expected the branch's Job, as branch() returns it, for its code is gone on with"
            )
        if branch._directory.root != self._directory.root:
            raise FlowError(
                f"branch {branch.branch_name!r} is one of {branch._directory.root}, not of {self._directory.root}"
            )
        if self.branch_name != MAIN:
            raise FlowError(f"promote() belongs to the job on {MAIN!r}; this one is on {self.branch_name!r}")
        at, timeline_before = (
            self._node.timelines.timeline(branch.branch_name).at,
            self._node.timelines.timeline(MAIN).id,
        )
        mine, theirs = self._node.last_sealed(MAIN), self._node.last_sealed(branch.branch_name)
        if at is None or theirs is None or mine is None or theirs < mine:
            raise FlowError(f"branch {branch.branch_name} is at epoch {theirs}, main at {mine}: replay() it first")
        check_sinks(self._sinks, branch._declared)
        timelines, common = self._node.timelines, int(min(mine, at))
        # Further back where the branch is one of another branch, or main was rewound since.
        while common > BEFORE_FIRST_EPOCH and self._sealed_by(common, MAIN) != self._sealed_by(
            common, branch.branch_name
        ):
            common -= 1
        pending = self._delivery.schedule_redelivery(branch.branch_name, common)
        try:
            self._node.promote(branch.branch_name, keep_as)
        except NosyncError:
            if timelines.timeline(MAIN).id == timeline_before:
                for marks, element in pending:
                    marks.take_back([element])
            raise
        self._declared = branch._declared
        branch.branch_name = MAIN
        self._open_timeline()

    def rewind(self, t: int, *, keep_as: str | None = None) -> str | None:
        """Lets the main timeline go on from epoch `t`; what it had after that is kept as a branch, whose name is
        returned.

        `keep_as`: that branch's name (default `before-rewind-<n>`); `""` drops it. Sinks withdraw epochs after `t`.
        With the last sealed epoch, or -1 where there is none, it lets go of what a failed attempt at the next ones
        recorded, so that they can be given other rows.
        """
        if self.branch_name != MAIN:
            raise FlowError(
                f"rewind() belongs to the job on {MAIN!r}; branch {self.branch_name!r} can be branched off at {t} instead"
            )
        kept = self._store.rewind(t, keep_as)
        try:
            self._open_timeline()
        except FlowError as error:
            self._timeline = ""  # this job goes on nowhere
            raise FlowError(
                f"main was rewound to {t}, which other code than this job's recorded, so this job ends here. Make a Job with "
                f"that code, and it goes on from {t}; sinks withdraw what came after it then. {error}"
            ) from error
        return kept

    def _sealed_by(self, t: int, branch: str) -> str | None:
        """The timeline that an epoch of a branch was sealed on."""
        manifest = self._node.timelines.manifest(t, branch)
        return None if manifest is None else manifest.timeline

    # --- recovery -------------------------------------------------------------------------------------------------

    def recover(
        self,
        inputs: InputsAt | Mapping[int, Mapping[str, DataFrame]] | None = None,
        *,
        verify: bool = False,
        outputs: Collection[str] | None = None,
        progress: Progress | None = None,
    ) -> RecoveryReport:
        """Restores every layer that manifests list and that is lost, recomputing only what is missing.

        `outputs`: the stages that are wanted back; layers that none of them needs stay lost (default: all are wanted).

        `inputs(t)`, or `inputs[t]` for some epochs, gives the rows of the sources at an epoch again; needed only where
        recorded source layers are lost too. `verify` reads every byte first, so that flipped bits count as lost. A
        recomputed layer must have the digest that its manifest remembers, else DeterminismError. At the end it looks
        again: what is still missing is recovered as well, or named in `unrecoverable`.
        """
        clock = Stopwatch()
        self._check_open()
        if verify:
            self._node.check()
        chosen = {self._stage(name).name for name in (self.flow.stages if outputs is None else outputs)}
        done = Recovered()
        for _ in range(_LOOKS):
            missing, fetched = self._missing()
            if not done.looks:
                done.rolled_back_to = self._node.safe_point(self.branch_name)
            wanted = done.found(missing, fetched, chosen)
            clock.lap("inspect")
            if not wanted and done.looks > 1:
                break
            ran = self._recover_once(wanted, inputs, done, clock, progress)
            if not ran:
                break
        else:  # it ran each time: what there is now nobody has looked at
            missing, fetched = self._missing()
            done.left(done.found(missing, fetched, chosen))
            clock.lap("inspect")
        return done.report(
            target=self._node.last_sealed(self.branch_name),
            lost_manifest=lost_manifest(self._node, self.branch_name),
            seconds=clock.laps,
        )

    def _recover_once(
        self,
        wanted: list[Cell],
        inputs: InputsAt | Mapping[int, Mapping[str, DataFrame]] | None,
        done: Recovered,
        clock: Stopwatch,
        progress: Progress | None,
    ) -> bool:
        """Computes the wanted layers as far as possible, and seals their epochs again. False: there was nothing to run."""
        given_again = inputs if isinstance(inputs, Mapping) else None
        recovery = self.plan_recovery(
            wanted, can_replay=inputs is not None if given_again is None else given_again.__contains__
        )
        done.planned(recovery)
        clock.lap("plan")
        reports_at: dict[int, Reports] = {}
        since = epoch_of(self._node.since())
        epochs = (self._recovered_epoch(step, since) for step in recovery.steps)
        for one, reports in self._runner.run_all(
            epochs, lambda step: self._given_again(step, inputs), self.branch_name, self.instance
        ):
            reports_at[one.step.t] = reports
            done.ran(reports.values())
            self._drop_rounds(one.step.t)
            if progress:
                progress(len(reports_at), len(recovery.steps))
        clock.lap("compute")
        hopeless = {cell.t for cell in recovery.impossible}
        for t in sorted({step.t for step in recovery.steps} - hopeless):
            self._seal_again(t, reports_at[t])
        self._node.sync()
        clock.lap("seal")
        return bool(recovery.steps)

    def _recovered_epoch(self, step: Step, since: int) -> ScheduledEpoch:
        flow = self.flow_at(step.t)
        if any(flow.stages[name].loop for name in step.compute):
            self._drop_rounds(step.t, at_once=True)  # or those that wait for their grace to end vanish in the middle
        return ScheduledEpoch(
            step, flow, self._epochs.shards_at(flow, step.t), self._rows_at(step.t), is_retained=step.t >= since
        )

    def _missing(self) -> tuple[list[MissingLayer], int]:
        """What is lost and does not come from peers, and how much of what was lost came."""
        before = self._node.lost(self.branch_name)  # what a daemon misses it fetches as soon as it looks
        self._node.make_durable_now()
        left = self._node.lost(self.branch_name)
        missing = self._node.fetch(left)
        # A file may stand there that is another one than the manifest lists: it would be taken for what is missing.
        self._node.recheck([m.entry.id for m in missing])
        return missing, sum(self._directory.holds(m.entry.id) for m in {*before, *left}.difference(missing))

    def _given_again(
        self, step: Step, inputs: InputsAt | Mapping[int, Mapping[str, DataFrame]] | None
    ) -> Mapping[str, DataFrame]:
        if not step.needs_input:
            return {}
        assert inputs is not None, "the planner asks for input only where it can be replayed"
        return self._check_inputs(inputs[step.t] if isinstance(inputs, Mapping) else inputs(step.t))

    def _seal_again(self, t: int, reports: Reports) -> None:
        """Compares every digest with the recorded one."""
        manifest = self._node.timelines.manifest(t, self.branch_name)
        if manifest is None:
            return
        ids = [entry.id for entry in manifest.entries]
        self._node.seal(
            t, ids, self.branch_name, meta=dict(manifest.meta), copies=self._copies(), contents=_contents(ids, reports)
        )

    def plan_recovery(self, wanted: list[Cell], *, can_replay: bool | Callable[[int], object] = False) -> RecoveryPlan:
        """What recomputing the wanted layers takes, without doing it. `can_replay`: whether inputs can be given again."""
        return plan(
            self.flow,
            RecordedCells(self._directory.descriptions, self._node.since()),
            wanted,
            histories=self._node.histories(self.branch_name),
            flow_at=self.flow_at,
            can_replay=lambda source, t: bool(can_replay(t) if callable(can_replay) else can_replay),
        )
