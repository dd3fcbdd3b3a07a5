"""The epochs of one timeline of a store, as a flow has them: their shards, rows and layers, and what is recorded.

It only reads: whoever looks takes over nothing from the job that runs on the timeline.
"""

from __future__ import annotations

from nosync.flow.bound_flow import BoundFlow
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.trace.directory import LayerDirectory


class EpochLayout:
    """Says which layers each epoch of a timeline has."""

    def __init__(self, directory: LayerDirectory, position: Position, versions: FlowVersions, shards: int) -> None:
        """`shards`: how many shards new epochs have."""
        self._directory, self._position, self._versions = directory, position, versions
        self._shards = shards

    def shards_at(self, flow: BoundFlow, t: int) -> int:
        """Returns how many shards an epoch has: those it was sealed with (by the parent, in a replay), or the job's."""
        sealed = self._position.manifest(t)
        if sealed is None and flow is not self._versions.flow:
            sealed = self._versions.parents_manifest(t)
        return (sealed.shard_count if sealed else None) or self._shards

    def rows_at(self, t: int) -> int:
        """Returns how many rows the sources of a sealed epoch had."""
        manifest = self._versions.manifest(t)
        sources = {stage.name for stage in self._versions.flow.sources}
        return sum(entry.rows for entry in manifest.entries if entry.id.trace.stage in sources) if manifest else 0

    def ids(self, flow: BoundFlow, t: int) -> list[LayerId]:
        """Returns the layers of an epoch."""
        shards = self.shards_at(flow, t)
        return [
            LayerId(TraceId(stage.name, stage.fingerprint, Shard(shard, shards)), Description.of_epoch(t))
            for stage in flow.recorded
            for shard in range(shards)
        ]

    def recorded_stages(self, flow: BoundFlow, t: int) -> frozenset[str]:
        """Returns the stages whose layers at an epoch are all recorded."""
        missing = {id.trace.stage for id in self.ids(flow, t) if not self._directory.holds(id)}
        return frozenset(stage.name for stage in flow.recorded) - missing
