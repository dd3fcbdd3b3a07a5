"""Sealing epochs on the node, and what of sealed epochs is lost or was computed again with other rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from nosync.lsm.errors import CorruptionError, DeterminismError, StorageError
from nosync.lsm.facts.seal_times import EventSpan, SealTimes
from nosync.lsm.manifests.completeness import MissingLayer, to_look_at
from nosync.lsm.manifests.manifest import Content, Manifest
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.layer import LayerId
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.manifest_checks import ManifestChecks
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.layout import MANIFESTS
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")

_TIMES_PROBLEM = "times of epochs"


class Epochs:
    """The epochs that one node seals."""

    def __init__(
        self,
        directory: LayerDirectory,
        sealer: Sealer,
        times: SealTimes,
        layers: DurableLayers,
        queue: LayerSyncQueue,
        small: MetadataSync,
        safe_points: SafePoint,
        checks: ManifestChecks,
        problems: MutableMapping[str, str],
    ) -> None:
        self._directory = directory
        self._sealer, self._timelines, self._layers, self._queue = sealer, sealer.timelines, layers, queue
        self._times = times
        self._small, self._safe_points, self._checks, self._problems = small, safe_points, checks, problems

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str,
        meta: Mapping[str, Any] | None,
        copies: Mapping[str, int] | None,
        contents: Mapping[LayerId, Content] | None,
        span: EventSpan | None,
    ) -> Manifest:
        """Writes the manifest of an epoch, queues it, and notes when that was. See nosync.lsm.manifests.sealing.Sealer."""

        def on_conflict(found: list[LayerId]) -> None:
            self._conflict(t, found)

        manifest, is_new = self._sealer.seal(t, ids, branch, meta, copies, contents, on_conflict)
        if is_new:
            self._times.note(manifest.timeline, t, span)
            self._small.note([manifest.path])
            self._safe_points.learned([manifest])
        self._checks.sealed()
        return manifest

    def write_times(self) -> None:
        """Publishes when epochs were sealed, of those that were since the last call. Where that fails it is a problem,
        and tried again; what else the node does is not held up.
        """
        try:
            self._small.note(self._times.write())
            self._problems.pop(_TIMES_PROBLEM, None)
        except StorageError as error:
            if self._problems.get(_TIMES_PROBLEM) != str(error):
                log.error("not written when epochs were sealed: %s", error)
            self._problems[_TIMES_PROBLEM] = str(error)

    def damaged_times(self) -> list[CorruptionError]:
        """Returns an error for each damaged file of the newest times."""
        return [error for timeline in self._timelines.refs.kept_until() for error in self._times.damaged(timeline)]

    def recall_times(self) -> None:
        """Takes the times of epochs of which no file says one from the files of their manifests: a crash came before
        they were published, or they are lost.
        """
        root, env, times = self._sealer.directory.root, self._sealer.directory.env, self._times
        for timeline in self._timelines.refs.kept_until():
            lost = times.without(timeline, self._timelines.of_timeline(timeline).singles())
            later_us: int | None = None
            for t in reversed(lost):
                path = root / MANIFESTS / timeline / f"{t}.json"
                with suppress(CorruptionError):  # of the epoch that follows; its own file is whole, or another one is
                    later = times.of_epoch(timeline, t + 1)
                    later_us = later.sealed_us if later else None
                if env.exists(path):
                    # A copy of the store has newer files; but no epoch is sealed after the one that follows it.
                    written_us = env.identity(path).written_ns // 1000
                    times.note(timeline, t, at_us=min(written_us, later_us or written_us))

    def conflict(self, error: DeterminismError, branch: str) -> None:
        """A layer of a sealed epoch was computed again with other rows: the safe point does not pass over it."""
        t = int(error.t) if error.t.isdecimal() else None
        manifest = None if t is None else self._timelines.manifest(t, branch)
        at = error.stage, error.shard
        ids = [e.id for e in manifest.entries if (e.id.trace.stage, str(e.id.trace.shard)) == at] if manifest else []
        if ids and t is not None:
            self._conflict(t, ids)

    def _conflict(self, t: int, ids: Sequence[LayerId]) -> None:
        with self._layers.lock:
            self._problems[f"timestamp {t}"] = (
                f"{ids[0] if ids else t} was computed again with other rows than were sealed"
            )
        self._safe_points.conflict(ids)

    def lost(self, branch: str) -> list[MissingLayer]:
        """Returns the layers that manifests of a branch list and no file holds, by epoch."""
        found: list[MissingLayer] = []
        directory = self._directory
        released = Released.of(directory.root, directory.env, self._timelines, self._safe_points.point())
        held = self._layers.by_trace()
        for manifest in to_look_at(self._timelines.manifests(branch), released, lambda trace: held.get(trace, ())):
            with self._layers.lock:
                waiting = self._queue.waiting()
            found += [
                MissingLayer(e, manifest.t, manifest.timeline)
                for e in manifest.entries
                if not self._safe_points.is_durable(e) and e.id not in waiting and not released.may_lack(manifest, e)
            ]
        return found

    def optional_stages(self) -> frozenset[str]:
        """Returns the stages that no copies are asked for, in the newest epoch of the main timeline."""
        last = self._timelines.last_sealed()
        manifest = self._timelines.manifest(last) if last is not None else None
        entries = manifest.entries if manifest is not None else ()
        return frozenset(e.id.trace.stage for e in entries if not e.copies)
