"""What Spark's Python workers do beside tasks."""

from __future__ import annotations

import subprocess
import sys

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


def test_what_the_first_task_leaves_is_frozen_and_garbage_of_later_ones_is_collected() -> None:
    found = subprocess.run([sys.executable, "-c", TASKS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "True", "True", "True"]
