"""Visits to a web site as session windows. Run: python examples/sessions.py

A visit ends when nothing came for 30 minutes. Clicks may come up to 10 minutes late; those that come later still are not
counted, but recorded in a stage of their own.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import SparkSession

import nosync

CLICKS = "user string, at timestamp, page string"
NOON = datetime(2024, 5, 1, 12, 0, tzinfo=UTC)
# By epoch: (user, minutes after noon, page).
EPOCHS = [
    [("ada", 0, "home"), ("bob", 5, "home"), ("ada", 10, "search")],
    [("ada", 35, "item"), ("bob", 50, "home")],  # bob's second visit; ada goes on with her first
    [("ada", 120, "home"), ("bob", 45, "item")],  # late by 5 minutes, and in time: the watermark is at 12:40
    [],  # what is late goes by the watermark of the epoch before, as in Spark
    [("bob", 20, "help")],  # hopelessly late: the watermark is at 13:50
]


def visits() -> nosync.Dataflow:
    flow = nosync.Dataflow("visits")
    clicks = flow.source("clicks", CLICKS)
    clicks.window(
        "visits",
        key=["user"],
        time="at",
        gap="30 minutes",
        watermark="10 minutes",
        clicks=nosync.count(),
        entered=nosync.first("page", by="at"),
        left=nosync.last("page", by="at"),
    )
    return flow


def run(spark: SparkSession, directory: Path) -> tuple[list[tuple[str, int, int, str, str]], int]:
    """The visits as (user, minutes, clicks, first page, last page), and the number of late clicks."""
    with nosync.open(directory / "store") as store:
        job = nosync.Job(visits(), store, spark=spark, shards=2)
        for t, clicks in enumerate(EPOCHS):
            rows = [(user, NOON + timedelta(minutes=minute), page) for user, minute, page in clicks]
            job.advance(t, {"clicks": spark.createDataFrame(rows, CLICKS)})
        found = [
            (
                row.user,
                round((row.window_end - row.window_start).total_seconds() / 60),
                row.clicks,
                row.entered,
                row.left,
            )
            for row in job.read("visits").orderBy("user", "window_start").collect()
        ]
        return found, job.read("visits__late").count()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        found_visits, late = run(session, Path(temporary))
        for user, minutes, clicks, entered, left in found_visits:
            print(f"{user:4} {minutes:4} minutes, {clicks} clicks, from {entered} to {left}")
        print(f"{late} click came too late")
