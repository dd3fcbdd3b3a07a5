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

from nosync.lsm.columns import describe, plain
from nosync.lsm.errors import NosyncError, SchemaError
from nosync.lsm.failures import decode_failure, encode_failure
from nosync.lsm.hashing import HASH_BITS
from nosync.operators import HASH64_COLUMN
from nosync.plan import BoundFlow, BoundStage
from nosync.segment import REPORT_COLUMN, REPORT_SCHEMA, TAG_COLUMN, Report, SegmentTask, emitted_schema
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
    origins: Mapping[str, int] = field(default_factory=dict)
    compute: Mapping[str, frozenset[int]] | None = None
    """By stage, the shards to compute; None: whatever is not recorded."""


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
        ends = [job.end(stage) for stage, keyed in flow.exits() if not keyed]
        try:
            rows = reduce(DataFrame.unionAll, ends).collect()
        finally:
            job.release()
    reports: dict[tuple[str, int], Report] = {}
    for row in rows:
        report = Report.from_json(bytes(row[0]))
        at = (report.stage, report.shard)
        # A segment with several exits runs once for each; the first to come computes, the others find its layers.
        reports[at] = max(report, reports.get(at, report), key=lambda r: r.computed)
    if plan.compute is None:
        silent = [(name, i) for name in flow.stages for i in range(plan.shards) if (name, i) not in reports]
        if silent:
            raise NosyncError(
                f"epoch {plan.t}: Spark ran no task for {silent[:3]} ({len(silent)} in all); run the epoch again"
            )
    return reports


class _EpochJob:
    def __init__(self, spark: SparkSession, flow: BoundFlow, plan: EpochPlan, inputs: Mapping[str, DataFrame]) -> None:
        self._spark, self._flow, self._plan, self._inputs = spark, flow, plan, inputs
        self._shared: dict[str, DataFrame] = {}

    def end(self, stage: BoundStage) -> DataFrame:
        """The reports of everything up to a stage that nobody consumes."""
        return self._segment(stage, emit=False)

    def _segment(self, last: BoundStage, *, emit: bool) -> DataFrame:
        path = self._flow.path(last.name)
        head = path[0]
        task = SegmentTask(
            root=self._plan.root,
            key_groups=self._flow.key_groups,
            t=self._plan.t,
            shards=self._plan.shards,
            path=path,
            emit=emit,
            origins=dict(self._plan.origins),
            compute=None if self._plan.compute is None else dict(self._plan.compute),
            input_given=head.name in self._inputs,
        )

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None, "runs inside a Spark task"
            # In a union of several ends of the flow, the partitions of each follow those of the one before.
            shard = context.partitionId() % task.shards
            try:
                yield from task.run_shard(shard, batches)
            except NosyncError as error:
                raise RuntimeError(encode_failure(error)) from None

        output = emitted_schema(last) if emit else REPORT_SCHEMA
        return self._input(head).mapInArrow(run, from_arrow_schema(output))

    def _input(self, head: BoundStage) -> DataFrame:
        if head.input is None:
            return self._source_rows(head)
        rows = self._emitted(self._flow.stages[head.input])
        hashed = F.xxhash64(*(F.col(_quoted(name)) for name in head.key))
        rows = rows.withColumn(HASH64_COLUMN, hashed)
        # Reports and marks carry the shard they go to in the tag.
        shard = F.when(F.col(REPORT_COLUMN).isNull(), self._shard_of(F.col(HASH64_COLUMN))).otherwise(F.col(TAG_COLUMN))
        return rows.repartitionById(self._plan.shards, shard.cast("int"))

    def release(self) -> None:
        for rows in self._shared.values():
            rows.unpersist()

    def _emitted(self, stage: BoundStage) -> DataFrame:
        """The rows that leave a stage; kept for the epoch where several keyed stages take them, so that it runs once."""
        found = self._shared.get(stage.name)
        if found is None:
            found = self._segment(stage, emit=True)
            if sum(consumer.keyed for consumer in self._flow.consumers(stage.name)) > 1:
                found = found.persist()
            self._shared[stage.name] = found
        return found

    def _source_rows(self, head: BoundStage) -> DataFrame:
        given = self._inputs.get(head.name)
        if given is None:
            schema = from_arrow_schema(head.schema.append(pa.field(HASH64_COLUMN, pa.int64())))
            return self._spark.createDataFrame([], schema).repartitionById(self._plan.shards, F.lit(0))
        rows = given.select([F.col(_quoted(name)) for name in head.schema.names])
        rows = rows.withColumn(HASH64_COLUMN, F.xxhash64(*(F.col(_quoted(name)) for name in head.schema.names)))
        return rows.repartitionById(self._plan.shards, self._shard_of(F.col(HASH64_COLUMN)).cast("int"))

    def _shard_of(self, hash64: Column) -> Column:
        """The shard of a key hash: hash32 -> key group -> shard, as `lsm.hashing` and `Shard.groups` have it."""
        group = F.shiftright(F.shiftrightunsigned(hash64, HASH_BITS) * F.lit(self._flow.key_groups), HASH_BITS)
        return F.floor(group * F.lit(self._plan.shards) / F.lit(self._flow.key_groups))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


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
