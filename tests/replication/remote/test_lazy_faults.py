"""What goes wrong while a store is restored lazily: power cuts, disks that refuse, objects that move, readers meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import RemoteError, StorageError
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.store.opening import open_store as open_directory
from nosync.replication.daemon.file_service import contents_of
from nosync.replication.remote import hydration, partial_file
from nosync.replication.remote import restore as restoring
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.hydration import Stubs, fetch_rest
from nosync.replication.remote.renewal import renew_stubs
from nosync.replication.remote.restore import restore
from nosync.replication.remote.stub_env import StubEnv
from nosync.replication.remote.stubs import is_lazy, stub_names, stub_path
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, rows_of

SMALL_BLOCKS = replace(QUIET, block_rows=1024)
ONE = "layers/counts/raw/0/1-2-0.layer"


class Lazy:
    """A store with one large layer of many blocks, and small ones; its copies, and a lazily restored directory."""

    def __init__(self, open_store: OpenStore, root: Path) -> None:
        self.objects, self.target = Objects(), root / "lazy"
        self.bucket = SimulatedBucket(self.objects)
        self.store = open_store("original", settings=SMALL_BLOCKS)
        for t in range(2):
            rows = pa.table({"k": [f"{t}-{i}" for i in range(10_000)], "n": list(range(10_000))})
            self.store.append("big", t=t, rows=rows, key=["k"])
            self.store.append("counts", t=t, rows=pa.table({"k": [f"a{t}"], "n": [t]}), key=["k"])
            self.store.seal(t)
        self.store.compact("big")
        for t in range(2, 4):
            self.store.append("big", t=t, rows=rows.slice(0, 10), key=["k"])
            self.store.append("counts", t=t, rows=pa.table({"k": [f"a{t}"], "n": [t]}), key=["k"])
            self.store.seal(t)
            self.store.sync()
        self.copies = Copies(self.store, self.bucket, flush_bytes=1500, large_bytes=50_000)
        self.copies.push()
        restore(self.bucket, self.target, lazy=True)

    def open(self) -> nosync.Store:
        return open_directory(self.target, settings=SMALL_BLOCKS, env=StubEnv(self.target, self.bucket))

    def fetch_rest(self) -> None:
        fetch_rest(self.target, self.bucket, lambda done, of: None)

    def check_whole(self) -> None:
        """All is here, and what it was."""
        assert not is_lazy(self.target)
        with nosync.open(self.target, settings=SMALL_BLOCKS) as store:
            assert store.verify().ok
            assert store.missing() == []
            for stage in ("big", "counts"):
                assert rows_of(store, stage) == rows_of(self.store, stage)


@pytest.fixture
def lazy(open_store: OpenStore, tmp_path: Path) -> Lazy:
    return Lazy(open_store, tmp_path)


def large_of(store: nosync.Store) -> Any:
    return max(store.directory.layer_ids(), key=lambda id: store.directory.env.size_bytes(store.directory.path_of(id)))


def test_who_reads_a_large_layer_goes_on_when_it_came_and_when_it_is_merged_away(lazy: Lazy) -> None:
    with lazy.open() as store:
        directory, id = store.directory, large_of(store)
        first, second = directory.reader(id), directory.reader(id)
        assert first.block_count > 10
        first.block(0)
        stubs = Stubs(lazy.target, lazy.bucket, Env())
        assert stubs.fetch_all()
        assert directory.reader(id) is not first, "it is opened anew"
        first.block(1)
        store.compact()
        assert isinstance(store.node, Node)
        store.node.collect_garbage()
        second.verify()
        assert store.verify().ok


@pytest.mark.parametrize("torn", ["empty", "in the middle"])
def test_a_file_that_a_power_cut_tore_is_not_taken_for_whole(lazy: Lazy, torn: str) -> None:
    with lazy.open() as store:
        rows_of(store)
    path = lazy.target / ONE
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.unlink()
    path.write_bytes(b"" if torn == "empty" else bytes(data))
    lazy.fetch_rest()
    lazy.check_whole()


def test_a_file_whose_sync_failed_is_fetched_again(lazy: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    inodes = []

    class Refusing(Env):
        def sync_file(self, path: Path) -> None:
            if path == lazy.target / ONE:
                inodes.append(path.stat().st_ino)
                if len(inodes) == 1:
                    keep = path.with_name("kept")  # or its number would be used again
                    os.link(path, keep)
                    raise OSError(errno.EIO, "it did")
            super().sync_file(path)

    monkeypatch.setattr(hydration, "Env", Refusing)
    with pytest.raises(StorageError, match="cannot sync .*1-2-0.layer"):
        lazy.fetch_rest()
    assert stub_path(lazy.target, ONE).exists()
    lazy.fetch_rest()
    assert len(set(inodes)) == 2
    (lazy.target / ONE).with_name("kept").unlink()
    lazy.check_whole()


def test_stubs_that_cannot_be_listed_are_not_none(lazy: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    before, scandir = set(stub_names(lazy.target)), os.scandir

    def refused(path: Any) -> Any:
        if "stubs" in str(path):
            monkeypatch.setattr(os, "scandir", scandir)
            raise OSError(errno.EMFILE, "too many open files", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StorageError, match="cannot list"):
        lazy.fetch_rest()
    assert set(stub_names(lazy.target)) == before
    lazy.fetch_rest()
    lazy.check_whole()


def test_what_is_dropped_while_it_is_fetched_does_not_come_back(lazy: Lazy) -> None:
    env = StubEnv(lazy.target, lazy.bucket)
    noted: list[str] = []
    stubs = Stubs(lazy.target, lazy.bucket, Env(), lambda name: noted.append(str(name)))
    left = stubs.left()
    env.unlink(lazy.target / ONE)
    for _ in stubs._fetched(left):
        pass
    assert not (lazy.target / ONE).exists()
    assert ONE not in noted
    assert len(noted) == len(left) - 1


def test_what_is_dropped_just_as_it_comes_goes_again(lazy: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = hydration.Fetcher.fetch

    def fetched(self: Any, *arguments: Any) -> None:
        fetch(self, *arguments)
        Env().unlink(stub_path(lazy.target, ONE))  # as unlink begins

    monkeypatch.setattr(hydration.Fetcher, "fetch", fetched)
    stubs = Stubs(lazy.target, lazy.bucket, Env())
    for _ in stubs._fetched(stubs.left()):
        pass
    assert not (lazy.target / ONE).exists()


def test_an_object_that_is_away_is_no_reason_to_forget_the_others(lazy: Lazy) -> None:
    before = set(stub_names(lazy.target))
    packs = sorted(name for name in lazy.objects.by_name if "/packs/" in name)
    assert len(packs) > 2
    away = {name: lazy.objects.by_name.pop(name) for name in packs[1:2]}
    renew_stubs(lazy.target, lazy.bucket, Env())
    assert set(stub_names(lazy.target)) == before
    with pytest.raises(RemoteError):
        lazy.fetch_rest()
    lazy.objects.by_name |= away
    lazy.fetch_rest()
    lazy.check_whole()


def test_several_damaged_stubs_are_written_anew(lazy: Lazy) -> None:
    for name in list(stub_names(lazy.target)):
        stub_path(lazy.target, name).write_bytes(b"")
    with lazy.open() as store:
        assert store.missing() == []
        assert rows_of(store) == rows_of(lazy.store)
    lazy.fetch_rest()
    lazy.check_whole()


def test_a_disk_that_takes_a_part_of_a_write(lazy: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(partial_file.os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:1000]), at))
    with lazy.open() as store:
        assert rows_of(store, "big") == rows_of(lazy.store, "big")


def test_a_daemon_gives_whoever_connects_what_is_still_in_the_bucket(lazy: Lazy) -> None:
    with lazy.open() as store:
        name = f"layers/{large_of(store).path}"
        frames = list(contents_of(store.directory, [name]))
        assert sum(len(frame.chunk.data) for frame in frames) > 10_000


def test_a_damaged_object_keeps_no_other_copies_from_being_made(lazy: Lazy) -> None:
    place = lazy.copies.contents().places[ONE]
    data = bytearray(lazy.objects.by_name[place.object])
    data[place.offset + 200] ^= 1
    lazy.objects.by_name[place.object] = bytes(data)
    with lazy.open() as store:
        again = SimulatedBucket()
        copies = Copies(store, again)
        copies.step()
        copies.step()
        held = set(map(str, copies.contents().places))
        assert ONE not in held
        assert "layers/counts/raw/0/2-3-0.layer" in held
        assert "1-2-0.layer" in copies.level.status().problem


def test_an_object_that_is_collected_while_it_is_read(lazy: Lazy) -> None:
    with lazy.open() as store:
        reader = store.directory.reader(large_of(store))
        reader.block(0)
        lazy.store.compact()
        lazy.copies.push()
        used = {place.object for place in lazy.copies.contents().places.values()}
        for name in [n for n in lazy.objects.by_name if "/objects/" in n and n.rpartition("/")[0] not in used]:
            lazy.objects.by_name.pop(name)
        assert rows_of(store, "big", as_of=3) == rows_of(lazy.store, "big", as_of=3)
        assert store.missing() == []


def test_a_store_opens_while_its_bucket_is_away(open_store: OpenStore, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    store = open_store("original", settings=QUIET)
    store.append("counts", t=0, rows=pa.table({"k": ["a"], "n": [1]}), key=["k"])
    store.seal(0)
    store.sync()
    Copies(store, open_bucket(f"file://{bucket}")).push()
    restore(open_bucket(f"file://{bucket}"), tmp_path / "lazy", lazy=True)
    bucket.rename(tmp_path / "away")
    with nosync.open(tmp_path / "lazy") as lazy:
        assert (lazy.last_sealed(), lazy.safe_point()) == (0, 0)
        with pytest.raises(RemoteError, match="no such directory"):
            rows_of(lazy)
        assert lazy.status().lazy_layers == 1
    (tmp_path / "away").rename(bucket)
    with nosync.open(tmp_path / "lazy") as lazy:
        assert rows_of(lazy) == {"a": 1}


def test_an_interrupted_lazy_restore_may_become_a_whole_one(lazy: Lazy, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(lazy.target)

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "write_marker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restore(lazy.bucket, lazy.target, lazy=True)
    restore(lazy.bucket, lazy.target)
    lazy.check_whole()


def test_a_forked_process_does_not_hang(lazy: Lazy) -> None:
    env = StubEnv(lazy.target, lazy.bucket)
    env._pid = -1
    with pytest.raises(RemoteError, match="forked"):
        env.map(lazy.target / ONE)


class AtOnce:
    """A bucket that counts how many ranges are asked for at the same time. Each waits for another one, if one comes."""

    def __init__(self, bucket: SimulatedBucket) -> None:
        self._bucket, self._lock = bucket, threading.Lock()
        self.running, self.most, self.ranges = 0, 0, 0
        self._two = threading.Event()

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        with self._lock:
            self.running, self.ranges = self.running + 1, self.ranges + 1
            self.most = max(self.most, self.running)
            if self.running > 1:
                self._two.set()
        self._two.wait(0.2)
        try:
            return self._bucket.get_range(name, begin, end)
        finally:
            with self._lock:
                self.running -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


@pytest.mark.parametrize("reads", ["lookup", "read"])
def test_blocks_are_asked_for_at_once(lazy: Lazy, reads: str) -> None:
    bucket = AtOnce(lazy.bucket)
    settings = replace(SMALL_BLOCKS, background=False)
    with open_directory(lazy.target, settings=settings, env=StubEnv(lazy.target, bucket)) as store:  # type: ignore[arg-type]
        if reads == "read":
            assert rows_of(store, "big") == rows_of(lazy.store, "big")
        else:
            keys = pa.table({"k": [f"1-{i}" for i in range(0, 10_000, 500)]})
            assert store.lookup("big", keys).num_rows == 20
            before = bucket.ranges
            assert store.lookup("big", keys).num_rows == 20
            assert bucket.ranges == before, "they are here"
    assert bucket.most > 1
