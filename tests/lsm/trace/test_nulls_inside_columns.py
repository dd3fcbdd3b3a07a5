"""Columns whose parts were recorded as ones that are never null, and may be now."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.conftest import OpenStore

STRICT = pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string())])
TYPES = {
    "struct": (STRICT, pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}),
    "list": (pa.list_(pa.field("element", pa.int32(), nullable=False)), pa.list_(pa.int32()), [1, 2]),
    "list of structs": (pa.list_(STRICT), pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())])), [{"a": 1, "b": "x"}]),
    "map": (
        pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False)),
        pa.map_(pa.string(), pa.int32()),
        [("k", 1)],
    ),
}  # fmt: skip


def rows(t: int, type_: pa.DataType, value: object) -> pa.Table:
    words = ["a", f"w{t}"]
    return pa.table({"word": words, "s": pa.array([value, value], type_)})


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_values_are_read_as_they_were_recorded(open_store: OpenStore, kind: str, merged: bool) -> None:
    strict, loose, value = TYPES[kind]
    store = open_store(retain=100)
    for t in range(6):
        given = rows(t, loose, None if t % 2 else value) if t >= 3 else rows(t, strict, value)
        store.append("counts", t=t, rows=given, key=["word"])
        store.seal(t)
    store.sync()
    if merged:
        store.compact()
    expected = {f"w{t}": None if t in (3, 5) else value for t in range(6)} | {"a": None}
    assert {r["word"]: r["s"] for r in store.read("counts").to_pylist()} == expected
    found = store.lookup("counts", pa.table({"word": ["w1", "w4", "a"]})).to_pylist()
    assert {r["word"]: r["s"] for r in found} == {"w1": value, "w4": value, "a": None}
    assert {r["word"]: r["s"] for r in store.read("counts", as_of=2).to_pylist()}["w2"] == value
    changed = store.changes("counts", 1, 4).to_pylist()
    assert {str((r["word"], r["s"])) for r in changed} >= {str(("w2", value)), str(("w3", None)), str(("w4", value))}
