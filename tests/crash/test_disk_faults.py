"""Faults of the disk: what was acknowledged stays, what fails is refused and said, and nothing is acked by mistake."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
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
from tests.helpers.stores import filled, snapshot, words


def _one_more(store: nosync.Store, t: int) -> None:
    store.append("counts", t=t, rows=words(**{f"w{t}": t}), key=["word"])
    store.seal(t)


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
    _one_more(store, 4)
    store.sync()
    assert store.safe_point() == 4


def test_a_failed_fsync_is_never_trusted(open_store: OpenStore) -> None:
    """After it, the layer is written to a new inode before it counts (fsyncgate: the old pages may be gone)."""
    env = FaultyEnv()
    store = filled(open_store, env=env)
    store.sync()
    env.fail("sync_file", errno.EIO, times=1, matches=_is_layer)
    _one_more(store, 4)
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
    _one_more(store, 4)
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
        ("branches", lambda: store.node.create_branch("try", "main", 2, []), lambda: "try" in store.branches()),
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
    _one_more(store, 4)
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
    _one_more(store, 4)
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


# --- damage found at start ---------------------------------------------------------------------------------------------


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
        store.append("counts", t=2, rows=words(a=77))
        with pytest.raises(nosync.DeterminismError, match="already sealed"):
            store.seal(2)
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
        _one_more(store, t)
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


# --- real file systems -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root may mount a file system; the injected ENOSPC above covers the code")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_really_full_disk(small_disk: Path) -> None:
    settings = nosync.StoreSettings(background=False)
    store = nosync.open(small_disk / "s", settings=settings)
    rows = pa.table({"k": range(10_000), "v": range(10_000)})

    def fill() -> None:
        for t in range(1000):
            store.append("kv", t=t, rows=rows, key=["k"])
            store.seal(t)
            store.sync()

    with pytest.raises(nosync.StorageError, match="disk is full"):
        fill()
    safe = store.safe_point()
    assert safe is not None
    for t in range(safe + 1):
        assert store.read("kv", as_of=t).num_rows == 10_000
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    last = store.last_sealed() or 0
    store.append("kv", t=last + 1, rows=rows)
    store.seal(last + 1)
    store.sync()
    assert store.safe_point() == last + 1
    store.close()


def test_a_read_only_file_system(small_disk: Path) -> None:
    nosync.open(small_disk / "s").close()
    store = nosync.open(small_disk / "s", settings=nosync.StoreSettings(background=False))
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    store.seal(0)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(nosync.StorageError, match="read-only"):
        nosync.open(small_disk / "s")
    with nosync.open(small_disk / "s", read_only=True) as reader:
        assert reader.read("counts").num_rows == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_an_unwritable_directory(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    if os.geteuid() == 0:
        with pytest.raises(nosync.NosyncError):
            nosync.open("/proc/nosync-store")
        return
    parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(nosync.StorageError, match="permission denied"):
        nosync.open(parent / "store")


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
        _one_more(store, t)
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
    _one_more(store, 0)
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
        store.node.create_branch(name, "main", 2, [])
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
