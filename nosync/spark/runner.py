"""Runs a job's epochs on Spark: one, or as many as share a Spark job. Where daemons keep the store, with an eye on the
hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession

from nosync.flow.bound_flow import BoundFlow, Step
from nosync.lsm.errors import DeterminismError, NosyncError, ScanError, StageError, WideRowError
from nosync.lsm.facts.fencing import Instance
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.model.history import continued
from nosync.lsm.model.layer import Digest
from nosync.lsm.model.timestamp import end_of, pack
from nosync.lsm.node.api import StoreBackend
from nosync.replication.client.location import StoreLocation
from nosync.runtime.epoch_batches import ScheduledEpoch, batch_epochs
from nosync.runtime.epoch_plan import EpochPlan, Reports
from nosync.runtime.segment_task import Report, SourceSize
from nosync.spark.driver_epochs import DriverEpochs
from nosync.spark.epoch_run import run_epochs
from nosync.spark.file_shuffle import Exchanges
from nosync.spark.host_watch import HostWatch
from nosync.spark.jvm_names import remember_names

log = logging.getLogger("nosync")


class Runner:
    """Runs the epochs of one job. `everything`: whatever is not recorded is computed, not just what the steps say."""

    def __init__(
        self, spark: SparkSession, node: StoreBackend, location: StoreLocation, settings: Mapping[str, str]
    ) -> None:
        """`settings`: those of the session, while epochs run."""
        remember_names(spark)
        self._spark, self._node, self._location, self._settings = spark, node, location, settings
        self._has_wide_rows, self._may_scan, self._exchanges = False, True, Exchanges()
        self._driver = DriverEpochs()
        self._watch = HostWatch(spark, node.lost_hosts) if node.store_id else None

    def run(
        self,
        batch: Sequence[ScheduledEpoch],
        inputs: Mapping[str, DataFrame],
        branch: str,
        instance: Instance | None,
        *,
        everything: bool = False,
    ) -> dict[int, Reports]:
        """Runs epochs that go together, in one Spark job. Raises what tasks raised, and NodeLostError."""
        flow, shards, first = batch[0].flow, batch[0].shards, pack(batch[0].step.t)
        histories, timeline = self._node.histories(branch), self._node.timelines.timeline(branch)
        replaced = timeline.replaced if timeline.at is not None and first == end_of(timeline.at) else ()
        # The later ones read what the earlier ones write, before it is sealed; and what is replaced does not count.
        if everything and (len(batch) > 1 or replaced):
            begun = {
                s.name: continued(histories.get(s.name, ()), s.fingerprint, shards, first, replaces=s.name in replaced)
                for s in flow.recorded
            }
            histories = {**histories, **begun}
        plans = [
            EpochPlan(
                location=self._location,
                t=one.step.t,
                shards=shards,
                histories=histories,
                compute=None if everything else one.step.compute,
                skip=one.skip,
                timeline=timeline.id,
                instance=instance,
                sealed=_listed(self._node.timelines.manifest(one.step.t, branch), flow),
            )
            for one in batch
        ]
        try:
            if self._watch is None:
                return self._run(flow, plans, inputs)
            return self._watch.run(lambda: self._run(flow, plans, inputs))
        except DeterminismError as error:
            self._node.conflict(error, branch)
            raise

    def _run(self, flow: BoundFlow, plans: Sequence[EpochPlan], inputs: Mapping[str, DataFrame]) -> dict[int, Reports]:
        while True:
            has_wide_rows, may_scan = self._has_wide_rows, self._may_scan
            try:
                reports = run_epochs(
                    self._spark,
                    flow,
                    plans,
                    inputs,
                    has_wide_rows=has_wide_rows,
                    may_scan=may_scan,
                    exchanges=self._exchanges,
                    driver=self._driver,
                    settings=self._settings,
                )
            except WideRowError as error:
                if has_wide_rows:
                    raise
                log.warning(
                    "epoch %d: %s, as the job's later ones do; set spark.sql.execution.arrow.maxBytesPerBatch to have them "
                    "counted from the start", plans[0].t, error,
                )  # fmt: skip
                self._has_wide_rows = True
            except ScanError as error:
                if not may_scan:
                    raise
                log.info("epoch %d: %s; the JVM reads them, as those of the job's later epochs", plans[0].t, error)
                self._may_scan = False
            else:
                size = SourceSize.of(reports[plans[-1].t], flow)
                self._driver.note_size(size)
                self._exchanges.note_rows(size.rows)
                return reports

    def run_together(
        self,
        batch: Sequence[ScheduledEpoch],
        inputs: Mapping[str, DataFrame],
        branch: str,
        instance: Instance | None,
        *,
        everything: bool = False,
    ) -> dict[int, Reports] | None:
        """Runs several epochs together, as `run`. Returns None where they have to run one by one, for there is only
        one, or together they failed.
        """
        if len(batch) == 1:
            return None
        try:
            return self.run(batch, inputs, branch, instance, everything=everything)
        except NosyncError as error:
            level = logging.INFO if isinstance(error, StageError) else logging.WARNING
            log.log(level, "epochs %d to %d run one by one: %s", batch[0].step.t, batch[-1].step.t, error)
            return None

    def run_all(
        self,
        epochs: Iterable[ScheduledEpoch],
        inputs_at: Callable[[Step], Mapping[str, DataFrame]],
        branch: str,
        instance: Instance | None,
        *,
        everything: bool = False,
    ) -> Iterator[tuple[ScheduledEpoch, Reports]]:
        """Runs epochs in order, with as few Spark jobs as that takes; with each comes what its tasks reported.

        Where several fail together they run one by one, so that those before the failure come, and then what `run`
        raises.
        """
        for batch in batch_epochs(epochs):
            found = self.run_together(batch, {}, branch, instance, everything=everything)
            for one in batch:
                if found is not None:
                    yield one, found[one.step.t]
                    continue
                reports = self.run([one], inputs_at(one.step), branch, instance, everything=everything)[one.step.t]
                if len(batch) > 1:
                    reports = {at: _counted_as_computed(one, report) for at, report in reports.items()}
                yield one, reports


def _listed(manifest: Manifest | None, flow: BoundFlow) -> dict[tuple[str, int], Digest]:
    """Returns what a manifest lists of the traces that the flow writes.

    On a branch, epochs before the fork list those of other code.
    """
    entries = manifest.entries if manifest is not None else ()
    of_flow = {stage.name: stage.fingerprint for stage in flow.recorded}
    return {
        (e.id.trace.stage, e.id.trace.shard.index): e.digest
        for e in entries
        if of_flow.get(e.id.trace.stage) == e.id.trace.fingerprint
    }


def _counted_as_computed(one: ScheduledEpoch, report: Report) -> Report:
    """Returns the report with what was to be computed as computed: it was, if only by the attempt that failed."""
    if one.step.compute and report.shard not in one.step.compute.get(report.stage, ()):
        return report
    return replace(report, computed=True)
