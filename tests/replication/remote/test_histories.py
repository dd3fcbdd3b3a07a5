"""Nodes whose files differ under one name, and directories that are another history than what a bucket has."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.replication.remote.fence import RemoteTakenError
from nosync.replication.remote.history import check_no_other
from nosync.replication.remote.restore import restore
from nosync.replication.remote.view import read_view
from nosync.testing.simulated_bucket import SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import Copies, epochs, open_quiet, rows_of

_chance = random.Random(1)
MANY = pa.table({"k": [f"{_chance.getrandbits(128):x}" for _ in range(5000)], "n": list(range(5000))})
"""Rows that need several parts."""


def seal(store: nosync.Store, t: int, row: str) -> None:
    store.append("counts", t=t, rows=pa.table({"k": [row, "all"], "n": [t, t]}), key=["k"])
    store.seal(t)
    store.sync()


@pytest.fixture
def two(open_store: OpenStore, tmp_path: Path) -> tuple[nosync.Store, nosync.Store]:
    """Two nodes of one store, each with epochs 0 to 8."""
    store = open_quiet(open_store, "n1")
    epochs(store, range(9))
    shutil.copytree(store.directory.root, tmp_path / "n2", ignore=shutil.ignore_patterns("catalog", "LOCK"))
    return store, open_quiet(open_store, "n2")


def test_a_layer_that_a_lost_node_never_sealed_takes_no_ones_place(
    two: tuple[nosync.Store, nosync.Store], open_store: OpenStore, tmp_path: Path
) -> None:
    (n1, n2), bucket = two, SimulatedBucket()
    copies = Copies(n1, bucket, "n1")
    n1.append("counts", t=9, rows=pa.table({"k": ["never sealed"], "n": [9]}), key=["k"])
    n1.sync()
    copies.push()
    seal(n2, 9, "sealed")
    others = Copies(n2, bucket, "n2")
    others.push()
    assert others.level.status().safe_point == 9
    assert restore(bucket, tmp_path / "restored").epoch == 9
    assert rows_of(open_quiet(open_store, "restored")) == rows_of(n2)


def test_a_layer_that_its_epoch_does_not_list_is_not_restored(
    two: tuple[nosync.Store, nosync.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, n2), bucket = two, SimulatedBucket()
    seal(n2, 9, "sealed")
    Copies(n2, bucket, "n2").push()
    view = read_view(bucket)
    name = next(name for name in view.files if name.layer is not None and "/9-" in name)
    view.files[name] = replace(view.files[name], version=replace(view.files[name].version, digest="0" * 64))
    monkeypatch.setattr("nosync.replication.remote.restore.read_view", lambda bucket, lose: view)
    with pytest.raises(CorruptionError, match="is not what epoch 9 lists"):
        restore(bucket, tmp_path / "restored")


def test_an_epoch_that_another_node_had_whole_is_not_replaced(
    two: tuple[nosync.Store, nosync.Store], open_store: OpenStore, tmp_path: Path
) -> None:
    (n1, n2), bucket = two, SimulatedBucket()
    ours, theirs = Copies(n1, bucket, "n1"), Copies(n2, bucket, "n2")
    theirs.push()
    seal(n1, 9, "of n1")
    ours.push()
    seal(n2, 9, "of n2")
    seal(n2, 10, "later")
    theirs.level.push(0.0)
    assert "node n1 of memory://simulated and" in theirs.level.status().problem
    assert "two histories" in theirs.level.status().problem
    assert restore(bucket, tmp_path / "restored").epoch == 9
    assert rows_of(open_quiet(open_store, "restored")) == rows_of(n1)


def test_layers_that_nodes_merged_for_themselves_are_no_histories(
    two: tuple[nosync.Store, nosync.Store], tmp_path: Path
) -> None:
    url, digest = "memory://simulated", "0" * 64
    bucket = SimulatedBucket()
    copies = Copies(two[0], bucket, "n1")
    copies.push()
    (contents,) = read_view(bucket).nodes.values()
    for placed in contents.files():
        name = placed.version.name
        if name.layer is not None:
            check_no_other(url, name, digest, {"n1": contents}, tmp_path)
        elif name.span is not None:
            with pytest.raises(RemoteTakenError, match="two histories"):
                check_no_other(url, name, digest, {"n1": contents}, tmp_path)


def test_an_epoch_that_a_lost_node_had_not_whole_is_put_anew(
    two: tuple[nosync.Store, nosync.Store], open_store: OpenStore, tmp_path: Path
) -> None:
    (n1, n2), bucket = two, SimulatedBucket()
    Copies(n1, bucket, "n1").push()
    n1.append("counts", t=9, rows=MANY, key=["k"])
    n1.seal(9)
    n1.sync()
    Copies(n1, bucket, "n1", large_bytes=20_000, flush_bytes=20_000).flush_once()
    assert read_view(bucket).reached.epochs == {"main": 8}
    assert "manifests/main/9.json" in read_view(bucket).files
    seal(n2, 9, "of n2")
    others = Copies(n2, bucket, "n2")
    others.push()
    assert others.level.status().safe_point == 9
    assert restore(bucket, tmp_path / "restored").epoch == 9
    assert rows_of(open_quiet(open_store, "restored")) == rows_of(n2)


def test_the_log_of_branches_of_a_lost_node_is_no_ones_else(open_store: OpenStore, tmp_path: Path) -> None:
    bucket, store = SimulatedBucket(), open_quiet(open_store)
    epochs(store, range(5))
    settings = {"large_bytes": 20_000, "flush_bytes": 20_000}
    Copies(store, bucket, **settings).push()
    store.append("counts", t=5, rows=MANY, key=["k"])
    store.seal(5)
    store.node.create_branch("calm", "main", 5)  # type: ignore[attr-defined]
    store.sync()
    Copies(store, bucket, **settings).flush_once()
    assert "branches/1.json" in read_view(bucket).files
    assert read_view(bucket).reached.entries == 0
    restore(bucket, tmp_path / "new")
    new = open_quiet(open_store, "new")
    copies = Copies(new, bucket, "n1")
    epochs(new, range(5, 9), "new")
    copies.push()
    assert restore(bucket, tmp_path / "again").epoch == 8
    assert rows_of(open_quiet(open_store, "again")) == rows_of(new)


def test_a_snapshot_of_a_directory_puts_its_own_epoch(open_store: OpenStore, tmp_path: Path) -> None:
    settings, bucket = {"large_bytes": 20_000, "flush_bytes": 20_000}, SimulatedBucket()
    store = open_quiet(open_store)
    epochs(store, range(3))
    Copies(store, bucket, **settings).push()
    store.close()
    shutil.copytree(tmp_path / "store", tmp_path / "snapshot", ignore=shutil.ignore_patterns("LOCK"))
    store = open_quiet(open_store)
    store.append("counts", t=3, rows=MANY, key=["k"])
    store.append("gone", t=3, rows=pa.table({"k": ["A"]}), key=["k"])
    store.seal(3)
    store.sync()
    Copies(store, bucket, **settings).flush_once()
    assert "manifests/main/3.json" in read_view(bucket).files
    snapshot = open_quiet(open_store, "snapshot")
    epochs(snapshot, range(3, 4), "B", stages=("counts", "other"))
    Copies(snapshot, bucket, **settings).push()
    assert restore(bucket, tmp_path / "restored").epoch == 3
    restored = open_quiet(open_store, "restored")
    for stage in ("counts", "other"):
        assert rows_of(restored, stage) == rows_of(snapshot, stage)


@pytest.mark.parametrize("name", ["embedded", "n1"])
def test_what_was_restored_as_of_an_earlier_epoch_is_refused_under_any_name(
    open_store: OpenStore, bucket: SimulatedBucket, tmp_path: Path, name: str
) -> None:
    store = open_quiet(open_store)
    copies = Copies(store, bucket)
    epochs(store, range(10))
    copies.push()
    restore(bucket, tmp_path / "old", as_of=3)
    old = Copies(open_quiet(open_store, "old"), bucket, name)
    old.step()
    assert "give this directory another prefix" in old.level.status().problem
    epochs(store, range(10, 12))
    copies.push()
    assert restore(bucket, tmp_path / "again").epoch == 11


def test_a_node_whose_disk_was_replaced_goes_on_once_it_is_filled(open_store: OpenStore, tmp_path: Path) -> None:
    bucket, store = SimulatedBucket(), open_quiet(open_store)
    epochs(store, range(5))
    Copies(store, bucket, "n2").push()
    marker = Copies(store, bucket, "n2").level._source.marker
    create_store(tmp_path / "empty", marker.key_groups, Env(), store_id=marker.store_id)
    empty = open_quiet(open_store, "empty")
    copies = Copies(empty, bucket, "n2")
    copies.step()
    assert "of an earlier time" in copies.level.status().problem
    epochs(empty, range(5))  # as its peers do
    copies.push()
    assert copies.level.status().safe_point == 4
    assert not copies.level.status().problem
