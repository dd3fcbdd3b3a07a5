"""What the peers have of a trace at this moment, on their disks: they are asked, because what they said may be of a
while ago.

A peer announces a layer once it is durable there. Who has to know whether waiting for one is any use looks behind that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import PurePosixPath

from nosync.lsm.errors import NosyncError
from nosync.lsm.model.layer import LayerId, parse_path
from nosync.lsm.platform.layout import LAYERS
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.presence import is_there
from nosync.replication.transport.client import DaemonClient, Ways
from nosync.replication.transport.codec import check_group

log = logging.getLogger("nosync.replication")

ANSWER_S = 2.0
"""A peer that takes longer is about to be suspected; a task waits for this."""
_AT_ONCE = 16
"""So many tasks are answered at one time; of more nobody knows."""


class Lookup:
    """Asks the peers of one node, whose directory this is."""

    def __init__(self, directory: LayerDirectory, ways: Ways) -> None:
        self._directory, self._ways = directory, ways
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def asked(self, node: str, address: str) -> closing[DaemonClient]:
        """Returns a peer's daemon. What is done with it raises ReplicationError where it does not answer."""
        return closing(self.client(node, address))

    def client(self, node: str, address: str) -> DaemonClient:
        """Returns a client of a peer's daemon, for who closes it."""
        return self._ways.client(address, node)

    def layers_of(self, client: DaemonClient, trace: str, timeout_s: float = ANSWER_S) -> list[LayerId]:
        """Returns what a peer has of a trace. Raises ReplicationError for a name that is none, and where it does not
        answer.
        """
        group = check_group(f"{LAYERS}/{trace}")
        names = client.list_files(group, timeout_s)
        paths = [PurePosixPath(trace, name) for name in names]
        return [id for path in paths if (id := parse_path(path)) is not None]

    def may_come(self, traces: Sequence[str], peers: Mapping[str, str]) -> bool:
        """Returns whether a peer has layers of these traces (directories relative to `layers/`) that are not here, nor
        any that stand for them; or one does not say, so nobody knows. `peers`: the addresses of those that are up.

        Raises ReplicationError for a name that is none.
        """
        for trace in traces:
            check_group(f"{LAYERS}/{trace}")
        if not peers:
            return False
        if not self._slots.acquire(blocking=False):
            return True
        pool = ThreadPoolExecutor(len(peers), thread_name_prefix="nosync-lookup")
        try:
            asked = [pool.submit(self._has_more, peer, traces) for peer in peers.items()]
            return any(one.result() for one in as_completed(asked))
        finally:
            pool.shutdown(wait=False)  # one that does not answer holds up nobody who knows by another
            self._slots.release()

    def _has_more(self, peer: tuple[str, str], traces: Sequence[str]) -> bool:
        end_s = self._directory.env.monotonic_s() + ANSWER_S
        try:
            with self.asked(*peer) as client:
                for trace in traces:
                    left_s = end_s - self._directory.env.monotonic_s()
                    if left_s <= 0 or self._lacks_any(self.layers_of(client, trace, left_s)):
                        return True
        except (NosyncError, OSError) as error:  # certificates that are being replaced, a disk that cannot be listed
            log.info("what %s has was asked for, in vain: %s", peer[0], error)
            return True
        return False

    def _lacks_any(self, of_trace: Sequence[LayerId]) -> bool:
        """Returns whether one of these layers of one trace is not here. It is looked for after they were listed: one
        may just have come.
        """
        ours = self._directory.descriptions(of_trace[0].trace) if of_trace else []
        return any(not is_there(id, ours) for id in of_trace)
