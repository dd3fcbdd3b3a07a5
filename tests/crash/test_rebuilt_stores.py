"""What is read after files were lost, flipped or listed in an odd moment: all of it, or an error that says what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.lsm.columnar.table_diff import compare
from nosync.lsm.facts.fencing import take_over
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import read_marker
from tests.conftest import OpenStore

SETTINGS = nosync.StoreSettings(background=False, retain=2, grace_s=10.0)


def put(store: nosync.Store, t: int, **rows: list[Any]) -> None:
    store.append("s", t=t, rows=pa.table(rows or {"k": [t % 3, 10 + t], "v": [t, t]}), key=["k"])
    store.seal(t)


def test_a_catalog_is_rebuilt_beside_two_merged_layers_of_the_same_epochs(open_store: OpenStore) -> None:
    store = open_store(settings=SETTINGS)
    for t in range(8):
        put(store, t)
        if t == 2:
            store.pin("p", 2)
    expected = store.read("s").sort_by("k")
    store.compact()
    store.unpin("p")
    store.sync()
    while store.node.parts.compactor.merge_once(lambda: False, whole=True):
        pass
    root = store.directory.root
    assert len([*root.rglob("*.layer")]) == 2, "the one before stays for those who read it"
    store.node.abandon()
    shutil.rmtree(root / "catalog")
    for _ in range(2):
        store = open_store(settings=SETTINGS)
        assert store.missing() == []
        assert store.read("s").sort_by("k") == expected
        store.close()


def test_any_flipped_bit_of_the_marker_is_found_or_changes_nothing(open_store: OpenStore) -> None:
    store = open_store(settings=SETTINGS)
    for shard in range(3):
        store.append("s", t=0, shard=shard, rows=pa.table({"k": [*range(shard, 300, 3)]}), key=["k"])
    store.seal(0)
    store.close()
    marker = store.directory.root / "NOSYNC"
    text, right = marker.read_bytes(), read_marker(marker.parent, Env())
    for at in range(len(text) - 1):
        for bit in (0, 4):
            marker.write_bytes(text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :])
            try:
                found = read_marker(marker.parent, Env())
            except nosync.NosyncError:
                continue
            assert found == right
    for of_an_earlier_version, is_right in ((b'"key_groups": 128', True), (b'"key_groups": 129', False)):
        head = text.partition(b', "blake3"')[0].partition(b'"key_groups"')[0]
        marker.write_bytes(head + of_an_earlier_version + b"}\n")
        with nosync.open(marker.parent, read_only=True) as reader:
            if is_right:
                assert reader.read("s").num_rows == 300
            else:
                with pytest.raises(nosync.CorruptionError, match="128 key groups, and .*NOSYNC says 129"):
                    reader.read("s")


def test_a_scrub_reads_registers(open_store: OpenStore) -> None:
    store = open_store(settings=SETTINGS)
    put(store, 0)
    take_over(store.directory.root, "main", store.directory.env)
    assert store.verify().ok
    (instance,) = (store.directory.root / "jobs" / "main").iterdir()
    instance.write_bytes(instance.read_bytes().replace(b"1", b"2", 1))
    assert str(instance) in str(store.verify().errors)


@pytest.mark.parametrize("type_", [pa.int64(), pa.float64(), pa.bool_(), pa.decimal128(22, 2), pa.string()])
def test_what_lies_under_nulls_is_not_part_of_a_layer(open_store: OpenStore, type_: pa.DataType) -> None:
    store = open_store(settings=SETTINGS)
    mask = np.array([False, True, False])
    values = [pa.array([1, n, 1]).cast(type_) for n in (0, 1)]
    hidden = [pa.Array.from_buffers(type_, 3, [pa.array(~mask).buffers()[1], *one.buffers()[1:]]) for one in values]
    assert hidden[0].equals(hidden[1])
    id = LayerId(TraceId("log", "raw", Shard(0)), Description.of_epoch(0))
    digests = []
    for column in hidden:
        published = store.directory.publish(id, arrange(pa.table({"x": column}), (), whose="log"))
        digests.append(published.digest)
        store.directory.path_of(id).unlink()
        store.directory.forget(id)
    assert digests[0] == digests[1]


def test_a_directory_that_is_listed_in_two_halves_while_it_is_merged(open_store: OpenStore) -> None:
    class Torn(Env):
        """Lists the first half before a merge and the rest after it, as the kernel may."""

        def __init__(self) -> None:
            self.now: list[str] | None = None

        def list_dir(self, path: Path) -> list[str]:
            found = super().list_dir(path)
            if self.now is not None and path.name == "0" and found:
                before, self.now = self.now, None
                return [*(name for name in before if name < "4"), *(name for name in found if name > "4")]
            return found

    store = open_store(settings=SETTINGS)
    for t in range(8):
        put(store, t)
    expected = store.read("s").sort_by("k")
    env = Torn()
    with nosync.open(store.directory.root, read_only=True) as reader:
        before = [path.name for path in store.directory.root.rglob("*.layer")]
        store.compact()
        reader.directory.env, env.now = env, before
        assert reader.read("s").sort_by("k") == expected
        assert env.now is None


def test_a_diff_keeps_keys_whatever_columns_are_called(open_store: OpenStore) -> None:
    a = pa.table({"v_a": [1, 2], "_diff": [0, 0], "v": [10, 20], "n": pa.array([None, [1]], pa.list_(pa.int64()))})
    b = a.set_column(2, "v", pa.array([10, 21]))
    found = compare(a, b, ["v_a", "_diff"], "stage s").to_pylist()
    assert [(row["v_a"], row["_diff"], row["_diff_"], row["v_a_"], row["v_b"]) for row in found] == [
        (2, 0, "changed", 20, 21)
    ]
    with pytest.raises(nosync.SchemaError, match="column 'v' is int64 on one side and string on the other"):
        compare(a, b.set_column(2, "v", pc.cast(b["v"], pa.string())), ["v_a", "_diff"], "stage s")


def test_a_dictionary_that_arrow_cannot_decode_is_an_error_of_ours(open_store: OpenStore) -> None:
    store = open_store(settings=SETTINGS)
    inside = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([[1], [2]]))
    with pytest.raises(nosync.SchemaError, match="column 'x' has type dictionary"):
        store.append("s", t=0, rows=pa.table({"k": [1, 2], "x": inside}), key=["k"])
