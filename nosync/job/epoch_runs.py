"""Running epochs on rows that are given: check, keep the rows, run, seal, give the sinks what changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nosync.flow.bound_flow import BoundFlow, Step
from nosync.job.delivery import Delivery
from nosync.job.epoch_layout import EpochLayout
from nosync.job.flow_versions import FlowVersions
from nosync.job.kept_inputs import KeptInputs
from nosync.job.position import Position
from nosync.job.recovery import Recovery
from nosync.job.reports import EpochReport, RecoveryReport, epoch_report
from nosync.job.sealing import Sealing
from nosync.job.stream_checks import (
    BATCHES,
    STREAM_SOURCES,
    STREAMS_FROM,
    batches_of,
    check_batch,
    check_stream,
    in_order_of_checkpoint,
    streamed_from,
)
from nosync.lsm.errors import DeterminismError, InvalidInputError, NodeLostError, NosyncError, OutOfOrderError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.lost_ends import lost_begin
from nosync.lsm.model.timestamp import pack
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.replication.client.fetching_directory import MISSING_LAYER_ERRORS
from nosync.runtime.epoch_batches import ScheduledEpoch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from nosync.runtime.segment_task import Report
    from nosync.spark.epoch_inputs import GivenEpochs
    from nosync.spark.runner import Runner

    Reports = dict[tuple[str, int], Report]

log = logging.getLogger("nosync")

_ATTEMPTS = 4
"""How often an epoch is run where hosts are lost while it runs."""


class EpochRuns:
    """Runs epochs of one timeline, and seals them."""

    def __init__(
        self,
        node: StoreBackend,
        position: Position,
        versions: FlowVersions,
        layout: EpochLayout,
        sealing: Sealing,
        delivery: Delivery,
        recovery: Recovery,
        runner: Runner,
        kept: KeptInputs,
        check_inputs: Callable[[Mapping[str, DataFrame]], Mapping[str, DataFrame]],
        recoveries: list[RecoveryReport],
    ) -> None:
        """`check_inputs`: returns inputs, or raises where they are not what the flow declares. `recoveries`: gets the
        report of each recovery that an epoch took.
        """
        self._node, self._position, self._versions, self._layout = node, position, versions, layout
        self._sealing, self._delivery, self._recovery = sealing, delivery, recovery
        self._runner, self._kept = runner, kept
        self._check_inputs, self._recoveries = check_inputs, recoveries

    def advance(self, t: int, inputs: Mapping[str, DataFrame], came_by: Mapping[str, Any] | None = None) -> EpochReport:
        """Runs the next epoch, and seals it. `came_by`: how its rows came, which the manifest says."""
        started = time.perf_counter()
        self._position.check_open()
        self._check_next(t)
        checked = self._check_inputs(inputs)
        _check_have_rows(inputs)
        newest = self._versions.flow
        flow = newest if self._position.manifest(t) is None else self._versions.at(t)
        self._kept.keep(t, lambda: checked)
        reports = self._run(flow, t, checked)
        self.finish(flow, t, reports, came_by)
        seconds = time.perf_counter() - started
        return epoch_report(t, reports, newest, seconds, self._position.sealed_at(t))

    def check_stream(self, checkpoint: str | Path, first: int, last_batch: Callable[[], int | None]) -> None:
        """Raises FlowError where the batches of a stream, from epoch `first` on, do not follow what is sealed.

        `last_batch`: returns the last batch of the checkpoint that was committed.
        """
        pack(first)
        last = self._position.last_sealed()
        before = None if last is None else streamed_from(self._versions.manifest(last))
        check_stream(checkpoint, first, last, before, last_batch)

    def stream_sources(self, names: Sequence[str], checkpoint: str | Path, begun: int | None) -> list[str]:
        """Returns the sources of a stream in the order that its checkpoint has them in. See `in_order_of_checkpoint`."""
        last = self._position.last_sealed()
        manifest = None if last is None else self._versions.manifest(last)
        declared = [source.name for source in self._versions.flow.sources]
        return in_order_of_checkpoint(names, declared, manifest, checkpoint, begun, last)

    def advance_batch(self, first: int, batch: int, rows: Mapping[str, DataFrame]) -> EpochReport:
        """Runs the epoch that a batch of a stream is. `first`: the epoch of the stream's first batch."""
        t, last = first + batch, self._position.last_sealed()
        check_batch(batch, t, last)
        sealed = None if t != last else self._versions.manifest(t)
        if sealed is not None and sealed.timeline != self._position.timeline:
            # Spark gives its last batch again, which other code sealed before an upgrade: it is not run by this one.
            self._delivery.deliver(t)
            return epoch_report(t, {}, self._versions.flow, 0.0, self._position.sealed_at(t))
        return self.advance(t, rows, {STREAMS_FROM: first, STREAM_SOURCES: list(rows)})

    def last_batches(self) -> Mapping[str, int]:
        """Returns the last batch of each query that `advance_query` sealed."""
        last = self._position.last_sealed()
        return {} if last is None else batches_of(self._versions.manifest(last))

    def advance_query(self, query: str, batch: int, rows: Mapping[str, DataFrame]) -> EpochReport | None:
        """Runs the next epoch on a batch of one query of several. None: that batch, or a later one, is sealed."""
        self._position.check_open()
        if batch <= self.last_batches().get(query, -1):
            return None
        last = self._position.last_sealed()
        return self.advance(0 if last is None else last + 1, rows, {BATCHES: {query: batch}})

    def _check_next(self, t: int) -> None:
        """Raises OutOfOrderError unless an epoch is the next one, or sealed. The first epoch of a store may be any."""
        pack(t)
        last, branch = self._position.last_sealed(), self._position.branch
        if last is not None and t > last + 1:
            raise OutOfOrderError(f"epoch {t} cannot run yet: the next one is {last + 1}")
        manifests = self._position.manifests()
        if last is not None and manifests.first is not None and t < manifests.first:
            begin = lost_begin(self._node.timelines, branch)
            if begin is None or t < begin:
                raise OutOfOrderError(
                    f"epoch {t} is before the first one, {manifests.first}; the next one is {last + 1}"
                )
        self._node.check_sealable(t, branch)  # before anything runs

    def finish(self, flow: BoundFlow, t: int, reports: Reports, came_by: Mapping[str, Any] | None = None) -> None:
        """Seals an epoch that ran, and gives its changes to the sinks."""
        self._sealing.seal(flow, t, reports, came_by)
        self._delivery.deliver(t)
        self._kept.release()

    def run_together(self, batch: Sequence[ScheduledEpoch], given: GivenEpochs) -> Iterator[tuple[int, Reports]]:
        """Runs epochs together; where that fails one by one, so that those before the failure come."""
        epochs = [one.step.t for one in batch]
        for t in epochs:
            self._kept.keep(t, partial(given.at, t))
        rows = given.between(epochs[0], epochs[-1])
        branch, instance = self._position.branch, self._position.instance
        together = self._runner.run_together(batch, rows, branch, instance, everything=True)
        for t in epochs:
            yield t, together[t] if together else self._run(self._versions.flow, t, given.at(t))

    def _run(self, flow: BoundFlow, t: int, inputs: Mapping[str, DataFrame]) -> Reports:
        """Runs an epoch; without the hosts that are lost meanwhile, and after computing again what only they had."""
        hole: NosyncError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                if hole is not None:
                    self._recover_from(hole)
                one = ScheduledEpoch(Step(t, {}, frozenset()), flow, self._layout.shards_at(flow, t), 0)
                branch, instance = self._position.branch, self._position.instance
                return self._runner.run([one], inputs, branch, instance, everything=True)[t]
            except DeterminismError as error:
                raise self._other_rows(t, error) from None
            except NodeLostError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                log.warning("epoch %d runs again: %s", t, error)
            except MISSING_LAYER_ERRORS as error:
                if attempt + 1 == _ATTEMPTS or not self._node.store_id or error is hole:
                    raise
                log.warning("epoch %d needs what a lost node had, which is computed again: %s", t, error)
                hole = error
        raise AssertionError("the last attempt returns or raises")

    def _recover_from(self, hole: NosyncError) -> None:
        """Computes again what is missing, or raises the error of what cannot be had."""
        report = self._recovery.run(self._kept, self._versions.flow.stages)
        self._recoveries.append(report)
        if report.unrecoverable:
            raise hole

    def _other_rows(self, t: int, error: DeterminismError) -> DeterminismError:
        """Returns the error of an epoch with other rows than an attempt before recorded; it says first what to do."""
        last = self._position.last_sealed()
        is_of_rows = error.stage in {stage.name for stage in self._versions.flow.sources}
        if not is_of_rows or self._position.branch != MAIN or (last is not None and t <= last):
            return error
        before = BEFORE_FIRST_EPOCH if last is None else last
        return DeterminismError(
            f"job.rewind({before}) first, then epoch {t} can be given these rows: an attempt that failed has recorded other ones "
            f"for it. {error}",
            stage=error.stage,
            shard=error.shard,
            t=error.t,
            recorded_digest=error.recorded_digest,
            rejected_digest=error.rejected_digest,
        )


def _check_have_rows(inputs: Mapping[str, DataFrame]) -> None:
    """Raises InvalidInputError for a DataFrame that has no rows of its own, but is a stream."""
    stream = next((name for name, frame in inputs.items() if frame.isStreaming), None)
    if stream is not None:
        raise InvalidInputError(
            f"source {stream}: a streaming DataFrame was given, and an epoch is of rows: give it to job.stream(...)"
        )
