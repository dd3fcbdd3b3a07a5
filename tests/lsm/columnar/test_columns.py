"""Equal rows become equal bytes, whatever they were cut from."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nosync.lsm.columnar.columns import as_array, joined
from nosync.lsm.errors import SchemaError
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.trace.directory import LayerDirectory

ROWS = 8
COLUMNS: dict[str, pa.Array] = {
    "ints": pa.array([*range(ROWS)]),
    "some ints": pa.array([None, 1] * (ROWS // 2)),
    "texts": pa.array(["a", "bb", None, ""] * (ROWS // 4)),
    "large texts": pa.array(["a", "bb", None, ""] * (ROWS // 4), pa.large_string()),
    "bytes": pa.array([b"a", None] * (ROWS // 2)),
    "two bytes": pa.array([b"ab"] * ROWS, pa.binary(2)),
    "flags": pa.array([True, None, False, False] * (ROWS // 4)),
    "lists": pa.array([[1, 2], [3], None, []] * (ROWS // 4)),
    "lists of lists of texts": pa.array([[["x"], []], [["yy"]], None, []] * (ROWS // 4)),
    "pairs": pa.array([[1, 2]] * ROWS, pa.list_(pa.int64(), 2)),
    "structs of flags": pa.array([{"a": True}, {"a": None}, {"a": False}, {"a": True}] * (ROWS // 4)),
    "structs": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "yy"}, {"a": 3, "b": None}] * (ROWS // 4)),
    "maps": pa.array([[("a", 1)], [], None, [("b", None)]] * (ROWS // 4), pa.map_(pa.string(), pa.int64())),
    "decimals": pa.array([decimal.Decimal("1.5")] * ROWS),
    "times": pa.array([datetime.datetime(2013, 7, 4)] * ROWS),
    "nothing": pa.nulls(ROWS),
}


for name in list(COLUMNS):
    COLUMNS[f"many {name}"] = pa.concat_arrays([COLUMNS[name]] * 5)


def as_written(table: pa.Table) -> pa.Table:
    """As it comes from another process."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(stream.getvalue()).read_all()


@pytest.mark.parametrize("name", COLUMNS)
def test_a_slice_is_written_as_what_it_is(name: str, tmp_path: Path) -> None:
    whole = pa.table({"c": COLUMNS[name]})
    rows = len(whole)

    def digest(rows: pa.Table, t: int) -> str:
        id = LayerId(TraceId("log", "raw", Shard(0)), Description.of_epoch(0))
        (tmp_path / str(t) / "tmp").mkdir(parents=True)
        return LayerDirectory(tmp_path / str(t), 128).publish(id, arrange(rows, (), whose="")).digest

    ranges = [(0, rows), (0, 5), (0, 1), (3, 5), (rows // 2, rows // 4), (rows - 1, 1), (5, 0)]
    for n, (first, count) in enumerate(ranges):
        alone: Any = whole.take(pa.array(np.arange(first, first + count)))
        expected = digest(alone, 10 * n)
        assert digest(whole.slice(first, count), 10 * n + 1) == expected
        assert digest(as_written(whole).slice(first, count), 10 * n + 2) == expected
        assert digest(as_written(alone), 10 * n + 3) == expected
        assert digest(pa.concat_tables([alone.slice(0, 2), alone.slice(2)]), 10 * n + 4) == expected


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    texts = pa.array(["a", None, "what is longer than twelve bytes"])
    stored = arrange(pa.table({"c": texts.cast(pa.string_view())}), (), whose="").batch
    assert stored.column(0).equals(texts.cast(pa.large_string()))
    assert arrange(pa.table({"c": pa.array([b"a"], pa.binary_view())}), (), whose="").batch.column(0).to_pylist() == [
        b"a"
    ]
    with pytest.raises(SchemaError, match="'c' has type list_view.*cannot be stored: cast it"):
        arrange(pa.table({"c": pa.array([[1]], pa.list_view(pa.int64()))}), (), whose="")


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_in_stored_order_are_written_as_rows_in_any_order(name: str, tmp_path: Path) -> None:
    """Where nothing has to be moved, what is there is taken."""
    column = COLUMNS[name]
    rows = pa.table({"key": np.arange(len(column)), "value": column})
    hashes = np.arange(len(column), dtype=np.uint32)
    whole, extra = (rows, hashes), pa.concat_tables([rows.slice(3, 2), rows, rows.slice(0, 1)]).combine_chunks()
    shuffled = np.random.default_rng(7).permutation(len(column))
    cases = [whole, (rows.take(pa.array(shuffled)), hashes[shuffled]), (as_written(rows), hashes)]
    cases += [(extra.slice(2, len(column)), hashes), (as_written(extra).slice(2, len(column)), hashes)]
    digests = set()
    for n, (case, of_case) in enumerate(cases):
        id = LayerId(TraceId("keyed", "sums", Shard(0)), Description.of_epoch(0))
        (tmp_path / str(n) / "tmp").mkdir(parents=True)
        layer = arrange(case, ("key",), whose="", hashes=of_case)
        digests.add(LayerDirectory(tmp_path / str(n), 128).publish(id, layer).digest)
    assert len(digests) == 1


@pytest.mark.parametrize("type_", [pa.string(), pa.binary()])
def test_more_values_than_one_piece_can_have_are_told(type_: pa.DataType) -> None:
    size_bytes = 1_500_000_000  # of zeros, of which no page is touched
    offsets = pa.py_buffer(np.array([0, size_bytes], np.int32).tobytes())
    half = pa.Array.from_buffers(type_, 1, [None, offsets, pa.py_buffer(np.zeros(size_bytes, np.uint8))])
    for join in (lambda: joined([half, half], type_), lambda: as_array(pa.chunked_array([half, half]))):
        with pytest.raises(SchemaError, match=f"more than 2 GiB of values.*make it large_{type_}"):
            join()
    assert joined([], type_).to_pylist() == []
