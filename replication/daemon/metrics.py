"""What Prometheus fetches: the safe point, lags, bytes, peers. Values are asked for when they are fetched."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nosync.lsm.errors import ReplicationError
from nosync.lsm.status import RemoteStatus
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.session import Counters
from nosync.replication.transport.expiry import Expiry

log = logging.getLogger("nosync.replication")


class _Store(Collector):
    def __init__(
        self,
        status: Callable[[], pb.StatusReply],
        counters: Counters,
        remotes: Callable[[], Iterable[RemoteStatus]],
        expiry: Expiry | None,
    ) -> None:
        self._status, self._counters, self._remotes, self._expiry = status, counters, remotes, expiry

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        if status.HasField("safe_point"):
            yield _gauge("nosync_safe_point_epoch", "Epoch up to which everything has its copies", status.safe_point)
        if status.HasField("last_sealed"):
            yield _gauge("nosync_last_sealed_epoch", "Newest sealed epoch", status.last_sealed)
            safe = status.safe_point if status.HasField("safe_point") else -1
            yield _gauge(
                "nosync_safe_point_lag_epochs", "Sealed epochs after the safe point", status.last_sealed - safe
            )
        yield _gauge("nosync_safe_point_lag_seconds", "Since when an epoch waits to be safe", status.lag_s)
        names = (
            ("complete", "Newest sealed epoch of a stage"),
            ("durable", "Epoch up to which a stage is durable on this node"),
            ("replicated", "Epoch up to which a stage has its copies"),
        )
        for name, text in names:
            epochs = GaugeMetricFamily(f"nosync_stage_{name}_epoch", text, labels=["stage"])
            for stage in status.stages:
                if stage.HasField(name):
                    epochs.add_metric([stage.stage], getattr(stage, name))
            yield epochs
        waiting = GaugeMetricFamily("nosync_stage_waiting_bytes", "Bytes without their copies", labels=["stage"])
        for stage in status.stages:
            waiting.add_metric([stage.stage], stage.waiting_bytes)
        yield waiting
        yield _gauge("nosync_backlog_bytes", "Bytes that peers have and this node should have", status.backlog_bytes)
        yield _gauge("nosync_loaded", "1: so far behind that recomputable stages wait", float(status.loaded))
        yield _gauge("nosync_problems", "What is wrong, as nosync status says it", len(status.problems))
        if self._expiry is not None:
            ends_s = self._expiry.at.timestamp()
            yield _gauge("nosync_certificate_end_seconds", "When the node's certificate runs out, in Unix time", ends_s)
        up = GaugeMetricFamily("nosync_peer_up", "1: the peer was heard of lately", labels=["peer"])
        behind = GaugeMetricFamily("nosync_peer_behind_bytes", "Bytes that a peer is missing", labels=["peer"])
        for peer in status.peers:
            up.add_metric([peer.node], float(peer.state == "up"))
            behind.add_metric([peer.node], peer.behind_bytes)
        yield up
        yield behind
        yield from self._of_remotes()
        for name, text in (
            ("sent_bytes", "Bytes of files sent"),
            ("sent_files", "Files sent"),
            ("received_bytes", "Bytes of files received and kept"),
            ("received_files", "Files received and kept"),
            ("refused_files", "Files received that were not what was announced"),
        ):
            counter = CounterMetricFamily(f"nosync_{name}", text)
            counter.add_metric([], getattr(self._counters, name))
            yield counter

    def _of_remotes(self) -> Iterator[Metric]:
        found = list(self._remotes())
        values: tuple[tuple[str, str, Callable[[RemoteStatus], float | None]], ...] = (
            ("safe_epoch", "Epoch up to which an object store has all", lambda one: one.safe_point),
            ("lag_epochs", "Sealed epochs that an object store lacks something of", lambda one: one.lag_epochs),
            ("lag_seconds", "Since when an epoch waits to be remotely safe", lambda one: one.lag_s),
            ("waiting_bytes", "Bytes that wait to be put", lambda one: one.waiting_bytes),
            ("problem", "1: something keeps copies from being made", lambda one: float(bool(one.problem))),
        )
        for name, text, value in values if found else ():
            gauge = GaugeMetricFamily(f"nosync_remote_{name}", text, labels=["url"])
            for one in found:
                if (number := value(one)) is not None:
                    gauge.add_metric([one.url], number)
            yield gauge


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


MOST_CONNECTIONS = 8
"""At once; where another one comes the oldest ends, so who says nothing, or slowly, keeps nobody out."""
SILENT_S = 5.0


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: object) -> None:
        """Who fetches metrics is not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own, of which there are a few."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # it has just ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended in the middle."""
        log.debug("metrics: a connection ended", exc_info=True)


def serve_metrics(
    address: str,
    status: Callable[[], pb.StatusReply],
    counters: Counters,
    remotes: Callable[[], Iterable[RemoteStatus]] = tuple,
    expiry: Expiry | None = None,
) -> Callable[[], None]:
    """Serves metrics on HOST:PORT. Returns what stops it. Raises ReplicationError where it cannot listen."""
    registry = CollectorRegistry()
    registry.register(_Store(status, counters, remotes, expiry))
    host, _, port = address.rpartition(":")
    try:
        server = _Server((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise ReplicationError(f"cannot serve metrics on {address}: {error}; expected HOST:PORT") from error
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="nosync-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
