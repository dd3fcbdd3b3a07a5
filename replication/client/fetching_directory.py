"""The directory of a task's host, whose daemon fetches from peers what tasks need and what is not here.

A task publishes into its own host's directory, and that is all it waits for. What it reads and does not find there,
say because its shard ran on another host an epoch ago, it asks the host's daemon to keep, and reads it when it has
come.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.errors import HoleError, NotAvailableError, ReplicationError
from nosync.lsm.model.history import View
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.env import Env
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace
from nosync.replication.transport.daemon_files import address_of

log = logging.getLogger("nosync.replication")

FETCH_PATIENCE_S = 3.0
"""How long a task waits for what only peers have."""
_IN_VAIN_S = 10.0
LOOK_EVERY_S = 0.01
_ASK_EVERY_S = 0.5

MISSING_LAYER_ERRORS = (HoleError, NotAvailableError)
"""What reading raises where layers are missing in the middle of a trace, or at its end."""

T = TypeVar("T")


class FetchingDirectory(LayerDirectory):
    """The layers of one node, which fetches from its peers what it is asked for and does not have."""

    def __init__(self, root: Path, key_groups: int, env: Env | None = None, hasher: Hasher = hash32) -> None:
        super().__init__(root, key_groups, env, hasher)
        self._gave_up_s: dict[str, float] = {}  # when waiting for a trace was in vain; Spark tries a task several times

    @property
    def node(self) -> str:
        """Returns the id of this host's node; empty where no daemon says so."""
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
        """Returns whether a layer, or one that covers it, is here, after a peer was given time to send it."""

        return self.holds(id) or self._wait_for([id.trace], lambda: self.holds(id))

    def fetch_rounds(self, traces: Iterable[TraceId], t: int) -> None:
        """Has the daemon fetch what other hosts recorded of an epoch's rounds. Raises ReplicationError."""
        from nosync.replication.transport.client import client_of  # noqa: PLC0415 - gRPC, as below

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
        from nosync.replication.transport.client import client_of  # noqa: PLC0415 - gRPC, where something is fetched

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
    """Has a daemon fetch traces, and waits until something is here. False: not in time, or no peer that is up has
    it.
    """
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
