"""Structured Streaming: each micro-batch is an epoch, and the batch id is its number.

Spark's checkpoint holds the offsets of the sources only. After a restart from it Spark runs the last uncommitted
batch again, with the same id and rows; layers that were recorded are used, and the others computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nosync.lsm.errors import FlowError, InvalidInputError, NosyncError
from nosync.spark.errors import reason_of
from nosync.spark.expressions import quoted
from nosync.spark.session import turn_of

_SOURCE = "the source"
"""No source can have a name with a blank."""
Advance = Callable[[int, Mapping[str, DataFrame]], object]
RunBatch = Callable[[DataFrame, int], object]


class EpochsQuery(StreamingQuery):
    """Is Spark's query, but raises the error of nosync when an epoch fails. Spark has that error inside of its own,
    after thirty lines.
    """

    def __init__(self, query: StreamingQuery, failures: list[NosyncError]) -> None:
        """`failures`: what batches raised, which the caller adds to."""
        super().__init__(query._jsq)
        self._failures = failures

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        with self._own_error():
            return super().awaitTermination(timeout)

    def processAllAvailable(self) -> None:
        with self._own_error():
            super().processAllAvailable()

    def exception(self) -> StreamingQueryException | None:
        found = super().exception()
        if found is None or not self._failures:
            return found
        error = self._failures[-1]
        return StreamingQueryException(f"{type(error).__name__}: {error}\n\n{found}")

    @contextmanager
    def _own_error(self) -> Iterator[None]:
        try:
            yield
        except StreamingQueryException:
            if not self._failures:
                raise
            raise self._failures[-1] from None


def last_batch(spark: SparkSession, checkpoint: str | Path, log: str = "commits") -> int | None:
    """Returns the last batch of a checkpoint that was committed; with `log="offsets"` the last that was begun. None where
    there is no checkpoint, or one that saw no rows or died in its first batch, which is as good as new.

    It is looked for where Spark would find it. Raises InvalidInputError where that cannot be reached.
    """
    try:
        jvm: Any = spark._jvm
        path = jvm.org.apache.hadoop.fs.Path(f"{checkpoint}/{log}")
        files = path.getFileSystem(spark._jsc.hadoopConfiguration())
        names = [one.getPath().getName() for one in files.listStatus(path)] if files.exists(path) else []
        return max((int(name) for name in names if name.isdigit()), default=None)
    except Py4JJavaError as error:
        raise InvalidInputError(f"cannot look for {checkpoint}: {error.java_exception.getMessage()}") from None


def _noting(run_batch: RunBatch, failures: list[NosyncError]) -> Callable[[DataFrame, int], None]:
    """Returns a function for foreachBatch that adds to `failures` what a batch raises: Spark has it inside of its own
    error.
    """

    def noting(batch: DataFrame, batch_id: int) -> None:
        try:
            run_batch(batch, batch_id)
        except NosyncError as error:
            failures.append(error)
            raise

    return noting


def start_stream(
    advance: Advance,
    inputs: Mapping[str, DataFrame],
    checkpoint: str | Path,
    trigger: Mapping[str, Any],
    name: str,
) -> StreamingQuery:
    """Starts the query that calls `advance(batch id, rows by source)` for each micro-batch.

    Raises InvalidInputError for a trigger, or a DataFrame, that is none, and FlowError where Spark refuses the query.
    """
    for source, frame in inputs.items():
        if not frame.isStreaming:
            raise InvalidInputError(
                f"source {source}: the DataFrame is not a streaming one: use spark.readStream, or advance()"
            )

    failures: list[NosyncError] = []

    def run_batch(batch: DataFrame, batch_id: int) -> None:
        advance(batch_id, _split(batch, inputs))

    writer = _combined(inputs).writeStream.queryName(name).option("checkpointLocation", str(checkpoint))
    if trigger:
        try:
            writer = writer.trigger(**trigger)
        except (TypeError, PySparkException) as error:
            raise InvalidInputError(
                f"trigger {dict(trigger)!r} is none that writeStream.trigger() knows: {error}"
            ) from None
    return _started(writer.foreachBatch(_noting(run_batch, failures)), next(iter(inputs.values())), failures)


def run_available(run_batch: RunBatch, rows: DataFrame, checkpoint: str | Path, name: str) -> None:
    """Gives what a stream has by now to `run_batch(rows, batch id)`, batch by batch. Returns when all has come.

    Raises the error of nosync that a batch raised, and NosyncError where Spark's query fails.
    """
    failures: list[NosyncError] = []

    try:
        writer = rows.writeStream.queryName(name).option("checkpointLocation", str(checkpoint))
        writer = writer.trigger(availableNow=True).foreachBatch(_noting(run_batch, failures))
        _started(writer, rows, failures).awaitTermination()
    except PySparkException as error:
        raise NosyncError(f"{name}: its stream failed: {reason_of(str(error))}") from error


def _started(writer: DataStreamWriter, rows: DataFrame, failures: list[NosyncError]) -> EpochsQuery:
    """Starts a query. It keeps a copy of the session's settings: those of the user, and not of an epoch that runs.

    Raises FlowError where Spark refuses it.
    """
    try:
        with turn_of(rows.sparkSession):
            return EpochsQuery(writer.start(), failures)
    except PySparkException as error:
        reason = reason_of(str(error))
        remedy = ": stop() it first, or give this one another name=" if "that name is already active" in reason else ""
        raise FlowError(f"Spark does not start the stream: {reason}{remedy}") from error


def _combined(inputs: Mapping[str, DataFrame]) -> DataFrame:
    """Returns one streaming DataFrame for all sources: each row in a struct column of its source."""
    if len(inputs) == 1:
        return next(iter(inputs.values()))
    tagged = [
        frame.select(
            F.lit(source).alias(_SOURCE),
            *(
                F.struct(*(F.col(quoted(name)) for name in frame.columns)).alias(other)
                if other == source
                else F.lit(None).cast(inputs[other].schema).alias(other)
                for other in inputs
            ),
        )
        for source, frame in inputs.items()
    ]
    return reduce(DataFrame.unionByName, tagged)


def _split(batch: DataFrame, inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    if len(inputs) == 1:
        return dict.fromkeys(inputs, batch)
    return {source: batch.where(F.col(quoted(_SOURCE)) == source).select(f"{source}.*") for source in inputs}
