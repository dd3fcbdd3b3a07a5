"""Tables as inputs hold what a dictionary holds after the same changes."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.testing import FlowTester

DDL = "id bigint, part string, city string, at bigint"
COLUMNS = ("id", "part", "city", "at")


def flow_of(**options: Any) -> nosync.Dataflow:
    flow = nosync.Dataflow("shop")
    flow.table("customers", DDL, key=["id", "part"], **options)
    return flow


def row(id: int | None, city: str | None = "Bern", at: int | None = 0, kind: str | None = None) -> dict[str, Any]:
    said = {} if kind is None else {"_change_type": kind}
    return {"id": id, "part": "a", "city": city, "at": at, **said}


def held(tester: FlowTester) -> list[tuple[Any, ...]]:
    rows = tester.read("customers").select(list(COLUMNS)).to_pylist()
    return sorted((tuple(one.values()) for one in rows), key=repr)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2, 3]),
        st.sampled_from([None, "Bern", "Rome"]),
        st.integers(0, 4),
        st.sampled_from([None, "insert", "update_postimage", "update_preimage", "delete"]),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_a_table_holds_what_a_dictionary_does(epochs: list[list[tuple[Any, ...]]]) -> None:
    expected: dict[Any, tuple[Any, ...]] = {}
    with FlowTester(flow_of()) as tester:
        for changes in epochs:
            once = {change[0]: change for change in changes}
            tester.advance({"customers": [row(*change) for change in once.values()]})
            for id, city, at, kind in once.values():
                if kind == "delete":
                    expected.pop(id, None)
                elif kind != "update_preimage":
                    expected[id] = (id, "a", city, at)
            assert held(tester) == sorted(expected.values(), key=repr)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_of_several_changes_of_a_key_the_newest_counts(epochs: list[list[tuple[Any, ...]]]) -> None:
    expected: dict[Any, tuple[Any, ...]] = {}
    number = 0
    with FlowTester(flow_of(sequence_by="at"), shards=2) as tester:
        for changes in epochs:
            distinct = []
            for id, city, at, kind in changes:
                number += 1
                distinct.append((id, city, at * 100 + number, kind))  # late ones as well, and no two alike
            tester.advance({"customers": [row(*change) for change in distinct]})
            newest: dict[Any, tuple[Any, ...]] = {}
            for id, city, at, kind in distinct:
                if kind != "update_preimage" and (id not in newest or at > newest[id][0]):
                    newest[id] = (at, city, kind)
            for id, (at, city, kind) in newest.items():
                if id in expected and expected[id][3] > at:
                    continue
                expected.pop(id, None)
                if kind != "delete":
                    expected[id] = (id, "a", city, at)
            assert held(tester) == sorted(expected.values(), key=repr)


def test_rows_come_as_mappings_tuples_columns_or_a_table() -> None:
    as_columns = {name: [row(1)[name]] for name in COLUMNS}
    for rows in ([row(1)], [tuple(row(1).values())], as_columns, pa.table({**as_columns, "_change_type": ["insert"]})):
        with FlowTester(flow_of()) as tester:
            tester.advance({"customers": rows})
            assert held(tester) == [(1, "a", "Bern", 0)]


def test_what_was_said_before_and_after_of_a_row_is_one_change() -> None:
    with FlowTester(flow_of()) as tester:
        tester.advance({"customers": [row(1), row(2)]})
        tester.advance({"customers": [row(1, kind="update_preimage"), row(1, "Rome", kind="update_postimage")]})
        assert held(tester) == [(1, "a", "Rome", 0), (2, "a", "Bern", 0)]
        tester.advance({"customers": [row(1), row(1)]})
        assert held(tester) == [(1, "a", "Bern", 0), (2, "a", "Bern", 0)], "the same twice is the same"


def test_two_changes_of_a_key_without_an_order_are_refused() -> None:
    with FlowTester(flow_of()) as tester:
        tester.advance({"customers": [row(1)]})
        with pytest.raises(
            nosync.InvalidInputError, match=r"table customers: .*\{'id': 2, 'part': 'a'\}.*sequence_by="
        ):
            tester.advance({"customers": [row(1, "Rome"), row(2), row(2, kind="delete")]})
        assert held(tester) == [(1, "a", "Bern", 0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"_change_type": "U"},
            "_change_type is 'U', expected 'insert', 'update_preimage', 'update_postimage', 'delete'",
        ),
        ({"at": None}, "'at' is null"),
    ],
)
def test_changes_that_do_not_say_what_is_to_be_there_are_refused(change: dict[str, Any], said: str) -> None:
    with (
        FlowTester(flow_of(sequence_by="at")) as tester,
        pytest.raises(nosync.InvalidInputError, match=f"table customers: {said}"),
    ):
        tester.advance({"customers": [row(1) | change]})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schema": "id bigint, city string", "key": ["ids"]}, "table customers: .*'ids'.*id"),
        ({"schema": "id bigint, city string", "key": []}, "key"),
        ({"schema": "id bigint", "key": ["id"]}, "all of its columns"),
        ({"schema": "id bigint, change_type string", "key": ["id"]}, "'change_type'"),
        ({"schema": "id bigint, city string", "key": ["id"], "sequence_by": "at"}, "'at'"),
        ({"schema": "id bigint, city string", "key": ["id"], "at_safe_point": "never"}, "at_safe_point is 'never'"),
        ({"schema": "id bigint, city string", "key": "id"}, r"\['id'\]"),
        ({"schema": "id bigint, city text", "key": ["id"]}, "table customers: .*'text'"),
    ],
)
def test_mistakes_are_told_where_a_table_is_declared(arguments: dict[str, Any], said: str) -> None:
    flow = nosync.Dataflow("shop")
    with pytest.raises(nosync.NosyncError, match=said):
        flow.table("customers", **arguments)
    assert not flow.stages, "nothing is half declared"


def test_both_names_of_a_table_are_its_own() -> None:
    flow = nosync.Dataflow("shop")
    flow.source("customers_changes", "x bigint")
    with pytest.raises(nosync.FlowError, match="customers_changes"):
        flow.table("customers", DDL, key=["id"])


def test_a_name_that_is_no_input_is_told_with_those_that_are() -> None:
    with (
        FlowTester(flow_of()) as tester,
        pytest.raises(nosync.InvalidInputError, match="sources: customers.*did you mean"),
    ):
        tester.advance({"customer": [row(1)]})


def test_a_nan_is_newer_than_any_number_as_in_spark() -> None:
    flow = nosync.Dataflow("f")
    flow.table("t", "id int, name string, at double", key=["id"], sequence_by="at")
    for epochs in ([[1.0, math.nan, 2.0]], [[1.0], [math.nan], [2.0]], [[math.nan, 1.0], [math.inf]]):
        with FlowTester(flow) as tester:
            for times in epochs:
                tester.advance({"t": [{"id": 1, "name": str(at), "at": at} for at in times]})
            assert [row["name"] for row in tester.read("t").to_pylist()] == ["nan"]


@pytest.mark.parametrize("ddl", ["double", "float"])
@pytest.mark.parametrize("changing", [False, True])
def test_nan_is_the_largest_value_in_every_epoch(changing: bool, ddl: str) -> None:
    flow = nosync.Dataflow("f")
    schema = f"id bigint, k bigint, v {ddl}"
    rows = flow.table("s", schema, key=["id"]) if changing else flow.source("s", schema)
    rows.aggregate("ends", key=["k"], least=nosync.min("v"), most=nosync.max("v"))
    nan, type_ = math.nan, pa.float64() if ddl == "double" else pa.float32()
    epochs = [
        {1: nan, 2: 1.0, 3: None, 4: -0.0},
        {1: 2.0, 2: nan, 3: nan, 4: 0.5},
        {1: None, 2: -3.0, 3: None, 4: -1.0},
    ]
    with FlowTester(flow) as tester:
        for t, values in enumerate(epochs):
            ids = [k + 10 * t for k in values]
            tester.advance({"s": pa.table({"id": ids, "k": list(values), "v": pa.array(values.values(), type_)})})
        found = {row["k"]: (str(row["least"]), str(row["most"])) for row in tester.read("ends").to_pylist()}
    assert found == {1: ("2.0", "nan"), 2: ("-3.0", "nan"), 3: ("nan", "nan"), 4: ("-1.0", "0.5")}


def test_a_change_whose_one_half_is_late_is_a_deletion_or_an_insertion() -> None:
    flow = nosync.Dataflow("f")
    rows = flow.table("t", "id bigint, at timestamp, x bigint", key=["id"])
    rows.window("w", key=[], time="at", size="10 minutes", watermark="0 seconds", n=nosync.count())

    def given(id_: int, minute: int) -> dict[str, Any]:
        return {"id": id_, "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(minutes=minute), "x": minute}

    with FlowTester(flow) as tester:
        for n, minute in ((1, 1), (2, 30), (3, 31), (1, 40), (1, 2)):
            tester.advance({"t": [given(n, minute)]})
        changes = tester.changes("w__late", -1, 4).to_pylist()
    # From a closed window into an open one, and back.
    assert [(row["_epoch"], row["_change_type"], row["x"]) for row in changes] == [(3, "delete", 1), (4, "insert", 2)]
