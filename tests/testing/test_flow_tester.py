"""The kit for users' unit tests: it gives what Spark gives, to the digest, and finds what is not deterministic."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.node.node import Node
from nosync.testing import FlowTester
from tests.conftest import OpenStore
from tests.testing.flows import FLOWS, INPUTS, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ran(name: str, shards: int = 2) -> FlowTester:
    tester = FlowTester(FLOWS[name](), shards=shards)
    for rows in INPUTS[name]:
        tester.advance(rows)
    return tester


# --- as on Spark ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "loop" else [pytest.mark.long]) for name in FLOWS]
)
def test_layers_have_the_digests_that_they_have_on_spark(
    spark: SparkSession, open_store: OpenStore, name: str, shards: int
) -> None:
    store = open_store()
    job = nosync.Job(FLOWS[name](), store, spark=spark, shards=shards)
    for t, rows in enumerate(INPUTS[name]):
        job.advance(t, {source: spark.createDataFrame(given, SCHEMAS[source]) for source, given in rows.items()})
    expected = {
        (manifest.t, entry.id.trace.stage, entry.id.trace.shard.index): str(entry.digest)
        for manifest in store.node.manifests().values()
        for entry in manifest.entries
    }
    with ran(name, shards) as tester:
        found = tester.digests()
        assert {at[1] for at in found} == {at[1] for at in expected}
        assert [at for at in expected if found.get(at) != expected[at]] == []
        last = len(INPUTS[name]) - 1
        for stage in tester.stages:
            mine = sorted(map(repr, (tuple(row.values()) for row in tester.read(stage).to_pylist())))
            theirs = sorted(map(repr, (tuple(row.values()) for row in job.read(stage).toArrow().to_pylist())))
            assert mine == theirs, stage
        for stage in ("totals", "tumbling", "reached"):
            if stage in tester.stages:
                mine = sorted(map(repr, tester.changes(stage, -1, last).to_pylist()))
                theirs = sorted(map(repr, job.changes(stage, -1, last).toArrow().to_pylist()))
                assert mine == theirs, stage


# --- how it is used ---------------------------------------------------------------------------------------------------


def orders() -> nosync.Dataflow:
    flow = nosync.Dataflow("orders")
    rows = flow.source("orders", "customer string, amount bigint")
    rows.where("paid", "amount > 0", persist="none").aggregate(
        "spending", key=["customer"], n=nosync.count(), total=nosync.sum("amount")
    )
    return flow


def test_rows_are_given_in_many_forms() -> None:
    given: list[Any] = [
        [("ann", 3), ("bob", 5)],
        [{"customer": "ann", "amount": 3}, {"customer": "bob", "amount": 5}],
        {"customer": ["ann", "bob"], "amount": [3, 5]},
        pa.table({"amount": [3, 5], "customer": ["ann", "bob"]}),
    ]
    found = []
    for rows in given:
        with FlowTester(orders()) as tester:
            report = tester.advance({"orders": rows})
            assert (report.t, report.rows_in) == (0, 2)
            found.append(tester.read("spending").to_pylist())
    assert found == [[{"customer": "ann", "n": 1, "total": 3}, {"customer": "bob", "n": 1, "total": 5}]] * 4


@pytest.mark.parametrize("is_later", [False, True])
def test_an_expression_that_fails_names_its_stage(is_later: bool) -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("orders", "customer string, amount bigint")
    if is_later:
        rows = rows.aggregate("spending", key=["customer"], amount=nosync.sum("amount"))
    rows.where("large", "amount + 9223372036854775807 > 5").dedupe("out", key=["customer"])
    with (
        FlowTester(flow) as tester,
        pytest.raises(nosync.StageError, match=r"timestamp 0: stage large: .*overflow") as error,
    ):
        tester.advance({"orders": [("ann", 3)]})
    assert error.value.stage == "large"


def test_states_and_changes_epoch_by_epoch() -> None:
    tester = FlowTester(orders())
    tester.advance({"orders": [("ann", 3)]}, t=7)
    tester.advance({"orders": [("ann", 4), ("eve", -1)]})
    tester.advance()
    assert tester.last_sealed() == 9
    assert tester.read("spending", 7).to_pylist() == [{"customer": "ann", "n": 1, "total": 3}]
    assert tester.read("paid").to_pylist() == [{"customer": "ann", "amount": 3}, {"customer": "ann", "amount": 4}]
    assert tester.changes("spending").num_rows == 0
    kinds = [(row["_epoch"], row["_change_type"]) for row in tester.changes("spending", -1).to_pylist()]
    assert kinds == [(7, "insert"), (8, "update_preimage"), (8, "update_postimage")]
    assert tester.changes("spending", until=8).num_rows == 2


def test_it_needs_no_spark_and_leaves_nothing_behind() -> None:
    code = """
import sys
from tests.testing.test_flow_tester import orders
from nosync.lsm.node.node import Node
from nosync.testing import FlowTester
tester = FlowTester(orders())
tester.advance({"orders": [("ann", 3)]})
tester.assert_deterministic()
directory = tester._store.directory.root.parent
assert directory.exists()
del tester
assert not directory.exists()
kept = FlowTester(orders())
assert "pyspark" not in sys.modules, "it was imported"
"""
    code = code.replace("from tests.testing.test_flow_tester import orders", _ORDERS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_ORDERS = """
import nosync
def orders():
    flow = nosync.Dataflow("orders")
    rows = flow.source("orders", "customer string, amount bigint")
    rows.where("paid", "amount > 0").aggregate("spending", key=["customer"], total=nosync.sum("amount"))
    return flow
"""


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"order": []}, nosync.InvalidInputError, r"'order' is not a source of orders; sources: orders \(did you mean"),
        ({"orders": [("ann",)]}, nosync.SchemaError, "has 1 values, expected customer, amount"),
        (
            {"orders": [{"customer": "ann", "amout": 3}]},
            nosync.SchemaError,
            r"no column 'amout'.*did you mean 'amount'",
        ),
        (
            {"orders": [("ann", "three")]},
            nosync.SchemaError,
            "source orders: column 'amount' is int64: Could not convert 'three'",
        ),
        ({"orders": pa.table({"customer": ["ann"]})}, nosync.SchemaError, "column 'amount' is missing"),
        (
            {"orders": pa.table({"customer": ["a"], "amount": [1.5]})},
            nosync.SchemaError,
            "is double, expected int64: cast it",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, error: type[Exception], message: str) -> None:
    with FlowTester(orders()) as tester, pytest.raises(error, match=message):
        tester.advance(rows)


def test_what_cannot_be_asked_is_told() -> None:
    with FlowTester(orders()) as tester:
        with pytest.raises(nosync.NotAvailableError, match=r"call advance\(\) first"):
            tester.read("spending")
        with pytest.raises(nosync.InvalidInputError, match="nothing to run again"):
            tester.assert_deterministic()
        tester.advance({"orders": [("ann", 3)]})
        with pytest.raises(nosync.UnknownStageError, match="did you mean 'spending'"):
            tester.read("spendings")
        with pytest.raises(nosync.NotAvailableError, match="was not run yet; the newest is 0"):
            tester.read("spending", 1)
        with pytest.raises(nosync.OutOfOrderError, match="the next one is 1"):
            tester.advance(t=5)
        with pytest.raises(nosync.NotAvailableError, match="read its changes from orders"):
            tester.changes("paid")
    for shards in (0, True, 1000):
        with pytest.raises(nosync.FlowError, match="expected 1 to 128"):
            FlowTester(orders(), shards=shards)
    with pytest.raises(nosync.InvalidInputError, match=r"expected a nosync\.Dataflow"):
        FlowTester("orders")  # type: ignore[arg-type]


def test_a_function_that_fails_is_named_with_its_line() -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "n bigint").map("broken", _divided, schema="n bigint")
    with (
        FlowTester(flow) as tester,
        pytest.raises(nosync.StageError, match=r"stage broken .*ZeroDivisionError.*_divided"),
    ):
        tester.advance({"rows": [(1,)]})


def _divided(rows: pa.Table) -> pa.Table:
    if rows.num_rows:
        _ = 1 // 0
    return rows


def test_an_expression_that_fails_is_an_error_of_its_stage() -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "n bigint").select("more", "n * 4611686018427387904 AS n").aggregate(
        "t", key=["n"], c=nosync.count()
    )
    with FlowTester(flow) as tester, pytest.raises(nosync.NosyncError, match="overflow"):
        tester.advance({"rows": [(9,)]})


# --- what is not deterministic ----------------------------------------------------------------------------------------


def _numbered(rows: pa.Table) -> pa.Table:
    return rows.append_column("place", pa.array(range(rows.num_rows), pa.int64()))


def _counted() -> Any:
    calls = []

    def function(rows: pa.Table) -> pa.Table:
        calls.append(1)
        return rows.append_column("calls", pa.array([len(calls)] * rows.num_rows, pa.int64()))

    return function


def _first_of_all(rows: pa.Table) -> pa.Table:
    return rows.slice(0, 1)


def _kept_first(changes: pa.Table, state: pa.Table) -> pa.Table:
    known = {row["customer"]: row["amount"] for row in state.to_pylist()}
    for row in changes.to_pylist():
        known.setdefault(row["customer"], row["amount"])
    return pa.table({"customer": pa.array(known, pa.string()), "amount": pa.array(known.values(), pa.int64())})


ROWS = [[("ann", 3), ("bob", 5), ("ann", 4), ("cyd", 1)], [("ann", 9), ("dee", 2)]]


def _tested(function: Any, **options: Any) -> FlowTester:
    flow = nosync.Dataflow("f")
    flow.source("rows", "customer string, amount bigint").map("mapped", function, **options)
    tester = FlowTester(flow)
    for rows in ROWS:
        tester.advance({"rows": rows})
    return tester


def test_a_function_that_counts_its_calls_is_found() -> None:
    schema = "customer string, amount bigint, calls bigint"
    with pytest.raises(
        AssertionError, match="stage mapped is not deterministic: with the rows of each epoch in another order"
    ):
        _tested(_counted(), schema=schema, version="1").assert_deterministic()


def test_rows_come_in_another_order_and_each_epoch_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tester = _tested(_first_of_all)
    given: list[list[tuple[Any, ...]]] = []
    advance = FlowTester.advance

    def noted(self: FlowTester, rows: Any = None, *, t: int | None = None) -> Any:
        given.append([tuple(row.values()) for row in rows["rows"].to_pylist()])
        return advance(self, rows, t=t)

    monkeypatch.setattr(FlowTester, "advance", noted)
    with pytest.raises(AssertionError):
        tester.assert_deterministic()
    assert [sorted(rows) for rows in given[:4]] == [sorted(rows) for rows in ROWS * 2]
    assert any(rows != ROWS[i % 2] for i, rows in enumerate(given[:4]))


def _twice(rows: pa.Table) -> pa.Table:
    """Of the rows of a call, gives the first one twice."""
    return pa.concat_tables([rows, rows.slice(0, 1)])


def test_rows_that_are_there_more_often_are_found_and_named() -> None:
    with pytest.raises(AssertionError, match="stage mapped is not deterministic: .*Among them is .*'customer'"):
        _tested(_twice).assert_deterministic()


def test_a_tester_is_asked_for_epochs_by_number() -> None:
    with _tested(_numbered) as tester:
        for ask in (
            lambda: tester.read("mapped", as_of="2026-07-04"),  # type: ignore[arg-type]
            lambda: tester.changes("mapped", None, "2026-07-04"),  # type: ignore[arg-type]
        ):
            with pytest.raises(nosync.InvalidInputError, match="by number"):
                ask()
        with pytest.raises(nosync.InvalidInputError, match="-2"):
            tester.changes("mapped", -2, 1)


def test_a_function_that_numbers_rows_depends_on_shards() -> None:
    with pytest.raises(
        AssertionError, match=r"stage mapped is not deterministic: with [13] shards? it has other rows as of"
    ):
        _tested(_numbered).assert_deterministic()


def test_a_function_over_all_rows_of_an_epoch_depends_on_shards_or_cuts() -> None:
    with pytest.raises(AssertionError, match="stage mapped is not deterministic"):
        _tested(_first_of_all).assert_deterministic()


def test_what_depends_on_epochs_by_its_kind_is_not_cut() -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "customer string, amount bigint")
    rows.update("first", key=["customer"], state="amount bigint", fn=_kept_first)
    rows.dedupe("once", key=["customer"])
    rows.aggregate("totals", key=["customer"], total=nosync.sum("amount"))
    with FlowTester(flow) as tester:
        for given in ROWS:
            tester.advance({"rows": given})
        tester.assert_deterministic()


def test_an_update_that_takes_one_row_of_a_key_an_epoch_is_not_given_more() -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "customer string, amount bigint")
    newest = rows.update("newest", key=["customer"], state="amount bigint", fn=_as_they_come)
    newest.where("large", "amount > 3").aggregate("count", key=[], n=nosync.count())
    rows.aggregate("totals", key=["customer"], total=nosync.sum("amount"))
    with FlowTester(flow) as tester:
        for amount in (3, 4, 5):
            tester.advance({"rows": [("ann", amount)]})
        tester.assert_deterministic()


def _as_they_come(changes: pa.Table, state: pa.Table) -> pa.Table:
    return changes.select(["customer", "amount"])


def test_sums_of_doubles_are_compared_but_for_their_last_bits() -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, x double").aggregate("sums", key=["k"], total=nosync.sum("x"), mean=nosync.mean("x"))
    with FlowTester(flow, shards=1) as tester:
        for t in range(3):
            tester.advance({"rows": [("a", 0.1 + i * 1e16 * (i % 2) + t / 3) for i in range(7)]})
        tester.assert_deterministic()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long("make properties")] if name in ("windows", "many") else [])
        for name in FLOWS
    ],
)
def test_flows_of_all_operators_are_deterministic(name: str) -> None:
    with ran(name) as tester:
        tester.assert_deterministic()


def test_nothing_is_left_of_a_tester_that_is_gone() -> None:
    """A suite makes thousands of them."""

    def nodes() -> int:
        gc.collect()
        return sum(isinstance(found, Node) for found in gc.get_objects())

    def small() -> FlowTester:
        tester = FlowTester(orders())
        tester.advance({"orders": [{"customer": "ada", "amount": 3}]})
        return tester

    before = nodes()
    for _ in range(3):
        small()
    small().close()
    assert nodes() == before


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_rows_of_an_output_go_by_what_is_in_them_though_a_column_has_the_name_of_the_key(shards: int) -> None:
    def pay(key: tuple[Any, ...], changes: list[dict[str, Any]], state: Any) -> Any:
        paid = [{"account": row["to"], "amount": row["amount"]} for row in changes]
        return {"n": (state["n"] if state else 0) + len(changes)}, {"credits": paid}

    flow = nosync.Dataflow("bank")
    transfers = flow.source("transfers", "account string, to string, amount bigint")
    paid = transfers.update_per_key(
        "paid", key=["account"], state="n bigint", fn=pay, outputs={"credits": "account string, amount bigint"}
    )
    paid.output("credits").aggregate("totals", key=["account"], n=nosync.count(), total=nosync.sum("amount"))
    tester = FlowTester(flow, shards=shards)
    rows = [(f"a{i}", f"b{i % 3}", i) for i in range(30)]
    for part in (rows[:15], rows[15:]):
        tester.advance({"transfers": part})
    expected = [{"account": f"b{j}", "n": 10, "total": sum(i for i in range(30) if i % 3 == j)} for j in range(3)]
    assert sorted(tester.read("totals").to_pylist(), key=lambda row: row["account"]) == expected


def test_what_lies_under_nulls_is_no_part_of_a_layer() -> None:
    flow = nosync.Dataflow("nested")
    one, many = "one struct<a: double, b: string>", "many array<struct<a: double, b: string>>"
    flow.source("rows", f"k int, {one}, {many}").dedupe("once", key=["k"])
    fields = [pa.field("a", pa.float64()), pa.field("b", pa.string())]

    def structs(under: tuple[float | None, str | None]) -> pa.StructArray:
        values = [pa.array([1.0, under[0]]), pa.array(["x", under[1]])]
        return pa.StructArray.from_arrays(values, fields=fields, mask=pa.array([False, True]))

    found = []
    for under in ((None, None), (0.0, ""), (7.0, "y")):
        many_of = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), structs(under))
        tester = FlowTester(flow)
        tester.advance({"rows": pa.table({"k": pa.array([1, 2], pa.int32()), "one": structs(under), "many": many_of})})
        assert tester.read("once").column("one").to_pylist() == [{"a": 1.0, "b": "x"}, None]
        found.append(tester.digests())
    assert found[0] == found[1] == found[2]


def test_rows_may_be_a_part_of_a_table() -> None:
    flow = nosync.Dataflow("nested")
    flow.source("rows", "k int, many array<struct<a: int>>, one struct<b: array<int>>")
    tester = FlowTester(flow)
    many = [[{"a": 1}], None, [], [None, {"a": 2}], [{"a": None}], None]
    one = [{"b": [1]}, None, {"b": None}, {"b": []}, {"b": [2, None]}, None]
    types = pa.list_(pa.struct([("a", pa.int32())])), pa.struct([("b", pa.list_(pa.int32()))])
    table = pa.table(
        {"k": pa.array(range(6), pa.int32()), "many": pa.array(many, types[0]), "one": pa.array(one, types[1])}
    )
    tester.advance({"rows": table.slice(1, 4)})
    assert tester.read("rows").select(["k", "many", "one"]).to_pylist() == table.slice(1, 4).to_pylist()
