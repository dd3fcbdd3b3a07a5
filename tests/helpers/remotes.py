"""Stores with copies in a bucket, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import nosync
from nosync.lsm.node.node import Node
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.level import RemoteLevel
from nosync.replication.remote.log import read_log
from nosync.replication.remote.names import EMBEDDED, NodeNames
from nosync.replication.remote.pack import Contents
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.uploader import Uploader
from tests.conftest import OpenStore

NAMES = NodeNames(EMBEDDED)
QUIET = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, archive_epochs=4)


def epochs(store: nosync.Store, numbers: range, mark: str = "a", *, stages: tuple[str, ...] = ("counts",)) -> None:
    """Seals epochs in which each stage gets a row of the epoch's own, and one that every epoch replaces."""
    for t in numbers:
        for stage in stages:
            rows = pa.table({"k": [f"{mark}{t}", "all"], "n": [t, t]})
            store.append(stage, t=t, rows=rows, key=["k"])
        store.seal(t)
    store.sync()


def rows_of(store: nosync.Store, stage: str = "counts", **options: object) -> dict[str, int]:
    """Returns the state of a stage."""
    found = store.read(stage, **options)  # type: ignore[arg-type]
    return dict(zip(found["k"].to_pylist(), found["n"].to_pylist(), strict=True))


class Copies:
    """A store's copies without a thread: each step is taken by the test."""

    def __init__(self, store: nosync.Store, bucket: Bucket, name: str = EMBEDDED, **settings: float) -> None:
        assert isinstance(store.node, Node)
        self.store, self.bucket = store, bucket
        values = {"flush_s": 0.0, "close_s": 0.0, "flush_bytes": 1 << 20, "large_bytes": 1 << 19, **settings}
        self.level = RemoteLevel(store.node, RemoteSettings("memory://test", **values), name=name, bucket=bucket)  # type: ignore[arg-type]
        self.level._thread.start = lambda: None  # type: ignore[method-assign]
        self.level.start()

    def step(self) -> None:
        """Does what the thread does every second."""
        self.level._step()

    def push(self) -> None:
        """Puts everything. Raises where the bucket refuses."""
        assert self.level.push(10.0), self.level.status()

    def flush_once(self) -> Uploader:
        """Puts one pack, and of large layers what there is room for: what a writer left that was lost then."""
        uploader = self.level._uploader = self.level._begin()
        uploader.look_at_all()
        uploader.gather()
        uploader.flush()
        return uploader

    def contents(self) -> Contents:
        """Returns what the bucket holds, as its log says."""
        found = read_log(self.bucket, NAMES, self.level._source.marker.store_id)
        assert found is not None
        return found


def files_below(root: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bytes]:
    """Returns the files of a directory by their relative paths."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if wanted(name)}


def open_quiet(open_store: OpenStore, name: str = "store", **options: object) -> nosync.Store:
    return open_store(name, settings=QUIET, **options)
