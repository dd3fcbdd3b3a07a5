"""A store that has run for long: opening it and asking it, with a file for each epoch's manifest and with archives of
them; and noticing the next epoch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import nosync
from bench.harness import Result, timed
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.node.node import Node
from nosync.lsm.settings import ARCHIVE_EPOCHS
from nosync.lsm.trace.directory import LayerDirectory

SHARDS, ROWS, KEYS = 4, 50, 1000
RETAIN = 100
MERGE_EVERY = 250
REPEATS = 5
LEARNED = 100
OPEN = """
import json, sys, tempfile, time
import psutil, nosync
settings = nosync.StoreSettings(background=False, archive_epochs=None)
with tempfile.TemporaryDirectory() as empty:  # the modules are loaded by then
    nosync.open(empty, settings=settings).close()
process = psutil.Process()
before = process.memory_info().rss
start = time.perf_counter()
store = nosync.open(sys.argv[1], settings=settings)
opened = time.perf_counter() - start
start = time.perf_counter()
assert store.safe_point() == store.last_sealed()
asked = time.perf_counter() - start
grown = process.memory_info().rss - before
store.close()
start = time.perf_counter()
with nosync.open(sys.argv[1], read_only=True) as store:
    assert store.status().missing == 0
print(json.dumps([opened, asked, time.perf_counter() - start, grown]))
"""


def run(scale: str) -> Iterator[Result]:
    epochs = {"short": 3_000, "normal": 10_000, "full": 100_000}[scale]
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary) / "s"
        _fill(root, epochs)
        singly, size = _open(root), _bytes(root)
        with nosync.open(root, settings=nosync.StoreSettings(background=False)) as store:
            assert isinstance(store.node, Node)
            before = -1
            count = len(store.node.timelines.archives())
            took_s = 0.0
            while count != before:
                took_s += timed(store.node.archive_manifests)
                before, count = count, len(store.node.timelines.archives())
        archived, archived_size = _open(root), _bytes(root)
        next_s, all_s = _learn(root, epochs)
        names = ("open it", "ask for its safe point", "nosync status, read only")
        for name, with_, without in zip(names, archived, singly, strict=False):
            yield Result(
                f"{name}, {epochs:,} epochs of {SHARDS} layers", "nosync", with_ * 1000, "ms", "no archives",
                without * 1000, with_ / without, repeats=REPEATS,
            )  # fmt: skip
        yield Result("memory that opening takes", "nosync", archived[3] / 1e6, "MB", "no archives", singly[3] / 1e6,
                     archived[3] / singly[3], repeats=REPEATS)  # fmt: skip
        yield Result("disk that manifests take", "nosync", archived_size / 1e6, "MB", "no archives", size / 1e6,
                     archived_size / size)  # fmt: skip
        yield Result(
            "notice an epoch that another process sealed", "nosync", next_s * 1000, "ms", "a look at all epochs", all_s * 1000,
            next_s / all_s, repeats=LEARNED,
        )  # fmt: skip
        yield Result(f"put {ARCHIVE_EPOCHS:,} manifests into one file", "nosync", took_s / count * 1000, "ms")


def _fill(root: Path, epochs: int) -> None:
    random = np.random.default_rng(1)
    settings = nosync.StoreSettings(retain=RETAIN, archive_epochs=None, background=False, grace_s=0.0)
    with nosync.open(root, settings=settings) as store:
        for t in range(epochs):
            ids = []
            for shard in range(SHARDS):
                keys = pa.array(np.unique(random.integers(0, KEYS, ROWS)) * SHARDS + shard)
                store.append("counts", shard=shard, t=t, rows=pa.table({"k": keys, "v": keys}), key=["k"])
                ids.append(LayerId(TraceId("counts", "raw", Shard(shard)), Description.of_epoch(t)))
            store.node.seal(t, ids)
            if t % MERGE_EVERY == MERGE_EVERY - 1:
                store.compact()


def _learn(root: Path, epochs: int) -> tuple[float, float]:
    """Returns medians of how long a node takes to know of an epoch that another process sealed: by turns told of its
    file, and not.
    """
    told_s, untold_s = list[float](), list[float]()
    with nosync.open(root, settings=nosync.StoreSettings(background=False)) as store:
        assert isinstance(store.node, Node)
        of_a_job = Sealer(LayerDirectory(root, store.directory.key_groups), 1)
        for t in range(epochs, epochs + 2 * LEARNED):
            ids = [LayerId(TraceId("counts", "raw", Shard(shard)), Description.of_epoch(t)) for shard in range(SHARDS)]
            for id in ids:
                of_a_job.directory.publish(
                    id, arrange(pa.table({"k": [id.trace.shard.index], "v": [t]}), ["k"], whose="bench")
                )
            manifest, _ = of_a_job.seal(t, ids, MAIN, None, None)
            if t % 2:
                told_s.append(timed(lambda path=manifest.path: store.node.parts.learning.learn([path])))  # type: ignore[misc]
            else:
                untold_s.append(timed(store.node.learn))
            if store.last_sealed() != t:
                raise RuntimeError(f"epoch {t} was not noticed")
    return statistics.median(told_s), statistics.median(untold_s)


def _open(root: Path) -> list[float]:
    """Returns medians of what `OPEN` measures, each time in a new process."""
    found = [
        json.loads(subprocess.run([sys.executable, "-c", OPEN, root], check=True, capture_output=True).stdout)
        for _ in range(REPEATS)
    ]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def _bytes(root: Path) -> int:
    """Returns what the manifests take on the disk, which counts in blocks."""
    return sum(path.stat().st_blocks * 512 for path in (root / "manifests").rglob("*.json"))
