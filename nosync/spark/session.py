"""Spark sessions: one that suits nosync on this machine, and checks of one that the user brought."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pyspark import RDD
from pyspark.sql import DataFrame, SparkSession

from nosync.lsm.errors import FlowError
from nosync.spark.java import check_java, launch_settings

T = TypeVar("T")

ARROW_BATCH_ROWS = "1000000"
ARROW_BATCH_BYTES = 64 << 20
_NO_LIMIT = str(2**31 - 1)
ZONE = "spark.sql.session.timeZone"
"""Setting of a session: the zone of its timestamps. Epochs run in UTC."""
SCAN_ENABLED = "spark.nosync.scan.enabled"
"""Setting of a session: whether tasks may read an epoch's files themselves (nosync.runtime.scan)."""
EXCHANGE_ENABLED = "spark.nosync.exchange.enabled"
"""Setting of a session: whether rows may go to their shards by files in the place of Spark's shuffle
(`runtime.file_shuffle`).
"""
DRIVER_MAX_BYTES = "spark.nosync.driver.maxBytes"
"""Setting of a session: for how many bytes of rows, at most, the driver runs an epoch by itself
(nosync.spark.driver_epochs).
"""
DRIVER_FUNCTIONS_ENABLED = "spark.nosync.driver.functions.enabled"
"""Setting of a session: whether such epochs may have functions of users, which then run in the driver's process."""
DRIVER_CORES = "spark.nosync.driver.cores"
"""Setting of a session: how many shards of such epochs run side by side, each in a process of its own but for the first."""
_ENVIRONMENT_OF_QUERIES = {
    "SPARK_SIMPLIFIED_TRACEBACK": "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled",
    "SPARK_HIDE_TRACEBACK": "spark.sql.execution.pyspark.udf.hideTraceback.enabled",
}
"""What Spark adds to the environment of Python workers of a query, and the settings of the session that ask for it."""
_OF_EXPRESSIONS = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.legacy.sizeOfNull": "true",
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
}
"""Settings by which an expression means one thing or another, and what they are in Spark 4 if nobody says otherwise."""
_MOST_ROWS, _MOST_BYTES = (f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Records", "Bytes"))


def local_session(
    cores: int | None = None,
    app: str = "nosync",
    log: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Returns a SparkSession on this machine (`local[cores]`, all by default) with settings that suit nosync.

    `log` is where the JVM's own messages go, instead of standard error. `settings`: Spark's, beside those.
    """
    check_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = (
        SparkSession.builder.master(f"local[{cores or '*'}]")
        .appName(app)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.log.level", "OFF")  # a task's error reaches the caller as an exception
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
    )
    for name, value in {**session_settings(), **(settings or {})}.items():
        builder = builder.config(name, value)
    with _standard_error_to(log):
        return configure_spark(builder).getOrCreate()


def configure_spark(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Tells the builder of a session of your own what Spark must know before its JVM starts, for epochs to be quick:
    how JVM and Python workers talk, how garbage is collected, and what NumPy is to do without on this processor.

    What the builder was told before, the command line, and `spark-defaults.conf` are left as they are, so call it last.
    Returns the builder. Where a session is there already it changes nothing; `nosync spark-conf` has the same for
    `spark-submit`. Workers need nosync, too: those of a `local` master get this Python, unless PYSPARK_PYTHON names
    another.
    """
    options = getattr(builder, "_options", {})
    if str(options.get("spark.master", "")).startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would take `python3` from PATH
    for name, value in launch_settings(options).items():
        builder = builder.config(name, value)
    return builder


@contextlib.contextmanager
def _standard_error_to(path: Path | None) -> Iterator[None]:
    """Lets processes that are started meanwhile inherit `path` as their standard error, and keep it."""
    if path is None:
        yield
        return
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def session_settings() -> dict[str, str]:
    """Returns the settings of the session that a job's epochs run with."""
    return {
        # One Arrow batch a shard where it fits, so that nothing is concatenated.
        _MOST_ROWS: ARROW_BATCH_ROWS,
        # Shards are partitions: adaptive execution must not merge or split them, and has little to gain here.
        "spark.sql.adaptive.enabled": "false",
        ZONE: "UTC",
    }


def expression_settings(spark: SparkSession) -> dict[str, str]:
    """Returns what expressions mean in the session as it is: a job's stay what they were when it was made.

    Waits for an epoch of another job, whose settings the session has meanwhile.
    """
    with turn_of(spark):
        return {name: str(spark.conf.get(name)) for name in _OF_EXPRESSIONS}


def unusual(settings: Mapping[str, str]) -> list[str]:
    """Returns, as text, those of `expression_settings` that are not Spark's own."""
    return [f"{name}={value}" for name, value in settings.items() if value.lower() != _OF_EXPRESSIONS[name].lower()]


def arrow_settings(spark: SparkSession, row_bytes: int | None) -> dict[str, str]:
    """Returns the settings for how many rows of `row_bytes` (None: of any number of bytes) go to a Python task at once.

    Spark would look after each row how many bytes there are by now, which takes more time than to write the row. Where
    rows have a fixed width it is told a number of rows instead. Whoever has set a number of bytes keeps it.
    """
    if row_bytes is None or spark.conf.get(_MOST_BYTES, None) not in (None, _NO_LIMIT):
        return {}
    rows = max(1, min(int(ARROW_BATCH_ROWS), ARROW_BATCH_BYTES // max(1, row_bytes)))
    return {_MOST_ROWS: str(rows), _MOST_BYTES: _NO_LIMIT}


def contains(spark: SparkSession, tree: Any, *patterns: str) -> bool:
    """Returns whether a plan or an expression of the JVM has a node of one of these patterns (Spark's `TreePattern`)."""
    return any(tree.containsPattern(_pattern(spark._jvm, name)) for name in patterns)


def is_in_utc(spark: SparkSession) -> bool:
    """Returns whether a session shows and reads times in UTC."""
    return spark.conf.get(ZONE) in ("UTC", "Etc/UTC", "Z", "+00:00")


def in_own_zone(frame: DataFrame) -> DataFrame:
    """Returns the frame; where its rows depend on the session's time zone, it is planned with the zone as it is now.

    Epochs run in UTC, and text formats look for the zone when they are planned, which is then. Functions of users look
    for it when they run: rows that they make are computed first, and kept by Spark until the epoch is done.
    """
    spark = frame.sparkSession
    if is_in_utc(spark):
        return frame
    execution = frame._jdf.queryExecution()
    if contains(spark, execution.analyzed(), "PYTHON_UDF"):
        return frame.localCheckpoint()
    leaves = execution.analyzed().collectLeaves()
    # As JSON, which has all columns: other texts of a schema leave out those after the first 25.
    has_times = any('"timestamp' in leaves.apply(i).schema().json() for i in range(leaves.size()))
    # Subqueries have leaves of their own; and current_timezone() is replaced when the plan is optimized.
    if not has_times and not contains(spark, execution.analyzed(), "PLAN_EXPRESSION", "CURRENT_LIKE"):
        return frame
    rows = spark._jsparkSession.internalCreateDataFrame(execution.toRdd(), frame._jdf.schema(), False)
    return DataFrame(rows, spark)


@functools.cache  # each part of a Java name is a call to the JVM
def _pattern(jvm: Any, name: str) -> Any:
    return getattr(jvm.org.apache.spark.sql.catalyst.trees.TreePattern, name)()


@contextlib.contextmanager
def conf_set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Gives the session's configuration these values; what was there comes back afterwards.

    It takes the turn of the session: what others set meanwhile would be found, and put back, by the wrong one.
    """
    with turn_of(spark):
        found = {name: spark.conf.get(name, None) for name in settings}
        before = {name: old for name, old in found.items() if old != settings[name]}  # each is a call to the JVM
        try:
            for name in before:
                spark.conf.set(name, settings[name])
            yield
        finally:
            for name, old in before.items():
                if old is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, old)


def is_enabled(spark: SparkSession, setting: str, default: str = "true") -> bool:
    """Returns what a setting of nosync says, or `default` where it says nothing. Raises FlowError where it says something
    else.
    """
    value = str(spark.conf.get(setting, default))
    if value.lower() not in ("true", "false"):
        raise FlowError(f"{setting} is {value!r}, expected true or false: set or unset it with spark.conf")
    return value.lower() == "true"


def in_workers_of_queries(spark: SparkSession, rdd: RDD[T]) -> RDD[T]:
    """Returns the RDD, which was not run before, so that its tasks run in the Python workers of the session's queries.

    Spark starts other workers for each environment, so that a job of both would keep what it needs in memory twice.
    """
    context = spark.sparkContext
    added = {
        name: "1"
        for name, setting in _ENVIRONMENT_OF_QUERIES.items()
        if name not in context.environment and spark.conf.get(setting) == "true"
    }
    with _environment:
        # Another one and not the same with more in it, which other threads may be looking through; RDDs of theirs keep it.
        before = context.environment
        context.environment = {**before, **added}
        try:
            rdd._jrdd  # noqa: B018 - the RDD takes its environment when it is made in the JVM, which is now
        finally:
            context.environment = before
    return rdd


_environment = threading.Lock()
_turns: dict[str, threading.RLock] = {}


@contextlib.contextmanager
def active_in_jvm(session: SparkSession) -> Iterator[None]:
    """Makes a session the active one of the JVM meanwhile: plans tell its settings, and not those of whichever was used last."""
    sessions: Any = session._jvm.SparkSession  # type: ignore[union-attr]
    before = sessions.getActiveSession()
    sessions.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


@contextlib.contextmanager
def turn_of(spark: SparkSession) -> Iterator[None]:
    """Gives the session to one epoch at a time: its settings are those of the epoch that runs, and another's rows could
    mean others.

    Waits for an epoch of another thread. Sessions have turns of their own.
    """
    with _turns.setdefault(spark._jsparkSession.sessionUUID(), threading.RLock()):
        yield


def is_of_connect(thing: object) -> bool:
    """Returns whether a session or a DataFrame is one of Spark Connect, which has no JVM in this process."""
    return type(thing).__module__.startswith("pyspark.sql.connect.")


def check_running(spark: SparkSession) -> None:
    """Raises FlowError for a session that was stopped: whatever is asked of it, Spark then says something of its own."""
    java = spark._sc._jsc
    if java is None or java.sc().isStopped():
        raise FlowError(
            "the Spark session was stopped: make one with SparkSession.builder.getOrCreate(), and the Job with it; the store "
            "is as it was"
        )


def check_session(spark: object) -> None:
    """Raises FlowError for something that is not a SparkSession, is one of Spark Connect, was stopped, or is older than 4.1."""
    if is_of_connect(spark):
        raise FlowError(
            "spark= is a session of Spark Connect, whose JVM is elsewhere, and a job plans epochs in the JVM of its own process: "
            "pass one of SparkSession.builder.master(...), without remote() and SPARK_REMOTE"
        )
    if isinstance(spark, SparkSession):
        check_running(spark)
    version = getattr(spark, "version", None)
    if not isinstance(version, str):
        raise FlowError(f"spark={spark!r} is not a SparkSession: pass spark=SparkSession.builder.getOrCreate()")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (4, 1):
        raise FlowError(f"Spark {version} is too old: nosync needs 4.1 or later (DataFrame.repartitionById)")
