"""Epochs that the driver runs by itself, which sessions of tests leave to Spark otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def driver_runs(spark: SparkSession, size: str = "64m", *, functions: bool = False, cores: str = "1") -> Iterator[None]:
    """Lets the driver run what has at most `size` of rows; "0": nothing. `functions`: with those of users. `cores`: with
    worker processes on all but one of them.
    """
    from nosync.spark.session import DRIVER_CORES, DRIVER_FUNCTIONS_ENABLED, DRIVER_MAX_BYTES, conf_set

    functions_enabled = str(functions).lower()
    with conf_set(spark, {DRIVER_MAX_BYTES: size, DRIVER_FUNCTIONS_ENABLED: functions_enabled, DRIVER_CORES: cores}):
        yield
