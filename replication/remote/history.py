"""Whether a directory may go on with the copies that an earlier life of its store left in a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.fence import RemoteTakenError, newest_claim, take_claim
from nosync.replication.remote.log import LogWriter, nodes_of, read_log
from nosync.replication.remote.names import NodeNames
from nosync.replication.remote.others import furthest, has_reached
from nosync.replication.remote.pack import Contents, Reached
from nosync.replication.remote.source import Source

_TWO = "these are two histories"


class OtherHistoryError(RemoteTakenError):
    """A directory is not what the bucket has, or not yet: one that is filled by its peers comes to be that."""


def check_goes_on(url: str, before: Contents, source: Source) -> None:
    """Raises RemoteTakenError where the bucket has safe epochs that this directory lacks, or has with other contents; or
    where this directory could write under a name that the bucket has for something else.

    What this very directory removed, by a rewind or with a branch, is not asked for. Another one, such as one that was
    restored as of an earlier epoch, has to have all.
    """
    timelines, is_same = source.timelines, before.incarnation == source.incarnation
    advice = _advice(url)
    if timelines.refs.entries < before.reached.entries:
        raise OtherHistoryError(
            f"{url} has {before.reached.entries} entries of the log of branches, and {source.directory.root} has "
            f"{timelines.refs.entries}: it is of an earlier time. {advice}"
        )
    root, env = source.directory.root, source.directory.env
    for n in range(1, before.reached.entries + 1):
        name = f"{BRANCHES}/{n}.json"
        held = before.inventory.get(name)
        if held is not None and blake3(env.read(root / name)).hexdigest() != held.digest:
            raise OtherHistoryError(
                f"{url} and {root} have other entries {n} in their logs of branches: {_TWO}. {advice}"
            )
    kept = timelines.refs.kept_until()
    for timeline, reached in before.reached.epochs.items():
        end = kept.get(timeline) if is_same else None
        if not is_same or timeline in kept:
            last = reached if end is None else min(reached, end)
            _check_has(url, before, source, f"{MANIFESTS}/{timeline}/{last}.json", advice)
    if not is_same and not _is_apart(timelines, before.reached):
        for name in before.places:
            _check_has(url, before, source, name, advice)


def _is_apart(timelines: Timelines, reached: Reached) -> bool:
    """Returns whether a directory goes on where no other one can: on timelines that the bucket does not know."""
    kept = timelines.refs.kept_until()
    return bool(reached.epochs) and all(
        (end := kept.get(timeline, -1)) is not None and end <= t for timeline, t in reached.epochs.items()
    )


def _check_has(url: str, before: Contents, source: Source, text: str, advice: str) -> None:
    """Raises RemoteTakenError unless this directory has what the bucket has under a name."""
    name, held = FileName(text), before.inventory.get(text)
    timelines, root = source.timelines, source.directory.root
    if name.span is not None:
        log = timelines.of_timeline(PurePosixPath(name.span.timeline).name)
        for t in range(name.span.first, name.span.last + 1):
            manifest = log.get(Epoch(t))
            if (
                manifest is None
                and log.first is not None
                and t < log.first
                and before.incarnation == source.incarnation
            ):
                continue
            if manifest is None:
                raise OtherHistoryError(
                    f"{url} has epochs of timeline {log.timeline} up to {name.span.last}, and {root} has them up to "
                    f"{'none' if log.last is None else log.last}: it is of an earlier time, or another history. {advice}"
                )
            single = str(manifest.path) == text and held is not None
            if single and held is not None and blake3(manifest.to_json()).hexdigest() != held.digest:
                raise OtherHistoryError(
                    f"{url} and {root} have sealed epoch {t} of timeline {log.timeline} with other contents: {_TWO}. "
                    f"{advice}"
                )
    elif name.layer is not None and name.layer.description.upper > timelines.sealed_until(name.layer.trace):
        raise OtherHistoryError(
            f"{url} has {name.layer} of an epoch that {root} has not sealed: it is of an earlier time, or another history. "
            f"{advice}"
        )


def check_no_other(url: str, name: FileName, digest: str, others: Mapping[str, Contents], root: Path) -> None:
    """Raises RemoteTakenError where another node has an epoch, or an entry of the log of branches, whole that this
    directory has with other contents. Of layers nothing is said: what nodes merged for themselves may differ.
    """
    if name.layer is not None:
        return
    for node, contents in others.items():
        held = contents.inventory.get(name)
        if held is not None and held.digest != digest and has_reached(name, contents.reached):
            raise OtherHistoryError(
                f"node {node} of {url} and {root} have other contents in {name}: {_TWO}. {_advice(url)}"
            )


def check_beside(url: str, others: Iterable[Contents], source: Source) -> None:
    """Raises RemoteTakenError where this directory left epochs that other nodes have whole, and none of them says so: it
    was restored as of an earlier epoch, and is another history.
    """
    reached, timelines = furthest(one.reached for one in others), source.timelines
    if timelines.refs.entries <= reached.entries:
        return
    kept = timelines.refs.kept_until()
    for timeline, t in reached.epochs.items():
        end = kept.get(timeline)
        if end is not None and end < t:
            raise OtherHistoryError(
                f"{url} has epochs of timeline {timeline} up to {t}, which {source.directory.root} left at {end}: {_TWO}. "
                f"{_advice(url)}"
            )


def _advice(url: str) -> str:
    return f"Restore from it (nosync restore {url} DIR), or give this directory another prefix"


def without_unseen(before: Contents) -> Contents:
    """Returns what is held without the manifests and the entries that are not seen: whoever goes on has others."""
    seen = [placed for placed in before.files() if _is_seen(placed.version.name, before.reached)]
    return Contents(before.at, seen, before.reached, before.incarnation)


def _is_seen(name: FileName, reached: Reached) -> bool:
    return (name.span is None and name.entry is None) or has_reached(name, reached)


def begin_log(bucket: Bucket, names: NodeNames, source: Source, token: str, host: str) -> LogWriter:
    """Takes the log of a node, and goes on with it. Whoever may not does not disturb the one who writes it now.

    Raises RemoteTakenError, and other RemoteErrors.
    """
    marker = source.marker
    try:
        newest = read_log(bucket, names, marker.store_id)
    except CorruptionError:  # no index is whole: who wrote it has all of it still, and puts it again
        last = newest_claim(bucket, names)
        if last is None or last.incarnation != source.incarnation:
            raise
        claim = take_claim(bucket, names, marker, source.incarnation, token, host)
        return _begun(LogWriter(bucket, names, marker, claim, None))
    if newest is not None:
        check_goes_on(bucket.url, newest, source)
    if newest is None or newest.incarnation != source.incarnation:
        check_beside(bucket.url, _of_others(bucket, names, marker.store_id), source)
    claim = take_claim(bucket, names, marker, source.incarnation, token, host)
    before = read_log(bucket, names, marker.store_id, claim.number - 1)
    if before is not None:  # it may have gone on until the claim was put
        check_goes_on(bucket.url, before, source)
        if before.incarnation != source.incarnation:
            before = without_unseen(before)
    return _begun(LogWriter(bucket, names, marker, claim, before))


def _begun(writer: LogWriter) -> LogWriter:
    writer.write_index()
    return writer


def _of_others(bucket: Bucket, names: NodeNames, store_id: str) -> Iterable[Contents]:
    found = (read_log(bucket, NodeNames(node), store_id) for node in nodes_of(bucket) if node != names.node)
    return (contents for contents in found if contents is not None)
