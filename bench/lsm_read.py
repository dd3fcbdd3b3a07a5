"""Batch lookups in a large shard beside RocksDB's multi-get, and opening a view on it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from rocksdict import Options, Rdict, WriteBatch

from bench.harness import Result, sample
from bench.states import build_state
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.model.layer import Shard, TraceId
from nosync.lsm.model.timestamp import Time, epoch_of, last_of, pack
from nosync.lsm.trace.directory import LayerDirectory

KEYS = 100_000
STATE = 10_000_000
VIEW_ROWS = {"short": 10_000_000, "normal": 10_000_000, "full": 50_000_000}
TRACE = TraceId("kv", "raw", Shard(0))


def run(scale: str) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        directory = build_state(Path(temporary) / "s", STATE, TRACE)
        yield from _lookups(Path(temporary), directory)
        if VIEW_ROWS[scale] != STATE:
            directory = build_state(Path(temporary) / "v", VIEW_ROWS[scale], TRACE)
        yield _opening(directory)


def _lookups(root: Path, directory: LayerDirectory) -> Iterator[Result]:
    random = np.random.default_rng(0)
    keys = pa.array(random.choice(STATE, KEYS, replace=False))
    (description,) = directory.descriptions(TRACE)
    end = epoch_of(Time(description.upper - 1))
    trace = directory.trace(TRACE, until=pack(end + 1), as_of=last_of(end))

    def ours() -> None:
        answer = trace.lookup([keys], hash32([keys]), last_of(end))
        assert answer.found.all()

    taken = sample(ours, 20, warm=3)
    rocks_rate = _rocksdb_multi_get(root / "rocks", random)
    rate = KEYS / taken.median
    yield Result(
        f"look up {KEYS:,} keys in {STATE:,} rows, warm, hashing included", "nosync", rate, "keys/s",
        "rocksdict multi-get (1M rows)", rocks_rate, rate / rocks_rate, ">= 3,000,000", rate >= 3e6,
        taken.spread, 20,
    )  # fmt: skip


def _rocksdb_multi_get(path: Path, random: np.random.Generator) -> float:
    """RocksDB with a tenth of the rows, which flatters it: filling 10 M takes half a minute."""
    rows = STATE // 10
    db = Rdict(str(path), Options(raw_mode=True))
    for start in range(0, rows, 100_000):
        batch = WriteBatch(raw_mode=True)
        for k in range(start, start + 100_000):
            batch.put(k.to_bytes(8, "big"), (k * 2).to_bytes(8, "big"))
        db.write(batch)
    keys: list[str | int | float | bytes | bool] = [
        int(k).to_bytes(8, "big") for k in random.choice(rows, KEYS, replace=False)
    ]
    taken = sample(lambda: db.get(keys), 5)
    db.close()
    return KEYS / taken.median


def _opening(directory: LayerDirectory) -> Result:
    (description,) = directory.descriptions(TRACE)
    end = epoch_of(Time(description.upper - 1))

    def open_view() -> None:
        LayerDirectory(directory.root, 128).trace(TRACE, until=pack(end + 1), as_of=last_of(end))

    taken = sample(open_view, 50, warm=3)
    size = sum(p.stat().st_size for p in directory.root.rglob("*.layer"))
    arrow = sample(lambda: sum(map(len, map(Path.read_bytes, directory.root.rglob("*.layer")))), 3)
    value, base = 1e3 * taken.median, 1e3 * arrow.median
    return Result(
        f"open a view on a merged shard of {size / 1e9:.2f} GB", "nosync", value, "ms p50", "reading its bytes", base,
        value / base, "<= 10 ms", value <= 10, taken.spread, 50,
    )  # fmt: skip
