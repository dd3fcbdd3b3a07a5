"""What the daemon of a data directory knows of a kept checkpoint: on how many nodes its files are, and what peers have."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nosync.checkpoints.generations import directory_of
from nosync.checkpoints.keep import Keep
from nosync.lsm.errors import NosyncError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import CHECKPOINTS, PLACE_FILE
from nosync.replication.transport.daemon_files import keeper_of

if TYPE_CHECKING:
    from nosync.replication.transport.client import DaemonClient

log = logging.getLogger("nosync")

_COUNT_S, _COUNT_AGAIN_S = 2.0, 1.0
"""So long a daemon has to say how many copies there are; after it did not, it is asked again so much later. Strict mode has
patience with copies, and none with a daemon that hangs.
"""
FETCH_PATIENCE_S = 60.0
"""How long a restore waits for what only peers have."""


def is_kept_by_daemon(data: Path) -> bool:
    """Returns whether a daemon keeps a data directory, whether it runs or not."""
    return (data / PLACE_FILE).exists()


def nodes_of(data: Path) -> int:
    """Returns on how many nodes files of a data directory are to be."""
    keeper = keeper_of(data)
    return 1 if keeper is None else keeper.replicas


def copies_of(keep: Keep, paths: Collection[str]) -> Mapping[str, int]:
    """Returns on how many nodes each of these files of a keep is durable, as far as peers said so.

    Raises ReplicationError where the daemon does not answer.
    """
    directory = f"{CHECKPOINTS}/{directory_of(keep.name, keep.generation)}"
    ordered = sorted(paths)
    with _daemon_of(keep.data) as client:
        return dict(zip(ordered, client.count_copies([f"{directory}/{path}" for path in ordered]), strict=True))


class CountedCopies:
    """Counts copies again and again by one connection to the daemon of a data directory. Several threads may use it."""

    def __init__(self, data: Path, env: Env) -> None:
        self._data, self._env, self._lock = data, env, threading.Lock()
        self._client: DaemonClient | None = None
        self._again_s = 0.0

    def fewest(self, keep: Keep, paths: Collection[str]) -> int:
        """Returns the number of nodes that have the file that is on the fewest; 0 where the daemon does not answer."""
        directory = f"{CHECKPOINTS}/{directory_of(keep.name, keep.generation)}"
        if self._env.monotonic_s() < self._again_s:
            return 0
        client = None
        try:
            with self._lock:  # not for the call: another checkpoint would wait for it
                if self._client is None:
                    self._client = client_of_daemon(self._data)
                client = self._client
            return min(client.count_copies([f"{directory}/{path}" for path in sorted(paths)], _COUNT_S), default=0)
        except NosyncError as error:
            log.debug("checkpoint %s: %s", keep.name, error)
            with self._lock:
                self._again_s = self._env.monotonic_s() + _COUNT_AGAIN_S
                if client is not None and self._client is client:  # the daemon may listen elsewhere when it is back
                    self._client = None
                    client.close()
            return 0


def fetch(data: Path, name: str, patience_s: float = FETCH_PATIENCE_S) -> None:
    """Fetches what peers have of a checkpoint, where a daemon keeps the directory. If the daemon does not answer, that is
    logged.

    Raises ReplicationError where a peer that is there has more than came in time: who went on from a part would go on from
    an earlier batch than the newest, or begin anew.
    """
    if not is_kept_by_daemon(data):
        return
    try:
        is_filled, files = ask_peers(data, name, patience_s)
    except NosyncError as error:
        log.warning("checkpoint %s: what peers have of it is not fetched: %s", name, error)
        return
    if not is_filled:
        raise ReplicationError(
            f"checkpoint {name}: peers have more of it than came to {data} within {patience_s:g} s ({files:,} files are here). "
            "It goes on coming: try again. What a peer cannot send is not waited for once its daemon is stopped"
        )


def ask_peers(data: Path, name: str, patience_s: float) -> tuple[bool, int]:
    """Has the daemon of a directory fetch a checkpoint. Returns whether all that peers have came in time, and how many files
    are here. Raises ReplicationError where the daemon does not answer.
    """
    with _daemon_of(data) as client:
        return client.fetch_checkpoint(name, patience_s)


@contextlib.contextmanager
def _daemon_of(data: Path) -> Iterator[DaemonClient]:
    client = client_of_daemon(data)
    try:
        yield client
    finally:
        client.close()


def client_of_daemon(data: Path) -> DaemonClient:
    """Returns a client of the daemon that keeps a data directory. Raises ReplicationError where it does not run."""
    try:
        from nosync.replication.transport.client import client_of  # noqa: PLC0415 - gRPC takes a moment to import
    except ImportError as error:
        raise NosyncError(f"daemons need {error.name}: pip install 'nosync[daemon]'") from error
    client = client_of(data)
    if client is None:
        raise ReplicationError(f"the daemon of {data} is not running: start it again with nosync daemon")
    return client
