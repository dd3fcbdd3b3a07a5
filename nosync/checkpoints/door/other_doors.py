"""The doors of other hosts, as this one asks them: by its own daemon, which knows its peers."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nosync.checkpoints.door.elsewhere import Reference, Target
from nosync.checkpoints.peers import client_of_daemon
from nosync.lsm.errors import CorruptionError, NosyncError, RefusedError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.parsing import parsed
from nosync.replication.transport.daemon_files import address_of

if TYPE_CHECKING:
    from nosync.replication.transport.client import DaemonClient

log = logging.getLogger("nosync")

CALL_S = 50.0
"""A strict door holds an answer for a while, and Spark waits for 60 seconds."""
SLOWEST_BYTES_S = 1 << 20
"""So many bytes of a file come in each second, or its host is given up: the file is asked for again later."""
ANSWER_S = 2.0
"""A door that takes longer to say whether it serves a checkpoint is asked again."""


@dataclass(frozen=True)
class Server:
    """The door that serves a checkpoint: the one that its query's driver writes through. The greatest one counts."""

    generation: int
    node: str

    def comes_before(self, other: Server) -> bool:
        """Returns whether this door counts where both serve a checkpoint: the later generation, or the first by name."""
        return (-self.generation, self.node) < (-other.generation, other.node)


class OtherDoors:
    """The doors beside the peers of a data directory's daemon. Several threads may use it."""

    def __init__(self, data: Path, env: Env) -> None:
        self._data, self._env, self._lock = data, env, threading.Lock()
        self._client: DaemonClient | None = None

    @property
    def me(self) -> str:
        """The node of this host. Raises ReplicationError where its daemon does not run."""
        about = address_of(self._data)
        if about is None:
            raise ReplicationError(f"the daemon of {self._data} is not running: start it again with nosync daemon")
        return str(about["node"])

    def peers(self) -> Mapping[str, bool]:
        """Returns the peers, and whether each is up. Raises ReplicationError where the daemon does not answer."""
        client = self._connected()
        try:
            return {peer.node: peer.state == "up" for peer in client.status(lag=False).peers}
        except RefusedError:
            raise
        except ReplicationError:
            self._forget(client)
            raise

    def servers(self, name: str) -> tuple[list[Server], bool]:
        """Returns the doors of peers that serve a checkpoint, the one that counts first, and whether all said it: a door that
        takes long may serve it.

        Raises ReplicationError where this host's daemon does not answer. A peer without a door serves nothing.
        """
        up = [node for node, is_up in self.peers().items() if is_up]
        if not up:
            return [], True
        with ThreadPoolExecutor(len(up), thread_name_prefix="nosync-doors") as pool:
            answers = list(pool.map(lambda node: self._server(node, name), up))
        found = [one for one, _ in answers if one is not None]
        return sorted(found, key=lambda one: (-one.generation, one.node)), all(has_said for _, has_said in answers)

    def _server(self, node: str, name: str) -> tuple[Server | None, bool]:
        begin_s = self._env.monotonic_s()
        try:
            status, said = self.call(node, "GET", name, {"op": "SERVES"}, patience_s=ANSWER_S)
            with parsed("what a door says of a checkpoint", node):
                return Server(int(json.loads(said)["generation"]), node) if status == 200 else None, True
        except NosyncError as error:
            log.debug("the door of %s does not say whether it serves %s: %s", node, name, error)
            return None, self._env.monotonic_s() - begin_s < ANSWER_S

    def call(
        self, node: str, method: str, path: str, parameters: Mapping[str, str], body: bytes = b"", *,
        patience_s: float = CALL_S,
    ) -> tuple[int, bytes]:  # fmt: skip
        """Asks a door, and returns the status and the body of its answer. Raises ReplicationError where there is none."""
        data = io.BytesIO()
        status = self.receive(data, node, method, path, parameters, body, patience_s=patience_s)
        return status, data.getvalue()

    def receive(
        self, target: Target, node: str, method: str, path: str, parameters: Mapping[str, str], body: bytes = b"", *,
        patience_s: float = CALL_S,
    ) -> int:  # fmt: skip
        """Asks a door, writes what it answers into a file, and returns the status. Raises ReplicationError."""
        client, status = self._connected(), 0
        try:
            for piece in client.call_door(node, method, path, parameters, body, patience_s):
                status = status or piece.status
                target.write(piece.data)
        except RefusedError:
            raise
        except ReplicationError:
            self._forget(client)
            raise
        if not status:
            raise CorruptionError(f"the door of {node} answered without a status")
        return status

    def close(self) -> None:
        """Closes the connection to the daemon. The next call would make another one."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _connected(self) -> DaemonClient:
        with self._lock:
            if self._client is None:
                self._client = client_of_daemon(self._data)
            return self._client

    def _forget(self, client: DaemonClient) -> None:
        """Lets the next call connect again: the daemon may listen elsewhere. Calls of other threads end by themselves."""
        with self._lock:
            if self._client is client:
                self._client = None


class SpooledElsewhere:
    """The files of one checkpoint that are spooled beside other doors. It is a Source of SpreadFiles."""

    def __init__(self, doors: OtherDoors, name: str) -> None:
        self._doors, self._name = doors, name

    def fetch(self, reference: Reference, target: Target, patience_s: float) -> None:
        """See Source."""
        status = self._ask("GET", "SPOOLED", reference, target, patience_s + reference.size_bytes / SLOWEST_BYTES_S)
        if status != 200:
            raise ReplicationError(f"node {reference.node} has {self._name}/{reference.token} no more ({status})")

    def release(self, reference: Reference) -> None:
        """See Source."""
        self._ask("DELETE", "RELEASE", reference, io.BytesIO(), CALL_S)

    def _ask(self, method: str, operation: str, reference: Reference, target: Target, patience_s: float) -> int:
        path = f"{self._name}/{reference.token}"
        return self._doors.receive(target, reference.node, method, path, {"op": operation}, patience_s=patience_s)
