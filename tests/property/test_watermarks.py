"""Windows over several inputs against slow Python: each input has a watermark, and the slowest that is not idle counts.
No Spark.

Rows come in random order to a random number of shards, which may change at any epoch.
"""

from __future__ import annotations

import datetime
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.binder import bind
from nosync.flow.dataflow import Dataflow
from nosync.flow.meanings import Meanings
from nosync.flow.stage import Stage
from nosync.lsm.model.layer import Shard, TraceId
from nosync.lsm.model.timestamp import Time, last_of, pack
from nosync.replication.client.location import StoreLocation, open_directory
from tests.helpers.depth import examples
from tests.helpers.runner import Runner, parse_ddl

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
MINUTE = datetime.timedelta(minutes=1)
COLUMNS = "k string, at timestamp, x bigint"
SIZE, DELAY = 10, 3
INPUTS = ("a", "b", "c")
KEYS = st.sampled_from(["p", "q", "r"])
ROW = st.tuples(KEYS, st.none() | st.integers(0, 60), st.integers(0, 9))
ROWS = st.lists(ROW, max_size=4)
EPOCH = st.tuples(st.integers(1, 3), ROWS, ROWS, ROWS)
EPOCHS = st.lists(EPOCH, min_size=1, max_size=7)
SEED = st.integers(0, 2**32)
Row = tuple[str, int | None, int]


def table(rows: list[Row]) -> pa.Table:
    times = [None if minute is None else START + minute * MINUTE for _, minute, _ in rows]
    return pa.table(
        {
            "k": pa.array([k for k, _, _ in rows], pa.string()),
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "x": pa.array([x for _, _, x in rows], pa.int64()),
        }
    )


def minute_of(time: datetime.datetime | None) -> int | None:
    return None if time is None else int((time - START) / MINUTE)


def an_hour_later(rows: pa.Table) -> pa.Table:
    """Changes the time of the rows, so that no time from before it may count."""
    later = pc.add(rows["at"], pa.scalar(datetime.timedelta(hours=1)))
    return rows.set_column(rows.schema.get_field_index("at"), "at", later)


def without_nines(rows: pa.Table) -> pa.ChunkedArray:
    return pc.not_equal(rows["x"], 9)


def recorded_at(runner: Runner, t: int) -> list[dict[str, Any]]:
    """What each shard recorded of watermarks at an epoch."""
    fingerprint, directory = (
        runner.flow.stages["w__watermark"].fingerprint,
        open_directory(StoreLocation(str(runner.root), 128)),
    )
    traces = [TraceId("w__watermark", fingerprint, Shard(i, runner.shards)) for i in range(runner.shards)]
    rows = [directory.layer_at(trace, last_of(t)).changes(Time(pack(t) - 1), last_of(t)) for trace in traces]
    return [row for of_shard in rows for row in of_shard.to_pylist()]


@dataclass
class Oracle:
    """What a window of ten minutes has, slowly."""

    names: tuple[str, ...]
    idle_after: int | None
    watermark: int | None = None
    late_by: int | None = None
    inputs: dict[str, int | None] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    state: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    late: Counter[Row] = field(default_factory=Counter)

    def advance(self, given: list[tuple[str, Row]]) -> None:
        for _, (k, minute, x) in given:
            start = None if minute is None else minute // SIZE * SIZE
            if start is None or (self.late_by is not None and start + SIZE <= self.late_by):
                self.late[k, minute, x] += 1
            else:
                self.state.setdefault((k, start), []).append(x)
        for name in self.names:
            times = [minute for of, (_, minute, _) in given if of == name and minute is not None]
            before = self.inputs.get(name)
            known = [] if before is None else [before]
            self.inputs[name] = max([*known, *(minute - DELAY for minute in times)], default=None)
            self.silent[name] = 0 if times else self.silent.get(name, 0) + 1
        self.late_by = self.watermark
        awake = [self.inputs[n] for n in self.names if self.idle_after is None or self.silent[n] < self.idle_after]
        if awake and None not in awake:
            known = [] if self.watermark is None else [self.watermark]
            self.watermark = max([*known, min(awake)])


@contextmanager
def running(flow: Dataflow, seed: int) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory() as root:
        yield Runner(flow, Path(root) / "s", seed)


def declared(shape: str, **window: Any) -> Dataflow:
    flow = nosync.Dataflow("f")
    a, b, c = (flow.source(name, COLUMNS) for name in INPUTS)
    stage = SHAPES[shape](a, b, c)
    stage.window("w", key=["k"], time="at", size="10 minutes", watermark="3 minutes",
                 n=nosync.count(), total=nosync.sum("x"), **window)  # fmt: skip
    return flow


SHAPES: dict[str, Callable[[Stage, Stage, Stage], Stage]] = {
    "union": lambda a, b, c: a.union("u", b, c),
    "unions of unions": lambda a, b, c: c.union("v", a.union("u", b), a.filter("none", lambda r: pc.is_null(r["k"]))),
    "not recorded": lambda a, b, c: a.union("u", b, c, persist="none").map("m", lambda rows: rows, persist="none"),
    "filter": lambda a, b, c: a.union("u", b, c).filter("f", without_nines),
    "times made after": lambda a, b, c: a.union("u", b, c).map("m", an_hour_later),
    "maps before and after": lambda a, b, c: a.map("m", an_hour_later).union("u", b.map("n", an_hour_later), c),
    "dedupe": lambda a, b, c: a.union("u", b, c).dedupe("d").map("m", lambda rows: rows),
    "dedupe by key": lambda a, b, c: a.union("u", b, c).dedupe("d", key=["k", "x"]),
}


def rows_that_come(shape: str, given: dict[str, list[Row]], seen: set[Any]) -> list[tuple[str, Row]] | None:
    """What reaches the window; None where that is for more than an oracle of a few lines to say."""
    rows = [(name, row) for name in INPUTS for row in given[name]]
    if shape == "filter":
        return [(name, row) for name, row in rows if row[2] != 9]
    if shape in ("times made after", "maps before and after"):
        moved = INPUTS if shape == "times made after" else ("a", "b")
        return [
            (name, (k, minute + 60 if minute is not None and name in moved else minute, x))
            for name, (k, minute, x) in rows
        ]
    if shape.startswith("dedupe"):
        fresh: dict[Any, tuple[str, Row]] = {}
        for name, row in rows:
            key = row if shape == "dedupe" else (row[0], row[2])
            if key in seen:
                continue
            if key in fresh and fresh[key] != (name, row):
                return None
            fresh[key] = (name, row)
        seen.update(fresh)
        return list(fresh.values())
    return rows


@pytest.mark.few(3, "make properties")
@pytest.mark.parametrize("shape", SHAPES)
@given(epochs=EPOCHS, seed=SEED, idle_after=st.none() | st.integers(1, 3))
@example(  # b is hours behind, and comes in time all the same
    epochs=[(2, [("p", 60, 1)], [("q", 5, 1)], [("r", 50, 1)]), (1, [], [("q", 7, 2)], []), (3, [], [("q", 1, 3)], [])],
    seed=0,
    idle_after=None,
)
@example(  # b is not waited for after the first epoch, and then late
    epochs=[(1, [("p", 60, 1)], [], [("r", 50, 1)]), (2, [("p", 59, 2)], [("q", 5, 1)], [("r", 50, 1)])],
    seed=0,
    idle_after=1,
)
@settings(max_examples=examples(15))
def test_the_slowest_input_that_is_not_idle_says_what_is_late(
    shape: str, epochs: list[Any], seed: int, idle_after: int | None
) -> None:
    flow = declared(shape, **({} if idle_after is None else {"idle_after": idle_after}))
    names = ("c", "a", "b") if shape == "unions of unions" else INPUTS
    oracle, seen = Oracle(names, idle_after), set[Any]()
    with running(flow, seed) as runner:
        for t, (shards, *rows) in enumerate(epochs):
            given_rows = dict(zip(INPUTS, rows, strict=True))
            runner.shards = shards
            coming = rows_that_come(shape, given_rows, seen)
            if coming is None:
                return
            runner.advance(t, {name: table(of) for name, of in given_rows.items()})
            oracle.advance(coming)
            found = {
                (r["k"], minute_of(r["window_start"])): (r["n"], r["total"]) for r in runner.read("w", t).to_pylist()
            }
            assert found == {at: (len(xs), sum(xs)) for at, xs in oracle.state.items()}
            late = Counter((r["k"], minute_of(r["at"]), r["x"]) for r in runner.read("w__late", t).to_pylist())
            assert late == oracle.late
            recorded = recorded_at(runner, t)
            assert len(recorded) == shards
            assert {minute_of(row["watermark"]) for row in recorded} == {oracle.watermark}
            for row in recorded:
                assert {i["input"]: (minute_of(i["watermark"]), i["epochs_without_rows"]) for i in row["inputs"]} == {
                    name: (oracle.inputs[name], oracle.silent[name]) for name in names
                }


@given(epochs=EPOCHS, seed=SEED)
@settings(max_examples=examples(15))
def test_the_fastest_input_counts_where_that_is_asked_for(epochs: list[Any], seed: int) -> None:
    oracle = Oracle(("all",), None)
    with running(declared("union", policy="max"), seed) as runner:
        for t, (shards, *rows) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {name: table(of) for name, of in zip(INPUTS, rows, strict=True)})
            oracle.advance([("all", row) for of in rows for row in of])
            late = Counter((r["k"], minute_of(r["at"]), r["x"]) for r in runner.read("w__late", t).to_pylist())
            assert late == oracle.late


def test_what_several_windows_and_others_take_of_a_union_has_no_column_of_ours() -> None:
    """The column that says by which input a row came is kept from functions, readers and stages that do not ask."""
    flow = declared("union")
    (union,) = (stage for stage in flow.stages if stage.name == "u")
    given_columns: list[list[str]] = []

    def look(rows: pa.Table) -> pa.Table:
        given_columns.append(rows.column_names)
        return rows

    union.map("looked", look, version="1").aggregate("counted", key=["k"], n=nosync.count())
    union.window(
        "fastest", key=["k"], time="at", size="10 minutes", watermark="3 minutes", policy="max", n=nosync.count()
    )
    union.update("state", key=["k"], state="columns string", fn=columns_of, version="1")
    with running(flow, 0) as runner:
        runner.advance(0, {name: table([("p", i, i)]) for i, name in enumerate(INPUTS)})
        assert {tuple(names) for names in given_columns} == {("k", "at", "x")}
        assert runner.read("state", 0).column("columns").to_pylist() == ["k at x _change_type"]
        assert runner.read("u", 0).column_names == ["k", "at", "x"]
        assert runner.read("counted", 0).to_pylist() == [{"k": "p", "n": 3}]


def columns_of(changes: pa.Table, state: pa.Table) -> pa.Table:
    return changes.select(["k"]).slice(0, 1).append_column("columns", pa.array([" ".join(changes.column_names)]))


BEFORE = {
    "a": "7033c80f79afb784",
    "b": "7033c80f79afb784",
    "u": "3e8a15658aa22210",
    "w__watermark": "69602b793330361e",
    "w__late": "66bbff90c884d3c0",
    "w": "177f0c9193e60708",
    "one__watermark": "0b6f8bbad4fea9f2",
    "one__late": "50d9f4c35d8e77a2",
    "one": "04d133c572f32773",
}
"""As the version before inputs had watermarks of their own gave them."""


def with_two_windows(**window: Any) -> Dataflow:
    flow = nosync.Dataflow("f")
    a, b = (flow.source(name, "k string, at timestamp") for name in "ab")
    a.union("u", b).window("w", key=["k"], time="at", size="1 hour", watermark="10 minutes", n=nosync.count(), **window)
    a.window(
        "one",
        key=["k"],
        time="at",
        size="1 hour",
        watermark="10 minutes",
        keep="1 day",
        expiry="retract",
        n=nosync.count(),
    )
    return flow


def test_what_stores_have_of_before_keeps_its_fingerprints() -> None:
    """Those of a window over one source in any case, and all of them where the fastest input counts."""
    before = functools.partial(Meanings, strict=frozenset({"w", "one"}), unnamed=frozenset({"a", "b"}))
    explicit = bind(with_two_windows(policy="max"), parse_ddl, meanings=before()).stages
    recorded = bind(with_two_windows(), parse_ddl, meanings=before({"w": "max"})).stages
    new = bind(with_two_windows(), parse_ddl, meanings=before()).stages
    assert {name: explicit[name].fingerprint for name in BEFORE} == BEFORE
    assert {name: recorded[name].fingerprint for name in BEFORE} == BEFORE
    same = {name for name, fingerprint in BEFORE.items() if new[name].fingerprint == fingerprint}
    assert same == {"a", "b", "one", "one__late", "one__watermark"}
    lenient = bind(with_two_windows(policy="max"), parse_ddl, meanings=before(strict=())).stages
    assert {name for name, fingerprint in BEFORE.items() if lenient[name].fingerprint == fingerprint} == {"a", "b", "u"}
    idle = bind(with_two_windows(idle_after=2), parse_ddl, meanings=before({"w": "max"})).stages
    assert idle["w"].fingerprint not in (BEFORE["w"], new["w"].fingerprint), "what is asked for is not overruled"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"policy": "slowest"}, "stage w: policy='slowest', expected 'min'"),
        ({"idle_after": 0}, "stage w: idle_after=0, expected a number of epochs, 1 or more"),
        ({"idle_after": True}, "stage w: idle_after=True, expected a number of epochs, 1 or more"),
        ({"idle_after": 2, "policy": "max"}, "stage w: policy='max' waits for no input"),
        ({"idle_after": 2, "watermark": None}, "stage w: idle_after= says how inputs move the watermark"),
        ({"policy": "min", "watermark": None}, "stage w: policy= says how inputs move the watermark"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_declared(wrong: dict[str, Any], said: str) -> None:
    source = nosync.Dataflow("f").source("a", COLUMNS)
    given_settings = {"watermark": "1 minute", **wrong}
    with pytest.raises(nosync.FlowError) as error:
        source.window("w", time="at", size="1 hour", n=nosync.count(), **given_settings)
    assert str(error.value).startswith(said)


def test_more_inputs_than_can_be_told_apart_are_refused() -> None:
    flow = nosync.Dataflow("f")
    first, *others = (flow.source(f"s{i}", COLUMNS) for i in range(129))
    first.union("u", *others).window("w", time="at", size="1 hour", watermark="1 minute", n=nosync.count())
    with pytest.raises(
        nosync.FlowError, match="stage u: it gets rows by 129 inputs, and a window can have watermarks of 128"
    ):
        bind(flow, parse_ddl)
