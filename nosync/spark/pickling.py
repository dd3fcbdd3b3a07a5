"""The functions of a flow, pickled when a job is made of it, and the tables that it joins with."""

from __future__ import annotations

import pickle  # noqa: TID251 - for its error
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

from nosync.flow.arguments import StaticJoinArguments, arguments_of
from nosync.flow.dataflow import Dataflow
from nosync.flow.fingerprint import hashed_of
from nosync.flow.kinds import STATIC_JOIN
from nosync.flow.per_key import PerKey
from nosync.flow.pickled_function import PickledFunction
from nosync.flow.stage import Stage
from nosync.lsm.errors import FlowError
from nosync.spark.static_tables import with_its_rows


def frozen(flow: Dataflow, spark: SparkSession) -> Dataflow:
    """Returns the flow with its functions, and tables to join with, as they are now.

    Raises FlowError where a function cannot be sent to tasks, or fingerprinted.

    A function with `version=` stays as it is: its code is what the user says it is. So does one with a broadcast
    variable, which Spark wants to see whenever it pickles something.
    """
    broadcasts = spark.sparkContext._pickled_broadcast_vars

    def freeze(stage: Stage) -> Callable[..., Any] | None:
        function = stage.function
        if function is None or stage.version is not None or isinstance(function, PickledFunction):
            return function
        hashed = hashed_of(function)
        broadcasts.clear()
        try:
            pickled = CloudPickleSerializer().dumps(function)  # type: ignore[no-untyped-call]
        except pickle.PicklingError as error:
            (reason, *_) = str(error).strip().splitlines() or ["it cannot be pickled"]
            raise FlowError(f"stage {stage.name}: its function cannot be sent to Spark's tasks: {reason}") from error
        if any(True for _ in broadcasts):
            broadcasts.clear()
            return function
        return PickledFunction(pickled, hashed, is_per_key=isinstance(function, PerKey))

    def as_it_is(stage: Stage) -> Stage:
        if stage.kind != STATIC_JOIN:
            return replace(stage, function=freeze(stage))
        # Now, also because epochs run in UTC, and what text says of time would be read otherwise there.
        join = arguments_of(stage, StaticJoinArguments)
        return replace(stage, arguments=replace(join, table=with_its_rows(stage.name, join.table)))

    return flow.with_stages(as_it_is)
