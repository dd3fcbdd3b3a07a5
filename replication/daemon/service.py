"""The service that jobs, commands and peers call. Each method answers one call, of `proto/v1/replication.proto`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.manifests.branches import MAIN, ChangedStages
from nosync.lsm.model.layer import check_name as check_layer_name
from nosync.lsm.model.layer import parse_path
from nosync.lsm.node.node import Node
from nosync.lsm.platform.layout import CHECKPOINTS
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.admission import Admission, slots
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.dialer import Dialer
from nosync.replication.daemon.door_calls import DoorCalls
from nosync.replication.daemon.file_service import contents_of, layers_of, names_in
from nosync.replication.daemon.members import Members
from nosync.replication.daemon.peer_queries import Lookup
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.rounds import Rounds
from nosync.replication.daemon.status import DaemonStatus
from nosync.replication.protocol.peer import AWAY_PATIENCE_S
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.calls import MEMBERS, OWNER, READERS, Call
from nosync.replication.transport.codec import check_name

MOST_PATIENCE_S = 600.0
log = logging.getLogger("nosync.replication")

MOST_READING, MOST_WORKING = 16, 24
"""Calls at once that read files, and that take long, of readers, members and the owner each; the others' threads are
for who asks briefly.
"""


class Service:
    """The methods of one daemon's service. `is_watching`: whether it notices what is published without being told."""

    def __init__(
        self,
        config: DaemonConfig,
        store_id: str,
        node: Node,
        replicator: Replicator,
        members: Members,
        dialer: Dialer,
        lookup: Lookup,
        admission: Admission,
        status: DaemonStatus,
        is_watching: Callable[[], bool],
    ) -> None:
        self._config, self._store_id, self._node, self._replicator = config, store_id, node, replicator
        self._members, self._dialer, self._lookup = members, dialer, lookup
        self._admission, self._status, self._is_watching = admission, status, is_watching
        self._rounds = Rounds(node, lookup)
        self._doors = DoorCalls(config.data, config.node, lookup, node.directory.env)
        self._reading, self._working = slots(MOST_READING), slots(MOST_WORKING)

    def close(self) -> None:
        """Closes what calls opened. To be called after they have ended."""
        self._doors.close()

    def Status(self, request: pb.StatusRequest, call: Call) -> pb.StatusReply:
        with self._admission.answering(call, READERS):
            return self._status.of(request.branch or MAIN, lag=request.lag)
        raise AssertionError("the context was aborted")

    def Note(self, request: pb.NoteRequest, call: Call) -> pb.Done:
        with self._admission.answering(call, OWNER):
            ids = [parse_path(PurePosixPath(path)) for path in request.layers]
            self._node.learn()
            self._node.note([id for id in ids if id is not None])
        return pb.Done()

    def Attach(self, request: pb.AttachRequest, call: Call) -> pb.AttachReply:
        with self._admission.answering(call, OWNER, self._working):
            filled = self._replicator.keep_all(request.patience_s)
            self._node.learn()
            return pb.AttachReply(
                replicas=self._config.replicas, filled=filled, store_id=self._store_id, node=self._config.node,
                notices=self._is_watching(),
            )  # fmt: skip
        raise AssertionError("the context was aborted")

    def Keep(self, request: pb.KeepRequest, call: Call) -> pb.KeepReply:
        with self._admission.answering(call, OWNER):
            self._replicator.keep_traces(request.traces)
            peers = self._replicator.peers(lag=False)
            is_one_back_soon = any(p.state == "away" and 0 <= p.silent_s <= AWAY_PATIENCE_S for p in peers)
            may_come = is_one_back_soon or self._lookup.may_come(request.traces, self._peers_up())
            return pb.KeepReply(peers=int(may_come))
        raise AssertionError("the context was aborted")

    def Sync(self, request: pb.SyncRequest, call: Call) -> pb.Done:
        with self._admission.answering(call, READERS, self._working):
            self._node.sync()
        return pb.Done()

    def Check(self, request: pb.CheckRequest, call: Call) -> pb.CheckReply:
        with self._admission.answering(call, OWNER, self._working):
            return pb.CheckReply(errors=[str(error) for error in self._node.check()])
        raise AssertionError("the context was aborted")

    def Compact(self, request: pb.CompactRequest, call: Call) -> Iterator[pb.CompactProgress]:
        with self._admission.answering(call, OWNER, self._working):
            for merges in self._node.compact(request.stage or None):
                yield pb.CompactProgress(merges=merges)

    def FetchRounds(self, request: pb.FetchRoundsRequest, call: Call) -> pb.Done:
        with self._admission.answering(call, OWNER, self._working):
            self._rounds.fetch(request.traces, request.t, self._peers_up())
        return pb.Done()

    def DropRounds(self, request: pb.DropRoundsRequest, call: Call) -> pb.Done:
        with self._admission.answering(call, MEMBERS):
            peers = self._peers_up() if request.everywhere else {}
            self._rounds.drop(request.stage, request.t, peers, at_once=request.at_once)
        return pb.Done()

    def _peers_up(self) -> dict[str, str]:
        """Returns the addresses of peers that are there."""
        up = [peer.node for peer in self._replicator.peers(lag=False) if peer.state == "up"]
        return {node: address for node, address in list(self._members.peers.items()) if node in up}

    def Conflicts(self, request: pb.ConflictsRequest, call: Call) -> pb.ConflictsReply:
        with self._admission.answering(call, READERS):
            if request.take_theirs:
                self._admission.check(call, OWNER)
            conflicts = self._replicator.conflicts
            names = conflicts.to_discard() if request.take_theirs else conflicts.names()
            if request.take_theirs and names:
                opaque = [PurePosixPath(name) for name in names if name.is_opaque]
                self._node.opaque.set_aside(opaque, "another node's contents count")
                rest = [name for name in names if not name.is_opaque]
                layers = [id for name in rest if (id := name.layer) is not None]
                small = [PurePosixPath(name) for name in rest if name.layer is None]
                gone = [*opaque, *(self._node.discard(layers, small) if rest else ())]
                log.warning("took the peers' contents of %s", ", ".join(names))
                return pb.ConflictsReply(names=map(str, gone))
            return pb.ConflictsReply(names=names)
        raise AssertionError("the context was aborted")

    def CountCopies(self, request: pb.CountCopiesRequest, call: Call) -> pb.CountCopiesReply:
        with self._admission.answering(call, OWNER):
            return pb.CountCopiesReply(copies=self._replicator.count_copies([check_name(n) for n in request.names]))
        raise AssertionError("the context was aborted")

    def FetchCheckpoint(self, request: pb.FetchCheckpointRequest, call: Call) -> pb.FetchCheckpointReply:
        with self._admission.answering(call, OWNER, self._working):
            name = f"{CHECKPOINTS}/{check_layer_name(request.checkpoint, 'checkpoint name')}"
            patience_s = min(request.patience_s, MOST_PATIENCE_S)
            filled, files = self._replicator.fetch_checkpoint(name, patience_s)
            return pb.FetchCheckpointReply(filled=filled, files=files)
        raise AssertionError("the context was aborted")

    def CallDoor(self, request: pb.CallDoorRequest, call: Call) -> Iterator[pb.CallDoorReply]:
        with self._admission.answering(call, OWNER if request.node else MEMBERS):
            if request.node:
                yield from self._doors.of_peer(request, self._peers_up())
            else:
                yield from self._doors.beside(request)

    def ListFiles(self, request: pb.ListFilesRequest, call: Call) -> Iterator[pb.ListFilesReply]:
        with self._admission.answering(call, READERS, self._reading):
            for names in names_in(self._node.directory, request.directory):
                digests = self._replicator.digests_of(f"{request.directory}/{name}" for name in names)
                yield pb.ListFilesReply(names=names.keys(), written_ns=names.values(), digests=digests)

    def FetchFiles(self, request: pb.FetchFilesRequest, call: Call) -> Iterator[pb.Frame]:
        with self._admission.answering(call, READERS, self._reading):
            yield from contents_of(self._node.directory, request.names)

    def Layers(self, request: pb.LayersRequest, call: Call) -> Iterator[pb.Layer]:
        with self._admission.answering(call, READERS, self._reading):
            yield from layers_of(self._node)

    def ChangeMembers(self, request: pb.ChangeMembersRequest, call: Call) -> pb.Done:
        with self._admission.answering(call, OWNER):
            before = self._members.peers
            with self._members.changed(request.add, request.remove) as peers:
                for node in peers:  # before others go: there must be enough at any time
                    self._replicator.add_member(NodeId(node))
                for node in [node for node in before if node not in peers]:
                    self._replicator.remove_member(NodeId(node), self._config.replicas)
            self._dialer.dial_members()
            log.warning("the members are now %s", ", ".join([self._config.node, *self._members.peers]))
        return pb.Done()

    def _check_may_drop(self, keep_as: str, t: int) -> None:
        """Raises InvalidInputError where the epochs of main after `t` are dropped, and a peer that is away may go on with them:
        when it is back, all that was sealed since would be dropped everywhere.
        """
        last, away = self._node.last_sealed(), self._replicator.away()
        if keep_as or last is None or t >= last or not away:
            return
        raise InvalidInputError(
            f"the line that main is would be dropped while {', '.join(away)} may go on with it, for not all peers are there: "
            "keep it as a branch (leave out --drop, or keep_as=''), start their daemons first, or take a node that is gone for "
            "good out with nosync peers --remove"
        )

    def ChangeBranches(self, request: pb.ChangeBranchesRequest, call: Call) -> pb.ChangeBranchesReply:
        with self._admission.answering(call, OWNER):
            self._node.learn()
            dropped, kind = 0, request.WhichOneof("change")
            if kind == "create":
                made = request.create
                stages = ChangedStages(tuple(made.changed), tuple(made.anew), tuple(made.replaced))
                self._node.create_branch(made.name, made.parent, made.at, stages)
            elif kind == "promote":
                self._check_may_drop(request.promote.keep_as, BEFORE_FIRST_EPOCH)
                self._node.promote(request.promote.name, request.promote.keep_as or None)
            elif kind == "rewind":
                self._check_may_drop(request.rewind.keep_as, request.rewind.at)
                self._node.rewind(request.rewind.at, request.rewind.keep_as or None)
            elif kind == "delete":
                dropped = self._node.delete_branch(request.delete)
            return pb.ChangeBranchesReply(layers_dropped=dropped)
        raise AssertionError("the context was aborted")
