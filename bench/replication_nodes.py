"""Replication on loopback: how soon layers are acknowledged, how fast they go over, and what daemons cost those who publish.

Peers are processes; the node that is measured runs in this one, where its acknowledgements can be seen as they come, and shares
the interpreter with the load.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import psutil
import pyarrow as pa

import nosync
from bench.harness import Result, Samples, timed
from nosync.lsm.directory import LayerDirectory
from nosync.lsm.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.writer import LayerRows, arrange
from nosync.replication.daemon import Daemon, DaemonConfig
from nosync.replication.inventory import name_of
from nosync.replication.transport import OPTIONS
from nosync.replication.wire import CHUNK_BYTES
from nosync.testing.daemons import Daemons, eventually, free_ports

RATE_HZ = 100
TRACES = 50
"""Stages and shards that publish in turn: two epochs a second."""
LAYER_BYTES = 32 << 10
LARGE_BYTES = 32 << 20
POLL_S = 0.0005
NODES = ("n1", "n2", "n3")


def rows(size_bytes: int, seed: int = 0) -> LayerRows:
    """A layer of about so many bytes, which do not compress."""
    random = np.random.default_rng(seed)
    n = size_bytes // 20
    return arrange(pa.table({"k": random.permutation(n), "v": random.random(n)}), ["k"], whose="bench")


class Cluster:
    """Node n1 in this process, n2 and n3 as processes."""

    def __init__(self, root: Path) -> None:
        self.peers = Daemons(root, NODES, 3, dict(zip(NODES, free_ports(3), strict=True)))
        others = {node: f"127.0.0.1:{self.peers.ports[node]}" for node in NODES if node != "n1"}
        self.me = Daemon(DaemonConfig("n1", root / "n1", f"127.0.0.1:{self.peers.ports['n1']}", others, 3))
        self.me.start()
        self.is_here = True
        for node in others:
            self.peers.start(node)
        eventually("all are linked", lambda: all(peer.state == "up" for peer in self.me.status().peers))

    def close(self) -> None:
        for node in list(self.peers.processes):
            self.peers.kill(node)
        if self.is_here:
            self.me.stop()

    def publish(self, stage: str, t: int, layer: LayerRows, shard: int = 0) -> tuple[str, str]:
        """Publishes a layer and tells the node, as a job does. Its name and digest."""
        directory = self.me.node.directory
        id = LayerId(TraceId(stage, "raw", Shard(shard)), Description.of_epoch(t))
        published = directory.publish(id, layer)
        self.me.node.note([id])
        return name_of(id), published.digest

    def become_a_process(self) -> None:
        """From now on n1 is a process of its own too."""
        self.me.stop()
        self.is_here = False
        self.peers.start("n1")
        eventually("all are linked", lambda: all(peer.state == "up" for peer in self.peers.status("n1").peers))


class Watch(threading.Thread):
    """Sees when layers have so many copies. One thread, so that looking costs little."""

    def __init__(self, cluster: Cluster, copies: int) -> None:
        super().__init__(daemon=True)
        self._replicator, self._copies = cluster.me.replicator, copies
        self._waiting: deque[tuple[str, str, float]] = deque()
        self._done = False
        self.took_s: list[float] = []

    def add(self, name: str, digest: str) -> None:
        self._waiting.append((name, digest, time.perf_counter()))

    def run(self) -> None:
        while self._waiting or not self._done:
            if self._waiting:
                name, digest, since = self._waiting[0]
                if self._replicator.copies_by_name(name, digest) >= self._copies:
                    self.took_s.append(time.perf_counter() - since)
                    self._waiting.popleft()
                    continue
            time.sleep(POLL_S)

    def finish(self) -> Samples:
        self._done = True
        self.join(timeout=60.0)
        return Samples(self.took_s)


def run(scale: str) -> Iterator[Result]:
    seconds = 30 if scale == "full" else 8
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        cluster = Cluster(Path(temporary))
        try:
            yield from _acks(cluster, RATE_HZ * seconds)
            yield from _throughput(cluster, files=40 if scale == "full" else 16)
            cluster.become_a_process()
            yield from _at_rest(cluster, seconds)
            yield from _publishing(cluster, Path(temporary), repeats=1000 if scale == "full" else 300)
        finally:
            cluster.close()


def _acks(cluster: Cluster, count: int) -> Iterator[Result]:
    """At a steady rate; each layer's acknowledgements are waited for by threads of their own."""
    layers = [rows(LAYER_BYTES, seed) for seed in range(8)]
    for copies, what, goal_s in ((1, "durable on this disk", 0.010), (3, "and on two peers", 0.030)):
        watch = Watch(cluster, copies)
        watch.start()
        began = time.perf_counter()
        for i in range(count // 2):
            pause_s = began + i / RATE_HZ - time.perf_counter()
            if pause_s > 0:
                time.sleep(pause_s)
            watch.add(*cluster.publish(f"acks{copies}", i // TRACES, layers[i % 8], i % TRACES))
        samples = watch.finish()
        yield Result(
            f"{RATE_HZ} layers/s of {LAYER_BYTES >> 10} KiB, {what}", "nosync, p50", samples.median * 1000, "ms", "p99",
            samples.percentile(99) * 1000, goal=f"p50 <= {goal_s * 1000:.0f}", met=samples.median <= goal_s,
            spread=samples.spread, repeats=len(samples.seconds),
        )  # fmt: skip


def _throughput(cluster: Cluster, files: int) -> Iterator[Result]:
    """Large layers to two peers, acknowledged, beside the same bytes over a bare stream of gRPC that throws them away."""
    layer = rows(LARGE_BYTES)
    watch = Watch(cluster, 3)
    began = time.perf_counter()
    size = 0
    for t in range(files):
        name, digest = cluster.publish("large", t, layer)
        watch.add(name, digest)
        size += (cluster.me.node.directory.root / name).stat().st_size
    watch.start()
    watch.finish()
    ours = 2 * size / (time.perf_counter() - began)
    bare = _bare_stream(2 * size)
    yield Result(
        f"{files} layers of {LARGE_BYTES >> 20} MiB, durable on both peers", "nosync", ours / 1e6, "MB/s",
        "a bare gRPC stream, thrown away", bare / 1e6, ours / bare, ">= 0.8", ours / bare >= 0.8, repeats=files,
    )  # fmt: skip
    disk = 2 * size / timed(lambda: _write_and_sync(cluster.me.node.directory.root / name, 3 * files))
    yield Result(
        "the same", "nosync", ours / 1e6, "MB/s", "writing and syncing the three copies of each", disk / 1e6, ours / disk
    )  # fmt: skip


def _write_and_sync(of: Path, times: int) -> None:
    """Copies a file so many times onto this disk, durably; the three nodes here share one."""
    data = of.read_bytes()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        for i in range(times):
            with open(Path(temporary) / str(i), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())


def _bare_stream(size: int) -> float:
    """Bytes per second over one stream of gRPC on loopback, in pieces of the same size."""
    piece = np.random.default_rng(0).bytes(CHUNK_BYTES)

    def take(incoming: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for _ in incoming:
            pass
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(2), options=OPTIONS)
    handler = grpc.method_handlers_generic_handler("bench", {"Take": grpc.stream_unary_rpc_method_handler(take)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        call = channel.stream_unary("/bench/Take")
        took = timed(lambda: call(iter([piece] * (size // CHUNK_BYTES))))
    server.stop(0)
    return size / took


def _at_rest(cluster: Cluster, seconds: int) -> Iterator[Result]:
    process = psutil.Process(cluster.peers.processes["n2"].pid)
    for _ in range(30):  # merges of what came before are no rest
        began = process.cpu_times()
        time.sleep(2.0)
        if process.cpu_times().user - began.user < 0.05:
            break
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / seconds
    yield Result("a daemon at rest, two peers", "CPU of one core", share * 100, "%", goal="<= 1", met=share <= 0.01)
    memory = process.memory_info().rss / 1e6
    yield Result("a daemon at rest, two peers", "resident memory", memory, "MB", goal="<= 200", met=memory <= 200)


def _publishing(cluster: Cluster, root: Path, repeats: int) -> Iterator[Result]:
    """What a task's publish takes beside a daemon with peers, one of them frozen or dead, and in an embedded store, whose own
    thread makes the same layers durable.
    """
    import signal  # noqa: PLC0415

    alone = nosync.open(root / "alone")
    layer = rows(LAYER_BYTES)
    mine = LayerDirectory(cluster.peers.data("n1"), alone.directory.key_groups)
    for number, what in enumerate(("peers up", "one peer frozen", "one peer dead")):
        if what == "one peer frozen":
            cluster.peers.signal("n2", signal.SIGSTOP)
        elif what == "one peer dead":
            cluster.peers.signal("n2", signal.SIGCONT)
            cluster.peers.kill("n3")
        with_daemon, without = [], []
        for t in range(repeats):
            pair = ((mine, with_daemon), (alone.directory, without))
            for directory, found in pair if t % 2 else reversed(pair):  # who comes first finds cold caches
                found.append(timed(partial(_publish, directory, f"load{number}", t, layer)))
            alone.node.note([LayerId(TraceId(f"load{number}", "raw", Shard(0)), Description.of_epoch(t))])
            time.sleep(1 / RATE_HZ)  # so that what is measured is publishing, not a queue behind it
        ours, theirs = Samples(with_daemon), Samples(without)
        ratio = ours.median / theirs.median
        yield Result(
            f"a task publishes {LAYER_BYTES >> 10} KiB, {what}", "with a daemon", ours.median * 1000, "ms", "embedded",
            theirs.median * 1000, ratio, "<= 1.2", ratio <= 1.2, ours.spread, repeats,
        )  # fmt: skip
    alone.close()


def _publish(directory: LayerDirectory, stage: str, t: int, layer: LayerRows) -> None:
    directory.publish(LayerId(TraceId(stage, "raw", Shard(0)), Description.of_epoch(t)), layer)
