"""Contents that an operator discards, because another node's count: what goes with them, and that they do not come
back.

A third node may hold them as well, until it gives them up in its turn. So they are remembered, by name and digest, and
that is durable before the files go: from a peer nothing is taken that has these contents, or is built upon them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.manifests.archive import epochs_of
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, is_number, pack
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.compactor import Compactor
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.input_release import InputRelease
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import read_if_there, read_small, replace_small
from nosync.lsm.platform.layout import BRANCHES, DISCARDED, LAYERS, MANIFESTS
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")


class DiscardedVersions:
    """Holds, by file relative to the data directory, the digest of what was discarded in this directory."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self.digests: Mapping[str, str] = {}
        if (root / DISCARDED).exists():
            try:
                fields = read_small(root / DISCARDED, env)
                with parsed("what was discarded", str(root / DISCARDED)):
                    self.digests = {str(name): str(digest) for name, digest in fields["digests"].items()}
            except CorruptionError as error:
                log.error("%s: what was discarded before may be taken from a peer that still holds it", error)

    def remember(self, digests: Mapping[str, str]) -> None:
        """These do not count any more. Durable when this returns. Where they took the place of what was discarded
        before, that counts again.
        """
        is_reversed = any(self.digests.get(name, digest) != digest for name, digest in digests.items())
        kept = {**({} if is_reversed else self.digests), **digests}
        replace_small(self._root, self._root / DISCARDED, {"digests": kept}, self._env)
        self.digests = kept


class Discards:
    """Sets aside what does not count in one directory, with all that was built upon it."""

    def __init__(
        self,
        directory: LayerDirectory,
        timelines: Timelines,
        layers: DurableLayers,
        files: DurableFiles,
        small: MetadataSync,
        quarantine: Quarantine,
        compactor: Compactor,
        safe_points: SafePoint,
        inputs: InputRelease,
        announcer: Announcer,
    ) -> None:
        self._directory, self._env, self._timelines, self._layers = directory, directory.env, timelines, layers
        self._files, self._small, self._quarantine, self._compactor = files, small, quarantine, compactor
        self._safe_points, self._inputs, self._announcer = safe_points, inputs, announcer
        self.versions = DiscardedVersions(directory.root, directory.env)

    def set_aside(
        self, ids: Iterable[LayerId], small: Iterable[PurePosixPath], *, is_decided: bool = False
    ) -> list[PurePosixPath]:
        """Sends these to quarantine with all that was built upon them, and returns what went. Peers have what counts.

        `is_decided`: an operator gave them up, so that they do not come back, and what was safe of them is not for
        that.
        """
        # Or a merge of ours that ends later would cover theirs.
        with self._compactor.paused(), self._files.going:
            layers, files = dependents_of(small := list(small), self._directory, self._timelines)
            layers, files = {*ids, *layers}, {*small, *files}
            if is_decided:
                self._count_no_more(layers, files)
            # Manifests first: what an interruption leaves is layers that nothing lists, and no epochs without theirs.
            for path in sorted(files):
                error = NosyncError(f"{path}: another node's contents count")
                self._quarantine.put_file(self._directory.root / path, ".".join(path.parts[:-1]), error)
            for id in sorted(layers):
                self._quarantine.put_layer_file(id, NosyncError(f"{id}: another node's contents count"))
                self._env.forget_stub(self._directory.path_of(id))
                self._quarantine.lose(id, "another node's contents count")
            gone = self._small.forget_gone()
            self._timelines.reload()
            self._safe_points.something_changed()
            self._announcer.peers.lost_files(gone, sorted(layers))
        return sorted([*files, *(PurePosixPath(LAYERS, id.path) for id in layers)])

    def _count_no_more(self, layers: Iterable[LayerId], files: Iterable[PurePosixPath]) -> None:
        """Remembers what is discarded, and takes back what was said of its safety."""
        digests: dict[str, str] = {}
        for path in files:
            with suppress(FileNotFoundError):
                digests[str(path)] = blake3(read_if_there(self._directory.root / path, self._env)).hexdigest()
        for id in layers:
            record = self._layers.of(id.trace).get(id.description)
            if record is not None:
                digests[str(PurePosixPath(LAYERS, id.path))] = record.digest
        self.versions.remember(digests)
        first = first_discarded(files)
        entries = [int(path.stem) for path in files if path.parts[0] == BRANCHES and is_number(path.stem)]
        self._files.discard(first, min(entries, default=None))
        for timeline, t in first.items():
            self._safe_points.take_back(timeline, Epoch(t - 1))
        main = self._timelines.timeline(MAIN).id
        if main in first:
            self._inputs.take_back(Epoch(first[main] - 1))
        before = pack(min(first.values())) if first else END_OF_TIME
        self._announcer.peers.versions_discarded(self.versions.digests, before)


def first_discarded(paths: Iterable[PurePosixPath]) -> dict[str, Epoch]:
    """Returns, by timeline, the first epoch whose manifest is among these files."""
    first: dict[str, Epoch] = {}
    for path in paths:
        if path.parts[0] == MANIFESTS and (span := epochs_of(path.name)) is not None:
            first[path.parts[1]] = Epoch(min(span[0], first.get(path.parts[1], span[0])))
    return first


def dependents_of(
    discarded: Iterable[PurePosixPath], directory: LayerDirectory, timelines: Timelines
) -> tuple[set[LayerId], set[PurePosixPath]]:
    """Returns the layers and files that are built upon these files.

    On a manifest all is built that its timeline has from there on, layers that were merged with earlier ones included;
    on an entry of the log of branches those after it.
    """
    discarded = list(discarded)
    first = first_discarded(discarded)
    files: set[PurePosixPath] = set()
    for path in discarded:
        if path.parts[0] == BRANCHES:
            entries = [name for name in directory.env.list_dir(directory.root / BRANCHES) if is_number(name[:-5])]
            files |= {path.with_name(name) for name in entries if int(name[:-5]) > int(path.stem)}
    layers: set[LayerId] = set()
    for timeline, t in first.items():
        names = directory.env.list_dir(directory.root / MANIFESTS / timeline)
        files |= {
            PurePosixPath(MANIFESTS, timeline, name) for name in names if (span := epochs_of(name)) and span[1] >= t
        }
        for trace in {trace for piece in timelines.of_timeline(timeline).pieces(t - 1) for trace, _ in piece.traces()}:
            layers |= {LayerId(trace, d) for d in directory.descriptions(trace) if d.upper > pack(t)}
    return layers, files
