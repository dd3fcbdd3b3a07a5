"""Where Spark's tasks find a store: in the directory of the host they run on, whose daemon fetches from peers what they
need.

A task publishes into its own host's directory, and that is all it waits for. What it reads and does not find there, say
because its shard ran on another host an epoch ago, it asks the host's daemon to keep, and reads it when it has come.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.errors import CorruptionError, HoleError, NosyncError, NotAvailableError, ReplicationError
from nosync.lsm.model.history import View
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.env import Env, is_foreign, read_regular, storage_error
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.store_marker import read_marker
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace

log = logging.getLogger("nosync.replication")

ADDRESS_FILE = "daemon.json"
MOST_ADDRESS_BYTES = 1 << 20
"""Of what a daemon writes about itself."""
DATA_VARIABLE = "NOSYNC_DATA"
"""In the environment of Spark's executors: the host's data directory, where it is not at the path that the driver's
has.
"""
FETCH_PATIENCE_S = 3.0
"""How long a task waits for what only peers have."""
_IN_VAIN_S = 10.0
LOOK_EVERY_S = 0.01
_ASK_EVERY_S = 0.5

MISSING_LAYER_ERRORS = (HoleError, NotAvailableError)
"""What reading raises where layers are missing in the middle of a trace, or at its end."""

T = TypeVar("T")


@dataclass(frozen=True)
class StoreLocation:
    """A store, as a task finds it. Pickled to Spark's workers."""

    root: str
    key_groups: int
    store_id: str = ""
    """Of a store that daemons keep on several nodes; empty: there is only the one directory, which all tasks see."""
    node: str = ""
    """The node that the driver runs beside."""


def address_of(root: Path) -> dict[str, Any] | None:
    """What the daemon of a directory wrote about itself; None where none did, or somebody else did.

    Raises StorageError where this user may not read it: there is a daemon, and nothing else would say why it cannot be
    asked.
    """
    path = root / ADDRESS_FILE
    try:
        with parsed("what a daemon says of itself", str(path)):
            found: dict[str, Any] = json.loads(read_regular(path, MOST_ADDRESS_BYTES))
            texts = [found["address"], found["node"], *(found.get(name, "") for name in ("place", "tls"))]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("its fields are not all texts")
    except CorruptionError as error:
        if isinstance(error.__cause__, PermissionError):
            raise storage_error("read", path, error.__cause__) from error
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            log.warning("it is as if there were no daemon: %s", error)
        return None
    return found


@dataclass(frozen=True)
class Kept:
    """What the daemon that keeps a directory leaves there. `token`: tells the directory from others on the host.
    `replicas`: on how many nodes it keeps each layer.
    """

    token: str | None
    replicas: int = 1


def keeper_of(root: Path) -> Kept | None:
    """Of the daemon that keeps a directory, whether it runs or not; None where none ever did."""
    try:
        text = read_regular(root / PLACE_FILE, MOST_ADDRESS_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if is_foreign(error):
            return Kept(None)
        raise storage_error("read", root / PLACE_FILE, error) from error
    with contextlib.suppress(CorruptionError), parsed("what a daemon left", str(root / PLACE_FILE)):
        found = json.loads(text)
        return Kept(found) if isinstance(found, str) else Kept(str(found["token"]), int(found["replicas"]))
    return Kept(None)  # damaged; a bare token is of an earlier version


_directories: dict[StoreLocation, LayerDirectory] = {}


MOST_DIRECTORIES = 4
"""Of so many stores a process keeps what it has mapped: files that are deleted meanwhile keep their space on the disk.
"""


def open_directory(location: StoreLocation) -> LayerDirectory:
    """This process's view of a store, which lives with the layers it has mapped until others were used more lately."""
    found = _directories.pop(location, None)
    if found is None:
        for other, directory in list(_directories.items()):
            if not directory.root.exists():
                _directories.pop(other, None)
        found = _open(location)
    _directories[location] = found  # the most recently used come last
    for other in list(_directories)[:-MOST_DIRECTORIES]:
        _directories.pop(other, None)
    return found


def _open(location: StoreLocation) -> LayerDirectory:
    if not location.store_id:
        return LayerDirectory(Path(location.root), location.key_groups)
    root = Path(os.environ.get(DATA_VARIABLE) or location.root)  # set to nothing is not set
    try:
        found = read_marker(root, Env()).store_id
    except NosyncError as error:
        raise ReplicationError(
            f"a task found no store on its host: {error}. Run a nosync daemon on every host of Spark's, with its data at that "
            f"path, or set spark.executorEnv.{DATA_VARIABLE} to where it is"
        ) from None
    if found != location.store_id:
        raise ReplicationError(f"{root} on a task's host belongs to store {found}, the job's is {location.store_id}")
    return FetchingDirectory(root, location.key_groups)


class FetchingDirectory(LayerDirectory):
    """The layers of one node, which fetches from its peers what it is asked for and does not have."""

    def __init__(self, root: Path, key_groups: int, env: Env | None = None, hasher: Hasher = hash32) -> None:
        super().__init__(root, key_groups, env, hasher)
        self._gave_up_s: dict[str, float] = {}  # when waiting for a trace was in vain; Spark tries a task several times

    @property
    def node(self) -> str:
        """The id of this host's node; empty where no daemon says so."""
        return str((address_of(self.root) or {}).get("node", ""))

    def open_view(self, view: View, *, until: Time, as_of: Time) -> Trace:
        """See LayerDirectory."""
        read = super().open_view
        traces = [*(part.trace for part in view.base), view.id]
        return self._fetched(traces, lambda: read(view, until=until, as_of=as_of))

    def layer_at(self, id: TraceId, time: Time) -> Trace:
        """See LayerDirectory."""
        read = super().layer_at
        return self._fetched([id], lambda: read(id, time))

    def fetch(self, id: LayerId) -> bool:
        """Whether a layer, or one that covers it, is here, after a peer was given time to send it."""

        return self.holds(id) or self._wait_for([id.trace], lambda: self.holds(id))

    def fetch_rounds(self, traces: Iterable[TraceId], t: int) -> None:
        """Has the daemon fetch what other hosts recorded of an epoch's rounds. Raises ReplicationError."""
        from nosync.replication.daemon.daemon import client_of  # noqa: PLC0415 - gRPC, as below

        client = client_of(self.root)
        if client is not None:
            with contextlib.closing(client):
                client.fetch_rounds([str(trace.directory) for trace in traces], t)

    def _fetched(self, traces: Iterable[TraceId], read: Callable[[], T]) -> T:
        found: list[T] = []

        def is_here() -> bool:
            with contextlib.suppress(*MISSING_LAYER_ERRORS):
                found.append(read())
            return bool(found)

        if not is_here():
            self._wait_for(traces, is_here)
        return found[0] if found else read()

    def _wait_for(self, traces: Iterable[TraceId], is_here: Callable[[], bool]) -> bool:
        from nosync.replication.daemon.daemon import client_of  # noqa: PLC0415 - gRPC, where something has to be fetched

        names = [str(trace.directory) for trace in traces]
        client = client_of(self.root)
        if client is None:
            return False  # no daemon: what is here is all there is
        now_s = self.env.monotonic_s()
        recently = any(self._gave_up_s.get(name, float("-inf")) > now_s - _IN_VAIN_S for name in names)
        try:
            came = wait_for_peers(client, self.env, names, is_here, LOOK_EVERY_S if recently else FETCH_PATIENCE_S)
        finally:
            client.close()
        if not came and self.env.monotonic_s() - now_s >= FETCH_PATIENCE_S:
            self._gave_up_s |= dict.fromkeys(names, self.env.monotonic_s())
        return came


class Fetcher(Protocol):
    """A daemon, as far as it can be asked to fetch."""

    def keep(self, traces: list[str]) -> bool: ...


def wait_for_peers(
    daemon: Fetcher, env: Env, traces: list[str], is_here: Callable[[], bool], patience_s: float = FETCH_PATIENCE_S
) -> bool:
    """Has a daemon fetch traces, and waits until something is here. False: not in time, or no peer that is up has it."""
    end_s = ask_s = env.monotonic_s()
    end_s += patience_s
    try:
        while env.monotonic_s() < end_s:
            if env.monotonic_s() >= ask_s:
                ask_s += _ASK_EVERY_S
                if not daemon.keep(traces):
                    return is_here()  # it may have come since it was looked for
            env.wait_s(LOOK_EVERY_S)
            if is_here():
                return True
    except ReplicationError as error:
        log.warning("cannot fetch %s: %s", traces, error)
    return is_here()
