"""What Spark's Python workers do beside tasks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

TASKS = """
import gc
import weakref
from nosync.spark.worker import ALL_EVERY, lasting_objects_frozen

class Cycle:
    def __init__(self):
        self.me = self

lasting, garbage, most = [], [], 0
for i in range(3 * ALL_EVERY):
    try:
        with lasting_objects_frozen():
            lasting.append([Cycle()])
            held = Cycle()  # garbage once its task has ended, and frozen by then
            garbage.append(weakref.ref(held))
            if i % 7 == 0:
                raise ValueError("a task that fails")
    except ValueError:
        pass
    most = max(most, len(gc.get_objects()))
    gc.collect()  # as Spark's worker does
del held
alive = sum(one() is not None for one in garbage)
print(gc.get_freeze_count() > 1000, most < 1000, 0 < alive <= ALL_EVERY)
"""


FAULTS = """
import resource
import numpy as np
from nosync.spark.worker import task_in_worker

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(1 << 19) + np.ones(1 << 19)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
with task_in_worker():
    faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_arrays_of_one_task_take_the_memory_of_those_before() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=environment)
    given_back, kept = map(int, found.stdout.split())
    assert kept * 10 < given_back, "pages that the kernel had to bring, for 150 arrays of 4 MiB"


def test_what_tasks_leave_is_frozen_and_their_garbage_goes_in_the_end() -> None:
    found = subprocess.run([sys.executable, "-c", TASKS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True", "True"]
