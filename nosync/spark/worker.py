"""Spark's Python workers, which tasks run in one after the other."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

from nosync.lsm.platform.process import keep_freed_memory

ALL_EVERY = 100
"""Tasks, after which cycles among what was kept from earlier ones are looked for."""
_tasks = itertools.count()


@contextlib.contextmanager
def task_in_worker() -> Iterator[None]:
    """Prepares the process for a task of nosync, also in sessions of users: it runs one task after the other."""
    keep_freed_memory()
    with lasting_objects_frozen():
        yield


@contextlib.contextmanager
def lasting_objects_frozen() -> Iterator[None]:
    """Hides from the garbage collector, after each task, what stays: modules, and layers that stay open.

    Spark's worker collects all garbage after every task. That goes through every object that there is, and the next
    task of the process waits for it: longer than many a task takes (`python -m bench spark_handover`). What goes later
    goes by its count of references, except cycles; so every `ALL_EVERY` tasks the collector sees everything.
    """
    try:
        yield
    finally:
        if next(_tasks) % ALL_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
