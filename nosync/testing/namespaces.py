"""Hosts of a cluster: network namespaces of the test's own where they can be made, else addresses of the loopback
network.

Every process of a host carries the host's name in its environment, so that it can be found, stopped and killed with all
that it started.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = "NOSYNC_TEST_HOST"
_NOWHERE = "02:00:00:00:00:99"


def can_make_namespaces() -> bool:
    """Returns whether this process may make network namespaces: root, with `ip`."""
    name = f"nosync-{secrets.token_hex(3)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@dataclass
class Hosts:
    """A few hosts. Made with `hosts(...)`, which removes them again."""

    names: tuple[str, ...]
    isolated: bool
    """In namespaces: links can be cut; else only processes can be killed and stopped."""
    token: str = field(default_factory=lambda: secrets.token_hex(3))
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def address(self, host: str) -> str:
        number = self.names.index(host) + 1
        return f"10.78.0.{number}" if self.isolated else f"127.0.1.{number}"

    def start(
        self, host: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host; what it prints goes to `log`."""
        env = {**os.environ, **(environment or {}), _VARIABLE: self._mark(host)}
        inside = ["ip", "netns", "exec", self._namespace(host)] if self.isolated else []
        with log.open("ab") as out:
            process = subprocess.Popen([*inside, *command], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
        self._started.append(process)
        return process

    def pids(self, host: str) -> list[int]:
        """Returns the processes of a host, and what they started."""
        mark = f"{_VARIABLE}={self._mark(host)}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def signal(self, host: str, number: signal.Signals) -> None:
        """Sends a signal to every process of a host."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, host: str) -> None:
        """The power goes: nothing of the host runs any more, and nobody is told of it."""
        if self.isolated:
            self._ip("-n", self._namespace(host), "link", "set", "eth0", "down")
        while self.pids(host):
            self.signal(host, signal.SIGKILL)
            for process in self._started:
                process.poll()

    def start_again(self, host: str) -> None:
        """The power is back: a network, and no process."""
        if self.isolated:
            self._ip("-n", self._namespace(host), "link", "set", "eth0", "up")

    def cut_off(self, host: str, *, connected: bool = False) -> None:
        """Lets what the host sends to others get lost, while what they send arrives; or (`connected`) lets everything
        arrive again.
        """
        for other in self.names:
            if other != host:
                where = ("neigh", "replace" if not connected else "del", self.address(other), "dev", "eth0")
                to = ("lladdr", _NOWHERE, "nud", "permanent") if not connected else ()
                self._ip("-n", self._namespace(host), *where, *to)

    def throttle(self, host: str, megabits_per_s: int | None) -> None:
        """Lets what comes to a host come no faster than this; None: as before."""
        where = ["dev", f"port{self.names.index(host)}", "root"]
        how = (
            []
            if megabits_per_s is None
            else ["tbf", "rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "400ms"]
        )
        do = "del" if megabits_per_s is None else "replace"
        command = ["ip", "netns", "exec", self._namespace("switch"), "tc", "qdisc", do, *where, *how]
        subprocess.run(command, check=True, capture_output=True)

    def received_bytes(self, host: str) -> int:
        """Returns what came to a host by its link so far."""
        counter = ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        command = ["ip", "netns", "exec", self._namespace(host), *counter]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def _mark(self, host: str) -> str:
        return f"{self.token}-{host}"

    def _namespace(self, host: str) -> str:
        return f"nosync-{self.token}-{host}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def make(self) -> None:
        if not self.isolated:
            return
        switch = self._namespace("switch")
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", switch, "link", "set", "bridge", "up")
        for host in self.names:
            namespace, port = self._namespace(host), f"port{self.names.index(host)}"
            self._ip("netns", "add", namespace)
            self._ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            self._ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._ip("-n", namespace, "link", "set", "eth0", "up")
            self._ip("-n", namespace, "link", "set", "lo", "up")

    def remove(self) -> None:
        for host in self.names:
            while self.pids(host):
                self.signal(host, signal.SIGKILL)
                for process in self._started:
                    process.poll()
        if self.isolated:
            for name in (*self.names, "switch"):
                with contextlib.suppress(subprocess.CalledProcessError):
                    self._ip("netns", "del", self._namespace(name))


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts with a network between them; whatever runs on them in the end is killed."""
    found = Hosts(names, isolated=can_make_namespaces())
    try:
        found.make()
        yield found
    finally:
        found.remove()
