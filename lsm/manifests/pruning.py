"""Removes the manifests that no branch needs: those of deleted branches, and those after the end of others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from nosync.lsm.manifests.archive import parse_name
from nosync.lsm.manifests.known import Known
from nosync.lsm.manifests.manifest import Manifest, publish_manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, list_timeline, read_manifest_log
from nosync.lsm.model.layer import TraceId, check_name
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import sync_published
from nosync.lsm.platform.layout import MANIFESTS


class Pruning:
    """The manifests of one directory that nothing needs."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env

    def has_unneeded(self, known: Known) -> bool:
        """Returns whether manifests are there that no branch needs: what `prune` removes."""
        return any(
            self._last_listed(timeline) > (-1 if end is None else end) for timeline, end in self._ended(known).items()
        )

    def _ended(self, known: Known) -> dict[str, Epoch | None]:
        """Returns the timelines that have manifests here and get no more: up to which epoch they are needed, None where
        none are.
        """
        kept, there = known.refs.kept_until(), {*self._env.list_dir(self._root / MANIFESTS)}
        return {
            timeline: kept.get(timeline)
            for timeline in known.refs.timelines
            if timeline in there and (timeline not in kept or kept[timeline] is not None)
        }

    def _last_listed(self, timeline: str) -> int:
        """Returns the last epoch of a timeline that files say anything of; -1 where there are none."""
        names, epochs = list_timeline(self._root, timeline, self._env)
        return max([*epochs, *(span[1] for name in names if (span := parse_name(name)) is not None)], default=-1)

    def prune(self, known: Known) -> dict[TraceId, Time]:
        """Removes the manifests that no branch needs. Returns the traces that lost some and get no more epochs, each
        with the time up to which it is still listed.
        """
        lost: set[TraceId] = set()
        for timeline, until in self._ended(known).items():
            lost |= self._cut(known, timeline, until)
        known.forget(known.refs.timelines.keys() - known.refs.kept_until().keys())
        still: dict[TraceId, Time] = dict.fromkeys(lost, Time(0))
        for sealed in known.logs.values() if lost else ():
            for piece in sealed.own_pieces():
                for trace, _ in piece.traces():
                    if trace in still:
                        still[trace] = max(still[trace], piece.end)
        known.sealed_again_until(still)
        known.branches_changed()
        growing = _growing(known)
        return {trace: until for trace, until in still.items() if trace not in growing}

    def _cut(self, known: Known, timeline: str, until: Epoch | None) -> set[TraceId]:
        """Removes what a timeline has after an epoch (None: all of it), and returns the traces that lost some."""
        directory = self._root / MANIFESTS / check_name(timeline, "timeline name")
        if until is not None and self._last_listed(timeline) <= until:
            return set()
        own = ManifestLog(timeline, self._root, self._env)
        read_manifest_log(own, self._root, self._env)
        end = Epoch(-1) if until is None else until
        gone = list(own.pieces(end))
        archives = [archive for archive in own.archives() if archive.last > end]
        with storage_errors("remove", directory):
            for archive in archives:
                self._write_singly(own[t] for t in archive.epochs if t <= end)
            singles = [t for t in own.singles() if t > end]
            for name in [*(f"{t}.json" for t in singles), *(archive.name for archive in archives)]:
                self._env.unlink(directory / name)
            if until is None and directory.exists():
                shutil.rmtree(directory)
        if timeline in known.logs:
            for manifest in [own[t] for archive in archives for t in archive.epochs if t <= end]:
                known.logs[timeline].add(manifest)
            known.logs[timeline].remove(singles, archives)
        return {trace for piece in gone for trace, _ in piece.traces()}

    def _write_singly(self, manifests: Iterable[Manifest]) -> None:
        """Writes what is left of an archive as single files, as durable as it was."""
        for manifest in manifests:
            publish_manifest(self._root, manifest, self._env)
            sync_published(self._root, self._root / manifest.path, self._env)


def _growing(known: Known) -> set[TraceId]:
    """Returns the traces that branches have epochs in of their own, so that there may be more of them than manifests
    say here: an epoch that is running has published its layers before it is sealed, and those of another node come in
    any order.
    """
    return {
        trace
        for timeline in known.refs.names.values()
        for piece in known.logs[timeline].own_pieces()
        for trace, _ in piece.traces()
    }
