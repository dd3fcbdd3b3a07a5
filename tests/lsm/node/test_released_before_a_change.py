"""Inputs that were released before branches, rewinds and promotions are gone, and are not lost: nothing misses them, copies are
whole, and the safe point goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import nosync
from nosync.lsm.platform.layout import RELEASED
from nosync.lsm.store.backup import backup
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from tests.conftest import OpenStore
from tests.lsm.node.test_input_release import files, manual, node_of, run

Change = Callable[[nosync.Store], object]


def released(open_store: OpenStore, epochs: int = 5) -> nosync.Store:
    store = manual(open_store)
    for t in range(epochs):
        run(store, t)
    store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == []
    return store


def branch(store: nosync.Store) -> None:
    store.node.create_branch("b", "main", 1)


def rewind(store: nosync.Store) -> None:
    store.rewind(2, "old")


def rewind_and_back(store: nosync.Store) -> None:
    store.rewind(2, "old")
    run(store, 3)
    store.sync()
    store.promote("old", keep_as="tried")


def rewind_twice(store: nosync.Store) -> None:
    store.rewind(3, "old")
    run(store, 4)
    store.sync()
    node_of(store).release_inputs()
    store.rewind(1, "older")


CHANGES = [branch, rewind, rewind_and_back, rewind_twice]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_misses_them_and_the_safe_point_goes_on(open_store: OpenStore, change: Change) -> None:
    store = released(open_store)
    change(store)
    for reopened in range(3):
        if reopened:
            store.close()
            store = manual(open_store)
            node_of(store).release_inputs()  # which knows nothing of what this directory released before
        last = store.newest()
        assert last is not None
        assert store.safe_point() == last
        for name in store.branches():
            assert store.node.missing(name) == [], name
        assert store.verify().ok
        assert nosync.open(store.directory.root, read_only=True).status().missing == 0
        run(store, last + 1)
        store.sync()
        assert store.safe_point() == last + 1
        node_of(store).release_inputs()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_copies_are_whole(open_store: OpenStore, tmp_path: Path, change: Change, is_lazy: bool) -> None:
    store = released(open_store)
    bucket, root = open_bucket(f"file://{tmp_path}/bucket"), store.directory.root
    settings = RemoteSettings(f"file://{tmp_path}/bucket")
    assert copy_directory(root, bucket, settings).epoch == 4
    change(store)
    run(store, (store.newest() or 0) + 1)
    store.sync()
    last, branches = store.newest(), set(store.branches())
    expected = {name: store.read("sums", branch=name).to_pylist() for name in branches}
    assert copy_directory(root, bucket, settings).epoch == last
    backup(root, tmp_path / "copy")
    restore(bucket, tmp_path / "restored", lazy=is_lazy)
    restore(bucket, tmp_path / "as of 1", as_of=1)
    for path in (tmp_path / "copy", tmp_path / "restored"):
        with nosync.open(path, settings=nosync.StoreSettings(background=False)) as found:
            assert {name: found.read("sums", branch=name).to_pylist() for name in found.branches()} == expected
            assert found.safe_point() == last
            assert all(found.node.missing(name) == [] for name in branches)
            run(found, (last or 0) + 1)
            found.sync()
            assert found.safe_point() == (last or 0) + 1


def test_what_was_not_released_is_still_missed_after_a_rewind(open_store: OpenStore) -> None:
    store = released(open_store)
    store.rewind(2, "old")
    run(store, 3)
    store.sync()
    (path,) = (store.directory.root / "layers/rows").rglob("3-4-0.layer")
    path.unlink()
    assert [(one.entry.id.trace.stage, one.t) for one in store.missing()] == [("rows", 3)]
    for path in (store.directory.root / "layers/sums").rglob("1-2-0.layer"):
        path.unlink()
    assert {(one.entry.id.trace.stage, one.t) for one in store.missing()} == {("rows", 3), ("sums", 1)}


def test_what_an_earlier_version_wrote_down_counts(open_store: OpenStore) -> None:
    store = released(open_store)
    path = store.directory.root / RELEASED
    assert set(json.loads(path.read_bytes())["body"]) == {"line", "safe"}, "as it was, where one line alone released"
    store.rewind(2, "old")
    run(store, 3)
    store.sync()
    store.delete_branch("old")
    run(store, 4)
    store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == []
    assert set(json.loads(path.read_bytes())["body"]) == {"line", "safe", "before"}
    assert store.missing() == []


@pytest.mark.parametrize("keep_as", ["old", ""])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_lost_catalog_takes_nothing_of_it_along(open_store: OpenStore, keep_as: str, more: int) -> None:
    store = released(open_store)
    store.rewind(2, keep_as)
    for t in range(3, 3 + more):
        run(store, t)
    store.sync()
    node_of(store).release_inputs()
    files(store, "rows")  # which collects the garbage
    last, root = store.newest(), store.directory.root
    store.close()
    shutil.rmtree(root / "catalog")
    store = manual(open_store)
    assert (store.newest(), store.safe_point(), store.missing()) == (last, last, [])
    assert store.status().problems == {}


def test_a_backup_says_which_branch_is_not_whole(open_store: OpenStore, tmp_path: Path) -> None:
    store = manual(open_store)
    for t in range(4):
        run(store, t, "keep")
    store.rewind(1, "old")
    run(store, 2, "keep")
    store.sync()
    (path,) = (store.directory.root / "layers/sums/raw").rglob("3-4-0.layer")
    path.unlink()
    bucket = open_bucket(f"file://{tmp_path}/bucket")
    with pytest.raises(nosync.CorruptionError, match="branch old was copied up to epoch 2, and is sealed up to 3"):
        copy_directory(store.directory.root, bucket, RemoteSettings(f"file://{tmp_path}/bucket"))
