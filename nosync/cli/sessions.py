"""The session of Spark that some commands need. Others start without loading it."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nosync.lsm.errors import NosyncError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def spark_session(cores: int | None, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Starts a local session, or takes the one that there is, and stops it in the end."""
    spark = start_session(cores, settings)
    try:
        yield spark
    finally:
        spark.stop()


def start_session(cores: int | None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Starts a local session, whose log nobody sees, or returns the one that there is."""
    try:
        from nosync.spark.session import local_session  # noqa: PLC0415 - only these commands need Spark
    except ImportError as error:
        raise NosyncError(f"this needs {error.name}: pip install 'nosync[spark]'") from error
    # Of what a batch raises, which the command says, Py4J prints a trace.
    logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
    logs = tempfile.mkdtemp(prefix="nosync-spark-")
    atexit.register(shutil.rmtree, logs, ignore_errors=True)
    return local_session(cores, "nosync", log=Path(logs) / "spark.log", settings=settings)
