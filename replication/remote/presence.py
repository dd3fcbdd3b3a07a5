"""Objects of a node that its log names and that are not in the bucket any more: a lifecycle rule, or a hand, deleted them.

Invariants
- A listing may lag, so an object counts as gone only after it was asked for by its name, and is not there, or ends before
  its last file does.
- What is gone is held no more: it is put again where the node has it, and until then nothing that needs it is safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nosync.lsm.errors import CorruptionError
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.names import NodeNames, part_name
from nosync.replication.remote.node_listing import NodeListing
from nosync.replication.remote.pack import Contents, Placed, Reached
from nosync.replication.remote.uploader import Uploader

_MOST_TOLD = 5


def find_gone(bucket: Bucket, contents: Contents, sizes: Mapping[str, int]) -> dict[str, list[FileName]]:
    """Returns by object that is gone, or shorter than it was, the files in it that a node holds. `sizes`: of the objects that are
    listed. Raises RemoteError.
    """
    ends: dict[str, int] = {}
    files: dict[str, list[FileName]] = {}
    for placed in contents.files():
        for name, end in _extents(placed):
            if sizes.get(name, -1) < end:
                ends[name] = max(end, ends.get(name, 0))
                files.setdefault(name, []).append(placed.version.name)
    return {name: files[name] for name, end in ends.items() if _is_gone(bucket, name, end)}


def mend(bucket: Bucket, listing: NodeListing, uploader: Uploader) -> list[str]:
    """Has everything put again that is gone of what this node's log names, and others' do. Nothing may be pending. `listing`: of
    this node. Returns what to tell of it. Raises RemoteError.
    """
    writer = uploader.writer
    writer.check()  # a prefix that somebody emptied, or a directory that is not mounted, is another matter
    gone = find_gone(bucket, writer.contents, listing.sizes)
    other = {name: size for name, size in writer.log_sizes.items() if listing.sizes.get(name) != size}
    is_log_whole = not any(_is_gone(bucket, name, size) for name, size in other.items())
    uploader.lose(_files_of(gone), is_log_whole=is_log_whole)
    for node, contents in uploader.of_others.items():  # of which one may never come back
        of_other = find_gone(bucket, contents, NodeListing.of(bucket, NodeNames(node)).sizes)
        if of_other:
            contents.lose(_files_of(of_other))
            contents.reached = Reached()
            uploader.look_at_all()
            gone |= of_other
    return described_gone(bucket.url, gone)


def lose_gone(bucket: Bucket, nodes: Mapping[str, Contents]) -> None:
    """Leaves out, for a reader, what is gone of one node and held by another. What nobody else holds stays, and is missed."""
    for node, contents in nodes.items():
        others = [one.inventory for one in nodes.values() if one is not contents]
        gone = _files_of(find_gone(bucket, contents, NodeListing.of(bucket, NodeNames(node)).sizes))
        contents.lose([name for name in gone if any(name in other for other in others)])


def _files_of(gone: Mapping[str, Sequence[FileName]]) -> list[FileName]:
    return [name for files in gone.values() for name in files]


def described_gone(url: str, gone: Mapping[str, Sequence[FileName]]) -> list[str]:
    """Returns what a person is told: of each object, but for where there are many."""
    told = [f"{url}/{name} is gone, or cut: {_counted(files)}" for name, files in sorted(gone.items())]
    if len(told) > _MOST_TOLD:
        told[_MOST_TOLD - 1 :] = [f"{url}: {len(told) - _MOST_TOLD + 1:,} more objects are gone"]
    return [f"{problem}. Is there a lifecycle rule? There must be none on this prefix" for problem in told]


def _counted(files: Sequence[FileName]) -> str:
    return f"{files[0]} was in it" if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more files were in it"


def _extents(placed: Placed) -> Iterable[tuple[str, int]]:
    """Yields the objects that a file lies in, and up to where it needs each of them."""
    place, size_bytes = placed.place, placed.version.size_bytes
    if not place.part_bytes:
        yield place.object, max(1, place.offset + size_bytes)
        return
    for part in range(-(-size_bytes // place.part_bytes)):
        yield part_name(place.object, part), min(place.part_bytes, size_bytes - part * place.part_bytes)


def _is_gone(bucket: Bucket, name: str, end: int) -> bool:
    try:
        bucket.get_range(name, end - 1, end)
    except (MissingObjectError, CorruptionError):
        return True
    return False
