"""What other processes, or nodes, did to the manifests of a store since they were read: epochs added, taken back or
replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.manifests.archive import Archive, epochs_of, parse_name
from nosync.lsm.manifests.branches import read_refs
from nosync.lsm.manifests.known import Known
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, list_timeline, read_manifest
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.platform.layout import MANIFESTS


class _NewestFile(NamedTuple):
    """The file of a timeline's newest epoch, as it was when its contents were known."""

    t: Epoch
    path: Path
    identity: Identity


class Changes:
    """Looks at the manifests of one directory for what is known of them."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._newest_files: dict[str, _NewestFile] = {}

    def note(self, manifest: Manifest, identity: Identity) -> None:
        """This file holds the newest epoch of its timeline: it need not be read to see."""
        self._newest_files[manifest.timeline] = _NewestFile(manifest.t, self._root / manifest.path, identity)

    def forget(self) -> None:
        """All is read again."""
        self._newest_files = {}

    def learn(self, known: Known) -> list[Manifest] | None:
        """Learns the epochs that were added, and returns them in order. None: branches are other ones, or what was
        known is gone, so that all has to be read again.
        """
        refs = read_refs(self._root, self._env)
        listed = {timeline: list_timeline(self._root, timeline, self._env) for timeline in known.logs}
        if (refs.timelines, refs.names) != (known.refs.timelines, known.refs.names) or any(
            _is_another(known.logs[timeline], *found) or self.is_replaced(known.logs[timeline])
            for timeline, found in listed.items()
        ):
            return None
        return [m for timeline, found in listed.items() for m in self._new_of(known, known.logs[timeline], *found)]

    def next_ones(self, known: Known, came: Iterable[PurePosixPath]) -> list[Manifest] | None:
        """Returns the epochs that come next on their timelines, of which these manifests are some. None where these
        files are anything else.
        """
        by_timeline: dict[str, set[Epoch]] = {}
        for path in came:
            span = epochs_of(path.name) if path.parts[0] == MANIFESTS else None
            if span is None or span[0] != span[1]:
                return None
            by_timeline.setdefault(path.parts[1], set()).add(span[0])
        learned: list[Manifest] = []
        for timeline, epochs in by_timeline.items():
            try:
                found = self._next_of(timeline, known.logs.get(timeline), epochs)
            except (CorruptionError, FileNotFoundError):
                return None
            if found is None:
                return None
            learned += found
        return learned

    def _next_of(self, timeline: str, sealed: ManifestLog | None, came: set[Epoch]) -> list[Manifest] | None:
        """Returns the epochs that follow what is known of a timeline; None where one of those that came does not, or is
        another one now.
        """
        found = list[Manifest]()
        if sealed is None or sealed.last is None:
            return None
        t = Epoch(sealed.last + 1)
        if any(
            read_manifest(self._root, timeline, known, self._env) != sealed.get(known) for known in came if known < t
        ):
            return None
        # They come in any order, and one that came before its time was left for now.
        while t in came or self._env.exists(self._root / MANIFESTS / timeline / f"{t}.json"):
            found.append(read_manifest(self._root, timeline, t, self._env))
            t = Epoch(t + 1)
        return found if max(came) < t else None

    def is_replaced(self, sealed: ManifestLog) -> bool:
        """Returns whether the newest epoch is not there any more as it is known, because the node gave it up: with an
        earlier one go all that follow.
        """
        newest = sealed.last_own
        if newest is None or sealed.archive_at(newest) is not None:
            return False
        known = self._newest_files.get(sealed.timeline)
        path = known.path if known is not None and known.t == newest else self._root / sealed[newest].path
        try:
            now = _NewestFile(newest, path, self._env.identity(path))
            if known == now:
                return False
            if read_manifest(self._root, sealed.timeline, newest, self._env) != sealed[newest]:
                return True
        except FileNotFoundError:
            return True
        except (CorruptionError, StorageError, OSError):  # verify() says so; what is known is as good as it was
            return False
        self._newest_files[sealed.timeline] = now
        return False

    def _new_of(self, knowing: Known, sealed: ManifestLog, archives: set[str], epochs: set[Epoch]) -> list[Manifest]:
        """Returns the manifests of a timeline that were added since, as far as they follow each other."""
        learned: list[Manifest] = []
        known = {archive.name for archive in sealed.archives()}
        spans = [(span[0], name) for name in archives - known if (span := parse_name(name)) is not None]
        try:
            for first, name in sorted([*spans, *((t, "") for t in epochs if t not in sealed)]):
                last = sealed.last
                if last is not None and first > last + 1:
                    break  # what is between is still on its way
                if name:
                    archive = Archive.read(self._root, sealed.timeline, name, self._env)
                    sealed.add_archive(archive)
                    for run in archive.runs:
                        if last is None or run.last > last:
                            knowing.learn(sealed.timeline, run)
                elif first not in sealed:
                    manifest = read_manifest(self._root, sealed.timeline, first, self._env)
                    knowing.add(manifest)
                    learned.append(manifest)
        except CorruptionError as error:
            knowing.errors.append(error)
        return learned


def _is_another(sealed: ManifestLog, archives: set[str], epochs: set[Epoch]) -> bool:
    """Returns whether an epoch was added before those that are known, as another node's files come in any order; or one
    went.
    """
    last = sealed.last
    if last is None:
        return bool(archives)  # what is before them is read with them
    if not archives.issuperset(archive.name for archive in sealed.archives()):
        return True
    spans = [span for name in archives if (span := parse_name(name)) is not None]
    own = sealed.last_own
    if own is not None and own not in epochs and not any(first <= own <= end for first, end in spans):
        return True
    new = [span for span in spans if sealed.archive_at(span[0]) is None]
    return any(t < last and t not in sealed for t in epochs) or any(
        t < last and t not in sealed for first, end in new for t in range(first, end + 1)
    )
