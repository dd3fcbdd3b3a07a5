"""What a daemon does before it serves: it checks its configuration, and takes or makes the directory's store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from blake3 import blake3

from nosync.lsm.errors import ReplicationError
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import BEING_FILLED, MARKER, PLACE_FILE
from nosync.lsm.platform.paths import local_path
from nosync.lsm.platform.publish import temporary_path
from nosync.lsm.platform.store_marker import Marker, check_can_be_store, create_store, read_marker
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.members import peers_of
from nosync.replication.remote.stubs import env_of
from nosync.replication.transport.addresses import check_addresses, is_loopback
from nosync.replication.transport.channel import Certificates
from nosync.replication.transport.client import Ways
from nosync.replication.transport.daemon_files import Kept, keeper_of
from nosync.replication.transport.sockets import Meeting, sockets_of_user

JOIN_TIMEOUT_S = 1.0


def check_config(config: DaemonConfig) -> None:
    """Checks all that a start would refuse, but for a port that is taken. Raises ReplicationError, and for the
    directory what opening a store raises.
    """
    local_path(config.data)
    with storage_errors("look into", config.data):
        check_can_be_store(config.data, Env())
        if (config.data / MARKER).exists():
            read_marker(config.data, env_of(config.data))
    peers = peers_of(config)
    if config.tls is not None:
        Certificates.of_directory(config.tls, config.node).check_as_peers_do(config.node)
    check_addresses(config.node, config.listen, peers.values(), is_secure=config.tls is not None)
    _check_beside(config)
    meeting = ways_of(config, Env()).meeting
    if meeting is not None and meeting.is_made():
        meeting.check()


def _check_beside(config: DaemonConfig) -> None:
    """Raises ReplicationError where the addresses of metrics or of the door cannot be had beside the daemon's own."""
    named = {"listen": config.listen, "metrics": config.metrics, "door": config.door}
    taken: dict[str, str] = {}
    for option, address in named.items():
        if address is None or address.endswith(":0"):
            continue
        if address in taken:
            raise ReplicationError(f"--{taken[address]} and --{option} are both {address}: give each a port of its own")
        taken[address] = option
    if config.door is not None and not is_loopback(config.door) and config.tls is None:
        raise ReplicationError(
            f"the door on {config.door} is reached from other hosts, and needs certificates: make them with nosync certs, and "
            "give --tls DIR; or let it listen on 127.0.0.1"
        )


def ways_of(config: DaemonConfig, env: Env) -> Ways:
    """Returns how peers are reached, and reach this node. Raises ReplicationError."""
    if config.tls is not None:
        return Ways(Certificates.of_directory(config.tls, config.node), None)
    return Ways(None, Meeting((config.sockets or sockets_of_user()).absolute(), env))


def make_store(config: DaemonConfig, ways: Ways, env: Env) -> None:
    """A new directory joins the store of its peers; where none answers, all members make the same one."""
    key_groups = config.key_groups
    name = ",".join([*sorted([config.node, *config.peers]), f"key_groups={key_groups}"])
    # Alone it need not be found by others: two nodes of one name are two stores.
    store_id = blake3(name.encode()).hexdigest(length=8) if config.peers else env.token()
    for node, address in config.peers.items():
        with (
            contextlib.suppress(ReplicationError),
            contextlib.closing(ways.client(address, node)) as client,
        ):
            reply = client.status(timeout_s=JOIN_TIMEOUT_S)
            key_groups, store_id = int(reply.key_groups), reply.store_id
    create_store(config.data, key_groups, env, store_id=store_id)


def open_node(config: DaemonConfig, marker: Marker, env: Env) -> tuple[Node, str, bool]:
    """Makes the node. Returns it, what tells this directory from others on the host, for daemons take each other's ports,
    and whether no daemon kept the directory before.

    Who opens the directory while the node starts has to see that a daemon keeps it, so that is written first.
    """
    before = keeper_of(config.data)
    token = before.token if before is not None else None  # a damaged one told nobody apart who is still there
    keeper = Kept(token or env.token(), config.replicas)
    if keeper != before:
        write_json(config.data / PLACE_FILE, dataclasses.asdict(keeper), env)
    try:
        node = Node(
            LayerDirectory(config.data, marker.key_groups, env),
            marker,
            config.settings,
            replicated=True,
            copies=config.replicas,
        )
    except BaseException:
        if before is None:
            forget_keeper(config.data, env)
        raise
    assert keeper.token is not None
    if before is None and config.peers and not config.new_store and _has_nothing(node):
        write_json(config.data / BEING_FILLED, {"node": config.node}, env)
    return node, keeper.token, before is None


def _has_nothing(node: Node) -> bool:
    return not node.durable_records() and node.timelines.manifests().last is None


def is_being_filled(config: DaemonConfig) -> bool:
    """Returns whether a directory had nothing when its first daemon began, and what peers have has not all come since. A job
    would begin anew there, or go on from a part.
    """
    return (config.data / BEING_FILLED).exists() and not config.new_store


def note_filled(data: Path, env: Env) -> None:
    """Notes that all that peers have is here."""
    with storage_errors("remove", data / BEING_FILLED):
        env.unlink(data / BEING_FILLED)
        env.sync_dir(data)


def forget_keeper(data: Path, env: Env) -> None:
    """Says no more that a daemon keeps a directory: it did not come so far, and others may open the store again."""
    with contextlib.suppress(OSError):
        env.unlink(data / PLACE_FILE)


def write_json(path: Path, value: object, env: Env) -> None:
    """Puts a file in the place of what has its name, whole or not at all. Raises StorageError."""
    with storage_errors("write", path):
        temporary = temporary_path(path.parent, env)
        with env.create(temporary) as file:
            file.write(json.dumps(value).encode())
        env.sync_file(temporary)
        env.replace(temporary, path)
        env.sync_dir(path.parent)
