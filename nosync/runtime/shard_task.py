"""A task of one shard, on rows that are there as tables: in this process, or in a worker process beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from nosync.runtime.scan import TableScan
from nosync.runtime.segment_task import SegmentTask
from nosync.runtime.shard_run import run_shard


@dataclass(frozen=True)
class ShardRows:
    """Holds what comes to one shard of a task."""

    rows: pa.Table | None = None
    """The rows of its edges, and reports among them. None: no edge brings any."""
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    """The rows of its sources, where the task scans them."""


RunTask = Callable[[SegmentTask, Sequence[ShardRows]], list[pa.Table]]
"""Runs a task for every shard, on what comes to each. Returns what leaves each."""


def run_task_of_shard(task: SegmentTask, shard: int, given: ShardRows) -> pa.Table:
    """Runs a task for one shard, and returns what leaves it. Raises what `run_shard` raises."""
    if task.scan is not None:
        task = replace(task, scan=TableScan(task.scan.files, task.scan.key_groups, given.tables))
    batches = [] if given.rows is None else given.rows.to_batches()
    return pa.Table.from_batches(run_shard(task, shard, iter(batches)))
