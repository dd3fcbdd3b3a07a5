"""Loops against slow Python: reachability in graphs whose edges and roots come and go. No Spark."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.stage import Stage
from nosync.lsm.model.timestamp import round_of
from nosync.lsm.node.node import Node
from nosync.operators.loops import Phase, next_phase, rounds_done
from nosync.testing import FaultyEnv
from tests.helpers.depth import examples
from tests.helpers.graphs import hop, last_word, only, reach_slowly
from tests.helpers.runner import Runner, StoreRunner

NODE = st.integers(0, 5)
CHANGE = st.tuples(NODE, NODE, st.booleans())
EPOCH = st.tuples(st.integers(1, 3), st.lists(CHANGE, max_size=8), st.lists(st.tuples(NODE, st.booleans()), max_size=2))
EPOCHS = st.lists(EPOCH, min_size=1, max_size=6)


def reachability() -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    edge_log = flow.source("edge_log", "node bigint, dst bigint, there bigint, i bigint")
    root_log = flow.source("root_log", "node bigint, there bigint, i bigint")
    edges = edge_log.update("edge_state", key=["node", "dst"], state="one bigint", fn=last_word)
    edges = edges.map("edges", only("node", "dst"))
    roots = root_log.update("root_state", key=["node"], state="one bigint", fn=last_word).map("roots", only("node"))

    def body(reached: Stage) -> Stage:
        return reached.join("hops", edges, on=["node"]).map("next", hop)

    roots.iterate("reached", body).aggregate("how_many", key=["node"], n=nosync.count())
    return flow


def log(changes: list[tuple[Any, ...]], names: list[str]) -> pa.Table:
    columns = [pa.array([int(c[i]) for c in changes], pa.int64()) for i in range(len(names))]
    return pa.Table.from_arrays([*columns, pa.array(range(len(changes)), pa.int64())], names=[*names, "i"])


CYCLE = [(1, [(0, 1, True), (1, 2, True), (2, 1, True)], [(0, True)]), (2, [(0, 1, False)], [])]


@given(EPOCHS, st.integers(0, 2**32))
@example(CYCLE, 0)
@settings(max_examples=examples(25))
def test_reachability_with_edges_and_roots_that_come_and_go(epochs: list[Any], seed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(reachability(), Path(root) / "s", seed)
        edges: set[tuple[int, int]] = set()
        roots: set[int] = set()
        for t, (shards, edge_changes, root_changes) in enumerate(epochs):
            runner.shards = shards
            given_rows = {
                "edge_log": log(edge_changes, ["node", "dst", "there"]),
                "root_log": log(root_changes, ["node", "there"]),
            }
            runner.advance(t, given_rows)
            for a, b, there in edge_changes:
                (edges.add if there else edges.discard)((a, b))
            for node, there in root_changes:
                (roots.add if there else roots.discard)(node)
            expected = reach_slowly(roots, edges)
            found = runner.read("reached", t).to_pylist()
            assert sorted(row["node"] for row in found) == sorted(expected)
            # The loop's consumers get net changes only: each row once.
            assert {row["node"]: row["n"] for row in runner.read("how_many", t).to_pylist()} == dict.fromkeys(
                expected, 1
            )


@given(EPOCHS, st.integers(0, 2**32), st.lists(st.integers(0, 3), min_size=6, max_size=6))
@example([*CYCLE, *[(2, [(1, 3, True), (i, i + 1, True)], []) for i in range(4)]], 0, [1] * 6)
@settings(max_examples=examples(10))
def test_merging_before_rounds_are_dropped_changes_nothing(epochs: list[Any], seed: int, merges: list[int]) -> None:
    """An epoch is sealed when of its layers only those of rounds are durable yet; and the node is quick to merge."""
    settings_, env = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0), FaultyEnv()
    with tempfile.TemporaryDirectory() as root, nosync.open(Path(root) / "s", settings=settings_, env=env) as store:
        runner = StoreRunner(reachability(), store, seed)
        node = store.node
        assert isinstance(node, Node)
        edges: set[tuple[int, int]] = set()
        roots: set[int] = set()
        for t, (_, edge_changes, root_changes) in enumerate(epochs):
            given_rows = {
                "edge_log": log(edge_changes, ["node", "dst", "there"]),
                "root_log": log(root_changes, ["node", "there"]),
            }
            name = f"{t}-{t + 1}-0.layer"
            env.fail("sync_file", errno.EIO, times=10**6, matches=lambda path, name=name: path.name == name)  # type: ignore[misc]
            runner.advance(t, given_rows)
            with pytest.raises(nosync.StorageError):
                store.sync()
            for _ in range(merges[t]):
                node.merge_once()
            env.faults.clear()
            store.sync()
            node.collect_garbage()
            for a, b, there in edge_changes:
                (edges.add if there else edges.discard)((a, b))
            for node_, there in root_changes:
                (roots.add if there else roots.discard)(node_)
            found = sorted(row["node"] for row in store.read("reached", t).to_pylist())
            assert found == sorted(reach_slowly(roots, edges))
        merged = [id for id in store.directory.layer_ids() if not id.is_fresh]
        assert not [id for id in merged if round_of(id.description.lower) or round_of(id.description.upper)]


@given(st.lists(st.lists(st.tuples(NODE, NODE), max_size=6), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=examples(15))
def test_paths_that_only_grow(epochs: list[Any], seed: int) -> None:
    """Nothing is taken back, so no round is spent on it: transitive closure, the variable joined on either side."""
    flow = nosync.Dataflow("f")
    edges = flow.source("edges", "a bigint, b bigint")
    tails = edges.map("tails", lambda rows: rows.rename_columns(["b", "c"]))

    def body(paths: Stage) -> Stage:
        return paths.join("longer", tails, on=["b"]).map(
            "ends", lambda r: r.select(["a", "c"]).rename_columns(["a", "b"])
        )

    edges.iterate("paths", body)
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", seed)
        assert runner.flow.loops["paths"].growing
        seen: set[tuple[int, int]] = set()
        for t, rows in enumerate(epochs):
            columns = {name: pa.array([row[i] for row in rows], pa.int64()) for i, name in enumerate("ab")}
            runner.advance(t, pa.table(columns))
            seen |= set(rows)
            closure = {(a, b) for a in range(6) for b in reach_slowly({y for x, y in seen if x == a}, seen)}
            assert {(r["a"], r["b"]) for r in runner.read("paths", t).to_pylist()} == closure


def test_phases() -> None:
    assert rounds_done([], growing=True) is Phase.GROW
    assert rounds_done([0], growing=True) is Phase.GROW, "what enters beside the variable comes in round 1"
    assert rounds_done([3, 0], growing=True) is None
    assert rounds_done([0, 2, 1], growing=False) is Phase.RETRACT
    assert rounds_done([0, 2, 0], growing=False) is Phase.TURN
    assert rounds_done([0, 0, 0], growing=False) is None
    assert rounds_done([0, 2, 0, 5, 1], growing=False) is Phase.GROW
    assert next_phase(Phase.TURN, 9, 0) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda s: s.aggregate("x", key=["a"], n=nosync.count()), "a aggregate cannot be inside the loop l"),
        (lambda s: s.join("x", s.map("y", lambda t: t), on=["a"], how="left"), "a left join cannot be inside"),
        (lambda s: s.iterate("x", lambda v: v), "a loop inside the loop l"),
        (lambda s: s, "returned l, which it did not build"),
        (lambda s: None, "returned None, expected a stage"),
        (lambda s: s.map("x", lambda t: t.rename_columns(["z"])), "the loop's body returns .z int64., expected"),
    ],
)
def test_bodies_that_are_refused(body: Any, message: str, tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    with pytest.raises((nosync.FlowError, nosync.SchemaError), match=message):  # noqa: PT012 - either may refuse
        flow.source("s", "a bigint").iterate("l", body)
        Runner(flow, tmp_path / "s", 0)


def test_a_stage_outside_cannot_use_the_inside_of_a_loop() -> None:
    flow = nosync.Dataflow("f")
    inner = []
    loop = flow.source("s", "a bigint").iterate("l", lambda v: inner.append(v.map("m", lambda t: t)) or inner[0])
    with pytest.raises(nosync.FlowError, match="its input m is inside the loop l"):
        inner[0].map("n", lambda t: t)
    assert loop.map("fine", lambda t: t).loop is None
