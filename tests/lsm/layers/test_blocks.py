"""Large layers are cut into blocks of some megabytes: the rows are the same, and so is the layer, however it was cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nosync
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.errors import DeterminismError
from nosync.lsm.layers import blocks
from nosync.lsm.layers.blocks import cut
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import Published, arrange, publish_rows
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId
from nosync.lsm.platform.env import Env

ROWS = 500
KEY_GROUPS = 128


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(blocks, "ONE_BLOCK_BYTES", 8000)


def wide(rows: int = ROWS, mark: str = "a") -> pa.Table:
    """Rows with text, nulls and lists."""
    return pa.table(
        {
            "k": pa.array(range(rows), pa.int64()),
            "text": [None if i % 7 == 0 else f"{mark}{i}" * (i % 5) for i in range(rows)],
            "list": [[i] * (i % 3) for i in range(rows)],
        }
    )


def published(root: Path, table: pa.Table, key: list[str], expected: Digest | None = None) -> Published:
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    id = LayerId(TraceId("kv", "raw", Shard(0)), Description.of_epoch(0))
    return publish_rows(root, id, arrange(table, key, whose="test"), KEY_GROUPS, Env(), expected)


def reader_of(root: Path, layer: Published) -> LayerReader:
    return LayerReader.open(root / "layers" / layer.id.path, Env(), layer.id)


@pytest.mark.parametrize("key", [["k"], []], ids=["keyed", "log"])
def test_a_large_layer_has_small_blocks(tmp_path: Path, key: list[str]) -> None:
    layer = published(tmp_path, wide(), key)
    reader = reader_of(tmp_path, layer)
    reader.verify()
    assert reader.block_count > 4
    found = [block.data for block in reader.blocks()]
    assert max(one.nbytes for one in found) < 3 * blocks.BLOCK_BYTES
    assert pa.Table.from_batches(found).sort_by("k").equals(wide())


def test_a_small_layer_has_one(tmp_path: Path) -> None:
    assert reader_of(tmp_path, published(tmp_path, wide(20), ["k"])).block_count == 1


@pytest.mark.parametrize("key", [["k"], []], ids=["keyed", "log"])
def test_the_layer_of_a_version_that_did_not_cut_is_the_same(tmp_path: Path, key: list[str]) -> None:
    with mock.patch.object(blocks, "ONE_BLOCK_BYTES", 1 << 40):
        before = published(tmp_path / "before", wide(), key)
        other = published(tmp_path / "other", wide(mark="b"), key)
    again = published(tmp_path / "again", wide(), key, before.digest)
    assert again.digest == before.digest, "what a sealed epoch lists is written as it was"
    found = published(tmp_path / "before", wide(), key)
    assert (found.existed, found.digest) == (True, before.digest), "an attempt that an older version made stands"
    with pytest.raises(DeterminismError, match="computed twice"):
        published(tmp_path / "before", wide(mark="b"), key)
    with pytest.raises(DeterminismError, match="the sealed epoch lists"):
        published(tmp_path / "more", wide(), key, other.digest)
    assert not list((tmp_path / "more" / "tmp").iterdir())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=300), st.integers(1, 4000))
def test_rows_of_one_hash_stay_together(values: list[int], block_bytes: int) -> None:
    hashes = np.sort(np.array(values, dtype=np.uint32))
    batch = pa.record_batch({"h": hashes, "n": np.arange(len(hashes))})
    with mock.patch.object(blocks, "BLOCK_BYTES", block_bytes):
        found = list(cut(batch, hashes))
    assert pa.Table.from_batches(found).equals(pa.Table.from_batches([batch]))
    ends = [(one["h"][0].as_py(), one["h"][-1].as_py()) for one in found]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


def test_reads_through_cut_layers(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False, grace_s=0.0)) as store:
        expected = {}
        for t in range(4):
            rows = wide(400, mark=str(t)).slice(t * 50, 300)
            store.append("kv", t=t, rows=rows, key=["k"])
            store.seal(t)
            expected |= dict(zip(rows["k"].to_pylist(), rows["text"].to_pylist(), strict=True))
            assert dict(zip(*(store.read("kv")[c].to_pylist() for c in ("k", "text")), strict=True)) == expected
        store.compact()
        assert dict(zip(*(store.read("kv")[c].to_pylist() for c in ("k", "text")), strict=True)) == expected
        asked = [0, 76, 398]
        some = store.lookup("kv", pa.table({"k": pa.array(asked, pa.int64())}))
        found = dict(zip(some["k"].to_pylist(), some["text"].to_pylist(), strict=True))
        assert found == {k: expected[k] for k in asked}
        ids = store.directory.layer_ids()
        assert any(store.directory.reader(id).block_count > 4 for id in ids if not id.is_fresh)


def test_the_hash_is_the_order(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, published(tmp_path, wide(), ["k"]))
    hashes = np.concatenate([block.hashes for block in reader.blocks()])
    assert (np.diff(hashes.astype(np.int64)) >= 0).all()
    assert set(hashes.tolist()) == set(hash32([wide()["k"].combine_chunks()]).tolist())


def with_bitmaps(table: pa.Table) -> pa.Table:
    """The same rows, with room for nulls that are not there: a slice of rows that had some."""
    nulls = pa.Table.from_arrays([pa.nulls(8, f.type) for f in table.schema], schema=table.schema)
    return pa.concat_tables([nulls, table]).combine_chunks().slice(8)


@pytest.mark.parametrize("key", [["k"], []], ids=["keyed", "log"])
@pytest.mark.parametrize("rows", [ROWS, 300, 150])
def test_how_rows_came_to_be_does_not_tell_how_they_are_cut(tmp_path: Path, key: list[str], rows: int) -> None:
    numbers = range(rows)
    structs = [{"a": i, "b": f"x{i}"} for i in numbers]
    table = pa.table({"k": numbers, "n": [i * 7 for i in numbers], "s": structs})
    for some in (blocks.ONE_BLOCK_BYTES, 12_000, 9_000):
        with mock.patch.object(blocks, "ONE_BLOCK_BYTES", some):
            one = published(tmp_path / f"{some}-one", table, key)
            other = published(tmp_path / f"{some}-other", with_bitmaps(table), key, one.digest)
            assert other.digest == one.digest


def test_nan_is_the_same_in_other_blocks(tmp_path: Path) -> None:
    table = pa.table({"k": range(ROWS), "x": [float("nan") if i % 5 == 0 else i * 0.5 for i in range(ROWS)]})
    table = table.append_column("l", pa.array([[float("nan")]] * ROWS))
    with mock.patch.object(blocks, "ONE_BLOCK_BYTES", 1 << 40):
        before = published(tmp_path, table, ["k"])
    found = published(tmp_path, table, ["k"])
    assert (found.existed, found.digest) == (True, before.digest)
