"""One pass of copying a directory into a bucket, for stores that run without `remote=`. A second one puts what is new."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from pathlib import Path

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.platform.env import Env
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.fence import RemoteTakenError, claim_store
from nosync.replication.remote.garbage import Collector
from nosync.replication.remote.history import begin_log
from nosync.replication.remote.names import EMBEDDED, NodeNames
from nosync.replication.remote.node_listing import NodeListing
from nosync.replication.remote.pack import Reached
from nosync.replication.remote.presence import mend
from nosync.replication.remote.probe import probe
from nosync.replication.remote.reach import remotely_safe
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.source import DirectorySource
from nosync.replication.remote.uploader import Uploader
from nosync.replication.remote.url import check_outside

log = logging.getLogger("nosync.remote")

_MOST_PASSES = 8


@dataclass(frozen=True)
class CopyReport:
    """Says what a pass put, and up to where the bucket is whole since."""

    url: str
    epoch: int | None
    """The newest epoch of main that is remotely safe."""
    files: int
    """That are held."""
    sent_bytes: int
    packs: int
    gone: tuple[str, ...] = ()
    """Objects that had been there and were gone: what this directory has of them was put again."""


def _collect(bucket: Bucket, names: NodeNames, uploader: Uploader, collector: Collector, env: Env) -> None:
    """Deletes what nothing has needed for the grace, and says of the rest since when: the next pass counts on."""
    try:
        listing = NodeListing.of(bucket, names)
        collector.collect(uploader.writer, listing, uploader.going_objects, env.monotonic_s())
        collector.say(uploader.writer, env.monotonic_s())
    except RemoteTakenError:
        raise
    except RemoteError as error:  # what is to be kept is there all the same
        log.warning("what is not needed any more is not deleted: %s", error)


def _behind(timelines: Timelines, reached: Reached) -> str | None:
    """Returns what to say of a branch of which not all that is sealed is in the bucket; None where there is none."""
    for branch in (MAIN, *sorted({*timelines.refs.names} - {MAIN})):
        safe, last = remotely_safe(timelines, reached, branch), timelines.last_sealed(branch)
        if safe != last:
            return f"branch {branch} was copied up to epoch {safe}, and is sealed up to {last}"
    return None


def copy_directory(root: Path, bucket: Bucket, settings: RemoteSettings) -> CopyReport:
    """Puts what the store in `root` has and the bucket lacks. The store may be in use.

    Raises InvalidInputError for a bucket in the store, RemoteError, CorruptionError where a sealed epoch cannot be copied
    whole.
    """
    check_outside(bucket.url, root)
    env, source, names = Env(), DirectorySource(root), NodeNames(EMBEDDED)
    probe(bucket, env.token())
    claim_store(bucket, source.marker)
    writer = begin_log(bucket, names, source, env.token(), platform.node())
    uploader = Uploader(source, writer, settings)
    collector = Collector(bucket, names, settings.grace_s, env)
    listing = NodeListing.of(bucket, names)
    gone = mend(bucket, listing, uploader)
    uploader.move(collector.sparse(writer, listing, settings.flush_bytes))
    for _ in range(_MOST_PASSES):  # what a pass lists may be merged away before it is read
        uploader.push_all()
        epoch = remotely_safe(source.timelines, writer.acknowledged)
        behind = _behind(source.timelines, writer.acknowledged)
        if behind is None or uploader.damaged:
            break
        source = DirectorySource(root)
        uploader = Uploader(source, writer, settings)
    _collect(bucket, names, uploader, collector, env)
    if behind is not None:
        why = next(
            iter(uploader.damaged.values()),
            f"either it seals and merges faster than it can be copied (say it again, or keep more with retain=), or `nosync "
            f"verify {root}` says what is wrong",
        )
        raise CorruptionError(f"{root}: {behind}: {why}")
    return CopyReport(bucket.url, epoch, len(writer.contents.places), writer.sent_bytes, writer.packs, tuple(gone))
