"""One Spark job per epoch: builds the DataFrame that computes and records every stage, and runs it.

    source rows -> hash in the JVM -> repartitionById(shard) -> segment task -> hash -> repartitionById -> ... -> reports

Each segment is one `mapInArrow`; only reports reach the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from nosync.dataflow import PART_SEPARATOR
from nosync.lsm.columns import describe, plain
from nosync.lsm.errors import NosyncError, SchemaError
from nosync.lsm.failures import decode_failure, encode_failure
from nosync.lsm.hashing import HASH_BITS
from nosync.lsm.history import History
from nosync.operators import HASH64_COLUMN
from nosync.plan import WATERMARK, BoundFlow, BoundStage, Emission, Feed, Segment
from nosync.segment import (
    REPORT_COLUMN,
    REPORT_SCHEMA,
    SIDE_COLUMN,
    TAG_COLUMN,
    TAG_SHARD_BITS,
    Report,
    SegmentTask,
    emitted_schema,
    side_column,
)
from nosync.spark.expressions import for_tasks, jvm_rows, quoted
from nosync.spark.session import session_settings

_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_RULES_TO_EXCLUDE = (
    # It would drop the tasks over an empty input, which have empty layers to record.
    "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
)


@dataclass(frozen=True)
class EpochPlan:
    """What one run of an epoch is to do."""

    root: str
    t: int
    shards: int
    histories: Mapping[str, History] = field(default_factory=dict)
    compute: Mapping[str, frozenset[int]] | None = None
    """By stage, the shards to compute; None: whatever is not recorded."""
    job_epoch: int = 0


def parse_ddl(text: str) -> pa.Schema:
    """Spark's DDL as an Arrow schema; timestamps in UTC."""
    schema = StructType.fromDDL(text)
    if not isinstance(schema, StructType):
        raise SchemaError(f"{text!r} is a single type, expected columns such as 'name string, n bigint'")
    return to_arrow_schema(schema, timezone="UTC")


def run_epoch(
    spark: SparkSession, flow: BoundFlow, plan: EpochPlan, inputs: Mapping[str, DataFrame]
) -> dict[tuple[str, int], Report]:
    """Runs the epoch's Spark job. Returns a report for each (stage, shard) that was computed or yielded.

    Raises whatever a task raised, as the NosyncError it was.
    """
    # Under foreachBatch the rows belong to a session of the query's own.
    spark = next((frame.sparkSession for frame in inputs.values()), spark)
    with task_errors(), settings_for_epochs(spark):
        job = _EpochJob(spark, flow, plan, inputs)
        try:
            rows = reduce(DataFrame.unionAll, job.ends()).collect()
        finally:
            job.release()
    reports: dict[tuple[str, int], Report] = {}
    for row in rows:
        report = Report.from_json(bytes(row[0]))
        at = (report.stage, report.shard)
        # A segment with several exits runs once for each; the first to come computes, the others find its layers.
        reports[at] = max(report, reports.get(at, report), key=lambda r: r.computed)
    if plan.compute is None:
        silent = [
            (name, i)
            for name in (s.name for s in flow.recorded)
            for i in range(plan.shards)
            if (name, i) not in reports
        ]
        if silent:
            raise NosyncError(
                f"epoch {plan.t}: Spark ran no task for {silent[:3]} ({len(silent)} in all); run the epoch again"
            )
    return reports


class _EpochJob:
    def __init__(self, spark: SparkSession, flow: BoundFlow, plan: EpochPlan, inputs: Mapping[str, DataFrame]) -> None:
        self._spark, self._flow, self._plan, self._inputs = spark, flow, plan, inputs
        self._shared: dict[Emission, DataFrame] = {}

    def ends(self) -> list[DataFrame]:
        """The reports of everything: of each segment from which nothing is emitted.

        The reports of the others travel with the rows that they emit.
        """
        return [self._segment(s, None) for s in self._flow.segments.values() if not self._flow.emissions(s)]

    def _segment(self, segment: Segment, emission: Emission | None) -> DataFrame:
        flow, plan = self._flow, self._plan
        # The first to leave the segment computes all of it; the others what they need, which they find recorded.
        emissions = flow.emissions(segment)
        run = segment.stages
        if emission is not None and emission != emissions[0]:
            run = flow.needed_for(segment, emission.stage)
        feeds = [f for f in segment.feeds if any(f.input in flow.stages[name].inputs for name in run)]
        named = {*run, *(name for f in feeds for name in (f.emission.stage, *f.jvm))}
        named |= {
            f"{name.partition(PART_SEPARATOR)[0]}{PART_SEPARATOR}{WATERMARK}" for name in run
        } & flow.stages.keys()
        task = SegmentTask(
            root=plan.root,
            key_groups=flow.key_groups,
            t=plan.t,
            shards=plan.shards,
            stages={name: for_tasks(flow.stages[name]) for name in flow.stages if name in named},
            run=run,
            feeds=tuple(feeds),
            emission=emission,
            histories={name: plan.histories[name] for name in named if name in plan.histories},
            compute=None if plan.compute is None else dict(plan.compute),
            input_given=segment.name in self._inputs,
            job_epoch=plan.job_epoch,
        )

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None, "runs inside a Spark task"
            # In a union of several ends of the flow, the partitions of each follow those of the one before.
            shard = context.partitionId() % task.shards
            try:
                yield from task.run_shard(shard, batches)
            except NosyncError as error:
                raise RuntimeError(encode_failure(error)) from None

        output = REPORT_SCHEMA if emission is None else emitted_schema(flow.stages[emission.stage], emission)
        rows = self._fed(feeds) if feeds else self._source_rows(flow.stages[segment.name])
        return rows.mapInArrow(work, from_arrow_schema(output))

    def _fed(self, feeds: list[Feed]) -> DataFrame:
        """The rows of a segment's feeds, each in the shard that it belongs to."""
        if len(feeds) == 1:
            rows = self._fed_by(feeds[0])
            if not feeds[0].key:
                return rows  # they are in their shards already
        else:
            rows = reduce(DataFrame.unionAll, [self._beside(i, feeds) for i in range(len(feeds))])
        # Reports and marks carry the shard they go to in the tag; rows that stay in their shard have it there as well.
        by_key, home = self._shard_of(F.col(HASH64_COLUMN)), F.shiftright(F.col(TAG_COLUMN), TAG_SHARD_BITS)
        keyed = [i for i, feed in enumerate(feeds) if feed.key]
        if len(feeds) > 1 and keyed:
            by_key = F.when(F.col(SIDE_COLUMN).isin(keyed), by_key).otherwise(home)
        elif not keyed:
            by_key = home
        shard = F.when(F.col(REPORT_COLUMN).isNull(), by_key).otherwise(F.col(TAG_COLUMN))
        return rows.repartitionById(self._plan.shards, shard.cast("int"))

    def _fed_by(self, feed: Feed) -> DataFrame:
        """A feed's rows, with the hash of their key."""
        rows = self._emitted(feed.emission)
        for name in feed.jvm:
            rows = jvm_rows(self._flow.stages[name], rows, keep=(TAG_COLUMN, REPORT_COLUMN))
        if feed.key:
            rows = rows.withColumn(HASH64_COLUMN, F.xxhash64(*(F.col(quoted(name)) for name in feed.key)))
        return rows

    def _beside(self, index: int, feeds: list[Feed]) -> DataFrame:
        """A feed's rows in a form that has columns for the rows of all feeds."""
        frames = [self._fed_by(feed) for feed in feeds]
        common = [TAG_COLUMN, REPORT_COLUMN]
        columns: list[Column] = [F.lit(index).alias(SIDE_COLUMN)]
        for i, frame in enumerate(frames):
            for f in frame.schema:
                if f.name not in (*common, HASH64_COLUMN):
                    value = F.col(quoted(f.name)) if i == index else F.lit(None).cast(f.dataType)
                    columns.append(value.alias(side_column(i, f.name)))
        hashed = F.col(HASH64_COLUMN) if feeds[index].key else F.lit(None).cast("long")
        return frames[index].select(*columns, *common, hashed.alias(HASH64_COLUMN))

    def release(self) -> None:
        for rows in self._shared.values():
            rows.unpersist()

    def _emitted(self, emission: Emission) -> DataFrame:
        """The rows that leave a segment; kept for the epoch where several take them, so that it runs once."""
        found = self._shared.get(emission)
        if found is None:
            found = self._segment(self._flow.segment_of(emission.stage), emission)
            takers = [s for s in self._flow.segments.values() if any(f.emission == emission for f in s.feeds)]
            feeds = sum(f.emission == emission for s in takers for f in s.feeds)
            if feeds > 1 or sum(len(self._flow.emissions(s)) > 1 for s in takers):
                found = found.persist()
            self._shared[emission] = found
        return found

    def _source_rows(self, head: BoundStage) -> DataFrame:
        given = self._inputs.get(head.name)
        if given is None:
            schema = from_arrow_schema(head.schema.append(pa.field(HASH64_COLUMN, pa.int64())))
            return self._spark.createDataFrame([], schema).repartitionById(self._plan.shards, F.lit(0))
        rows = given.select([F.col(quoted(name)) for name in head.schema.names])
        rows = rows.withColumn(HASH64_COLUMN, F.xxhash64(*(F.col(quoted(name)) for name in head.schema.names)))
        return rows.repartitionById(self._plan.shards, self._shard_of(F.col(HASH64_COLUMN)).cast("int"))

    def _shard_of(self, hash64: Column) -> Column:
        """The shard of a key hash: hash32 -> key group -> shard, as `lsm.hashing` and `Shard.groups` have it."""
        group = F.shiftright(F.shiftrightunsigned(hash64, HASH_BITS) * F.lit(self._flow.key_groups), HASH_BITS)
        return F.floor(group * F.lit(self._plan.shards) / F.lit(self._flow.key_groups))


def check_input(stage: BoundStage, frame: Any) -> DataFrame:
    """The DataFrame, if it has the source's columns with its types. Raises SchemaError naming what differs."""
    if not hasattr(frame, "mapInArrow") or not hasattr(frame, "schema"):
        raise SchemaError(f"source {stage.name}: {type(frame).__name__} was given, expected a Spark DataFrame")
    found = plain(to_arrow_schema(frame.schema, timezone="UTC").empty_table()).schema
    for expected in stage.schema:
        index = found.get_field_index(expected.name)
        if index < 0:
            raise SchemaError(
                f"source {stage.name}: column {expected.name!r} is missing; expected {describe(stage.schema)}, "
                f"found {describe(found)}"
            )
        if found.field(index).type != expected.type:
            raise SchemaError(
                f"source {stage.name}: column {expected.name!r} is {found.field(index).type}, expected {expected.type}: cast it"
            )
    checked: DataFrame = frame
    return checked


@contextmanager
def task_errors() -> Iterator[None]:
    """Turns what Spark made of a task's error back into that error."""
    try:
        yield
    except PySparkException as error:
        failure = decode_failure(str(error))
        if failure is None:
            raise NosyncError(f"the Spark job failed: {str(error).strip().splitlines()[0]}") from error
        raise failure from None
    except Exception as error:
        failure = decode_failure(str(error))
        if failure is None:
            raise
        raise failure from None


@contextmanager
def settings_for_epochs(spark: SparkSession) -> Iterator[None]:
    """The session's settings while an epoch is planned and run; the user's come back afterwards."""
    excluded = spark.conf.get(_EXCLUDED_RULES, None)
    ours = {**session_settings(), _EXCLUDED_RULES: ",".join(filter(None, [excluded, *_RULES_TO_EXCLUDE]))}
    before = {name: spark.conf.get(name, None) for name in ours}
    for name, value in ours.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
