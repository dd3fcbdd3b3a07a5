"""Parts of a task's own code, each beside the plain way: rows put into groups, keys looked up in layers, memory taken again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from bench.footprint import alone
from bench.harness import Result, Samples, paired
from nosync.kernels.groups import SUM, Groups
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.layers import reader
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, last_of, pack
from nosync.lsm.platform.process import keep_freed_memory, numpy_environment
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace

ROWS, KEYS, LAYERS = 250_000, 1_000_000, 8
"""What a shard of two gets of an epoch of 500,000 rows over 2,000,000 keys."""
TRACE = TraceId("kv", "raw", Shard(0))


def run(scale: str) -> Iterator[Result]:
    repeats = 10 if scale == "short" else 40
    with mock.patch.dict(os.environ, numpy_environment()):  # as Spark's workers are started
        for keys in (KEYS, 1000):
            ours, arrow = alone(_grouped, keys, repeats, True)
            if keys == KEYS:
                given_back, _ = alone(_grouped, keys, repeats, False)
                yield _result(
                    f"{ROWS:,} rows, sums by {keys:,} keys",
                    ours,
                    "freed memory goes back to the kernel",
                    given_back,
                    repeats,
                )
            yield _result(
                f"{ROWS:,} rows, sums by {keys:,} keys", ours, "Arrow's group_by, and in stored order", arrow, repeats
            )
        ours, binary = alone(_looked_up, repeats)
        yield _result(f"look up {ROWS:,} keys in {LAYERS} layers of as many", ours, "binary search", binary, repeats)


def _result(workload: str, ours: Samples, baseline: str, theirs: Samples, repeats: int) -> Result:
    ratio = ours.median / theirs.median
    return Result(
        workload, "nosync", 1e3 * ours.median, "ms p50", baseline, 1e3 * theirs.median, ratio, "< 1", ratio < 1,
        ours.spread, repeats,
    )  # fmt: skip


def _grouped(keys: int, repeats: int, keep: bool) -> tuple[Samples, Samples]:
    if keep:  # as tasks do
        keep_freed_memory()
    random = np.random.default_rng(0)
    k, v = pa.array(random.integers(0, keys, ROWS)), pa.array(np.arange(ROWS))
    hashes = hash32([k])  # is there in either case

    def ours() -> pa.Table:
        groups = Groups.of([k], hashes)
        return pa.table({"k": k.take(pa.array(groups.first)), "v": groups.reduce(v, SUM)})

    def by_arrow() -> pa.Table:
        rows = pa.table({"k": k, "hash": hashes, "v": v})
        summed = rows.group_by("k", use_threads=False).aggregate([("hash", "min"), ("v", "sum")])
        ordered = arrange(summed.select(["k", "v_sum"]), ["k"], whose="bench", hashes=summed["hash_min"].to_numpy())
        return pa.Table.from_batches([ordered.batch]).select(["k", "v_sum"]).rename_columns(["k", "v"])

    assert ours().equals(by_arrow().combine_chunks()), "both say the same"
    return paired(ours, by_arrow, repeats, warm=3)


def _looked_up(repeats: int) -> tuple[Samples, Samples]:
    keep_freed_memory()
    random = np.random.default_rng(0)
    keys = pa.array(random.choice(KEYS, ROWS, replace=False))
    hashes = hash32([keys])
    end = LAYERS - 1
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        root = Path(temporary)
        (root / "tmp").mkdir()
        directory = LayerDirectory(root, 128)
        for t in range(LAYERS):
            of_layer = np.sort(random.choice(KEYS, ROWS, replace=False))
            rows = arrange(pa.table({"k": of_layer, "v": of_layer * 2}), ["k"], whose="bench")
            directory.publish(LayerId(TRACE, Description.of_epoch(t)), rows)

        def opened() -> Trace:
            return LayerDirectory(root, 128).trace(TRACE, until=pack(end + 1), as_of=last_of(end))

        def look_up(trace: Trace, *, by_index: bool) -> int:
            with mock.patch.object(reader, "ROWS_OF_A_LOOKUP", reader.ROWS_OF_A_LOOKUP if by_index else 0):
                return int(trace.lookup([keys], hashes, Time(last_of(end))).found.sum())

        indexed, plain = opened(), opened()  # each with its own blocks
        assert look_up(indexed, by_index=True) == look_up(plain, by_index=False), "both say the same"
        return paired(lambda: look_up(indexed, by_index=True), lambda: look_up(plain, by_index=False), repeats, warm=2)
