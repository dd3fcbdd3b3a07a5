"""Copies in an object store: what they cost a job that runs, and how soon a lost store is back.

The bucket is a directory, so what is measured is nosync's own work; a network's comes on top.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

import nosync
from bench.flink import run_flink
from bench.harness import Result, Samples, timed
from nosync.lsm.node.node import Node
from nosync.replication.remote.bucket import Bucket, ObjectInfo, UnavailableError
from nosync.replication.remote.bucket_store import BucketStore, connect_bucket
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.level import RemoteLevel
from nosync.replication.remote.restore import restore
from nosync.replication.remote.stub_env import StubEnv

STAGE = "state"
ROWS = 2_000
FLUSH_S = 1.0
LOOKED_UP = 10
WIDE_BYTES = 1_000
SLOW_S = 0.5
FLINK_PAD_BYTES, FLINK_BYTES_A_KEY = 128, 125
"""The second is about what a key takes in a savepoint."""


class Counting:
    """A bucket that counts what is asked of it, and may be slow or away."""

    def __init__(self, bucket: Bucket, *, slow_s: float = 0.0, is_dead: bool = False) -> None:
        self.url, self._bucket, self._slow_s, self.is_dead = bucket.url, bucket, slow_s, is_dead
        self.puts, self.gets, self.put_bytes = 0, 0, 0

    def _wait(self) -> None:
        if self._slow_s:
            time.sleep(self._slow_s)
        if self.is_dead:
            raise UnavailableError("the benchmark's bucket is away")

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        self._wait()
        self.puts += 1
        self.put_bytes += len(data)
        return self._bucket.put_new(name, data)

    def get(self, name: str) -> bytes:
        self._wait()
        self.gets += 1
        return self._bucket.get(name)

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        self._wait()
        self.gets += 1
        return self._bucket.get_range(name, begin, end)

    def get_end(self, name: str, size_bytes: int) -> bytes:
        self._wait()
        self.gets += 1
        return self._bucket.get_end(name, size_bytes)

    def directories(self, prefix: str) -> list[str]:
        self._wait()
        return self._bucket.directories(prefix)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self._wait()
        return self._bucket.list(prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._wait()
        self._bucket.delete(names)


def run(scale: str) -> Iterator[Result]:
    epochs, megabytes = {"short": (200, 64), "normal": (1_000, 512), "full": (3_000, 4_096)}[scale]
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        yield from _while_running(Path(temporary), epochs)
        yield from _after_a_loss(Path(temporary), megabytes)
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        yield from _wide_rows(Path(temporary), megabytes)
    sizes = {"short": (50, 200), "normal": (250, 1_000, 4_000), "full": (1_000, 10_000, 20_000)}[scale]
    yield from _first_outputs(sizes)
    if scale != "short":  # Flink's own start takes longer than a short run may
        yield from _beside_flink(megabytes=(250, 500))


def _while_running(root: Path, epochs: int) -> Iterator[Result]:
    """Appends and seals epochs, a hundred a second at most, with the level off, on, slow and dead."""
    without, _, _ = _epochs(root / "off", epochs, None)
    ways = {"on": Counting(_bucket(root / "on")), "slow": Counting(_bucket(root / "slow"), slow_s=SLOW_S)}
    ways["dead"] = Counting(_bucket(root / "dead"))
    for way, bucket in ways.items():
        samples, changed, took_s = _epochs(root / f"store-{way}", epochs, bucket, dies=way == "dead")
        p = 99.9 if epochs >= 1_000 else 99
        yield Result(
            f"p{p:g} of append and seal, copies {way}", "nosync", samples.percentile(p) * 1000, "ms", "without copies",
            without.percentile(p) * 1000, samples.percentile(p) / without.percentile(p), goal="<= 1.5", repeats=epochs,
        )  # fmt: skip
        if way == "on":
            puts = bucket.puts / (took_s / FLUSH_S)
            yield Result("PUTs an interval", "nosync", puts, "PUTs", goal="<= 2", met=puts <= 2)
            yield Result(
                "bytes put for a byte of change", "nosync", bucket.put_bytes / changed, "bytes", goal="<= 1.5",
                met=bucket.put_bytes / changed <= 1.5,
            )  # fmt: skip


def _bucket(path: Path) -> Bucket:
    return open_bucket(f"file://{path.absolute()}")


def _epochs(root: Path, epochs: int, bucket: Counting | None, *, dies: bool = False) -> tuple[Samples, int, float]:
    """Returns how long each epoch took, how many bytes changed, and how many seconds all took."""
    random, seconds, changed, began_s = np.random.default_rng(7), [], 0, time.perf_counter()
    with nosync.open(root, retain=10) as store:
        assert isinstance(store.node, Node)
        if bucket is not None:
            settings = nosync.RemoteSettings("memory://bench", flush_s=FLUSH_S, close_s=0.0)
            RemoteLevel(store.node, settings, bucket=bucket).start()
            store.sync_remote()
            bucket.puts = bucket.put_bytes = 0  # it has begun
        for t in range(epochs):
            if dies and bucket is not None and t == epochs // 4:
                bucket.is_dead = True
            rows = _rows(random.choice(ROWS * 50, ROWS, replace=False), t)
            begin = time.perf_counter()
            changed += store.append(STAGE, t=t, rows=rows, key=["k"]).size_bytes
            store.seal(t)
            seconds.append(time.perf_counter() - begin)
            time.sleep(0.008)
        if bucket is not None and not dies:
            store.sync_remote(120)
    return Samples(seconds), changed, time.perf_counter() - began_s


def _rows(keys: np.ndarray[tuple[int], np.dtype[np.int64]], t: int) -> pa.Table:
    return pa.table({"k": keys, "t": np.full(len(keys), t), "x": np.random.default_rng(t).random(len(keys))})


def _after_a_loss(root: Path, megabytes: int) -> Iterator[Result]:
    """Restores a state, and reads some keys of it where it is."""
    rows, parts = megabytes * 1_000_000 // 24, 8
    original, bucket = root / "original", _bucket(root / "bucket")
    with nosync.open(original, remote=f"file://{(root / 'bucket').absolute()}") as store:
        for t in range(parts):
            store.append(STAGE, t=t, rows=_rows(np.arange(t * rows // parts, (t + 1) * rows // parts), t), key=["k"])
            store.seal(t)
        store.compact()
        store.sync_remote(600)
    copied_s = timed(lambda: shutil.copytree(original, root / "copied"))
    restored_s = timed(lambda: restore(bucket, root / "restored"))
    size = sum(path.stat().st_size for path in (root / "restored").rglob("*.layer"))
    settings = {"MB": round(size / 1e6)}
    yield Result("restore, every byte compared", "nosync", restored_s, "s", "cp -r of the directory, nothing compared",
                 copied_s, restored_s / copied_s, settings=settings)  # fmt: skip
    with connect_bucket(bucket, None) as store:
        assert isinstance(store, BucketStore)
        keys = pa.table({"k": np.random.default_rng(1).integers(0, rows, LOOKED_UP)})
        looked_up_s = timed(lambda: store.lookup(STAGE, keys))
        fetched = store.env.fetcher.bytes
    yield Result(f"first lookup of {LOOKED_UP} keys in the bucket", "nosync", looked_up_s, "s", "a restore", restored_s,
                 looked_up_s / restored_s, settings=settings)  # fmt: skip
    yield Result(f"bytes fetched for {LOOKED_UP} keys", "nosync", fetched / 1e6, "MB", "all of it", size / 1e6,
                 fetched / size, settings=settings)  # fmt: skip


def _wide_rows(root: Path, megabytes: int) -> Iterator[Result]:
    """Reads some keys of a state that one epoch loaded, with a kilobyte in each row: nothing merged it yet."""
    rows = megabytes * 1_000_000 // WIDE_BYTES
    with nosync.open(root / "store", remote=f"file://{(root / 'bucket').absolute()}") as store:
        text = pa.repeat(pa.scalar("x" * WIDE_BYTES), rows)
        store.append(STAGE, t=0, rows=pa.table({"k": np.arange(rows), "text": text}), key=["k"])
        store.seal(0)
        store.sync_remote(600)
    with connect_bucket(_bucket(root / "bucket"), None) as store:
        assert isinstance(store, BucketStore)
        keys = pa.table({"k": np.random.default_rng(1).integers(0, rows, LOOKED_UP)})
        assert store.lookup(STAGE, keys).num_rows == LOOKED_UP
        fetched = store.env.fetcher.bytes
    yield Result(
        f"bytes fetched for {LOOKED_UP} keys, 1 kB each, loaded in one epoch", "nosync", fetched / 1e6, "MB", "all of it",
        float(megabytes), fetched / megabytes / 1e6, settings={"MB": megabytes},
    )  # fmt: skip


def _first_outputs(sizes: Sequence[int]) -> Iterator[Result]:
    """Loses states of several sizes, and says how long it takes until a new epoch is sealed that reads some keys."""
    smallest_s = 0.0
    for megabytes in sizes:
        with tempfile.TemporaryDirectory(dir=".") as temporary:
            root = Path(temporary)
            url, rows = _lost_state(root, megabytes)
            lazy_s, fetched = _first_output(root / "lazy", url, rows, lazy=True)
            whole_s, _ = _first_output(root / "whole", url, rows, lazy=False)
        smallest_s = smallest_s or lazy_s
        settings = {"MB": megabytes, "MB fetched by then": round(fetched / 1e6, 1)}
        yield Result(
            f"first epoch after a loss of {megabytes / 1000:g} GB, lazy", "nosync", lazy_s, "s",
            f"the same of {sizes[0] / 1000:g} GB", smallest_s, lazy_s / smallest_s, goal="<= 1.5",
            met=lazy_s <= 1.5 * smallest_s, settings=settings,
        )  # fmt: skip
        yield Result(
            f"first epoch after a loss of {megabytes / 1000:g} GB, restored whole", "nosync", whole_s, "s", "lazy", lazy_s,
            whole_s / lazy_s, settings=settings,
        )  # fmt: skip


def _lost_state(root: Path, megabytes: int) -> tuple[str, int]:
    """Puts a state of one merged layer into a bucket. Returns the URL, and how many keys there are."""
    rows, url = megabytes * 1_000_000 // 24, f"file://{(root / 'bucket').absolute()}"
    parts = max(2, rows // 10_000_000)
    with nosync.open(root / "lost", remote=url, settings=nosync.StoreSettings(merge=False)) as store:
        for t in range(parts):
            store.append(STAGE, t=t, rows=_rows(np.arange(t * rows // parts, (t + 1) * rows // parts), t), key=["k"])
            store.seal(t)
            store.sync()
        store.compact()
        store.sync_remote(3600)
    shutil.rmtree(root / "lost")
    return url, rows


def _first_output(target: Path, url: str, rows: int, *, lazy: bool) -> tuple[float, int]:
    """Returns how long it takes from nothing to an epoch that is sealed, and how many bytes were fetched by then."""
    keys = pa.table({"k": np.random.default_rng(1).integers(0, rows, LOOKED_UP)})
    _forget(Path(urllib.parse.urlparse(url).path))
    begin = time.perf_counter()
    report = restore(open_bucket(url, to_read=True), target, lazy=lazy)
    with nosync.open(target) as store:
        found = store.lookup(STAGE, keys)
        t = store.last_sealed()
        assert t is not None
        store.append(STAGE, t=t + 1, rows=found, key=["k"])
        store.seal(t + 1)
        seconds = time.perf_counter() - begin
        env = store.directory.env
        fetched = report.fetched_bytes + (env.fetcher.bytes if isinstance(env, StubEnv) else 0)
    return seconds, fetched


def _forget(bucket: Path) -> None:
    """Lets the system forget the contents of a bucket's files: small ones would still be in memory, and large ones not."""
    for path in bucket.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _beside_flink(megabytes: Sequence[int]) -> Iterator[Result]:
    """Has Flink begin again from savepoints of about these sizes, which are on this machine's disk as well."""
    for size in megabytes:
        keys = size * 1_000_000 // FLINK_BYTES_A_KEY
        found = run_flink("flink_restore.py", {"keys": keys, "pad_bytes": FLINK_PAD_BYTES, "rows_per_s": 1_000})
        with tempfile.TemporaryDirectory(dir=".") as temporary:
            url, rows = _lost_state(Path(temporary), round(found["state_bytes"] / 1e6))
            ours_s, _ = _first_output(Path(temporary) / "lazy", url, rows, lazy=True)
        yield Result(
            f"first epoch after a loss of {found['state_bytes'] / 1e9:.2f} GB, lazy", "nosync", ours_s, "s",
            f"Flink {found['version']}: tasks run from a native savepoint", found["seconds"], ours_s / found["seconds"],
            settings={"MB": round(found["state_bytes"] / 1e6), "keys in Flink": keys},
        )  # fmt: skip
