"""What a function makes of all rows of a key, kept up to date, is what it makes of the rows that are there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.job.explain import explain
from nosync.testing import FlowTester
from tests.helpers.depth import examples
from tests.helpers.runner import StoreRunner

ROW = st.tuples(st.integers(0, 9), st.sampled_from([None, 1, 2]), st.integers(-2, 2) | st.none())
EPOCHS = st.lists(st.lists(ROW, max_size=6), min_size=1, max_size=5)


def with_sums(rows: pa.Table) -> pa.Table:
    """Each row with the sum of its key, and a second time where that is even."""
    sums = rows.group_by("k", use_threads=False).aggregate([("v", "sum")])
    sums = {row["k"]: row["v_sum"] or 0 for row in sums.to_pylist()}
    total = pa.array([sums[k] for k in rows.column("k").to_pylist()], pa.int64())
    made = rows.append_column("total", total)
    return pa.concat_tables([made, made.filter(pc.equal(pc.bit_wise_and(total, 1), 0))])


def whole(rows: pa.Table) -> pa.Table:
    return pa.table({"n": pa.array([rows.num_rows], pa.int64())})


def flow_over(*, changing: bool) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    ddl = "id bigint, k bigint, v bigint"
    rows = flow.table("rows", ddl, key=["id"]) if changing else flow.source("rows", ddl)
    summed = rows.per_key("summed", key=["k"], fn=with_sums)
    summed.aggregate("counts", key=["total"], n=nosync.count())
    rows.per_key("all", key=[], fn=whole)
    return flow


def bag(table: pa.Table, *columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.select(list(columns)).to_pylist())


@given(EPOCHS, st.booleans(), st.integers(1, 3))
@settings(max_examples=examples(40), deadline=None)
def test_rows_are_those_of_all_that_are_there(epochs: list[list[tuple[Any, ...]]], changing: bool, shards: int) -> None:
    there: dict[Any, tuple[Any, ...]] = {}
    with FlowTester(flow_over(changing=changing), shards=shards) as tester:
        for t, rows in enumerate(epochs):
            if changing:
                once = {row[0]: row for row in rows}
                given_rows = [
                    {"id": i, "k": k, "v": v, "_change_type": "delete" if v == -2 else None}
                    for i, k, v in once.values()
                ]
                for i, k, v in once.values():
                    there.pop(i, None) if v == -2 else there.__setitem__(i, (i, k, v))
            else:
                given_rows = [dict(zip(("id", "k", "v"), row, strict=True)) for row in rows]
                there |= {(t, i): row for i, row in enumerate(rows)}
            tester.advance({"rows": given_rows})
            totals: Counter[Any] = Counter()
            for _, k, v in there.values():
                totals[k] += v or 0
            expected = Counter((i, k, v, totals[k]) for i, k, v in there.values())
            expected += Counter({row: n for row, n in expected.items() if row[3] % 2 == 0})
            assert bag(tester.read("summed"), "id", "k", "v", "total") == expected
            counts: Counter[Any] = Counter()
            for row, n in expected.items():
                counts[row[3]] += n
            assert bag(tester.read("counts"), "total", "n") == Counter(counts.items())
            found = tester.read("all").to_pylist()
            assert found == ([{"n": len(there)}] if there else []), "a function is not asked about no rows"


def stays_within(tmp: Path, fn: Any, **arguments: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k bigint, v bigint").per_key("made", key=["k"], fn=fn, **arguments)
    return flow


@pytest.mark.parametrize(
    ("fn", "arguments", "error", "said"),
    [
        (lambda rows: rows.drop_columns(["k"]), {}, nosync.SchemaError, "stage made: .*must return the key column 'k'"),
        (lambda rows: rows.append_column("_hash", rows["v"]), {}, nosync.SchemaError, "'_hash'"),
        (lambda rows: 7, {}, nosync.SchemaError, "returned int, expected a pyarrow.Table"),
        (lambda rows: rows, {"schema": "k bigint"}, nosync.SchemaError, "'k' of its schema= is a key column"),
        ("rank", {}, nosync.FlowError, "'rank' is not a function"),
    ],
)
def test_what_cannot_be_is_told_before_an_epoch(
    tmp_path: Path, fn: Any, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said), FlowTester(stays_within(tmp_path, fn, **arguments)):
        pass


def test_a_key_that_was_not_given_cannot_come_back(tmp_path: Path) -> None:
    def other(rows: pa.Table) -> pa.Table:
        return rows.set_column(0, "k", pc.add(rows["k"], 1))

    with (
        FlowTester(stays_within(tmp_path, other)) as tester,
        pytest.raises(
            nosync.StageError, match=r"stage made .*a row of the key \{'k': 3\}, whose rows it was not given"
        ),
    ):
        tester.advance({"rows": [{"k": 2, "v": 1}]})


def test_rows_that_are_forgotten_are_refused() -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k bigint, v bigint")
    kept = rows.update("kept", key=["k"], state="v bigint", fn=lambda changes, state: changes.select(["k", "v"]), ttl=3)
    kept.per_key("made", key=["k"], fn=with_sums)
    with pytest.raises(nosync.FlowError, match="stage made: kept forgets rows"), FlowTester(flow):
        pass


def test_changes_are_only_what_differs() -> None:
    with FlowTester(flow_over(changing=True)) as tester:
        tester.advance({"rows": [{"id": i, "k": i % 2, "v": 1} for i in range(6)]})
        tester.advance({"rows": [{"id": 0, "k": 0, "v": 1}, {"id": 7, "k": 1, "v": 0}]})
        changed = tester.changes("summed")
        assert bag(changed, "id", "total", "_change_type") == Counter([(7, 3, "insert")])


def test_branches_begin_anew_and_rows_are_explained(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        runner = StoreRunner(flow_over(changing=False), store, 2)
        for t in range(3):
            runner.advance(t, table([(t, t % 2, 10 * t + 1)]))

        def other(rows: pa.Table) -> pa.Table:
            return with_sums(rows.set_column(2, "v", pc.negate(rows["v"])))

        flow = flow_over(changing=False).changed({"summed": other})
        branch = runner.make_branch("other", 1, flow, own=["summed"])
        branch.replay(2)
        found = store.read("summed", branch="other").to_pylist()
        assert {row["total"] for row in found} == {-22, -11}, "it is what the code makes of all rows"
        way = explain(runner.flow, store, "summed", {"k": 0}, None, evaluate=lambda *_: pa.table({}))
        (step,) = (step for step in way.steps if step.stage == "rows")
        assert sorted(row["v"] for row in step.rows.to_pylist()) == [1, 21]
        whole_way = explain(runner.flow, store, "all", {}, None, evaluate=lambda *_: pa.table({}))
        assert whole_way.value.to_pylist() == [{"n": 3}]


def table(rows: list[tuple[int, int, int]]) -> pa.Table:
    return pa.table({name: pa.array([row[i] for row in rows], pa.int64()) for i, name in enumerate(("id", "k", "v"))})
