"""Running epochs: one Spark job for each round of a loop, and one for all the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from nosync.flow.bound_flow import BoundFlow, Loop
from nosync.flow.bound_stage import BoundStage
from nosync.lsm.errors import FlowError, NosyncError
from nosync.lsm.model.history import view_at
from nosync.lsm.model.layer import Description, Shard, TraceId, of_round
from nosync.lsm.model.timestamp import Time, pack, round_of
from nosync.operators.loops import next_phase, recorded_changes, rounds_done
from nosync.replication.client.location import open_directory
from nosync.runtime.segment_task import Report
from nosync.spark.arrow_transfer import handover
from nosync.spark.epoch_job import EpochJob, Work
from nosync.spark.epoch_plan import EpochPlan, Part, Reports
from nosync.spark.errors import task_errors
from nosync.spark.file_shuffle import Exchanges
from nosync.spark.parquet_inputs import files_to_scan
from nosync.spark.session import (
    EXCHANGE_ENABLED,
    SCAN_ENABLED,
    conf_set,
    in_own_zone,
    is_enabled,
    session_settings,
    turn_of,
)

_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_RULES_TO_EXCLUDE = (
    # It would drop the tasks over an empty input, which have empty layers to record.
    "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
)


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
        run = _EpochRun(Work(spark, flow, plans, planned, over, files, by_files))
        with settings_for_epochs(spark, {**over.settings, **settings}):
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
        raise NosyncError(
            f"epoch {plan.t}: Spark ran no task for {silent[:3]} ({len(silent)} in all); run the epoch again"
        )


class _EpochRun:
    """Runs the Spark jobs of one epoch, one after the other; or the one of several epochs."""

    def __init__(self, work: Work) -> None:
        assert len(work.plans) == 1 or not work.flow.loops, "such epochs run alone"
        self._work, self._flow, self._plan = work, work.flow, work.plans[0]
        self.reports: dict[int, Reports] = {plan.t: {} for plan in work.plans}
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
                trace = self._directory.open_rounds(view, t, round + 1)
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
        """Runs a Spark job, and keeps what its tasks report of the epoch."""
        job = EpochJob(self._work, part)
        try:
            texts = job.run(self._plan.skip.union(name for of in self.reports.values() for name, _ in of))
        finally:
            job.release()
        found = [Report.from_json(text) for text in texts]
        for report in found:
            at = (report.stage, report.shard)
            if part.round is not None and self._flow.stages[report.stage].loop == part.loop:
                continue  # of a round, not of the epoch
            # A segment with several exits runs once for each; the first to come computes, the others find its layers.
            reports = self.reports[report.t]
            reports[at] = max(report, reports.get(at, report), key=lambda r: r.computed)
        return found


def settings_for_epochs(spark: SparkSession, more: Mapping[str, str]) -> AbstractContextManager[None]:
    """Sets what the session needs while an epoch is planned and run; the user's come back afterwards."""
    excluded = spark.conf.get(_EXCLUDED_RULES, None)
    rules = ",".join(filter(None, [excluded, *_RULES_TO_EXCLUDE]))
    return conf_set(spark, {**session_settings(), **more, _EXCLUDED_RULES: rules})
