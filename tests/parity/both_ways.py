"""Runs micro-batches through a Structured Streaming query, and through a flow without Spark; rows at the sink come back."""

from __future__ import annotations

import datetime
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import nosync
from nosync.lsm.trace.change_feed import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from tests.helpers.runner import StoreRunner
from tests.parity.rows import batches_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batch = Mapping[str, pa.Table]
Streams = Mapping[str, "DataFrame"]
EVENTS = "at timestamp, k string, x bigint"
Rows = Counter[tuple[Any, ...]]
APPEND, UPDATE, COMPLETE = "append", "update", "complete"
EPOCHS_AFTER = 3
"""How many epochs without rows come at the end: Spark runs batches without rows by itself."""
MOST_SHARDS = 3


@dataclass(frozen=True)
class Case:
    """One operator, in both forms, and how rows for it are made."""

    name: str
    mode: str
    query: Callable[[Mapping[str, DataFrame]], DataFrame]
    """The query over its streams, by source."""
    flow: Callable[[], nosync.Dataflow]
    """The flow that it becomes. Its stage `out` is compared."""
    columns: Sequence[str]
    """The columns that are compared, in both."""
    batches: Callable[[np.random.Generator], list[Batch]]
    key: Sequence[str] = ()
    """In mode update: the columns of which the newest row counts."""
    until: datetime.datetime | None = None
    """Rows that have a time at or after this one in the first column are left out."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of Spark that the query needs."""

    def counted(self, rows: Rows) -> Rows:
        """Returns the rows that are compared."""
        return rows if self.until is None else Counter({row: n for row, n in rows.items() if row[0] < self.until})


def one(*columns: str, **how: Any) -> Callable[[np.random.Generator], list[Batch]]:
    return lambda random: [{"events": batch} for batch in batches_of(random, *columns, **how)]


def flow_of(build: Callable[[nosync.Stage], object], columns: str = EVENTS) -> Callable[[], nosync.Dataflow]:
    """Returns what makes a flow with one source, `events`."""

    def make() -> nosync.Dataflow:
        flow = nosync.Dataflow("parity")
        build(flow.source("events", columns))
        return flow

    return make


# --- by Spark ---------------------------------------------------------------------------------------------------------


def by_spark(spark: SparkSession, case: Case, batches: Sequence[Batch], root: Path) -> Rows:
    """Returns the rows that reach the sink of the query; in mode update and complete those that are left there."""
    streams = {}
    for name in batches[0]:
        directory = root / name
        directory.mkdir(parents=True)
        for i, batch in enumerate(batches):
            path = directory / f"{i:04}.parquet"
            pq.write_table(batch[name], path)
            os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
        schema = spark.read.parquet(str(directory)).schema
        streams[name] = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(directory))
    given: list[tuple[int, list[tuple[Any, ...]]]] = []

    def keep(rows: DataFrame, batch: int) -> None:
        given.append((batch, [tuple(map(plain, row)) for row in rows.collect()]))

    query = case.query(streams).select(*case.columns)
    writer = query.writeStream.outputMode(case.mode).foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(root / "checkpoint")).trigger(availableNow=True)
    writer.start().awaitTermination()
    if case.mode == COMPLETE:
        return Counter(given[-1][1])
    if case.mode == APPEND:
        return case.counted(Counter(row for _, rows in given for row in rows))
    return newest(case, (row for _, rows in given for row in rows))


def newest(case: Case, rows: Iterable[tuple[Any, ...]]) -> Rows:
    """Returns the newest row of each key."""
    at = [case.columns.index(name) for name in case.key]
    return Counter({tuple(row[i] for i in at): row for row in rows}.values())


def plain(value: Any) -> Any:
    """Returns a value that compares as Spark and Arrow agree: times without a zone, floats with few digits."""
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).replace(tzinfo=None) if value.tzinfo else value
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else float(f"{value:.9g}")
    return value


# --- by nosync --------------------------------------------------------------------------------------------------------


def by_nosync(case: Case, batches: Sequence[Batch], root: Path, seed: int, *, lose: bool = False) -> Rows:
    """Returns the rows that a sink is given; in mode update and complete those that are left there.

    Each epoch has another number of shards, and a runner of its own, as after a restart. With `lose` layers are lost in
    the middle, and computed again.
    """
    random = np.random.default_rng(seed)
    nothing = {name: table.slice(0, 0) for name, table in batches[0].items()}
    epochs = [*batches, *[nothing] * EPOCHS_AFTER]
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0)
    with nosync.open(root, retain=1000, settings=settings) as store:
        shards = [int(random.integers(1, MOST_SHARDS + 1)) for _ in epochs]
        for t, batch in enumerate(epochs):
            StoreRunner(case.flow(), store, seed + t, shards=shards[t]).advance(t, batch)
        if lose:
            _lose_and_recover(case, store, epochs, shards, seed)
        feed = store.changes("out", -1, len(epochs) - 1).to_pylist()
    return case.counted(at_sink(case, feed))


def at_sink(case: Case, feed: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns what a sink has after changes of a stage."""
    if case.mode == APPEND:
        kinds = {row["_change_type"] for row in feed}
        assert kinds <= {INSERT}, f"what was given once is taken back: {kinds}"
    left: Rows = Counter()
    for row in feed:
        values = tuple(plain(row[name]) for name in case.columns)
        left[values] += {INSERT: 1, UPDATE_AFTER: 1, DELETE: -1, UPDATE_BEFORE: -1}[row["_change_type"]]
    assert min(left.values(), default=0) >= 0
    return +left


def _lose_and_recover(
    case: Case, store: nosync.Store, epochs: Sequence[Batch], shards: Sequence[int], seed: int
) -> None:
    """Deletes the layers of all stages but the sources, and runs all epochs again: digests are as they were sealed."""
    store.sync()
    sources = {stage.name for stage in case.flow().sources}
    for directory in (store.directory.root / "layers").iterdir():
        if directory.name not in sources:
            shutil.rmtree(directory)
    for t, batch in enumerate(epochs):
        StoreRunner(case.flow(), store, seed + len(epochs) + t, shards=shards[t]).advance(t, batch)
    store.sync()
    assert store.missing() == []
