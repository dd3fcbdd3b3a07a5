"""Five ordinary stateful queries, as anybody writes them: nothing of nosync is imported here.

    python ordinary_queries.py CHECKPOINTS OUTPUT SOURCE FORMAT QUERIES [VARIANT]

It runs what there is, then ends. The output of each batch is a file of its own, which a batch that runs again replaces.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout

FORMATS = {
    "hdfs": ("HDFSBackedStateStoreProvider", "1", "false"),
    "rocksdb": ("RocksDBStateStoreProvider", "1", "false"),
    "changelog": ("RocksDBStateStoreProvider", "1", "true"),
    "v2": ("RocksDBStateStoreProvider", "2", "true"),
}
SCHEMA = "k string, n long, ts timestamp"


def session(form: str) -> SparkSession:
    provider, version, changelog = FORMATS[form]
    state = "spark.sql.streaming.stateStore"
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config(f"{state}.providerClass", f"org.apache.spark.sql.execution.streaming.state.{provider}")
        .config(f"{state}.checkpointFormatVersion", version)
        .config(f"{state}.rocksdb.changelogCheckpointing.enabled", changelog)
        .config(f"{state}.maintenanceInterval", "2s")
        .config(f"{state}.minDeltasForSnapshot", "3")
        .getOrCreate()
    )


class Total(StatefulProcessor):
    """The sum of each key, times `factor`."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "sum long, seen long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timers: Any) -> Iterator[pd.DataFrame]:
        total, seen = self.total.get() if self.total.exists() else (0, 0)
        for part in rows:
            total, seen = total + int(part["n"].sum()) * self.factor, seen + len(part)
        self.total.update((total, seen))
        yield pd.DataFrame({"k": [key[0]], "sum": [total], "seen": [seen]})

    def close(self) -> None:
        pass


def query(spark: SparkSession, source: str, name: str, factor: int) -> tuple[DataFrame, str]:
    """Returns a query's rows and its output mode."""

    def read(side: str) -> DataFrame:
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(f"{source}/{side}")

    def arbitrary(key: Any, parts: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        total = state.get[0] if state.exists else 0
        total += sum(int(part["n"].sum()) * factor for part in parts)
        state.update((total,))
        yield pd.DataFrame({"k": [key[0]], "sum": [total]})

    a = read("a")
    if name == "aggregate":
        found = a.withWatermark("ts", "20 seconds").groupBy(F.window("ts", "10 seconds"), "k")
        counted = found.agg(F.count("*").alias("c"), F.sum(F.col("n") * factor).alias("s"))
        return counted.selectExpr("cast(window.start as string) w", "k", "c", "s"), "append"
    if name == "join":
        left = a.withWatermark("ts", "20 seconds").alias("l")
        right = read("b").withWatermark("ts", "20 seconds").alias("r")
        when = F.expr("l.k = r.k and r.ts between l.ts and l.ts + interval 5 seconds")
        return left.join(right, when, "leftOuter").selectExpr("l.k", "l.n", "r.n rn"), "append"
    if name == "dedupe":
        return a.withWatermark("ts", "20 seconds").dropDuplicatesWithinWatermark(["k", "n"]).selectExpr(
            "k", "n"
        ), "append"
    if name == "processor":
        grouped = a.groupBy("k")
        return grouped.transformWithStateInPandas(
            Total(factor), "k string, sum long, seen long", "update", "none"
        ), "update"
    grouped = a.groupBy("k")
    return (
        grouped.applyInPandasWithState(
            arbitrary, "k string, sum long", "sum long", "update", GroupStateTimeout.NoTimeout
        ),
        "update",
    )


def sink(output: str, name: str) -> Callable[[DataFrame, int], None]:
    def write(rows: DataFrame, batch: int) -> None:
        found = sorted(json.dumps(row.asDict(), default=str) for row in rows.collect())
        os.makedirs(f"{output}/{name}", exist_ok=True)
        with open(f"{output}/{name}/.{batch}", "w") as file:
            json.dump(found, file)
        os.replace(f"{output}/{name}/.{batch}", f"{output}/{name}/{batch}.json")

    return write


def main(checkpoints: str, output: str, source: str, form: str, names: str, variant: str = "") -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = session(form)
    spark.sparkContext.setLogLevel("OFF")
    running = []
    for name in names.split(","):
        rows, mode = query(spark, source, name, 10 if variant == "x10" else 1)
        writer = rows.writeStream.outputMode(mode).foreachBatch(sink(output, name))
        running.append(writer.option("checkpointLocation", f"{checkpoints}/{name}").trigger(availableNow=True).start())
    for one in running:
        one.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
