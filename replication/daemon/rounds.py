"""The rounds of a loop whose tasks run on several hosts.

What a round records is gone when its epoch is done, so it is not replicated. But a shard's next round may run on
another host: then the daemon there fetches what it lacks from the daemons of the others. Where a host was lost with
what it had, the loop begins again at the first round, which finds what is left and computes the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from nosync.lsm.errors import CorruptionError, ReplicationError
from nosync.lsm.model.layer import LayerId, check_name
from nosync.lsm.model.timestamp import end_of, pack
from nosync.lsm.node.node import Node
from nosync.lsm.platform.layout import LAYERS
from nosync.replication.daemon.peer_queries import Lookup
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.codec import check_group
from nosync.replication.transport.download import fetch_files

log = logging.getLogger("nosync.replication")


class Rounds:
    """Fetches and drops the rounds of one node. `peers`: the addresses of those that are up; what one of them does not
    answer is left out.
    """

    def __init__(self, node: Node, lookup: Lookup) -> None:
        self._node, self._lookup = node, lookup

    def fetch(self, traces: Sequence[str], t: int, peers: Mapping[str, str]) -> None:
        """Returns when what peers have of an epoch's rounds in these traces is here.

        `traces`: directories relative to `layers/`. Raises ReplicationError for a name that is none.
        """
        for trace in traces:
            check_group(f"{LAYERS}/{trace}")
        directory = self._node.directory
        for peer in peers.items():
            with self._asked(*peer) as client:
                there = [id for trace in traces for id in self._lookup.layers_of(client, trace)]
                rounds = [id for id in there if _is_round_of(id, t)]
                lacking = [id for id in rounds if not directory.has_file(id)]
                fetch_files(client, directory.root, [f"{LAYERS}/{id.path}" for id in lacking], directory.env)
                self._node.note([id for id in lacking if directory.has_file(id)])

    def drop(self, stage: str, t: int, peers: Mapping[str, str], *, at_once: bool = False) -> None:
        """Drops rounds here, and soon on the peers: no epoch waits for these. With `at_once` they are gone everywhere
        when this returns.

        Raises InvalidInputError for a name or an epoch that none can be: peers say them, and a name becomes a path.
        """
        check_name(stage, "stage")
        pack(t)
        self._node.drop_rounds(stage, t, at_once=at_once)
        if peers and at_once:
            self._drop_on(stage, t, peers, at_once=True)
        elif peers:
            threading.Thread(target=self._drop_on, args=(stage, t, peers), name="nosync-rounds", daemon=True).start()

    def _drop_on(self, stage: str, t: int, peers: Mapping[str, str], *, at_once: bool = False) -> None:
        for peer in peers.items():
            with self._asked(*peer) as client:
                client.drop_rounds(stage, t, at_once=at_once)

    @contextmanager
    def _asked(self, node: str, address: str) -> Iterator[DaemonClient]:
        try:
            with self._lookup.asked(node, address) as client:
                yield client
        except (ReplicationError, CorruptionError) as error:
            log.warning("rounds of a loop, of %s: %s", node, error)  # one that is not here is computed again


def _is_round_of(id: LayerId, t: int) -> bool:
    """Returns whether a layer is of a round of the epoch."""
    d = id.description
    return pack(t) <= d.lower and d.upper <= end_of(t) and d.is_of_rounds
