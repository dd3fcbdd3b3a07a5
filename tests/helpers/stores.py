"""A store of words, as many tests fill and look at it."""

from __future__ import annotations

import pyarrow as pa

import nosync
from tests.conftest import OpenStore


def keys(*names: str) -> pa.Table:
    return pa.table({"word": pa.array(names, pa.string())})


def words(**counts: int) -> pa.Table:
    return pa.table({"word": pa.array(counts, pa.string()), "n": pa.array(counts.values(), pa.int64())})


def filled(open_store: OpenStore, epochs: int = 4, **options: object) -> nosync.Store:
    store = open_store(**options)
    for t in range(epochs):
        store.append("counts", t=t, rows=words(a=t, **{f"w{t}": 1}), key=["word"])
        store.seal(t)
    return store


def snapshot(store: nosync.Store) -> list[object]:
    return [store.read("counts", as_of=t).to_pylist() for t in range(store.since(), (store.last_sealed() or 0) + 1)]


def one_more(store: nosync.Store, t: int) -> None:
    store.append("counts", t=t, rows=words(**{f"w{t}": t}), key=["word"])
    store.seal(t)
