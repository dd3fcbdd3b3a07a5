"""Loops on Spark: reachability with deletions, a crash in the middle of a loop, and recovery of what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.flow.stage import Stage
from tests.conftest import OpenStore
from tests.helpers.graphs import hop, last_word, only, reach_slowly

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

EDGES, ROOTS = "node bigint, dst bigint, there bigint, i bigint", "node bigint"
CHANGES = [
    [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 1), (5, 6, 1)],  # a chain into a cycle, and an edge out of reach
    [(2, 5, 1), (3, 4, 1)],
    [(0, 1, 0)],  # the cycle 1 -> 2 -> 3 -> 1 must not hold itself up
]


def make_flow(traces: Path, fail_at: int | None = None) -> nosync.Dataflow:
    marks, failing_round = str(traces), fail_at

    def traced_hop(rows: pa.Table) -> pa.Table:
        """Leaves a file for each call with rows; fails once, at the given number of them."""
        import uuid
        from pathlib import Path

        if rows.num_rows:
            (Path(marks) / uuid.uuid4().hex).write_text("")
            calls = len(list(Path(marks).iterdir()))
            if failing_round is not None and calls == failing_round:
                raise ValueError("the power went")
        return hop(rows)

    flow = nosync.Dataflow("graph")
    edge_log, roots = flow.source("edge_log", EDGES), flow.source("roots", ROOTS)
    edges = edge_log.update("edge_state", key=["node", "dst"], state="one bigint", fn=last_word)
    edges = edges.map("edges", only("node", "dst"))

    def body(reached: Stage) -> Stage:
        hops = reached.join("hops", edges, on=["node"])
        return hops.where("finite", "dst >= 0").map("next", traced_hop, version="1")

    roots.iterate("reached", body).select("names", "node", "node % 2 AS odd").aggregate(
        "by_parity", key=["odd"], n=nosync.count(), most=nosync.max("node")
    )
    return flow


def inputs(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    edges = [(*edge, i) for i, edge in enumerate(CHANGES[t])]
    return {
        "edge_log": spark.createDataFrame(edges, EDGES),
        "roots": spark.createDataFrame([(0,)] if t == 0 else [], ROOTS),
    }


def expected(t: int) -> set[int]:
    edges: set[tuple[int, int]] = set()
    for a, b, there in (change for changes in CHANGES[: t + 1] for change in changes):
        (edges.add if there else edges.discard)((a, b))
    return reach_slowly({0}, edges)


def check(store: nosync.Store, t: int) -> None:
    want = expected(t)
    assert {row["node"] for row in store.read("reached", as_of=t).to_pylist() if row.get("__live", True)} == want
    parity = {row["odd"]: (row["n"], row["most"]) for row in store.read("by_parity", as_of=t).to_pylist()}
    groups = {odd: [node for node in want if node % 2 == odd] for odd in (0, 1)}
    assert parity == {odd: (len(nodes), max(nodes)) for odd, nodes in groups.items() if nodes}


def layers_of(store: nosync.Store) -> dict[Any, str]:
    return {(x.stage, x.shard, x.lower, x.upper): x.digest for x in store.layers()}


@pytest.mark.long
def test_a_loop_through_deletions_a_crash_and_losses(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    traces, disturbed = tmp_path / "calls", tmp_path / "calls-disturbed"
    traces.mkdir()
    disturbed.mkdir()
    store = open_store("calm")
    job = nosync.Job(make_flow(traces), store, spark=spark, shards=2)
    calls_of_first_epoch = 0
    for t in range(len(CHANGES)):
        job.advance(t, inputs(spark, t))
        check(store, t)
        calls_of_first_epoch = len(list(traces.iterdir())) if t == 0 else calls_of_first_epoch
    assert {row.node for row in job.read("reached", as_of=1).collect()} == expected(1)
    feed = {(row.node, row._change_type) for row in job.changes("reached", 1, 2).collect()}
    assert feed == {(node, "delete") for node in expected(1) - expected(2)}
    store.sync()
    store.node.collect_garbage()
    before = layers_of(store)
    assert not [at for at in before if "." in f"{at[2]}{at[3]}"], "rounds are gone once the epoch is sealed"

    # The same job, whose body fails in the middle of the first epoch's loop.
    other = open_store("disturbed")
    broken = nosync.Job(make_flow(disturbed, fail_at=3), other, spark=spark, shards=2)
    with pytest.raises(nosync.StageError, match="stage next shard .of2 timestamp 0: .*the power went"):
        broken.advance(0, inputs(spark, 0))
    rounds = {str(x.lower) for x in other.layers() if x.stage == "reached"}
    assert rounds >= {"0", "0.1"}
    broken.advance(0, inputs(spark, 0))
    other.sync()
    other.node.collect_garbage()
    assert layers_of(other) == {at: digest for at, digest in before.items() if at[2] == 0}
    assert len(list(disturbed.iterdir())) <= calls_of_first_epoch + 1, "only the round that failed ran again"

    victims = [x for i, x in enumerate(store.layers()) if x.stage not in ("edge_log", "roots") and i % 2]
    for layer in victims:
        Path(layer.path).unlink()
    report = job.recover()
    assert (report.lost, report.recomputed, report.unrecoverable) == (len(victims), len(victims), {})
    store.sync()
    store.node.collect_garbage()
    assert layers_of(store) == before
    for t in range(len(CHANGES)):
        check(store, t)


@pytest.mark.long
def test_a_layer_that_is_lost_while_its_rounds_are_still_there(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path
) -> None:
    """They go a grace period after their epoch, and say nothing of it as a whole. That may end while the rounds run again."""
    store = open_store("calm", settings=nosync.StoreSettings(background=False, grace_s=1000.0))
    job = nosync.Job(make_flow(tmp_path), store, spark=spark, shards=2)
    for t in range(len(CHANGES)):
        job.advance(t, inputs(spark, t))
    store.sync()
    there = layers_of(store)
    rounds = {at for at in there if "." in f"{at[2]}{at[3]}"}
    assert rounds
    for layer in store.layers():
        if layer.stage in ("reached", "parity") and str(layer.lower) == "1" and str(layer.upper) == "2":
            Path(layer.path).unlink()
    report = job.recover(progress=lambda *_: store.node.parts.garbage.collect(all=True))
    assert report.lost == report.recomputed > 0
    assert {at: digest for at, digest in layers_of(store).items() if at not in rounds} == {
        at: digest for at, digest in there.items() if at not in rounds
    }
    for t in range(len(CHANGES)):
        check(store, t)


def test_a_loop_that_does_not_end(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.source("roots", ROOTS).iterate("up", lambda v: v.select("more", "node + 1 AS node"), max_rounds=3)
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    with pytest.raises(nosync.FlowError, match="stage up timestamp 0: the loop did not come to an end in 3 rounds"):
        job.advance(0, {"roots": spark.createDataFrame([(0,)], ROOTS)})
