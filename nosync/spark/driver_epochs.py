"""Epochs of few rows, which the driver runs by itself, on Arrow (nosync.runtime.local_part): to plan a query, and to
start a Spark job and its tasks, would take several times as long as the work.

Spark still makes the rows that the epoch is given, and the driver fetches them; or reads them, where they are just
files (nosync.spark.parquet_inputs). Nothing else of the epoch is different: layers have the same digests. Spark runs an
epoch

- whose rows may be more than `spark.nosync.driver.maxBytes`, by what Spark's optimizer knows of them, or by what the
  epoch before had where it knows nothing (of Kafka, say): then the driver fetches a few times as many, and looks if
  there are more;
- with functions of users, which stay in the processes of tasks unless `spark.nosync.driver.functions.enabled` is true,
  and expressions that Arrow does not evaluate alike;
- of a store that daemons keep, whose tasks run where the layers are;
- of a recovery, a replay or a backfill, whose size nobody knows before.

The log says why, at DEBUG.

Where epochs take a while, `spark.nosync.driver.cores` shards run side by side (nosync.runtime.shard_workers).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.util import inheritable_thread_target

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage
from nosync.flow.stage_options import JvmOptions
from nosync.kernels.own_function import OwnFunction
from nosync.lsm.errors import FlowError, ScanError
from nosync.operators.canonical import is_hashed_alike
from nosync.runtime.epoch_plan import EpochPlan, Reports
from nosync.runtime.local_part import run_epoch, run_here
from nosync.runtime.scan import SourceFiles, read_few, why_not_scanned
from nosync.runtime.segment_task import SourceSize, edge_schema
from nosync.runtime.shard_workers import workers_of_process
from nosync.spark.expressions import quoted
from nosync.spark.selecting import selected
from nosync.spark.session import DRIVER_CORES, DRIVER_FUNCTIONS_ENABLED, DRIVER_MAX_BYTES, is_enabled

log = logging.getLogger("nosync")

_DEFAULT_MAX_BYTES = 4 << 20
_UNKNOWN_BYTES = 1 << 50
"""Spark takes a plan of which it knows nothing to have 2 ** 63 bytes; a part of them, for some of its columns."""
_LEAST_ROWS, _TIMES_AS_MANY = 1_000, 4
"""How many rows are fetched to see whether there are more; and how many times as many as the epoch before had."""
_FETCHED_AT_ONCE = 8
_LEAST_ROW_BYTES, _TEXT_BYTES = 40, 16
"""For so many bytes a row counts at least: of 100,000 rows, however narrow, Spark's tasks are as quick (driver_epochs)."""
_WORTH_S, _WORTH_EPOCHS = 0.02, 3
"""A job gets workers after so many epochs that took so long: to start one takes longer than many an epoch."""
_LOCAL_MASTER = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,.*)?\])?")


class _BySpark(Exception):
    """Says why Spark has to run an epoch."""


class DriverEpochs:
    """Runs those epochs of a job that have few rows."""

    def __init__(self) -> None:
        self._before: SourceSize | None = None
        self._is_off = False
        self._long_epochs = 0

    def note_size(self, size: SourceSize) -> None:
        """Notes how much an epoch had, whoever ran it."""
        self._before = size

    def may_run(self, spark: SparkSession, flow: BoundFlow, plans: Sequence[EpochPlan]) -> bool:
        """Returns whether the driver runs an epoch if it has few rows. `flow`: as it is at that epoch.

        Raises FlowError where the session's setting of functions is neither true nor false.
        """
        if self._is_off:
            return False
        try:
            _check_kind(spark, flow, plans)
        except _BySpark as reason:
            log.debug("epoch %d of flow %s is run by Spark: %s", plans[0].t, flow.name, reason)
            return False
        return True

    def few_rows(
        self,
        spark: SparkSession,
        flow: BoundFlow,
        inputs: Mapping[str, DataFrame],
        files: Mapping[str, SourceFiles],
    ) -> dict[str, pa.Table] | None:
        """Returns the rows of each source, which Spark makes; None where they are many, or may be. `files`: those that the
        rows of all sources are in, and Arrow reads; empty: they are not.

        Raises FlowError where the session's setting of how many are few is no number of bytes.
        """
        try:
            tables = _read(spark, flow, files) if files else _fetched(spark, flow, inputs, self._before)
        except _BySpark as reason:
            log.debug("an epoch of flow %s is run by Spark: %s", flow.name, reason)
            return None
        log.debug("an epoch of flow %s is run by the driver: %d rows", flow.name, sum(map(len, tables.values())))
        return tables

    def run(
        self, spark: SparkSession, flow: BoundFlow, plan: EpochPlan, tables: Mapping[str, pa.Table]
    ) -> dict[int, Reports] | None:
        """Runs an epoch, and returns what `run_epochs` returns. None where Spark is to run it, and later ones, on the same
        rows: there is something in them that Arrow does not compute, or not as Spark does. Raises what tasks raise, and
        FlowError where the session's setting of cores is no number of them.
        """
        started = time.perf_counter()
        try:
            count = self._workers(spark, flow, plan)
            with workers_of_process(count) if count else contextlib.nullcontext() as run_task:
                found = run_epoch(flow, plan, tables, run_task or run_here)
        except ScanError as error:
            log.info("epoch %d: %s; Spark computes it, and the job's later epochs", plan.t, error)
            self._is_off = True
            return None
        self._long_epochs += time.perf_counter() - started >= _WORTH_S
        return {plan.t: found}

    def _workers(self, spark: SparkSession, flow: BoundFlow, plan: EpochPlan) -> int:
        """Returns how many processes are to run shards beside this one."""
        if plan.shards == 1 or self._long_epochs < _WORTH_EPOCHS:
            return 0
        if any(_has_function_of_user(stage) for stage in flow.stages.values()):
            return 0  # which are to run in this process
        return min(plan.shards, _cores(spark)) - 1


def _check_kind(spark: SparkSession, flow: BoundFlow, plans: Sequence[EpochPlan]) -> None:
    """Raises _BySpark for what no number of rows would make an epoch of the driver."""
    plan = plans[0]
    if len(plans) > 1 or plan.compute is not None or plan.skip:
        raise _BySpark("it is one of several, or was run before")
    if plan.location.store_id:
        raise _BySpark("daemons keep the store")
    if flow.bootstraps_at(plan.t):
        raise _BySpark("a stage begins anew with it")
    reason = why_not_scanned(flow)
    if reason is not None:
        raise _BySpark(reason)
    of_users = [stage.name for stage in flow.stages.values() if _has_function_of_user(stage)]
    if of_users and not is_enabled(spark, DRIVER_FUNCTIONS_ENABLED, "false"):
        raise _BySpark(f"stage {of_users[0]} has a function, and {DRIVER_FUNCTIONS_ENABLED} is not true")
    for stage in flow.stages.values():
        if isinstance(stage.options, JvmOptions) and stage.options.step is None:
            raise _BySpark(f"stage {stage.name} has expressions that only Spark evaluates")
    for segment in flow.segments.values():
        for edge in segment.edges:
            schema = edge_schema(flow.stages, edge)
            if not is_hashed_alike((schema.field(name).type for name in edge.key), nested=True):
                raise _BySpark(f"a key of {edge.input} is of a type that Arrow does not hash as Spark does")


def _has_function_of_user(stage: BoundStage) -> bool:
    function = stage.function
    return function is not None and not isinstance(function, OwnFunction)


def _read(spark: SparkSession, flow: BoundFlow, files: Mapping[str, SourceFiles]) -> dict[str, pa.Table]:
    """Raises _BySpark where there are many, and for files that cannot be read after all."""
    most_bytes = _most_bytes(spark)
    size_bytes = sum(of_source.size_bytes for of_source in files.values())
    if size_bytes > most_bytes:
        raise _BySpark(f"its files have {size_bytes:,} bytes, and the driver runs {most_bytes:,}")
    tables, most_rows = {}, most_bytes // _LEAST_ROW_BYTES
    for source in flow.sources:
        try:
            rows = read_few(files[source.name], source.schema, most_rows, most_bytes)
        except ScanError as error:
            raise _BySpark(str(error)) from None
        if rows is None:
            raise _BySpark(f"source {source.name} has more than {most_rows:,} rows, or more than {most_bytes:,} bytes")
        tables[source.name] = rows
    return tables


def _fetched(
    spark: SparkSession, flow: BoundFlow, inputs: Mapping[str, DataFrame], before: SourceSize | None
) -> dict[str, pa.Table]:
    """Raises _BySpark where there are, or may be, many."""
    sources = {source.name: source for source in flow.sources}
    if sources.keys() != inputs.keys():
        raise _BySpark("it is not given all of its inputs")
    most_bytes = _most_bytes(spark)
    if before is not None and before.size_bytes > most_bytes * _TIMES_AS_MANY:
        raise _BySpark("the epoch before had many")  # to ask Spark how many there are takes its time
    frames = {
        name: selected(inputs[name], [quoted(column) for column in source.schema.names])
        for name, source in sources.items()
    }
    size_bytes, most_rows = 0, dict[str, int | None]()
    for name, frame in frames.items():
        plan: Any = frame._jdf.queryExecution().optimizedPlan()
        of_source = int(str(plan.stats().sizeInBytes()))
        if of_source >= _UNKNOWN_BYTES:
            most_rows[name] = _most_rows(before, most_bytes)
            continue
        size_bytes += of_source
        if size_bytes > most_bytes:
            raise _BySpark(f"it has {size_bytes:,} bytes, by what is known of them, and the driver runs {most_bytes:,}")
        # What Spark says of files, and of what functions make of rows, may be far too little.
        rows = _rows_in_memory(plan)
        if rows is None:
            most_rows[name] = most_bytes // _row_bytes(sources[name])
        elif rows > most_bytes // _LEAST_ROW_BYTES:
            raise _BySpark(f"source {name} has {rows:,} rows, and the driver runs {most_bytes // _LEAST_ROW_BYTES:,}")
        else:
            most_rows[name] = None if rows else 0
    wanted = {name: source for name, source in sources.items() if most_rows[name] != 0}
    found = {name: source.schema.empty_table() for name, source in sources.items() if name not in wanted}
    if len(wanted) < 2:
        return found | {name: _rows_of(frames[name], source, most_rows[name]) for name, source in wanted.items()}
    # At once: nearly all of the time that few rows take is that of one thread, of Spark's scheduler.
    with ThreadPoolExecutor(min(len(wanted), _FETCHED_AT_ONCE), thread_name_prefix="nosync-fetch") as pool:
        # What is set for this thread (a job group, tags, a pool of the scheduler) is set for these jobs, too: a copy for each.
        coming = {
            name: pool.submit(inheritable_thread_target(spark)(_rows_of), frames[name], source, most_rows[name])
            for name, source in wanted.items()
        }
    return found | {name: rows.result() for name, rows in coming.items()}


def _rows_in_memory(plan: Any) -> int | None:
    """Returns how many rows a plan has that only selects columns of rows in memory; None for another one, or who only
    guesses.
    """
    kind = plan.getClass().getSimpleName()
    while kind == "Project":
        plan = plan.child()
        kind = plan.getClass().getSimpleName()
    if kind == "InMemoryRelation":
        return int(str(plan.stats().rowCount().get())) if plan.cacheBuilder().isCachedColumnBuffersLoaded() else None
    return int(plan.data().size()) if kind == "LocalRelation" else None


def _row_bytes(source: BoundStage) -> int:
    """Returns for how many bytes a row counts of which nothing is known but its columns."""
    known = (pa.types.is_primitive(type_) or pa.types.is_decimal(type_) for type_ in source.schema.types)
    widths = zip(source.schema.types, known, strict=True)
    return max(
        _LEAST_ROW_BYTES, sum(type_.bit_width // 8 + 1 if is_fixed else _TEXT_BYTES for type_, is_fixed in widths)
    )


def _most_rows(before: SourceSize | None, most_bytes: int) -> int:
    """Returns how many rows of a source to fetch, of which nothing is known but what the epoch before had."""
    if before is None or before.size_bytes * _TIMES_AS_MANY > most_bytes:
        raise _BySpark(
            "nothing is known of how many rows it has" + ("" if before is None else ", and others have many")
        )
    return max(_LEAST_ROWS, before.rows * _TIMES_AS_MANY)


def _rows_of(frame: DataFrame, source: BoundStage, most: int | None) -> pa.Table:
    """Returns the rows of a source. Raises _BySpark where these are more than `most`; None: they are not."""
    try:
        rows = (frame if most is None else frame.limit(most + 1)).toArrow().cast(source.schema)
    except (PySparkException, Py4JError, pa.ArrowException, ValueError) as error:
        # Whatever is wrong with the rows, Spark says it where a task asks for them.
        raise _BySpark(f"the rows of source {source.name} cannot be fetched: {type(error).__name__}") from None
    if most is not None and rows.num_rows > most:
        raise _BySpark(
            f"source {source.name} has more than {most:,} rows, which is more than was known, or than before"
        )
    return rows


def _most_bytes(spark: SparkSession) -> int:
    """Returns for how many bytes of rows, at most, the driver runs an epoch. Raises _BySpark where that is none.

    Raises FlowError where the session's setting is no number of bytes.
    """
    value = str(spark.conf.get(DRIVER_MAX_BYTES, str(_DEFAULT_MAX_BYTES)))
    most_bytes: int = _bytes_of(spark._jvm, value)
    if not most_bytes:
        raise _BySpark(f"{DRIVER_MAX_BYTES} is 0")
    return most_bytes


def _cores(spark: SparkSession) -> int:
    """Returns how many cores the driver may use: what the session says, or what Spark gives it.

    Raises FlowError where the session's setting is no number of cores.
    """
    there = len(os.sched_getaffinity(0))
    local = _LOCAL_MASTER.fullmatch(spark.sparkContext.master or "")
    of_spark = spark.conf.get("spark.driver.cores", "1") if local is None else local[1] or "1"
    value = str(spark.conf.get(DRIVER_CORES, str(there) if of_spark == "*" else of_spark))
    if not value.isdecimal() or int(value) < 1:
        raise FlowError(
            f"{DRIVER_CORES} is {value!r}, expected a number of cores such as '4', or '1' to have one process run all "
            "shards: set or unset it with spark.conf"
        )
    return min(int(value), there)


@functools.cache  # it is asked for in each epoch
def _bytes_of(jvm: Any, text: str) -> int:
    try:
        return max(0, int(jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(text)))
    except (PySparkException, Py4JError):
        raise FlowError(
            f"{DRIVER_MAX_BYTES} is {text!r}, expected a size such as '4m', or '0' to have Spark run every epoch: set or "
            "unset it with spark.conf"
        ) from None
