"""Spark's Python workers, which tasks run in one after the other."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

from nosync.lsm.memory import keep_freed_memory


@contextlib.contextmanager
def task_in_worker() -> Iterator[None]:
    """What a task of ours runs in, in sessions of users as well: a process that runs one task after the other."""
    keep_freed_memory()
    with lasting_objects_frozen():
        yield


@contextlib.contextmanager
def lasting_objects_frozen() -> Iterator[None]:
    """After the first task of a process, takes modules and all else that stays out of the garbage collector's sight.

    Spark's worker collects all garbage after every task. That goes through every object of every module that was imported, and
    the next task of the process waits for it: longer than many a task takes (`python -m bench spark_handover`).
    """
    try:
        yield
    finally:
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.collect()
    gc.freeze()
