"""What of a failed Spark job reaches the user."""

from __future__ import annotations

from nosync.spark.task_errors import reason_of


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
