"""What a branch costs: making it, replaying it, and the disk it takes, beside the run that it branches from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import nosync
from bench.harness import Result, Samples, sample, timed
from bench.spark_epochs import CORES, SHARDS, all_keys, five_stages, rows_of_batch
from nosync.spark.session import local_session

EPOCHS, ROWS = 40, 20_000
LAST_EPOCHS, REPEATS = 4, 3


def from_on(least: int) -> Callable[[pa.Table], pa.Table]:
    """Other code for the second of the five stages, from which the others come. With another number it is other code
    again.
    """

    def kept(rows: pa.Table) -> pa.Table:
        return rows.filter(pc.greater_equal(rows["v"], least))

    return kept


def run(scale: str) -> Iterator[Result]:
    keys = 10**7 if scale == "full" else 10**6
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as temporary, nosync.open(Path(temporary) / "s") as store:
        job = nosync.Job(five_stages(), store, spark=spark, shards=SHARDS)
        job.advance(0, {"rows": all_keys(spark, keys)})
        # The same work in both: the first branch of a process also starts Python workers.
        warm = job.branch("warm", at=0, replace={"kept": from_on(1)})
        warm.replay()
        for t in range(1, EPOCHS + 1):
            job.advance(t, {"rows": rows_of_batch(spark, t * ROWS, ROWS, keys)})
        store.sync()
        used = _bytes(Path(temporary))
        layers = sum(path.stat().st_size for path in Path(temporary).rglob("*.layer"))
        number = iter(range(1000))
        made = sample(lambda: store.node.timelines.create(f"b{next(number)}", "main", EPOCHS - LAST_EPOCHS), 20)
        yield Result(
            f"make a branch, {keys:,} keys", "nosync", made.median * 1000, "ms", goal="<= 10", met=made.median <= 0.010,
            spread=made.spread, repeats=20,
        )  # fmt: skip
        grown = (_bytes(Path(temporary)) - used) / 21
        yield Result(
            "disk that a branch takes", "nosync", grown / 1e3, "kB", "the store's layers", layers / 1e3, grown / layers
        )
        seconds: dict[str, list[float]] = {"last": [], "all": [], "anew": []}
        for i in range(1 + REPEATS):  # by turns, and the first ones warm up
            for name, at, least in (("last", EPOCHS - LAST_EPOCHS, 10 + i), ("all", 0, 100 + i)):
                branch = job.branch(f"{name}-{i}", at=at, replace={"kept": from_on(least)})
                seconds[name].append(timed(branch.replay))
            seconds["anew"].append(_anew(spark, Path(temporary) / f"anew-{i}", keys))
        last, of_all, anew = (Samples(found[1:]) for found in seconds.values())
        replayed = partial(
            Result, f"replay {LAST_EPOCHS} of {EPOCHS} epochs, 4 of 5 stages changed", "nosync", last.median, "s"
        )
        ratio, goal = last.median / anew.median, LAST_EPOCHS / EPOCHS * 1.2
        yield replayed(
            f"all {EPOCHS} in a new store, with backfill", anew.median, ratio, f"<= {goal:.2f}", ratio <= goal,
            last.spread, REPEATS, baseline_spread=anew.spread,
        )  # fmt: skip
        yield replayed(
            f"a replay of all {EPOCHS}", of_all.median, last.median / of_all.median, spread=last.spread, repeats=REPEATS,
            baseline_spread=of_all.spread,
        )  # fmt: skip
    spark.stop()


def _anew(spark: SparkSession, root: Path, keys: int) -> float:
    """Returns the seconds of all epochs but the first, many in each Spark job: what has no branches runs everything."""
    with nosync.open(root) as store:
        job = nosync.Job(five_stages(), store, spark=spark, shards=SHARDS)
        job.advance(0, {"rows": all_keys(spark, keys)})
        rows = rows_of_batch(spark, ROWS, EPOCHS * ROWS, keys)
        return timed(lambda: job.backfill({"rows": rows}, epoch=f"v div {ROWS}"))


def _bytes(root: Path) -> int:
    """Returns the bytes on disk, without the catalog, and without layers that are merged meanwhile."""
    others = {"catalog", "layers"}
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not others & set(path.parts))
