"""Epochs of a Spark job: what recording costs, what a large state costs, and recovery. Other engines: `bench.engines_sums`.

The work is a keyed aggregation (count and sum) over random keys; each run gets the same rows. What recording on a disk costs is
beside the same job on a file system in memory, which merges as well.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

import nosync
from bench.harness import Result, Samples, timed
from nosync.spark.session import DRIVER_MAX_BYTES, local_session

MEMORY_DIRECTORY = Path("/dev/shm")
WARM = 4
SCHEMA = "k bigint, v bigint"
CORES = 2
SHARDS = 2


@dataclass
class Run:
    """One job and the epochs it ran."""

    store: nosync.Store
    job: nosync.Job
    t: int = 0

    def advance(self, rows: DataFrame) -> float:
        took = timed(lambda: self.job.advance(self.t, {"rows": rows}))
        self.t += 1
        return took


def aggregation() -> nosync.Dataflow:
    flow = nosync.Dataflow("bench")
    flow.source("rows", SCHEMA).aggregate("sums", key=["k"], n=nosync.count(), total=nosync.sum("v"))
    return flow


def start(spark: SparkSession, path: Path) -> Run:
    store = nosync.open(path)
    return Run(store, nosync.Job(aggregation(), store, spark=spark, shards=SHARDS))


def rows_of_batch(spark: SparkSession, first: int, rows: int, keys: int) -> DataFrame:
    """Returns rows `first ..` of an endless random sequence of keys."""
    return spark.range(first, first + rows, 1, CORES).selectExpr(f"pmod(xxhash64(id), {keys}) AS k", "id AS v")


def all_keys(spark: SparkSession, keys: int) -> DataFrame:
    return spark.range(0, keys, 1, CORES).selectExpr("id AS k", "id AS v")


def run(scale: str) -> Iterator[Result]:
    spark = local_session(CORES, "nosync-bench", settings={DRIVER_MAX_BYTES: "0"})
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary)
        yield from _recording(spark, root / "recording", repeats={"short": 6, "normal": 20, "full": 30}[scale])
        yield from _state_sizes(spark, root / "sizes", repeats={"short": 5, "normal": 10, "full": 20}[scale])
        sizes = (20_000,) if scale == "short" else (20_000, 200_000)
        yield from _backfill(spark, root / "backfill", sizes, repeats={"short": 1, "normal": 3, "full": 6}[scale])
        yield from _recovery(spark, root / "recovery")
    spark.stop()


# --- recording on and off --------------------------------------------------------------------------------------------


def _recording(spark: SparkSession, root: Path, repeats: int) -> Iterator[Result]:
    keys = 2_000_000
    # Pairs of small epochs differ by more than the goal leaves room for.
    for rows, goal, pairs in ((20_000, 1.05, 5 * repeats), (500_000, 1.03, repeats)):
        off_root = Path(tempfile.mkdtemp(dir=MEMORY_DIRECTORY))
        try:
            on, off = start(spark, root / str(rows)), start(spark, off_root / "store")
            for one in (on, off):
                one.advance(all_keys(spark, keys))
            on_s: list[float] = []
            off_s: list[float] = []
            for i in range(pairs + WARM):
                batch = rows_of_batch(spark, i * rows, rows, keys)
                # Who goes first alternates, and the first rounds warm up.
                for one, found in ((on, on_s), (off, off_s)) if i % 2 else ((off, off_s), (on, on_s)):
                    took = one.advance(batch)
                    if i >= WARM:
                        found.append(took)
            on.store.close()
            off.store.close()
        finally:
            shutil.rmtree(off_root)
        ratio = Samples([a / b for a, b in zip(on_s, off_s, strict=True)])
        yield Result(
            f"epoch of {rows:,} rows, {keys:,} keys", "recording to disk", Samples(on_s).median, "s",
            "on a file system in memory", Samples(off_s).median, ratio.median, f"<= {goal}", ratio.median <= goal,
            ratio.spread, pairs,
        )  # fmt: skip


# --- the size of the state -------------------------------------------------------------------------------------------


def _state_sizes(spark: SparkSession, root: Path, repeats: int) -> Iterator[Result]:
    sizes, rows = (10**5, 10**6, 10**7), 20_000
    runs = {}
    for n in sizes:
        runs[n] = start(spark, root / str(n))
        runs[n].advance(all_keys(spark, n))
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    for i in range(repeats + 2):
        for n, one in runs.items():
            took = one.advance(rows_of_batch(spark, i * rows, rows, n))
            if i >= 2:
                seconds[n].append(took)
    persist_s: dict[int, list[float]] = {n: [] for n in sizes}
    for i in range(repeats + 2, 2 * repeats + 2):
        for n, one in runs.items():
            one.store.sync()  # so that what follows is this epoch's alone
            one.advance(rows_of_batch(spark, i * rows, rows, n))
            persist_s[n].append(timed(one.store.sync))
    for one in runs.values():
        one.store.close()
    smallest = Samples(seconds[sizes[0]])
    for n in sizes[1:]:
        found = Samples(seconds[n])
        ratio = found.median / smallest.median
        yield Result(
            f"epoch of {rows:,} rows, {n:,} keys", "nosync", found.median, "s", f"the same with {sizes[0]:,} keys",
            smallest.median, ratio, "<= 1.2", ratio <= 1.2, found.spread, repeats,
        )  # fmt: skip
    few = Samples(persist_s[sizes[0]])
    for n in sizes[1:]:
        many = Samples(persist_s[n])
        ratio = many.median / few.median
        yield Result(
            f"from the end of an epoch of {rows:,} rows until it is durable, {n:,} keys", "nosync", 1000 * many.median, "ms",
            f"the same with {sizes[0]:,} keys", 1000 * few.median, ratio, "<= 1.2", ratio <= 1.2, many.spread, repeats,
        )  # fmt: skip


# --- many epochs at once ---------------------------------------------------------------------------------------------


def _backfill(spark: SparkSession, root: Path, sizes: Sequence[int], repeats: int) -> Iterator[Result]:
    """The same epochs one after the other, and all of them in one call."""
    keys, epochs = 1_000_000, 32
    for rows in sizes:
        one, all_ = start(spark, root / f"one-{rows}"), start(spark, root / f"all-{rows}")
        for run in (one, all_):
            run.advance(all_keys(spark, keys))
        one_s, all_s = [], []
        for i in range(repeats + 1):  # the first time warms up
            first = i * epochs * rows
            one_s.append(sum(one.advance(rows_of_batch(spark, first + t * rows, rows, keys)) for t in range(epochs)))
            given = {"rows": rows_of_batch(spark, first, epochs * rows, keys)}
            all_s.append(timed(partial(all_.job.backfill, given, epoch=f"v div {rows} + 1")))
        for run in (one, all_):
            if run.job.last_sealed() != (repeats + 1) * epochs:
                raise RuntimeError(f"epoch {run.job.last_sealed()} is the last, expected {(repeats + 1) * epochs}")
            run.store.close()
        together, apart = Samples(all_s[1:]), Samples(one_s[1:])
        yield Result(
            f"{epochs} epochs of {rows:,} rows, {keys:,} keys", "backfill", together.median, "s", "one after the other",
            apart.median, together.median / apart.median, "< 1", together.median < apart.median, together.spread, repeats,
        )  # fmt: skip


# --- recovery --------------------------------------------------------------------------------------------------------


def five_stages() -> nosync.Dataflow:
    """Source, filter by map, aggregate, map over what changes, aggregate."""
    flow = nosync.Dataflow("five")
    kept = flow.source("rows", SCHEMA).map("kept", lambda rows: rows.filter(pc.greater_equal(rows["v"], 0)))
    sums = kept.aggregate("sums", key=["k"], n=nosync.count(), total=nosync.sum("v"))
    groups = sums.map("grouped", _to_group)
    groups.aggregate("by_group", key=["g"], keys=nosync.count(), total=nosync.sum("total"))
    return flow


def _to_group(rows: pa.Table) -> pa.Table:
    group = pc.cast(pc.divide(rows["k"], 1000), pa.int64())
    return rows.select(["total", "_change_type"]).append_column("g", group)


def _recovery(spark: SparkSession, root: Path) -> Iterator[Result]:
    """One shard of one stage is lost for 1 and for 8 epochs, with a small and a large state."""
    rows, epochs = 20_000, 10
    found: dict[tuple[int, int], float] = {}
    lost_layers = recomputed = 0
    for keys in (10**5, 10**6):
        # Not merged, so that each epoch's layer can be lost alone.
        with nosync.open(root / str(keys), settings=nosync.StoreSettings(merge=False)) as store:
            job = nosync.Job(five_stages(), store, spark=spark, shards=SHARDS)
            job.advance(0, {"rows": all_keys(spark, keys)})
            for t in range(1, epochs):
                job.advance(t, {"rows": rows_of_batch(spark, t * rows, rows, keys)})
            store.sync()
            job.recover()
            for lost in (1, 8, 1, 8):  # the second time everything is warm
                victims = _newest_layers(store, "sums", lost)
                for path in victims:
                    path.unlink()
                began = time.perf_counter()
                report = job.recover()
                found[keys, lost] = time.perf_counter() - began
                if (report.lost, report.recomputed) != (len(victims), len(victims)):
                    raise RuntimeError(f"expected {len(victims)} layers lost and recomputed: {report}")
                lost_layers, recomputed = lost_layers + report.lost, recomputed + report.recomputed
    yield Result(
        "layers computed again, 1 or 8 of a shard lost", "nosync", recomputed, "layers", "layers that were lost", lost_layers,
        recomputed / lost_layers, "= 1 for one", recomputed == lost_layers,
    )  # fmt: skip
    for keys in (10**5, 10**6):
        per_epoch = found[keys, 8] / 8
        yield Result(
            f"recover 8 lost layers of one shard, {keys:,} keys", "nosync, a layer", per_epoch, "s", "1 lost layer alone",
            found[keys, 1], per_epoch / found[keys, 1],
        )  # fmt: skip
    small, large = found[10**5, 8], found[10**6, 8]
    yield Result(
        "recover 8 lost layers, 1,000,000 keys", "nosync", large, "s", "the same with 100,000 keys", small, large / small,
    )  # fmt: skip


def _newest_layers(store: nosync.Store, stage: str, epochs: int) -> list[Path]:
    """Returns the files of shard 0 of a stage that hold its newest epochs."""
    mine = sorted((x for x in store.layers() if x.stage == stage and x.shard == 0), key=lambda x: int(x.lower))
    return [Path(x.path) for x in mine if int(x.upper) - int(x.lower) == 1][-epochs:]
