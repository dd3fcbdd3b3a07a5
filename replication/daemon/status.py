"""What a daemon says of itself, its node and its peers."""

from __future__ import annotations

import dataclasses
import datetime

from nosync.lsm.errors import NosyncError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.timestamp import epoch_of
from nosync.lsm.node.node import Node
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.members import Members
from nosync.replication.daemon.peer_findings import PeerFindings
from nosync.replication.daemon.peer_status import NEVER_HEARD
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.transport.expiry import Expiry
from nosync.replication.transport.sockets import Meeting


class DaemonStatus:
    """The status of one daemon. `meeting`: where it meets its peers without TLS. `expiry`: of its certificate."""

    def __init__(
        self,
        config: DaemonConfig,
        store_id: str,
        node: Node,
        replicator: Replicator,
        members: Members,
        findings: PeerFindings,
        meeting: Meeting | None,
        expiry: Expiry | None,
    ) -> None:
        self._config, self._store_id, self._node, self._replicator = config, store_id, node, replicator
        self._members, self._findings, self._meeting, self._expiry = members, findings, meeting, expiry

    def of(self, branch: str = MAIN, *, lag: bool = True) -> pb.StatusReply:
        """Returns node, safe point, problems, peers; and how far these are behind, for which all that they hold is
        compared.
        """
        problems = {}
        try:
            self._node.learn()
        except NosyncError as error:  # what is known is told all the same
            problems["looking at what is published"] = str(error)
        soon = None if self._expiry is None else self._expiry.warning(datetime.datetime.now(datetime.UTC))
        if soon is not None:
            problems["certificate"] = soon
        peers = self._replicator.peers(lag=lag)
        safe, stages = self._node.safe_point(branch), self._node.safe_points.progress(branch) if lag else []
        backlog_bytes, loaded = self._replicator.backlog()
        for peer in peers:
            peer.address = self._members.peers.get(peer.node, "")
            finding = self._findings.of(peer.node)
            if peer.state in ("away", "silent") and finding is not None:
                peer.why = f"{peer.address} takes connections, and {finding.text}"
                peer.state = "refused" if finding.is_refusal else peer.state
            if self._meeting is not None and peer.why.startswith(NEVER_HEARD):
                where = self._meeting.directory
                peer.why += f"; or it runs as another user, or meets elsewhere than in {where}: then use --tls"
        return pb.StatusReply(
            node=self._config.node,
            incarnation=self._node.incarnation,
            store_id=self._store_id,
            key_groups=self._node.directory.key_groups,
            replicas=self._config.replicas,
            safe_point=safe,
            last_sealed=self._node.last_sealed(branch),
            since=epoch_of(self._node.since()),
            peers=peers,
            problems=problems | self._node.problems,
            stages=[pb.StageProgress(**dataclasses.asdict(stage)) for stage in stages],
            lag_s=self._node.safe_points.lag_s(branch),
            backlog_bytes=backlog_bytes,
            loaded=loaded,
            data=str(self._config.data.absolute()),
        )
