"""Several epochs in one Spark job, where the rows of all are there: in a replay, a recovery and a backfill.

To describe and start a Spark job takes longer than an epoch of a few thousand rows. So a shard's task takes several
epochs, one after the other; each still has layers, reports and a seal of its own.

Invariants
- Rows come to a task in order of their epoch, and an epoch's rows are all there before its stages run.
- A stage reads no other shard's layer of an epoch before; a loop's rounds wait for all shards, so it runs alone, and so
  does an epoch with which stages begin anew, for it feeds them otherwise.
- What is merged away while a batch runs nobody needs again: epochs before `since` run alone.
- The epochs of a batch have the same flow and the same shards. Rows that are given say of which epoch they are.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_flow import BoundFlow, Step
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.runtime.segment_task import SegmentTask
from nosync.runtime.shard_run import run_shard

MOST_EPOCHS = 32
MOST_ROWS = 1_000_000
MOST_GIVEN_ROWS = 8_000_000
"""The most rows of a batch that is given its rows. They wait in the JVM, which can put them on disk, and each Spark job
looks for its own in all.
"""


@dataclass(frozen=True)
class ScheduledEpoch:
    """An epoch to run, with others or alone: most were run before."""

    step: Step
    flow: BoundFlow
    shards: int
    rows: int
    """How many rows its sources have."""
    skip: frozenset[str] = frozenset()
    """Stages all of whose layers are recorded."""
    is_retained: bool = True
    """Says whether history is kept as exactly as that. If not, what is computed may be merged before all is computed
    from it.
    """

    @property
    def is_alone(self) -> bool:
        """Says whether it needs a job of its own."""
        is_other = self.flow.loops or self.flow.bootstraps_at(self.step.t)
        return bool(self.step.needs_input or not self.is_retained or is_other)


def batch_epochs(epochs: Iterable[ScheduledEpoch], most_rows: int = MOST_ROWS) -> Iterator[list[ScheduledEpoch]]:
    """Groups epochs, which come in order, into those that run in one Spark job each."""
    batch: list[ScheduledEpoch] = []
    for one in epochs:
        if batch and not (_fit(batch[-1], one) and _is_small([*batch, one], most_rows)):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _fit(one: ScheduledEpoch, other: ScheduledEpoch) -> bool:
    if one.is_alone or other.is_alone:
        return False
    return one.flow is other.flow and (one.shards, one.skip) == (other.shards, other.skip)


def _is_small(batch: Sequence[ScheduledEpoch], most_rows: int) -> bool:
    return len(batch) <= MOST_EPOCHS and sum(one.rows for one in batch) <= most_rows


def run_epochs_of_shard(
    tasks: Sequence[SegmentTask], index: int, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs a shard's epochs in order. What is emitted has the epoch in its first column, as have the rows that come.

    Raises what `run_shard` raises.
    """
    if not (tasks[0].edges or tasks[0].input_given):
        deque(rows, maxlen=0)  # there is nothing in them
    epochs = itertools.groupby(_by_epoch(rows), key=operator.itemgetter(0))
    t, group = next(epochs, _NONE)
    for task in tasks:
        mine: list[pa.RecordBatch] = []
        if t == task.t:
            mine = [batch for _, batch in group]
            t, group = next(epochs, _NONE)
        for batch in run_shard(task, index, iter(mine)):
            if task.output is None:
                yield batch
                continue
            columns = [pa.repeat(pa.scalar(task.t, pa.int64()), batch.num_rows), *batch.columns]
            yield pa.RecordBatch.from_arrays(columns, [EPOCH_COLUMN, *batch.schema.names])
    assert t is None, f"rows of epoch {t} came, which is not the next of {[task.t for task in tasks]}"


_NONE: tuple[int | None, Iterator[tuple[int, pa.RecordBatch]]] = (None, iter(()))


def _by_epoch(rows: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yields the rows without the column of their epoch, cut where it changes."""
    for batch in rows:
        runs = pc.run_end_encode(batch.column(EPOCH_COLUMN))
        rest, first = batch.drop_columns([EPOCH_COLUMN]), 0
        for end, t in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            yield t, rest.slice(first, end - first)
            first = end
