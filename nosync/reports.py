"""What a job says of what it did: reports of epochs and of recoveries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from nosync.lsm.html import facts_html, rows_html
from nosync.plan import BoundFlow
from nosync.segment import Report


@dataclass(frozen=True)
class EpochReport:
    """What one epoch did."""

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
    """What `recover` found and did. Timestamps are epochs, None where there is none."""

    rolled_back_to: int | None
    """The last safe complete timestamp that was left."""
    target: int | None
    """The newest sealed timestamp, which everything is restored up to."""
    lost: int
    """Layers that manifests list and that were gone or damaged here, counted per stage, shard and epoch."""
    fetched: int
    """Of these, what came from peers, which this call waits for. A daemon fetches what it misses by itself, mostly before."""
    recomputed: int
    reused: int
    """Recorded layers that recomputation read instead of computing them."""
    unrecoverable: Mapping[str, str]
    """Layers that could not be had back, with the reason."""
    seconds: Mapping[str, float]
    """By part: inspect, plan, compute, seal."""

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
        return "\n".join(lines)


def _or_none(t: int | None) -> str:
    return "nothing" if t is None else str(t)


class Stopwatch:
    """Seconds by part of the work."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._at
        self._at = now


def rows_in(reports: Mapping[tuple[str, int], Report], flow: BoundFlow) -> int:
    """Rows recorded by the sources in an epoch."""
    sources = {stage.name for stage in flow.sources}
    return sum(report.rows for (stage, _), report in reports.items() if stage in sources)


def epoch_report(t: int, reports: Mapping[tuple[str, int], Report], flow: BoundFlow, seconds: float) -> EpochReport:
    """Sums up what the tasks of an epoch reported."""
    computed = [report for report in reports.values() if report.computed]
    return EpochReport(
        t=t,
        rows_in=rows_in(reports, flow),
        layers_computed=len(computed),
        layers_reused=len(reports) - len(computed),
        bytes_recorded=sum(report.size_bytes for report in computed),
        seconds=seconds,
        record_s=sum(report.record_s for report in computed),
        computed=frozenset((report.stage, report.shard) for report in computed),
    )
