"""Stages as DataFrames: one task a shard maps the layers and yields the rows.

Which shard a task reads is a row of its input, not the number of its partition: that number changes when the DataFrame
is coalesced or becomes part of a union.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.flow.bound_stage import BoundStage
from nosync.flow.internal_columns import TAG_COLUMN
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import CorruptionError, HoleError, NosyncError, NotAvailableError, StorageError, encode_failure
from nosync.lsm.model.history import History, View, views_of
from nosync.lsm.model.timestamp import end_of, last_of, pack
from nosync.lsm.trace.change_feed import DELETE, EXPIRE, UPDATE_BEFORE
from nosync.lsm.trace.cover import lost_tail
from nosync.lsm.trace.trace import Trace
from nosync.replication.client.location import StoreLocation, open_directory
from nosync.spark.maps import without_maps

_COUNT = "__n"
_MOST_ROWS_OF_A_VIEW = 1 << 40
ReadView = Callable[[View, int], Iterator[pa.RecordBatch]]
"""Reads a view, of which it is told the number as well."""


@dataclass(frozen=True)
class StageReader:
    """Reads a recorded stage; it is pickled to the workers. `history`: where its layers are."""

    location: StoreLocation
    stage: BoundStage
    history: History

    def state(self, spark: SparkSession, as_of: int) -> DataFrame:
        """Returns the state as of an epoch. It reads lazily, so errors of missing layers come with the action. Raises
        CompactedError.
        """
        if not self.stage.keyed and (self.stage.changing or self._took_rows_back(as_of)):
            return self._rows_that_are_left(spark, as_of)

        def read(view: View, number: int) -> Iterator[pa.RecordBatch]:
            for batch in self._open(view, as_of, as_of).scan(last_of(as_of)):
                yield batch.select(self.stage.output.names)

        return self._per_view(spark, read, self.stage.output, as_of, as_of)

    def _took_rows_back(self, as_of: int) -> bool:
        """Returns whether a log whose rows otherwise only come may have taken some back, as one does that began anew with
        other code.
        """
        if len({span.fingerprint for span in self.history if span.lower < end_of(as_of)}) < 2:
            return False
        views = views_of(self.history, self.stage.name, pack(as_of), self.location.key_groups, log=True)
        try:
            return any(CHANGE_TYPE_COLUMN in self._open(view, as_of, as_of).schema.names for view in views)
        except (HoleError, CorruptionError, StorageError):
            return True  # the layers are on other hosts: reading as if it had is right as well, and takes longer

    def _rows_that_are_left(self, spark: SparkSession, as_of: int) -> DataFrame:
        """Returns the rows of a stateless stage whose input changes: all insertions, less the rows that were taken
        back.
        """
        weight = F.when(F.col(CHANGE_TYPE_COLUMN).isin(DELETE, UPDATE_BEFORE, EXPIRE), -1).otherwise(1)
        columns = [F.col("`" + name.replace("`", "``") + "`") for name in self.stage.output.names]
        changes, with_maps = without_maps(self.changes(spark, -1, as_of))
        summed = changes.groupBy(*columns).agg(F.sum(weight).alias(_COUNT)).where(f"{_COUNT} > 0")
        repeated = summed.withColumn(_COUNT, F.explode(F.sequence(F.lit(1), F.col(_COUNT))))
        return with_maps(repeated.drop(_COUNT))

    def changes(self, spark: SparkSession, after: int, until: int, *, places: bool = False) -> DataFrame:
        """Returns the change feed: the stage's columns, `_change_type` and `_epoch`.

        `places`: also `_tag`, which numbers the rows, so that a preimage comes right before its postimage.
        """
        fields = [*self.stage.output, pa.field(CHANGE_TYPE_COLUMN, pa.string()), pa.field(EPOCH_COLUMN, pa.int64())]
        schema = pa.schema([*fields, pa.field(TAG_COLUMN, pa.int64())] if places else fields)

        def read(view: View, number: int) -> Iterator[pa.RecordBatch]:
            rows = self._open(view, after, until).changes(last_of(after), last_of(until))
            if places:
                first = number * _MOST_ROWS_OF_A_VIEW
                rows = rows.append_column(TAG_COLUMN, pa.array(np.arange(first, first + rows.num_rows)))
            yield from rows.select(schema.names).to_batches()

        return self._per_view(spark, read, schema, after, until)

    def _open(self, view: View, exact_from: int, until: int) -> Trace:
        directory = open_directory(self.location)
        try:
            trace = directory.open_view(view, until=end_of(until), as_of=last_of(exact_from))
        except NotAvailableError as error:  # and it is sealed
            raise lost_tail(view.id, end_of(until), error) from None
        return trace.read_as(self.stage.schema)  # a branch may have added columns

    def _check_kept(self, views: Sequence[View], exact_from: int, until: int) -> None:
        """Says at once that history was merged away; other errors come from the host that reads."""
        for view in views:
            with contextlib.suppress(HoleError, CorruptionError, StorageError):
                self._open(view, exact_from, until)

    def _per_view(
        self, spark: SparkSession, read: ReadView, schema: pa.Schema, exact_from: int, as_of: int
    ) -> DataFrame:
        views = views_of(self.history, self.stage.name, pack(as_of), self.location.key_groups, log=not self.stage.keyed)

        def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            try:
                for batch in batches:
                    for number in batch.column(0).to_pylist():
                        yield from read(views[number], number)
            except NosyncError as error:
                raise RuntimeError(encode_failure(error)) from None

        if not views:
            return spark.createDataFrame([], from_arrow_schema(schema))
        self._check_kept(views, exact_from, as_of)
        return spark.range(0, len(views), 1, len(views)).mapInArrow(rows, from_arrow_schema(schema))
