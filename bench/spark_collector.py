"""Epochs of Spark jobs with the garbage collector that `local_session` asks for, beside the one that the JVM takes by itself."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from bench.engines_sums import KEYS, batch
from bench.footprint import alone
from bench.harness import Result, Samples
from bench.spark_epochs import CORES, start
from nosync.spark.session import local_session

EPOCHS = {20_000: 70, 500_000: 40}
"""By rows of an epoch, how many of them a session runs; the second half counts."""
SHORT = {20_000: 40}
G1 = {"JDK_JAVA_OPTIONS": "-XX:+UseG1GC"}


def run(scale: str) -> Iterator[Result]:
    repeats = {"short": 1, "normal": 3, "full": 6}[scale]
    for rows, epochs in (SHORT if scale == "short" else EPOCHS).items():
        ours, theirs = [], []
        for _ in range(repeats):  # each in a JVM of its own, in turn, so that drift of the machine hits both
            ours.append(alone(_epoch, rows, epochs))
            with mock.patch.dict(os.environ, G1):
                theirs.append(alone(_epoch, rows, epochs))
        ratios = Samples([a / b for a, b in zip(ours, theirs, strict=True)])
        mine, other = statistics.median(ours), statistics.median(theirs)
        yield Result(
            f"an epoch of {rows:,} rows, {KEYS:,} keys", "parallel collections", mine, "s p50", "G1", other, ratios.median,
            "< 1", ratios.median < 1, ratios.spread, repeats,
        )  # fmt: skip


def _epoch(rows: int, epochs: int) -> float:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        spark = local_session(CORES, "nosync-bench", log=Path(directory) / "spark.log")
        one = start(spark, Path(directory) / "store")
        seconds = [one.advance(batch(spark, i * rows, rows, KEYS)) for i in range(epochs)]
        one.store.close()
        spark.stop()
    return statistics.median(seconds[len(seconds) // 2 :])
