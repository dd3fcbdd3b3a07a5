"""Every example's flow has a unit test, as a user would write one: without Spark, in well under a second."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np

from examples import fraud, orders_join, reachability, regression, sessions, word_count
from nosync.testing import FlowTester

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_word_count() -> None:
    tester = FlowTester(word_count.word_count())
    for line in word_count.LINES:
        tester.advance({"lines": [(line,)]})
    counts = {row["word"]: row["n"] for row in tester.read("counts").to_pylist()}
    assert counts == Counter(" ".join(word_count.LINES).split())
    tester.assert_deterministic()


def test_sessions() -> None:
    tester = FlowTester(sessions.visits())
    for clicks in sessions.EPOCHS:
        tester.advance({"clicks": [(user, sessions.NOON + timedelta(minutes=at), page) for user, at, page in clicks]})
    visits = [(row["user"], row["clicks"], row["entered"], row["left"]) for row in tester.read("visits").to_pylist()]
    assert visits == [
        ("ada", 3, "home", "item"), ("ada", 1, "home", "home"), ("bob", 1, "home", "home"), ("bob", 2, "item", "home"),
    ]  # fmt: skip
    assert tester.read("visits__late").column("page").to_pylist() == ["help"]
    tester.assert_deterministic()


def test_fraud() -> None:
    tester = FlowTester(fraud.rules())
    seen = []
    for t, charges in enumerate(fraud.EPOCHS):
        tester.advance({"charges": charges})
        changed = tester.changes("suspicious", include_expired=True).to_pylist()
        seen += [(t, row["card"], row["_change_type"]) for row in changed]
    assert seen == [(1, "1111", "insert"), (3, "2222", "insert"), (4, "1111", "expire")]
    tester.assert_deterministic()


def test_orders_join() -> None:
    tester = FlowTester(orders_join.orders_by_city())
    found = []
    for orders, moves in orders_join.EPOCHS:
        tester.advance({"orders": orders, "moves": moves})
        found.append({row["city"]: row["total"] for row in tester.read("by_city").to_pylist()})
    assert found == [{"London": 10, None: 20}, {"London": 15, "Paris": 27}, {"Paris": 42}]
    tester.assert_deterministic()


def test_reachability() -> None:
    tester = FlowTester(reachability.reachability())
    found = []
    for t, links in enumerate(reachability.EPOCHS):
        tester.advance({"roots": [("a",)] if t == 0 else [], "links": links})
        found.append(tester.read("reached").column("node").to_pylist())
    assert found == [["a", "b", "c", "d"], ["a", "b", "c", "d", "x", "y"], ["a"]]
    tester.assert_deterministic()


def test_regression() -> None:
    tester = FlowTester(regression.model())
    for t in range(regression.EPOCHS):
        tester.advance({"samples": regression.samples(t)})
    models = {row["sensor"]: row["coefficients"] for row in tester.read("model").to_pylist()}
    assert np.allclose(models["north"], regression.TRUE["north"], atol=0.05)
    tester.assert_deterministic()


def test_every_example_with_a_flow_is_tested_here() -> None:
    with_flows = {path.stem for path in EXAMPLES.glob("*.py") if "nosync.Dataflow(" in path.read_text()}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert with_flows <= tested


def test_no_session_was_started() -> None:
    code = """
import pyspark
from tests.project import test_examples_without_spark as tests
tests.test_fraud()
assert pyspark.SparkContext._active_spark_context is None
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=EXAMPLES.parent
    )
    assert done.returncode == 0, done.stderr
