"""What of a failed Spark job reaches the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.lsm.errors import FlowError
from nosync.spark.errors import reason_of
from nosync.spark.session import check_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost task 0.0 in stage 1.0 "
    "(TID 2) (192.0.2.2 executor driver): org.apache.spark.SparkException:"
)
CALL = "An error occurred while calling o72.collectToPython.\n: org.apache.spark.SparkException: "
REST = "\nPYTHONPATH was:\n  /a:/b\norg.apache.spark.SparkException: EOFException\n\tat org.apache.spark.Errors(Errors.scala:5)"


def test_the_reason_of_a_failed_spark_job() -> None:
    text = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "worker.py", line 1, in read
    return loads(x)
ModuleNotFoundError: No module named 'my_job'

JVM stacktrace: ...
\tat org.apache.spark"""
    assert reason_of(text) == "ModuleNotFoundError: No module named 'my_job'"
    assert reason_of("\nJob aborted.\nmore") == "Job aborted."
    assert reason_of("") == "it gave no reason"


@pytest.mark.parametrize("call", ["", CALL])
def test_a_line_that_only_announces_goes_on_with_what_follows(call: str) -> None:
    """Workers that do not start: the first line ends with the class of an exception."""
    why = "/usr/bin/python3: Error while finding module specification for 'nosync.spark.worker_daemon'"
    text = f"{call}{LOST} \nError from python worker:\n  {why}{REST}"
    assert reason_of(text) == f"{LOST} Error from python worker: {why}"
    printed = '  Traceback (most recent call last):\n    File "daemon.py", line 1\n  ImportError: libpython.so'
    assert reason_of(f"{call}{LOST} \nError from python worker:\n{printed}{REST}") == "ImportError: libpython.so"


def test_where_nothing_follows_what_is_there_is_the_reason() -> None:
    frame = "\tat org.apache.spark.Errors(Errors.scala:5)"
    assert reason_of(f"{CALL}\n{frame}") == "org.apache.spark.SparkException:"
    assert reason_of(f"{LOST}\n{frame}") == LOST
    assert reason_of("Traceback (most recent call last):\n  File") == "Traceback (most recent call last): File"


def test_a_session_of_spark_connect_is_refused_in_one_line_of_ours() -> None:
    class Remote:
        __module__ = "pyspark.sql.connect.session"

        @property
        def version(self) -> str:
            raise AssertionError("a server would be asked")

    with pytest.raises(FlowError, match=r"spark= is a session of Spark Connect.*builder\.master") as refused:
        check_session(Remote())
    assert "\n" not in str(refused.value)


@pytest.mark.spark
def test_an_error_of_a_dataframe_leaves_no_trace_on_the_screen(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spark's Python side would log it as JSON, with the trace of the JVM, before nosync says it in a line."""
    from pyspark.sql import functions as F

    flow = nosync.Dataflow("f")
    flow.source("t", "n int")
    with pytest.raises(nosync.FlowError, match="nope"):
        flow.view("v", lambda t: t["t"].where(F.col("nope") > 1), spark=spark)
    assert "nope" not in capfd.readouterr().err
