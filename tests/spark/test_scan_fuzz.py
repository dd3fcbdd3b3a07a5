"""Random flows whose epochs are random files, read by tasks and by the JVM: the same layers.

NOSYNC_FUZZ=n tries n flows in the place of two (`make fuzz`).
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.orders import digests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

FLOWS = int(os.environ.get("NOSYNC_FUZZ", "2"))
EPOCHS = 3
COLUMNS = "id bigint, name string, n int, x double, amount decimal(10,2), at timestamp"
WHERES = ["n > 1", "id IS NOT NULL OR n < 3", "name IN ('a', 'b') OR n = 3", "NOT (n = 2)", "at IS NOT NULL"]
SELECTS = [
    ["*"],
    ["id % 3 AS id", "name", "n + 1 AS n", "x", "amount", "at"],
    ["id", "concat(name, 'x') AS name", "-n AS n", "x", "amount", "timestamp_seconds(60 * n) AS at"],
    ["n", "at", "amount", "x", "lower(name) AS name", "CASE WHEN n > 2 THEN id ELSE 7 END AS id"],
]
KEYS = [["id"], ["name"], ["n"], ["name", "id"], ["id", "name"]]
AGGREGATES = {
    "n_": nosync.count(), "total": nosync.sum("amount"), "mean": nosync.mean("x"), "least": nosync.min("name"),
    "newest": nosync.last("x", by="at"), "different": nosync.count_distinct("n"),
}  # fmt: skip


class Flows:
    """Makes the flow of a seed, as often as is asked."""

    def __init__(self, seed: int) -> None:
        self._random, self.flow, self._count = np.random.default_rng(seed), nosync.Dataflow("f"), 0
        tops = [self.flow.source(name, COLUMNS) for name in ("rows", "others")]
        for _ in range(int(self._random.integers(1, 4))):
            end = self._pick([self._window, self._window, self._aggregate, self._aggregate, self._dedupe, self._join])
            end(*(self._chain(top) for top in tops))

    def _pick(self, of: Any) -> Any:
        return of[int(self._random.integers(0, len(of)))]

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _chain(self, stage: nosync.Stage) -> nosync.Stage:
        for _ in range(int(self._random.integers(0, 4))):
            if self._random.random() < 0.5:
                stage = stage.where(self._name("where"), self._pick(WHERES))
            else:
                stage = stage.select(self._name("select"), *self._pick(SELECTS))
        return stage

    def _some(self) -> dict[str, Any]:
        chosen = {name: one for name, one in AGGREGATES.items() if self._random.random() < 0.5}
        return {"n_": AGGREGATES["n_"], **chosen}

    def _window(self, rows: nosync.Stage, _: nosync.Stage) -> None:
        how = self._pick([{"size": "5 minutes"}, {"size": "6 minutes", "slide": "2 minutes"}, {"gap": "2 minutes"}])
        more = self._pick([{}, {"emit": "final"}, {"keep": "3 minutes"}])
        delay = self._pick(["0 seconds", "4 minutes"])
        key = self._pick(KEYS)
        made = rows.window(self._name("window"), key=key, time="at", watermark=delay, **how, **more, **self._some())
        if self._random.random() < 0.3:
            made.aggregate(self._name("again"), key=key[:1], windows=nosync.count())

    def _aggregate(self, rows: nosync.Stage, others: nosync.Stage) -> None:
        top = self._pick([rows, others])
        top.aggregate(self._name("aggregate"), key=self._pick(KEYS), **self._some())

    def _dedupe(self, rows: nosync.Stage, _: nosync.Stage) -> None:
        within = self._pick([{}, {"time": "at", "watermark": "2 minutes", "within": "10 minutes"}])
        rows.dedupe(self._name("dedupe"), key=self._pick(KEYS), **within)

    def _join(self, rows: nosync.Stage, others: nosync.Stage) -> None:
        names = ["o_id", "o_name", "o_n", "o_x", "o_amount", "o_at"]
        right = others.select(self._name("right"), "id", *(f"{name[2:]} AS {name}" for name in names[1:]))
        times = {"time": ("at", "o_at"), "within": ("0 seconds", "5 minutes"), "watermark": "4 minutes"}
        left = self._pick([rows, self.flow["rows"]])  # as it is, it is in one task with what is joined
        left.join(
            self._name("join"), right, on=["id"], how=self._pick(["inner", "left"]), **self._pick([times, times, {}])
        )


def table(random: np.random.Generator, t: int) -> pa.Table:
    n = int(random.integers(0, 60))
    null = lambda values: [None if random.random() < 0.1 else value for value in values]  # noqa: E731
    minutes = [int(m) for m in random.integers(0, 12, n) + 10 * t]
    rows = pa.table(
        {
            "id": pa.array(null([int(v) for v in random.integers(-4, 5, n)]), pa.int64()),
            "name": pa.array(null([str(v) for v in random.choice(["a", "b", "Bc", ""], n)]), pa.string()),
            "n": pa.array(null([int(v) for v in random.integers(0, 5, n)]), pa.int32()),
            "x": pa.array(
                null([float(v) for v in random.choice([0.1, 0.2, 1e16, float("nan"), -0.0], n)]), pa.float64()
            ),
            "amount": pa.array(null([Decimal(int(v)) for v in random.integers(-3, 4, n)]), pa.decimal128(10, 2)),
            "at": pa.array(null([1_767_225_600_000_000 + 60_000_000 * m for m in minutes])).cast(
                pa.timestamp("us", "UTC")
            ),
        }
    )
    return pa.concat_tables([rows, rows.slice(0, n // 3)])  # some are there more than once


@pytest.mark.parametrize("seed", range(FLOWS))
def test_layers_are_the_same_as_when_the_jvm_reads_the_files(
    spark: SparkSession, open_store: OpenStore, seed: int, tmp_path: Path, readers: list[frozenset[str]]
) -> None:
    random = np.random.default_rng(seed + 1000)
    shards = int(random.integers(1, 4))
    stores = [open_store(name) for name in ("by_tasks", "by_jvm")]
    jobs = [nosync.Job(Flows(seed).flow, store, spark=spark, shards=shards) for store in stores]
    for t in range(EPOCHS):
        for job, by_jvm in zip(jobs, (False, True), strict=True):
            inputs = {}
            for name in ("rows", "others"):
                directory = tmp_path / f"{name}-{t}"
                if not directory.exists():
                    directory.mkdir()
                    for part in range(int(random.integers(1, 4))):
                        pq.write_table(table(random, t), directory / f"{part}.parquet", row_group_size=25)
                frame = spark.read.schema(COLUMNS).parquet(str(directory))
                inputs[name] = frame.where("true") if by_jvm else frame
            job.advance(t, inputs)
    assert len(readers) == EPOCHS, "one of the two reads files"
    assert digests(stores[0]) == digests(stores[1])
