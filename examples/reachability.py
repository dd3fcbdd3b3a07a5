"""Which machines can be reached in a network whose links come and go. Run: python examples/reachability.py

A loop inside each epoch follows links until nothing new is found. Taking a link away takes away all that was reached only
through it, also where the rest of a ring would hold itself up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import nosync
from nosync import Stage

LINKS, ROOTS = "node string, neighbour string, up boolean", "node string"
# By epoch: links that come up or go down. b, c and d are a ring.
EPOCHS = [
    [("a", "b", True), ("b", "c", True), ("c", "d", True), ("d", "b", True), ("x", "y", True)],
    [("d", "x", True)],
    [("a", "b", False)],
]


def latest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Links that are up after an epoch (each changes once in it); those that are down are forgotten."""
    up = changes.filter(changes["up"])
    return up.select(["node", "neighbour"]).append_column("links", pa.array([1] * up.num_rows, pa.int64()))


def reachability() -> nosync.Dataflow:
    flow = nosync.Dataflow("network")
    roots = flow.source("roots", ROOTS)
    links = flow.source("links", LINKS).update("up", key=["node", "neighbour"], state="links bigint", fn=latest)
    edges = links.select("edges", "node", "neighbour")

    def follow(reached: Stage) -> Stage:
        return reached.join("hops", edges, on=["node"]).select("next", "neighbour AS node")

    roots.iterate("reached", follow)
    return flow


def run(spark: SparkSession, directory: Path) -> list[list[str]]:
    """The nodes that can be reached from a after each epoch."""
    found = []
    with nosync.open(directory / "store") as store:
        job = nosync.Job(reachability(), store, spark=spark, shards=2)
        for t, links in enumerate(EPOCHS):
            roots = spark.createDataFrame([("a",)] if t == 0 else [], ROOTS)
            job.advance(t, {"roots": roots, "links": spark.createDataFrame(links, LINKS)})
            found.append(sorted(row.node for row in job.read("reached").collect()))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        for epoch, nodes in enumerate(run(session, Path(temporary))):
            print(f"epoch {epoch}: " + " ".join(nodes))
