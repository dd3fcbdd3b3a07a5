"""Calls of the doors of other hosts, on their way to the door beside this daemon, and of this one's to those.

Doors listen on loopback, so they meet through their daemons, which know each other. What is asked is a request of
WebHDFS without the secret: the daemon reads that of the door beside it, and nobody else learns it.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from nosync.lsm.errors import BusyError, CorruptionError, RefusedError, ReplicationError
from nosync.lsm.platform.env import Env, read_regular
from nosync.lsm.platform.layout import CHECKPOINT_LIVE, DOOR_ADDRESS
from nosync.lsm.platform.parsing import parsed
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.peer_queries import Lookup
from nosync.replication.transport.client import DaemonClient

THROUGH = "through"
"""The parameter by which a door knows that another one asks: it does not send such a request on."""
MOST_PATIENCE_S = 60.0
AT_ONCE = 24
"""So many calls at once go to the door beside this daemon. Who makes others hears so, and asks again."""
BUSY_S = 0.05
"""So long a call waits here for another one to end, and its caller before he asks again."""
_FILE = "SPOOLED"
"""This sends a whole file. It has the time that its caller gives it."""
_SOON = ("SERVES", _FILE, "RELEASE")
"""Doors answer these without asking other doors. They do not wait, or two doors could wait for each other."""
_PIECE_BYTES = 256 << 10
_METHODS = ("GET", "PUT", "DELETE")
_DESTINATION = "destination"


class DoorCalls:
    """Calls of one daemon. `me`: its node. Connections to peers stay open until one fails."""

    def __init__(self, data: Path, me: str, lookup: Lookup, env: Env) -> None:
        self._data, self._me, self._lookup, self._env = data, me, lookup, env
        self._beside = threading.BoundedSemaphore(AT_ONCE)
        self._clients: dict[tuple[str, str], DaemonClient] = {}
        self._lock = threading.Lock()

    def of_peer(self, request: pb.CallDoorRequest, peers: Mapping[str, str]) -> Iterator[pb.CallDoorReply]:
        """Asks the door beside a peer's daemon. `peers`: the addresses of those that are up."""
        if request.node not in peers:
            raise ReplicationError(f"node {request.node} is not there at the moment, so its door is not asked")
        key = request.node, peers[request.node]
        client = self._client(key)
        parameters = {**request.parameters, THROUGH: self._me}
        is_file = request.parameters.get("op") == _FILE and request.patience_s > 0
        patience_s = request.patience_s if is_file else _patience_s(request.patience_s)
        end_s = self._env.monotonic_s() + patience_s
        try:
            while (left_s := end_s - self._env.monotonic_s()) > 0:
                try:
                    yield from client.call_door("", request.method, request.path, parameters, request.body, left_s)
                    return
                except BusyError:  # many hosts have tasks that begin at the same moment
                    self._env.wait_s(BUSY_S)
            raise ReplicationError(f"the daemon of node {request.node} answers many calls of doors at the moment")
        except RefusedError:
            raise
        except ReplicationError:  # its certificate may be another one by now
            with self._lock:
                if self._clients.get(key) is client:
                    del self._clients[key]
            raise

    def close(self) -> None:
        """Closes the connections to peers."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _client(self, key: tuple[str, str]) -> DaemonClient:
        with self._lock:
            if key not in self._clients:
                self._clients[key] = self._lookup.client(*key)
            return self._clients[key]

    def beside(self, request: pb.CallDoorRequest) -> Iterator[pb.CallDoorReply]:
        """Asks the door beside this daemon, when it has answered enough of what was asked before."""
        if request.method not in _METHODS or not request.parameters.get(THROUGH):
            raise ReplicationError(f"{request.method[:16]!r} of nobody is no call of a door")
        host, port, root = self._address()
        parameters = dict(request.parameters)
        if _DESTINATION in parameters:
            parameters[_DESTINATION] = f"{root}/{parameters[_DESTINATION]}"
        target = f"/webhdfs/v1{root}/{quote(request.path)}?{urlencode(parameters)}"
        with (
            ExitStack() as held,
            closing(http.client.HTTPConnection(host, port, timeout=_patience_s(request.patience_s))) as connection,
        ):
            if parameters.get("op") not in _SOON:
                if not self._beside.acquire(timeout=BUSY_S):
                    raise BusyError(f"the door beside node {self._me} answers many such calls at the moment; try again")
                held.callback(self._beside.release)
            try:
                connection.request(request.method, target, body=request.body or None)
                answer = connection.getresponse()
                yield pb.CallDoorReply(status=answer.status)
                while data := answer.read(_PIECE_BYTES):
                    yield pb.CallDoorReply(data=data)
            except (OSError, http.client.HTTPException) as error:
                raise ReplicationError(f"the door beside node {self._me} does not answer: {error!r}") from None

    def _address(self) -> tuple[str, int, str]:
        """Returns host and port of the door beside this daemon, and the path of its secret."""
        path = self._data / CHECKPOINT_LIVE / DOOR_ADDRESS
        try:
            with parsed("the address of a door", str(path)):
                found = urlsplit(read_regular(path).decode().strip())
                host, port = found.hostname, found.port
        except CorruptionError as error:
            raise ReplicationError(f"no door is open beside node {self._me}: {error}") from None
        if found.scheme != "webhdfs" or host is None or port is None:
            raise ReplicationError(
                f"the door beside node {self._me} is not on loopback, where those of other hosts ask it"
            )
        return host, port, found.path


def _patience_s(asked_s: float) -> float:
    return min(asked_s, MOST_PATIENCE_S) if asked_s > 0 else MOST_PATIENCE_S
