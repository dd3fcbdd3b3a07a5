"""Sealing the epochs of a job: what their manifests say, and what goes when they are sealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.kinds import PART_SEPARATOR
from nosync.flow.persistence import DISK
from nosync.job.epoch_layout import EpochLayout
from nosync.job.flow_versions import PLACED, FlowVersions
from nosync.job.meanings import meanings_to_record
from nosync.job.position import Position
from nosync.job.stream_checks import BATCHES, batches_of
from nosync.lsm.manifests.manifest import AT_SAFE_POINT, KEEP, SUMS, WAITS_FOR_REMOTE, Content
from nosync.lsm.model.layer import Digest, LayerId
from nosync.lsm.node.api import StoreBackend
from nosync.runtime.segment_task import event_span

if TYPE_CHECKING:
    from nosync.runtime.segment_task import Report

    Reports = Mapping[tuple[str, int], Report]


class Sealing:
    """Seals epochs of one timeline."""

    def __init__(self, node: StoreBackend, position: Position, versions: FlowVersions, layout: EpochLayout) -> None:
        self._node, self._position, self._versions, self._layout = node, position, versions, layout

    def seal(self, flow: BoundFlow, t: int, reports: Reports, came_by: Mapping[str, Any] | None = None) -> None:
        """Seals an epoch that ran. `came_by`: how its rows came, for the manifest, as `stream_checks.came_by` has it."""
        self._position.check_open()
        self._position.check_fence()
        meta: dict[str, Any] = {
            "flow": flow.name,
            "shards": self._layout.shards_at(flow, t),
            PLACED: {name: list(columns) for name, columns in flow.placements.items()},
            SUMS: {name: list(columns) for name, columns in flow.sums.items()},
        }
        meta |= meanings_to_record(flow)
        meta |= came_by or {}
        known = batches_of(self._position.manifest(t - 1)) if t > 0 else {}
        if known:  # each manifest has the last batch of every query
            meta[BATCHES] = {**known, **meta.get(BATCHES, {})}
        declared = self._versions.declared
        release = {stage.name: stage.at_safe_point for stage in declared.sources if stage.at_safe_point != KEEP}
        if release:
            meta[AT_SAFE_POINT] = release
        if declared.asks_for_remote:
            meta[WAITS_FOR_REMOTE] = True
        self._seal(t, self._layout.ids(flow, t), meta, reports)
        self.drop_rounds(t)

    def seal_again(self, t: int, reports: Reports) -> None:
        """Seals an epoch that was recovered, which compares every digest with the recorded one."""
        manifest = self._position.manifest(t)
        if manifest is not None:
            self._seal(t, [entry.id for entry in manifest.entries], dict(manifest.meta), reports)

    def _seal(self, t: int, ids: Sequence[LayerId], meta: dict[str, Any], reports: Reports) -> None:
        self._node.seal(
            t,
            ids,
            self._position.branch,
            meta=meta,
            copies=self._copies(),
            contents=_contents(ids, reports),
            span=event_span(reports.values()),
        )

    def drop_rounds(self, t: int, *, at_once: bool = False) -> None:
        """Deletes the rounds of an epoch's loops, which the layers of the epoch stand for."""
        flow = self._versions.flow
        for loop in flow.loops:
            for stage in flow.in_loop(loop):
                self._node.drop_rounds(stage.name, t, at_once=at_once)

    def _copies(self) -> dict[str, int]:
        """Returns the copies of each stage that the safe point waits for, where the flow says so; the node knows
        others.
        """
        declared = self._versions.declared
        said = {stage.name for stage in declared.stages if stage.persist is not None}
        is_all_said = declared.persist_given is not None
        return {
            stage.name: int(stage.level)
            for stage in self._versions.flow.recorded
            if is_all_said or stage.level != DISK or stage.name.partition(PART_SEPARATOR)[0] in said
        }


def _contents(ids: Sequence[LayerId], reports: Reports) -> dict[LayerId, Content]:
    """Returns what tasks said is in the layers that they wrote or found."""
    reported = {id: reports.get((id.trace.stage, id.trace.shard.index)) for id in ids}
    return {id: Content(Digest(r.digest), r.rows) for id, r in reported.items() if r is not None and r.digest}
