"""Stages that are appended to directly, before and after a rewind: a line has its own layers, and goes on from others'."""

from __future__ import annotations

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore
from tests.helpers.oracles import State, state_of

RETAIN_NONE_AFTER = nosync.StoreSettings(retain=0, background=False, grace_s=0.0, retry_s=0.0)


def numbers(**values: int) -> pa.Table:
    return pa.table({"k": list(values), "v": pa.array(values.values(), pa.int64())})


def keys(*names: str) -> pa.Table:
    return pa.table({"k": pa.array(names, pa.string())})


def step(store: nosync.Store, t: int, rows: pa.Table, *, shard: int = 0, deletes: pa.Table | None = None) -> None:
    store.append("kv", t=t, shard=shard, key=["k"], rows=rows, deletes=deletes)


def merged(store: nosync.Store) -> None:
    store.sync()
    store.compact()
    assert isinstance(store.node, Node)
    store.node.collect_garbage()


def state(store: nosync.Store, as_of: int | None = None, branch: str = "main") -> State:
    return state_of(store.read("kv", as_of=as_of, branch=branch), ["k"])


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kept", ["", "old"])
def test_after_a_rewind_other_rows_may_come(open_store: OpenStore, merge: bool, kept: str) -> None:
    store = open_store()
    for t in range(6):
        step(store, t, numbers(a=t, b=t) if t % 2 else numbers(a=t))
        store.seal(t)
    if merge:
        merged(store)
    past = [state(store, t) for t in range(6)]
    store.rewind(2, kept)
    assert state(store) == past[2]
    for t in (3, 4):
        step(store, t, numbers(c=t), deletes=keys("a") if t == 4 else None)
        store.seal(t)
        if merge:
            merged(store)
    expected = [*past[:3], past[2] | {("c",): (3,)}, {("b",): (1,), ("c",): (4,)}]
    assert [state(store, t) for t in range(5)] == expected
    with pytest.raises(nosync.NotAvailableError, match="up to 4"):
        state(store, 5)
    feed = store.changes("kv", 1, 4).to_pylist()
    assert [(r["_epoch"], r["_change_type"], r["k"], r["v"]) for r in feed] == [
        (2, "update_preimage", "a", 1), (2, "update_postimage", "a", 2), (3, "insert", "c", 3), (4, "delete", "a", 2),
        (4, "update_preimage", "c", 3), (4, "update_postimage", "c", 4),
    ]  # fmt: skip
    found = store.lookup("kv", keys("c", "a", "b"), as_of=3).to_pylist()
    assert found == [{"k": "c", "v": 3}, {"k": "a", "v": 2}, {"k": "b", "v": 1}]
    if kept:
        assert [state(store, t, kept) for t in range(6)] == past
        assert store.diff("kv", "main", kept, as_of=4).num_rows == 3
    if not merge:
        step(store, 2, numbers(a=2))  # the same again is a success, also of what was before
    store.close()
    for options in ({}, {"read_only": True}):
        again = open_store(**options)
        assert [state(again, t) for t in range(5)] == expected
        if not options:
            again.close()


def test_what_is_deleted_after_a_rewind_stays_deleted(open_store: OpenStore) -> None:
    """Its older value is in layers of another timeline, so a merge of all that this one has keeps the tombstone."""
    store = open_store(settings=RETAIN_NONE_AFTER)
    step(store, 0, numbers(a=1, b=1))
    store.seal(0)
    store.rewind(0)
    for t in range(1, 5):
        step(store, t, numbers(c=t), deletes=keys("a") if t == 1 else None)
        store.seal(t)
    merged(store)
    assert any(layer.lower == 1 and layer.upper == 5 for layer in store.layers()), "all of the line's own are one"
    assert state(store) == {("b",): (1,), ("c",): (4,)}


def test_what_a_branch_goes_on_from_is_not_merged_away(open_store: OpenStore) -> None:
    """Of a shard that began later than the others, too."""
    store = open_store(settings=nosync.StoreSettings(retain=2, background=False, grace_s=0.0, retry_s=0.0))

    def run(first: int, last: int, key: str) -> None:
        for t in range(first, last + 1):
            step(store, t, numbers(a=t))
            if t >= 2:
                step(store, t, numbers(**{key: t}), shard=1)
            store.seal(t)
            merged(store)

    run(0, 9, "z")
    store.rewind(7, "old")
    run(8, 14, "y")
    expected = {("a",): (14,), ("z",): (7,), ("y",): (14,)}
    assert state(store) == expected
    assert state(store, branch="old") == {("a",): (9,), ("z",): (9,)}
    store.node.promote("old", "new")
    run(10, 20, "z")
    assert state(store) == {("a",): (20,), ("z",): (20,)}
    assert state(store, branch="new") == expected


def test_a_log_and_a_new_column_after_rewinding_twice(open_store: OpenStore) -> None:
    store = open_store()
    rows: list[tuple[int, int | None]] = []

    def log(t: int, v: int, extra: int | None = None) -> None:
        table = pa.table({"v": [v]} if extra is None else {"v": [v], "more": [extra]})
        store.append("log", t=t, key=[], rows=table)
        store.seal(t)
        rows.append((v, extra))

    def read() -> list[tuple[int, int | None]]:
        return [(r["v"], r.get("more")) for r in store.read("log").to_pylist()]

    for t in range(4):
        log(t, t)
    log(4, 4, extra=1)
    store.rewind(2, "first")
    rows = rows[:3]
    assert read() == rows
    log(3, 30)
    assert store.schema("log").names == ["v"], "the column is of what was left"
    log(4, 40, extra=7)
    merged(store)
    log(5, 50, extra=9)
    store.rewind(4, "second")
    rows = rows[:5]
    assert read() == rows
    log(5, 500, extra=8)
    merged(store)
    assert read() == rows == [(0, None), (1, None), (2, None), (30, None), (40, 7), (500, 8)]
    assert store.changes("log", 2, 5).to_pydict()["v"] == [30, 40, 500]
    assert store.read("log", branch="first").to_pydict()["v"] == [0, 1, 2, 3, 4]
    assert store.read("log", branch="second").to_pydict()["v"] == [0, 1, 2, 30, 40, 50]


def test_every_shard_goes_on_after_a_rewind_and_in_order(open_store: OpenStore) -> None:
    store = open_store()
    for t in range(3):
        for shard in range(2):
            step(store, t, numbers(**{f"s{shard}": t}), shard=shard)
        store.seal(t)
    store.rewind(1)
    with pytest.raises(nosync.OutOfOrderError, match="the next timestamp of this trace is 2"):
        step(store, 3, numbers(s0=9))
    step(store, 2, numbers(s0=9))
    with pytest.raises(nosync.NotAvailableError, match="recorded nothing at 2"):
        store.seal(2)
    assert store.read("kv", as_of=2, shard=0).to_pydict() == {"k": ["s0"], "v": [9]}, "recorded, if not sealed"
    store.seal(2, fill_missing=True)
    assert state(store) == {("s0",): (9,), ("s1",): (1,)}
    step(store, 3, numbers(s2=3), shard=2)
    store.seal(3, fill_missing=True)
    assert state(store) == {("s0",): (9,), ("s1",): (1,), ("s2",): (3,)}
    assert state(store, 2) == {("s0",): (9,), ("s1",): (1,)}
    store.seal(1)  # the same again


def test_a_branch_says_nothing_of_what_only_others_have(open_store: OpenStore) -> None:
    store = open_store()
    for t in range(4):
        step(store, t, numbers(a=t))
        if t == 3:
            store.append("late", t=t, key=["k"], rows=numbers(x=1))
        store.seal(t)
    store.rewind(1, "old")
    with pytest.raises(
        nosync.NotAvailableError, match="branch main is sealed up to 1: there is no state of stage kv as of 3"
    ):
        state(store, 3)
    with pytest.raises(
        nosync.UnknownStageError, match="branch main has no stage late at 1, which others have; its stages: kv"
    ):
        store.read("late")
    assert store.read("late", branch="old").num_rows == 1
    assert store.read("late", as_of=2, branch="old").num_rows == 0, "before its first epoch it is empty"
    assert store.compact("late") == 0
