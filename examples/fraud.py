"""Rules over the history of each card. Run: python examples/fraud.py

A charge of less than 1 followed by one of more than 500 is how a stolen card is tried out. The state of a card is whether
it saw a small charge, and how many alerts it has; a card that is not used for 3 epochs is forgotten.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import nosync

CHARGES = "card string, n bigint, amount double"
# By epoch: (card, number of the charge, amount).
EPOCHS = [
    [("1111", 1, 0.5), ("2222", 1, 20.0), ("3333", 1, 0.2)],
    [("1111", 2, 900.0), ("2222", 2, 700.0)],
    [("2222", 3, 0.9)],
    [("2222", 4, 20.0), ("2222", 5, 650.0)],
    [("3333", 2, 800.0)],  # its small charge was 4 epochs ago: forgotten
]


def check_card(
    card: tuple[Any, ...], changes: list[dict[str, Any]], state: dict[str, Any] | None
) -> Mapping[str, Any] | None:
    """The state of one card after an epoch's charges."""
    tried = state["tried"] if state else False
    alerts = state["alerts"] if state else 0
    for charge in sorted(changes, key=lambda row: row["n"]):
        if tried and charge["amount"] > 500:
            alerts, tried = alerts + 1, False
        elif charge["amount"] < 1:
            tried = True
    return {"tried": tried, "alerts": alerts}


def rules() -> nosync.Dataflow:
    flow = nosync.Dataflow("fraud")
    charges = flow.source("charges", CHARGES)
    cards = charges.update_per_key("cards", key=["card"], state="tried boolean, alerts bigint", fn=check_card, ttl=3)
    cards.where("suspicious", "alerts > 0")
    return flow


def run(spark: SparkSession, directory: Path) -> list[tuple[int, str, str]]:
    """Returns what changed among the suspicious cards: (epoch, card, change)."""
    with nosync.open(directory / "store") as store:
        job = nosync.Job(rules(), store, spark=spark, shards=2)
        for t, charges in enumerate(EPOCHS):
            job.advance(t, {"charges": spark.createDataFrame(charges, CHARGES)})
        feed = job.changes("suspicious", -1, len(EPOCHS) - 1, include_expired=True).orderBy("_epoch", "card").collect()
        return [(row._epoch, row.card, row._change_type) for row in feed]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        for epoch, card, change in run(session, Path(temporary)):
            print(f"epoch {epoch}: card {card}: {change}")
