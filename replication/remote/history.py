"""Whether a directory may go on with the copies that an earlier life of its store left in a bucket."""

from __future__ import annotations

from pathlib import PurePosixPath

from blake3 import blake3

from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.fence import RemoteTakenError, take_claim
from nosync.replication.remote.log import LogWriter, read_log
from nosync.replication.remote.names import NodeNames
from nosync.replication.remote.pack import Contents, Reached
from nosync.replication.remote.source import Source

_TWO = "these are two histories"


def check_goes_on(url: str, before: Contents, source: Source) -> None:
    """Raises RemoteTakenError where the bucket has safe epochs that this directory lacks, or has with other contents; or
    where this directory could write under a name that the bucket has for something else.

    What this very directory removed, by a rewind or with a branch, is not asked for. Another one, such as one that was
    restored as of an earlier epoch, has to have all.
    """
    timelines, is_same = source.timelines, before.incarnation == source.incarnation
    advice = f"Restore from it (nosync restore {url} DIR), or give this directory another prefix"
    if timelines.refs.entries < before.reached.entries:
        raise RemoteTakenError(
            f"{url} has {before.reached.entries} entries of the log of branches, and {source.directory.root} has "
            f"{timelines.refs.entries}: it is of an earlier time. {advice}"
        )
    root, env = source.directory.root, source.directory.env
    for n in range(1, before.reached.entries + 1):
        name = f"{BRANCHES}/{n}.json"
        held = before.inventory.get(name)
        if held is not None and blake3(env.read(root / name)).hexdigest() != held.digest:
            raise RemoteTakenError(
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
                raise RemoteTakenError(
                    f"{url} has epochs of timeline {log.timeline} up to {name.span.last}, and {root} has them up to "
                    f"{'none' if log.last is None else log.last}: it is of an earlier time, or another history. {advice}"
                )
            single = str(manifest.path) == text and held is not None
            if single and held is not None and blake3(manifest.to_json()).hexdigest() != held.digest:
                raise RemoteTakenError(
                    f"{url} and {root} have sealed epoch {t} of timeline {log.timeline} with other contents: {_TWO}. "
                    f"{advice}"
                )
    elif name.layer is not None and name.layer.description.upper > timelines.sealed_until(name.layer.trace):
        raise RemoteTakenError(
            f"{url} has {name.layer} of an epoch that {root} has not sealed: it is of an earlier time, or another history. "
            f"{advice}"
        )


def without_unseen(before: Contents) -> Contents:
    """Returns what is held without the manifests and the entries that are not seen: whoever goes on has others."""
    seen = [placed for placed in before.files() if _is_seen(placed.version.name, before.reached)]
    return Contents(before.at, seen, before.reached, before.incarnation)


def _is_seen(name: FileName, reached: Reached) -> bool:
    if name.span is not None:
        return name.span.first <= reached.epochs.get(PurePosixPath(name.span.timeline).name, -1)
    return name.entry is None or name.entry <= reached.entries


def begin_log(bucket: Bucket, names: NodeNames, source: Source, token: str, host: str) -> LogWriter:
    """Takes the log of a node, and goes on with it. Whoever may not does not disturb the one who writes it now.

    Raises RemoteTakenError, and other RemoteErrors.
    """
    marker = source.marker
    newest = read_log(bucket, names, marker.store_id)
    if newest is not None:
        check_goes_on(bucket.url, newest, source)
    claim = take_claim(bucket, names, marker, source.incarnation, token, host)
    before = read_log(bucket, names, marker.store_id, claim.number - 1)
    if before is not None:  # it may have gone on until the claim was put
        check_goes_on(bucket.url, before, source)
        if before.incarnation != source.incarnation:
            before = without_unseen(before)
    writer = LogWriter(bucket, names, marker, claim, before)
    writer.write_index()
    return writer
