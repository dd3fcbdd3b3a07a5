"""What a task raised, found again in what Spark makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from nosync.lsm.errors import NosyncError
from nosync.lsm.failures import decode_failure

_CALL, _CLASS = re.compile(r"An error occurred while calling \S+$"), re.compile(r"^:\s*([\w.$]+: )?")
"""What Py4J has before the message of an exception of Java's."""


def reason_of(text: str) -> str:
    """What went wrong, of all that Spark says: where Python failed its exception, else the first line."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if line.startswith("Traceback"):
            return next((x.strip() for x in lines[i + 1 :] if not x.startswith((" ", "\t"))), lines[0])
    if len(lines) > 1 and _CALL.match(lines[0]):
        return _CLASS.sub("", lines[1])
    return lines[0] if lines else "it gave no reason"


@contextmanager
def task_errors() -> Iterator[None]:
    """Turns what Spark made of a task's error back into that error."""
    try:
        yield
    except PySparkException as error:
        failure = decode_failure(str(error))
        if failure is None:
            raise NosyncError(f"the Spark job failed: {reason_of(str(error))}") from error
        raise failure from None
    except Exception as error:
        failure = decode_failure(str(error))
        if failure is None and isinstance(error, Py4JError):  # a worker that was killed, say
            raise NosyncError(f"the Spark job failed: {reason_of(str(error))}") from error
        if failure is None:
            raise
        raise failure from None
