"""Damage that is found when a store is opened: torn layers and manifests, flipped bits, a lost catalog."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import nosync
from nosync.testing import crash
from tests.conftest import OpenStore
from tests.helpers.stores import filled, one_more, snapshot, words


def _layer_files(store: nosync.Store) -> list[Path]:
    return [Path(layer.path) for layer in store.layers()]


def test_a_torn_layer_is_quarantined_and_named(open_store: OpenStore) -> None:
    with filled(open_store) as store:
        victim = _layer_files(store)[2]
    victim.write_bytes(victim.read_bytes()[:100])
    with open_store() as store:
        (missing,) = store.missing()
        assert (missing.t, missing.entry.id.trace.stage) == (2, "counts")
        assert store.safe_point() == 1
        assert [p.name for p in (store.directory.root / "quarantine").iterdir() if "2-3-0.layer" in p.name]
        assert store.read("counts", as_of=1).num_rows == 3
        with pytest.raises(nosync.HoleError, match=r"\[2, 3\) are missing"):
            store.read("counts", as_of=3)
        store.append("counts", t=2, rows=words(a=2, w2=1))  # what was lost can be recorded again ...
        store.sync()
        assert store.safe_point() == 3
        assert store.read("counts", as_of=3).num_rows == 5


def test_a_lost_layer_can_only_come_back_as_it_was(open_store: OpenStore) -> None:
    with filled(open_store) as store:
        _layer_files(store)[2].unlink()
    with open_store() as store:
        with pytest.raises(nosync.DeterminismError, match="the sealed epoch lists"):
            store.append("counts", t=2, rows=words(a=77))
        store.node.make_durable_now()
        assert store.safe_point() == 1, "the manifest's digest is not there"


def test_flipped_bits_raise_on_read_and_verify_names_the_file(open_store: OpenStore) -> None:
    store = filled(open_store)
    victim = _layer_files(store)[1]
    store.close()
    data = bytearray(victim.read_bytes())
    data[200] ^= 4
    victim.write_bytes(data)
    with open_store() as store:
        report = store.verify()
        assert not report.ok
        assert str(victim) in report.errors[0]
        with pytest.raises(nosync.CorruptionError, match=str(victim)):
            store.read("counts", as_of=3)
        assert len(store.node.check()) == 1
        assert [m.t for m in store.missing()] == [1]


@pytest.mark.parametrize("damage", ["gone", "emptied", "garbled", "foreign"])
def test_the_catalog_is_rebuilt_from_the_files(open_store: OpenStore, tmp_path: Path, damage: str) -> None:
    with filled(open_store, 6) as store:
        store.compact()
        store.append("counts", t=6, rows=words(z=1))
        store.seal(6)
        before = snapshot(store)
    path = tmp_path / "store" / "catalog"
    if damage == "gone":
        shutil.rmtree(path)
    elif damage == "foreign":
        with filled(open_store, 2, name="foreign"):
            pass
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "foreign" / "catalog", path)
    else:
        for file in path.iterdir():
            if file.is_file():
                file.write_bytes(b"" if damage == "emptied" else os.urandom(file.stat().st_size))
    with open_store() as store:
        assert snapshot(store) == before
        assert store.safe_point() == 6
        assert {layer.level for layer in store.layers()} == {"disk"}
        assert not store.missing()


def test_a_power_cut_may_take_the_last_records_of_the_catalog(open_store: OpenStore, tmp_path: Path) -> None:
    """What was acknowledged still is when the store is open again: files were synced, and are taken up before anything
    else.
    """
    now, earlier = tmp_path / "store" / "catalog", tmp_path / "earlier"
    with filled(open_store, 4) as store:
        pass
    shutil.copytree(now, earlier)
    store = open_store()
    for t in range(4, 7):
        one_more(store, t)
    store.sync()
    assert store.safe_point() == 6
    before, incarnation = snapshot(store), store.node.incarnation
    crash(store)
    shutil.rmtree(now)
    shutil.copytree(earlier, now)
    with open_store() as store:
        assert (store.safe_point(), store.node.incarnation) == (6, incarnation)
        assert snapshot(store) == before
        assert not store.missing()
        assert not store.node.problems


def test_a_torn_manifest_takes_its_epoch_out_of_the_safe_point(open_store: OpenStore, tmp_path: Path) -> None:
    with filled(open_store):
        pass
    path = tmp_path / "store" / "manifests" / "main" / "3.json"
    path.write_bytes(path.read_bytes()[:50])
    with open_store() as store:
        assert store.safe_point() == 2
        store.seal(3)
        store.sync()
        assert store.safe_point() == 3


def test_left_overs_of_a_dead_process_are_removed(open_store: OpenStore, tmp_path: Path) -> None:
    with filled(open_store):
        pass
    (tmp_path / "store" / "tmp" / "deadbeef").write_bytes(b"half a layer")
    with open_store() as store:
        assert not list((store.directory.root / "tmp").iterdir())


def test_a_file_that_is_no_layer_is_reported_and_left(open_store: OpenStore) -> None:
    store = filled(open_store)
    stranger = store.directory.root / "layers" / "counts" / "raw" / "0" / "notes.txt"
    stranger.write_text("mine")
    assert snapshot(store)
    assert any("notes.txt" in error for error in store.verify().errors)
    store.compact()
    assert stranger.exists()
