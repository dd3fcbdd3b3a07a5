"""Stages as DataFrames: one task a shard maps the layers and yields the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.lsm.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import NosyncError
from nosync.lsm.failures import encode_failure
from nosync.lsm.layer import Shard, TraceId
from nosync.lsm.timestamp import Time, end_of, last_of
from nosync.plan import BoundFlow, BoundStage
from nosync.segment import directory_of

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def read_stage(
    spark: SparkSession,
    flow: BoundFlow,
    stage: BoundStage,
    root: str,
    shards: int,
    origins: Mapping[str, int],
    as_of: int,
) -> DataFrame:
    """The state of a stage as of an epoch; lazily, so errors of missing layers come with the action."""
    reader = _Reader(root, flow.key_groups, stage, shards, origins.get(stage.name))

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return reader.state(as_of)

    return _per_shard(spark, shards, rows, stage.output)


def read_changes(
    spark: SparkSession,
    flow: BoundFlow,
    stage: BoundStage,
    root: str,
    shards: int,
    origins: Mapping[str, int],
    after: int,
    until: int,
) -> DataFrame:
    """The change feed of a stage: its columns, `_change_type` and `_epoch`."""
    reader = _Reader(root, flow.key_groups, stage, shards, origins.get(stage.name))

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return reader.changes(after, until)

    fields = [*stage.output, pa.field(CHANGE_TYPE_COLUMN, pa.string()), pa.field(EPOCH_COLUMN, pa.int64())]
    return _per_shard(spark, shards, rows, pa.schema(fields))


def _per_shard(spark: SparkSession, shards: int, rows: ArrowFunction, schema: pa.Schema) -> DataFrame:
    return spark.range(0, shards, 1, shards).mapInArrow(rows, from_arrow_schema(schema))


class _Reader:
    """Pickled to the workers; reads one shard in each task."""

    def __init__(self, root: str, key_groups: int, stage: BoundStage, shards: int, origin: int | None) -> None:
        self._root, self._key_groups, self._stage, self._shards, self._origin = root, key_groups, stage, shards, origin

    def state(self, as_of: int) -> Iterator[pa.RecordBatch]:
        with _failures():
            trace = self._trace(as_of, as_of)
            for batch in trace.scan(last_of(as_of)):
                yield batch.select(self._stage.output.names)

    def changes(self, after: int, until: int) -> Iterator[pa.RecordBatch]:
        with _failures():
            feed = self._trace(after, until).changes(last_of(after), last_of(until))
            yield from feed.select([*self._stage.output.names, CHANGE_TYPE_COLUMN, EPOCH_COLUMN]).to_batches()

    def _trace(self, exact_from: int, until: int):  # type: ignore[no-untyped-def]
        context = TaskContext.get()
        assert context is not None, "runs inside a Spark task"
        id = TraceId(self._stage.name, self._stage.fingerprint, Shard(context.partitionId(), self._shards))
        origin = None if self._origin is None else Time(self._origin)
        directory = directory_of(self._root, self._key_groups)
        return directory.trace(id, until=end_of(until), as_of=last_of(exact_from), origin=origin)


class _failures:
    """Encodes a NosyncError so that it survives the way to the driver."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, NosyncError):
            raise RuntimeError(encode_failure(error)) from None
