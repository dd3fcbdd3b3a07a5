"""One thing that goes wrong keeps nothing else from its work; and what is told as safe was made durable."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.lsm.node.node import Node
from nosync.testing import FaultyEnv, crash
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore


def _one_more(store: nosync.Store, t: int) -> None:
    store.append("s", t=t, rows=pa.table({"k": [t % 3], "v": [t]}), key=["k"])
    store.seal(t)


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def test_a_trace_that_cannot_be_merged_keeps_no_other_from_being_merged(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0), env=env)
    for t in range(8):
        for stage in ("aa", "zz"):
            store.append(stage, t=t, rows=pa.table({"k": [t]}), key=["k"])
        store.seal(t)
    store.sync()
    node = store.node
    assert isinstance(node, Node)
    env.fail("map", errno.EIO, times=1000, matches=lambda path: "/aa/" in str(path))
    env.fail("link", errno.EIO, times=1000, matches=lambda path: "/aa/" in str(path))
    while node.merge_once():
        pass
    assert any(not d.is_fresh for d in node.durable_ids() if d.trace.stage == "zz")
    assert any("stage aa" in at for at in node.problems)
    with pytest.raises(nosync.StorageError):
        store.compact()
    assert {d.description for d in node.durable_ids() if d.trace.stage == "zz"} == {Description(pack(0), pack(8))}


def test_what_cannot_be_removed_keeps_nothing_from_being_durable(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = open_store(
        settings=nosync.StoreSettings(scan_interval_s=0.01, retry_s=0.01, grace_s=0.0, retain=0), env=env
    )
    env.fail("unlink", errno.EACCES, times=10**9, matches=lambda path: path.suffix == ".layer")
    for t in range(20):
        _one_more(store, t)
        store.node.merge_once()
        env.now_s += 1.0

    def is_safe() -> bool:
        env.now_s += 1.0
        store.node.parts.threads.wake()
        return store.safe_point() == 19

    eventually("all is durable", is_safe)
    env.faults.clear()


def test_a_damaged_pin_keeps_history_and_stops_nothing(open_store: OpenStore, tmp_path: Path) -> None:
    settings = nosync.StoreSettings(background=False, retain=0)
    store = open_store(settings=settings)
    for t in range(3):
        _one_more(store, t)
    store.pin("p", 2)
    (path,) = (store.directory.root / "pins").iterdir()
    store.close()
    flip(path)
    store = open_store(settings=settings)
    assert "all history is kept" in store.node.problems["pins"]
    for t in range(3, 9):
        _one_more(store, t)
    store.sync()
    store.compact()
    assert store.safe_point() == 8
    assert store.since() <= 2, "whatever the pin holds is still there"
    path.unlink()
    store.sync()
    assert store.since() == 8
    assert not store.node.problems


@pytest.mark.parametrize("again", [False, True])
def test_a_catalog_that_cannot_be_opened_now_is_not_damaged(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False))
    _one_more(store, 0)
    store.sync()
    root, incarnation = store.directory.root, store.node.incarnation
    store.close()

    def refuse(*_: object, **__: object) -> None:
        raise Exception("IO error: No space left on device: While appending to file: x/LOG")

    with monkeypatch.context() as patched:
        patched.setattr("nosync.lsm.manifests.catalog.Rdict", refuse)
        for _ in range(2 if again else 1):
            with pytest.raises(nosync.StorageError, match="not damaged"):
                open_store(settings=nosync.StoreSettings(background=False))
    assert not list(root.glob("catalog.damaged-*"))
    store = open_store(settings=nosync.StoreSettings(background=False))
    assert store.node.incarnation == incarnation
    assert store.safe_point() == 0


def test_a_crash_between_a_merge_and_its_edit_leaves_no_inputs_for_ever(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    store = open_store(settings=settings)
    for t in range(6):
        _one_more(store, t)
    store.sync()
    before = store.read("s").to_pydict()

    def dies(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.node.parts.compactor, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            store.compact()
    crash(store)
    store = open_store(settings=settings)
    store.sync()
    store.node.collect_garbage()
    (trace,) = store.directory.traces("s")
    assert len(store.directory.descriptions(trace)) == 1
    assert store.read("s").to_pydict() == before


def test_a_merged_layer_that_was_not_written_as_it_was_meant_replaces_nothing(open_store: OpenStore) -> None:
    class FlippingEnv(FaultyEnv):
        def sync_file(self, path: Path) -> None:
            super().sync_file(path)
            if path.parent.name == "tmp" and self.flips:
                flip(path)

        flips = False

    env = FlippingEnv()
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0), env=env)
    for t in range(6):
        _one_more(store, t)
    store.sync()
    before = store.read("s").to_pydict()
    env.flips = True
    with pytest.raises(nosync.CorruptionError):
        store.compact()
    env.flips = False
    assert store.read("s").to_pydict() == before
    assert store.safe_point() == 5


def test_a_manifest_that_nobody_noted_yet_is_not_safe(open_store: OpenStore) -> None:
    """Between its publishing and its fsync a second thread may ask, or tidy up."""
    store = open_store(settings=nosync.StoreSettings(background=False))
    node = store.node
    assert isinstance(node, Node)
    _one_more(store, 0)
    store.sync()
    store.append("s", t=1, rows=pa.table({"k": [1], "v": [1]}), key=["k"])
    store.sync()
    id = LayerId(TraceId("s", "raw", Shard(0)), Description.of_epoch(1))
    node.parts.sealer.seal(1, [id], "main", {}, None)  # as `Node.seal` does, up to where it notes the manifest
    assert store.safe_point() == 0
    listed = node.small.listed

    def meanwhile() -> list[PurePosixPath]:
        there = listed()
        path = PurePosixPath("manifests/main/1.json")
        node.small.note([path])
        return [one for one in there if one != path]  # it was not there yet

    node.small.listed = meanwhile  # type: ignore[method-assign]
    node.small.forget_gone()
    node.small.listed = listed  # type: ignore[method-assign]
    store.sync()
    assert store.safe_point() == 1
    assert node.small.is_durable(PurePosixPath("manifests/main/1.json"))


def test_a_manifest_that_is_lost_in_the_middle_is_named_and_can_be_sealed_again(open_store: OpenStore) -> None:
    settings = nosync.StoreSettings(background=False, merge=False)
    store = open_store(settings=settings)
    for t in range(8):
        _one_more(store, t)
    store.sync()
    path = store.directory.root / "manifests" / "main" / "5.json"
    text = path.read_bytes()
    store.close()
    path.write_bytes(text[: len(text) // 2])
    store = open_store(settings=settings)
    assert (store.last_sealed(), store.safe_point()) == (7, 4)
    assert any("the manifest of epoch 5 is not there" in problem for problem in store.status().problems.values())
    with pytest.raises(nosync.OutOfOrderError):
        store.seal(9)
    store.seal(5)
    store.sync()
    assert store.safe_point() == 7
    assert path.read_bytes() == text
    assert isinstance(store.node, Node)
    store.node.parts.checks.note_gaps()
    assert not store.status().problems
