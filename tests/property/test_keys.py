"""Keys of every type as Spark groups by them: NaN is one key, so are the two zeros, and structs and arrays are by their parts."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.kernels.groups import Groups
from nosync.lsm.columnar.columns import keys_equal
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys, order_by_key
from tests.helpers.depth import examples
from tests.helpers.runner import Runner

NAN = math.nan
FLOATS = st.none() | st.sampled_from([NAN, 0.0, -0.0, 1.0, math.inf])
WORDS = st.none() | st.sampled_from(["", "a", "b"])
STRUCT = "struct<x:double,w:array<string>>"
KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "double": (pa.float64(), FLOATS),
    "float": (pa.float32(), FLOATS),
    "interval": (
        pa.duration("us"),
        st.none() | st.sampled_from([dt.timedelta(0), dt.timedelta(days=-1), dt.timedelta(1)]),
    ),
    "array<double>": (pa.list_(pa.float64()), st.none() | st.lists(FLOATS, max_size=2)),
    STRUCT: (
        pa.struct([("x", pa.float64()), ("w", pa.list_(pa.string()))]),
        st.none() | st.fixed_dictionaries({"x": FLOATS, "w": st.none() | st.lists(WORDS, max_size=2)}),
    ),
}


def plainly(value: Any) -> Any:
    """A value that Python finds equal where Spark does."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple(plainly(value[name]) for name in sorted(value))
    return tuple(map(plainly, value)) if isinstance(value, list) else value


def colliding(columns: Sequence[pa.Array]) -> U32:
    """Few hashes, so that different keys have the same."""
    return hash32(columns) % np.uint32(3)


@pytest.mark.parametrize("name", KEYS)
@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_equality_order_and_groups(name: str, data: st.DataObject) -> None:
    type_, values = KEYS[name]
    given_values = data.draw(st.lists(values, max_size=12))
    column = pa.array([None, *given_values], type_).slice(1)  # not at the beginning of its buffers
    keys = [plainly(v) for v in column.to_pylist()]
    n = len(keys)
    left, right = (i.ravel() for i in np.meshgrid(np.arange(n), np.arange(n)))
    assert keys_equal([column], left, [column], right).tolist() == [
        keys[i] == keys[j] for i, j in zip(left, right, strict=True)
    ]
    for hasher in (hash32, colliding):
        hashes = hasher([column])
        assert all(hashes[i] == hashes[j] for i in range(n) for j in range(n) if keys[i] == keys[j])
        order, same = order_by_key(hashes, [column])
        found = [keys[i] for i in order]
        assert same.tolist() == [a == b for a, b in itertools.pairwise(found)]
        assert sum(not s for s in same) + (n > 0) == len(set(keys)), "rows of one key stand together"
        groups = Groups.of([column], hashes)
        assert sorted(groups.sizes.tolist()) == sorted(keys.count(k) for k in set(keys))
        once = column.take(pa.array(groups.first))
        at = match_keys(hashes[groups.first], [once], hashes[groups.first], [once])
        assert at.tolist() == list(range(len(groups)))


@pytest.mark.parametrize("name", KEYS)
@given(st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_store_keeps_the_newest_of_each_key(name: str, data: st.DataObject) -> None:
    """Appended, deleted, merged, looked up, read as changes."""
    type_, values = KEYS[name]
    epochs = data.draw(st.lists(st.lists(values, max_size=4, unique_by=plainly), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as root:
        settings_ = nosync.StoreSettings(background=False)
        with nosync.open(Path(root) / "s", settings=settings_, hasher=colliding, key_groups=1) as store:
            state: dict[Any, int] = {}
            for t, keys in enumerate(epochs):
                column = pa.array(keys, type_)
                gone = [i for i, k in enumerate(keys) if plainly(k) in state and t % 2]
                kept = [i for i in range(len(keys)) if i not in gone]
                rows = pa.table({"k": column.take(pa.array(kept, pa.int64())), "v": pa.repeat(t, len(kept))})
                deletes = pa.table({"k": column.take(pa.array(gone, pa.int64()))})
                store.append("s", t=t, rows=rows, deletes=deletes, key=["k"])
                store.seal(t)
                for i in gone:
                    del state[plainly(keys[i])]
                state |= {plainly(keys[i]): t for i in kept}
            for merged in (False, True):
                if merged:
                    store.compact()
                found = store.read("s").to_pylist()
                assert {plainly(r["k"]): r["v"] for r in found} == state
                assert len(found) == len(state)
                asked = pa.array([r["k"] for r in found], type_)
                assert repr(store.lookup("s", pa.table({"k": asked})).to_pylist()) == repr(found)
                if not merged:
                    balance: dict[Any, int] = {}
                    for row in store.changes("s", -1, len(epochs) - 1).to_pylist():
                        sign = 1 if row["_change_type"] in ("insert", "update_postimage") else -1
                        balance[plainly(row["k"])] = balance.get(plainly(row["k"]), 0) + sign
                    assert {k for k, n in balance.items() if n} == state.keys()


def newest(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Of each key that changed, how many rows its last batch had; asked of whole groups, as `update` gives them."""
    groups = Groups.of([changes["k"].combine_chunks()], hash32([changes["k"].combine_chunks()]))
    return pa.table({"k": changes["k"].take(pa.array(groups.first)), "rows": pa.array(groups.sizes)})


@pytest.mark.few(2, "make properties")
@pytest.mark.parametrize("name", KEYS)
@given(st.data())
@settings(max_examples=examples(10), deadline=None)
def test_operators_group_by_them(name: str, data: st.DataObject) -> None:
    type_, values = KEYS[name]
    epochs = data.draw(st.lists(st.lists(st.tuples(values, st.integers(0, 2)), max_size=6), min_size=1, max_size=4))
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", f"k {name}, v bigint")
    counted = rows.aggregate("counted", key=["k"], n=nosync.count(), s=nosync.sum("v"))
    counted.aggregate("by_number", key=["n"], keys=nosync.count())
    rows.dedupe("whole")
    rows.dedupe("first", key=["k"]).join("joined", counted.map("bare", bare), on=["k"])
    rows.update("newest", key=["k"], state="rows bigint", fn=newest)
    counted.dedupe("again", key=["k"])
    with tempfile.TemporaryDirectory() as root:
        runner = Runner(flow, Path(root) / "s", 1)
        there: list[tuple[Any, int]] = []
        for t, of_epoch in enumerate(epochs):
            columns = list(zip(*of_epoch, strict=True)) or [(), ()]
            runner.advance(t, pa.table({"k": pa.array(columns[0], type_), "v": pa.array(columns[1], pa.int64())}))
            there += [(plainly(pa.scalar(k, type_).as_py()), v) for k, v in of_epoch]
            sums = {k: (sum(key == k for key, _ in there), sum(v for key, v in there if key == k)) for k, _ in there}
            for stage in ("counted", "again"):
                found = [(plainly(r["k"]), (r["n"], r["s"])) for r in runner.read(stage, t).to_pylist()]
                assert sorted(found, key=repr) == sorted(sums.items(), key=repr)
            whole = [(plainly(r["k"]), r["v"]) for r in runner.read("whole", t).to_pylist()]
            assert sorted(whole, key=repr) == sorted(set(there), key=repr)
            joined = {plainly(r["k"]): r["total"] for r in runner.read("joined", t).to_pylist()}
            assert joined == {k: s for k, (_, s) in sums.items() if k is not None}
            numbers = {r["n"]: r["keys"] for r in runner.read("by_number", t).to_pylist()}
            counts = [n for n, _ in sums.values()]
            assert numbers == {n: counts.count(n) for n in counts}


def bare(rows: pa.Table) -> pa.Table:
    columns = {"k": rows["k"], "total": rows["s"], "_change_type": rows["_change_type"]}
    return pa.table(columns)
