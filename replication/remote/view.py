"""What a bucket has of a store: what all of its nodes hold, cut where it is whole.

Invariants
- Of a timeline only the epochs up to the newest remotely safe one are seen, and of the log of branches only the entries
  under which that was found. So whoever reads sees no epoch without its layers.
- Nodes may have put other files under one name: one that was lost had begun an epoch that others then did anew. The one
  is seen whose node found that epoch whole, until the manifests say which of them is the store's (`ListedLayers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nosync.lsm.errors import RemoteError
from nosync.lsm.manifests.archive import Archive, Details
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.platform.layout import MANIFESTS
from nosync.lsm.platform.store_marker import Marker
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.checkpoint_copies import of_one_node
from nosync.replication.remote.fence import read_store
from nosync.replication.remote.log import follow_log, nodes_of, read_log
from nosync.replication.remote.names import LogPosition, NodeNames
from nosync.replication.remote.others import furthest, has_reached
from nosync.replication.remote.pack import Contents, Placed, Reached

_PASSES = 10
"""A node puts something every some seconds, and following the logs takes less."""


@dataclass(frozen=True)
class RemoteView:
    """A store as it is in a bucket at one time."""

    marker: Marker
    nodes: dict[str, Contents]
    files: dict[FileName, Placed] = field(repr=False)
    """All that is held, what is not seen included."""
    reached: Reached
    at: dict[str, LogPosition]
    """Up to where the log of each node is applied. Reading on may apply more of it, and then fail."""
    problems: tuple[str, ...] = ()
    """Objects that are damaged, so that what was put after them is not seen."""
    others: dict[FileName, list[Placed]] = field(default_factory=dict, repr=False)
    """Files of other contents under names that `files` has."""

    def is_seen(self, name: FileName) -> bool:
        """Returns whether a file is part of what is whole. Of layers that follows from the manifests (`sealed_until`)."""
        if name.span is not None:
            return name.span.last <= self.cut(name)
        return name.entry is None or name.entry <= self.reached.entries

    def is_cut(self, name: FileName) -> bool:
        """Returns whether a file is an archive of which only the first epochs are seen."""
        return name.span is not None and name.span.first <= self.cut(name) < name.span.last

    def cut(self, name: FileName) -> int:
        """Returns the last epoch that is seen of the timeline of a manifest or an archive; -1: none is."""
        assert name.span is not None, "it is a manifest or an archive"
        return self.reached.epochs.get(PurePosixPath(name.span.timeline).relative_to(MANIFESTS).name, -1)


def read_view(bucket: Bucket, lose: Callable[[Mapping[str, Contents]], None] | None = None) -> RemoteView:
    """Reads what a bucket has. `lose`: leaves out, of what nodes hold, what is gone. Raises RemoteError where there is no
    store, CorruptionError, FormatVersionError.
    """
    marker = read_store(bucket)
    found = {node: read_log(bucket, NodeNames(node), marker.store_id) for node in nodes_of(bucket)}
    nodes = {node: contents for node, contents in found.items() if contents is not None}
    if not nodes:
        raise RemoteError(f"{bucket.url}: store {marker.store_id} was claimed there, and nothing was copied yet")
    nodes = nodes if len(nodes) == 1 else _of_one_moment(bucket, marker, nodes)
    if lose is not None:
        lose(nodes)
    return _view_of(marker, nodes)


def _of_one_moment(bucket: Bucket, marker: Marker, nodes: dict[str, Contents]) -> dict[str, Contents]:
    """Returns what all nodes held at one time. A node may say that epochs are whole of which another one put a part after
    its log was read.
    """
    for _ in range(_PASSES):
        before = _positions(nodes)
        for node in nodes_of(bucket):
            known = nodes.get(node)
            if known is None or not follow_log(bucket, NodeNames(node), marker.store_id, known):
                found = read_log(bucket, NodeNames(node), marker.store_id)
                nodes = nodes if found is None else {**nodes, node: found}
        if _positions(nodes) == before:
            break
    return nodes


def read_view_again(bucket: Bucket, view: RemoteView) -> RemoteView:
    """Returns what a bucket has now, given what it had: what came since is read, and the same is returned where nothing
    did.
    """
    store_id, nodes = view.marker.store_id, view.nodes
    if set(nodes_of(bucket)) - nodes.keys():
        return read_view(bucket)
    if not all(follow_log(bucket, NodeNames(node), store_id, contents) for node, contents in nodes.items()):
        return read_view(bucket)
    if view.at == _positions(nodes):
        return view
    return _view_of(view.marker, nodes if len(nodes) == 1 else _of_one_moment(bucket, view.marker, nodes))


def _view_of(marker: Marker, nodes: dict[str, Contents]) -> RemoteView:
    files: dict[FileName, Placed] = {}
    others: dict[FileName, list[Placed]] = {}
    for contents in nodes.values():
        for placed in contents.files():
            name = placed.version.name
            before = files.setdefault(name, placed)
            if before.version.digest != placed.version.digest:
                others.setdefault(name, []).append(placed)
    for name, found in others.items():
        known = [files[name], *found]
        whole = (contents.placed(name) for contents in nodes.values() if has_reached(name, contents.reached))
        files[name] = next((placed for placed in whole if placed is not None), files[name])
        others[name] = [placed for placed in known if placed.version.digest != files[name].version.digest]
    of_one_node(nodes, files, others)
    reached = furthest(contents.reached for contents in nodes.values())
    damage = (contents.damage for contents in nodes.values() if contents.damage)
    problems = tuple(f"{one}; what was put after it is not seen" for one in damage)
    return RemoteView(marker, nodes, files, reached, _positions(nodes), problems, others)


def _positions(nodes: dict[str, Contents]) -> dict[str, LogPosition]:
    return {node: contents.at for node, contents in nodes.items()}


def seen_manifests(view: RemoteView, placed: Placed, text: bytes) -> Iterator[Manifest]:
    """Yields the manifests of an archive that are seen. `text`: the archive. Raises CorruptionError."""
    name, where = placed.version.name, str(placed.version.name)
    assert name.span is not None, "it is an archive"
    path = PurePosixPath(name)
    details = Details.parse(Archive.parse(text, path.parent.name, path.name, where), text, where)
    for t in range(name.span.first, view.cut(name) + 1):
        yield details.manifest(t)
