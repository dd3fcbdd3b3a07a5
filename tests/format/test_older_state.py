"""Stores that versions before wrote: their aggregates are read as they are, and go on."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import nosync
from nosync.flow.meanings import Meanings
from tests.helpers.oracles import state_of
from tests.helpers.runner import StoreRunner

GOLDEN = Path(__file__).parent / "golden" / "v1-aggregates.zip"
"""A store of `flow_of_before` with the rows of EPOCHS, by the version before sums had 128 bits."""
NAN, INF = math.nan, math.inf
Row = tuple[str, int, int, int, float]
EPOCHS: list[list[Row]] = [
    [("a", 1, 0, 5, 1.5), ("a", 2, 0, -7, 2.5), ("b", 1, 0, 2**62, 3.0)],
    [("a", 1, 1, 6, NAN), ("b", 2, 1, -(2**62), -1.0), ("c", 1, 1, 1, 4.0)],
    [("a", 1, 2, 8, 7.5), ("c", 2, 2, 2, INF), ("c", 1, 2, 3, 5.0)],
]


def table_of(rows: list[Row]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 5
    types = (pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.float64())
    names = ("word", "id", "v", "n", "x")
    return pa.table({n: pa.array(c, t) for n, c, t in zip(names, columns, types, strict=True)})


def flow_of_before() -> nosync.Dataflow:
    """Aggregates over rows that only come, and over rows that change. No functions, whose bytecode Python versions
    differ in.
    """
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "word string, id bigint, v bigint, n bigint, x double")
    functions = {
        f"{name}_{column}": function(column)
        for column in ("n", "x")
        for name, function in (
            ("sum", nosync.sum), ("mean", nosync.mean), ("var", nosync.variance), ("max", nosync.max),
        )
    }  # fmt: skip
    rows.aggregate("growing", key=["word"], rows=nosync.count(), **functions)
    newest = rows.aggregate("newest", key=["word", "id"], n=nosync.last("n", by="v"), x=nosync.last("x", by="v"))
    newest.aggregate("changing", key=["word"], rows=nosync.count(), **functions)
    return flow


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with zipfile.ZipFile(GOLDEN) as packed:
        packed.extractall(tmp_path / "older")
    return tmp_path / "older"


NOT_BACKGROUND = nosync.StoreSettings(background=False)


def runner_of(store: nosync.Store) -> StoreRunner:
    runner = StoreRunner(flow_of_before(), store, 1)
    runner._begin_spans(len(EPOCHS))
    return runner


def test_fingerprints_are_those_of_before(older: Path) -> None:
    with nosync.open(older, settings=NOT_BACKGROUND) as store:
        bound = runner_of(store).flow
        recorded = {layer.stage: layer.fingerprint for layer in store.layers()}
        assert recorded == {name: bound.stages[name].fingerprint for name in ("rows", "growing", "newest", "changing")}


@pytest.mark.parametrize("merged", [False, True])
def test_state_of_before_goes_on(older: Path, merged: bool) -> None:
    """Whole numbers pass 64 bits and come back; values that are not finite go."""
    with nosync.open(older, settings=NOT_BACKGROUND) as store:
        runner = runner_of(store)
        if merged:
            store.compact()
        found = state_of(store.read("changing"), ["word"])
        assert found[("b",)] == (2, 0, 0.0, 2.0**125, 2**62, 2.0, 1.0, 8.0, 3.0)
        assert found[("c",)][1:5] == (5, 2.5, 0.5, 3)
        assert found[("c",)][5] == INF

        more: list[list[Row]] = [
            [("b", i, 3, 2**60, 1.0) for i in (3, 4, 5)],
            [("b", i, 4, -1, INF) for i in (3, 4)],
            [("b", i, 5, 1, 2.0) for i in (3, 4)],
        ]
        for t, rows in enumerate(more, len(EPOCHS)):
            runner.advance(t, table_of(rows))
        found = state_of(store.read("changing"), ["word"])[("b",)]
        assert found[:3] == (5, 2**60 + 2, (2**60 + 2) / 5)
        assert found[5:7] == (2.0 + 4.0 + 1.0, 7.0 / 5)
        growing = state_of(store.read("growing"), ["word"])[("b",)]
        assert (growing[1], growing[5]) == (3 * 2**60, INF)
        # What was NaN before stays so: how many were was not recorded.
        runner.advance(t + 1, table_of([("a", 1, 9, 0, 1.0), ("c", 2, 9, 2, 1.0)]))
        found = state_of(store.read("changing"), ["word"])
        assert found[("a",)][:2] == (2, -7)
        assert all(math.isnan(found[(word,)][5]) for word in "ac")
        with pytest.raises(nosync.StageError, match=r"sum_n, sum\(n\), of key {'word': 'b'} is \d{19,}, beyond"):
            runner.advance(t + 2, table_of([("b", 9, 9, 2**62, 1.0), ("b", 10, 9, 2**62 - 2**60 - 2, 1.0)]))


@pytest.mark.parametrize("stage", ["growing", "changing"])
def test_a_lost_layer_of_before_is_computed_again_bit_for_bit(older: Path, tmp_path: Path, stage: str) -> None:
    """Also where sums are now made in another way."""
    with nosync.open(older, settings=NOT_BACKGROUND) as store:
        recorded = {(e.stage, e.shard, e.lower): e.digest for e in _entries(store)}
    with nosync.open(tmp_path / "again", settings=NOT_BACKGROUND) as store:
        runner = StoreRunner(flow_of_before(), store, 2, meanings=Meanings(unnamed={"rows"}))
        for t, given in enumerate(EPOCHS):
            runner.advance(t, table_of(given))
        digests = {(e.stage, e.shard, e.lower): e.digest for e in _entries(store)}
    same = {k for k in recorded if recorded[k] == digests[k]}
    # Values that are not finite are counted from now on, over rows that change. A NaN is the largest over all rows.
    assert {k[0] for k in recorded.keys() - same} <= {"changing", "growing"}
    assert {k for k in recorded if k[0] == stage and k[2] == 0} <= same


def _entries(store: nosync.Store) -> list[Any]:
    return [
        _Recorded(e.id.trace.stage, str(e.id.trace.shard), e.id.description.lower, e.digest)
        for manifest in store.node.timelines.manifests("main").values()
        for e in manifest.entries
    ]


class _Recorded(NamedTuple):
    stage: str
    shard: str
    lower: int
    digest: str
