"""nosync: a coordination-free state store for functional streaming computations on Apache Spark.

    import nosync

    with nosync.open("state/") as store:
        store.append("counts", t=0, rows=table, key=["word"])
        store.seal(0)
        store.read("counts", as_of=0)

See README.md for the two-command start and docs/ for how it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nosync.aggregates import (
    collect,
    count,
    count_distinct,
    first,
    last,
    max,
    mean,
    min,
    stddev,
    sum,
    top_k,
    variance,
)
from nosync.dataflow import Dataflow, Stage
from nosync.job import EpochReport, Job, RecoveryReport
from nosync.levels import replicated
from nosync.lsm.errors import (
    CatalogError,
    CompactedError,
    CorruptionError,
    DeterminismError,
    FencedError,
    FlowError,
    FormatVersionError,
    HoleError,
    InvalidInputError,
    NosyncError,
    NotAStoreError,
    NotAvailableError,
    OutOfOrderError,
    SchemaError,
    StageError,
    StorageError,
    StoreLockedError,
    UnknownStageError,
)
from nosync.lsm.scrub import VerifyReport
from nosync.lsm.settings import StoreSettings
from nosync.lsm.status import LayerStatus, StoreStatus
from nosync.lsm.store import Store
from nosync.lsm.store import open_store as open
from nosync.sinks import CallbackSink, ParquetSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes `spark.read.format("nosync")` and `spark.readStream.format("nosync")` known to the session."""
    from nosync.spark.source import register as register_source  # noqa: PLC0415 - the store works without pyspark

    register_source(spark)


__all__ = [
    # the store
    "open",
    "Store",
    "StoreSettings",
    "StoreStatus",
    "LayerStatus",
    "VerifyReport",
    # the dataflow
    "Dataflow",
    "Stage",
    "Job",
    "register",
    "EpochReport",
    "RecoveryReport",
    "ParquetSink",
    "CallbackSink",
    "count",
    "count_distinct",
    "sum",
    "min",
    "max",
    "mean",
    "variance",
    "stddev",
    "first",
    "last",
    "top_k",
    "collect",
    "replicated",
    # errors
    "NosyncError",
    "InvalidInputError",
    "SchemaError",
    "OutOfOrderError",
    "UnknownStageError",
    "NotAvailableError",
    "CompactedError",
    "DeterminismError",
    "CorruptionError",
    "HoleError",
    "StorageError",
    "StoreLockedError",
    "FormatVersionError",
    "FencedError",
    "NotAStoreError",
    "CatalogError",
    "StageError",
    "FlowError",
]
