"""Rows that go to their shards by files: each shard gets its own, whatever batches they come in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosync.lsm.columnar.hashing import hash32, key_groups_of
from nosync.lsm.errors import StorageError
from nosync.lsm.model.layer import Shard
from nosync.runtime.file_shuffle import Exchange, Placement, write_by_shard

SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("name", pa.string()), pa.field("parts", pa.list_(pa.int32()))])
VALUES = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(max_size=5),
    st.none() | st.lists(st.integers(-5, 5), max_size=3),
)


def batch_of(rows: list[tuple[int | None, str | None, list[int] | None]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)


def rows_in(exchange: Exchange, shard: int) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for batch in exchange.rows_of(shard) for row in batch.to_pylist()]


@given(
    batches=st.lists(st.lists(VALUES, max_size=8), max_size=5),
    shards=st.sampled_from([1, 2, 3, 7]),
    key_groups=st.sampled_from([7, 128, 1 << 15]),
    files=st.integers(1, 3),
)
def test_a_shard_gets_the_rows_of_its_key_groups(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[int | None, str | None, list[int] | None]]],
    shards: int,
    key_groups: int,
    files: int,
) -> None:
    root = tmp_path_factory.mktemp("exchange")
    placement, written = Placement(shards, key_groups, ["k"]), []
    for i in range(files):
        mine = [batch_of(rows) for rows in batches[i::files]]
        count = write_by_shard(mine, placement, root / str(i))
        assert count == sum(len(rows) for rows in batches[i::files])
        assert (root / str(i)).exists() == bool(count)
        if count:
            written.append(root / str(i))
    exchange = Exchange(written, shards)
    given_rows = [row for rows in batches for row in rows]
    for shard in range(shards):
        groups = Shard(shard, shards).groups(key_groups)
        expected = []
        for row in given_rows:
            (group,) = key_groups_of(hash32([pa.array([row[0]], pa.int64())]), key_groups)
            if group in groups:
                expected.append(row)
        assert sorted(map(repr, rows_in(exchange, shard))) == sorted(map(repr, expected))


def test_the_last_column_says_where_rows_go_and_goes_no_further(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"v": pa.array(range(1000)), "__shard": pa.array([i % 300 for i in range(1000)])})
    assert write_by_shard([rows], Placement(301, 1 << 15, []), tmp_path / "f") == 1000
    exchange = Exchange([tmp_path / "f"], 301)
    for shard in range(300):
        assert rows_in(exchange, shard) == [(i,) for i in range(shard, 1000, 300)]
    assert rows_in(exchange, 300) == []


def test_most_shards_that_there_can_be(tmp_path: Path) -> None:
    count = 1 << 15
    rows = pa.RecordBatch.from_pydict({"v": pa.array([7, 8]), "__shard": pa.array([count - 1, 0], pa.int32())})
    write_by_shard([rows], Placement(count, count, []), tmp_path / "f")
    exchange = Exchange([tmp_path / "f"], count)
    assert (rows_in(exchange, 0), rows_in(exchange, count - 1)) == ([(8,)], [(7,)])


def test_rows_stay_readable_after_their_file_is_deleted(tmp_path: Path) -> None:
    values = np.arange(100_000)
    write_by_shard([pa.RecordBatch.from_pydict({"k": values})], Placement(1, 128, ["k"]), tmp_path / "f")
    (rows,) = Exchange([tmp_path / "f"], 1).rows_of(0)
    (tmp_path / "f").unlink()
    assert (rows.column("k").to_numpy() == values).all()


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "other"])
def test_a_file_that_is_not_as_it_was_written_is_an_error_that_says_so(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "f"
    write_by_shard([pa.RecordBatch.from_pydict({"k": np.arange(1000)})], Placement(2, 128, ["k"]), path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": path.read_bytes()[:-200], "other": b"x" * 3000}[damage])
    with pytest.raises(StorageError, match=r"cannot read rows on their way to their shards, in .*/f: .*"):
        list(Exchange([path], 2).rows_of(1))


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"k": np.arange(1000)})
    with pytest.raises(
        StorageError, match="cannot write rows on their way to their shards, in .*/none/f: .*No such file"
    ):
        write_by_shard([rows], Placement(2, 128, ["k"]), tmp_path / "none" / "f")
    with pytest.raises(StorageError, match="No space left on device; the disk is full: free space"):
        write_by_shard([rows], Placement(2, 128, ["k"]), Path("/dev/full"))
