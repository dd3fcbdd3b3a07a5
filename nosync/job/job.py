"""A job: one dataflow, one store and one Spark session, advanced an epoch at a time.

job = nosync.Job(flow, store, spark=spark, shards=4)
job.advance(t, {"flights": df})
job.read("delays", as_of=t)
job.recover()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nosync.flow.dataflow import Dataflow
from nosync.flow.views import Query
from nosync.job.arguments import check_arguments, check_flow, check_shards
from nosync.job.backfill import Backfill, BackfillReport
from nosync.job.backfill_range import MAX_GAP
from nosync.job.branching import Branching
from nosync.job.delivery import Delivery, check_columns
from nosync.job.epoch_layout import EpochLayout
from nosync.job.epoch_runs import EpochRuns
from nosync.job.flow_versions import FlowVersions
from nosync.job.job_streams import JobStreams
from nosync.job.job_views import JobViews
from nosync.job.kept_inputs import KeptInputs
from nosync.job.position import Position, location_of
from nosync.job.reading import Reading
from nosync.job.recovery import Recovery
from nosync.job.recovery_planner import Cell, RecoveryPlan
from nosync.job.replay import Progress, Replay, ReplayPlan, ReplayPlanner, ReplayReport
from nosync.job.reports import EpochReport, RecoveryReport
from nosync.job.sealing import Sealing
from nosync.job.sinks import Sink
from nosync.job.turn import Turn
from nosync.job.upgrade import Upgrade, UpgradePlan
from nosync.lsm.errors import FlowError, InvalidInputError, NosyncError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nosync.spark.epoch_inputs import EpochOf

InputsAt = Callable[[int], "Mapping[str, DataFrame]"]


class Job(JobViews, JobStreams):
    """Runs a dataflow over a store. One job at a time runs on a branch of a store. `sinks`: where changes go, by stage.

    `shards` may differ from what the store was written with: from the next epoch on there are so many, over the same
    files. Making a job fences the one before: it can neither publish nor seal any more (FencedError). With
    `upgrade=True` the next epochs run this flow, whatever code the store was written with: see `upgrade`.

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
        upgrade: bool = False,
    ) -> None:
        self._sinks = dict(sinks or {})
        check_arguments(flow, store, spark, shards, self._sinks, branch)
        from nosync.spark.expressions import Analyzer  # noqa: PLC0415 - the store works without pyspark
        from nosync.spark.pickling import frozen  # noqa: PLC0415
        from nosync.spark.runner import Runner  # noqa: PLC0415
        from nosync.spark.session import check_running, expression_settings  # noqa: PLC0415

        self._spark, self._store, self._shards = spark, store, shards
        self._position = Position(store, branch)
        self._kept = KeptInputs(store.node, self._position)
        self._settings = expression_settings(spark)
        self._location, self._analyze = location_of(store), Analyzer(spark, self._settings)
        self._runner = Runner(spark, store.node, self._location, self._settings)
        self.recoveries: list[RecoveryReport] = []
        """What `advance` had to compute again because a node was lost."""
        self._turn = Turn(lambda: self._versions.declared.views, partial(check_running, spark))
        code = frozen(flow, spark)
        if upgrade:
            self._upgrade(code, None)
        self._open_timeline(code)

    def _open_timeline(self, declared: Dataflow) -> None:
        """Binds the flow for the branch's timeline, takes that over, and makes what works on it."""
        from nosync.spark import schemas  # noqa: PLC0415 - as above

        store, position, runner = self._store, self._position, self._runner
        node, directory = store.node, store.directory
        timeline = node.timelines.timeline(position.branch).id
        versions = FlowVersions(declared, node, position, schemas.parse_ddl, self._analyze)
        self._versions, self._check_inputs = versions, partial(schemas.check_inputs, versions.flow)
        schemas.warn_of_unreadable(versions.flow)
        check_columns(self._sinks, versions.flow)
        position.take_over(timeline)
        layout = EpochLayout(directory, position, versions, self._shards)
        sealing = Sealing(node, position, versions, layout)
        self._reading = Reading(self._spark, store, self._location, position, versions, self._settings)
        self._delivery = Delivery(self._sinks, store, position, self._reading.changes)
        self._recovery = Recovery(node, directory, position, versions, layout, sealing, runner, self._check_inputs)
        self._epochs = EpochRuns(
            node, position, versions, layout, sealing, self._delivery, self._recovery, runner, self._kept,
            self._check_inputs, self.recoveries,
        )  # fmt: skip
        self._backfill = Backfill(position, versions, self._epochs, self._delivery, self._shards)
        planner = ReplayPlanner(node, directory, position, versions, layout)
        self._replay = Replay(planner, position, versions, layout, sealing, runner)
        self._branching = Branching(store, position, versions, self._delivery, self._sinks)
        last = position.last_sealed()
        if last is not None:
            sealing.drop_rounds(last)  # where the instance before died between sealing and this
        self._delivery.start(last)

    def advance(self, t: int, inputs: Mapping[str, DataFrame]) -> EpochReport:
        """Runs epoch `t` on the given rows (one DataFrame a source) and seals it.

        After an attempt that failed in the middle, call it again with the same rows: what was recorded is used. A
        sealed `t` again with the same rows changes nothing; rewind() to the last sealed epoch first to give other rows
        than those of an attempt that failed. Raises OutOfOrderError unless `t` is the next epoch (the first may be
        any), DeterminismError for other rows than recorded, SchemaError, StageError, StorageError.
        """
        with self._turn:
            return self._epochs.advance(t, inputs)

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

        Raises what `advance` raises, after sealing the epochs before; InvalidInputError for an expression of no use.
        """
        from nosync.spark.epoch_inputs import GivenEpochs  # noqa: PLC0415 - the store works without pyspark

        self._turn.check()
        self._position.check_open()
        columns = {stage.name: stage.schema.names for stage in self.flow.sources}
        given = GivenEpochs(self._spark, self._check_inputs(inputs), columns, epoch)
        with self._turn:
            return self._backfill.run(given, max_gap, progress)

    def rescale(self, shards: int) -> None:
        """Lets the next epoch, and those after it, have another number of shards. Nothing is rewritten.

        It may be called while a stream runs: it waits for the end of an epoch, and takes as long as to bind the flow.
        Raises FlowError for a number that the store's key groups do not allow.
        """
        check_shards(shards, self._store.directory.key_groups)
        with self._turn:
            self._shards = shards
            self._open_timeline(self._versions.declared)

    def plan_upgrade(self, flow: Dataflow, *, keep_as: str | None = None) -> UpgradePlan | None:
        """Says what `upgrade(flow)` will do, without doing it. None: there is no epoch yet."""
        from nosync.spark.pickling import frozen  # noqa: PLC0415 - the store works without pyspark

        check_flow(flow, "plan_upgrade")
        return self._upgrade_to(frozen(flow, self._spark), keep_as, self._versions.declared).plan

    def upgrade(self, flow: Dataflow, *, keep_as: str | None = None) -> UpgradePlan | None:
        """Lets the next epoch, and those after it, run other code: a fix, another column, more stages, fewer.

        Only the new code is needed. Stages whose code changed go on from the state that is recorded; where their input
        changes they begin anew, with what their code makes of all rows that are there. New stages begin with the next
        epoch, and so do new columns of sources, in which recorded rows have null. The line before stays as branch
        `keep_as` (default: `before-upgrade-<epoch>`), to be read and compared, until it is deleted.
        `Job(flow, store, upgrade=True)` does it where no job runs. Returns what was done. Raises FlowError or
        SchemaError, naming the stage, where the flow cannot go on from what is recorded.
        """
        from nosync.spark.pickling import frozen  # noqa: PLC0415

        check_flow(flow, "upgrade")
        code = frozen(flow, self._spark)
        with self._turn:
            plan = self._upgrade(code, keep_as, self._versions.declared)
            self._open_timeline(code)
        return plan

    def _upgrade(self, code: Dataflow, keep_as: str | None, before: Dataflow | None = None) -> UpgradePlan | None:
        upgrade = self._upgrade_to(code, keep_as, before)
        if upgrade.plan is not None and upgrade.plan.is_needed:
            upgrade.run()
        return upgrade.plan

    def _upgrade_to(self, code: Dataflow, keep_as: str | None, before: Dataflow | None) -> Upgrade:
        from nosync.spark import schemas  # noqa: PLC0415

        return Upgrade(
            code, self._store, self._position, schemas.parse_ddl, self._analyze, keep_as, before, sinks=self._sinks
        )

    def branch(
        self,
        name: str,
        *,
        at: AsOf | None = None,
        replace: Mapping[str, Any] | None = None,
        add: Callable[[Dataflow], object] | None = None,
        drop: Sequence[str] = (),
        views: Mapping[str, Query] | None = None,
    ) -> Job:
        """Makes a branch of this one at epoch `at` (default: the last sealed one), with other code from then on.

        Nothing is copied: it shares all layers up to `at`, and later those of stages whose code is the same. `replace`:
        by stage a function (map, filter, update), expressions (select, where) or a dictionary of aggregates; a changed
        stage goes on from its parent's state. `add(flow)` builds more stages, which begin with no state; `drop` leaves
        stages out. Where its input changes, as behind an aggregate, a stage with other code, or a new one, begins anew
        instead: with the first epoch it is what its code makes of all rows that are there, and so is what follows it.
        The job that is returned has nothing after `at` yet: `replay()` computes it from the recorded inputs.

        `views`: other queries for views, by name. A view is what its query gives of all recorded inputs, those before the
        fork included: with its first epoch the branch has that, and parts of views that are the same share their layers.
        Where nothing else says so, a branch with `views` forks before the last epoch, so that one replayed epoch shows it.

        The same call again opens the branch that it made. Raises InvalidInputError for a name in use, FlowError or
        SchemaError where the changed flow does not fit, CompactedError where `at` is below `since`.
        """
        self._turn.check()
        t, declared = self._reading.sealed(at), None
        if views is not None:
            declared = self._versions.declared.with_queries(views, self._spark)
            if at is None and t > self._store.since() and self._position.manifest(t - 1) is not None:
                t -= 1
        was_there = name in self._store.node.timelines.refs.names
        flow = self._branching.fork(name, t, replace, add, drop, declared, views or ())
        from nosync.spark.session import conf_set  # noqa: PLC0415

        try:
            with conf_set(self._spark, self._settings):  # its expressions mean what this job's do
                return Job(flow, self._store, spark=self._spark, shards=self._shards, branch=name)
        except NosyncError:
            if not was_there:  # a branch that nobody can run would hold history
                self._store.delete_branch(name)
            raise

    def plan_replay(self, to: int | None = None) -> ReplayPlan:
        """Says what `replay(to)` will compute and from where, without doing it."""
        return self._replay.plan(to)

    def replay(self, to: int | None = None, *, progress: Progress | None = None) -> ReplayReport:
        """Computes the branch's epochs up to `to` (default: all that its parent has) from the recorded inputs.

        Only stages with other code, and what is computed from them, run. Interrupted, it goes on where it was. Raises
        HoleError where a recorded input is lost (recover it on the parent), StageError from changed functions.
        """
        with self._turn:
            return self._replay.run(to, progress)

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
        declared = branch._versions.declared
        with self._turn:
            self._branching.promote(branch._position, declared, keep_as)
            branch._position.branch = MAIN
            self._open_timeline(declared)

    def rewind(self, t: int, *, keep_as: str | None = None) -> str | None:
        """Lets the main timeline go on from epoch `t`; what it had after that is kept as a branch, whose name is
        returned.

        `keep_as`: that branch's name (default `before-rewind-<n>`); `""` drops it. Sinks withdraw epochs after `t`.
        With the last sealed epoch, or -1 where there is none, it deletes what a failed attempt at the next ones
        recorded, so that they can be given other rows.
        """
        self._turn.check()  # or main would be rewound, and nothing could go on from there
        kept = self._branching.rewind(t, keep_as)
        try:
            self._open_timeline(self._versions.declared)
        except FlowError as error:
            self._position.leave()
            raise FlowError(
                f"main was rewound to {t}, which other code than this job's recorded, so this job ends here. Make a Job with "
                f"that code, and it goes on from {t}; sinks withdraw what came after it then. {error}"
            ) from error
        return kept

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
        if outputs is not None and not isinstance(outputs, Collection):
            raise InvalidInputError(f"recover(outputs={outputs!r}): expected names of stages")
        chosen = {self.stage(name).name for name in (self.flow.stages if outputs is None else outputs)}
        with self._turn:
            return self._recovery.run(inputs, chosen, verify=verify, progress=progress)

    def plan_recovery(self, wanted: list[Cell], *, can_replay: bool | Callable[[int], object] = False) -> RecoveryPlan:
        """Says what recomputing the wanted layers takes. `can_replay`: whether inputs can be given again."""
        return self._recovery.plan(wanted, can_replay=can_replay)
