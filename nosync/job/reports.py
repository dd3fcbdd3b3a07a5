"""Reports of what a job did: those of epochs and of recoveries."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from nosync.flow.bound_flow import BoundFlow
from nosync.job.recovery_planner import Cell, RecoveryPlan
from nosync.lsm.columnar.columns import describe
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.visible import visible
from nosync.runtime.segment_task import Report, SourceSize


@dataclass(frozen=True)
class EpochReport:
    """Says what one epoch did."""

    t: int
    rows_in: int
    """Rows recorded by the sources."""
    layers_computed: int
    layers_reused: int
    """Layers that were recorded already, by an attempt that did not finish or by an earlier run."""
    bytes_recorded: int
    seconds: float
    record_s: float
    """Task time spent writing and linking layers, summed over tasks."""
    computed: frozenset[tuple[str, int]]
    """The (stage, shard) pairs whose functions ran."""
    sealed_at: datetime | None = None
    """When it was sealed, in UTC; None where that is not known: by a version that did not record it."""

    def __str__(self) -> str:
        return (
            f"epoch {self.t}: {self.rows_in:,} rows in {self.seconds:.2f} s; {self.layers_computed} layers computed, "
            f"{self.layers_reused} reused, {self.bytes_recorded:,} bytes recorded in {1000 * self.record_s:.0f} ms of task time"
        )

    def _repr_html_(self) -> str:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("t", "computed")}
        return facts_html(f"epoch {self.t}", facts)


@dataclass(frozen=True)
class RecoveryReport:
    """Says what `recover` found and did. Timestamps are epochs, None where there is none."""

    rolled_back_to: int | None
    """The last safe complete timestamp that was left."""
    target: int | None
    """The newest sealed timestamp, which everything is restored up to."""
    lost: int
    """Layers that manifests list and that were gone or damaged here, counted per stage, shard and epoch."""
    fetched: int
    """How many of these came from peers, which this call waits for. A daemon fetches most of what it misses before."""
    recomputed: int
    reused: int
    """Recorded layers that recomputation read instead of computing them."""
    unrecoverable: Mapping[str, str]
    """Layers that could not be recovered, with the reason."""
    seconds: Mapping[str, float]
    """The seconds of each part: inspect, plan, compute, seal."""

    def _repr_html_(self) -> str:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("unrecoverable", "seconds")}
        took = {f"seconds: {part}": s for part, s in self.seconds.items()}
        lost = rows_html(["unrecoverable", "why"], self.unrecoverable.items()) if self.unrecoverable else ""
        return facts_html("recovery", facts | took, lost)

    def __str__(self) -> str:
        lines = [
            f"safe up to        {_or_none(self.rolled_back_to)}  (the newest epoch is {_or_none(self.target)})",
            f"layers lost       {self.lost}",
            f"  fetched         {self.fetched}",
            f"  recomputed      {self.recomputed}",
            f"  reused for it   {self.reused}",
            f"  unrecoverable   {len(self.unrecoverable)}",
            "seconds           " + ", ".join(f"{part} {s:.2f}" for part, s in self.seconds.items()),
        ]
        lines += [f"  ! {cell}: {why}" for cell, why in self.unrecoverable.items()]
        return "\n".join(map(visible, lines))


def _or_none(t: int | None) -> str:
    return "nothing" if t is None else str(t)


class Recovered:
    """Counts what a recovery found and did so far, over as many looks as it takes."""

    def __init__(self) -> None:
        self.looks = 0
        self.rolled_back_to: int | None = None
        self._lost, self._fetched, self._recomputed, self._reused = 0, 0, 0, 0
        self._unrecoverable: dict[Cell, str] = {}

    def found(self, missing: Sequence[MissingLayer], fetched: int, chosen: Collection[str]) -> list[Cell]:
        """Counts what is missing now, and what came from peers. Returns the cells that are to be computed."""
        self.looks += 1
        cells = [Cell(m.t, m.entry.id.trace.stage, m.entry.id.trace.shard.index) for m in missing]
        wanted = [cell for cell in cells if cell.stage in chosen and cell not in self._unrecoverable]
        self._lost += fetched + (len(missing) if self.looks == 1 else len(wanted))
        self._fetched += fetched
        return wanted

    def planned(self, plan: RecoveryPlan) -> None:
        """Takes notice of what cannot be computed."""
        self._unrecoverable |= plan.impossible

    def ran(self, reports: Iterable[Report]) -> None:
        """Counts what an epoch's tasks computed, and what they read instead."""
        for report in reports:
            self._recomputed += report.computed
            self._reused += not report.computed

    def left(self, cells: Iterable[Cell]) -> None:
        """Notes cells that were computed again and again, and are missing all the same."""
        why = (
            f"was lost again each time that it was computed ({self.looks} looks); does something else delete its files?"
        )
        self._unrecoverable |= dict.fromkeys(cells, why)

    def report(
        self,
        *,
        target: int | None,
        lost_manifest: Mapping[str, str],
        seconds: Mapping[str, float],
    ) -> RecoveryReport:
        unrecoverable = {str(cell): why for cell, why in self._unrecoverable.items()}
        return RecoveryReport(
            self.rolled_back_to, target, self._lost, self._fetched, self._recomputed, self._reused,
            unrecoverable | dict(lost_manifest), seconds,
        )  # fmt: skip


class Stopwatch:
    """Measures the seconds of each part of the work."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._at
        self._at = now


def job_html(flow: BoundFlow, facts: Mapping[str, object]) -> str:
    """Returns what a notebook shows of a job: what is known of it, and the stages that it records."""
    stages = [(s.name, s.kind, ", ".join(s.inputs), ", ".join(s.key), describe(s.output)) for s in flow.recorded]
    table = rows_html(["stage", "kind", "inputs", "key", "columns"], stages)
    return facts_html(f"nosync.Job {flow.name}", facts, table)


def epoch_report(
    t: int,
    reports: Mapping[tuple[str, int], Report],
    flow: BoundFlow,
    seconds: float,
    sealed_at: datetime | None = None,
) -> EpochReport:
    """Sums up what the tasks of an epoch reported."""
    computed = [report for report in reports.values() if report.computed]
    return EpochReport(
        t=t,
        rows_in=SourceSize.of(reports, flow).rows,
        layers_computed=len(computed),
        layers_reused=len(reports) - len(computed),
        bytes_recorded=sum(report.size_bytes for report in computed),
        seconds=seconds,
        record_s=sum(report.record_s for report in computed),
        computed=frozenset((report.stage, report.shard) for report in computed),
        sealed_at=sealed_at,
    )
