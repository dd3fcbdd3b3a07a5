"""Stages of expressions that are not recorded, as DataFrames: the expressions over the recorded stage below.

Expressions treat each row by itself, so what a recorded stage would hold is what they make of the rows, and of the
changes, below it. They mean what they mean in epochs, whatever the session says now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from nosync.flow.bound_stage import BoundStage
from nosync.flow.internal_columns import TAG_COLUMN
from nosync.flow.kinds import SELECT
from nosync.flow.stage_options import JvmOptions
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.operators.operators import lone_updates_named
from nosync.spark.expressions import expressions_over
from nosync.spark.session import conf_set, session_settings, turn_of
from nosync.spark.stage_reader import StageReader


@dataclass(frozen=True)
class DerivedReader:
    """Reads expressions over a recorded stage. `settings`: what they mean, by `expression_settings`."""

    below: StageReader
    stages: tuple[BoundStage, ...]
    settings: Mapping[str, str]

    def state(self, spark: SparkSession, as_of: int) -> DataFrame:
        """Returns the state as of an epoch, as `StageReader.state` does."""
        return self._applied(spark, self.below.state(spark, as_of), ())

    def changes(self, spark: SparkSession, after: int, until: int) -> DataFrame:
        """Returns the change feed, as `StageReader.changes` does."""
        # A stage that drops rows may drop half of an update.
        in_halves = self.below.stage.changing and any(stage.kind != SELECT for stage in self.stages)
        rows = self.below.changes(spark, after, until, places=in_halves)
        return self._applied(spark, rows, (CHANGE_TYPE_COLUMN, EPOCH_COLUMN), in_halves=in_halves)

    def _applied(
        self, spark: SparkSession, rows: DataFrame, keep: Sequence[str], *, in_halves: bool = False
    ) -> DataFrame:
        # Spark takes zone and ANSI mode into the plan when it analyzes it, which is here.
        with turn_of(spark), conf_set(spark, {**session_settings(), **self.settings}):
            for stage in self.stages:
                rows = expressions_over(stage, rows, (*keep, TAG_COLUMN) if in_halves else keep)
            if in_halves:
                rows = rows.mapInArrow(_halves_named, rows.drop(TAG_COLUMN).schema)
            # Functions of users look for the zone when they run.
            is_plain = all(stage.options_as(JvmOptions).plain for stage in self.stages)
            return rows if is_plain else rows.localCheckpoint()


def _halves_named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the changes of a task, where half of an update is an insertion or a deletion, as in a recorded stage."""
    given = list(batches)
    if given:
        rows = pa.Table.from_batches(given)
        places = rows.column(TAG_COLUMN).to_numpy()
        order = np.argsort(places, kind="stable")
        yield from lone_updates_named(rows.take(pa.array(order)).drop_columns([TAG_COLUMN]), places[order]).to_batches()
