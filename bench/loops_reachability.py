"""The cyclic query of CheckMate: which nodes can be reached from some sources while links and sources come and go.

Incrementally, epoch by epoch, beside the same loop that begins from nothing with all that is up. After each epoch the answer
must be that of a search in plain Python.

(Siachamis et al., CheckMate: evaluating checkpointing protocols for streaming dataflows, 2024.)
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import nosync
from bench.harness import Result, Samples
from bench.spark_epochs import CORES, SHARDS
from nosync import Stage
from nosync.spark.session import local_session

SOURCES, LINKS_PER_NODE, CHANGED_SHARE = 20, 2, 0.002
WARM = 1
SOURCE, LINK = "node bigint, up boolean", "node bigint, neighbour bigint, up boolean"

Links = set[tuple[int, int]]


def run(scale: str) -> Iterator[Result]:
    nodes, measured = {"short": (2_000, 1), "normal": (20_000, 3), "full": (200_000, 3)}[scale]
    spark = local_session(CORES, "nosync-bench")
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary).absolute()
        epochs = list(_epochs(nodes, measured))
        seconds = _incrementally(spark, root / "epochs", epochs)
        mixed, growing = Samples(seconds[1 + WARM : -measured]), Samples(seconds[-measured:])
        links, sources = _up(epochs)
        again = [_from_nothing(spark, root / f"again-{i}", links, sources) for i in range(2)]
        theirs = Samples(again[1:])
    for what, mine, goal in (("come and go, and 2 sources", mixed, ""), ("come", growing, "< 1")):
        changes = len(epochs[-1][0])
        yield Result(
            f"reachability, {nodes:,} nodes, {len(links):,} links, of which {changes} {what}", "nosync",
            mine.median, "s", "the same loop from nothing", theirs.median, mine.median / theirs.median, goal,
            mine.median < theirs.median if goal else None, mine.spread, measured,
        )  # fmt: skip
    spark.stop()


def _epochs(nodes: int, measured: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yields for each epoch the links and sources that come up or go down; first all links and sources that there are."""
    random = np.random.default_rng(11)
    links: Links = set(map(tuple, random.integers(0, nodes, (nodes * LINKS_PER_NODE, 2)).tolist()))
    sources = set(random.choice(nodes, SOURCES, replace=False).tolist())
    yield _links(links, True), _sources(sources, True)
    n = int(len(links) * CHANGED_SHARE) // 2
    for _ in range(WARM + measured):
        ordered = sorted(links)
        gone = {ordered[i] for i in random.choice(len(ordered), n, replace=False)}
        come = set(map(tuple, random.integers(0, nodes, (n, 2)).tolist())) - links
        left, joined = sorted(sources)[int(random.integers(SOURCES))], int(random.integers(nodes))
        links = (links - gone) | come
        sources = (sources - {left}) | {joined}
        up_or_down = [_sources({left}, False)] if left != joined else []
        yield (
            pa.concat_tables([_links(gone, False), _links(come, True)]),
            pa.concat_tables([*up_or_down, _sources({joined}, True)]),
        )
    for _ in range(measured):
        come = set(map(tuple, random.integers(0, nodes, (2 * n, 2)).tolist())) - links
        links |= come
        yield _links(come, True), _sources(set(), True)


def _links(links: Links, up: bool) -> pa.Table:
    ordered = sorted(links)
    return pa.table(
        {"node": [a for a, _ in ordered], "neighbour": [b for _, b in ordered], "up": [up] * len(ordered)},
        pa.schema([("node", pa.int64()), ("neighbour", pa.int64()), ("up", pa.bool_())]),
    )


def _sources(sources: set[int], up: bool) -> pa.Table:
    ordered = sorted(sources)
    return pa.table({"node": pa.array(ordered, pa.int64()), "up": pa.array([up] * len(ordered), pa.bool_())})


def _up(epochs: list[tuple[pa.Table, pa.Table]]) -> tuple[Links, set[int]]:
    """Returns what is up after these epochs."""
    links: Links = set()
    sources: set[int] = set()
    for changed, roots in epochs:
        for row in changed.to_pylist():
            (links.add if row["up"] else links.discard)((row["node"], row["neighbour"]))
        for row in roots.to_pylist():
            (sources.add if row["up"] else sources.discard)(row["node"])
    return links, sources


def reachable(links: Links, sources: set[int]) -> set[int]:
    """Searches the graph, one node after the other."""
    neighbours = defaultdict(list)
    for a, b in links:
        neighbours[a].append(b)
    found, waiting = set(sources), list(sources)
    while waiting:
        for node in neighbours[waiting.pop()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


# --- nosync -----------------------------------------------------------------------------------------------------------


def _latest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Returns what is up after an epoch, in which each changes once; what is down is forgotten."""
    up = changes.filter(changes["up"])
    keys = [name for name in ("node", "neighbour") if name in up.column_names]
    return up.select(keys).append_column("one", pa.array([1] * up.num_rows, pa.int64()))


def _flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("reachability")
    sources = flow.source("sources", SOURCE).update("sources_up", key=["node"], state="one bigint", fn=_latest)
    links = flow.source("links", LINK).update("links_up", key=["node", "neighbour"], state="one bigint", fn=_latest)
    roots, edges = sources.select("roots", "node"), links.select("edges", "node", "neighbour")

    def follow(reached: Stage) -> Stage:
        return reached.join("hops", edges, on=["node"]).select("next", "neighbour AS node")

    roots.iterate("reached", follow)
    return flow


def _advance(spark: SparkSession, job: nosync.Job, t: int, links: pa.Table, sources: pa.Table) -> float:
    inputs = {"links": spark.createDataFrame(links), "sources": spark.createDataFrame(sources)}
    return job.advance(t, inputs).seconds


def _check(job: nosync.Job, links: Links, sources: set[int]) -> None:
    found = {row.node for row in job.read("reached").select("node").collect()}
    expected = reachable(links, sources)
    if found != expected:
        raise RuntimeError(f"reached {len(found)} nodes, expected {len(expected)}")


def _incrementally(spark: SparkSession, root: Path, epochs: list[tuple[pa.Table, pa.Table]]) -> list[float]:
    """Returns the seconds of each epoch."""
    with nosync.open(root) as store:
        job = nosync.Job(_flow(), store, spark=spark, shards=SHARDS)
        seconds = []
        for t, (links, sources) in enumerate(epochs):
            seconds.append(_advance(spark, job, t, links, sources))
            _check(job, *_up(epochs[: t + 1]))
    return seconds


def _from_nothing(spark: SparkSession, root: Path, links: Links, sources: set[int]) -> float:
    with nosync.open(root) as store:
        job = nosync.Job(_flow(), store, spark=spark, shards=SHARDS)
        took = _advance(spark, job, 0, _links(links, True), _sources(sources, True))
        _check(job, links, sources)
        return took
