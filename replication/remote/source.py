"""What a store has on this host, for whoever copies it into a bucket: the store of a node, or a directory that is only read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from nosync.lsm.errors import NosyncError, StorageError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.catalog import recorded_layers
from nosync.lsm.manifests.lost_ends import log_problem, lost_manifests
from nosync.lsm.manifests.remembered import catalog_metas, recalled
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId, Record
from nosync.lsm.node.durable_layers import INCARNATION_META
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.node import Node
from nosync.lsm.node.safe_point import safe_point_on_disk
from nosync.lsm.platform.layout import CHECKPOINTS
from nosync.lsm.platform.opaque import checkpoint_of, files_below
from nosync.lsm.platform.store_marker import Marker, read_marker
from nosync.lsm.trace.directory import LayerDirectory

_MOST_NOTED = 10_000


class New(NamedTuple):
    """What became durable since somebody asked."""

    layers: Sequence[Record]
    small_files: Sequence[PurePosixPath]


class Source(Protocol):
    """A store, as far as it is copied."""

    directory: LayerDirectory
    marker: Marker
    incarnation: str

    @property
    def timelines(self) -> Timelines:
        """Returns its timelines as they are known now."""

    def layers(self) -> list[Record]:
        """Returns every durable layer."""

    def new(self) -> New | None:
        """Returns what became durable since the last call, though a merge may have replaced it. None: that is not all
        known, so `layers` and `small_files` have to be asked.
        """

    def small_files(self) -> list[PurePosixPath]:
        """Returns the manifests, the log of branches and the registers that are durable."""

    def safe_point(self) -> int | None:
        """Returns the safe point of the main timeline here, up to which inputs may be gone."""

    def is_whole(self) -> bool:
        """Returns whether nothing is known to be wrong here: what is not here is then not needed."""

    def is_for_another(self, record: Record) -> bool:
        """Returns whether another node that is up holds a layer, and comes first in keeping it: that one copies it."""

    def discarded(self) -> Mapping[str, str]:
        """Returns, by name, the digests of what an operator discarded here for another node's contents."""


def opaque_files(source: Source) -> list[PurePosixPath]:
    """Returns the files of kept checkpoints."""
    directory = source.directory
    if not directory.env.exists(directory.root / CHECKPOINTS):
        return []
    found = files_below(directory.root, PurePosixPath(CHECKPOINTS), directory.env)
    return [path for path in found if checkpoint_of(str(path)) is not None]


class NodeSource:
    """The store of a node in this process. It notes what becomes durable, and keeps nothing waiting."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.directory, self.incarnation = node.directory, node.incarnation
        self.marker = read_marker(node.directory.root, node.directory.env)
        self._layers: list[Record] = []
        self._files: list[PurePosixPath] = []
        self._missed = True
        self._lock = threading.Lock()
        node.announcer.observe(self._note)

    def _note(self, layers: Sequence[Record], files: Sequence[PurePosixPath]) -> None:
        with self._lock:
            self._layers.extend(layers)
            self._files.extend(files)
            if len(self._layers) + len(self._files) > _MOST_NOTED:
                self._layers, self._files, self._missed = [], [], True

    @property
    def timelines(self) -> Timelines:
        """See Source."""
        return self._node.timelines

    def layers(self) -> list[Record]:
        """See Source."""
        return self._node.durable_records()

    def new(self) -> New | None:
        """See Source."""
        with self._lock:
            found, missed = New(self._layers, self._files), self._missed
            self._layers, self._files, self._missed = [], [], False
        return None if missed else found

    def small_files(self) -> list[PurePosixPath]:
        """See Source."""
        return self._node.small.durable()

    def safe_point(self) -> int | None:
        """See Source."""
        return self._node.safe_point()

    def is_whole(self) -> bool:
        """See Source."""
        return not self._node.problems

    def is_for_another(self, record: Record) -> bool:
        """See Source."""
        return self._node.announcer.peers.has_earlier_replica(record)

    def discarded(self) -> Mapping[str, str]:
        """See Source."""
        return self._node.discarded.digests

    def close(self) -> None:
        """Notes nothing any more."""
        self._node.announcer.leave(self._note)


class DirectorySource:
    """A store that is only read, as `nosync backup` does. What is there when it is first asked for is copied: a store that is
    in use goes on, and what comes later is for another source.
    """

    def __init__(self, root: Path) -> None:
        self.marker = read_marker(root, LayerDirectory(root, 1).env)
        self.directory = LayerDirectory(root, self.marker.key_groups)
        metas = catalog_metas(root)
        self.incarnation = metas.get(INCARNATION_META, "")
        if not self.incarnation:
            raise StorageError(
                f"{root} has no catalog, so it is not known which life of the store it is: open it once with nosync.open, "
                f"or say nosync compact {root}"
            )
        self.timelines = Timelines(root, self.directory.env, lambda: recalled(root))
        self._records = {record.id: record for record in recorded_layers(root)}

    def layers(self) -> list[Record]:
        """See Source. What is not sealed is another attempt's, and left out."""
        return self._found

    @cached_property
    def _found(self) -> list[Record]:
        return [record for id in self._sealed() if (record := self._records.get(id) or self._look(id)) is not None]

    def _sealed(self) -> Iterator[LayerId]:
        for trace in self.directory.traces():
            until = self.timelines.sealed_until(trace)
            yield from (LayerId(trace, d) for d in self.directory.descriptions(trace) if d.lower < until)

    def _look(self, id: LayerId) -> Record | None:
        try:
            reader = LayerReader.open(self.directory.path_of(id), self.directory.env, id)
        except (FileNotFoundError, NosyncError):  # merged away; or damaged, which `nosync verify` names
            return None
        return Record(id, reader.digest, reader.info.rows, reader.size_bytes)

    def new(self) -> New | None:
        """See Source."""
        return None

    def small_files(self) -> list[PurePosixPath]:
        """See Source."""
        return self._small

    @cached_property
    def _small(self) -> list[PurePosixPath]:
        return MetadataSync(self.directory.root, self.directory.env, {}).listed()

    def safe_point(self) -> int | None:
        """See Source."""
        return safe_point_on_disk(self.timelines, self.directory.root)

    def is_whole(self) -> bool:
        """See Source."""
        timelines, root = self.timelines, self.directory.root
        if timelines.errors or log_problem(timelines, root, self.directory.env) is not None:
            return False
        return not any(_problems(timelines))

    def is_for_another(self, record: Record) -> bool:
        """See Source."""
        return False

    def discarded(self) -> Mapping[str, str]:
        """See Source."""
        return {}


def _problems(timelines: Timelines) -> Iterable[object]:
    return (text for name in timelines.refs.names for text in lost_manifests(timelines, name, None))
