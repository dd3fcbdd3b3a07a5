"""Task-side publish of a 10,000-row layer: against a plain Arrow file, and while the shard's state grows.

A node makes files ahead, between publishing and publishing; that is done here, too, and not counted. Where a node has
none the task makes the file itself: that is measured as well; and both once more where many files were removed a moment
ago, past which some file systems look when they make one.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.harness import Result, Samples, timed
from bench.states import build_state
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, epoch_of
from nosync.lsm.node.compactor import BACKGROUND_PAUSE_SHARE
from nosync.lsm.platform.file_pool import FilePool
from nosync.lsm.trace.directory import LayerDirectory

ROWS = 10_000
STATES = {
    "short": (10**5, 10**6),
    "normal": (10**5, 10**6, 10**7),
    "full": (10**5, 10**6, 10**7, 10**8),
}
REPEATS = 300
WARM = 20
MERGE_REPEATS = 5_000
MERGED_ROWS = 10**7
REMOVED = 5_000
TRACE = TraceId("kv", "raw", Shard(0))


def layer(seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table({"k": random.choice(10**9, ROWS, replace=False), "v": random.random(ROWS)})


class Publisher:
    """Publishes layer after layer of a trace, as a task does."""

    def __init__(self, directory: LayerDirectory) -> None:
        self.directory = directory
        self.t = 10**6
        self.rows = [layer(seed) for seed in range(8)]
        self.ready = FilePool(directory.root, directory.env)

    def seconds(self, *, ahead: bool = True) -> float:
        """Returns how long one more layer took to publish. `ahead`: files were made before."""
        if ahead:
            self.ready.fill()
        return timed(self.publish)

    def publish(self) -> None:
        self.t += 1
        id = LayerId(TRACE, Description.of_epoch(self.t))
        self.directory.publish(id, arrange(self.rows[self.t % 8], ["k"], whose="bench"))


def plain_arrow(root: Path, rows: pa.Table) -> None:
    """Write and rename of the same rows as they come, unsorted: what any format pays."""
    temporary = root / "plain.tmp"
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    os.replace(temporary, root / "plain.arrow")


def run(scale: str) -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        yield from _against_arrow(Path(temporary) / "a", "publish 10k rows of 2 8-byte columns", {50: 1.0, 99: 5.0})
        medians: dict[int, float] = {}
        publishers = {n: Publisher(build_state(Path(temporary) / f"s{n}", n, TRACE)) for n in STATES[scale]}
        # Interleaved, so that drift of the machine hits every size alike.
        seconds: dict[int, list[float]] = {n: [] for n in publishers}
        for _ in range(REPEATS):
            for n, publisher in publishers.items():
                seconds[n].append(publisher.seconds())
        smallest = min(publishers)
        for n, taken in seconds.items():
            medians[n] = Samples(taken).median
            ratio = medians[n] / medians[smallest]
            yield Result(
                f"publish 10k rows, state of {n:,} rows", "nosync", 1e3 * medians[n], "ms p50",
                f"state of {smallest:,}", 1e3 * medians[smallest], ratio, "<= 1.2", ratio <= 1.2, repeats=REPEATS,
            )  # fmt: skip
        merged = min(MERGED_ROWS, max(publishers))
        yield _beside_a_merge(publishers[merged], merged)
        what = f"publish 10k rows, {REMOVED:,} files just removed"
        yield from _against_arrow(Path(temporary) / "b", what, {50: 1.0}, REMOVED)


def _against_arrow(root: Path, what: str, goals: Mapping[int, float], removed: int = 0) -> Iterator[Result]:
    """`goals`: by percentile, in milliseconds. `removed`: files that were in the same directories a moment ago."""
    publisher, alone = Publisher(LayerDirectory(root / "ours", 128)), Publisher(LayerDirectory(root / "alone", 128))
    for directory in (root / "ours" / "tmp", root / "alone" / "tmp", root / "plain"):
        directory.mkdir(parents=True)
        _remove_many(directory, removed)
    seconds: list[tuple[float, float, float]] = []
    for _ in range(REPEATS + WARM):
        rows = publisher.rows[publisher.t % 8]
        plain_s = timed(lambda rows=rows: plain_arrow(root / "plain", rows))  # type: ignore[misc]
        seconds.append((publisher.seconds(), alone.seconds(ahead=False), plain_s))
    ours, without, plain = map(Samples, zip(*seconds[WARM:], strict=True))
    for p, goal_ms in goals.items():
        value, base = 1e3 * ours.percentile(p), 1e3 * plain.percentile(p)
        yield Result(
            what, "nosync", value, f"ms p{p}", "plain Arrow write + rename", base, value / base, f"<= {goal_ms:g} ms",
            value <= goal_ms, ours.spread, REPEATS,
        )  # fmt: skip
        value = 1e3 * without.percentile(p)
        yield Result(
            f"where no file is ready: {what}", "nosync", value, f"ms p{p}", "plain Arrow write + rename", base,
            value / base, spread=without.spread, repeats=REPEATS,
        )  # fmt: skip


def _remove_many(directory: Path, count: int) -> None:
    """Makes files, has them on the disk, and removes them."""
    made = [directory / str(i) for i in range(count)]
    for path in made:
        path.write_bytes(bytes(4096))
    os.sync()
    for path in made:
        path.unlink()


def _beside_a_merge(publisher: Publisher, rows: int) -> Result:
    """Publishing while a merge of its state goes on as a node does it, against the same without."""
    alone = Samples([publisher.seconds() for _ in range(MERGE_REPEATS)])
    directory = publisher.directory
    state = LayerId(TRACE, min(directory.descriptions(TRACE)))
    following = LayerId(TRACE, Description.of_epoch(epoch_of(state.description.upper)))
    directory.publish(following, arrange(publisher.rows[0], ["k"], whose="bench"))
    layers = [directory.reader(state), directory.reader(following)]
    stop = threading.Event()
    finished = 0

    def merge() -> None:
        nonlocal finished
        with MergeProcess(OUT_OF_THE_WAY) as process:
            while not stop.is_set():
                work = Merge(directory.root, layers, since=Time(1), bottom=True, env=directory.env)
                done = process.run(work, stop.is_set, pause_share=BACKGROUND_PAUSE_SHARE)
                if done is not None:
                    directory.path_of(done.id).unlink()
                    finished += 1

    thread = threading.Thread(target=merge)
    thread.start()
    taken: list[float] = []
    while len(taken) < MERGE_REPEATS:  # long enough for several merges, their starts and their ends
        taken.append(publisher.seconds())
    beside = Samples(taken)
    alive = thread.is_alive()
    stop.set()
    thread.join()
    if not alive or not finished:
        raise RuntimeError("no merge ran beside the appends: the figure would mean nothing")
    value, base = 1e3 * beside.percentile(99), 1e3 * alone.percentile(99)
    return Result(
        f"publish 10k rows while {rows // 10**6}M rows are merged", "nosync", value, "ms p99", "no merge", base,
        value / base, "<= 2", value / base <= 2, repeats=MERGE_REPEATS,
    )  # fmt: skip
