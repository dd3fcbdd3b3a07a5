"""The members of a store: those of the configuration, until operators change them while the daemon runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nosync.lsm.errors import NosyncError, ReplicationError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import read_if_there, replace_small, unseal_json
from nosync.lsm.platform.parsing import parsed
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.transport.addresses import check_addresses, host_of
from nosync.replication.transport.codec import check_node_id

MEMBERS_FILE = "members.json"
"""Peers as operators changed them (nosync peers); it goes before the configuration."""


def peers_of(config: DaemonConfig) -> dict[str, str]:
    """Returns the peers: those that operators made them while it ran, where they did; else those of the configuration.

    Raises ReplicationError where they are too few for the copies that are asked for.
    """
    path = config.data / MEMBERS_FILE
    told = read_members(path)
    peers = dict(config.peers) if told is None else {node: at for node, at in told.items() if node != config.node}
    members = 1 + len(peers)
    if not 1 <= config.replicas <= members:
        changed = f" (as nosync peers left them in {path})" if peers != config.peers else ""
        raise ReplicationError(
            f"replicas={config.replicas}, and the store has {members} nodes "
            f"({', '.join([config.node, *peers])}){changed}: add a peer, or set replicas to at most {members}"
        )
    return peers


def read_members(path: Path) -> dict[str, str] | None:
    """Returns the peers that operators told a daemon of; None where they told it of none. Raises ReplicationError where
    the file is damaged: a peer that is lost from it would be one that no copies are counted of.
    """
    try:
        text = read_if_there(path, Env())
        with parsed("what nosync peers wrote", str(path)):
            found = json.loads(text)
            # Of an earlier version, without a digest, it is nothing but the peers: no address is an object.
            if not isinstance(found, dict) or isinstance(found.get("body"), dict):
                body, _ = unseal_json(text, str(path))
                found = body["peers"]
            for node, address in found.items():
                check_node_id(node)
                host_of(address)
    except FileNotFoundError:
        return None
    except NosyncError as error:
        raise ReplicationError(
            f"{path} is damaged ({error}): remove it, and the configured peers count, which nosync peers changes again"
        ) from error
    return dict(found)


class Members:
    """The peers of one daemon. Raises what `peers_of` raises."""

    def __init__(self, config: DaemonConfig, env: Env) -> None:
        self._config, self._env = config, env
        self._lock = threading.Lock()
        self.peers: Mapping[str, str] = peers_of(config)
        """The address of each; another mapping takes its place when they change."""

    @contextmanager
    def changed(self, add: Mapping[str, str], remove: Iterable[str]) -> Iterator[Mapping[str, str]]:
        """Writes down the peers as they are to be, and returns them; they are so once the block ends.

        Raises ReplicationError for what cannot be, and then nothing has changed.
        """
        with self._lock:
            peers = self._changed(add, remove)
            replace_small(self._config.data, self._config.data / MEMBERS_FILE, {"peers": peers}, self._env)
            yield peers
            self.peers = peers

    def _changed(self, add: Mapping[str, str], remove: Iterable[str]) -> dict[str, str]:
        """Returns the peers as they would be."""
        members = dict(self.peers)
        for node, address in add.items():
            if check_node_id(node) == self._config.node:
                raise ReplicationError(f"node {node} is this node itself")
            members[node] = address
        for node in remove:
            if members.pop(node, None) is None:
                raise ReplicationError(f"node {node} is not a peer; peers: {', '.join(self.peers) or 'none'}")
        if self._config.replicas > 1 + len(members):
            raise ReplicationError(
                f"{1 + len(members)} nodes would be left for replicas={self._config.replicas}: add one first"
            )
        check_addresses(
            self._config.node, self._config.listen, members.values(), is_secure=self._config.tls is not None
        )
        return members
