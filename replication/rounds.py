"""The rounds of a loop whose tasks run on several hosts.

What a round records is gone when its epoch is done, so it is not replicated. But a shard's next round may run on another host:
then the daemon there fetches what it lacks from the daemons of the others. Where a host was lost with what it had, the loop
begins again at the first round, which finds what is left and computes the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import PurePosixPath

from nosync.lsm.directory import LAYERS
from nosync.lsm.errors import CorruptionError, ReplicationError
from nosync.lsm.layer import LayerId, parse_path
from nosync.lsm.node import Node
from nosync.lsm.timestamp import end_of, pack
from nosync.replication.fetching import fetch_files
from nosync.replication.transport import Certificates, DaemonClient
from nosync.replication.wire import check_group

log = logging.getLogger("nosync.replication")

_ANSWER_S = 2.0
"""A peer that takes longer is about to be suspected; a task waits for this."""


class Rounds:
    """Of one node. `peers`: the addresses of those that are up; what one of them does not answer is left out."""

    def __init__(self, node: Node, certificates: Certificates | None) -> None:
        self._node, self._certificates = node, certificates

    def fetch(self, traces: Sequence[str], t: int, peers: Mapping[str, str]) -> None:
        """Returns when what peers have of an epoch's rounds in these traces is here.

        `traces`: directories relative to `layers/`. Raises ReplicationError for a name that is none.
        """
        groups = [check_group(f"{LAYERS}/{trace}") for trace in traces]
        directory = self._node.directory
        for peer in peers.items():
            with self._asked(*peer) as client:
                names = [f"{group}/{name}" for group in groups for name in client.list_files(group, _ANSWER_S)]
                rounds = [id for name in names if (id := _round_of(name, t)) is not None]
                lacking = [id for id in rounds if not directory.path_of(id).exists()]
                fetch_files(client, directory.root, [f"{LAYERS}/{id.path}" for id in lacking], directory.env)
                self._node.note([id for id in lacking if directory.path_of(id).exists()])

    def drop(self, stage: str, t: int, peers: Mapping[str, str]) -> None:
        """Here, and soon on the peers: no epoch waits for these."""
        self._node.drop_rounds(stage, t)
        if peers:
            threading.Thread(target=self._drop_on, args=(stage, t, peers), name="nosync-rounds", daemon=True).start()

    def _drop_on(self, stage: str, t: int, peers: Mapping[str, str]) -> None:
        for peer in peers.items():
            with self._asked(*peer) as client:
                client.drop_rounds(stage, t)

    @contextmanager
    def _asked(self, node: str, address: str) -> Iterator[DaemonClient]:
        with closing(DaemonClient(address, self._certificates, node)) as client:
            try:
                yield client
            except (ReplicationError, CorruptionError) as error:
                log.warning("rounds of a loop, of %s: %s", node, error)  # one that is not here is computed again


def _round_of(name: str, t: int) -> LayerId | None:
    """The layer that a file name stands for, if it is of a round of the epoch."""
    id = parse_path(PurePosixPath(name).relative_to(LAYERS))
    if id is None:
        return None
    d = id.description
    return id if pack(t) <= d.lower and d.upper <= end_of(t) and d.is_of_rounds else None
