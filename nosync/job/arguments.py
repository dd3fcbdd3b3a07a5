"""Checks of what a job is made with, before it takes anything over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nosync.flow.dataflow import Dataflow
from nosync.job.delivery import check_sinks
from nosync.job.sinks import Sink
from nosync.lsm.errors import FlowError, InvalidInputError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_arguments(
    flow: object, store: object, spark: SparkSession, shards: object, sinks: Mapping[str, Sink], branch: str
) -> None:
    """Raises FlowError, InvalidInputError, SchemaError or UnknownStageError for arguments that do not fit together."""
    from nosync.spark.session import check_session  # noqa: PLC0415 - the store works without pyspark

    check_session(spark)
    if not isinstance(flow, Dataflow) or not isinstance(store, Store):
        raise InvalidInputError(
            f"Job({type(flow).__name__}, {type(store).__name__}): expected a nosync.Dataflow and a store, as "
            "nosync.open(path) returns it"
        )
    from nosync.spark.executors import check_workers  # noqa: PLC0415
    from nosync.spark.schemas import check_names  # noqa: PLC0415

    _check_shape(flow, shards, store.directory.key_groups)
    check_names(flow, spark)
    check_workers(spark)
    if sinks and branch != MAIN:
        raise FlowError(
            f"sinks are given the epochs of {MAIN!r}, and this job is on branch {branch!r}, whose epochs would get into "
            "their output: leave sinks= out, and promote() the branch when its output is wanted"
        )
    check_sinks(sinks, flow)


def check_flow(flow: object, call: str) -> None:
    """Raises InvalidInputError for what is no flow. `call`: the method that it was given to."""
    if not isinstance(flow, Dataflow):
        hint = f": give what it returns, {call}({getattr(flow, '__name__', 'make_flow')}())" if callable(flow) else ""
        raise InvalidInputError(f"{call}({flow!r}): expected a nosync.Dataflow{hint}")


def _check_shape(flow: Dataflow, shards: object, groups: int) -> None:
    if flow.key_groups != groups:
        raise FlowError(
            f"dataflow {flow.name} has key_groups={flow.key_groups}, the store {groups}: declare "
            f"Dataflow({flow.name!r}, key_groups={groups})"
        )
    check_shards(shards, groups)


def check_shards(shards: object, groups: int) -> None:
    """Raises FlowError for a number of shards that a store cannot have."""
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= groups:
        raise FlowError(f"shards is {shards!r}, expected 1 to {groups} (the store's key groups)")
