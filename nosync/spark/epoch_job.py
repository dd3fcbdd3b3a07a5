"""One Spark job of an epoch: runs a plan, by a query or without one, and returns what its tasks report."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from pyspark import RDD, SparkContext
from pyspark.sql import DataFrame, SparkSession

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import Segment
from nosync.runtime.epoch_plan import EpochPlan, Part, PartPlan
from nosync.runtime.file_shuffle import Exchange, Placement
from nosync.runtime.scan import SourceFiles
from nosync.spark.arrow_transfer import Handover
from nosync.spark.epoch_frames import EpochFrames
from nosync.spark.file_shuffle import SHARD_COLUMN, Exchanges, Exchanging
from nosync.spark.parquet_inputs import MOST_READERS
from nosync.spark.session import in_workers_of_queries


class Work(NamedTuple):
    """Holds what all Spark jobs of a run have in common."""

    spark: SparkSession
    flow: BoundFlow
    plans: Sequence[EpochPlan]
    inputs: Mapping[str, DataFrame]
    handover: Handover
    files: Mapping[str, SourceFiles]
    """The files of each source that tasks read themselves; empty: the JVM reads them."""
    exchanges: Exchanges | None
    """Is told of rows that go to their shards by files; None: Spark shuffles them."""


class EpochJob:
    """Runs one Spark job."""

    def __init__(self, work: Work, part: Part) -> None:
        self._spark, self._handover, self._exchanges = work.spark, work.handover, work.exchanges
        self._plan = PartPlan(work.flow, work.plans, part, work.inputs, work.files, most_readers=MOST_READERS)
        self._exchanging: Exchanging | None = None
        self._exchanged: dict[str, Exchange] = {}
        self._frames = EpochFrames(self._plan, work.spark, work.inputs, work.handover, self._exchanged)

    def run(self, done: frozenset[str]) -> list[bytes]:
        """Returns the reports of everything. `done`: stages that reported before."""
        ends = self._plan.ends(done)
        if not ends:
            return []
        if self._exchanges is not None:
            self._exchange(self._exchanges)
        if all(self._plan.is_scanned(segment) or segment.name in self._exchanged for segment in ends):
            return self._without_query(ends)
        rows = reduce(DataFrame.unionAll, [self._frames.segment(segment, None) for segment in ends]).collect()
        return [bytes(row[0]) for row in rows]

    def release(self) -> None:
        """Releases what was kept for the job."""
        if self._exchanging is not None:
            self._exchanging.release()
        self._frames.release()

    def _exchange(self, exchanges: Exchanges) -> None:
        """Has the rows that the epoch is given written to files by shard, where they can go that way."""
        segment = self._plan.to_exchange()
        if segment is None:
            return
        output = next(iter(self._plan.outputs(segment)), None)
        rows = self._frames.given(segment, self._plan.tasks_of(segment, output)[0][0])
        placed = rows.rows
        if not rows.placed_by:
            shard = f"CAST({self._frames.shard_of(rows.place)} AS INT) AS {SHARD_COLUMN}"
            placed = placed.selectExpr("*", shard).drop(*rows.only_for_place)
        self._exchanging = Exchanging(self._spark, exchanges)
        placement = Placement(self._plan.shards, self._plan.flow.key_groups, rows.placed_by)
        self._exchanged[segment.name] = self._exchanging.run(placed, placement, self._handover)

    def _without_query(self, segments: Sequence[Segment]) -> list[bytes]:
        """Returns what tasks report that are given nothing.

        To plan a query takes longer than such tasks often do, so there is none.
        """
        context = self._spark.sparkContext
        works = [self._frames.work_of(segment, self._plan.tasks_of(segment, None)[0]) for segment in segments]

        def run(index: int, nothing: Iterable[object]) -> Iterator[bytes]:
            deque(nothing, maxlen=0)  # else Spark takes the worker for a failed one, and starts another
            for batch in works[index // shards](iter(())):
                yield from batch.column(0).to_pylist()

        shards = self._plan.shards
        reports = _partitions(context, shards * len(works)).mapPartitionsWithIndex(run)
        return in_workers_of_queries(self._spark, reports).collect()


@functools.lru_cache(maxsize=4)
def _partitions(context: SparkContext, count: int) -> RDD[object]:
    """Returns so many partitions, with nothing in them."""
    return context.parallelize([], count)
