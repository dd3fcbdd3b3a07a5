"""When the rows that an epoch is given go to their shards by files (`runtime.file_shuffle`), and the Spark job that
writes those.

That job is one more, which takes longer than it saves where rows are few, and they are counted only on their way: so an
epoch goes by what the one before had. Only on this machine, whose tasks all see one file system.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from nosync.lsm.errors import NosyncError, encode_failure
from nosync.lsm.platform.env import storage_errors
from nosync.runtime.file_shuffle import Exchange, Placement, write_by_shard
from nosync.spark.arrow_transfer import Handover
from nosync.spark.worker import task_in_worker

log = logging.getLogger("nosync")

SHARD_COLUMN = "__shard"
LEAST_ROWS = 200_000
LEAST_ROWS_A_TASK = 25_000
_LOCAL = re.compile(r"local(\[.*\])?")
_WRITTEN = pa.schema([pa.field("path", pa.string()), pa.field("rows", pa.int64())])


class Exchanges:
    """Remembers for one job what its epochs tell of how the next one's rows should go."""

    def __init__(self) -> None:
        self._rows, self._has_small_tasks = 0, False

    def note_rows(self, rows: int) -> None:
        """Notes how many rows an epoch had."""
        self._rows = rows

    def note_tasks(self, tasks: int, rows: int) -> None:
        """Notes by how many tasks of the JVM rows came that went by files."""
        if not self._has_small_tasks and rows >= LEAST_ROWS and rows < LEAST_ROWS_A_TASK * tasks:
            log.info(
                "%d rows came by %d tasks, too few by each to write files: Spark shuffles later epochs", rows, tasks
            )
            self._has_small_tasks = True

    def is_next_by_files(self, spark: SparkSession) -> bool:
        if self._rows < LEAST_ROWS or self._has_small_tasks:
            return False
        return _LOCAL.fullmatch(spark.sparkContext.master or "") is not None


class Exchanging:
    """Keeps the files of one Spark job, as long as it runs."""

    def __init__(self, spark: SparkSession, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        # Where Spark would have the files of its shuffle, `spark.local.dir`, and deletes what is left when it ends.
        parent = Path(spark.sparkContext._temp_dir)
        with storage_errors("make a directory for rows on their way to their shards, in", parent):
            self._directory = Path(tempfile.mkdtemp(prefix="nosync-", dir=parent))

    def run(self, rows: DataFrame, placement: Placement, handover: Handover) -> Exchange:
        """Writes rows. Raises what `Handover.mapped` raises, and StorageError."""
        directory = self._directory

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None, "runs inside a Spark task"
            path = directory / f"{context.taskAttemptId()}.arrow"
            try:
                with task_in_worker():
                    written = write_by_shard(batches, placement, path)
            except NosyncError as error:
                raise RuntimeError(encode_failure(error)) from None
            yield pa.RecordBatch.from_pylist([{"path": str(path), "rows": written}], schema=_WRITTEN)

        written = handover.mapped(rows, write, _WRITTEN).collect()
        self._exchanges.note_tasks(len(written), sum(one.rows for one in written))
        return Exchange([Path(one.path) for one in written if one.rows], placement.shards)

    def release(self) -> None:
        """Deletes the files; tasks that have them mapped keep what they have."""
        shutil.rmtree(self._directory, ignore_errors=True)
