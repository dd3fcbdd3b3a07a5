"""Stages as DataFrames: one task a shard maps the layers and yields the rows.

Which shard a task reads is a row of its input, not the number of its partition: that number changes when the DataFrame is
coalesced or becomes part of a union.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.lsm.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import NosyncError
from nosync.lsm.failures import encode_failure
from nosync.lsm.layer import Shard, TraceId
from nosync.lsm.timestamp import Time, end_of, last_of
from nosync.lsm.trace import Trace
from nosync.plan import BoundStage
from nosync.segment import directory_of

ReadShard = Callable[[int], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class StageReader:
    """A recorded stage; pickled to the workers. `origin`: where its traces begin (packed), None where unknown."""

    root: str
    key_groups: int
    stage: BoundStage
    shards: int
    origin: int | None

    def state(self, spark: SparkSession, as_of: int) -> DataFrame:
        """The state as of an epoch; lazily, so errors of missing layers come with the action."""

        def read(shard: int) -> Iterator[pa.RecordBatch]:
            for batch in self._trace(shard, as_of, as_of).scan(last_of(as_of)):
                yield batch.select(self.stage.output.names)

        return self._per_shard(spark, read, self.stage.output)

    def changes(self, spark: SparkSession, after: int, until: int) -> DataFrame:
        """The change feed: the stage's columns, `_change_type` and `_epoch`."""
        fields = [*self.stage.output, pa.field(CHANGE_TYPE_COLUMN, pa.string()), pa.field(EPOCH_COLUMN, pa.int64())]
        schema = pa.schema(fields)

        def read(shard: int) -> Iterator[pa.RecordBatch]:
            feed = self._trace(shard, after, until).changes(last_of(after), last_of(until))
            yield from feed.select(schema.names).to_batches()

        return self._per_shard(spark, read, schema)

    def _trace(self, shard: int, exact_from: int, until: int) -> Trace:
        id = TraceId(self.stage.name, self.stage.fingerprint, Shard(shard, self.shards))
        origin = None if self.origin is None else Time(self.origin)
        directory = directory_of(self.root, self.key_groups)
        return directory.trace(id, until=end_of(until), as_of=last_of(exact_from), origin=origin)

    def _per_shard(self, spark: SparkSession, read: ReadShard, schema: pa.Schema) -> DataFrame:
        def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            try:
                for batch in batches:
                    for shard in batch.column(0).to_pylist():
                        yield from read(shard)
            except NosyncError as error:
                raise RuntimeError(encode_failure(error)) from None

        return spark.range(0, self.shards, 1, self.shards).mapInArrow(rows, from_arrow_schema(schema))
