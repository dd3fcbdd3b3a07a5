"""Rows that expire: state is bounded, and what was made of a row that is forgotten stays.

The oracles keep every row that ever came as an object of its own, so that it is told from equal ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.binder import bind
from nosync.flow.meanings import Meanings
from nosync.job.meanings import EXPIRIES, TAKEN_BACK, recorded_meanings
from nosync.lsm.errors import FlowError
from nosync.testing import FlowTester
from tests.helpers.depth import examples
from tests.helpers.oracles import state_of
from tests.helpers.runner import StoreRunner, parse_ddl
from tests.property.test_stateful_operators import pairs, rows_of, running

KEYS = st.sampled_from(["a", "b", "c", None])
ROWS = st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=4)
EPOCHS = st.lists(st.tuples(st.integers(1, 3), ROWS, ROWS), min_size=1, max_size=8)
SEED = st.integers(0, 2**32)


def last_value_of(name: str) -> Any:
    def last_value(changes: pa.Table, state: pa.Table) -> pa.Table:
        """The largest value of the epoch replaces the key's; 0 deletes the key."""
        found = {row["k"]: row[name] for row in state.to_pylist()}
        for row in sorted(changes.to_pylist(), key=lambda r: r[name]):
            found[row["k"]] = row[name]
        kept = {k: value for k, value in found.items() if value}
        return pa.table({"k": pa.array(list(kept), pa.string()), name: pa.array(list(kept.values()), pa.int64())})

    return last_value


@dataclasses.dataclass(eq=False)
class Row:
    """One row of a side, told from all others by identity."""

    k: Any
    value: int
    changed: int
    is_there: bool = True
    """Not, once it expired."""


class Side:
    """A state of the newest value of each key, of which those expire that did not change for `ttl` epochs."""

    def __init__(self, ttl: int | None, grows: bool) -> None:
        self.ttl, self.grows = ttl, grows
        self.rows: list[Row] = []

    def advance(self, t: int, given: list[tuple[Any, int]]) -> tuple[list[Row], list[Row]]:
        """Returns the rows that are taken back, and those that are new."""
        if self.grows:
            new = [Row(k, value, t) for k, value in given]
            self.rows += new
            return [], new
        gone, new = [], []
        values = {k: max(v for other, v in given if other == k) for k, _ in given}
        for row in self.rows:
            if row.k in values:
                if row.value == values[row.k]:
                    row.changed, values[row.k] = t, -1
                else:
                    gone.append(row)
            elif self.ttl is not None and row.changed <= t - self.ttl:
                row.is_there = False
        new = [Row(k, value, t) for k, value in values.items() if value > 0]
        self.rows = [row for row in self.rows if row.is_there and row not in gone] + new
        return gone, new


Result = tuple[Row | None, Row | None]


def join_slowly(
    results: list[Result], left: Side, right: Side, changes: tuple[tuple[list[Row], list[Row]], ...], how: str
) -> list[Result]:
    (gone_left, new_left), (gone_right, new_right) = changes
    kept = [(a, b) for a, b in results if a not in gone_left and b not in gone_right]
    for a, b in itertools.product(left.rows, right.rows):
        if a.k == b.k and a.k is not None and (a in new_left or b in new_right):
            kept.append((a, b))
    of_left, of_right = [a for a, b in kept if b is not None], [b for a, b in kept if a is not None]
    kept = [(a, b) for a, b in kept if not (b is None and a in of_left) and not (a is None and b in of_right)]
    if how in ("left", "full"):
        lone = [a for a, _ in kept]
        kept += [(a, None) for a in left.rows if a not in lone]
    if how in ("right", "full"):
        lone_right = [b for _, b in kept]
        kept += [(None, b) for b in right.rows if b not in lone_right]
    return kept


A_MATCH_EXPIRES = [(2, [("a", 1)], [("a", 2)]), (2, [], [("b", 1)]), (1, [("a", 1)], []), (1, [("a", 2)], [])]


@given(
    EPOCHS, SEED, st.sampled_from(["inner", "left", "right", "full"]), st.integers(1, 3), st.none() | st.integers(1, 3)
)
@example(A_MATCH_EXPIRES, 0, "left", 1, 2)
@settings(max_examples=examples(50))
def test_what_was_joined_with_a_row_that_expires_stays(
    epochs: list[Any], seed: int, how: str, ttl: int, right_ttl: int | None
) -> None:
    """The right side expires as well, or only grows. What the data takes back is taken back, also when a partner of it
    was forgotten.
    """
    flow = nosync.Dataflow("f")
    first = flow.source("l", "k string, x bigint").update(
        "left", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=ttl
    )
    second = flow.source("r", "k string, y bigint")
    if right_ttl is not None:
        second = second.update("right", key=["k"], state="y bigint", fn=last_value_of("y"), ttl=right_ttl)
    joined = first.join("joined", second, on=["k"], how=how)
    joined.aggregate("counted", key=["k"], n=nosync.count(), total=nosync.sum("y"))
    left, right = Side(ttl, grows=False), Side(right_ttl, grows=right_ttl is None)
    results: list[Result] = []
    with running(flow, seed) as runner:
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": pairs(ls, ("k", "x")), "r": pairs(rs, ("k", "y"))})
            changes = left.advance(t, ls), right.advance(t, rs)
            assert rows_of(runner.read("left", t)) == Counter((row.k, row.value) for row in left.rows)
            results = join_slowly(results, left, right, changes, how)
            expected = Counter((a.k if a else b.k if b else None, a and a.value, b and b.value) for a, b in results)
            assert rows_of(runner.read("joined", t).select(["k", "x", "y"])) == expected
            ys: dict[Any, list[Any]] = {}
            for (k, _, y), n in expected.items():
                ys.setdefault((k,), []).extend([y] * n)
            sums = {
                k: (len(of), sum(known) if (known := [y for y in of if y is not None]) else None)
                for k, of in ys.items()
            }
            assert state_of(runner.read("counted", t), ["k"]) == sums


@given(EPOCHS, SEED, st.integers(1, 3), st.sampled_from(["forget", "retract"]))
@settings(max_examples=examples(40))
def test_aggregates_keep_what_expired_unless_it_is_to_be_taken_back(
    epochs: list[Any], seed: int, ttl: int, expiry: str
) -> None:
    """Through stateless stages and a union, and for an update of an update, and a dedupe."""
    flow = nosync.Dataflow("f")
    state = flow.source("l", "k string, x bigint").update(
        "state", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=ttl, expiry=expiry
    )
    passed = state.map("mapped", lambda rows: rows).filter(
        "some", lambda rows: pa.array([True] * rows.num_rows, pa.bool_())
    )
    both = passed.union("both", flow.source("r", "k string, x bigint"))
    both.aggregate("counted", key=["x"], n=nosync.count())
    passed.dedupe("values", key=["x"])
    side, more = Side(ttl, grows=False), Counter[Any]()
    kept: list[Row] = []
    with running(flow, seed) as runner:
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": pairs(ls, ("k", "x")), "r": pairs(rs, ("k", "x"))})
            gone, new = side.advance(t, ls)
            kept = [row for row in kept if row not in gone and (row.is_there or expiry == "forget")] + new
            more.update(x for _, x in rs)
            expected = Counter(row.value for row in kept) + more
            assert state_of(runner.read("counted", t), ["x"]) == {(x,): (n,) for x, n in expected.items()}
            assert set(runner.read("values", t).column("x").to_pylist()) == {row.value for row in kept}


def test_of_equal_rows_the_oldest_is_forgotten() -> None:
    """Without their ids both left rows are equal. The one that lives on is not the one that was joined first."""

    def last(name: str) -> Any:
        return lambda changes, state: pa.table({column: changes[column] for column in ("id", "k", name)})

    flow = nosync.Dataflow("f")
    left = flow.source("l", "id bigint, k string, x bigint").update(
        "ul", key=["id"], state="k string, x bigint", fn=last("x"), ttl=2
    )
    right = flow.source("r", "id bigint, k string, y bigint").update(
        "ur", key=["id"], state="k string, y bigint", fn=last("y"), ttl=1
    )
    left.select("sl", "k", "x").join("joined", right.select("sr", "k", "y"), on=["k"], how="left")
    with FlowTester(flow, shards=1) as tester:
        tester.advance({"l": [(1, "p", 1)], "r": [(1, "p", 7)]})
        tester.advance({"l": [(2, "p", 1)]})  # the row of r expires, and this one has no match
        tester.advance({})  # the first one expires
        tester.advance({"l": [(2, "p", 1)], "r": [(2, "p", 8)]})
        found = sorted((row["k"], row["x"], row["y"]) for row in tester.read("joined").to_pylist())
    assert found == [("p", 1, 7), ("p", 1, 8)]


def test_semi_and_anti_joins_and_loops_refuse_rows_that_are_forgotten() -> None:
    for how in ("left_semi", "left_anti"):
        flow = nosync.Dataflow("f")
        state = flow.source("l", "k string, x bigint").update(
            "state", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=2
        )
        flow.source("r", "k string, y bigint").join("joined", state, on=["k"], how=how)
        with pytest.raises(FlowError, match=f"stage joined: a {how} join cannot know .* state has forgotten"):
            bind(flow, parse_ddl)
    flow = nosync.Dataflow("f")
    state = flow.source("l", "k string, x bigint").update(
        "state", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=2
    )
    state.iterate("all", lambda rows: rows.map("next", lambda rows: rows))
    with pytest.raises(FlowError, match="stage all: state forgets rows .* a loop takes back"):
        bind(flow, parse_ddl)


def test_expiry_is_refused_where_nothing_expires_and_where_it_is_misspelled() -> None:
    source = nosync.Dataflow("f").source("l", "k string, at timestamp")
    with pytest.raises(FlowError, match=r"stage w: expiry= says what .* give ttl= or keep="):
        source.window("w", time="at", size="1 hour", watermark="1 hour", expiry="retract", n=nosync.count())
    with pytest.raises(FlowError, match=r"stage u: expiry='keep', expected 'forget' .* or 'retract'"):
        source.update("u", key=["k"], state="n bigint", fn=last_value_of("n"), ttl=1, expiry="keep")


def test_a_store_that_says_nothing_of_expiry_takes_results_back_as_it_did() -> None:
    def flow_of(**options: Any) -> nosync.Dataflow:
        flow = nosync.Dataflow("f")
        source = flow.source("l", "k string, at timestamp")
        source.window(
            "w", key=["k"], time="at", size="1 hour", watermark="1 hour", keep="1 day", n=nosync.count(), **options
        )
        source.update("u", key=["k"], state="n bigint", fn=last_value_of("n"), version="1", ttl=3, **options)
        return flow

    new, old = bind(flow_of(), parse_ddl), bind(flow_of(), parse_ddl, meanings=Meanings(taken_back={"w", "u"}))
    said = bind(flow_of(expiry="retract"), parse_ddl)
    assert [(name, stage.expires) for name, stage in new.stages.items() if stage.keyed] == [("w", True), ("u", True)]
    for name, stage in old.stages.items():
        assert stage.fingerprint == said.stages[name].fingerprint
        assert not stage.expires
        assert (stage.fingerprint == new.stages[name].fingerprint) == (name not in ("w", "u"))


def test_what_merges_left_of_a_trace_with_expiries_is_merged_again(tmp_path: Path) -> None:
    """The tombstones went, and the column that said which of them were expiries stayed: no merge took the layer any more."""
    flow = nosync.Dataflow("f")
    flow.source("l", "k string, x bigint").update("state", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=3)
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retain=0)
    with nosync.open(tmp_path / "s", settings=settings) as store:
        runner = StoreRunner(flow, store, seed=1, shards=1)
        expected: dict[str, tuple[int, int]] = {}
        for t, keys in enumerate(["a", "b", "c", "", "z", "z", "z", "y", "", "", "", "z"]):
            runner.advance(t, pairs([(k, t + 1) for k in keys], ("k", "x")))
            expected = {k: at for k, at in expected.items() if t - at[1] < 3} | dict.fromkeys(keys, (t + 1, t))
            store.compact()
            assert {r["k"]: r["x"] for r in store.read("state").to_pylist()} == {k: x for k, (x, _) in expected.items()}
            assert len([id for id in store.directory.layer_ids() if id.trace.stage == "state"]) == 1


def test_what_a_stage_gets_in_an_upgrade_means_what_it_does_from_the_start(tmp_path: Path) -> None:
    """Only what had a time to live in an earlier version, which took results back, goes on with that."""

    def flow(ttl: dict[str, Any], keep: dict[str, Any]) -> nosync.Dataflow:
        made = nosync.Dataflow("f")
        rows = made.source("l", "k string, at timestamp, x bigint")
        rows.update("u", key=["k"], state="x bigint", fn=last_value_of("x"), **ttl)
        rows.window("w", key=["k"], time="at", size="1 hour", watermark="1 hour", n=nosync.count(), **keep)
        return made

    bounded = flow({"ttl": 2}, {"keep": "1 hour"})
    settings = nosync.StoreSettings(background=False)
    none = pa.table(
        {"k": pa.array([], pa.string()), "at": pa.array([], pa.timestamp("us", "UTC")), "x": pa.array([], pa.int64())}
    )
    for declared, taken_back in (
        (flow({}, {}), set()),
        (bounded, set()),
        (flow({"ttl": 2, "expiry": "retract"}, {"keep": "1 hour"}), {"u"}),
        (flow({}, {"keep": "1 hour", "expiry": "retract"}), {"w"}),
    ):
        with nosync.open(tmp_path / str(len([*tmp_path.iterdir()])), settings=settings) as store:
            StoreRunner(declared, store, seed=1).advance(0, none)
            manifest = store.node.timelines.manifest(0, "main")
            assert manifest is not None
            found = recorded_meanings(manifest)
            assert found.taken_back == taken_back
            now = bind(bounded, parse_ddl, meanings=found)
            assert {name for name in "uw" if not now.stages[name].expires} == taken_back
            meta = {key: value for key, value in manifest.meta.items() if key != TAKEN_BACK}
            of_before = recorded_meanings(dataclasses.replace(manifest, meta=meta)).taken_back
            assert {"u", "w"}.difference(of_before) == set(meta.get(EXPIRIES, {}))


def test_the_change_feed_tells_expiries_from_deletions_before_and_after_merges(tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("l", "k string, x bigint").update("state", key=["k"], state="x bigint", fn=last_value_of("x"), ttl=2)
    given = [[("a", 1), ("b", 1)], [("b", 2)], [("b", 0), ("c", 3)], [], [("a", 2)], []]
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False), retain=1000) as store:
        runner = StoreRunner(flow, store, seed=1)
        for t, rows in enumerate(given):
            runner.advance(t, pairs(rows, ("k", "x")))

        def feed(**options: Any) -> list[tuple[Any, ...]]:
            rows = store.changes("state", -1, len(given) - 1, **options).select(["_epoch", "_change_type", "k", "x"])
            return sorted((tuple(row.values()) for row in rows.to_pylist()), key=repr)

        expected = [
            (0, "insert", "a", 1), (0, "insert", "b", 1), (1, "update_postimage", "b", 2),
            (1, "update_preimage", "b", 1), (2, "delete", "b", 2), (2, "expire", "a", 1), (2, "insert", "c", 3),
            (4, "expire", "c", 3), (4, "insert", "a", 2),
        ]  # fmt: skip
        assert feed(include_expired=True) == expected
        assert feed() == [row for row in expected if row[1] != "expire"]
        merged = store.compact()
        assert merged
        assert feed(include_expired=True) == expected
