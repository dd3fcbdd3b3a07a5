"""Daemons as processes, on loopback, in directories of the test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import nosync
from nosync.lsm.platform.env import Env
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.transport.client import client_of
from nosync.replication.transport.daemon_files import address_of
from nosync.replication.transport.sockets import Meeting, SocketPath

PATIENCE_S = 60.0
_NOSYNC = (sys.executable, "-m", "nosync.cli")


def eventually(what: str, is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Waits until something is so; bounded, and says what was waited for."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        with contextlib.suppress(nosync.NosyncError, OSError):
            if is_so():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {patience_s} s: {what}")


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Process(Protocol):
    """A daemon that was started, as subprocess has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


@dataclass
class Daemons:
    """A few daemons of one store."""

    root: Path
    nodes: tuple[str, ...]
    replicas: int
    ports: dict[str, int]
    extra: tuple[str, ...] = ()
    know: tuple[str, ...] = ()
    """The nodes that are given to a daemon as its peers when it is started; empty: all."""
    new_store: bool = True
    """Whether a node that has nothing begins the store, also while others are down."""
    processes: dict[str, Process] = field(default_factory=dict)

    def data(self, node: str) -> Path:
        return self.root / node

    @property
    def sockets(self) -> Path:
        """Returns where daemons without TLS meet."""
        return self.root / "sockets"

    def arguments(self, node: str, *more: str) -> list[str]:
        peers = [f"--peer={other}=127.0.0.1:{self.ports[other]}" for other in self.know or self.nodes if other != node]
        return [
            "daemon", "--node", node, "--data", str(self.data(node)),
            "--listen", f"127.0.0.1:{self.ports[node]}", "--replicas", str(self.replicas),
            "--sockets", str(self.sockets),
            *(("--new-store",) if self.new_store else ()), *peers, *self.extra, *more,
        ]  # fmt: skip

    @staticmethod
    def start_process(arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
        """Runs `nosync` with arguments, in an interpreter of its own; what it says goes to the end of `log`. Tests replace
        it by what takes less time.
        """
        with log.open("ab") as said:
            return subprocess.Popen([*_NOSYNC, *arguments], stdout=said, stderr=said, env=env)

    def command(self, node: str, *more: str) -> list[str]:
        """Returns what is said in a shell to start a daemon."""
        return [*_NOSYNC, *self.arguments(node, *more)]

    def start(self, node: str, *more: str) -> None:
        (self.root / f"{node}.log").touch()
        env = os.environ | {"PYTHONPATH": str(Path(nosync.__file__).parents[1])}
        self.processes[node] = self.start_process(self.arguments(node, *more), self.root / f"{node}.log", env)
        pid = self.processes[node].pid
        eventually(f"{node} serves: {self.log(node)}", lambda: (address_of(self.data(node)) or {}).get("pid") == pid)

    def log(self, node: str) -> str:
        return (self.root / f"{node}.log").read_text()

    def kill(self, node: str) -> None:
        self.processes[node].kill()
        self.processes.pop(node).wait()

    def stop(self, node: str) -> int:
        process = self.processes.pop(node)
        process.terminate()
        return process.wait(timeout=PATIENCE_S)

    def signal(self, node: str, number: signal.Signals) -> None:
        self.processes[node].send_signal(number)

    def wipe(self, node: str) -> None:
        assert node not in self.processes
        shutil.rmtree(self.data(node))

    def status(self, node: str, branch: str = "main") -> pb.StatusReply:
        client = client_of(self.data(node))
        if client is None:
            raise nosync.ReplicationError(f"{node} is not there")
        try:
            return client.status(branch, timeout_s=2.0)
        finally:
            client.close()

    def safe_point(self, node: str) -> int | None:
        reply = self.status(node)
        return reply.safe_point if reply.HasField("safe_point") else None

    def peer(self, node: str, other: str) -> pb.PeerStatus:
        return next(peer for peer in self.status(node).peers if peer.node == other)

    def way_of_peers(self, node: str) -> SocketPath:
        """Returns how a peer of the same user reaches a daemon without TLS."""
        return SocketPath(Meeting(self.sockets, Env()).socket_of(self.ports[node]))

    def open(self, node: str) -> nosync.Store:
        """Returns the store of a node, beside its daemon."""
        return nosync.open(self.data(node))


@contextlib.contextmanager
def running(
    root: Path,
    nodes: tuple[str, ...] = ("n1", "n2", "n3"),
    replicas: int = 2,
    extra: tuple[str, ...] = (),
    *,
    start: tuple[str, ...] | None = None,
    know: tuple[str, ...] = (),
) -> Iterator[Daemons]:
    """Yields started daemons; whatever still runs in the end is killed."""
    root.mkdir(parents=True, exist_ok=True)
    found = Daemons(root, nodes, replicas, dict(zip(nodes, free_ports(len(nodes)), strict=True)), extra, know)
    try:
        for node in nodes if start is None else start:
            found.start(node)
        yield found
        for node in nodes:
            log = root / f"{node}.log"
            assert not log.exists() or "Traceback" not in log.read_text(), log.read_text()[-4000:]
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait()
