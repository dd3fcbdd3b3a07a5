"""Operators against slow Python: random inputs, random epoch cuts, rows that come and go. No Spark."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.aggregates import Aggregate
from nosync.dataflow import Dataflow
from nosync.lsm.hashing import hash64
from nosync.operators import HASH64_COLUMN
from nosync.plan import BoundFlow, bind
from nosync.segment import REPORT_COLUMN, TAG_COLUMN, SegmentTask, directory_of, emitted_schema
from tests.helpers import state_of

SHARDS = 2
VALUES = st.none() | st.integers(-3, 3)
ROW = st.tuples(st.sampled_from(["a", "b", "c", None]), VALUES)
EPOCHS = st.lists(st.lists(ROW, max_size=10), min_size=1, max_size=6)
TYPES = {"word string, x bigint": pa.schema([("word", pa.string()), ("x", pa.int64())])}

FUNCTIONS: dict[str, Aggregate] = {
    "rows": nosync.count(),
    "some": nosync.count("x"),
    "total": nosync.sum("x"),
    "mean": nosync.mean("x"),
    "least": nosync.min("x"),
    "most": nosync.max("x"),
    "kinds": nosync.count_distinct("x"),
}


def aggregate_slowly(values: list[int | None]) -> tuple[Any, ...]:
    """In the order of FUNCTIONS."""
    x = [v for v in values if v is not None]
    some = (sum(x), sum(x) / len(x), min(x), max(x)) if x else (None, None, None, None)
    return (len(values), len(x), *some, len(set(x)))


class Runner:
    """Runs a flow's segments shard by shard without Spark, shuffling rows as Spark may."""

    def __init__(self, flow: Dataflow, root: Path, seed: int) -> None:
        (root / "tmp").mkdir(parents=True)
        self.flow: BoundFlow = bind(flow, TYPES.__getitem__)
        self.root = root
        self.random = np.random.default_rng(seed)
        self.origins: dict[str, int] = {}

    def advance(self, t: int, rows: pa.Table) -> None:
        for stage, keyed in self.flow.exits():
            if not keyed:
                self._segment(t, stage.name, rows, emit=False)
        self.origins = {name: self.origins.get(name, t << 20) for name in self.flow.stages}

    def _segment(self, t: int, last: str, rows: pa.Table, *, emit: bool) -> list[pa.RecordBatch]:
        path = self.flow.path(last)
        head = path[0]
        if head.input is None:
            parts = self._by_shard(rows, rows.column_names)
        else:
            sent = pa.Table.from_batches(
                self._segment(t, head.input, rows, emit=True), schema=emitted_schema(self.flow.stages[head.input])
            )
            sent = sent.take(pa.array(self.random.permutation(sent.num_rows)))
            reports = sent.filter(sent[REPORT_COLUMN].is_valid())
            parts = self._by_shard(sent.filter(sent[REPORT_COLUMN].is_null()), head.key)
            reports = reports.append_column(HASH64_COLUMN, pa.nulls(reports.num_rows, pa.int64()))
            targets = reports[TAG_COLUMN].to_numpy()
            parts = [pa.concat_tables([part, reports.filter(pa.array(targets == i))]) for i, part in enumerate(parts)]
        task = SegmentTask(str(self.root), 128, t, SHARDS, path, emit, self.origins)
        return [batch for i, part in enumerate(parts) for batch in task.run_shard(i, iter(part.to_batches()))]

    def _by_shard(self, rows: pa.Table, key: Any) -> list[pa.Table]:
        hashes = hash64([rows.column(name).combine_chunks() for name in key])
        rows = rows.append_column(HASH64_COLUMN, pa.array(hashes.view(np.int64)))
        shards = ((hashes >> np.uint64(32)) * np.uint64(128) >> np.uint64(32)) * np.uint64(SHARDS) // np.uint64(128)
        rows = rows.take(pa.array(order := self.random.permutation(rows.num_rows)))
        return [rows.filter(pa.array(shards[order] == i)) for i in range(SHARDS)]

    def read(self, name: str, t: int) -> pa.Table:
        from nosync.lsm.layer import Shard, TraceId
        from nosync.lsm.timestamp import Time, end_of, last_of

        stage, directory = self.flow.stages[name], directory_of(str(self.root), 128)
        tables = []
        for i in range(SHARDS):
            id = TraceId(name, stage.fingerprint, Shard(i, SHARDS))
            trace = directory.trace(id, until=end_of(t), as_of=last_of(t), origin=Time(self.origins[name]))
            tables.append(pa.Table.from_batches(trace.scan(last_of(t)), schema=trace.schema).select(stage.output.names))
        return pa.concat_tables(tables)


def to_table(rows: list[tuple[Any, Any]]) -> pa.Table:
    return pa.table(
        {"word": pa.array([r[0] for r in rows], pa.string()), "x": pa.array([r[1] for r in rows], pa.int64())}
    )


@given(EPOCHS, st.integers(0, 2**32))
@settings(max_examples=60)
def test_aggregates_over_rows_that_only_come(epochs: list[list[tuple[Any, Any]]], seed: int) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "word string, x bigint").aggregate("all", key=["word"], **FUNCTIONS)
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", seed)
        seen: dict[Any, list[Any]] = {}
        for t, rows in enumerate(epochs):
            runner.advance(t, to_table(rows))
            for word, x in rows:
                seen.setdefault(word, []).append(x)
            assert state_of(runner.read("all", t), ["word"]) == {(w,): aggregate_slowly(v) for w, v in seen.items()}


def latest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """State per word: its last x of the epoch in order of value, so that it changes often; x = -3 deletes the word."""
    found = {row["word"]: row["x"] for row in state.to_pylist()}
    for row in sorted(changes.to_pylist(), key=lambda r: (r["x"] is None, r["x"] or 0)):
        found[row["word"]] = row["x"]
    kept = {word: x for word, x in found.items() if x != -3}
    return pa.table({"word": pa.array(list(kept), pa.string()), "x": pa.array(list(kept.values()), pa.int64())})


def latest_slowly(state: dict[Any, Any], rows: list[tuple[Any, Any]]) -> dict[Any, Any]:
    touched = {word for word, _ in rows}
    found = {word: x for word, x in state.items() if word not in touched}
    for word in touched:
        x = max((r[1] for r in rows if r[0] == word), key=lambda v: (v is None, v or 0))
        if x != -3:
            found[word] = x
    return found


def parity(rows: pa.Table) -> pa.Table:
    words = ["odd" if (x or 0) % 2 else "even" for x in rows["x"].to_pylist()]
    return rows.set_column(rows.schema.get_field_index("word"), "word", pa.array(words, pa.string()))


@given(EPOCHS, st.integers(0, 2**32))
@settings(max_examples=100)
def test_aggregates_over_rows_that_change_and_go(epochs: list[list[tuple[Any, Any]]], seed: int) -> None:
    """A stage whose rows are updated and deleted, remapped to another key, aggregated with every function."""
    flow = nosync.Dataflow("f")
    changing = flow.source("rows", "word string, x bigint").update(
        "latest", key=["word"], state=["word string", "x bigint"][1], fn=latest
    )
    changing.map("parity", parity).aggregate("all", key=["word"], **FUNCTIONS)
    TYPES["x bigint"] = pa.schema([("x", pa.int64())])
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", seed)
        state: dict[Any, Any] = {}
        for t, rows in enumerate(epochs):
            runner.advance(t, to_table(rows))
            state = latest_slowly(state, rows)
            assert state_of(runner.read("latest", t), ["word"]) == {(w,): (x,) for w, x in state.items()}
            groups: dict[str, list[Any]] = {}
            for x in state.values():
                groups.setdefault("odd" if (x or 0) % 2 else "even", []).append(x)
            assert state_of(runner.read("all", t), ["word"]) == {(g,): aggregate_slowly(v) for g, v in groups.items()}


@given(st.lists(ROW, max_size=30), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=40)
def test_how_rows_are_cut_into_epochs_does_not_matter(rows: list[tuple[Any, Any]], cuts: int, seed: int) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "word string, x bigint").aggregate("all", key=["word"], **FUNCTIONS)
    with tempfile.TemporaryDirectory() as root:
        states = []
        for n in (1, cuts):
            runner = Runner(flow, Path(root) / f"s{n}-{len(states)}", seed + n)
            for t in range(n):
                runner.advance(t, to_table(rows[t * len(rows) // n : (t + 1) * len(rows) // n]))
            states.append(state_of(runner.read("all", n - 1), ["word"]))
        assert states[0] == states[1]
        assert sum(state[0] for state in states[0].values()) == len(rows)


def test_a_stage_never_computes_from_a_part_of_its_input(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "word string, x bigint").aggregate("all", key=["word"], **FUNCTIONS)
    runner = Runner(flow, tmp_path / "s", 1)
    sent = runner._segment(0, "rows", to_table([("a", 1), ("b", 2)]), emit=True)
    task = SegmentTask(str(runner.root), 128, 0, SHARDS, runner.flow.path("all"), False)
    rows = pa.Table.from_batches(sent, schema=emitted_schema(runner.flow.stages["rows"]))
    marks = Counter(r for r in rows[REPORT_COLUMN].to_pylist() if r and r.startswith(b"all-from"))
    assert marks == {b"all-from:0": SHARDS, b"all-from:1": SHARDS}
    part = rows.filter(pa.array([r != b"all-from:1" for r in rows[REPORT_COLUMN].to_pylist()]))
    part = part.append_column(HASH64_COLUMN, pa.nulls(part.num_rows, pa.int64()))
    with pytest.raises(nosync.StageError, match=r"shards \[1\] of its input rows sent nothing"):
        list(task.run_shard(0, iter(part.to_batches())))
    assert not directory_of(str(runner.root), 128).traces("all")
