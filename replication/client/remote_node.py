"""The store of a job whose directory belongs to a daemon: files for what may not wait, the daemon for the rest.

Publishing and sealing are links in the directory, so they work, and are as fast, while the daemon is away. What
needs the catalog or the peers (safe point, durability, merging, dropping branches) is asked of the daemon.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nosync.lsm.errors import (
    CorruptionError,
    DeterminismError,
    InvalidInputError,
    NosyncError,
    ReplicationError,
)
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.facts.seal_times import EventSpan, SealTimes
from nosync.lsm.manifests.branches import MAIN, SAME_CODE, ChangedStages
from nosync.lsm.manifests.catalog import recorded_layers
from nosync.lsm.manifests.completeness import MissingLayer, lost
from nosync.lsm.manifests.manifest import Content, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Epoch, Time, pack
from nosync.lsm.node.api import RemoteCopies
from nosync.lsm.node.remote_status import CopiesOfDaemon, read_remote_status
from nosync.lsm.platform.layout import BEING_FILLED, CHECKPOINTS
from nosync.lsm.platform.lock import check_same
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.presence import Presence
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.client.fetching_directory import wait_for_peers
from nosync.replication.protocol.peer import AWAY_PATIENCE_S
from nosync.replication.transport.addresses import host_of
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.daemon_files import address_of

log = logging.getLogger("nosync.replication")

FILL_PATIENCE_S = 60.0
"""How long a job that starts on another node waits for what only others have."""


class RemoteNode:
    """Is what a store and a job need of a node, beside a daemon. See nosync.lsm.node.api.StoreBackend for what each
    method promises.
    """

    def __init__(self, directory: LayerDirectory, client: DaemonClient) -> None:
        self.directory = directory
        self._place = directory.root.stat()
        self.client = client
        self.problems: dict[str, str] = {}
        reply = client.attach(FILL_PATIENCE_S)
        self.replicas = reply.replicas
        """On how many nodes the daemon keeps each layer."""
        self.store_id, self.node_id = reply.store_id, reply.node
        self._daemon_notices = reply.notices
        self._daemon = address_of(directory.root)
        self.sealer = Sealer(directory, reply.replicas)
        self.timelines = self.sealer.timelines
        if not reply.filled:
            self._check_has_begun()
            log.warning("not everything that peers have is on this node yet; recover() recomputes what does not come")
        self._pins = Pins(directory.root, directory.env)
        self.times = SealTimes(directory.root, directory.env)

    def _check_has_begun(self) -> None:
        """Raises ReplicationError where nothing is here, and peers may have the store: a job would begin it anew."""
        root, env = self.directory.root, self.directory.env
        has_nothing = self.timelines.manifests().last is None and not env.list_dir(root / CHECKPOINTS)
        if has_nothing or env.exists(root / BEING_FILLED):
            has = "nothing" if has_nothing else "only a part of what its peers have"
            raise ReplicationError(
                f"{root} has {has} yet, and its daemon has not met all peers, or is still being filled by them. One that "
                "is down may have the store, which would begin a second time here: start the daemons of all nodes first (nosync "
                f"status {root} shows which are away), or take one that is lost for good out with nosync peers --remove; or, "
                "for a new store, start this one with --new-store"
            )

    @property
    def remotes(self) -> list[RemoteCopies]:
        """Returns the copies in object stores that the daemon makes."""
        root, env = self.directory.root, self.directory.env
        return [CopiesOfDaemon(root, env, status.url, self.last_sealed) for status in read_remote_status(root, env)]

    # --- files ------------------------------------------------------------------------------------------------------

    def note(self, ids: Iterable[LayerId]) -> None:
        """Tells the daemon of published layers, where the system gave it no watch by which it notices them by
        itself.
        """
        if not self._daemon_notices:
            self.client.note([str(id.path) for id in ids])

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str = MAIN,
        meta: dict[str, Any] | None = None,
        copies: Mapping[str, int] | None = None,
        contents: Mapping[LayerId, Content] | None = None,
        span: EventSpan | None = None,
    ) -> Manifest:
        def before_new(timeline: str) -> None:
            self.times.record(timeline, t, span)

        check_same(self.directory.root, self._place)  # else the epoch is where nobody finds it
        manifest, _ = self.sealer.seal(t, ids, branch, meta, copies, contents, before_new=before_new)
        self.note(ids)
        return manifest

    def check_sealable(self, t: int, branch: str = MAIN) -> None:
        self.sealer.check_sealable(t, branch)

    def origin(self, trace: TraceId) -> Time | None:
        return self.sealer.origin(trace)

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        return self.timelines.histories(branch)

    def manifests(self, branch: str = MAIN) -> ManifestLog:
        return self.timelines.manifests(branch)

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        return self.timelines.last_sealed(branch)

    def conflict(self, error: DeterminismError, branch: str = MAIN) -> None:
        """The daemon sees what is not there."""

    def missing(self, branch: str = MAIN) -> list[MissingLayer]:
        return self.fetch(self.lost(branch))

    def lost(self, branch: str = MAIN) -> list[MissingLayer]:
        released = Released.of(self.directory.root, self.directory.env, self.timelines, self._safe_or_none())
        return lost(self.timelines, self.directory, released, branch)

    def fetch(self, lost: list[MissingLayer]) -> list[MissingLayer]:
        def still_lost() -> list[MissingLayer]:
            presence = Presence(self.directory.descriptions)
            return [m for m in lost if not presence.has(m.entry.id)]

        if lost:  # it may be on its way from the host where it was computed
            traces = sorted({str(m.entry.id.trace.directory) for m in lost})
            wait_for_peers(self.client, self.directory.env, traces, lambda: not still_lost())
        return still_lost()

    def _safe_or_none(self) -> Epoch | None:
        with contextlib.suppress(ReplicationError):
            return self.safe_point()
        return None

    def pins(self) -> dict[str, Pin]:
        return self._pins.by_name()

    def pin(self, pin: Pin) -> None:
        self._pins.publish(pin)

    def unpin(self, name: str) -> None:
        self._pins.delete(name)

    def durable_ids(self) -> set[LayerId]:
        return {record.id for record in recorded_layers(self.directory.root)}

    def notice_changes(self, timeline: str | None = None) -> None:
        self.timelines.notice_changes(timeline)

    # --- the daemon -------------------------------------------------------------------------------------------------

    def _attach_again(self) -> None:
        """A daemon that was started since knows of no job that wants everything here. Only where it is asked anyway:
        sealing waits for nobody.
        """
        found = address_of(self.directory.root)
        if found is not None and found != self._daemon:
            with contextlib.suppress(ReplicationError):  # it is looked for the next time
                self.client.attach(0.0)
                self._daemon = found

    def _status(self, branch: str = "") -> pb.StatusReply:
        self._attach_again()
        reply = self.client.status(branch, lag=False)
        self.problems = dict(reply.problems)
        return reply

    def safe_point(self, branch: str = MAIN) -> Epoch | None:
        reply = self._status(branch)
        return Epoch(reply.safe_point) if reply.HasField("safe_point") else None

    def lost_hosts(self) -> frozenset[str]:
        """Returns the hosts of peers that fell silent, or whose daemon is gone for a while: tasks there are of no
        use to others.
        """
        try:
            peers = self._status().peers
        except ReplicationError:
            return frozenset()
        lost = [
            peer
            for peer in peers
            if peer.state in ("suspect", "silent")
            or (peer.state in ("away", "refused") and peer.silent_s > AWAY_PATIENCE_S)
        ]
        return frozenset(host_of(peer.address) for peer in lost)

    def since(self) -> Time:
        return pack(self._status().since)

    def make_durable_now(self) -> None:
        with contextlib.suppress(ReplicationError):  # what is not durable yet is not lost for it
            self.client.sync()

    def sync(self) -> None:
        self.client.sync()

    def check(self) -> list[NosyncError]:
        return [CorruptionError(text) for text in self.client.check()]

    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]:
        return self.check() if any(self.directory.has_file(id) for id in ids) else []

    def compact(self, stage: str | None = None) -> Iterator[int]:
        return self.client.compact(stage or "")

    def drop_rounds(self, stage: str, t: int, *, at_once: bool = False) -> None:
        with contextlib.suppress(ReplicationError):  # they are dropped with the next epoch's
            self.client.drop_rounds(stage, t, everywhere=True, at_once=at_once)

    def create_branch(self, name: str, parent: str, at: int, stages: ChangedStages = SAME_CODE) -> None:
        made = pb.ChangeBranchesRequest.Create(
            name=name, parent=parent, at=at, changed=stages.changed, anew=stages.anew, replaced=stages.replaced
        )
        self._change(pb.ChangeBranchesRequest(create=made))
        timeline = self.timelines.timeline(name)
        if {*timeline.anew} != {*stages.anew} or {*timeline.replaced} != {*stages.replaced}:
            raise ReplicationError(
                f"branch {name} was made by a daemon of an earlier version, which does not know that stages begin anew "
                f"on it ({', '.join(stages.anew)}): delete the branch, upgrade the daemon, and make it again"
            )

    def promote(self, name: str, keep_as: str | None) -> None:
        promoted = pb.ChangeBranchesRequest.Promote(name=name, keep_as=keep_as or "")
        self._change(pb.ChangeBranchesRequest(promote=promoted))

    def rewind(self, t: int, keep_as: str | None) -> None:
        self._change(pb.ChangeBranchesRequest(rewind=pb.ChangeBranchesRequest.Rewind(at=t, keep_as=keep_as or "")))

    def release_first_attempt(self) -> None:
        """Raises InvalidInputError: peers may have been sent some of it."""
        raise InvalidInputError(
            "cannot rewind to -1 beside a daemon: peers may have what the first attempt recorded. Begin with another "
            "epoch number, which leaves that alone, or with a new store"
        )

    def delete_branch(self, name: str) -> int:
        return self._change(pb.ChangeBranchesRequest(delete=name))

    def _change(self, request: pb.ChangeBranchesRequest) -> int:
        dropped = self.client.change_branches(request)
        self.timelines.refresh()
        return dropped

    def close(self) -> None:
        self.client.close()
