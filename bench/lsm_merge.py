"""Merging on one core beside RocksDB's compaction of the same rows and a plain Arrow rewrite; and the space that is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
from rocksdict import Options, Rdict, WriteBatch

import nosync
from bench.footprint import alone
from bench.harness import Result, Samples, paired, timed
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.worker import MergeProcess
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.lsm.platform.process import numpy_environment
from nosync.lsm.trace.directory import LayerDirectory

LAYERS = 8
ROWS = 1_000_000
REPEATS, STARTS = 3, 10
WINDOW_EPOCHS, WINDOW_ROWS, WINDOWS_KEPT = 60, 20_000, 10
TRACE = TraceId("kv", "raw", Shard(0))


def run(scale: str) -> Iterator[Result]:
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary) / "s"
        (root / "tmp").mkdir(parents=True)
        directory = LayerDirectory(root, 128)
        random = np.random.default_rng(1)
        tables = []
        for t in range(LAYERS):
            # Half of the keys of each layer are new, half replace older ones.
            keys = np.concatenate(
                [np.arange(ROWS // 2) + t * ROWS // 2, random.choice(max(t, 1) * ROWS // 2, ROWS // 2, replace=False)]
            )
            keys = np.unique(keys)
            tables.append(pa.table({"k": keys, "v": keys * 0.5}))
            directory.publish(LayerId(TRACE, Description.of_epoch(t)), arrange(tables[-1], ["k"], whose="bench"))
        told = numpy_environment()
        with mock.patch.dict(os.environ, told):  # as a node starts a process that merges
            rows, size, live, taken = alone(_merge, root)
        best = min(taken)
        rocks = min(_rocksdb_compaction(Path(temporary) / f"rocks{i}", tables) for i in range(REPEATS))
        yield Result(
            f"merge {LAYERS} layers of {ROWS:,} rows, one core, synced", "nosync", rows / best, "rows/s",
            "RocksDB's compaction of the same runs", rows / rocks, rocks / best, ">= 5,000,000", rows / best >= 5e6,
            repeats=REPEATS,
        )  # fmt: skip
        if told:  # on Zen 4; in turn, so that drift of the machine hits both
            pairs = []
            for _ in range(REPEATS):
                with mock.patch.dict(os.environ, told):
                    with_told = min(alone(_merge, root).seconds)
                pairs.append((with_told, min(alone(_merge, root).seconds)))
            ratios = Samples([untold / with_told for with_told, untold in pairs])
            yield Result(
                "the same beside a NumPy that is not told of this processor", "nosync",
                rows / min(a for a, _ in pairs), "rows/s", "not told", rows / min(b for _, b in pairs), ratios.median,
                spread=ratios.spread, repeats=REPEATS,
            )  # fmt: skip
        arrow = min(timed(lambda: _plain_write(Path(temporary) / "plain.arrow", tables)) for _ in range(REPEATS))
        yield Result(
            "the same beside a plain rewrite of the rows", "nosync", rows / best, "rows/s", "Arrow concat + write",
            rows / arrow, arrow / best, repeats=REPEATS,
        )  # fmt: skip
        ratio = size / (16 * live)
        yield Result(
            "space after merging", "nosync", size / 1e6, "MB", "live rows, 2 columns of 8 bytes", 16 * live / 1e6, ratio,
            "<= 1.3", ratio <= 1.3,
        )  # fmt: skip
        yield from _start(root)
        for retain in (0, 1):
            yield from _windows(Path(temporary) / f"windows-{retain}", retain)


class Merged(NamedTuple):
    rows: int
    merged_bytes: int
    live_rows: int
    seconds: list[float]


def _merge(root: Path) -> Merged:
    """Merges all of the trace's layers, several times over."""
    pa.set_cpu_count(1)
    directory = LayerDirectory(root, 128)
    layers = [directory.reader(LayerId(TRACE, Description.of_epoch(t))) for t in range(LAYERS)]
    seconds = []
    for _ in range(REPEATS):
        merge = Merge(root, layers, since=pack(LAYERS - 1), bottom=True, env=directory.env)
        seconds.append(timed(partial(list, merge.steps())))
        merged_path = directory.path_of(merge.id)
        size, live = merged_path.stat().st_size, merge.published.rows
        merged_path.unlink()
    return Merged(sum(layer.info.rows for layer in layers), size, live, seconds)


def _start(root: Path) -> Iterator[Result]:
    """A process that merges next to nothing, beside one that only imports what merging cannot do without; and one that is
    there already.
    """
    directory = LayerDirectory(root, 128)
    ids = []
    for t in range(2):
        ids.append(LayerId(TraceId("few", "raw", Shard(0)), Description.of_epoch(t)))
        directory.publish(ids[-1], arrange(pa.table({"k": [t], "v": [0.5]}), ["k"], whose="bench"))
    merge = Merge(root, [directory.reader(id) for id in ids], since=pack(1), bottom=True, env=directory.env)

    def merged(process: MergeProcess) -> None:
        process.run(merge, lambda: False)
        directory.path_of(merge.id).unlink()

    def started() -> None:
        with MergeProcess() as process:
            merged(process)

    imports = [sys.executable, "-c", "import numpy, pyarrow.compute, blake3"]
    ours, least = paired(started, lambda: subprocess.run(imports, check=True), STARTS)
    yield Result(
        "start a process that merges next to nothing", "nosync", ours.median, "s p50", "Python, NumPy and Arrow", least.median,
        ours.median / least.median, "<= 2", ours.median <= 2 * least.median, ours.spread, STARTS,
    )  # fmt: skip
    with MergeProcess() as process:
        again, first = paired(lambda: merged(process), started, STARTS)
    yield Result(
        "merge next to nothing in a process that is there", "nosync", again.median, "s p50", "one that is started for it",
        first.median, again.median / first.median, "< 1", again.median < first.median, again.spread, STARTS,
    )  # fmt: skip


def _windows(root: Path, retain: int) -> Iterator[Result]:
    """Keys of windows that come and go: 20,000 an epoch, gone ten epochs later; `retain` epochs of history are kept."""
    with nosync.open(root, retain=retain) as store:
        for t in range(WINDOW_EPOCHS):
            rows = pa.table({"w": np.full(WINDOW_ROWS, t), "k": np.arange(WINDOW_ROWS), "n": np.arange(WINDOW_ROWS)})
            past = pa.table({"w": np.full(WINDOW_ROWS, t - WINDOWS_KEPT), "k": np.arange(WINDOW_ROWS)})
            gone = past if t >= WINDOWS_KEPT else past.slice(0, 0)
            store.append("windows", t=t, rows=rows, key=["w", "k"], deletes=gone)
            store.seal(t)
            store.sync()
        store.compact()
        live, size = 24 * store.read("windows").num_rows, sum(layer.bytes for layer in store.layers())
    yield Result(
        f"space of {WINDOWS_KEPT} windows of {WINDOW_ROWS:,} keys, merged, {retain} epochs of history", "nosync", size / 1e6,
        "MB", "live rows, 3 columns of 8 bytes", live / 1e6, size / live, "" if retain else "<= 1.3",
        None if retain else size / live <= 1.3,
    )  # fmt: skip


def _rocksdb_compaction(path: Path, tables: Sequence[pa.Table]) -> float:
    """Returns the seconds that RocksDB takes to merge the same runs, of keys and values of 8 bytes, into one, which is
    synced.
    """
    options = Options(raw_mode=True)
    options.set_disable_auto_compactions(True)
    options.set_max_background_jobs(1)
    db = Rdict(str(path), options)
    for table in tables:
        keys = [k.to_bytes(8, "big") for k in table["k"].to_pylist()]
        for start in range(0, len(keys), 50_000):
            batch = WriteBatch(raw_mode=True)
            for key in keys[start : start + 50_000]:
                batch.put(key, key)
            db.write(batch)
        db.flush()
    taken = timed(lambda: db.compact_range(None, None))
    db.close()
    return taken


def _plain_write(path: Path, tables: list[pa.Table]) -> None:
    table = pa.concat_tables(tables).combine_chunks()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
