"""Recovering what is lost: look, plan, compute, seal again, and look once more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from nosync.flow.bound_flow import Step
from nosync.job.epoch_layout import EpochLayout
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.recovery_planner import Cell, RecordedCells, RecoveryPlan, lost_manifest, plan
from nosync.job.replay import Progress
from nosync.job.reports import Recovered, RecoveryReport, Stopwatch
from nosync.job.sealing import Sealing
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.model.timestamp import epoch_of
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.trace.directory import LayerDirectory
from nosync.runtime.epoch_batches import ScheduledEpoch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from nosync.runtime.segment_task import Report
    from nosync.spark.runner import Runner

    Inputs = Mapping[str, DataFrame]
    GivenAgain = Callable[[int], Inputs] | Mapping[int, Inputs]

_LOOKS = 4
"""How often a recovery looks for what is missing: what it brought back may be lost again while it runs."""


class Recovery:
    """Brings back lost layers of one timeline."""

    def __init__(
        self,
        node: StoreBackend,
        directory: LayerDirectory,
        position: Position,
        versions: FlowVersions,
        layout: EpochLayout,
        sealing: Sealing,
        runner: Runner,
        check_inputs: Callable[[Inputs], Inputs],
    ) -> None:
        """`check_inputs`: returns inputs that are given again, or raises where they are not what the flow declares."""
        self._node, self._directory, self._position = node, directory, position
        self._versions, self._layout, self._sealing, self._runner = versions, layout, sealing, runner
        self._check_inputs = check_inputs

    def run(
        self,
        inputs: GivenAgain | None,
        chosen: Collection[str],
        *,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> RecoveryReport:
        """Recovers what the chosen stages need. `inputs`, `verify`: as `Job.recover` has them."""
        clock = Stopwatch()
        self._position.check_open()
        if verify:
            self._node.check()
        done = Recovered()
        for _ in range(_LOOKS):
            missing, fetched = self._missing()
            if not done.looks:
                done.rolled_back_to = self._node.safe_point(self._position.branch)
            wanted = done.found(missing, fetched, chosen)
            clock.lap("inspect")
            if not wanted and done.looks > 1:
                break
            ran = self._run_once(wanted, inputs, done, clock, progress)
            if not ran:
                break
        else:  # it ran each time: what there is now nobody has looked at
            missing, fetched = self._missing()
            done.left(done.found(missing, fetched, chosen))
            clock.lap("inspect")
        return done.report(
            target=self._position.last_sealed(),
            lost_manifest=lost_manifest(self._node, self._position.branch),
            seconds=clock.laps,
        )

    def plan(self, wanted: list[Cell], *, can_replay: bool | Callable[[int], object] = False) -> RecoveryPlan:
        """Returns what recomputing the wanted layers takes. `can_replay`: whether inputs can be given again."""
        return plan(
            self._versions.flow,
            RecordedCells(self._directory.descriptions, self._node.since()),
            wanted,
            histories=self._node.histories(self._position.branch),
            flow_at=self._versions.at,
            can_replay=lambda source, t: bool(can_replay(t) if callable(can_replay) else can_replay),
        )

    def _run_once(
        self,
        wanted: list[Cell],
        inputs: GivenAgain | None,
        done: Recovered,
        clock: Stopwatch,
        progress: Progress | None,
    ) -> bool:
        """Computes the wanted layers as far as possible, and seals their epochs again. False: there was nothing to run."""
        can_replay = inputs.__contains__ if isinstance(inputs, Mapping) else inputs is not None
        recovery = self.plan(wanted, can_replay=can_replay)
        done.planned(recovery)
        clock.lap("plan")
        reports_at: dict[int, dict[tuple[str, int], Report]] = {}
        since = epoch_of(self._node.since())
        epochs = (self._scheduled(step, since) for step in recovery.steps)
        for one, reports in self._runner.run_all(
            epochs, lambda step: self._given_again(step, inputs), self._position.branch, self._position.instance
        ):
            reports_at[one.step.t] = reports
            done.ran(reports.values())
            self._sealing.drop_rounds(one.step.t)
            if progress:
                progress(len(reports_at), len(recovery.steps))
        clock.lap("compute")
        hopeless = {cell.t for cell in recovery.impossible}
        for t in sorted({step.t for step in recovery.steps} - hopeless):
            self._sealing.seal_again(t, reports_at[t])
        self._node.sync()
        clock.lap("seal")
        return bool(recovery.steps)

    def _scheduled(self, step: Step, since: int) -> ScheduledEpoch:
        flow, t = self._versions.at(step.t), step.t
        if any(flow.stages[name].loop for name in step.compute):
            self._sealing.drop_rounds(t, at_once=True)  # or those that wait for their grace to end vanish in the middle
        shards, rows = self._layout.shards_at(flow, t), self._layout.rows_at(t)
        return ScheduledEpoch(step, flow, shards, rows, is_retained=t >= since)

    def _missing(self) -> tuple[list[MissingLayer], int]:
        """Returns what is lost and does not come from peers, and how much of what was lost came."""
        before = self._node.lost(self._position.branch)  # what a daemon misses it fetches as soon as it looks
        self._node.make_durable_now()
        left = self._node.lost(self._position.branch)
        missing = self._node.fetch(left)
        # A file may stand there that is another one than the manifest lists: it would be taken for what is missing.
        self._node.recheck([m.entry.id for m in missing])
        return missing, sum(self._directory.holds(m.entry.id) for m in {*before, *left}.difference(missing))

    def _given_again(self, step: Step, inputs: GivenAgain | None) -> Inputs:
        if not step.needs_input:
            return {}
        assert inputs is not None, "the planner asks for input only where it can be replayed"
        return self._check_inputs(inputs[step.t] if isinstance(inputs, Mapping) else inputs(step.t))
