"""A column that comes again after a rewind, with another type, over merged layers that have the one from before."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from tests.conftest import OpenStore


def row(t: int, **more: object) -> pa.Table:
    return pa.table({"word": ["a", f"w{t}"], "n": [t, t], **{name: [value, value] for name, value in more.items()}})


def text(t: int) -> object:
    return f"text {t}"


def number(t: int) -> object:
    return t


def several(t: int) -> object:
    return {"z": t}


@pytest.mark.parametrize(("first", "then"), [(text, number), (number, text), (several, number), (number, several)])
@pytest.mark.parametrize("merged_at", ["before", "after", "both"])
def test_the_new_type_counts_and_old_rows_have_none(
    open_store: OpenStore, merged_at: str, first: Callable[[int], object], then: Callable[[int], object]
) -> None:
    store = open_store(retain=100)
    for t in range(8):
        more = {"y": first(t)} if t >= 6 else {}
        store.append("counts", t=t, rows=row(t, **more), key=["word"])
        store.seal(t)
    store.sync()
    if merged_at != "after":
        store.compact()
    store.rewind(5, "old")
    for t in (6, 7):
        store.append("counts", t=t, rows=row(t, y=then(t)), key=["word"])
        store.seal(t)
    store.sync()
    if merged_at != "before":
        store.compact()
    for _ in range(2):
        expected = {"a": then(7), **{f"w{t}": None for t in range(6)}, "w6": then(6), "w7": then(7)}
        assert {r["word"]: r["y"] for r in store.read("counts").to_pylist()} == expected
        assert {r["word"]: r["n"] for r in store.read("counts", as_of=5).to_pylist()}["w5"] == 5
        found = store.lookup("counts", pa.table({"word": ["w3", "w7", "a"]})).to_pylist()
        assert {r["word"]: r["y"] for r in found} == {"w3": None, "w7": then(7), "a": then(7)}
        changes = store.changes("counts", 4, 7).to_pylist()
        assert {str((r["word"], r["y"])) for r in changes} >= {
            str(("w5", None)),
            str(("w6", then(6))),
            str(("a", then(7))),
        }
        old = store.read("counts", branch="old").to_pylist()
        assert {r["word"]: r["y"] for r in old} == {
            "a": first(7),
            **{f"w{t}": None for t in range(6)},
            "w6": first(6),
            "w7": first(7),
        }
        store.close()
        store = open_store(retain=100)
