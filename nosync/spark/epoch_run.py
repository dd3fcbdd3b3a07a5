"""Runs epochs on Spark: one Spark job for each round of a loop, and one for all the rest. Where there are few rows the
driver runs them, without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.flow.bound_flow import BoundFlow
from nosync.runtime.epoch_parts import run_parts
from nosync.runtime.epoch_plan import EpochPlan, Part, Reports
from nosync.spark.arrow_transfer import handover
from nosync.spark.driver_epochs import DriverEpochs
from nosync.spark.epoch_job import EpochJob, Work
from nosync.spark.errors import task_errors
from nosync.spark.file_shuffle import Exchanges
from nosync.spark.given_rows import GivenRows
from nosync.spark.parquet_inputs import files_to_scan
from nosync.spark.session import (
    EXCHANGE_ENABLED,
    SCAN_ENABLED,
    conf_set,
    in_own_zone,
    is_enabled,
    session_settings,
    turn_of,
)

_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_MOST_SHOWN = 5
_RULES_TO_EXCLUDE = (
    # It would drop the tasks over an empty input, which have empty layers to record.
    "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
)


def run_epochs(
    spark: SparkSession,
    flow: BoundFlow,
    plans: Sequence[EpochPlan],
    inputs: Mapping[str, DataFrame],
    *,
    has_wide_rows: bool = False,
    may_scan: bool = True,
    exchanges: Exchanges | None = None,
    driver: DriverEpochs | None = None,
    settings: Mapping[str, str],
) -> dict[int, Reports]:
    """Runs epochs: one Spark job for each round of each loop, and one for all the rest, or none where the driver can.

    Several epochs have one number of shards and skip the same stages, and have no loops; rows that they are given have
    `_epoch`. `exchanges`: what epochs before tell of how rows should go to their shards. `driver`: runs what has few
    rows. `settings`: of the session meanwhile.

    Returns for each epoch a report of every (stage, shard) that was computed or yielded. Raises whatever a task raised,
    as the NosyncError it was: WideRowError where they can be run again with `has_wide_rows`, and ScanError without
    `may_scan`.
    """
    declared, flow = flow, flow.at_epoch(plans[0].t)
    # Under foreachBatch the rows belong to a session of the query's own.
    given = inputs.as_given if isinstance(inputs, GivenRows) else inputs
    spark = next((frame.sparkSession for frame in given.values()), spark)
    if plans[0].compute is None and all(source.name in inputs for source in flow.sources):
        flow = flow.fused
    with task_errors(_computed(flow, plans)), turn_of(spark):
        may_scan = is_enabled(spark, SCAN_ENABLED) and may_scan
        exchanges = exchanges if is_enabled(spark, EXCHANGE_ENABLED) else None
        files = files_to_scan(flow, plans[0].shards, inputs) if may_scan and len(plans) == 1 else {}
        may_run_here = driver is not None and driver.may_run(spark, flow, plans)
        planned = {} if files and may_run_here else _planned(inputs)
        if driver is not None and may_run_here:
            with settings_for_epochs(spark, settings):
                tables = driver.few_rows(spark, flow, planned, files)
                if tables is not None:
                    found = driver.run(spark, declared, plans[0], tables)
                    if found is not None:
                        return found
                    # Not asked for again: they might be others then, and some are recorded.
                    inputs = planned = {name: _frame(spark, table) for name, table in tables.items()}
                    files = {}
        planned = planned or _planned(inputs)
        over = handover(spark, flow, {} if files else inputs, has_wide_rows=has_wide_rows)
        by_files = exchanges if exchanges is not None and not files and exchanges.is_next_by_files(spark) else None
        work = Work(spark, flow, plans, planned, over, files, by_files)

        def run_part(part: Part, done: frozenset[str]) -> list[bytes]:
            job = EpochJob(work, part)
            try:
                return job.run(done)
            finally:
                job.release()

        with settings_for_epochs(spark, {**over.settings, **settings}):
            return run_parts(flow, plans, run_part)


def _planned(inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
    return {name: in_own_zone(frame) for name, frame in inputs.items()}


def _computed(flow: BoundFlow, plans: Sequence[EpochPlan]) -> str:
    """Returns which epochs run, and what the JVM evaluates in them: its errors name neither."""
    first, last = plans[0].t, plans[-1].t
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    stages = [name for name, stage in flow.stages.items() if stage.in_jvm]
    shown = ", ".join(stages[:_MOST_SHOWN]) + (", ..." if len(stages) > _MOST_SHOWN else "")
    return f"{epochs} (expressions of {shown}): " if stages else f"{epochs}: "


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


def settings_for_epochs(spark: SparkSession, more: Mapping[str, str]) -> AbstractContextManager[None]:
    """Sets what the session needs while an epoch is planned and run; the user's come back afterwards."""
    excluded = spark.conf.get(_EXCLUDED_RULES, None)
    rules = ",".join(filter(None, [excluded, *_RULES_TO_EXCLUDE]))
    return conf_set(spark, {**session_settings(), **more, _EXCLUDED_RULES: rules})
