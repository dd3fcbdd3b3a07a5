"""Manifests that are lost, and copies that lack more than that: nothing is read wrong, and what is wrong is said."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.branches import ChangedStages
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore


def rows(**values: int) -> pa.Table:
    return pa.table({"k": pa.array(values, pa.string()), "v": pa.array(values.values(), pa.int64())})


def keys_of(table: pa.Table) -> set[str]:
    return set(table.column("k").to_pylist())


def filled(open_store: OpenStore, epochs: int = 4) -> nosync.Store:
    store = open_store()
    for t in range(epochs):
        store.append("c", t=t, rows=rows(**{f"a{t}": t}), key=["k"])
        store.seal(t)
    store.sync()
    return store


def test_the_first_manifest_after_a_rewind(open_store: OpenStore, tmp_path: Path) -> None:
    """What came before the fork is still there."""
    store = filled(open_store)
    store.rewind(2, keep_as="old")
    for t in (3, 4, 5):
        store.append("c", t=t, rows=rows(**{f"b{t}": t}))
        store.seal(t)
    store.close()
    (tmp_path / "store/manifests/rewind-1/3.json").unlink()
    for read_only in (False, True):
        store = open_store(**({"read_only": True} if read_only else {}))
        assert keys_of(store.read("c")) == {"a0", "a1", "a2", "b3", "b4", "b5"}
        store.close()


def test_the_first_manifest_of_a_branch_with_other_code(open_store: OpenStore) -> None:
    """The parent's later epochs are not mixed into it."""
    store = open_store()
    node = store.node

    def epoch(t: int, fingerprint: str, key: str, branch: str = "main") -> None:
        id = LayerId(TraceId("c", fingerprint, Shard(0, 1)), Description.of_epoch(t))
        store.directory.publish(id, arrange(rows(**{key: t}), ["k"], whose="test"))
        node.seal(t, [id], branch)

    for t in range(5):
        epoch(t, "f1", f"a{t}")
    node.create_branch("b", "main", 2, ChangedStages(("c",)))
    for t in range(3, 6):
        epoch(t, "f2", f"b{t}", "b")
    store.sync()
    line = store.branches()["b"].id
    root = store.directory.root
    store.close()
    (root / f"manifests/{line}/3.json").unlink()
    assert keys_of(open_store().read("c", 4, branch="b")) == {"a0", "a1", "a2", "b3", "b4"}


def test_a_lost_manifest_in_the_middle_is_told_of(
    open_store: OpenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(open_store, 6).close()
    (tmp_path / "store/manifests/main/2.json").unlink()
    path = str(tmp_path / "store")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", path])
    assert "manifest of epoch 2 is not there" in capsys.readouterr().err.replace("\n", " ")
    main(["status", path])
    assert "manifest of epoch 2 is not there" in capsys.readouterr().err.replace("\n", " ")
    store = open_store()
    store.seal(2)
    store.sync()
    assert store.safe_point() == 5
    assert store.verify().ok


def test_a_lost_manifest_of_epochs_that_were_merged(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store, 6)
    for _ in store.node.compact():
        pass
    store.close()
    (tmp_path / "store/manifests/main/2.json").unlink()
    with pytest.raises(nosync.HoleError, match=r"put 2.json back"):
        open_store().seal(2)


def test_a_missing_layer_fails_verification(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store)
    (victim,) = [Path(layer.path) for layer in store.layers() if layer.lower == 1]
    store.close()
    victim.unlink()
    path = str(tmp_path / "store")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", path])
    (error,) = nosync.open(path, read_only=True).verify().errors
    assert "timestamp 1: is gone" in error


def test_the_first_layer_is_given_again(open_store: OpenStore) -> None:
    store = filled(open_store)
    (victim,) = [Path(layer.path) for layer in store.layers() if layer.lower == 0]
    store.close()
    victim.unlink()
    store = open_store()
    assert store.safe_point() is None
    store.append("c", t=0, rows=rows(a0=0))
    store.sync()
    assert store.safe_point() == 3
    assert keys_of(store.read("c")) == {"a0", "a1", "a2", "a3"}


def test_a_copy_without_what_need_not_be_copied(open_store: OpenStore, tmp_path: Path) -> None:
    filled(open_store).close()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "store", copy, ignore=shutil.ignore_patterns("tmp", "catalog", "LOCK", "quarantine"))
    store = open_store("copy")
    store.append("c", t=4, rows=rows(a4=4))
    store.seal(4)
    store.pin("kept", 1)
    store.sync()
    assert store.safe_point() == 4


def test_a_branch_cannot_begin_in_what_was_merged_away(open_store: OpenStore) -> None:
    """A branch moves the frontier back, and brings nothing back."""
    store = open_store(retain=2)
    for t in range(11):
        store.append("c", t=t, rows=rows(x=t, **{f"a{t}": t}), key=["k"])
        store.seal(t)
    for _ in store.node.compact():
        pass
    store.node.create_branch("b", "main", 8)
    with pytest.raises(nosync.CompactedError, match="was merged away"):
        store.node.create_branch("c", "main", 6)


def test_what_is_passed_is_not_remembered(open_store: OpenStore) -> None:
    store = filled(open_store, 20)
    assert isinstance(store.node, Node)
    assert store.safe_point() == 19
    assert not store.node.safe_points._learned_s


def test_a_manifest_is_durable_after_its_layers(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an epoch that is sealed while others are made durable; or peers had the one before the others."""
    store = filled(open_store, 1)
    node = store.node
    assert isinstance(node, Node)
    due = node.parts.queue.due

    def meanwhile(**options: bool) -> list[LayerId]:
        found = list(due(**options))
        monkeypatch.setattr(node.parts.queue, "due", due)
        store.append("c", t=2, rows=rows(a2=2))
        store.seal(2)
        return found

    store.append("c", t=1, rows=rows(a1=1))
    store.seal(1)
    monkeypatch.setattr(node.parts.queue, "due", meanwhile)
    store.sync()
    manifests = [PurePosixPath(f"manifests/main/{t}.json") for t in (1, 2)]
    assert [node.small.is_durable(path) for path in manifests] == [True, False]
    store.sync()
    assert store.safe_point() == 2
