"""The daemon: the node of one data directory in a process of its own, with its peers.

Spark's tasks publish files as they always do; the daemon is told of them, or sees them in the directory, makes them
durable and replicates them. Nothing waits for it. `daemon.json` in the directory says where it listens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import InvalidInputError, NosyncError, ReplicationError, StoreLockedError
from nosync.lsm.facts.or_set import REGISTERS
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.layer import parse_path
from nosync.lsm.model.timestamp import epoch_of
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there, replace_small, unseal_json
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.paths import local_path
from nosync.lsm.platform.publish import temporary_path
from nosync.lsm.settings import ARCHIVE_EPOCHS, StoreSettings
from nosync.lsm.trace.directory import (
    DEFAULT_KEY_GROUPS,
    LAYERS,
    MANIFESTS,
    MARKER,
    PLACE_FILE,
    LayerDirectory,
    Marker,
    check_can_be_store,
    check_key_groups,
    create_store,
    read_marker,
)
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.directory_watch import Watch, Watcher
from nosync.replication.daemon.file_service import contents_of, layers_of, names_in
from nosync.replication.daemon.peer_queries import Lookup
from nosync.replication.daemon.peer_status import NEVER_HEARD
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.rounds import Rounds
from nosync.replication.daemon.server import MOST_READING, MOST_WORKING, Transport
from nosync.replication.protocol.peer import AWAY_PATIENCE_S
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.addresses import check_addresses, check_free, host_of
from nosync.replication.transport.calls import MEMBERS, OWNER, READERS, Call, Caller
from nosync.replication.transport.channel import PLACE_KEY, Certificates
from nosync.replication.transport.client import Ways
from nosync.replication.transport.codec import check_node_id
from nosync.replication.transport.daemon_files import ADDRESS_FILE, Kept, keeper_of
from nosync.replication.transport.sockets import Meeting, sockets_of_user

log = logging.getLogger("nosync.replication")

MEMBERS_FILE = "members.json"
"""Peers as operators changed them (nosync peers); it goes before the configuration."""
JOIN_TIMEOUT_S = 1.0
SCAN_INTERVAL_S = 5.0
"""How often the directory is listed, in case that neither a job nor the watch told of something."""


MOST_NICE = 19


@dataclass(frozen=True)
class DaemonConfig:
    """How one daemon runs. Every field but `node` and `data` has a default."""

    node: str
    """This node's id, unlike any other's: 1 to 64 of a-z, 0-9, _ and -."""
    data: Path
    """The data directory. A new one is made where there is none."""
    listen: str = "127.0.0.1:7500"
    """HOST:PORT for jobs and other nodes. Port 0: any free one."""
    peers: dict[str, str] = field(default_factory=dict)
    """Node id to HOST:PORT of every other node of the store."""
    replicas: int = 2
    """On how many nodes every layer is kept, this one included. The same on all nodes; more than there are is refused.
    """
    tls: Path | None = None
    """Directory with ca.pem, NODE.pem and NODE.key (nosync certs makes them). Needed off loopback."""
    sockets: Path | None = None
    """Without TLS: a directory of this user alone (mode 0700) where its daemons on this machine find each other. None:
    $XDG_STATE_HOME/nosync, or ~/.local/state/nosync."""
    metrics: str | None = None
    """HOST:PORT where Prometheus fetches metrics; none by default."""
    retain: int | None = None
    """Epochs of history that stay readable; none: all."""
    archive_epochs: int | None = ARCHIVE_EPOCHS
    """Manifests of so many old epochs share one file. The same on all nodes."""
    key_groups: int = DEFAULT_KEY_GROUPS
    """Of a new store: the most shards that a stage can ever have."""
    nice: int = 0
    """How much smaller a share of the processors than tasks the process of `nosync daemon` gets, 0 (no smaller) to 19.
    Where tasks keep all of them busy copies come later, and more is lost with a host.
    """

    def __post_init__(self) -> None:
        check_node_id(self.node)
        for node in self.peers:
            check_node_id(node)
        if self.node in self.peers:
            raise ReplicationError(f"node {self.node} is among its own peers: --node and --peer name different nodes")
        addresses = {"listen": self.listen, **{f"peers.{node}": address for node, address in self.peers.items()}}
        for field_name, address in (addresses | ({"metrics": self.metrics} if self.metrics else {})).items():
            try:
                host_of(address)
            except ReplicationError as error:
                raise ReplicationError(f"{field_name}: {error}") from None
        check_key_groups(self.key_groups)
        if not 0 <= self.nice <= MOST_NICE:
            raise InvalidInputError(f"nice is {self.nice}, expected 0 to {MOST_NICE}")
        self.settings  # noqa: B018 - its fields are checked when it is made

    @property
    def settings(self) -> StoreSettings:
        """What of it concerns the store. Raises InvalidInputError for values that none can have."""
        return StoreSettings(retain=self.retain, archive_epochs=self.archive_epochs, scan_interval_s=SCAN_INTERVAL_S)


def check_config(config: DaemonConfig) -> None:
    """All that a start would refuse, but for a port that is taken. Raises ReplicationError, and for the directory what
    opening a store raises.
    """
    local_path(config.data)
    with storage_errors("look into", config.data):
        check_can_be_store(config.data, Env())
        if (config.data / MARKER).exists():
            read_marker(config.data, Env())
    peers = peers_of(config)
    if config.tls is not None:
        Certificates.of_directory(config.tls, config.node).check_as_peers_do(config.node)
    check_addresses(config.node, config.listen, peers.values(), is_secure=config.tls is not None)
    meeting = _ways(config, Env()).meeting
    if meeting is not None and meeting.is_made():
        meeting.check()


def peers_of(config: DaemonConfig) -> dict[str, str]:
    """The peers: those that operators made them while it ran, where they did; else those of the configuration.

    Raises ReplicationError where they are too few for the copies that are asked for.
    """
    path = config.data / MEMBERS_FILE
    told = read_members(path)
    peers = dict(config.peers) if told is None else {node: at for node, at in told.items() if node != config.node}
    members = 1 + len(peers)
    if not 1 <= config.replicas <= members:
        changed = f" (as nosync peers left them in {path})" if peers != config.peers else ""
        raise ReplicationError(
            f"replicas={config.replicas}, and the store has {members} nodes ({', '.join([config.node, *peers])}){changed}: "
            f"add a peer, or set replicas to at most {members}"
        )
    return peers


def read_members(path: Path) -> dict[str, str] | None:
    """The peers that operators told a daemon of; None where they told it of none. Raises ReplicationError where the
    file is damaged: a peer that is lost from it would be one that no copies are counted of.
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


def _ways(config: DaemonConfig, env: Env) -> Ways:
    """How peers are reached, and reach this node. Raises ReplicationError."""
    if config.tls is not None:
        return Ways(Certificates.of_directory(config.tls, config.node), None)
    return Ways(None, Meeting((config.sockets or sockets_of_user()).absolute(), env))


class Daemon:
    """One running daemon: `start`, then `stop`. Raises what opening a store raises, and ReplicationError."""

    def __init__(self, config: DaemonConfig, env: Env | None = None) -> None:
        self.config = config
        self._env = env or Env()
        check_config(config)
        self._peers = peers_of(config)
        self._ways = _ways(config, self._env)
        if self._ways.meeting is not None:
            self._ways.meeting.make()
        if not (config.data / MARKER).exists():
            check_free(config.listen)  # before there is a store that nobody serves
            self._make_store()
        marker = read_marker(config.data, self._env)
        directory = LayerDirectory(config.data, marker.key_groups, self._env)
        self._place = self._keep(directory, marker)
        self._reading, self._working = (
            {role: threading.BoundedSemaphore(most) for role in (READERS, MEMBERS, OWNER)}
            for most in (MOST_READING, MOST_WORKING)
        )
        self._store_id = marker.store_id
        self._changing_members = threading.Lock()
        members = [NodeId(name) for name in (config.node, *self._peers)]
        try:
            with contextlib.suppress(OSError):  # of a daemon that was killed; its address may be another one's by now
                (config.data / ADDRESS_FILE).unlink()
            self.replicator = Replicator(self.node, members[0], marker.store_id, members, config.replicas)
            peers = {NodeId(name): address for name, address in self._peers.items()}
            self.transport = Transport(
                self.replicator, self, members[0], config.listen, peers, self._ways, config.data.absolute(), self._env
            )
        except BaseException:
            self.node.abandon()
            raise
        self.lookup = Lookup(directory, self._ways)
        self.rounds = Rounds(self.node, self.lookup)
        self._stop_metrics: Callable[[], None] | None = None
        self._watcher = Watcher(self._watched, self._noticed, SCAN_INTERVAL_S)

    def _make_store(self) -> None:
        """A new directory joins the store of its peers; where none answers, all members make the same one."""
        key_groups = self.config.key_groups
        name = ",".join([*sorted([self.config.node, *self.config.peers]), f"key_groups={key_groups}"])
        # Alone it need not be found by others: two nodes of one name are two stores.
        store_id = blake3(name.encode()).hexdigest(length=8) if self.config.peers else self._env.token()
        for node, address in self.config.peers.items():
            with (
                contextlib.suppress(ReplicationError),
                contextlib.closing(self._ways.client(address, node)) as client,
            ):
                reply = client.status(timeout_s=JOIN_TIMEOUT_S)
                key_groups, store_id = int(reply.key_groups), reply.store_id
        create_store(self.config.data, key_groups, self._env, store_id=store_id)

    def _keep(self, directory: LayerDirectory, marker: Marker) -> str:
        """Makes the node. Returns what tells this directory from others on the host.

        Daemons come and go, and take each other's ports.

        Who opens the directory while the node starts has to see that a daemon keeps it, so that is written first.
        """
        before = keeper_of(self.config.data)
        token = before.token if before is not None else None  # a damaged one told nobody apart who is still there
        keeper = Kept(token or self._env.token(), self.config.replicas)
        if keeper != before:
            with storage_errors("write", self.config.data / PLACE_FILE):
                self._write_json(PLACE_FILE, dataclasses.asdict(keeper))
        try:
            self.node = Node(directory, marker, self.config.settings, replicated=True, copies=self.config.replicas)
        except StoreLockedError:
            if before is None:
                with contextlib.suppress(OSError):
                    self._env.unlink(self.config.data / PLACE_FILE)
            raise
        assert keeper.token is not None
        return keeper.token

    def start(self) -> None:
        """Begins to serve; returns at once. Where it cannot, everything is stopped again."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        _notify_systemd("READY=1")
        log.info("node %s serves %s on %s", self.config.node, self.config.data, self.transport.address)

    def _start(self) -> None:
        self.replicator.start()
        self.transport.start()
        about = {
            "address": self.transport.address, "node": self.config.node, "pid": os.getpid(), "place": self._place,
            "tls": str(self.config.tls.absolute()) if self.config.tls else "",
        }  # fmt: skip
        self._write_json(ADDRESS_FILE, about)
        self._watcher.start()
        if self.config.metrics:
            from nosync.replication.daemon.metrics import serve_metrics  # noqa: PLC0415 - only where they are wanted

            self._stop_metrics = serve_metrics(self.config.metrics, self.status, self.replicator.counters)

    def _write_json(self, name: str, value: object) -> None:
        path = self.config.data / name
        with storage_errors("write", path):
            temporary = temporary_path(self.config.data, self._env)
            with self._env.create(temporary) as file:
                file.write(json.dumps(value).encode())
            self._env.sync_file(temporary)
            self._env.replace(temporary, path)
            self._env.sync_dir(path.parent)

    def stop(self) -> None:
        """Makes everything durable and gives the directory back."""
        _notify_systemd("STOPPING=1")
        with contextlib.suppress(OSError):
            (self.config.data / ADDRESS_FILE).unlink()
        with contextlib.ExitStack() as ending:  # the last one first, and each whatever becomes of the others
            ending.callback(self.node.close)
            ending.callback(self._watcher.stop)
            ending.callback(self.transport.stop)
            ending.callback(self.replicator.stop)
            if self._stop_metrics is not None:
                ending.callback(self._stop_metrics)

    def run(self, ready: Callable[[], object] = lambda: None) -> None:
        """Serves until SIGTERM or SIGINT. `ready` is called once it does."""
        stop = threading.Event()
        reading, writing = socket.socketpair()
        with reading, writing:
            # Whichever thread gets the signal, a byte comes here and wakes the one that runs handlers.
            writing.setblocking(False)
            signal.set_wakeup_fd(writing.fileno())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            self.start()
            ready()
            while not stop.is_set():
                reading.recv(1)
            signal.set_wakeup_fd(-1)
        self.stop()

    def _watched(self) -> Watch:
        """What notices what tasks publish; the node's scan is the safety net, and all there is where the system has no
        watch.
        """
        watched = (LAYERS, MANIFESTS, *REGISTERS)
        for name in watched:
            self._env.make_dirs(self.config.data / name)
        return Watch([self.config.data.absolute() / name for name in watched])

    def _noticed(self, paths: list[Path]) -> None:
        root = self.config.data.absolute()
        layers = [PurePosixPath(path.relative_to(root / LAYERS)) for path in paths if path.suffix == ".layer"]
        fresh = self.node.unknown(id for path in layers if (id := parse_path(path)) is not None)
        if fresh:
            self.node.note(fresh)
        published = [PurePosixPath(path.relative_to(root)) for path in paths if path.suffix == ".json"]
        if published:
            self.node.note_files(published)

    @contextlib.contextmanager
    def _answering(
        self, call: Call, who: str, slots: Mapping[str, threading.BoundedSemaphore] | None = None
    ) -> Iterator[None]:
        """Answers with an error that the caller can read. `slots`: how many such calls there may be at once, by role."""
        with contextlib.ExitStack() as taken:
            try:
                self._check_caller(call, who)
                if slots is not None:
                    of_role = slots[self.role_of(call.caller)]
                    if not of_role.acquire(blocking=False):
                        raise ReplicationError(
                            f"node {self.config.node} answers many such calls at the moment; try again"
                        )
                    taken.callback(of_role.release)
                yield
            except NosyncError as error:
                call.fail(error)

    def role_of(self, caller: Caller) -> str:
        """What a caller is to this node. Without TLS nobody knows who calls its address, so whoever does may read."""
        if caller.is_local or caller.identity == self.config.node:
            return OWNER
        return MEMBERS if caller.identity in self._peers else READERS

    def _check_caller(self, call: Call, who: str) -> None:
        """Raises ReplicationError where another daemon is meant, or the caller may not ask for this."""
        place = call.metadata(PLACE_KEY)
        if place is not None and place != self._place:
            raise ReplicationError(
                f"the daemon that was there has ended, and node {self.config.node}, with its data in "
                f"{self.config.data.absolute()}, has its address now: start it again with nosync daemon"
            )
        role = self.role_of(call.caller)
        if who == READERS or role in (OWNER, who):
            return
        raise ReplicationError(
            f"{call.caller} may read this store and not change it: ask as the user of node {self.config.node}'s daemon, on its "
            f"host and by its data directory, or with the certificate of node {self.config.node}"
        )

    def status(self, branch: str = MAIN, *, lag: bool = True) -> pb.StatusReply:
        """Node, safe point, problems, peers; and how far these are behind, for which all that they hold is compared."""
        problems = {}
        try:
            self.node.learn()
        except NosyncError as error:  # what is known is told all the same
            problems["looking at what is published"] = str(error)
        peers = self.replicator.peers(lag=lag)
        safe, stages = self.node.safe_point(branch), self.node.safe_points.progress(branch) if lag else []
        backlog_bytes, loaded = self.replicator.backlog()
        for peer in peers:
            peer.address = self._peers.get(peer.node, "")
            finding = self.transport.finding(peer.node)
            if peer.state in ("away", "silent") and finding is not None:
                peer.why = f"{peer.address} takes connections, and {finding.text}"
                peer.state = "refused" if finding.is_refusal else peer.state
            if self._ways.meeting is not None and peer.why.startswith(NEVER_HEARD):
                where = self._ways.meeting.directory
                peer.why += f"; or it runs as another user, or meets elsewhere than in {where}: then use --tls"
        return pb.StatusReply(
            node=self.config.node,
            incarnation=self.node.incarnation,
            store_id=self._store_id,
            key_groups=self.node.directory.key_groups,
            replicas=self.config.replicas,
            safe_point=safe,
            last_sealed=self.node.last_sealed(branch),
            since=epoch_of(self.node.since()),
            peers=peers,
            problems=problems | self.node.problems,
            stages=[pb.StageProgress(**dataclasses.asdict(stage)) for stage in stages],
            lag_s=self.node.safe_points.lag_s(branch),
            backlog_bytes=backlog_bytes,
            loaded=loaded,
            data=str(self.config.data.absolute()),
        )

    # --- the service ------------------------------------------------------------------------------------------------

    def Status(self, request: pb.StatusRequest, call: Call) -> pb.StatusReply:
        with self._answering(call, READERS):
            return self.status(request.branch or MAIN, lag=request.lag)
        raise AssertionError("the context was aborted")

    def Note(self, request: pb.NoteRequest, call: Call) -> pb.Done:
        with self._answering(call, OWNER):
            ids = [parse_path(PurePosixPath(path)) for path in request.layers]
            self.node.learn()
            self.node.note([id for id in ids if id is not None])
        return pb.Done()

    def Attach(self, request: pb.AttachRequest, call: Call) -> pb.AttachReply:
        with self._answering(call, OWNER, self._working):
            filled = self.replicator.keep_all(request.patience_s)
            self.node.learn()
            return pb.AttachReply(
                replicas=self.config.replicas, filled=filled, store_id=self._store_id, node=self.config.node,
                notices=self._watcher.is_watching,
            )  # fmt: skip
        raise AssertionError("the context was aborted")

    def Keep(self, request: pb.KeepRequest, call: Call) -> pb.KeepReply:
        with self._answering(call, OWNER):
            self.replicator.keep_traces(request.traces)
            peers = self.replicator.peers(lag=False)
            is_one_back_soon = any(p.state == "away" and 0 <= p.silent_s <= AWAY_PATIENCE_S for p in peers)
            may_come = is_one_back_soon or self.lookup.may_come(request.traces, self._peers_up())
            return pb.KeepReply(peers=int(may_come))
        raise AssertionError("the context was aborted")

    def Sync(self, request: pb.SyncRequest, call: Call) -> pb.Done:
        with self._answering(call, READERS, self._working):
            self.node.sync()
        return pb.Done()

    def Check(self, request: pb.CheckRequest, call: Call) -> pb.CheckReply:
        with self._answering(call, OWNER, self._working):
            return pb.CheckReply(errors=[str(error) for error in self.node.check()])
        raise AssertionError("the context was aborted")

    def Compact(self, request: pb.CompactRequest, call: Call) -> Iterator[pb.CompactProgress]:
        with self._answering(call, OWNER, self._working):
            for merges in self.node.compact(request.stage or None):
                yield pb.CompactProgress(merges=merges)

    def FetchRounds(self, request: pb.FetchRoundsRequest, call: Call) -> pb.Done:
        with self._answering(call, OWNER, self._working):
            self.rounds.fetch(request.traces, request.t, self._peers_up())
        return pb.Done()

    def DropRounds(self, request: pb.DropRoundsRequest, call: Call) -> pb.Done:
        with self._answering(call, MEMBERS):
            peers = self._peers_up() if request.everywhere else {}
            self.rounds.drop(request.stage, request.t, peers, at_once=request.at_once)
        return pb.Done()

    def _peers_up(self) -> dict[str, str]:
        """The addresses of peers that are there."""
        up = [peer.node for peer in self.replicator.peers(lag=False) if peer.state == "up"]
        return {node: address for node, address in list(self._peers.items()) if node in up}

    def Conflicts(self, request: pb.ConflictsRequest, call: Call) -> pb.ConflictsReply:
        with self._answering(call, READERS):
            if request.take_theirs:
                self._check_caller(call, OWNER)
            conflicts = self.replicator.conflicts
            names = conflicts.to_discard() if request.take_theirs else conflicts.names()
            if request.take_theirs and names:
                layers = [id for name in names if (id := name.layer) is not None]
                gone = self.node.discard(layers, [PurePosixPath(name) for name in names if name.layer is None])
                log.warning("took the peers' contents of %s", ", ".join(names))
                return pb.ConflictsReply(names=map(str, gone))
            return pb.ConflictsReply(names=names)
        raise AssertionError("the context was aborted")

    def ListFiles(self, request: pb.ListFilesRequest, call: Call) -> Iterator[pb.ListFilesReply]:
        with self._answering(call, READERS, self._reading):
            for names in names_in(self.node.directory, request.directory):
                digests = self.replicator.digests_of(f"{request.directory}/{name}" for name in names)
                yield pb.ListFilesReply(names=names.keys(), written_ns=names.values(), digests=digests)

    def FetchFiles(self, request: pb.FetchFilesRequest, call: Call) -> Iterator[pb.Frame]:
        with self._answering(call, READERS, self._reading):
            yield from contents_of(self.node.directory, request.names)

    def Layers(self, request: pb.LayersRequest, call: Call) -> Iterator[pb.Layer]:
        with self._answering(call, READERS, self._reading):
            yield from layers_of(self.node)

    def ChangeMembers(self, request: pb.ChangeMembersRequest, call: Call) -> pb.Done:
        with self._answering(call, OWNER):
            with self._changing_members:
                members = self._changed_members(dict(request.add), list(request.remove))
                replace_small(self.config.data, self.config.data / MEMBERS_FILE, {"peers": members}, self._env)
                for node, address in members.items():  # before others go: there must be enough at any time
                    self.transport.add_peer(NodeId(node), address)
                    self.replicator.add_member(NodeId(node))
                for node in [node for node in self._peers if node not in members]:
                    self.replicator.remove_member(NodeId(node), self.config.replicas)
                    self.transport.remove_peer(NodeId(node))
                self._peers = members
            log.warning("the members are now %s", ", ".join([self.config.node, *self._peers]))
        return pb.Done()

    def _changed_members(self, add: dict[str, str], remove: list[str]) -> dict[str, str]:
        """The peers as they would be. Raises ReplicationError for what cannot be, and then nothing has changed."""
        members = dict(self._peers)
        for node, address in add.items():
            if check_node_id(node) == self.config.node:
                raise ReplicationError(f"node {node} is this node itself")
            members[node] = address
        for node in remove:
            if members.pop(node, None) is None:
                raise ReplicationError(f"node {node} is not a peer; peers: {', '.join(self._peers) or 'none'}")
        if self.config.replicas > 1 + len(members):
            raise ReplicationError(
                f"{1 + len(members)} nodes would be left for replicas={self.config.replicas}: add one first"
            )
        check_addresses(
            self.config.node, self.config.listen, members.values(), is_secure=self._ways.certificates is not None
        )
        return members

    def ChangeBranches(self, request: pb.ChangeBranchesRequest, call: Call) -> pb.ChangeBranchesReply:
        with self._answering(call, OWNER):
            self.node.learn()
            dropped, kind = 0, request.WhichOneof("change")
            if kind == "create":
                made = request.create
                self.node.create_branch(made.name, made.parent, made.at, list(made.changed), list(made.anew))
            elif kind == "promote":
                self.node.promote(request.promote.name, request.promote.keep_as or None)
            elif kind == "rewind":
                self.node.rewind(request.rewind.at, request.rewind.keep_as or None)
            elif kind == "delete":
                dropped = self.node.delete_branch(request.delete)
            return pb.ChangeBranchesReply(layers_dropped=dropped)
        raise AssertionError("the context was aborted")


def _notify_systemd(state: str) -> None:
    """Tells systemd, where it asked to be told (Type=notify)."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + path[1:] if path.startswith("@") else path)
        out.sendall(state.encode())
