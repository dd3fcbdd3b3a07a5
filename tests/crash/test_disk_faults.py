"""Faults of the disk: what was acknowledged stays, what fails is refused and said, and nothing is acked by mistake."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.model.layer import Description, LayerId, Record, Shard, TraceId
from nosync.lsm.node.merge_queue import RETRY_S
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.trace.directory import LayerDirectory
from nosync.testing import FaultyEnv, crash
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore
from tests.helpers.stores import filled, one_more, snapshot, words


def _is_layer(path: Path) -> bool:
    return path.suffix == ".layer"


@pytest.mark.parametrize("operation", ["create", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_loses_nothing(open_store: OpenStore, operation: str, code: int) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    before = snapshot(store)
    env.fail(operation, code, times=1)
    with pytest.raises(nosync.StorageError, match=r"cannot (write|publish)"):
        store.append("counts", t=4, rows=words(x=1))
    assert snapshot(store) == before
    assert not list((store.directory.root / "tmp").iterdir())
    one_more(store, 4)
    store.sync()
    assert store.safe_point() == 4


def test_a_failed_fsync_is_never_trusted(open_store: OpenStore) -> None:
    """After it, the layer is written to a new inode before it counts (fsyncgate: the old pages may be gone)."""
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    env.fail("sync_file", errno.EIO, times=1, matches=_is_layer)
    one_more(store, 4)
    path = store.directory.root / "layers" / "counts" / "raw" / "0" / "4-5-0.layer"
    inode = path.stat().st_ino
    with pytest.raises(nosync.StorageError, match="not durable"):
        store.sync()
    assert store.safe_point() == 3
    assert any(os.strerror(errno.EIO) in problem for problem in store.status().problems.values())
    store.sync()
    assert store.safe_point() == 4
    assert path.stat().st_ino != inode
    assert not store.status().problems
    assert store.verify().ok


@pytest.mark.parametrize(("operation", "failing"), [("sync_file", "4.json"), ("sync_dir", "main")])
def test_a_failed_fsync_of_a_manifest_is_never_trusted(open_store: OpenStore, operation: str, failing: str) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    path = store.directory.root / "manifests" / "main" / "4.json"
    env.fail(operation, errno.EIO, times=1, matches=lambda found: found.name == failing)
    one_more(store, 4)
    inode = path.stat().st_ino
    with pytest.raises(nosync.StorageError, match="not durable"):
        store.sync()
    assert store.safe_point() == 3
    assert "manifests/main/4.json" in store.status().problems
    store.sync()
    assert store.safe_point() == 4
    assert path.stat().st_ino != inode
    assert not store.status().problems


def test_a_branch_or_pin_that_cannot_be_made_durable_is_not_made(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    for directory, make, made in (
        ("branches", lambda: store.node.create_branch("try", "main", 2), lambda: "try" in store.branches()),
        ("pins", lambda: store.pin("then", 2), lambda: "then" in store.pins()),
    ):
        env.fail("sync_dir", errno.EIO, times=1, matches=lambda found, directory=directory: found.name == directory)
        with pytest.raises(nosync.StorageError, match="cannot sync"):
            make()
        assert not made()
        make()
        assert made()


@pytest.mark.parametrize("operation", ["sync_file", "sync_dir"])
def test_the_safe_point_stalls_while_syncing_fails(open_store: OpenStore, operation: str) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    env.fail(operation, errno.EIO, times=10**9)
    one_more(store, 4)
    for _ in range(3):
        with pytest.raises(nosync.StorageError):
            store.sync()
    assert store.safe_point() == 3
    env.faults.clear()
    store.sync()
    assert store.safe_point() == 4


def test_an_ack_comes_after_file_directory_and_manifest(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, 1, env=env)
    assert store.safe_point() is None
    env.calls.clear()
    store.sync()
    assert store.safe_point() == 0
    root = store.directory.root
    layer, shard = root / "layers/counts/raw/0/0-1-0.layer", root / "layers/counts/raw/0"
    synced = [(operation, path) for operation, path in env.calls if operation.startswith("sync")]
    assert synced.index(("sync_file", layer)) < synced.index(("sync_dir", shard))
    for directory in (root / "layers/counts/raw", root / "layers/counts", root / "layers", root / "manifests/main"):
        assert ("sync_dir", directory) in synced
    assert ("sync_file", root / "manifests/main/0.json") in synced


def test_what_is_acked_was_read_back(open_store: OpenStore) -> None:
    """A bit that flips between publishing and syncing, in the middle of the body, must not be acknowledged."""
    store = filled(open_store, 1)
    store.sync()
    store.append("counts", t=1, rows=words(**{f"w{i}": i for i in range(500)}))
    store.seal(1)
    path = store.directory.root / "layers/counts/raw/0/1-2-0.layer"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    store.sync()
    assert store.safe_point() == 0
    assert [m.t for m in store.missing()] == [1]


def test_an_epoch_is_not_safe_before_its_manifest_is(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    one_more(store, 4)
    env.fail("sync_file", errno.EIO, times=10**9, matches=lambda path: path.name == "4.json")
    with pytest.raises(nosync.StorageError):
        store.sync()
    assert {layer.level for layer in store.layers()} == {"disk"}
    assert store.safe_point() == 3
    env.faults.clear()
    store.sync()
    assert store.safe_point() == 4


def test_publishing_syncs_nothing(open_store: OpenStore) -> None:
    """The critical path: create, link, remove the temporary name."""
    env = FaultyEnv()
    store = filled(open_store, env=env)
    env.calls.clear()
    store.append("counts", t=4, rows=words(x=1))
    assert [operation for operation, _ in env.calls] == ["create", "link", "unlink"]


def test_a_merge_that_hits_a_full_disk_changes_nothing(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    before, layers = snapshot(store), store.layers()
    env.fail("create", errno.ENOSPC)
    with pytest.raises(nosync.StorageError, match="disk is full"):
        store.compact()
    assert (snapshot(store), store.layers()) == (before, layers)
    store.compact()
    assert snapshot(store) == before


@pytest.mark.parametrize("operation", ["create", "link", "sync_file", "sync_dir", "unlink"])
def test_a_crash_at_every_step_of_a_merge(open_store: OpenStore, operation: str) -> None:
    env = FaultyEnv()
    store = filled(open_store, 6, env=env)
    store.sync()
    before = snapshot(store)
    env.fail(operation, errno.EIO, times=10**9)
    try:
        store.compact()
    except nosync.StorageError:
        assert operation != "unlink" or snapshot(store) == before
    crash(store)
    env.faults.clear()
    env.lose_power(store.directory.root, lambda n: n - 1)
    with open_store(env=env) as again:
        assert snapshot(again) == before
        assert again.safe_point() == 5
        assert again.verify().ok


def test_a_node_that_starts_while_a_task_publishes(tmp_path: Path) -> None:
    """It empties tmp/, also of the file that is being written: the task writes it again, and nobody sees a fault."""
    with nosync.open(tmp_path / "s") as store:
        root = store.directory.root

    class Emptied(Env):
        """Loses the temporary file before it is linked, as often as told."""

        times = 0

        def link(self, source: Path, target: Path) -> None:
            if self.times and source.exists():
                self.times -= 1
                source.unlink()
            super().link(source, target)

    env = Emptied()
    directory = LayerDirectory(root, 128, env)
    rows = arrange(pa.table({"k": [1, 2]}), ["k"], whose="test")
    trace = TraceId("kv", "raw", Shard(0))
    for t, times in enumerate((1, 2)):
        env.times = times
        assert directory.publish(LayerId(trace, Description.of_epoch(t)), rows).rows == 2
    env.times = 3
    with pytest.raises(nosync.StorageError, match="publish"):
        directory.publish(LayerId(trace, Description.of_epoch(2)), rows)
    assert sorted(d.lower for d in directory.descriptions(trace)) == [0, 1 << 20]


def test_a_layer_that_is_rewritten_is_not_taken_for_obsolete(open_store: OpenStore) -> None:
    """The node looks at its directory when a merge has published its layer and not recorded it yet. What is there
    covers the same epochs: `since` moved on, and nothing else.
    """
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retain=0)
    store = filled(open_store, settings=nosync.StoreSettings(background=False, grace_s=0.0))
    assert store.compact() == 1
    store.close()
    store = open_store(settings=settings)
    node = store.node
    assert isinstance(node, Node)
    before = store.read("counts", as_of=3).to_pylist()
    replace = node.parts.compactor.replace
    seen: list[str] = []

    def late(merged: Record, inputs: Sequence[LayerId]) -> bool:
        seen.append(str(merged.id.file_name))
        node.scan()
        node.parts.upkeep.drain()
        return replace(merged, inputs)

    node.parts.compactor.replace = late  # type: ignore[method-assign]
    assert store.compact() == 1
    assert seen == ["0-4-3.layer"]
    assert [id.file_name for id in store.directory.layer_ids()] == seen
    node.collect_garbage()
    assert store.read("counts", as_of=3).to_pylist() == before
    node.collect_garbage()
    store.close()
    again = open_store(settings=settings)
    assert again.missing() == []
    assert again.read("counts", as_of=3).to_pylist() == before


def test_a_merged_layer_that_is_gone_before_it_is_recorded_replaces_nothing(open_store: OpenStore) -> None:
    store = filled(open_store, settings=nosync.StoreSettings(background=False, grace_s=0.0))
    before = snapshot(store)
    node = store.node
    assert isinstance(node, Node)
    replace = node.parts.compactor.replace

    def robbed(merged: Record, inputs: Sequence[LayerId]) -> bool:
        store.directory.path_of(merged.id).unlink()
        node.parts.compactor.replace = replace  # type: ignore[method-assign]
        return replace(merged, inputs)

    node.parts.compactor.replace = robbed  # type: ignore[method-assign]
    store.compact()
    store.close()
    again = open_store()
    assert snapshot(again) == before
    assert again.missing() == []


def test_a_layer_whose_fsync_failed_and_that_is_gone_then_is_no_problem_any_more(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    env.fail("sync_file", errno.EIO, times=1, matches=_is_layer)
    store.append("counts", t=4, rows=words(a=1), key=["word"])
    with pytest.raises(nosync.StorageError, match="not durable"):
        store.sync()
    (store.directory.root / "layers" / "counts" / "raw" / "0" / "4-5-0.layer").unlink()
    env.now_s += 60.0
    store.sync()
    assert store.status().problems == {}


def test_a_layer_that_cannot_be_read_holds_up_no_other(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    for t in (4, 5):
        one_more(store, t)
    env.fail("map", errno.EIO, times=1, matches=lambda path: path.name == "4-5-0.layer")
    node = store.node
    assert isinstance(node, Node)
    node.parts.upkeep.drain()
    assert [id.file_name for id in sorted(node.durable_ids())][-1] == "5-6-0.layer"
    assert any(os.strerror(errno.EIO) in problem for problem in store.status().problems.values())
    assert store.safe_point() == 3
    store.sync()
    assert store.safe_point() == 5


def test_a_merge_that_failed_is_done_with_the_next_look(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, epochs=6, env=env)
    store.sync()
    before = snapshot(store)
    node = store.node
    assert isinstance(node, Node)
    env.fail("create", errno.ENOSPC, times=1)
    assert not node.merge_once()
    assert "the disk is full" in node.problems["merge of stage counts shard 0"]
    assert not node.merge_once(), "not again and again"
    env.now_s += RETRY_S
    assert node.merge_once()
    assert not node.problems
    assert snapshot(store) == before


def test_a_merge_that_fails_is_tried_again_soon_at_first_and_then_ever_more_rarely(open_store: OpenStore) -> None:
    """Where a directory was away for a moment nobody waits for half a minute; where a disk stays full, nothing spins."""
    env = FaultyEnv()
    store = filled(open_store, epochs=6, env=env)
    store.sync()
    node = store.node
    assert isinstance(node, Node)
    env.fail("create", errno.ENOSPC, times=1000)
    waits = []
    for _ in range(20):
        assert not node.merge_once()
        waits.append(node.parts.merges.idle_at_most_s(60.0))
        env.now_s += waits[-1]
    assert waits[0] == pytest.approx(max(0.01, node.settings.retry_s))
    assert all(again >= wait * 0.99 for wait, again in itertools.pairwise(waits))
    assert waits[-1] == pytest.approx(RETRY_S)
    env.faults.clear()
    assert node.merge_once()
    assert not node.problems


def test_an_error_that_nobody_expected_ends_no_thread_of_the_node(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing would become durable any more, and nothing would say so."""
    store = open_store(settings=nosync.StoreSettings(scan_interval_s=0.01, retry_s=0.01))
    node = store.node
    assert isinstance(node, Node)
    whole, seen = node.small.sync, threading.Semaphore(0)

    def broken(paths: object) -> list[PurePosixPath]:
        seen.release()
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(node.small, "sync", broken)
    assert all(seen.acquire(timeout=20) for _ in range(3)), "it goes on trying"
    assert store.status().problems["nosync-durability: drain"] == "unexpected ZeroDivisionError: planted"
    monkeypatch.setattr(node.small, "sync", whole)
    one_more(store, 0)
    eventually("it is safe, and no problem is left", lambda: store.safe_point() == 0 and not store.status().problems)


def test_a_start_that_failed_takes_nothing_from_the_next(open_store: OpenStore) -> None:
    """An index that the failed start left open is in use, and not damaged: it knows what was acknowledged."""
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    node = store.node
    assert isinstance(node, Node)
    incarnation, root = node.incarnation, store.directory.root
    store.close()
    env.fail("map", errno.EIO, times=1)
    with pytest.raises(nosync.StorageError):
        open_store(env=env)
    again = open_store(env=env)
    assert isinstance(again.node, Node)
    assert again.node.incarnation == incarnation
    assert not list(root.glob("catalog.damaged-*"))
    with pytest.raises(nosync.StoreLockedError, match="is open already"):
        Catalog(root / "catalog")


def test_an_entry_of_the_log_of_branches_that_is_lost_is_named(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store)
    for name in "abc":
        store.node.create_branch(name, "main", 2)
    store.close()
    second = tmp_path / "store" / "branches" / "2.json"
    second.rename(tmp_path / "aside")
    with pytest.raises(nosync.CorruptionError, match=r"2\.json: is missing, and entries after it are there \(3\)"):
        open_store()
    reader = open_store(read_only=True)
    for looking in (reader.branches, lambda: reader.read("c")):
        with pytest.raises(nosync.CorruptionError, match=r"2\.json: is missing"):
            looking()  # type: ignore[operator]
    assert any("2.json: is missing" in error for error in reader.verify().errors)
    (tmp_path / "aside").rename(second)
    assert sorted(open_store().branches()) == ["a", "b", "c", "main"]


def test_what_was_appended_before_anything_was_sealed_counts(tmp_path: Path) -> None:
    """No manifest lists it, and reads need it: the safe point waits for it."""
    env = FaultyEnv()
    settings = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0)
    store = nosync.open(tmp_path / "store", env=env, settings=settings)
    for t in range(3):
        store.append("c", t=t, rows=pa.table({"k": [t], "v": [t]}), key=["k"])
    env.fail("sync_file", errno.EIO, times=10**9, matches=lambda path: path.name == "0-1-0.layer")
    store.seal(2)
    with pytest.raises(nosync.StorageError):
        store.sync()
    assert store.safe_point() is None, "epoch 0 is not durable"
    env.faults.clear()
    store.sync()
    assert store.safe_point() == 2
    store.close()


def test_a_manifest_whose_fsync_failed_and_that_went_then_is_no_problem_any_more(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    one_more(store, 4)
    env.fail("sync_file", errno.ENOSPC, matches=lambda path: path.name == "4.json")
    with pytest.raises(nosync.NosyncError):
        store.sync()
    assert any("4.json" in name for name in store.status().problems)
    store.rewind(3, keep_as="")
    one_more(store, 4)
    store.sync()
    assert store.status().problems == {}
