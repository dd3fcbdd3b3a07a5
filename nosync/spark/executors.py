"""Whether Spark's Python workers can run tasks of nosync: asked when a job is made, and not found out by its first
epoch.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nosync.lsm.errors import FlowError
from nosync.spark.errors import reason_of
from nosync.spark.session import in_workers_of_queries

_MOST_TASKS = 64
"""Of one question. They say that an environment was not given, which is nearly always so of all hosts or of none."""
_LACKS_NOSYNC = "No module named 'nosync"
_able: set[tuple[str, str]] = set()
"""Spark applications, and the Python of their workers, that were asked and can."""


@dataclass(frozen=True)
class Worker:
    """Holds what a worker said. `lack`: why nosync cannot be imported there; empty where it can."""

    python: str
    version: str
    host: str
    lack: str


def check_workers(spark: SparkSession) -> None:
    """Raises FlowError where executors run a Python that has no nosync, or not what it needs.

    It takes a small Spark job, once in an application, and none where workers run the driver's own Python, with nosync
    in it.
    """
    context = spark.sparkContext
    of_application = (str(context.applicationId), context.pythonExec)
    if of_application in _able or _are_as_the_driver(context):
        return
    for worker in _ask(spark):
        if worker.lack:
            where = "" if _is_local(context) else f" on {worker.host}"
            raise FlowError(_refused(f"{worker.python} {worker.version}{where}", worker.lack))
    _able.add(of_application)


def _ask(spark: SparkSession) -> list[Worker]:
    """Asks some workers what they are."""
    context = spark.sparkContext

    # Pickled by value, as functions inside of others are, and without names of this module: there may be no nosync to import.
    def ask(_: Iterable[int]) -> Iterator[tuple[str, str, str, str]]:
        import importlib  # noqa: PLC0415
        import platform  # noqa: PLC0415
        import socket  # noqa: PLC0415
        import sys  # noqa: PLC0415

        lack = ""
        try:
            importlib.import_module("nosync.spark.epoch_job")  # what tasks begin with
        except Exception as error:  # noqa: BLE001 - libraries that do not fit raise whatever
            lack = f"{type(error).__name__}: {error}"
        yield sys.executable, platform.python_version(), socket.gethostname(), lack

    tasks = 1 if _is_local(context) else max(1, min(context.defaultParallelism, _MOST_TASKS))
    try:
        said = in_workers_of_queries(spark, context.parallelize(range(tasks), tasks).mapPartitions(ask)).collect()
    except (Py4JError, PySparkException) as error:
        reason = reason_of(str(error))
        raise FlowError(_refused(_python_of(context), reason)) from error
    return [Worker(*each) for each in said]


def _refused(python: str, reason: str) -> str:
    what = (
        f"without nosync ({reason})" if _LACKS_NOSYNC in reason else f"that cannot run its tasks: {reason.rstrip('.')}"
    )
    return (
        f"executors run {python} {what}: set PYSPARK_PYTHON, before the session is made, to a Python that has nosync "
        f"and what it needs (the driver runs {sys.executable}); docs/daemons.md says how executors get one"
    )


def _python_of(context: SparkContext) -> str:
    """Returns the workers' Python where no worker could say it, with its version where it is on this machine."""
    if not _is_local(context):
        return context.pythonExec
    show = "import platform; print(platform.python_version())"
    try:
        ran = subprocess.run([context.pythonExec, "-c", show], capture_output=True, text=True, check=False)
    except OSError:
        return context.pythonExec
    return f"{context.pythonExec} {ran.stdout}".strip()


def _are_as_the_driver(context: SparkContext) -> bool:
    """Returns whether workers are processes of this machine with the driver's interpreter, and nosync is installed in
    it.
    """
    if not _is_local(context):
        return False
    python = shutil.which(context.pythonExec)
    if python is None or os.path.dirname(python) != os.path.dirname(sys.executable):
        return False  # a link to the same file from elsewhere is another environment
    site = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return os.path.samefile(python, sys.executable) and any(
        True for _ in importlib.metadata.distributions(name="nosync", path=site)
    )


def _is_local(context: SparkContext) -> bool:
    master = str(context.master)
    return master.startswith("local") and not master.startswith("local-cluster")
