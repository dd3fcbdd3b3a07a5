"""The epochs of one timeline of a store, as a flow has them: their shards and layers, what is recorded, and what a
replay computes.

Reads only: whoever looks takes over nothing from the job that runs on the line.
"""

from __future__ import annotations

from collections.abc import Callable

from nosync.flow.bound_flow import BoundFlow
from nosync.job.flow_versions import FlowVersions
from nosync.job.replay import ReplayPlan
from nosync.lsm.errors import FlowError, NotAvailableError
from nosync.lsm.manifests.input_policy import policies
from nosync.lsm.manifests.manifest import DROP, Manifest
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch, epoch_of
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.trace.directory import LayerDirectory


class EpochLayout:
    def __init__(
        self,
        node: StoreBackend,
        directory: LayerDirectory,
        on_timeline: FlowVersions,
        branch: Callable[[], str],
        shards: int,
    ) -> None:
        """`branch`: its name, which may become another one when the branch is promoted. `shards`: of epochs that are
        new.
        """
        self._node, self._directory, self._on_timeline = node, directory, on_timeline
        self._branch, self._shards = branch, shards

    def shards_at(self, flow: BoundFlow, t: int) -> int:
        """How many shards an epoch has: those it was sealed with (by the timeline it came from, in a replay), or the
        job's.
        """
        sealed = self._node.timelines.manifest(t, self._branch())
        if sealed is None and flow is not self._on_timeline.flow:
            sealed = self._on_timeline.parents_manifest(t)
        return sealed.entries[0].id.trace.shard.count if sealed and sealed.entries else self._shards

    def ids(self, flow: BoundFlow, t: int) -> list[LayerId]:
        """The layers of an epoch."""
        shards = self.shards_at(flow, t)
        return [
            LayerId(TraceId(stage.name, stage.fingerprint, Shard(shard, shards)), Description.of_epoch(t))
            for stage in flow.recorded
            for shard in range(shards)
        ]

    def recorded_stages(self, flow: BoundFlow, t: int) -> frozenset[str]:
        """The stages whose layers at an epoch are all recorded."""
        missing = {id.trace.stage for id in self.ids(flow, t) if not self._directory.holds(id)}
        return frozenset(stage.name for stage in flow.recorded) - missing

    def replay_range(self, to: int | None) -> tuple[int, int]:
        """The first and the last epoch of a replay. Raises FlowError or NotAvailableError where there is nothing to
        replay.
        """
        branch = self._branch()
        timeline = self._node.timelines.timeline(branch)
        if timeline.parent is None:
            raise FlowError("the main timeline has no recorded future to replay; branch() first")
        if self._on_timeline.has_own_inputs():
            raise FlowError(f"branch {branch} has inputs of its own since it was advanced: nothing is left to replay")
        parents = self._node.timelines.of_timeline(timeline.parent)
        last_sealed = self._node.last_sealed(branch)
        assert last_sealed is not None, "a branch begins at a sealed epoch"
        if to is not None and to not in parents and to > last_sealed:
            raise NotAvailableError(
                f"cannot replay branch {branch} to {to}: inputs are recorded up to {max(parents, default=last_sealed)}"
            )
        self._check_inputs_kept(parents.get(Epoch(last_sealed + 1)))
        return last_sealed + 1, max(parents, default=last_sealed) if to is None else to

    def plan_replay(self, to: int | None) -> ReplayPlan:
        """What a replay up to `to` (None: all that the parent has) computes and from where. Raises as `replay_range`."""
        first, last = self.replay_range(to)
        computed: dict[str, int] = {}
        shared: dict[str, int] = {}
        for t in range(first, last + 1):
            flow = self._on_timeline.at(t)
            shards = self.shards_at(flow, t)
            recorded = self.recorded_stages(flow, t)
            for stage in flow.recorded:
                of = shared if stage.name in recorded else computed
                of[stage.name] = of.get(stage.name, 0) + shards
        return ReplayPlan(self._branch(), first, last, computed, shared)

    def _check_inputs_kept(self, manifest: Manifest | None) -> None:
        for entry in manifest.entries if manifest else ():
            gone = not self._directory.holds(entry.id)
            policy = policies(manifest).get(entry.id.trace.stage)
            if gone and policy == DROP:
                raise NotAvailableError(
                    f"cannot replay branch {self._branch()} from {epoch_of(entry.id.description.lower)}: the rows of "
                    f"source {entry.id.trace.stage} were let go of when they were safe (at_safe_point={policy!r})"
                )
