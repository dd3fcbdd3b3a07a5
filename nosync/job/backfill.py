"""Backfilling: running all epochs that given rows are of, many in each Spark job, and sealing each on its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from nosync.flow.bound_flow import Step
from nosync.job.backfill_range import check_counted, epochs_to_run
from nosync.job.delivery import Delivery
from nosync.job.epoch_runs import EpochRuns
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.replay import Progress
from nosync.job.reports import EpochReport, epoch_report
from nosync.lsm.platform.notebook import facts_html
from nosync.runtime.epoch_batches import MOST_GIVEN_ROWS, ScheduledEpoch, batch_epochs

if TYPE_CHECKING:
    from nosync.spark.epoch_inputs import GivenEpochs


@dataclass(frozen=True)
class BackfillReport:
    """Says what a backfill did."""

    first: int
    last: int
    """The epochs that ran; `last` is below `first` where all were sealed before."""
    sealed_before: int
    """Epochs that rows were given of and that were sealed already, with as many rows."""
    rows_in: int
    """Rows recorded by the sources."""
    layers_computed: int
    layers_reused: int
    """Layers that were recorded already, by an attempt that did not finish."""
    bytes_recorded: int
    seconds: float

    @property
    def epochs(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        before = f"; {self.sealed_before} were sealed before" if self.sealed_before else ""
        if not self.epochs:
            return f"backfill: nothing to run{before}"
        return (
            f"backfill: {self.epochs} epochs, {self.first} to {self.last}, {self.rows_in:,} rows in {self.seconds:.2f} s; "
            f"{self.layers_computed} layers computed, {self.layers_reused} reused, {self.bytes_recorded:,} bytes recorded{before}"
        )

    def _repr_html_(self) -> str:
        return facts_html("backfill", {f.name: getattr(self, f.name) for f in fields(self)})


class Backfill:
    """Runs the epochs of one timeline that rows are given of."""

    def __init__(
        self, position: Position, versions: FlowVersions, runs: EpochRuns, delivery: Delivery, shards: int
    ) -> None:
        self._position, self._versions, self._runs, self._delivery = position, versions, runs, delivery
        self._shards = shards

    def run(self, given: GivenEpochs, max_gap: int, progress: Progress | None) -> BackfillReport:
        """Runs the epochs that are not sealed yet. `max_gap`, `progress`: as `Job.backfill` has them."""
        started = time.perf_counter()
        counts = given.counts()
        last, sources = self._position.last_sealed(), [stage.name for stage in self._versions.flow.sources]
        todo = epochs_to_run(counts, sources, self._position.manifest, last, max_gap)
        if last is not None and last in counts:
            self._delivery.deliver(last)  # to sinks that an attempt before left without it
        reports = self._run(todo, {t: sum(counts.get(t, {}).values()) for t in todo}, given, progress)
        return BackfillReport(
            first=todo.start,
            last=todo.stop - 1,
            sealed_before=sum(t not in todo for t in counts),
            rows_in=sum(report.rows_in for report in reports),
            layers_computed=sum(report.layers_computed for report in reports),
            layers_reused=sum(report.layers_reused for report in reports),
            bytes_recorded=sum(report.bytes_recorded for report in reports),
            seconds=time.perf_counter() - started,
        )

    def _run(
        self, todo: Sequence[int], rows: Mapping[int, int], given: GivenEpochs, progress: Progress | None
    ) -> list[EpochReport]:
        """Runs epochs that have so many rows, and seals them as they come."""
        flow = self._versions.flow
        epochs = (ScheduledEpoch(Step(t, {}, frozenset()), flow, self._shards, rows[t]) for t in todo)
        reports: list[EpochReport] = []
        for batch in batch_epochs(epochs, MOST_GIVEN_ROWS):
            for t, found in self._runs.run_together(batch, given):
                report = epoch_report(t, found, flow, seconds=0.0)
                check_counted(t, rows[t], report.rows_in)
                self._runs.finish(flow, t, found)
                reports.append(report)
                if progress:
                    progress(len(reports), len(todo))
        return reports
