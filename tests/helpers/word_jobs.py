"""A flow over words with every kind of stage, its epochs, and what Pandas makes of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

import nosync

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SCHEMA = "word string, n bigint, x double"


SHARDS = 3


def keep_positive(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["n"], 0))


def remember_best(changes: pa.Table, state: pa.Table) -> pa.Table:
    """The best total each initial ever had, and how many changes it saw; forgets the initial z."""
    best = {row["initial"]: (row["best"], row["seen"]) for row in state.to_pylist()}
    for row in changes.to_pylist():
        if row["_change_type"] in ("insert", "update_postimage"):
            b, seen = best.get(row["initial"], (None, 0))
            best[row["initial"]] = (row["total"] if b is None else max(b, row["total"]), seen + 1)
    best.pop("z", None)
    return pa.table(
        {
            "initial": pa.array(list(best), pa.string()),
            "best": pa.array([v[0] for v in best.values()], pa.int64()),
            "seen": pa.array([v[1] for v in best.values()], pa.int64()),
        }
    )


def add_initial(rows: pa.Table) -> pa.Table:
    return rows.append_column("initial", pc.utf8_slice_codeunits(rows["word"], 0, 1))


def make_flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("words")
    kept = flow.source("words", SCHEMA).map("kept", keep_positive)
    totals = kept.aggregate(
        "totals",
        key=["word"],
        n=nosync.count(),
        some=nosync.count("x"),
        total=nosync.sum("n"),
        least=nosync.min("x"),
        most=nosync.max("x"),
        mean=nosync.mean("x"),
    )
    best = totals.map("initials", add_initial).update(
        "best", key=["initial"], state="best bigint, seen bigint", fn=remember_best
    )
    assert best.name == "best"
    totals.filter("big", lambda rows: pc.greater(rows["total"], 100)).aggregate(
        "big_by_size", key=["n"], words=nosync.count(), total=nosync.sum("total")
    )
    return flow


def epochs(seed: int, count: int, rows: int = 300) -> list[pd.DataFrame]:
    random_ = np.random.default_rng(seed)
    words = np.array([f"{c}{i}" for c in "abcxyz" for i in range(8)])
    found = []
    for _ in range(count):
        x = random_.integers(-50, 50, rows) / 4  # sums of quarters are exact, so order cannot hide in rounding
        frame = pd.DataFrame({"word": random_.choice(words, rows), "n": random_.integers(-5, 20, rows), "x": x})
        frame["x"] = frame["x"].astype(object).where(random_.random(rows) > 0.2, None)
        found.append(frame)
    found.append(found[0].iloc[:0])
    return found


def to_spark(spark: SparkSession, frame: pd.DataFrame, order: int | None = None) -> DataFrame:
    table = pa.Table.from_pydict(
        {"word": pa.array(frame["word"], pa.string()), "n": pa.array(frame["n"], pa.int64()),
         "x": pa.array(frame["x"], pa.float64(), from_pandas=True)}
    )  # fmt: skip
    if order is not None:
        shuffled = list(range(table.num_rows))
        random.Random(order).shuffle(shuffled)
        table = table.take(pa.array(shuffled, pa.int64()))
        return spark.createDataFrame(table).repartition(1 + order % 4)
    return spark.createDataFrame(table)


def run(job: nosync.Job, spark: SparkSession, frames: list[pd.DataFrame], **options: Any) -> list[nosync.EpochReport]:
    return [job.advance(t, {"words": to_spark(spark, frame, **options)}) for t, frame in enumerate(frames)]


def rows_of(frame: DataFrame, key: str) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for row in frame.collect():
        values = row.asDict()
        k = values.pop(key)
        assert k not in found
        found[k] = values
    return found
