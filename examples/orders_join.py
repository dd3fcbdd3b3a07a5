"""Orders joined with customers who move house. Run: python examples/orders_join.py

Both sides change: orders come, customers come later or are updated. The joined rows follow, and so do the totals by city.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import nosync

ORDERS, MOVES = "customer string, amount bigint", "customer string, city string"
# By epoch: orders, and customers with their new city.
EPOCHS = [
    ([("ada", 10), ("bob", 20)], [("ada", "London")]),
    ([("ada", 5), ("cyd", 7)], [("bob", "Paris"), ("cyd", "Paris")]),
    ([], [("ada", "Paris")]),  # ada's old orders move with her
]


def newest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """A customer's city is the one of the last move (there is one an epoch here)."""
    return changes.select(["customer", "city"])


def orders_by_city() -> nosync.Dataflow:
    flow = nosync.Dataflow("orders")
    orders, moves = flow.source("orders", ORDERS), flow.source("moves", MOVES)
    customers = moves.update("customers", key=["customer"], state="city string", fn=newest)
    located = orders.join("located", customers, on=["customer"], how="left")
    located.aggregate("by_city", key=["city"], orders=nosync.count(), total=nosync.sum("amount"))
    return flow


def run(spark: SparkSession, directory: Path) -> list[dict[str | None, int]]:
    """The total by city after each epoch."""
    totals = []
    with nosync.open(directory / "store") as store:
        job = nosync.Job(orders_by_city(), store, spark=spark, shards=2)
        for t, (orders, moves) in enumerate(EPOCHS):
            inputs = {"orders": spark.createDataFrame(orders, ORDERS), "moves": spark.createDataFrame(moves, MOVES)}
            job.advance(t, inputs)
            totals.append({row.city: row.total for row in job.read("by_city").collect()})
    return totals


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        for epoch, by_city in enumerate(run(session, Path(temporary))):
            shown = [f"{city or 'unknown'} {total}" for city, total in sorted(by_city.items(), key=str)]
            print(f"epoch {epoch}: " + ", ".join(shown))
