"""Runs the parts of an epoch, one after the other: the rounds of its loops, and all the rest.

What runs a part is given: a Spark job (nosync.spark.epoch_run), or this process (nosync.runtime.local_part).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from nosync.flow.bound_flow import BoundFlow, Loop
from nosync.flow.bound_stage import BoundStage
from nosync.lsm.errors import FlowError, NosyncError
from nosync.lsm.model.history import view_at
from nosync.lsm.model.layer import Description, Shard, TraceId, of_round
from nosync.lsm.model.timestamp import Time, pack, round_of
from nosync.operators.loops import next_phase, recorded_changes, rounds_done
from nosync.replication.client.location import open_directory
from nosync.runtime.epoch_plan import EpochPlan, Part, Reports
from nosync.runtime.segment_task import Report
from nosync.runtime.shard_state import nothing_held

RunPart = Callable[[Part, frozenset[str]], Collection[bytes]]
"""Runs a part, without the stages that reported before. Returns what its tasks report."""


def run_parts(flow: BoundFlow, plans: Sequence[EpochPlan], run_part: RunPart) -> dict[int, Reports]:
    """Runs all parts of an epoch, or of several that have no loops. Returns for each epoch a report of every
    (stage, shard) that was computed or yielded.
    """
    run = _EpochRun(flow, plans, run_part)
    for loop in flow.loops.values():
        run.loop(loop)
    run.rest()
    for plan in plans:
        _check_reported(flow, plan, run.reports[plan.t])
    return run.reports


def _check_reported(flow: BoundFlow, plan: EpochPlan, reports: Reports) -> None:
    """Raises NosyncError where a task that was to compute or find a layer did not say so."""
    if plan.compute is not None:
        wanted = [(name, i) for name, shards in plan.compute.items() for i in shards]
    else:
        names = [stage.name for stage in flow.recorded if stage.name not in plan.skip]
        wanted = [(name, i) for name in names for i in range(plan.shards)]
    silent = [at for at in wanted if at not in reports]
    if silent:
        raise NosyncError(f"epoch {plan.t}: no task ran for {silent[:3]} ({len(silent)} in all); run the epoch again")


class _EpochRun:
    """Runs the parts of one epoch, one after the other; or the one of several epochs."""

    def __init__(self, flow: BoundFlow, plans: Sequence[EpochPlan], run_part: RunPart) -> None:
        assert len(plans) == 1 or not flow.loops, "such epochs run alone"
        self._flow, self._plan, self._run_part = flow, plans[0], run_part
        self.reports: dict[int, Reports] = {plan.t: {} for plan in plans}
        self._rounds: dict[str, int] = {}
        self._directory = open_directory(replace(self._plan.location, store_id=""))

    def rest(self) -> None:
        """Runs everything but the rounds of loops."""
        self._collect(Part(rounds=self._rounds))

    def loop(self, loop: Loop) -> None:
        """Runs the rounds of a loop; those that an attempt before left behind are not run again."""
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
            found = self._collect(Part(loop.name, round, phase, self._rounds))
            counts.append(sum(report.changes for report in found if report.stage == loop.name))
            phase = next_phase(phase, round, counts[-1])
        self._rounds[loop.name] = len(counts)

    def _recorded_rounds(self, loop: Loop) -> list[int]:
        """Returns how many rows changed in each of the first rounds that are recorded completely."""
        counts: list[int] = []
        stages = self._flow.in_loop(loop.name)
        variable = self._flow.stages[loop.name]
        t, history = self._plan.t, self._plan.histories.get(loop.name, ())
        while all(self._has(stage, of_round(t, len(counts))) for stage in stages):
            round, changed = len(counts), 0
            for i in range(self._plan.shards):
                id = TraceId(variable.name, variable.fingerprint, Shard(i, self._plan.shards))
                view = view_at(history, id, pack(t), self._flow.key_groups)
                is_anew = variable.bootstrap_at == t
                before = nothing_held(variable, id, self._flow.key_groups) if is_anew else None
                trace = self._directory.open_rounds(view, t, round + 1, before)
                d = of_round(t, round)
                changed += len(recorded_changes(trace, variable, Time(d.lower - 1), Time(d.upper - 1)))
            counts.append(changed)
        return counts

    def _has(self, stage: BoundStage, d: Description) -> bool:
        """Returns whether every shard has a layer for a round (that very one), or for the epoch."""
        ids = [TraceId(stage.name, stage.fingerprint, Shard(i, self._plan.shards)) for i in range(self._plan.shards)]
        found = [self._directory.descriptions(id) for id in ids]
        if round_of(d.upper):
            return all(d in of_shard for of_shard in found)
        return all(any(o.covers(d) for o in of_shard) for of_shard in found)

    def _collect(self, part: Part) -> list[Report]:
        """Runs a part, and keeps what its tasks report of the epoch."""
        texts = self._run_part(part, self._plan.skip.union(name for of in self.reports.values() for name, _ in of))
        found = [Report.from_json(text) for text in texts]
        for report in found:
            at = (report.stage, report.shard)
            if part.round is not None and self._flow.stages[report.stage].loop == part.loop:
                continue  # of a round, not of the epoch
            # A segment with several exits runs once for each; the first to come computes, the others find its layers.
            reports = self.reports[report.t]
            reports[at] = max(report, reports.get(at, report), key=lambda r: r.computed)
        return found
