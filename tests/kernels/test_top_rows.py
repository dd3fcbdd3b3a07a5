"""The first rows of partitions, from those before and what changed: the same as from all rows, and all rows seldom read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.kernels.over_partition import Order, OverColumn, OverPartition
from nosync.kernels.top_rows import TopRows
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.operators import per_key
from nosync.testing import FlowTester

SCHEMA = "id bigint, k string, x double, y int"
MADE = "id bigint, x double, y int, place int"
ORDER = (Order("x", ascending=False, nulls_first=False), Order("y"))


def top(rank: str, most: int, key: tuple[str, ...] = ("k",)) -> TopRows:
    return TopRows(OverPartition(key, ORDER, (OverColumn("place", rank, pa.int32()),)), "place", most)


def epochs(
    seed: int, most_rows: int, *, copies: bool
) -> Iterator[tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]]:
    """Yields the changes of an epoch, and the rows that are there after it. `copies`: many of them are equal but for the
    id.
    """
    chance, there = random.Random(seed), dict[int, dict[str, Any]]()
    for t in range(9):
        given = []
        for i in chance.sample(range(most_rows), most_rows // (1 if t == 0 else 6)):
            if i in there and chance.random() < 0.5:
                given.append({**there.pop(i), CHANGE_TYPE_COLUMN: "delete"})
                continue
            x = chance.choice([None, 0.0, 1.0]) if copies else chance.choice([None, float(chance.randrange(40))])
            there[i] = {"id": i, "k": chance.choice("abc"), "x": x, "y": chance.randrange(2) if copies else i}
            given.append({**there[i], CHANGE_TYPE_COLUMN: "insert"})
        yield given, there


def placed(rows: list[dict[str, Any]], rank: str, most: int) -> list[tuple[Any, ...]]:
    """Returns what is first in each partition, from the slow and obvious definition of the ranks."""
    found = []
    for key in {row["k"] for row in rows}:
        of_key = [((row["x"] is None, -(row["x"] or 0.0), row["y"]), row) for row in rows if row["k"] == key]
        for place, row in of_key:
            before = [other for other, _ in of_key if other < place]
            number = 1 + (len(set(before)) if rank == "dense_rank" else len(before))
            if number <= most:
                found.append((row["id"], key, row["x"], row["y"], number))
    return sorted(found, key=repr)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("rank", "most"), [("row_number", 3), ("rank", 1), ("rank", 4), ("dense_rank", 2)])
def test_they_are_those_of_all_rows(rank: str, most: int, seed: int) -> None:
    flow = nosync.Dataflow("f")
    flow.table("rows", SCHEMA, key=["id"]).per_key("top", key=["k"], fn=top(rank, most), schema=MADE, version="1")
    with FlowTester(flow, shards=1 + seed % 2) as tester:
        for given, there in epochs(seed, 24 if rank == "dense_rank" else 60, copies=rank != "row_number"):
            tester.advance({"rows": given})
            found = tester.read("top").select(["id", "k", "x", "y", "place"]).to_pylist()
            assert sorted((tuple(row.values()) for row in found), key=repr) == placed([*there.values()], rank, most)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("key", [("k",), ()])
def test_rows_that_nothing_tells_apart_are_counted(key: tuple[str, ...], seed: int) -> None:
    first = top("row_number", 4, key)
    flow = nosync.Dataflow("f")
    rows = flow.table("rows", SCHEMA, key=["id"]).select("bare", "k", "x", "y")
    made = "x double, y int, place int" if key else "k string, x double, y int, place int"
    rows.per_key("top", key=list(key), fn=first, schema=made, version="1")
    rows.per_key("all", key=list(key), fn=first.__call__, schema=made, version="1")  # which is not asked less
    with FlowTester(flow, shards=2) as tester:
        for given, _ in epochs(seed, 40, copies=True):
            tester.advance({"rows": given})
            assert tester.read("top").to_pylist() == tester.read("all").to_pylist()


def test_all_rows_are_read_only_where_too_few_of_the_first_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    rows_now = per_key._rows_now

    def counted(changes: pa.Table, *others: Any) -> pa.Table:
        found = rows_now(changes, *others)
        asked.append(found.num_rows)
        return found

    monkeypatch.setattr(per_key, "_rows_now", counted)
    flow = nosync.Dataflow("f")
    flow.table("rows", SCHEMA, key=["id"]).per_key("top", key=["k"], fn=top("row_number", 3), schema=MADE, version="1")

    def rows(*given: tuple[int, str, float], kind: str = "insert") -> list[dict[str, Any]]:
        return [{"id": i, "k": k, "x": x, "y": 0, CHANGE_TYPE_COLUMN: kind} for i, k, x in given]

    with FlowTester(flow, shards=1) as tester:

        def ids(*changes: list[dict[str, Any]]) -> list[int]:
            asked.clear()
            tester.advance({"rows": [row for part in changes for row in part]})
            return [
                row["id"] for row in sorted(tester.read("top").to_pylist(), key=lambda row: (row["k"], row["place"]))
            ]

        assert ids(rows(*((i, "a", float(i)) for i in range(10))), rows((20, "b", 1.0))) == [9, 8, 7, 20]
        assert ids(rows((10, "a", 10.0), (3, "a", 0.5))) == [10, 9, 8, 20]
        assert asked == []  # one came, and one beyond the first changed
        assert ids(rows((9, "a", 9.0), kind="delete"), rows((11, "a", 11.0))) == [11, 10, 8, 20]
        assert asked == []  # one went, and another one came before it
        assert ids(rows((21, "b", 2.0)), rows((20, "b", 1.0), kind="delete")) == [11, 10, 8, 21]
        assert asked == []  # of this one all rows are first
        assert ids(rows((10, "a", 10.0), kind="delete"), rows((22, "b", 3.0))) == [11, 8, 7, 22, 21]
        assert asked == [10]  # one comes up, and only the rows of its partition are read
