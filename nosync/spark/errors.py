"""What a task raised, found again in what Spark makes of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from nosync.lsm.errors import NosyncError, decode_failure

_LOGS_OF_QUERIES = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_CALL, _CLASS = re.compile(r"An error occurred while calling \S+$"), re.compile(r"^:\s*([\w.$]+: )?")
"""What Py4J has before the message of an exception of Java's."""
_FRAME = re.compile(r"\s+at \S+\(")
"""Where Java's code was."""
_INTERRUPTION = re.compile(
    r"^(?:: |Caused by: )?(java\.(?:lang\.Interrupted|io\.InterruptedIO|nio\.channels\.ClosedByInterrupt)Exception)\b",
    re.MULTILINE,
)


def reason_of(text: str) -> str:
    """Returns what went wrong, of all that Spark says: the exception where Python failed, else the first line.

    A line that only announces, such as `SparkException:`, goes on with those below it.
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if line.lstrip().startswith("Traceback"):  # indented where it is what a worker that did not start has printed
            ends = (j for j in range(i + 1, len(lines)) if _indent(lines[j]) <= _indent(line))
            return _statement(lines[next(ends, 0) :])
    if len(lines) > 1 and _CALL.match(lines[0]):
        return _statement([_CLASS.sub("", lines[1]) or lines[1].lstrip(": "), *lines[2:]])
    return _statement(lines) or "it gave no reason"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _statement(lines: list[str]) -> str:
    """Returns the first line, and below it the lines that it announces, without those that say where Java's code was."""
    said: list[str] = []
    for line in lines:
        if said and (not said[-1].endswith(":") or _FRAME.match(line)):
            break
        said.append(line.strip())
    return " ".join(said)


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(" ;")


@contextmanager
def without_log() -> Iterator[None]:
    """Keeps Spark's Python side from printing errors of queries with their traces: whoever catches them says what is wrong."""
    logs = [PySparkLogger.getLogger(name) for name in _LOGS_OF_QUERIES]  # a plain one would break Spark's errors
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def interruption_in(text: str) -> NosyncError | None:
    """Returns the error of a batch whose query is stopped meanwhile, where that is what Spark says.

    Spark knows an interruption in Python's traces by a regular expression, whose stack overflows where much text follows
    on the words "Py4JJavaError: An error occurred while calling": stop() then prints a thousand lines. So this error has
    these words, and little after them.
    """
    found = _INTERRUPTION.search(text)
    if found is None:
        return None
    return NosyncError(
        "the Spark job was interrupted, for its query was stopped: py4j.protocol.Py4JJavaError: An error occurred while "
        f"calling Spark\n: {found[1]}"
    )


@contextmanager
def task_errors(what: str = "") -> Iterator[None]:
    """Turns what Spark made of a task's error back into that error. `what`: was computed, for an error that does not say."""
    try:
        yield
    except PySparkException as error:
        failure = decode_failure(str(error)) or interruption_in(str(error))
        if failure is None:
            raise NosyncError(f"{what}the Spark job failed: {reason_of(str(error))}") from error
        raise failure from None
    except Exception as error:
        failure = decode_failure(str(error)) or interruption_in(str(error))
        if failure is None and isinstance(error, Py4JError):  # a worker that was killed, say
            raise NosyncError(f"{what}the Spark job failed: {reason_of(str(error))}") from error
        if failure is None:
            raise
        raise failure from None
