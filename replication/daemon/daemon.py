"""The daemon: the node of one data directory in a process of its own, with its peers.

Spark's tasks publish files as they always do; the daemon is told of them, or sees them in the directory, makes them
durable and replicates them. Nothing waits for it. `daemon.json` in the directory says where it listens.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Callable

from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import MARKER
from nosync.lsm.platform.store_marker import read_marker
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.admission import Admission
from nosync.replication.daemon.config import SCAN_INTERVAL_S, DaemonConfig
from nosync.replication.daemon.dialer import Dialer
from nosync.replication.daemon.directory_watch import Watcher
from nosync.replication.daemon.links import OpenLinks
from nosync.replication.daemon.members import Members
from nosync.replication.daemon.peer_findings import PeerFindings
from nosync.replication.daemon.peer_queries import Lookup
from nosync.replication.daemon.published_files import note_published, watch_published
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.server import Servers
from nosync.replication.daemon.service import Service
from nosync.replication.daemon.startup import (
    check_config,
    forget_keeper,
    is_being_filled,
    make_store,
    note_filled,
    open_node,
    ways_of,
    write_json,
)
from nosync.replication.daemon.status import DaemonStatus
from nosync.replication.protocol.placement import NodeId
from nosync.replication.remote.stubs import env_of
from nosync.replication.transport.addresses import check_free
from nosync.replication.transport.daemon_files import ADDRESS_FILE
from nosync.replication.transport.expiry import Expiry

log = logging.getLogger("nosync.replication")


class Daemon:
    """One running daemon: `start`, then `stop`. Raises what opening a store raises, and ReplicationError."""

    def __init__(self, config: DaemonConfig, env: Env | None = None) -> None:
        self.config, self._env = config, env or env_of(config.data)
        check_config(config)
        self._members = Members(config, self._env)
        self._ways = ways_of(config, self._env)
        if self._ways.meeting is not None:
            self._ways.meeting.make()
        if not (config.data / MARKER).exists():
            check_free(config.listen)  # before there is a store that nobody serves
            make_store(config, self._ways, self._env)
        marker = read_marker(config.data, self._env)
        self.store_id = marker.store_id
        self.node, self._place, self._is_first = open_node(config, marker, self._env)
        try:
            with contextlib.suppress(OSError):  # of a daemon that was killed; its address may be another one's by now
                (config.data / ADDRESS_FILE).unlink()
            self._build()
        except BaseException:
            self.node.abandon()
            self._forget()
            raise

    def _build(self) -> None:
        """Makes the parts, from those that know of no other up to the servers."""
        config, members, ways, node = self.config, self._members, self._ways, self.node
        me, links = NodeId(config.node), OpenLinks()
        everyone = [me, *map(NodeId, members.peers)]
        if config.new_store:
            note_filled(config.data, self._env)
        self.replicator = Replicator(
            node, me, self.store_id, everyone, config.replicas, is_new_store=config.new_store,
            is_being_filled=is_being_filled(config), filled=lambda: note_filled(config.data, self._env),
        )  # fmt: skip
        self._dialer = Dialer(self.replicator, me, members, ways, links)
        self._findings = PeerFindings(self.replicator, members, ways)
        self._expiry = None if ways.certificates is None else Expiry.of(ways.certificates.certificate)
        self._status = DaemonStatus(
            config, self.store_id, node, self.replicator, members, self._findings, ways.meeting, self._expiry
        )
        self._watcher = Watcher(
            lambda: watch_published(config.data, self._env), lambda paths: note_published(node, paths), SCAN_INTERVAL_S
        )
        lookup, admission = Lookup(node.directory, ways), Admission(config, members, self._place)
        self._service = Service(
            config, self.store_id, node, self.replicator, members, self._dialer, lookup, admission, self._status,
            lambda: self._watcher.is_watching,
        )  # fmt: skip
        self.servers = Servers(
            self._service,
            admission.role_of,
            self.replicator,
            links,
            config.listen,
            ways,
            config.data.absolute(),
            self._env,
        )
        self._stop_metrics: Callable[[], None] | None = None

    def start(self) -> None:
        """Begins to serve; returns at once. Where it cannot, everything is stopped again."""
        try:
            self._start()
        except BaseException:
            self.stop()
            self._forget()
            raise
        soon = None if self._expiry is None else self._expiry.warning(datetime.datetime.now(datetime.UTC))
        if soon is not None:
            log.warning("%s", soon)
        log.info("node %s serves %s on %s", self.config.node, self.config.data, self.servers.address)

    def _forget(self) -> None:
        if self._is_first:
            forget_keeper(self.config.data, self._env)

    def _start(self) -> None:
        self.replicator.start()
        if self._env.sees_stubs:
            from nosync.replication.remote.hydration import Hydration  # noqa: PLC0415 - mostly there is nothing to fetch

            Hydration(self.node).start()
        if self.config.remote is not None:
            from nosync.replication.remote.level import RemoteLevel  # noqa: PLC0415 - needs the extra `remote`

            RemoteLevel(self.node, self.config.remote, name=self.config.node).start()
        self.servers.start()
        self._dialer.dial_members()
        self._findings.start()
        about = {
            "address": self.servers.address, "node": self.config.node, "pid": os.getpid(), "place": self._place,
            "tls": str(self.config.tls.absolute()) if self.config.tls else "",
        }  # fmt: skip
        write_json(self.config.data / ADDRESS_FILE, about, self._env)
        self._watcher.start()
        if self.config.metrics:
            from nosync.replication.daemon.metrics import serve_metrics  # noqa: PLC0415 - only where they are wanted

            self._stop_metrics = serve_metrics(
                self.config.metrics, self.status, self.replicator.counters,
                lambda: [copies.status() for copies in self.node.remotes], self._expiry,
            )  # fmt: skip

    def status(self) -> pb.StatusReply:
        """Returns node, safe point, problems, peers; and how far these are behind."""
        return self._status.of()

    def stop(self) -> None:
        """Makes everything durable and gives the directory back."""
        with contextlib.suppress(OSError):
            (self.config.data / ADDRESS_FILE).unlink()
        with contextlib.ExitStack() as ending:  # the last one first, and each whatever becomes of the others
            ending.callback(self.node.close)
            ending.callback(self._watcher.stop)
            ending.callback(self._service.close)
            ending.callback(self.servers.stop)
            ending.callback(self._dialer.stop)
            ending.callback(self._findings.stop)
            ending.callback(self.replicator.stop)
            if self._stop_metrics is not None:
                ending.callback(self._stop_metrics)
