"""nosync: a coordination-free state store for functional streaming computations on Apache Spark.

    import nosync

    with nosync.open("state/") as store:
        store.append("counts", t=0, rows=table, key=["word"])
        store.seal(0)
        store.read("counts", as_of=0)

See README.md for the two-command start and docs/ for how it works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from nosync import checkpoints
    from nosync.checkpoints.api import checkpoint
    from nosync.flow.dataflow import Dataflow
    from nosync.flow.persistence import remote, replicated
    from nosync.flow.stage import Stage
    from nosync.job.backfill import BackfillReport
    from nosync.job.delta_sink import DeltaSink
    from nosync.job.explain import Explanation
    from nosync.job.iceberg_sink import IcebergSink
    from nosync.job.job import Job
    from nosync.job.kafka_sink import KafkaSink
    from nosync.job.replay import ReplayPlan, ReplayReport
    from nosync.job.reports import EpochReport, RecoveryReport
    from nosync.job.sinks import CallbackSink, ParquetSink
    from nosync.job.sql_sink import SqlSink
    from nosync.job.upgrade import UpgradePlan
    from nosync.kernels.aggregates import (
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
        LostEpochError,
        NosyncError,
        NotAStoreError,
        NotAvailableError,
        OutOfOrderError,
        RemoteError,
        ReplicationError,
        SchemaError,
        StageError,
        StorageError,
        StoreLockedError,
        UnknownStageError,
    )
    from nosync.lsm.model.as_of import AsOf
    from nosync.lsm.settings import StoreSettings
    from nosync.lsm.status import LayerStatus, RemoteStatus, StoreStatus
    from nosync.lsm.store.store import Store
    from nosync.lsm.store.verify import VerifyReport
    from nosync.replication.remote.settings import RemoteSettings
    from nosync.spark.diff import DiffSummary
    from nosync.spark.session import configure_spark
    from nosync.stores import connect, open

_HOMES = {
    "nosync.checkpoints.api": "checkpoint",
    "nosync.kernels.aggregates": "collect count count_distinct first last max mean min stddev sum top_k variance",
    "nosync.job.backfill": "BackfillReport",
    "nosync.flow.dataflow": "Dataflow",
    "nosync.flow.stage": "Stage",
    "nosync.job.explain": "Explanation",
    "nosync.job.job": "Job",
    "nosync.flow.persistence": "remote replicated",
    "nosync.lsm.errors": (
        "CatalogError CompactedError CorruptionError DeterminismError FencedError FlowError FormatVersionError "
        "HoleError InvalidInputError LostEpochError NosyncError NotAStoreError NotAvailableError OutOfOrderError "
        "RemoteError ReplicationError SchemaError StageError StorageError StoreLockedError UnknownStageError"
    ),
    "nosync.lsm.store.verify": "VerifyReport",
    "nosync.lsm.settings": "StoreSettings",
    "nosync.lsm.status": "LayerStatus RemoteStatus StoreStatus",
    "nosync.lsm.store.store": "Store",
    "nosync.replication.remote.settings": "RemoteSettings",
    "nosync.stores": "connect open",
    "nosync.job.kafka_sink": "KafkaSink",
    "nosync.job.replay": "ReplayPlan ReplayReport",
    "nosync.job.upgrade": "UpgradePlan",
    "nosync.job.reports": "EpochReport RecoveryReport",
    "nosync.job.delta_sink": "DeltaSink",
    "nosync.job.iceberg_sink": "IcebergSink",
    "nosync.job.sinks": "CallbackSink ParquetSink",
    "nosync.job.sql_sink": "SqlSink",
    "nosync.spark.session": "configure_spark",
}
"""By module, what it has of the names below. Each is imported when somebody asks for it: the processes that merge, daemons and
the command line start without what only jobs need."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers see the imports above, and find what is misspelled

    def __getattr__(name: str) -> Any:
        if name == "checkpoints":  # a package of its own: nosync.checkpoints.watch(...)
            return importlib.import_module("nosync.checkpoints")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value


def _meant(name: str) -> str:
    """Returns what an error adds about a name that this module does not have."""
    if name.startswith("_"):  # Python and notebooks ask for such
        return ""
    from nosync.flow.foreign_words import FUNCTIONS_ELSEWHERE  # noqa: PLC0415
    from nosync.lsm.platform.nearest import did_you_mean  # noqa: PLC0415

    here = FUNCTIONS_ELSEWHERE.get(name.lower())
    return did_you_mean(name, __all__) if here is None else f": it is called nosync.{here} here"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register(spark: SparkSession) -> None:
    """Makes `spark.read.format("nosync")` and `spark.readStream.format("nosync")` known to the session."""
    from nosync.spark.data_source import register as register_source  # noqa: PLC0415 - the store works without pyspark

    register_source(spark)


def views(
    spark: SparkSession, store: Store | str | Path, as_of: AsOf | None = None, *, branch: str = "main", prefix: str = ""
) -> dict[str, str]:
    """Makes every stage of a store a temporary view of the session, for SQL: see nosync.spark.views."""
    from nosync.spark.views import views as make_views  # noqa: PLC0415 - the store works without pyspark

    return make_views(spark, store, as_of, branch=branch, prefix=prefix)


def diff(a: Job, b: Job, stage: str, as_of: AsOf | None = None) -> DataFrame:
    """Returns the keys of a stage whose rows differ between two branches as of an epoch: see nosync.spark.diff."""
    from nosync.spark.diff import diff as diff_branches  # noqa: PLC0415 - the store works without pyspark

    return diff_branches(a, b, stage, as_of)


def diff_changes(a: Job, b: Job, stage: str, after: AsOf, until: AsOf) -> DataFrame:
    """Returns the changes of a stage over a range of epochs that only one of two branches has, with `_side`."""
    from nosync.spark.diff import diff_changes as diff_feeds  # noqa: PLC0415

    return diff_feeds(a, b, stage, after, until)


def diff_summary(a: Job, b: Job, stage: str, as_of: AsOf | None = None) -> DiffSummary:
    """Counts the keys that are only here, only there and changed, with the totals and differences of each numeric
    column.
    """
    from nosync.spark.diff import summarize  # noqa: PLC0415

    return summarize(a, b, stage, as_of)


def diverges_at(a: Job, b: Job, stage: str) -> int | None:
    """Returns the first epoch at which two branches differ in a stage's changes; None where they agree."""
    from nosync.spark.diff import diverges_at as first_difference  # noqa: PLC0415

    return first_difference(a, b, stage)


__all__ = [
    # the store
    "open",
    "connect",
    "Store",
    "StoreSettings",
    "StoreStatus",
    "LayerStatus",
    "VerifyReport",
    "RemoteSettings",
    "RemoteStatus",
    # checkpoints of Structured Streaming queries
    "checkpoint",
    "checkpoints",
    # the dataflow
    "Dataflow",
    "Stage",
    "Job",
    "configure_spark",
    "register",
    "views",
    "diff",
    "diff_changes",
    "diff_summary",
    "diverges_at",
    "Explanation",
    "ReplayPlan",
    "UpgradePlan",
    "ReplayReport",
    "EpochReport",
    "BackfillReport",
    "RecoveryReport",
    "ParquetSink",
    "DeltaSink",
    "IcebergSink",
    "SqlSink",
    "KafkaSink",
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
    "remote",
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
    "LostEpochError",
    "StorageError",
    "StoreLockedError",
    "FormatVersionError",
    "FencedError",
    "NotAStoreError",
    "ReplicationError",
    "RemoteError",
    "CatalogError",
    "StageError",
    "FlowError",
]
