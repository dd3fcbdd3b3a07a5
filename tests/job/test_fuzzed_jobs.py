"""Random flows as Spark jobs: backfill beside advance, other numbers of shards, files lost around merges, against a run without.

The oracle runs the same flow without Spark and without faults. NOSYNC_FUZZ=n tries n jobs in the place of two (`make fuzz`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.pipelines import COLUMNS, Op, build, table
from tests.helpers.runner import StoreRunner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

JOBS = int(os.environ.get("NOSYNC_FUZZ", "2"))
EPOCHS = 7
KINDS = ("scale", "move", "project", "keep", "running", "sums", "counts", "dedupe", "union", "join")
Rows = list[tuple[int, int, int]]


def ops_of(random: np.random.Generator) -> list[Op]:
    """At least one keyed stage, so that there is a state to lose."""
    count = int(random.integers(1, 4))
    ops = [Op(str(random.choice(KINDS)), *map(int, random.integers(0, 4, 3))) for _ in range(count)]
    return [*ops, Op("sums", 1, count, 0)]


def frame(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(rows, COLUMNS)


def lose_some(store: nosync.Store, random: np.random.Generator) -> None:
    for _ in range(int(random.integers(0, 4))):
        store.node.merge_once()
    files = sorted((store.directory.root / "layers").rglob("*.layer"))
    for path in random.choice(np.array(files, dtype=object), int(random.integers(0, 5))):
        Path(path).unlink(missing_ok=True)


def states(store: nosync.Store, stages: list[str]) -> dict[tuple[str, int], Any]:
    found = {}
    for stage in stages:
        for t in range(EPOCHS):
            rows = store.read(stage, t)
            found[stage, t] = sorted(map(repr, rows.select(sorted(rows.column_names)).to_pylist()))
    return found


@pytest.mark.parametrize("seed", range(JOBS))
@pytest.mark.long("make fuzz")
def test_whatever_happens_every_epoch_reads_as_without_it(
    spark: SparkSession, open_store: OpenStore, seed: int
) -> None:
    random = np.random.default_rng(seed)
    ops = ops_of(random)
    rows: list[Rows] = [
        [(int(k), int(g), int(v)) for k, g, v in random.integers(0, 6, (int(random.integers(0, 7)), 3))]
        for _ in range(EPOCHS)
    ]
    calm = open_store("calm")
    oracle = StoreRunner(build(ops), calm, seed, shards=1)
    for t in range(EPOCHS):
        oracle.advance(t, table(rows[t]))
    settings = nosync.StoreSettings(background=False, grace_s=3600.0, retry_s=0.0, archive_epochs=3)
    store, t = open_store("store", settings=settings), 0
    while t < EPOCHS:
        job = nosync.Job(build(ops), store, spark=spark, shards=int(random.integers(1, 4)))
        together = min(int(random.integers(1, 4)), EPOCHS - t)
        if together > 1:
            given = [(e, *row) for e in range(t, t + together) for row in rows[e]]
            df = spark.createDataFrame(given, f"e int, {COLUMNS}")
            job.backfill({"rows": df}, epoch="e")
            last = store.last_sealed()
            for e in range(0 if last is None else last + 1, t + together):  # of no rows at the end
                job.advance(e, {"rows": frame(spark, rows[e])})
        else:
            job.advance(t, {"rows": frame(spark, rows[t])})
        t += together
        store.sync()
        lose_some(store, random)
        report = job.recover(lambda e: {"rows": frame(spark, rows[e])})
        assert report.unrecoverable == {}, (seed, ops)
        store.node.parts.garbage.collect(all=True)
        assert store.missing() == [], (seed, ops)
    stages = [stage.name for stage in oracle.flow.recorded]
    assert states(store, stages) == states(calm, stages), (seed, ops)
    assert store.safe_point() == EPOCHS - 1
