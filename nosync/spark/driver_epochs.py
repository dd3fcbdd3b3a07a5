"""Epochs of few rows, which the driver runs by itself, on Arrow (nosync.runtime.local_part): to plan a query, and to
start a Spark job and its tasks, would take several times as long as the work.

Spark still makes the rows that the epoch is given, and the driver fetches them. Nothing else of the epoch is different:
layers have the same digests. Spark runs an epoch

- whose rows may be more than `spark.nosync.driver.maxBytes`, by what Spark's optimizer knows of them, or by what the
  epoch before had where it knows nothing (of Kafka, say): then the driver fetches a few times as many, and looks if
  there are more;
- with functions of users, which stay in the processes of tasks, and expressions that Arrow does not evaluate alike;
- of a store that daemons keep, whose tasks run where the layers are;
- of a recovery, a replay or a backfill, whose size nobody knows before.

The log says why, at DEBUG.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from nosync.flow.bind_keyed import with_one_key
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage
from nosync.flow.stage_options import JvmOptions
from nosync.flow.tables import NewestRows
from nosync.kernels.over_partition import OverPartition
from nosync.lsm.errors import FlowError
from nosync.operators.canonical import is_hashed_alike
from nosync.runtime.epoch_plan import EpochPlan
from nosync.runtime.scan import why_not_scanned
from nosync.runtime.segment_task import SourceSize, edge_schema
from nosync.spark.expressions import quoted
from nosync.spark.plans.generators import Explode, Replicate
from nosync.spark.plans.whole_groups import WholeGroups
from nosync.spark.selecting import selected
from nosync.spark.session import DRIVER_MAX_BYTES

log = logging.getLogger("nosync")

_DEFAULT_MAX_BYTES = 4 << 20
_UNKNOWN_BYTES = 1 << 60
"""What Spark takes a plan to have of which it knows nothing; or more, for what is made of such plans."""
_ALL = 1 << 60
"""Of rows."""
_LEAST_ROWS, _TIMES_AS_MANY = 1_000, 4
"""How many rows are fetched to see whether there are more; and how many times as many as the epoch before had."""
_WITH_ALL_ROWS = frozenset({"LocalRelation", "InMemoryRelation"})
"""Plans that know how many rows they have: others estimate it."""
_OURS = (NewestRows, OverPartition, WholeGroups, Explode, Replicate)
"""Functions of stages that users did not write."""


class _BySpark(Exception):
    """Says why Spark has to run an epoch."""


def is_for_driver(flow: BoundFlow, plans: Sequence[EpochPlan]) -> bool:
    """Returns whether the driver could run an epoch if it had few rows. `flow`: as it is at that epoch."""
    try:
        _check_kind(flow, plans)
    except _BySpark as reason:
        log.debug("epoch %d of flow %s is run by Spark: %s", plans[0].t, flow.name, reason)
        return False
    return True


def few_rows(
    spark: SparkSession, flow: BoundFlow, inputs: Mapping[str, DataFrame], before: SourceSize | None
) -> dict[str, pa.Table] | None:
    """Returns the rows of each source, which Spark makes; None where they are many, or may be. `before`: what the epoch
    before had; None: that is not known.

    Raises FlowError where the session's setting of how many are few is no number of bytes.
    """
    try:
        tables = _fetched(spark, flow, inputs, before)
    except _BySpark as reason:
        log.debug("an epoch of flow %s is run by Spark: %s", flow.name, reason)
        return None
    log.debug("an epoch of flow %s is run by the driver: %d rows", flow.name, sum(map(len, tables.values())))
    return tables


def _check_kind(flow: BoundFlow, plans: Sequence[EpochPlan]) -> None:
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
    for stage in flow.stages.values():
        if not _is_evaluated_here(stage):
            raise _BySpark(f"stage {stage.name} has a function, or expressions, that only tasks or Spark evaluate")
    for segment in flow.segments.values():
        for edge in segment.edges:
            schema = edge_schema(flow.stages, edge)
            if not is_hashed_alike(schema.field(name).type for name in edge.key):
                raise _BySpark(f"a key of {edge.input} is of a type that Arrow does not hash as Spark does")


def _is_evaluated_here(stage: BoundStage) -> bool:
    if isinstance(stage.options, JvmOptions):
        return stage.options.step is not None
    return stage.function is None or isinstance(stage.function, _OURS) or stage.function is with_one_key


def _fetched(
    spark: SparkSession, flow: BoundFlow, inputs: Mapping[str, DataFrame], before: SourceSize | None
) -> dict[str, pa.Table]:
    """Raises _BySpark where there are, or may be, many."""
    sources = {source.name: source for source in flow.sources}
    if sources.keys() != inputs.keys():
        raise _BySpark("it is not given all of its inputs")
    most_bytes = max_bytes(spark)
    if not most_bytes:
        raise _BySpark(f"{DRIVER_MAX_BYTES} is 0")
    frames = {
        name: selected(inputs[name], [quoted(column) for column in source.schema.names])
        for name, source in sources.items()
    }
    size_bytes, most_rows = 0, dict.fromkeys(frames, _ALL)
    for name, frame in frames.items():
        plan: Any = frame._jdf.queryExecution().optimizedPlan()
        found = plan.stats()
        of_source = int(str(found.sizeInBytes()))
        if of_source >= _UNKNOWN_BYTES:
            most_rows[name] = _most_rows(before, most_bytes)
            continue
        size_bytes += of_source
        if size_bytes > most_bytes:
            raise _BySpark(f"it has {size_bytes:,} bytes, by what is known of them, and the driver runs {most_bytes:,}")
        if plan.getClass().getSimpleName() in _WITH_ALL_ROWS and str(found.rowCount()) == "Some(0)":
            most_rows[name] = 0
    return {name: _rows_of(frames[name], source, most_rows[name]) for name, source in sources.items()}


def _most_rows(before: SourceSize | None, most_bytes: int) -> int:
    """Returns how many rows of a source to fetch, of which nothing is known but what the epoch before had."""
    if before is None or before.size_bytes * _TIMES_AS_MANY > most_bytes:
        raise _BySpark(
            "nothing is known of how many rows it has" + ("" if before is None else ", and others have many")
        )
    return max(_LEAST_ROWS, before.rows * _TIMES_AS_MANY)


def _rows_of(frame: DataFrame, source: BoundStage, most: int) -> pa.Table:
    """Returns the rows of a source. Raises _BySpark where these are more than `most`."""
    if not most:
        return source.schema.empty_table()
    try:
        rows = (frame if most == _ALL else frame.limit(most + 1)).toArrow().cast(source.schema)
    except (PySparkException, Py4JError, pa.ArrowException) as error:
        # Whatever is wrong with the rows, Spark says it where a task asks for them.
        raise _BySpark(f"the rows of source {source.name} cannot be fetched: {type(error).__name__}") from None
    if rows.num_rows > most:
        raise _BySpark(f"source {source.name} has more than {most:,} rows, where the epoch before had few")
    return rows


def max_bytes(spark: SparkSession) -> int:
    """Returns for how many bytes of rows, at most, the driver runs an epoch by itself; 0: it runs none.

    Raises FlowError where the session's setting is no number of bytes.
    """
    value = str(spark.conf.get(DRIVER_MAX_BYTES, str(_DEFAULT_MAX_BYTES)))
    return _bytes_of(spark._jvm, value)


@functools.cache  # it is asked for in each epoch
def _bytes_of(jvm: Any, text: str) -> int:
    try:
        return max(0, int(jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(text)))
    except (PySparkException, Py4JError):
        raise FlowError(
            f"{DRIVER_MAX_BYTES} is {text!r}, expected a size such as '4m', or '0' to have Spark run every epoch: set or "
            "unset it with spark.conf"
        ) from None
