"""Rows of many epochs at once, where an expression says to which epoch each belongs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegralType

from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.timestamp import MAX_EPOCH
from nosync.spark.errors import task_errors, without_log
from nosync.spark.expressions import quoted
from nosync.spark.session import contains, turn_of

MOST_EPOCHS = 100_000
"""Of one backfill. Who has more has taken something else for their number."""
_SOURCE, _ROWS = "_source", "_rows"
_DATED, _OF_MANY_ROWS = "CURRENT_LIKE", ("WINDOW", "GENERATE")

EpochOf = str | Column | Mapping[str, str | Column]
"""The expression that gives a row's epoch; by source, where it is not the same for all."""


class GivenEpochs:
    """Holds the rows of each source with the number of their epoch.

    Raises InvalidInputError where Spark cannot evaluate the expression, it is no whole number, or another one each
    time.
    """

    def __init__(
        self, spark: SparkSession, frames: Mapping[str, DataFrame], columns: Mapping[str, list[str]], epoch: EpochOf
    ) -> None:
        """`columns`: by source those that it has; others that are given are only for the expression."""
        if isinstance(epoch, Mapping):
            lacking = [source for source in frames if source not in epoch]
            unknown = [source for source in epoch if source not in frames]
            if lacking or unknown:
                what = f"has nothing for {lacking[0]!r}" if lacking else f"names {unknown[0]!r}, which is not a source"
                raise InvalidInputError(f"epoch {what}; sources: {', '.join(frames)}")
        self._frames = {
            source: _with_epoch(
                spark, source, frame, columns[source], epoch[source] if isinstance(epoch, Mapping) else epoch
            )
            for source, frame in frames.items()
        }

    def counts(self) -> dict[int, dict[str, int]]:
        """Returns how many rows each source has in each epoch, in order of the epochs. Reads all rows once.

        Raises InvalidInputError for rows whose epoch is null or no epoch's number, and for more than 100,000 epochs.
        """
        counted = [
            frame.groupBy(EPOCH_COLUMN).agg(F.count(F.lit(1)).alias(_ROWS)).withColumn(_SOURCE, F.lit(source))
            for source, frame in self._frames.items()
        ]
        found: dict[int, dict[str, int]] = {}
        with task_errors():
            rows = reduce(DataFrame.unionByName, counted).limit(len(counted) * MOST_EPOCHS + 1).collect()
        for row in rows:
            t, source, n = row[EPOCH_COLUMN], row[_SOURCE], row[_ROWS]
            if t is None or not 0 <= t <= MAX_EPOCH:
                raise InvalidInputError(
                    f"source {source}: {n:,} rows have the epoch {'null' if t is None else t}, expected 0..{MAX_EPOCH}: "
                    "leave them out with where(), or give another epoch="
                )
            found.setdefault(t, {})[source] = n
        if len(found) > MOST_EPOCHS:
            raise InvalidInputError(
                f"the rows are of more than {MOST_EPOCHS:,} epochs; an epoch is a batch of rows such as an hour or a day: "
                "epoch='ts div 3600' where ts is in seconds, epoch=\"datediff(day, '2013-01-01')\" for a date"
            )
        return dict(sorted(found.items()))

    def between(self, first: int, last: int) -> dict[str, DataFrame]:
        """Returns the rows of some epochs, which say in `_epoch` to which of them they belong."""
        return {
            source: frame.where(f"{EPOCH_COLUMN} BETWEEN {first} AND {last}") for source, frame in self._frames.items()
        }

    def at(self, t: int) -> dict[str, DataFrame]:
        """Returns the rows of one epoch."""
        return {source: frame.drop(EPOCH_COLUMN) for source, frame in self.between(t, t).items()}


def _with_epoch(
    spark: SparkSession, source: str, frame: DataFrame, columns: list[str], epoch: str | Column
) -> DataFrame:
    whose = f"source {source}: epoch={epoch if isinstance(epoch, str) else str(epoch)!r}"
    if not isinstance(epoch, str | Column):
        raise InvalidInputError(f"{whose} is a {type(epoch).__name__}, expected an expression over the row's columns")
    if frame.isStreaming:
        raise InvalidInputError(f"source {source}: a streaming DataFrame was given; use stream(), or spark.read")
    try:
        column = F.expr(epoch) if isinstance(epoch, str) else epoch
        # Of no other job's epoch, in whose time zone the expression would give other numbers.
        with without_log(), turn_of(spark):
            rows = frame.select(column.alias(EPOCH_COLUMN), *(F.col(quoted(name)) for name in columns))
    except PySparkException as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(
            f"{whose}: Spark cannot evaluate it over {', '.join(frame.columns)}: {reason}"
        ) from None
    type_ = rows.schema[EPOCH_COLUMN].dataType
    if not isinstance(type_, IntegralType):
        raise InvalidInputError(
            f"{whose} is a {type_.simpleString()}, expected a whole number such as \"datediff(day, '2013-01-01')\" or "
            "'unix_timestamp(ts) div 3600'"
        )
    plan = rows._jdf.queryExecution().withCachedData()  # what is persisted stays as it is
    if not plan.deterministic() or contains(spark, plan, _DATED):
        raise InvalidInputError(
            f"{whose}, or the DataFrame, is another one each time it is asked (rand, uuid, current_date, ...): write it out first"
        )
    if contains(spark, plan, *_OF_MANY_ROWS) and not contains(
        spark, frame._jdf.queryExecution().withCachedData(), *_OF_MANY_ROWS
    ):
        raise InvalidInputError(f"{whose} depends on other rows, expected an expression over the row's own columns")
    return rows.withColumn(EPOCH_COLUMN, F.col(EPOCH_COLUMN).cast("bigint"))
