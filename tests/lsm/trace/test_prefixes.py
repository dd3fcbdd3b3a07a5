"""Rows that are hashed by the first columns of their key alone, as sessions and sides of joins are, against a dict."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import last_of, pack
from nosync.lsm.trace import trace as traces
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace
from tests.helpers.depth import examples

TRACE = TraceId("s", "raw", Shard(0))
WHO, BEGIN, END = st.integers(0, 3), st.integers(0, 5), st.none() | st.integers(0, 9)
EPOCH = st.dictionaries(st.tuples(WHO, BEGIN), st.just("gone") | END, max_size=12)
TIME = pa.timestamp("us", "UTC")


def _columns(keys: list[tuple[int, int]]) -> dict[str, pa.Array]:
    who, begin = ([key[i] for key in keys] for i in (0, 1))
    return {"who": pa.array(who, pa.int64()), "begin": pa.array(begin, pa.int64()).cast(TIME)}


def _recorded(root: Path, history: list[dict[tuple[int, int], int | str | None]]) -> LayerDirectory:
    (root / "tmp").mkdir(parents=True)
    directory = LayerDirectory(root, 8)
    for t, epoch in enumerate(history):
        there = {key: end for key, end in epoch.items() if end != "gone"}
        gone = [key for key, end in epoch.items() if end == "gone"]
        rows = pa.table({**_columns(list(there)), "end": pa.array(there.values(), pa.int64()).cast(TIME)})
        hashes = hash32([pa.array([who for who, _ in [*there, *gone]], pa.int64())])
        deletes = pa.table(_columns(gone))
        layer = arrange(rows, ["who", "begin"], whose="test", deletes=deletes, hashes=hashes)
        directory.publish(LayerId(TRACE, Description.of_epoch(t)), layer)
    return directory


def _rows(batch: pa.RecordBatch) -> dict[tuple[int, int], int | None]:
    who, begin, end = (batch.column(name).cast(pa.int64()).to_pylist() for name in ("who", "begin", "end"))
    found = dict(zip(zip(who, begin, strict=True), end, strict=True))
    assert len(found) == len(batch), "each key once"
    return found


@given(st.lists(EPOCH, min_size=1, max_size=6), st.sampled_from([0, 1, 32]), st.integers(1, 6), st.data())
@settings(max_examples=examples(150))
def test_rows_of_a_prefix_are_those_of_a_dict(
    history: list[dict[tuple[int, int], int | str | None]], steps: int, block_rows: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root, patch.object(traces, "_STEPS", steps):
        directory = _recorded(Path(root) / "x", history)
        layers, merged = [Description.of_epoch(t) for t in range(len(history))], data.draw(st.integers(0, len(history)))
        if merged > 1:
            taken = [directory.reader(LayerId(TRACE, d)) for d in layers[:merged]]
            merge = Merge(directory.root, taken, since=pack(0), bottom=True, env=directory.env, block_rows=block_rows)
            list(merge.steps())
            layers[:merged] = [merge.id.description]
        trace = Trace(TRACE, [directory.reader(LayerId(TRACE, d)) for d in layers], directory.key_groups)
        asked = data.draw(st.lists(WHO, min_size=1, unique=True))
        prefix = [pa.array(asked, pa.int64())]
        above = data.draw(st.integers(-1, 9))
        state: dict[tuple[int, int], int | None] = {}
        for t, epoch in enumerate(history):
            for key, end in epoch.items():
                state.pop(key, None)
                if end != "gone":
                    assert not isinstance(end, str)
                    state[key] = end
            mine = {key: end for key, end in state.items() if key[0] in asked}
            assert _rows(trace.lookup_prefix(prefix, hash32(prefix), last_of(t))) == mine
            later = {key: end for key, end in mine.items() if end is not None and end > above}
            assert _rows(trace.lookup_prefix_above(prefix, hash32(prefix), "end", above, last_of(t))) == later
            every = [(who, begin) for who in range(4) for begin in range(6)] * 2
            columns = _columns(every)
            answer = trace.lookup(list(columns.values()), hash32([columns["who"]]), last_of(t))
            assert [key for key, hit in zip(every, answer.found, strict=True) if hit] == [
                k for k in every if k in state
            ]
            assert answer.data.column("end").cast(pa.int64()).to_pylist() == [state[k] for k in every if k in state]


def test_many_rows_of_one_hash_are_found_at_once() -> None:
    """Stepping down row by row would take as many steps as there are rows."""
    n = 50_000
    with tempfile.TemporaryDirectory() as root:
        directory = _recorded(Path(root) / "x", [{(1, i): i for i in range(n)}])
        trace = Trace(TRACE, [directory.reader(LayerId(TRACE, Description.of_epoch(0)))], directory.key_groups)
        columns = _columns([(1, i) for i in range(0, n, 1000)])
        calls = []
        real = traces.keys_equal

        def counted(*given: object) -> object:
            calls.append(1)
            return real(*given)  # type: ignore[arg-type]

        with patch.object(traces, "keys_equal", counted):
            answer = trace.lookup(list(columns.values()), hash32([columns["who"]]), last_of(0))
        assert answer.data.column("end").cast(pa.int64()).to_pylist() == list(range(0, n, 1000))
        assert len(calls) <= traces._STEPS
        assert np.all(answer.found)
