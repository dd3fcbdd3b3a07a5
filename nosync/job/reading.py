"""Reading what a job recorded, as DataFrames, and explaining it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nosync.flow.bindings import visible
from nosync.flow.bound_stage import BoundStage
from nosync.flow.kinds import FINAL, WINDOW
from nosync.flow.views import View, views_below
from nosync.job.branch_checks import recorded_schema
from nosync.job.explain import Explanation, explain
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.replay import Progress
from nosync.job.view_reports import ViewCheck
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.errors import NotAvailableError, UnknownStageError
from nosync.lsm.manifests.lost_ends import check_there
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.model.history import History, check_not_replaced, replaced_at
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, pack
from nosync.lsm.platform.nearest import did_you_mean, named_stages
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.lsm.store.stage_views import check_listed
from nosync.lsm.store.store import Store
from nosync.lsm.trace.change_feed import EXPIRE
from nosync.replication.client.location import StoreLocation
from nosync.runtime.epoch_plan import for_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nosync.spark.derived import DerivedReader
    from nosync.spark.stage_reader import StageReader


class Reading:
    """Reads the stages of a flow on one timeline."""

    def __init__(
        self,
        spark: SparkSession,
        store: Store,
        location: StoreLocation,
        position: Position,
        versions: FlowVersions,
        settings: Mapping[str, str],
    ) -> None:
        """`settings`: what expressions mean, by `expression_settings`."""
        self._spark, self._store, self._node = spark, store, store.node
        self._location, self._settings = location, settings
        self._position, self._versions = position, versions

    def sealed(self, as_of: AsOf | None) -> int:
        """Returns the epoch, or the newest one for None. Raises NotAvailableError where it is not sealed."""
        branch = self._position.branch
        last = self._position.last_sealed()
        t = None if as_of is None else self._store.epoch_as_of(as_of, branch)
        check_there(self._node.timelines, branch, t)
        if last is None:
            raise NotAvailableError("no epoch was run yet: call advance() first")
        if t is None:
            return last
        if t > last:
            raise NotAvailableError(f"epoch {t} was not run yet; the newest is {last}")
        return t

    def stage(self, name: str, as_of: int | None = None) -> BoundStage:
        """Returns a stage with its schemas, and its key, as they are, or as they were at an epoch. Raises
        UnknownStageError.
        """
        if as_of is not None:
            history = self._node.histories(self._position.branch).get(name, ())
            return self._as_recorded(self.stage(name), history, as_of)
        flow = self._versions.flow
        if name not in flow.stages:
            raise UnknownStageError(
                f"no stage {name!r} in {flow.name}; stages: {named_stages(flow.stages)}{did_you_mean(name, flow.stages)}"
            )
        return flow.stages[name]

    def state(self, stage: str, as_of: AsOf | None) -> DataFrame:
        """Returns the state of a stage as of an epoch."""
        t = self.sealed(as_of)
        return self._reader(stage, t).state(self._session(), t)

    def verify(self, view: View, as_of: AsOf | None) -> ViewCheck:
        """Returns how a view as of an epoch differs from Spark's query over its inputs."""
        from nosync.spark.plans.verifying import compare  # noqa: PLC0415 - the store works without pyspark

        t = self.sealed(as_of)
        views = self._versions.declared.views

        def read(session: SparkSession, stage: str) -> DataFrame:
            return self._reader(stage, t).state(session, t)

        for name in views_below(view, views):
            self._check_comparable(view.name, views[name], t)
        return ViewCheck(view.name, int(t), *compare(self._session(), self._settings, view, views, read))

    def _check_comparable(self, asked: str, view: View, t: int) -> None:
        """Raises NotAvailableError where a query over all rows does not say what a view has, which goes by when they came."""
        stages = [stage for stage in self._versions.declared.stages if stage.name in view.stages]
        timed = [stage for stage in stages if stage.arguments.event_times]
        other = next((stage for stage in timed if stage.kind != WINDOW or view.emit == FINAL), None)
        if other is not None:
            raise NotAvailableError(
                f"view {asked} cannot be compared: what {other.name} has given depends on the watermark, and so on the epochs "
                "in which rows came. A replay gives the same rows again"
            )
        for stage in timed:
            late = self._reader(stage.late.name, t).state(self._session(), t).count()
            if late:
                raise NotAvailableError(
                    f"view {asked} cannot be compared: {late:,} rows came after their window had closed "
                    f"({stage.late.name}), and a query over all rows counts them"
                )

    def changes(self, stage: str, after: AsOf, until: AsOf, *, include_expired: bool = False) -> DataFrame:
        """Returns the change feed of a stage."""
        after, until = self._store.range_of(after, until, self._position.branch)
        until = self.sealed(until)
        found = self._reader(stage, until, after).changes(self._session(), after, until)
        if include_expired or not self.stage(stage).expires:
            return found
        return found.where(f"{CHANGE_TYPE_COLUMN} <> '{EXPIRE}'")

    def _session(self) -> SparkSession:
        """Returns the session. Raises FlowError where it was stopped."""
        from nosync.spark.session import check_running  # noqa: PLC0415 - the store works without pyspark

        check_running(self._spark)
        return self._spark

    def _reader(self, stage: str, t: int, changes_after: int | None = None) -> StageReader | DerivedReader:
        """Returns what reads a stage as of an epoch, or its changes up to there."""
        from nosync.spark.derived import DerivedReader  # noqa: PLC0415
        from nosync.spark.schemas import check_readable  # noqa: PLC0415
        from nosync.spark.stage_reader import StageReader  # noqa: PLC0415 - the store works without pyspark

        below = self.stage(stage)
        expressions: list[BoundStage] = []
        while not below.recorded and below.in_jvm and below.loop is None:
            expressions.insert(0, below)
            below = self._versions.flow.stages[below.inputs[0]]
        if not below.recorded or below.of_rounds:
            raise NotAvailableError(why_not_recorded(stage, below))
        check_readable(below)
        check_listed(self._node.timelines, below.name, t, self._position.branch)
        history = self._node.histories(self._position.branch).get(below.name, ())
        if changes_after is not None:
            check_not_replaced(history, changes_after, t, f"stage {stage}")
        recorded = self._as_recorded(below, history, t)
        if expressions and recorded is not below:
            raise NotAvailableError(
                f"stage {stage} is not recorded, and what it is computed from, {below.name}, had other columns as of epoch "
                f"{t}: read {below.name}"
            )
        reader = StageReader(self._location, for_tasks(recorded), history)
        return DerivedReader(reader, tuple(expressions), self._settings) if expressions else reader

    def _as_recorded(self, stage: BoundStage, history: History, t: int) -> BoundStage:
        """Returns a stage as the layers of an epoch have it. Before it began anew with another query it may have had another
        key and other columns.
        """
        begin = replaced_at(history, END_OF_TIME)
        if begin is None or pack(t) >= begin:
            return stage
        manifest = self._position.manifest(t)
        entries = manifest.entries if manifest is not None else ()
        trace = next((entry.id.trace for entry in entries if entry.id.trace.stage == stage.name), None)
        if trace is None:
            return stage
        key, schema = recorded_schema(trace, self._store.directory)
        changing = bool(key) or CHANGE_TYPE_COLUMN in schema.names
        return replace(stage, key=key, schema=schema, output=visible(schema), changing=changing)

    def shared_until(self, other: Position, stage: str) -> int:
        """Returns the last epoch up to which a stage's layers are the same files at another position; -1: none are."""
        here, there = self._position.manifests(), other.manifests()
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

    def explain(self, stage: str, key: Mapping[str, Any], t: AsOf | None, progress: Progress | None) -> Explanation:
        """Returns the input rows that led to the value of a key as of an epoch."""
        from nosync.spark.expressions import evaluator  # noqa: PLC0415 - the store works without pyspark

        at = self.sealed(t)
        flow, evaluate = self._versions.at(at), evaluator(self._spark, self._settings)
        branch = self._position.branch
        return explain(flow, self._store, stage, key, at, evaluate=evaluate, branch=branch, progress=progress)


def why_not_recorded(stage: str, below: BoundStage) -> str:
    """Says why a stage cannot be read. `below`: what it would be computed from by expressions alone, maybe itself."""
    if below.loop is not None:
        return (
            f"stage {stage} is computed in the rounds of the loop {below.loop}, which are not kept: read {below.loop}"
        )
    of = "" if below.name == stage else f" is computed from {below.name}, which"
    return (
        f"stage {stage}{of} is not recorded (persist='none'), and a {below.kind} is not an expression over what is: read what "
        "it is computed from, or persist it"
    )
