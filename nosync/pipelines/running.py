"""Runs of a project: what came since the run before is recorded, epoch by epoch, and its datasets follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import StorageLevel

from nosync.flow.bound_stage import declared_of
from nosync.flow.tables import source_of
from nosync.job.flow_versions import PLACED
from nosync.job.job import Job
from nosync.job.job_streams import check_checkpoint
from nosync.job.replay import Progress, ReplayPlan, ReplayReport
from nosync.job.reports import EpochReport
from nosync.job.stream_checks import batches_of
from nosync.job.upgrade import Upgrade, UpgradePlan, upgrade_of
from nosync.lsm.errors import DeterminismError, FlowError, InvalidInputError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.timestamp import Time, epoch_of
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.lsm.store.store import Store
from nosync.pipelines.datasets import OF_STREAMS, TEMPORARY_VIEW
from nosync.pipelines.declaring import Pipeline
from nosync.pipelines.inputs import Input, changes_of, rows_of
from nosync.pipelines.recorded_inputs import is_table, recorded_stage
from nosync.spark.schemas import empty_inputs
from nosync.spark.structured_streaming import run_available

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MOST_SHARDS = 4
"""Of a new store, where nothing else is said: with more of them each epoch takes longer, however few rows it has."""
Said = Callable[[str], object]


@dataclass(frozen=True)
class RunReport:
    """Says what a run did."""

    epochs: tuple[EpochReport, ...]
    rows: Mapping[str, int]
    """The rows that each dataset has now. Temporary views have none of their own."""
    upgrade: UpgradePlan | None = None
    """What became of datasets whose definitions changed."""
    replay: ReplayReport | None = None
    """What was computed on a branch."""


@dataclass
class Run:
    """A run of a project on the main line of a store."""

    pipeline: Pipeline
    store: Store
    shards: int | None = None
    say: Said = lambda _: None
    """Is told what is being done, for whoever waits."""
    _epochs: list[EpochReport] = field(default_factory=list)

    def run(self) -> RunReport:
        """Records what came, and computes what follows. Returns when all streams have given what they have by now.

        A run that died goes on where it was. Raises what `Job.advance` and `Job.upgrade` raise.
        """
        streams = [one for one in self.pipeline.inputs if one.is_stream]
        self._check_inputs(streams)
        upgrade = planned_upgrade(self.pipeline, self.store)
        if upgrade.plan is not None and upgrade.plan.is_needed:
            self.say(str(upgrade.plan))
            upgrade.run()
        job = _job(self.pipeline, self.store, MAIN, self.shards)
        self._compare_tables(job, [one for one in self.pipeline.inputs if not one.is_stream])
        for one in streams:
            self.say(f"reading {one.shown}")
            rows = rows_of(one, self.pipeline.planner.frame_of(one.leaf))
            run_available(partial(self._batch, job, one), rows, self._checkpoint(one), one.name)
        plan = upgrade.plan if upgrade.plan is not None and upgrade.plan.is_needed else None
        if not self._epochs and self._shows_old_code():  # nothing came: an epoch of no rows shows the new definitions
            self._advance(job, {})
        return RunReport(tuple(self._epochs), _row_counts(job, self.pipeline), plan)

    def _checkpoint(self, one: Input) -> Path:
        """Returns where Spark keeps the offsets of a stream: beside the store, for they belong together."""
        root = self.store.directory.root
        return root.with_name(f"{root.name}-checkpoints") / one.name

    def _check_inputs(self, streams: list[Input]) -> None:
        """Raises FlowError where a run would take rows twice, before it changes anything."""
        last, spark = self.store.last_sealed(), self.pipeline.planner.spark
        manifest = None if last is None else self.store.manifest(last)
        batches = batches_of(manifest)
        for one in streams:
            check_checkpoint(spark, one.name, self._checkpoint(one), batches.get(one.name))
        recorded = {declared_of(entry.id.trace.stage) for entry in manifest.entries} if manifest else set()
        if recorded and recorded.isdisjoint(stage.name for stage in self.pipeline.flow.stages):
            raise FlowError(
                f"{self.store.directory.root} has {', '.join(sorted(recorded))}, and nothing of this project: give it a store of "
                "its own"
            )
        before = set(manifest.meta.get(PLACED, {}) if manifest else {})
        now = {stage.name for stage in self.pipeline.flow.sources}
        tables = {source_of(name) for name in recorded if is_table(recorded_stage(self.store, name))}
        tables |= {source_of(one.name) for one in self.pipeline.inputs if not one.is_stream}
        gone, new = (", ".join(sorted(names - tables)) for names in (before - now, now - before))
        if gone and new:  # but for tables, which are compared with what is recorded by that name
            raise FlowError(
                f"input {gone} is gone, and {new} is new: were it the same under another name, its rows would come twice. An "
                "input has the name of the first dataset that reads it. If it is the same, define a temporary view "
                f"{_reader_of(gone)} that reads it as before, ahead of the others; if it is not, take the dataset out in a run "
                "of its own first"
            )

        if before:
            self._check_read_as_before(recorded, before)

    def _check_read_as_before(self, recorded: Collection[str], before: Collection[str]) -> None:
        """Raises FlowError where a streaming table or a sink that is recorded would read a stream under another name than
        before: from its beginning, or with the offsets of another one. `before`: the inputs that there were.
        """
        pipeline = self.pipeline
        shown = {one.name: one.shown for one in pipeline.inputs if one.is_stream}
        for name, dataset in pipeline.datasets.items():
            if dataset.kind not in OF_STREAMS or name not in recorded:
                continue
            mine, own = {one for one in pipeline.reads(name) if one in shown}, f"{name}-input"
            other = next((one for one in sorted(mine) if one not in before), None)
            if other is None and mine and own in before and own not in mine:
                other = min(mine)
            if other is not None:
                raise FlowError(
                    f"{dataset.where}: {name} has rows already, and would read {shown[other]} as input {other}, which it did not "
                    "before: its rows could come twice. An input has the name of the first dataset that reads it in one way: "
                    "leave that dataset as it was, or a temporary view of its name in its place; or give the edited one another "
                    "name"
                )

    def _compare_tables(self, job: Job, tables: list[Input]) -> None:
        """Runs an epoch with the rows of tables that are there more, or less, than recorded, if there are any."""
        last = self.store.last_sealed()
        changes: dict[str, DataFrame] = {}
        for one in tables:
            self.say(f"comparing {one.shown} with what is recorded")
            frame = self.pipeline.planner.frame_of(one.leaf)
            had = self._last_with(one.name)
            before = None if had is None else job.read(one.name, had)
            changes[one.name] = changes_of(one, frame, before).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            if tables and (last is None or any(not frame.isEmpty() for frame in changes.values())):
                self._advance(job, changes)
        finally:
            for frame in changes.values():
                frame.unpersist()

    def _last_with(self, stage: str) -> int | None:
        """Returns the last epoch that has a stage: another one than the last where it was taken out, and comes back. None
        where it is new.
        """
        last, spans = self.store.last_sealed(), self.store.node.timelines.history(stage)
        return None if last is None or not spans else min(last, epoch_of(Time(spans[-1].upper - 1)))

    def _advance(self, job: Job, given: Mapping[str, DataFrame]) -> None:
        """Runs an epoch that is no batch of a stream."""
        last = self.store.last_sealed()
        inputs = empty_inputs(self.pipeline.planner.spark, job.flow, given)
        self._note(_again(job, lambda: job.advance(0 if last is None else last + 1, inputs)))

    def _shows_old_code(self) -> bool:
        """Returns whether no epoch has run since the code was another one: in this run, or in one that died then."""
        timeline, last = self.store.node.timelines.timeline(MAIN), self.store.last_sealed()
        manifest = None if last is None else self.store.manifest(last)
        return manifest is not None and bool(timeline.changed) and manifest.timeline != timeline.id

    def _batch(self, job: Job, one: Input, rows: DataFrame, batch: int) -> None:
        self._note(_again(job, lambda: job.advance_batch(one.name, batch, {one.name: rows})))

    def _note(self, report: EpochReport | None) -> None:
        if report is not None:
            self._epochs.append(report)
            self.say(str(report))


def _reader_of(inputs: str) -> str:
    """Returns the dataset that the first of some inputs has its name of."""
    return inputs.partition(",")[0].removesuffix("-input")


def branch_off(
    pipeline: Pipeline, store: Store, branch: str, at: int | None, progress: Progress | None = None
) -> tuple[ReplayPlan, RunReport]:
    """Runs a project, as it is now, over the rows that are recorded, on a branch that forks at an epoch.

    `at`: that epoch; by default the one before the last, so that one replayed epoch shows the datasets as they would be.
    Nothing new is read, and main stays what it is. Raises what `Upgrade` raises.
    """
    last = store.last_sealed()
    if last is None:
        raise InvalidInputError("the store has no epoch yet: run the project without --branch first")
    if branch == MAIN:
        raise InvalidInputError(f"--branch {MAIN}: that is the line that runs go on; leave --branch out")
    if at is not None and store.manifest(at) is None:
        raise InvalidInputError(f"epoch {at} is not sealed: the store has {store.first_sealed()} to {last}")
    before_last = last - 1 if last > store.since() and store.manifest(last - 1) is not None else last
    upgrade = planned_upgrade(pipeline, store, before_last if at is None else at)
    assert upgrade.plan is not None, "there is an epoch"
    upgrade.branch_off(branch)
    job = _job(pipeline, store, branch, None)
    plan = job.plan_replay()
    replay = job.replay(progress=progress)
    return plan, RunReport((), _row_counts(job, pipeline), upgrade.plan, replay)


def planned_upgrade(pipeline: Pipeline, store: Store, at: int | None = None) -> Upgrade:
    """Returns the upgrade of a store to a project as it is now, for the epochs after the last one, or after `at`."""
    return upgrade_of(pipeline.flow, store, pipeline.planner.spark, at=at, sinks=pipeline.sinks)


def _job(pipeline: Pipeline, store: Store, branch: str, shards: int | None) -> Job:
    last, spark = store.last_sealed(branch), pipeline.planner.spark
    manifest = None if last is None else store.manifest(last, branch)
    shards = (
        shards
        or (manifest.shard_count if manifest else None)
        or min(_MOST_SHARDS, spark.sparkContext.defaultParallelism)
    )
    sinks = pipeline.sinks if branch == MAIN else None
    return Job(pipeline.flow, store, spark=spark, shards=shards, branch=branch, sinks=sinks)


def _again(job: Job, advance: Callable[[], EpochReport | None]) -> EpochReport | None:
    """Runs an epoch. Where a run that died has recorded other rows for it, which nobody saw, these are dropped first."""
    try:
        return advance()
    except DeterminismError as error:
        if error.stage not in {stage.name for stage in job.flow.sources}:
            raise
        last = job.status().last_sealed
        job.rewind(BEFORE_FIRST_EPOCH if last is None else last)
        return advance()


def _row_counts(job: Job, pipeline: Pipeline) -> dict[str, int]:
    """Returns how many rows each dataset has."""
    if job.status().last_sealed is None:
        return {}
    return {name: job.read(name).count() for name, one in pipeline.datasets.items() if one.kind != TEMPORARY_VIEW}
