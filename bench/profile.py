"""`python -m bench.profile`: an epoch's time by process, in the driver, and in a task's own code (docs/performance.md)."""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from bench.engines_sums import KEYS, batch, moved
from bench.footprint import alone, cpu_by_process
from bench.spark_epochs import CORES, SHARDS, aggregation, start
from bench.views_queries import view_epochs
from nosync.flow.binder import bind
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.lsm.columnar.hashing import hash64
from nosync.lsm.model.history import Span
from nosync.lsm.model.timestamp import pack
from nosync.lsm.platform.process import numpy_environment
from nosync.replication.client.location import StoreLocation
from nosync.runtime.segment_task import SegmentTask
from nosync.runtime.shard_run import run_shard
from nosync.spark.schemas import parse_ddl
from nosync.spark.session import DRIVER_MAX_BYTES, local_session

WARM, WARM_JVM, MEASURED = 10, 25, 15
LINES = 12


def show(title: str, epochs: Callable[[int, int], list[float]], order: str, only: str = "") -> None:
    """`epochs(first, last)` runs epochs and returns the seconds of each. `only`: a pattern of what to print."""
    epochs(0, WARM)
    plain_s = statistics.median(epochs(WARM, WARM + MEASURED))
    profile = cProfile.Profile()
    profile.enable()
    epochs(WARM + MEASURED, WARM + 2 * MEASURED)
    profile.disable()
    print(f"\n{title}: {1000 * plain_s:.0f} ms; below, {MEASURED} of them under the profiler")
    pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(only, LINES)


def driver(spark: SparkSession, root: Path) -> None:
    for rows in (20_000, 500_000):
        one = start(spark, root / str(rows))
        show(
            f"an epoch of {rows:,} rows, in the driver",
            lambda first, last, one=one, rows=rows: [  # type: ignore[misc]
                one.advance(batch(spark, i * rows, rows, KEYS)) for i in range(first, last)
            ],
            "cumulative",
            only=r"(job|epoch_\w+|runner|sealing|dataframe)\.py",
        )
        one.store.close()


def view(spark: SparkSession, root: Path) -> None:
    """Shows an epoch of a view with many stages: the driver's part, and Spark's stages of the last one."""
    epochs = view_epochs(spark, root / "view", "q3", 100_000)
    show(
        "an epoch of TPC-H q3 as a view by Spark's tasks, 100,000 lines of which 1 % change, in the driver",
        lambda first, last: [next(epochs) for _ in range(first, last)],
        "cumulative",
        only=r"(epoch_\w+|runner|dataframe|expressions|udf)\.py",
    )
    found = spark.sparkContext._jsc.sc().statusStore()
    job = found.jobsList(None).apply(0)
    stages = [found.lastStageAttempt(job.stageIds().apply(i)) for i in range(job.stageIds().size())]
    lasted = sorted(
        one.completionTime().get().getTime() - one.submissionTime().get().getTime()
        for one in stages
        if one.completionTime().isDefined()
    )
    print(f"Spark's stages of its last job: {len(lasted)}, which took {', '.join(map(str, lasted))} ms")
    epochs.close()


def processes(spark: SparkSession, root: Path) -> None:
    """Shows the time of processes beside the same rows moved and not kept: where both keep all cores busy, the ratio of
    their times is this one.
    """
    one, rows = start(spark, root / "processes"), 500_000

    def ours(i: int) -> None:
        one.advance(batch(spark, i * rows, rows, KEYS))

    def of_an_epoch(work: Callable[[int], None]) -> dict[str, float]:
        before, began = cpu_by_process(), time.perf_counter()
        for i in range(WARM_JVM, WARM_JVM + MEASURED):
            work(i)
        took_s = time.perf_counter() - began
        one.store.sync()
        after = cpu_by_process()
        found = {of: seconds - before[of] for of, seconds in after.items()}
        return {of: seconds / MEASURED for of, seconds in {"took": took_s, **found}.items()}

    for i in range(WARM_JVM):
        moved(spark, WARM_JVM + MEASURED + i, rows)  # rows of its own, see bench.engines_sums
        ours(i)
    one.store.sync()
    alone_s = of_an_epoch(lambda i: moved(spark, WARM_JVM + MEASURED + i, rows))
    ours_s = of_an_epoch(ours)
    one.store.close()
    print(f"\nan epoch of {rows:,} rows on {CORES} cores, and the same rows moved and not kept; processor ms:")
    for of in ours_s:
        print(f"  {of:<16} {1000 * ours_s[of]:>6.0f} {1000 * alone_s[of]:>6.0f}")


def task(root: Path) -> None:
    """One shard of two, half the rows of an epoch, without Spark, in a process that NumPy sees as Spark's workers."""
    told = numpy_environment()
    if told:
        alone(_task, root / "untold", "a task's own code, 250,000 rows, NumPy not told of this processor")
        os.environ.update(told)
    alone(_task, root / "told", "a task's own code, 250,000 rows")


def _task(root: Path, title: str) -> None:
    (root / "tmp").mkdir(parents=True)
    spark = local_session(1, "nosync-profile", log=root / "spark.log")
    flow = bind(aggregation(), parse_ddl)
    (segment,) = flow.segments.values()
    histories = {s.name: (Span(s.fingerprint, SHARDS, pack(0)),) for s in flow.recorded}

    def epochs(first: int, last: int) -> list[float]:
        seconds = []
        for t in range(first, last):
            ids = np.arange(t * 500_000, (t + 1) * 500_000, dtype=np.int64)
            keys = ids * 2654435761 % (1 << 32) % KEYS
            mine = hash64([pa.array(keys)]) >> np.uint64(63) == 0  # the first of two shards has the lower hashes
            columns = [pa.array(keys[mine]), pa.array(ids[mine])]
            rows = pa.table([*columns, hash64(columns).view(np.int64)], names=["k", "v", HASH64_COLUMN])
            work = SegmentTask(
                StoreLocation(str(root), flow.key_groups), t, SHARDS, flow.stages, segment.stages, histories=histories
            )
            began = time.perf_counter()
            list(run_shard(work, 0, iter(rows.to_batches())))
            seconds.append(time.perf_counter() - began)
        return seconds

    show(title, epochs, "tottime")
    spark.stop()


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        root = Path(directory)
        task(root / "task")
        spark = local_session(CORES, "nosync-profile", log=root / "spark.log", settings={DRIVER_MAX_BYTES: "0"})
        processes(spark, root)
        driver(spark, root)
        view(spark, root)
        spark.stop()


if __name__ == "__main__":
    main()
