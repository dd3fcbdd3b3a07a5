"""Rows of every kind of stage, looked up by their keys, as they are read."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.runner import StoreRunner

AT = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)


def given(t: int) -> dict[str, pa.Table]:
    at = [AT + datetime.timedelta(minutes=7 * t + i * 11 % 60) for i in range(120)]
    keys = [["a", "b", None, "ü"][i % 4] for i in range(120)]
    rows = pa.table({"k": keys, "v": pa.array(range(120), pa.int64()), "at": pa.array(at, pa.timestamp("us", "UTC"))})
    return {"rows": rows}


def sessions(key: list[str]) -> Callable[[nosync.Stage], nosync.Stage]:
    return lambda rows: rows.window("out", key=key, time="at", gap="2 minutes", watermark="1 hour", n=nosync.count())


KINDS: dict[str, Callable[[nosync.Stage], Any]] = {
    "sums": lambda rows: rows.aggregate("out", key=["k", "v"], n=nosync.count()),
    "windows": lambda rows: rows.window(
        "out", key=["k"], time="at", size="5 minutes", watermark="1 hour", n=nosync.count()
    ),
    "sessions": sessions(["k"]),
    "sessions of two columns": sessions(["k", "v"]),
    "once": lambda rows: rows.dedupe("out", key=["k", "v"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_row_is_found_by_its_key(kind: str, shards: int, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    KINDS[kind](flow.source("rows", "k string, v bigint, at timestamp"))
    store = open_store()
    for t in range(3):
        StoreRunner(flow, store, t, shards=shards).advance(t, given(t))
    for t in range(3):
        there = store.read("out", t)
        assert there.num_rows > 1
        key = list(store.key("out") or ())
        backwards = there.take(pa.array(range(there.num_rows - 1, -1, -1)))
        assert store.lookup("out", backwards.select(key), t).to_pylist() == backwards.to_pylist()
        absent = (
            [f"{value}?" if isinstance(value, str) else value for value in there["k"].to_pylist()]
            if "k" in key
            else None
        )
        if absent is not None:
            wrong = there.select(key).set_column(key.index("k"), "k", pa.array(absent, pa.string()))
            found = store.lookup("out", wrong, t)
            assert found.num_rows == sum(value is None for value in absent)
