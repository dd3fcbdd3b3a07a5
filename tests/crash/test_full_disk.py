"""A full disk: status and metrics answer, what was told stays, and everything goes on once there is any room."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.node.node import Node
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.testing.daemon_cluster import eventually, free_ports
from tests.helpers.small_disks import small_disk

ROOM_BYTES = 192 << 10
"""Far less than RocksDB's buffers, and enough for what has to be written."""


def append(store: nosync.Store, t: int) -> None:
    store.append("c", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
    store.seal(t)


class Full:
    """RocksDB on a disk without room."""

    def close(self) -> None:
        """Nothing."""

    def write(self, batch: object) -> None:
        raise Exception("IO error: No space left on device: While appending to file: 000004.log")


class Unsynced(Full):
    """It takes layers, which are not synced, and no safe point, which is."""

    def __init__(self, right: Any) -> None:
        self.write = right.write  # type: ignore[method-assign]

    def flush_wal(self, sync: bool) -> None:
        super().write(sync)


@contextlib.contextmanager
def full(catalog: Catalog, kind: Callable[[Any], Full] = lambda right: Full()) -> Iterator[None]:
    """Nothing can be written to this catalog, which is opened anew in vain."""
    right = catalog._db
    catalog._db = kind(right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nosync.lsm.manifests.catalog._opened", lambda *_, **__: kind(right))
        yield
    catalog._db = right


@pytest.fixture
def ballast(tmp_path: Path) -> Iterator[Path]:
    """A file that fills a real file system of 8 MiB when `fill` is called."""
    with small_disk(tmp_path / "disk", 8, "the catalog that cannot write covers the rest") as mount:
        yield mount / "ballast"


def fill(ballast: Path) -> None:
    with open(ballast, "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def write_all(catalog: Catalog) -> None:
    for i in range(10_000):
        catalog.apply(meta={f"fact {i}": "x" * 100})


def make_room(ballast: Path) -> None:
    os.truncate(ballast, ballast.stat().st_size - ROOM_BYTES)


@pytest.mark.parametrize("kind", [lambda right: Full(), Unsynced], ids=["nothing", "no-safe-point"])
def test_status_and_metrics_answer_where_nothing_can_be_written(tmp_path: Path, kind: Callable[[Any], Full]) -> None:
    """The safe point that was told is told; the next one, once it is written down."""
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    daemon = Daemon(DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {}, 1, metrics=metrics))
    daemon.start()

    def measured() -> str:
        return urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10).read().decode()

    try:
        with nosync.open(tmp_path / "n1") as store:
            append(store, 0)
            eventually("it is safe", lambda: store.safe_point() == 0)
            with full(daemon.node._catalog, kind):
                append(store, 1)
                eventually("it cannot be recorded", lambda: "disk is full" in str(dict(daemon.status().problems)))
                assert (store.safe_point(), daemon.status().last_sealed) == (0, 1)
                assert "nosync_safe_point_epoch 0.0" in measured()
                assert "nosync_problems 0.0" not in measured()
            eventually("it goes on", lambda: daemon.status().safe_point == 1)
            assert "nosync_safe_point_epoch 1.0" in measured()
            eventually("it is well", lambda: not daemon.status().problems)
    finally:
        daemon.stop()


def test_a_safe_point_that_cannot_be_written_down_is_not_told(tmp_path: Path) -> None:
    """Nothing would bind the next process to it, and inputs may be released because of it."""
    settings = nosync.StoreSettings(background=False)
    daemon = Daemon(DaemonConfig("n1", tmp_path / "n1", "127.0.0.1:0", {}, 1))
    daemon.node.close()
    with nosync.open(tmp_path / "n1", alone=True, settings=settings) as store:
        node = store.node
        assert isinstance(node, Node)
        node.announcer.listen(_OneCopy())
        append(store, 0)
        store.sync()
        with full(node._catalog):
            assert store.safe_point() is None
            assert "disk is full" in store.status().problems["the safe point"]
        assert store.safe_point() == 0
        assert not store.status().problems
        append(store, 1)
        store.sync()
        with full(node._catalog):
            assert store.safe_point() == 0, "which was told"
        assert store.safe_point() == 1


class _OneCopy:
    """A listener without peers."""

    def copies(self, entry: object) -> int:
        return 1

    def copies_of_file(self, path: object) -> int:
        return 1

    def safe_elsewhere(self, line: str) -> int:
        return -1

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


def test_the_catalog_goes_on_with_little_room(ballast: Path) -> None:
    """RocksDB waits for room for its buffers, or for ever."""
    path = ballast.with_name("catalog")
    catalog = Catalog(path)
    fill(ballast)
    with pytest.raises(nosync.StorageError, match="the disk is full: free space, and the node goes on by itself"):
        write_all(catalog)
    written = len(catalog.metas("fact "))
    for _ in range(3):
        with pytest.raises(nosync.StorageError, match="disk is full"):
            catalog.apply(meta={"one more": "x"})
    make_room(ballast)
    catalog.apply(meta={"after": "y"})
    assert set(catalog.metas("fact ")) == {f"fact {i}" for i in range(written)}
    catalog.close()
    again = Catalog(path)
    assert again.meta("after") == "y"
    assert len(again.metas("fact ")) == written
    again.close()


def test_a_catalog_that_took_the_place_is_not_written_to(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog")
    with full(catalog), pytest.raises(nosync.StorageError, match="disk is full"):
        catalog.apply(meta={"a": "1"})
    (tmp_path / "catalog").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(nosync.StorageError, match="was moved away"):
            catalog.apply(meta={"a": "2"})
    assert not (tmp_path / "catalog").exists()
    (tmp_path / "away").rename(tmp_path / "catalog")
    catalog.apply(meta={"a": "3"})
    assert catalog.meta("a") == "3"
    catalog.close()


def test_a_store_goes_on_by_itself_once_there_is_any_room(ballast: Path) -> None:
    root, settings = ballast.with_name("s"), nosync.StoreSettings(retry_s=0.05, scan_interval_s=0.05)
    with nosync.open(root, settings=settings) as store:
        node = store.node
        assert isinstance(node, Node)
        append(store, 0)
        store.sync()
        fill(ballast)
        with pytest.raises(nosync.StorageError, match="disk is full"):
            write_all(node._catalog)  # so that what comes next cannot be recorded
        os.truncate(ballast, ballast.stat().st_size - (24 << 10))  # room for the files of an epoch only
        append(store, 1)
        fill(ballast)
        eventually("it is told of", lambda: "disk is full" in str(store.status().problems))
        assert store.safe_point() == 0
        with nosync.open(root, read_only=True) as reader:
            found = reader.status()
            assert (found.safe_point, found.last_sealed) == (0, 1)
        make_room(ballast)
        eventually("it goes on", lambda: store.safe_point() == 1)
        eventually("it is well", lambda: not store.status().problems)
        append(store, 2)
        store.sync()
        assert store.safe_point() == 2
