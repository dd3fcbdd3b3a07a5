"""Random pipelines: a branch against a run whose code changed at the fork, an explanation against a run of what it
names.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.flow.binder import bind
from nosync.flow.bound_stage import BoundStage
from nosync.job.branch_checks import stages_to_bootstrap
from nosync.job.explain import Explanation, explain
from tests.helpers import pipelines
from tests.helpers.depth import examples
from tests.helpers.oracles import weights
from tests.helpers.pipelines import CHANGEABLE, Op, build, change, table
from tests.helpers.runner import SHARDS, StoreRunner, parse_ddl


@contextmanager
def a_store(retain: int | None = None) -> Iterator[nosync.Store]:
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retain=retain)
    with tempfile.TemporaryDirectory() as directory, nosync.open(Path(directory) / "s", settings=settings) as store:
        yield store


def replayed(
    main: StoreRunner, name: str, fork: int, flow: nosync.Dataflow, at: int, epochs: int,
    shards_at: Callable[[int], int] = lambda t: SHARDS, of_views: Sequence[str] = (),
) -> StoreRunner:  # fmt: skip
    """A branch on which operation `at` has other code, with all epochs."""
    branch = main.make_branch(name, fork, flow, [f"s{at}"], of_views)
    for t in range(fork + 1, epochs):
        branch.shards = shards_at(t)
        branch.replay(t)
    return branch


def no_jvm(stage: BoundStage, rows: pa.Table, keep: Any) -> pa.Table:
    raise AssertionError("these pipelines have no expressions")


@settings(max_examples=examples(25))
@given(pipelines.pipelines, pipelines.epochs, st.integers(0, 9), st.integers(0, 3), st.integers(0, 9), st.booleans())
def test_a_replayed_branch_is_a_run_whose_code_changed_at_the_fork(
    ops: list[Op], rows: list[list[tuple[int, int, int]]], which: int, number: int, fork: int, compact: bool
) -> None:
    changeable = [i for i, op in enumerate(ops) if op.kind in CHANGEABLE]
    assume(changeable)
    at, fork = changeable[which % len(changeable)], fork % (len(rows) - 1)
    other = change(ops, at, number)
    with a_store() as store, a_store() as fresh:
        main = StoreRunner(build(ops), store, 1)
        assume(not began(main, at))  # the next test
        oracle = StoreRunner(build(ops, pinned=True), fresh, 2)
        for t, of_epoch in enumerate(rows):
            main.advance(t, table(of_epoch))
            if t == fork + 1:  # the same stages and layers, other functions from here on
                oracle = StoreRunner(build(other, pinned=True), fresh, 3)
            oracle.advance(t, table(of_epoch))
        if compact:
            store.sync()
            store.compact()
        branch = replayed(main, "b", fork, build(other), at, len(rows))
        for stage in branch.flow.recorded:
            for t in range(len(rows)):
                states = [store.read(stage.name, t, branch="b"), fresh.read(stage.name, t)]
                if not stage.keyed:  # of a log only the order of its epochs is promised, and that is its change feed
                    states = [s.sort_by([(name, "ascending") for name in s.column_names]) for s in states]
                assert states[0].equals(states[1]), (stage.name, t)
                ours = store.changes(stage.name, t - 1, t, branch="b")
                assert ours.equals(fresh.changes(stage.name, t - 1, t)), (stage.name, t)
        if number == ops[at].number:
            assert store.describe_branch("b").own_layers == 0, "the same code shares every layer"


def began(main: StoreRunner, at: int, of_views: Sequence[str] = ()) -> list[str]:
    """The stages that begin anew where operation `at` gets other code; where that is refused the example is passed
    over.
    """
    try:
        return stages_to_bootstrap(main.flow, main.flow.stages, [f"s{at}"], main.flow.stages, of_views)
    except nosync.FlowError:
        assume(False)  # tests/job/test_beginning_anew.py
        return []


def state_of(store: nosync.Store, runner: StoreRunner, name: str, t: int, branch: str = "main") -> Counter[str]:
    stage = runner.flow.stages[name]
    if stage.keyed or not stage.changing:
        return weights(store.read(name, t, branch=branch))
    return weights(store.changes(name, -1, t, branch=branch).drop_columns(["_epoch"]))


@settings(max_examples=examples(25))
@given(
    pipelines.after_rows_that_change(), pipelines.added, pipelines.epochs, st.integers(1, 3), st.integers(0, 9), st.booleans(),
    st.integers(0, 5), st.integers(0, 7),
)  # fmt: skip
@example(
    ([Op("sums", 0, 0, 0), Op("keep", 0, 1, 0), Op("counts", 0, 2, 0), Op("join", 0, 3, 0)], 1), [],
    [[(1, 2, 3), (2, 2, 4)], [(1, 0, 2), (3, 1, 7)], [(2, 1, 1), (1, 3, 3)]], 3, 0, False, 1, 1,
)  # fmt: skip
@example(
    ([Op("counts", 0, 0, 0), Op("move", 1, 1, 0), Op("union", 0, 2, 0), Op("dedupe", 0, 3, 0)], 1), [],
    [[(1, 2, 3), (2, 2, 4)], [(1, 0, 2), (3, 1, 7)], [(2, 1, 1), (1, 3, 3)]], 2, 1, True, 5, 2,
)  # fmt: skip
@example(  # a union that begins anew, explained
    ([Op("scale", 0, 0, 0), Op("sums", 0, 0, 0), Op("scale", 0, 2, 0), Op("scale", 0, 0, 0), Op("union", 0, 3, 0)], 2), [],
    [[(0, 1, 2), (1, 0, 1)], [(0, 2, 1), (2, 1, 1)], [(0, 0, 3)]], 1, 0, False, 0, 0,
)  # fmt: skip
@example(  # the new stage takes a log in whose shards the rows of its key are, as far as so many shards recorded them
    ([Op("sums", 0, 0, 0), Op("project", 0, 1, 0), Op("keep", 1, 1, 0)], 1), [Op("counts", 0, 3, 0)],
    [[(k, 2, k) for k in range(6)], [(1, 0, 2), (3, 1, 7)], [(2, 1, 1), (1, 3, 3)]], 1, 1, False, 1, 2,
)  # fmt: skip
def test_what_gets_other_code_after_rows_that_change_is_what_that_code_makes_of_all_that_is_there(
    pipeline: tuple[list[Op], int], added: list[Op], rows: list[list[tuple[int, int, int]]], more: int, fork: int, compact: bool,
    rescaled: int, k: int,
) -> None:  # fmt: skip
    """From the fork on, as if it had always been so; what leads there is one layer, which can be computed again."""
    (ops, at), fork = pipeline, fork % (len(rows) - 1)
    other = change(ops, at, (ops[at].number + more) % 4)
    for op in added:  # what takes rows that only come begins with none, and they are not these
        stages = bind(build([*other, op]), parse_ddl).stages
        first = stages[f"s{len(other)}t" if op.kind == "windows" else f"s{len(other)}"]
        other = [*other, op] if stages[first.inputs[0]].changing else other
    _check_what_begins_anew(ops, other, at, rows, fork, compact=compact, rescaled=rescaled, k=k)


# Which row of a key `dedupe` keeps depends on the epoch in which it came.
OPERATIONS = pipelines.operations.filter(lambda op: op.kind != "dedupe")
PIPELINES = st.lists(OPERATIONS, min_size=1, max_size=5).filter(lambda ops: ops[0].kind in CHANGEABLE[:4])


@settings(max_examples=examples(25))
@given(
    PIPELINES,
    pipelines.epochs,
    st.integers(1, 3),
    st.integers(0, 9),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 7),
)
@example([Op("keep", 0, 0, 0)], [[(1, 2, 3), (2, 2, 4)], [(1, 0, 2)], [(3, 1, 7)]], 1, 0, False, 0, 1)
@example(
    [Op("keep", 1, 0, 0), Op("project", 1, 1, 0), Op("sums", 0, 2, 0)],
    [[(1, 2, 1), (2, 2, 4)], [(1, 0, 2)], [(3, 1, 5)], [(1, 1, 1)]], 2, 1, True, 1, 1,
)  # fmt: skip
def test_a_view_that_only_filters_takes_back_what_its_query_before_gave(
    ops: list[Op], rows: list[list[tuple[int, int, int]]], more: int, fork: int, compact: bool, rescaled: int, k: int
) -> None:
    """The first stage is made of rows that only come, and is a view: it and what follows is what all rows give."""
    fork %= len(rows) - 1
    other = change(ops, 0, (ops[0].number + more) % 4)
    _check_what_begins_anew(ops, other, 0, rows, fork, compact=compact, rescaled=rescaled, k=k, of_views=["s0"])


@settings(max_examples=examples(25))
@given(
    PIPELINES,
    pipelines.epochs,
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.integers(0, 5),
)
@example(
    [Op("keep", 0, 0, 0), Op("project", 1, 1, 0), Op("sums", 0, 2, 0), Op("join", 0, 0, 3)],
    [[(1, 2, 1), (2, 2, 4)], [(1, 0, 2)], [(3, 1, 5)], [(1, 1, 1)], [(2, 0, 1)]], 2, 0, 1, False, 9,
)  # fmt: skip
def test_stages_that_were_dropped_come_back_with_what_all_rows_give(
    ops: list[Op], rows: list[list[tuple[int, int, int]]], left: int, fork: int, back: int, compact: bool, rescaled: int
) -> None:
    """On a branch the last stages are dropped. On one of that they come back, over the epochs that they missed."""
    assume(len(rows) >= 3 and left < len(ops))
    fork %= len(rows) - 2
    back = fork + 1 + back % (len(rows) - 2 - fork)
    with a_store() as store, a_store() as fresh:
        main, oracle = StoreRunner(build(ops), store, 1), StoreRunner(build(ops), fresh, 2)
        for t, of_epoch in enumerate(rows):
            main.shards = 3 if t < rescaled else 2
            main.advance(t, table(of_epoch))
            oracle.advance(t, table(of_epoch))
        without = main.make_branch("without", fork, build(ops[:left]))
        for t in range(fork + 1, back + 1):
            without.shards = 3 if t < rescaled else 2
            without.replay(t)
        if compact:
            store.sync()
            store.compact()
        again = without.make_branch("again", back, build(ops))
        dropped = {stage.name for stage in again.flow.recorded} - {stage.name for stage in without.flow.recorded}
        for t in range(back + 1, len(rows)):
            again.shards = 3 if t < rescaled else 2
            again.replay(t)
            for stage in again.flow.recorded:
                assert state_of(store, again, stage.name, t, "again") == state_of(fresh, oracle, stage.name, t), (
                    stage.name
                )
        for name in dropped:
            with pytest.raises(nosync.UnknownStageError):
                store.read(name, back, branch="again")
            stage = again.flow.stages[name]
            now, before = (state_of(store, again, name, t, "again") for t in (back + 1, fork))
            came = store.changes(name, fork, back + 1, branch="again").drop_columns(["_epoch"])
            for row, n in weights(came).items():
                before[row] += n
            assert Counter({row: n for row, n in before.items() if n}) == now, name


def _check_what_begins_anew(
    ops: list[Op], other: list[Op], at: int, rows: list[list[tuple[int, int, int]]], fork: int, *, compact: bool,
    rescaled: int, k: int, of_views: Sequence[str] = (),
) -> None:  # fmt: skip
    def shards_at(t: int) -> int:
        return 3 if t < rescaled else 2

    with a_store() as store, a_store() as fresh, a_store() as again:
        main, oracle = StoreRunner(build(ops), store, 1), StoreRunner(build(other), fresh, 2)
        assume(began(main, at, of_views))
        for t, of_epoch in enumerate(rows):
            main.shards = shards_at(t)
            main.advance(t, table(of_epoch))
            oracle.advance(t, table(of_epoch))
        if compact:
            store.sync()
            store.compact()
        branch = replayed(main, "b", fork, build(other), at, len(rows), shards_at, of_views)
        last = len(rows) - 1
        if fork + 1 < last:  # another one with the same code, which begins with other layers
            later = replayed(main, "later", fork + 1, build(other), at, len(rows), shards_at, of_views)
            for stage in later.flow.recorded:
                assert state_of(store, later, stage.name, last, "later") == state_of(fresh, oracle, stage.name, last)
        for stage in branch.flow.recorded:
            before = Counter[str]()
            if stage.name in main.flow.stages:
                before = state_of(store, main, stage.name, fork)
                assert state_of(store, branch, stage.name, fork, "b") == before, stage.name
            for t in range(fork + 1, len(rows)):
                now = state_of(store, branch, stage.name, t, "b")
                assert now == state_of(fresh, oracle, stage.name, t), (stage.name, t)
                came = store.changes(stage.name, t - 1, t, branch="b").drop_columns(["_epoch"])
                for row, n in weights(came).items():
                    before[row] += n
                assert Counter({row: n for row, n in before.items() if n}) == now, (stage.name, t)
        manifest = store.node.timelines.manifest(fork + 1, "b")
        assert manifest is not None
        first = [e for e in manifest.entries if branch.flow.stages[e.id.trace.stage].bootstrap_at == fork + 1]
        assert first
        for entry in first:
            store.directory.path_of(entry.id).unlink()
            store.directory.forget(entry.id)
        branch.shards = shards_at(fork + 1)
        branch.replay(fork + 1)  # sealing compares digests
        assert all(store.directory.recorded(e.id).digest == e.digest for e in first)
        asked = branch.flow.stages[f"s{len(other) - 1}"]
        found = explain(branch.flow, store, asked.name, {"k": k}, last, evaluate=no_jvm, branch="b")
        _check_explained(found, StoreRunner(build(other), again, 1), asked, k, len(rows))


def _check_explained(found: Explanation, rerun: StoreRunner, asked: BoundStage, k: int, epochs: int) -> None:
    """The rows that an explanation names make the value again."""
    named = found.inputs.get("rows", pa.table({"_epoch": pa.array([], pa.int64())})).to_pylist()
    for e in range(epochs):
        rerun.advance(e, table([(r["k"], r["g"], r["v"]) for r in named if r["_epoch"] == e]))
    mine = [row for row in rerun.store.read(asked.name, epochs - 1).to_pylist() if row["k"] == k]
    if asked.keyed or not asked.changing:
        assert sorted(map(repr, mine)) == sorted(map(repr, found.value.to_pylist()))


def _newest(changes: pa.Table, state: pa.Table) -> pa.Table:
    came = changes.filter(pc.is_in(changes["_change_type"], pa.array(["insert", "update_postimage"])))
    return came.select(["k", "v"])


def test_a_time_to_live_counts_from_the_epoch_in_which_an_update_began_anew() -> None:
    def flow(least: int) -> nosync.Dataflow:
        made = nosync.Dataflow("f")
        sums = made.source("rows", pipelines.COLUMNS).aggregate("sums", key=["k"], v=nosync.sum("v"))
        kept = sums.filter("kept", lambda rows: pc.greater(rows["v"], least))
        kept.update("newest", key=["k"], state="v bigint", fn=_newest, ttl=2)
        return made

    epochs = [[(1, 0, 10), (2, 0, 5)], [(3, 0, 7)], [(9, 0, 1)], [(9, 0, 1)], [(9, 0, 1)], [(9, 0, 1)]]
    with a_store() as store:
        main = StoreRunner(flow(8), store, 1)
        for t, rows in enumerate(epochs):
            main.advance(t, table(rows))
        branch = main.make_branch("b", 1, flow(4), ["kept"])
        for t in range(2, len(epochs)):
            branch.replay(t)
        found = [{r["k"]: r["v"] for r in store.read("newest", t, branch="b").to_pylist()} for t in range(1, 6)]
        assert found[0] == {1: 10}, "at the fork, as on main"
        assert found[1] == found[2] == {1: 10, 2: 5, 3: 7}, "all that are there, two of them for longer than they live"
        assert found[3] == found[4] == {}


# A deletion that a later stage must see, two paths that meet again, and an update that joins itself.
DIAMOND = [Op("sums", 1, 0, 0), Op("keep", 1, 1, 0), Op("join", 0, 1, 2), Op("counts", 0, 3, 0)]


@settings(max_examples=examples(25))
@given(pipelines.pipelines, pipelines.epochs, st.integers(0, 9), st.integers(0, 7))
@example(DIAMOND, [[(1, 2, 3), (2, 2, 4)], [(1, 0, 2)], [(2, 1, 1), (1, 3, 3)]], 2, 1)
@example([Op("project", 1, 0, 0)], [[(1, 2, 3), (2, 2, 4)], [(1, 2, 3)]], 1, 1)
def test_what_explains_a_value_is_enough_to_compute_it(
    ops: list[Op], rows: list[list[tuple[int, int, int]]], t: int, k: int
) -> None:
    t %= len(rows)
    with a_store() as store, a_store() as again:
        main = StoreRunner(build(ops), store, 1)
        for e, of_epoch in enumerate(rows):
            main.advance(e, table(of_epoch))
        last = f"s{len(ops) - 1}"
        found = explain(main.flow, store, last, {"k": k}, t, evaluate=no_jvm)
        assert found.exact, found.steps
        named = found.inputs.get("rows", pa.table({"_epoch": pa.array([], pa.int64())}))
        rerun = StoreRunner(build(ops), again, 1)
        for e in range(t + 1):
            chosen = [r for r in named.to_pylist() if r["_epoch"] == e]
            rerun.advance(e, table([(r["k"], r["g"], r["v"]) for r in chosen]))
            given_rows = [tuple(r) for r in rows[e]]
            for r in chosen:
                given_rows.remove((r["k"], r["g"], r["v"]))  # it names no row that was not there
        state = again.read(last, t)
        mine = [row for row in state.to_pylist() if row["k"] == k]
        changing = main.flow.stages[last].changing and not main.flow.stages[last].keyed
        if not changing:  # of a log of changes the value is what is left of them
            assert sorted(map(repr, mine)) == sorted(map(repr, found.value.to_pylist()))


def test_an_explanation_names_only_what_matters(tmp_path: Path) -> None:
    with a_store() as store:
        runner = StoreRunner(build([Op("keep", 0, 0, 0), Op("sums", 0, 1, 0)]), store, 1)
        runner.advance(0, table([(1, 1, 1), (1, 1, 4), (2, 1, 3)]))  # v & 3 == 0 is dropped
        runner.advance(1, table([(2, 5, 5)]))
        runner.advance(2, table([(1, 7, 6), (1, 9, 8)]))
        found = explain(runner.flow, store, "s1", {"k": 1}, 2, evaluate=no_jvm)
        assert found.inputs["rows"].to_pylist() == [
            {"k": 1, "g": 1, "v": 1, "_epoch": 0},
            {"k": 1, "g": 7, "v": 6, "_epoch": 2},
        ]
        assert found.value.to_pylist() == [{"k": 1, "g": 7, "v": 7}]
        assert str(found).splitlines() == [
            "stage s1, k=1, as of 2: k=1, g=7, v=7",
            "  s1               aggregate  3 rows of epochs 0, 2",
            "  s0               filter     2 rows of epochs 0, 2",
            "  rows             source     2 rows of epochs 0, 2",
        ]
        assert "<td>7</td>" in found._repr_html_()
        before = explain(runner.flow, store, "s1", {"k": 1}, 1, evaluate=no_jvm)
        assert before.inputs["rows"].num_rows == 1
        assert explain(runner.flow, store, "s1", {"k": 5}, 2, evaluate=no_jvm).inputs["rows"].num_rows == 0


def test_a_function_over_whole_tables_is_not_explained_row_by_row() -> None:
    flow = nosync.Dataflow("whole")
    flow.source("rows", pipelines.COLUMNS).map("biggest", lambda rows: rows.sort_by([("v", "descending")]).slice(0, 1))
    with a_store() as store:
        runner = StoreRunner(flow, store, 1, shards=1)
        runner.advance(0, table([(1, 1, 1), (1, 2, 4), (2, 1, 3)]))
        found = explain(runner.flow, store, "biggest", {"k": 1}, 0, evaluate=no_jvm)
        assert found.inputs["rows"].num_rows == 3 or found.exact
        assert found.inputs["rows"].num_rows >= 1


def test_what_was_merged_away_is_named() -> None:
    with a_store(retain=1) as store:
        runner = StoreRunner(build([Op("sums", 0, 0, 0), Op("counts", 0, 1, 0)]), store, 1)
        for t in range(5):
            runner.advance(t, table([(1, t, 2), (2, t, 1)]))
        store.sync()
        store.compact()
        found = explain(runner.flow, store, "s1", {"k": 1}, 4, evaluate=no_jvm)
        assert any("merged away" in note for step in found.steps for note in step.notes)
        assert found.inputs["rows"].num_rows == 5, "the inputs are logs, which keep all"


def test_bad_questions() -> None:
    with a_store() as store:
        runner = StoreRunner(build([Op("sums", 0, 0, 0)]), store, 1)
        with pytest.raises(nosync.NotAvailableError, match="none was run yet"):
            explain(runner.flow, store, "s0", {"k": 1}, 0, evaluate=no_jvm)
        runner.advance(0, table([(1, 1, 1)]))
        with pytest.raises(nosync.UnknownStageError, match="stages: rows, s0"):
            explain(runner.flow, store, "s7", {"k": 1}, 0, evaluate=no_jvm)
        with pytest.raises(nosync.SchemaError, match="no column 'z'; it has k, g, v"):
            explain(runner.flow, store, "s0", {"z": 1}, 0, evaluate=no_jvm)
        with pytest.raises(nosync.SchemaError, match="k='x' does not fit int64"):
            explain(runner.flow, store, "s0", {"k": "x"}, 0, evaluate=no_jvm)
        with pytest.raises(nosync.NotAvailableError, match="run are 0 to 0"):
            explain(runner.flow, store, "s0", {"k": 1}, 3, evaluate=no_jvm)
        with pytest.raises(nosync.InvalidInputError, match="needs a key"):
            explain(runner.flow, store, "s0", {}, 0, evaluate=no_jvm)


WITH_BOTH, WITH_LEFT = ("inner", "left", "right", "full"), ("left_semi", "left_anti")
"""Types of joins, by whose columns they have."""


@pytest.mark.parametrize(
    ("before", "how"),
    [*itertools.permutations(WITH_BOTH, 2), *itertools.permutations(WITH_LEFT, 2), ("inner", "inner")],
)
def test_a_join_of_another_type_is_what_that_type_makes_of_all_rows(before: str, how: str) -> None:
    """Its inputs only grow, and its results may not: what it gave before the fork is not what the other type gave."""

    def flow(how: str) -> nosync.Dataflow:
        made = nosync.Dataflow("f")
        left, right = made.source("l", "k string, x bigint"), made.source("r", "k string, y bigint")
        joined = left.join("s0", right, on=["k"], how=how)
        joined.aggregate("s1", key=["k"], n=nosync.count(), most=nosync.max("x" if how != "right" else "y"))
        return made

    def given(left: list[tuple[str | None, int]], right: list[tuple[str | None, int]]) -> dict[str, pa.Table]:
        rows = {"l": (left, "x"), "r": (right, "y")}
        return {
            name: pa.table(
                {"k": pa.array([k for k, _ in of], pa.string()), column: pa.array([n for _, n in of], pa.int64())}
            )
            for name, (of, column) in rows.items()
        }

    epochs = [
        given([("p", 1), ("q", 90), (None, 4)], [("q", 5), ("r", 3), (None, 8)]),
        given([("q", 7)], [("p", 6)]),
        given([("r", 2)], []),
    ]
    with a_store() as store, a_store() as fresh:
        main, oracle = StoreRunner(flow(before), store, 1), StoreRunner(flow(how), fresh, 2)
        for t, rows in enumerate(epochs):
            main.advance(t, rows)
            oracle.advance(t, rows)
        branch = replayed(main, "b", 0, flow(how), 0, len(epochs))
        for t in range(0 if how == before else 1, len(epochs)):
            for name in ("s0", "s1"):
                assert state_of(store, branch, name, t, "b") == state_of(fresh, oracle, name, t), (name, t)
