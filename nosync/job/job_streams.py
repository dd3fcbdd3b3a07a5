"""How streams of Spark fill a job: one whose batches are its epochs, or several by turns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nosync.job.epoch_runs import EpochRuns
from nosync.job.flow_versions import FlowVersions
from nosync.job.reports import EpochReport
from nosync.job.stream_checks import check_query, check_trigger
from nosync.job.turn import Turn
from nosync.lsm.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from nosync.flow.bound_flow import BoundFlow


class JobStreams:
    """The part of a job that takes its rows from Structured Streaming."""

    _spark: SparkSession
    _versions: FlowVersions
    _epochs: EpochRuns
    _turn: Turn
    _check_inputs: Callable[[Mapping[str, DataFrame]], Mapping[str, DataFrame]]

    if TYPE_CHECKING:

        @property
        def flow(self) -> BoundFlow: ...

    def stream(
        self,
        inputs: Mapping[str, DataFrame],
        *,
        checkpoint: str | Path,
        trigger: Mapping[str, Any] | None = None,
        name: str | None = None,
        first: int = 0,
    ) -> StreamingQuery:
        """Runs the flow under Structured Streaming: each micro-batch is one epoch, numbered `first` plus the batch id.

        `inputs`: one streaming DataFrame per source. `checkpoint`: where Spark keeps the offsets; start again with the
        same one to go on, after any failure. `trigger`: as for writeStream.trigger, such as `{"availableNow": True}`.
        `first`: the epoch of the checkpoint's first batch, such as the one after a backfill; the same at each start.
        The sources must be replayable, as for any exactly-once query. Sinks are part of the Job.
        """
        from nosync.spark.structured_streaming import last_batch, start_stream  # noqa: PLC0415

        check_trigger(trigger)
        checked = self._check_inputs(inputs)
        self._epochs.check_stream(checkpoint, first, lambda: last_batch(self._spark, checkpoint))
        order = self._epochs.stream_sources(list(checked), checkpoint, last_batch(self._spark, checkpoint, "offsets"))
        run_batch, checked = partial(self._run_batch, first), {source: checked[source] for source in order}
        return start_stream(run_batch, checked, checkpoint, trigger or {}, name or f"nosync-{self.flow.name}")

    def _run_batch(self, first: int, batch: int, rows: Mapping[str, DataFrame]) -> EpochReport:
        """Runs a batch of a stream, on the code and the shards that the job has by then."""
        with self._turn:
            return self._epochs.advance_batch(first, batch, rows)

    def advance_batch(self, query: str, batch: int, inputs: Mapping[str, DataFrame]) -> EpochReport | None:
        """Runs the next epoch on a micro-batch of one of several queries, for `foreachBatch`; other sources have no rows.

            orders.writeStream.foreachBatch(lambda rows, id: job.advance_batch("orders", id, {"orders": rows}))

        The manifest says which batch of the query it was, as `txnAppId` and `txnVersion` do in Delta: a batch that Spark
        gives again after a failure is passed over if it was sealed, and None is returned. Raises what `advance` raises.
        """
        from nosync.spark.schemas import empty_inputs  # noqa: PLC0415 - the store works without pyspark

        if not isinstance(query, str) or not query:
            raise InvalidInputError(f"query is {query!r}, expected the name by which its batches are told from others")
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise InvalidInputError(f"batch is {batch!r}, expected the id that foreachBatch gives")
        with self._turn:
            return self._epochs.advance_query(query, batch, empty_inputs(self._spark, self.flow, inputs))

    def check_query(self, query: str, checkpoint: str | Path) -> None:
        """Raises FlowError where batches that `checkpoint` says are done are not those that `advance_batch` sealed, so that
        rows would be missing or come twice. Call it before the query starts.
        """
        check_checkpoint(self._spark, query, checkpoint, self._epochs.last_batches().get(query))


def check_checkpoint(spark: SparkSession, query: str, checkpoint: str | Path, sealed: int | None) -> None:
    """Raises FlowError where a checkpoint is not that of a query of whose batches a store has those up to `sealed`."""
    from nosync.spark.structured_streaming import last_batch  # noqa: PLC0415 - the store works without pyspark

    begun, committed = (last_batch(spark, checkpoint, log) for log in ("offsets", "commits"))
    check_query(query, checkpoint, sealed, begun, committed)
