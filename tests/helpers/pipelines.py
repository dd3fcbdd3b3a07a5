"""Random dataflows over rows of (k, g, v), for tests that must hold for any pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

import nosync

COLUMNS = "k bigint, g bigint, v bigint"
CHANGEABLE = ("scale", "move", "project", "keep", "running")
"""Operations whose function a branch may replace."""


@dataclass(frozen=True)
class Op:
    """One stage: what it does, a number that its function is made with, and which stages it takes."""

    kind: str
    number: int
    first: int
    second: int


def _with(rows: pa.Table, name: str, values: Any) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def function(kind: str, c: int) -> Any:
    """The function of a stage."""

    def scale(rows: pa.Table) -> pa.Table:
        return _with(rows, "v", pc.add(pc.multiply(rows["v"], c), 1))

    def move(rows: pa.Table) -> pa.Table:
        kept = rows.filter(pc.not_equal(rows["g"], c))
        return _with(kept, "k", pc.bit_wise_and(pc.add(kept["k"], c), 7))

    def project(rows: pa.Table) -> pa.Table:
        names = [n for n in rows.column_names if n in ("k", "g", "v", "_change_type")]
        return _with(rows, "g", pc.add(rows["g"], c)).select(names)

    def keep(rows: pa.Table) -> pa.ChunkedArray:
        return pc.not_equal(pc.bit_wise_and(rows["v"], 3), c)

    def running(changes: pa.Table, state: pa.Table) -> pa.Table:
        sign = pa.array([1] * len(changes), pa.int64())
        if "_change_type" in changes.column_names:
            gone = pc.is_in(changes["_change_type"], pa.array(["delete", "update_preimage"]))
            sign = pc.if_else(gone, -1, 1)
        weighed = changes.select(["k"]).append_column("v", pc.multiply(changes["v"], sign))
        weighed = weighed.append_column("g", sign)
        both = pa.concat_tables([weighed.select(["k", "g", "v"]), state.select(["k", "g", "v"])])
        summed = both.group_by("k").aggregate([("g", "sum"), ("v", "sum")]).rename_columns(["k", "g", "v"])
        summed = summed.filter(pc.not_equal(summed["g"], 0))  # as if the key had never been
        return summed if c else _with(summed, "g", pc.add(summed["g"], 0))

    return locals()[kind]


def build(ops: list[Op], *, pinned: bool = False) -> nosync.Dataflow:
    """The flow of the operations. `pinned`: functions count as version "1", so that changing them keeps fingerprints."""
    flow = nosync.Dataflow("random")
    stages = [flow.source("rows", COLUMNS)]
    version = {"version": "1"} if pinned else {}
    for i, op in enumerate(ops):
        name, start = f"s{i}", stages[op.first % len(stages)]
        if op.kind in ("scale", "move", "project"):
            stage = start.map(name, function(op.kind, op.number), **version)
        elif op.kind == "keep":
            stage = start.filter(name, function("keep", op.number), **version)
        elif op.kind == "running":
            stage = start.update(
                name, key=["k"], state="g bigint, v bigint", fn=function("running", op.number), **version
            )
        elif op.kind == "sums":
            stage = start.aggregate(name, key=["k"], g=nosync.max("g"), v=nosync.sum("v"))
        elif op.kind == "counts":
            stage = start.aggregate(name, key=["k"], g=nosync.count_distinct("g"), v=nosync.count())
        elif op.kind == "windows":
            timed = start.map(f"{name}t", _timed)
            window = timed.window(
                f"{name}w", key=["k"], time="at", size="4 minutes", slide="2 minutes", g=nosync.max("g"),
                v=nosync.sum("v"),
            )  # fmt: skip
            stage = window.map(name, _without_bounds)
        elif op.kind == "dedupe":
            stage = start.dedupe(name, key=["k", "g"])
        elif op.kind == "union":
            stage = start.union(name, stages[op.second % len(stages)])
        else:
            assert op.kind == "join"
            other = stages[op.second % len(stages)].map(f"{name}r", _renamed)
            joined = start.join(f"{name}j", other, on=["k"])
            stage = joined.map(name, _joined)
        stages.append(stage)
    return flow


def _renamed(rows: pa.Table) -> pa.Table:
    return rows.rename_columns([{"g": "g2", "v": "v2"}.get(n, n) for n in rows.column_names])


def _timed(rows: pa.Table) -> pa.Table:
    minutes = pc.multiply(pc.cast(rows["g"], pa.int64()), 60_000_000)
    return rows.append_column("at", minutes.cast(pa.timestamp("us", "UTC")))


def _without_bounds(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["window_start", "window_end"])


def _joined(rows: pa.Table) -> pa.Table:
    return _with(rows, "v", pc.add(rows["v"], rows["v2"])).drop_columns(["g2", "v2"])


def change(ops: list[Op], at: int, number: int) -> list[Op]:
    """The same operations, with another number in one of them."""
    return [replace(op, number=number) if i == at else op for i, op in enumerate(ops)]


kinds = st.sampled_from(
    ["scale", "move", "project", "keep", "running", "sums", "counts", "dedupe", "union", "join", "windows"]
)
operations = st.builds(Op, kinds, st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))
pipelines = st.lists(operations, min_size=1, max_size=5)


@st.composite
def after_rows_that_change(draw: st.DrawFn) -> tuple[list[Op], int]:
    """A pipeline, and which of its operations has a function of its input's rows alone, after an aggregate."""
    before = draw(st.lists(operations, max_size=2))
    grouped = draw(st.builds(Op, st.sampled_from(["sums", "counts"]), st.just(0), st.integers(0, 6), st.just(0)))
    kinds_after = st.sampled_from(
        ["scale", "move", "project", "keep", "sums", "counts", "dedupe", "union", "join", "running", "windows"]
    )
    at = len(before) + 1
    changed = draw(
        st.builds(
            Op,
            kinds_after.filter(lambda kind: kind in CHANGEABLE and kind != "running"),
            st.integers(0, 3),
            st.just(at),
            st.just(0),
        )
    )
    later = draw(
        st.lists(st.builds(Op, kinds_after, st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), max_size=4)
    )
    return [*before, grouped, changed, *later], at


added = st.lists(
    st.builds(
        Op,
        st.sampled_from(["sums", "counts", "dedupe", "keep", "scale", "running", "windows"]),
        st.just(1),
        st.integers(1, 9),
        st.just(0),
    ),
    max_size=2,
)
"""Operations that a branch adds at the end."""
row = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(-4, 9))
epochs = st.lists(st.lists(row, max_size=8), min_size=2, max_size=5)


def table(rows: list[tuple[int, int, int]]) -> pa.Table:
    """Rows of the source."""
    schema = pa.schema([(name, pa.int64()) for name in "kgv"])
    return pa.Table.from_pylist([dict(zip("kgv", r, strict=True)) for r in rows], schema=schema)
