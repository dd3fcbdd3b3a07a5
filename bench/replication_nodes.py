"""Replication on loopback: how soon layers are acknowledged, how fast they go over, and what daemons cost those who publish.

Peers are processes, and so is who publishes, as Spark's workers are; the node that is measured runs in this one, where its
acknowledgements can be seen as they come.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pyarrow as pa

import nosync
from bench.harness import Result, Samples, timed
from bench.spark_epochs import MEMORY_DIRECTORY
from nosync.lsm.layers.writer import LayerRows, arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.daemon import Daemon
from nosync.replication.protocol.file_names import FileName
from nosync.replication.transport.certs import make_certificates
from nosync.replication.transport.channel import OPTIONS
from nosync.replication.transport.codec import CHUNK_BYTES
from nosync.testing.daemon_cluster import Daemons, eventually, free_ports

REST_S = {"short": 20, "normal": 60, "full": 60}
"""Processor time is counted in hundredths of a second, of which there are few."""
RATE_HZ = 100
TRACES = 50
"""Stages and shards that publish in turn: two epochs a second."""
LAYER_BYTES = 32 << 10
LARGE_BYTES = 32 << 20
NODES = ("n1", "n2", "n3")


def rows(size_bytes: int, seed: int = 0) -> LayerRows:
    """Returns a layer of about so many bytes, which do not compress."""
    random = np.random.default_rng(seed)
    n = size_bytes // 20
    return arrange(pa.table({"k": random.permutation(n), "v": random.random(n)}), ["k"], whose="bench")


class Cluster:
    """Node n1 in this process, n2 and n3 as processes."""

    def __init__(self, root: Path, *, tls: bool = False) -> None:
        """`tls`: they speak over TCP, as on several hosts; else over sockets of this host."""
        self.root = root
        if tls:
            make_certificates(root / "tls", list(NODES))
        certificates = ("--tls", str(root / "tls")) if tls else ()
        self.peers = Daemons(root, NODES, 3, dict(zip(NODES, free_ports(3), strict=True)), certificates)
        others = {node: f"127.0.0.1:{self.peers.ports[node]}" for node in NODES if node != "n1"}
        address = f"127.0.0.1:{self.peers.ports['n1']}"
        where = root / "tls" if tls else None
        self.me = Daemon(DaemonConfig("n1", root / "n1", address, others, 3, tls=where, sockets=self.peers.sockets))
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

    def become_a_process(self) -> None:
        """From now on n1 is a process of its own too."""
        self.me.stop()
        self.is_here = False
        self.peers.start("n1")
        eventually("all are linked", lambda: all(peer.state == "up" for peer in self.peers.status("n1").peers))


class Watch:
    """Sees when layers have so many copies, from inside the node: whenever something was made durable here or a peer spoke."""

    def __init__(self, cluster: Cluster, copies: int) -> None:
        self._replicator, self._copies = cluster.me.replicator, copies
        self._lock = threading.Lock()
        self._waiting: dict[FileName, tuple[str, float]] = {}
        self.took_s: list[float] = []
        self._told = self._replicator.announcements
        self._received, self._held = self._replicator.received, self._told.held

    def __enter__(self) -> Watch:
        self._replicator.received = self._after(self._received)  # type: ignore[method-assign]
        self._told.held = self._after(self._held)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._replicator.received, self._told.held = self._received, self._held  # type: ignore[method-assign]

    def _after(self, call: Callable[..., None]) -> Callable[..., None]:
        def look(*arguments: Any, **more: Any) -> None:
            call(*arguments, **more)
            self.look()

        return look

    def add(self, name: FileName, digest: str, since_s: float) -> None:
        with self._lock:
            self._waiting[name] = (digest, since_s)

    def look(self) -> None:
        now_s = time.perf_counter()
        with self._lock:
            for name, (digest, since_s) in list(self._waiting.items()):
                if self._told.copies_by_name(name, digest) >= self._copies:
                    self.took_s.append(now_s - since_s)
                    del self._waiting[name]

    def finish(self) -> Samples:
        def is_done() -> bool:
            self.look()
            return not self._waiting

        eventually("all is acknowledged", is_done, 120.0)
        return Samples(self.took_s)


def publish_steadily(
    root: Path, key_groups: int, stage: str, count: int, size_bytes: int, rate_hz: float, out: Connection
) -> None:
    """Publishes layers, which the daemon notices by itself, as a job's tasks do. Sends name, digest and time of each."""
    directory, layers = LayerDirectory(root, key_groups), [rows(size_bytes, seed) for seed in range(8)]
    began_s = time.perf_counter()
    for i in range(count):
        pause_s = began_s + i / rate_hz - time.perf_counter()
        if pause_s > 0:
            time.sleep(pause_s)
        id = LayerId(TraceId(stage, "raw", Shard(i % TRACES)), Description.of_epoch(i // TRACES))
        published = directory.publish(id, layers[i % 8])
        out.send((FileName.of_layer(id), published.digest, time.perf_counter()))
    out.send(None)


def acknowledged(
    cluster: Cluster, copies: int, stage: str, count: int, size_bytes: int, rate_hz: float
) -> tuple[Samples, float]:
    """Returns the seconds from the publishing of each layer, by another process, until it has so many copies; and from
    the first one's publishing until all have.
    """
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    directory = cluster.me.node.directory
    load = spawn.Process(
        target=publish_steadily, args=(directory.root, directory.key_groups, stage, count, size_bytes, rate_hz, sending)
    )
    with Watch(cluster, copies) as watch:
        load.start()
        began_s = None
        while (published := receiving.recv()) is not None:
            began_s = published[2] if began_s is None else began_s
            watch.add(*published)
        load.join()
        return watch.finish(), time.perf_counter() - (began_s or 0.0)


def run(scale: str) -> Iterator[Result]:
    seconds, files, repeats = {"short": (4, 16, 150), "normal": (8, 16, 300), "full": (30, 40, 1000)}[scale]
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        cluster = Cluster(Path(temporary))
        try:
            yield from _acks(cluster, RATE_HZ * seconds)
            yield from _throughput(cluster, files)
            cluster.become_a_process()
            yield from _at_rest(cluster, REST_S[scale])
            yield from _publishing(cluster, Path(temporary), repeats)
        finally:
            cluster.close()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        cluster = Cluster(Path(temporary), tls=True)
        try:
            yield from _sent(cluster, RATE_HZ * seconds // 4)
        finally:
            cluster.close()
    with tempfile.TemporaryDirectory(dir=MEMORY_DIRECTORY) as temporary:
        cluster = Cluster(Path(temporary))
        try:
            yield from _throughput(cluster, files=16, where=", all in memory", goal="")
        finally:
            cluster.close()


def _acks(cluster: Cluster, count: int) -> Iterator[Result]:
    """Measures acknowledgements at a steady rate; those of each layer are waited for by threads of their own."""
    for copies, what, goal_s in ((1, "durable on this disk", 0.010), (3, "and on two peers", 0.030)):
        samples, _ = acknowledged(cluster, copies, f"acks{copies}", count // 2, LAYER_BYTES, RATE_HZ)
        yield Result(
            f"{RATE_HZ} layers/s of {LAYER_BYTES >> 10} KiB, {what}", "nosync, p50", samples.median * 1000, "ms", "p99",
            samples.percentile(99) * 1000, goal=f"p50 <= {goal_s * 1000:.0f}", met=samples.median <= goal_s,
            spread=samples.spread, repeats=len(samples.seconds),
        )  # fmt: skip


def _sent(cluster: Cluster, count: int) -> Iterator[Result]:
    """Bytes on the network, from and to everyone, with all that is said and with TLS, for a byte of the layers that are
    published. What peers say over sockets of one host is counted nowhere.
    """
    for size_bytes in (2 << 10, LAYER_BYTES):
        before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        acknowledged(cluster, 3, f"sent{size_bytes}", count, size_bytes, RATE_HZ)
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
        # Those that were published may be merged by now; one more is of the same size.
        directory = cluster.me.node.directory
        more = LayerId(TraceId(f"sent{size_bytes}", "raw", Shard(TRACES)), Description.of_epoch(0))
        directory.publish(more, rows(size_bytes))
        published = count * directory.path_of(more).stat().st_size
        yield Result(
            f"{RATE_HZ} layers/s of {size_bytes >> 10} KiB, sent for a byte published", "nosync", sent / published, "bytes",
            "its two copies", 2.0, sent / published / 2, repeats=count,
        )  # fmt: skip


def _throughput(cluster: Cluster, files: int, where: str = "", goal: str = ">= 0.8") -> Iterator[Result]:
    """Large layers to two peers, acknowledged; beside the same bytes over a bare stream of gRPC that throws them away, and one
    whose receiver writes and syncs them; and beside the disk. In memory there is no disk that all three share.
    """
    _, took_s = acknowledged(cluster, 3, "large", files, LARGE_BYTES, 1000.0)
    ours = 2 * files * LARGE_BYTES / took_s

    size = 2 * files * LARGE_BYTES
    for kept, what, wanted in (
        (False, "a bare gRPC stream to each, thrown away", goal),
        (True, "the same, written and synced", ""),
    ):
        bare = size / _bare_streams(cluster.root, files, kept=kept)
        yield Result(
            f"{files} layers of {LARGE_BYTES >> 20} MiB, durable on both peers{where}", "nosync", ours / 1e6, "MB/s", what,
            bare / 1e6, ours / bare, wanted, ours / bare >= 0.8 if wanted else None, repeats=files,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=cluster.root) as directory:
        disk = size / timed(lambda: _write_and_sync(Path(directory), 3 * files))
    yield Result(
        f"the same{where}", "nosync", ours / 1e6, "MB/s", "writing and syncing the three copies of each", disk / 1e6,
        ours / disk,
    )  # fmt: skip


def _write_and_sync(directory: Path, times: int) -> None:
    """Writes a large layer's bytes so many times onto this disk, durably; the three nodes here share one."""
    data = np.random.default_rng(0).bytes(LARGE_BYTES)
    for i in range(times):
        with open(directory / str(i), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _bare_streams(root: Path, files: int, *, kept: bool) -> float:
    """Returns the seconds for large files over a stream of gRPC to each of two processes, in pieces of the size that
    nosync sends.
    """
    spawn = multiprocessing.get_context("spawn")
    piece = np.random.default_rng(0).bytes(CHUNK_BYTES)
    with tempfile.TemporaryDirectory(dir=root) as directory, contextlib.ExitStack() as streams:
        takers = []
        calls: list[Any] = []
        for number in range(2):
            receiving, sending = spawn.Pipe(duplex=False)
            target = Path(directory) / str(number) if kept else None
            taker = spawn.Process(target=_take_files, args=(target, sending), daemon=True)
            taker.start()
            takers.append(taker)
            channel = streams.enter_context(grpc.insecure_channel(f"127.0.0.1:{receiving.recv()}", OPTIONS))
            calls.append(channel.stream_unary("/bench/Take"))
        pieces = [piece] * (files * LARGE_BYTES // CHUNK_BYTES)

        def send() -> None:
            with futures.ThreadPoolExecutor(2) as pool:
                for done in [pool.submit(call, iter(pieces)) for call in calls]:
                    done.result()

        took_s = timed(send)
        for taker in takers:
            taker.terminate()
            taker.join()
    return took_s


def _take_files(target: Path | None, port: Connection) -> None:
    """A server that takes pieces and throws them away, or writes files of them and syncs each. Runs until it is ended."""

    def take(incoming: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for i, piece in enumerate(incoming):
            if target is not None:
                number = i * CHUNK_BYTES // LARGE_BYTES
                with open(f"{target}-{number}", "ab") as file:
                    file.write(piece)
                    if (i + 1) * CHUNK_BYTES % LARGE_BYTES == 0:
                        file.flush()
                        os.fsync(file.fileno())
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(2), options=OPTIONS)
    handler = grpc.method_handlers_generic_handler("bench", {"Take": grpc.stream_unary_rpc_method_handler(take)})
    server.add_generic_rpc_handlers((handler,))
    port.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def _at_rest(cluster: Cluster, rest_s: int) -> Iterator[Result]:
    process = psutil.Process(cluster.peers.processes["n2"].pid)
    for _ in range(rest_s // 2):  # merges of what came before are no rest
        began = process.cpu_times()
        time.sleep(2.0)
        if process.cpu_times().user - began.user < 0.05:
            break
    before = process.cpu_times()
    time.sleep(rest_s)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / rest_s
    yield Result("a daemon at rest, two peers", "CPU of one core", share * 100, "%", goal="<= 1", met=share <= 0.01)
    memory = process.memory_info().rss / 1e6
    yield Result("a daemon at rest, two peers", "resident memory", memory, "MB", goal="<= 200", met=memory <= 200)


def _publishing(cluster: Cluster, root: Path, repeats: int) -> Iterator[Result]:
    """Measures what a task's publish takes beside a daemon with peers, one of them frozen or dead, and in an embedded
    store, whose own thread makes the same layers durable.
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
        with_daemon: list[float] = []
        without: list[float] = []
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
