"""Epochs of Spark jobs in a session of `local_session`, beside one that leaves a choice to Spark and the JVM."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from bench.engines_sums import KEYS, batch
from bench.footprint import alone
from bench.harness import Result, Samples
from bench.spark_epochs import CORES, start
from nosync.spark.session import DRIVER_MAX_BYTES, local_session

EPOCHS = {20_000: 70, 500_000: 40}
"""By rows of an epoch, how many of them a session runs; the second half counts."""
SHORT = {20_000: 40}
OTHERS = {
    ("parallel collections", "G1"): {"JDK_JAVA_OPTIONS": "-XX:+UseG1GC"},
    ("Unix sockets to Python", "TCP"): {
        "PYSPARK_SUBMIT_ARGS": "--conf spark.python.unix.domain.socket.enabled=false pyspark-shell"
    },
}


def run(scale: str) -> Iterator[Result]:
    repeats = {"short": 1, "normal": 3, "full": 6}[scale]
    for rows, epochs in (SHORT if scale == "short" else EPOCHS).items():
        ours: list[float] = []
        others: dict[tuple[str, str], list[float]] = {what: [] for what in OTHERS}
        for _ in range(repeats):  # each in a JVM of its own, in turn, so that drift of the machine hits all
            ours.append(alone(_epoch, rows, epochs, {}))
            for what, environment in OTHERS.items():
                others[what].append(alone(_epoch, rows, epochs, environment))
        for (mine, other), theirs in others.items():
            ratios = Samples([a / b for a, b in zip(ours, theirs, strict=True)])
            yield Result(
                f"an epoch of {rows:,} rows, {KEYS:,} keys", mine, statistics.median(ours), "s p50", other,
                statistics.median(theirs), ratios.median, "< 1", ratios.median < 1, ratios.spread, repeats,
            )  # fmt: skip


def _epoch(rows: int, epochs: int, environment: Mapping[str, str]) -> float:
    with mock.patch.dict(os.environ, environment), tempfile.TemporaryDirectory(dir=".") as directory:
        log, settings = Path(directory) / "spark.log", {DRIVER_MAX_BYTES: "0"}
        spark = local_session(CORES, "nosync-bench", log=log, settings=settings)
        one = start(spark, Path(directory) / "store")
        seconds = [one.advance(batch(spark, i * rows, rows, KEYS)) for i in range(epochs)]
        one.store.close()
        spark.stop()
    return statistics.median(seconds[len(seconds) // 2 :])
