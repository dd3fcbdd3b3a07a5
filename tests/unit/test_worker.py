"""What Spark's Python workers do beside tasks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

TASKS = """
import gc
from nosync.spark.worker import lasting_objects_frozen

class Cycle:
    def __init__(self):
        self.me = self

before = gc.get_freeze_count()
with lasting_objects_frozen():
    lasting = [Cycle()]
first = gc.get_freeze_count()
try:
    with lasting_objects_frozen():
        later = [Cycle()]
        raise ValueError("a task that fails")
except ValueError:
    pass
del later
print(before, first > 1000, gc.get_freeze_count() == first, gc.collect() >= 1)
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


def test_what_the_first_task_leaves_is_frozen_and_garbage_of_later_ones_is_collected() -> None:
    found = subprocess.run([sys.executable, "-c", TASKS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "True", "True", "True"]
