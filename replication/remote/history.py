"""Whether a directory may go on with the copies that an earlier life of its store left in a bucket."""

from __future__ import annotations

from blake3 import blake3

from nosync.lsm.platform.layout import MANIFESTS
from nosync.replication.remote.fence import Claim, RemoteTakenError
from nosync.replication.remote.pack import Contents
from nosync.replication.remote.source import Source


def check_not_behind(url: str, before: Contents, source: Source, claim: Claim) -> None:
    """Raises RemoteTakenError where the bucket has safe epochs that this directory lacks, or has with other contents.

    What this very directory removed, by a rewind or with a branch, is not asked for. Another one, such as one that was
    restored as of an earlier epoch, has to have all.
    """
    timelines, directory = source.timelines, source.directory
    kept, is_same = timelines.refs.kept_until(), claim.before == claim.incarnation
    advice = f"Restore from it (nosync restore {url} DIR), or give this directory another prefix"
    if timelines.refs.entries < before.reached.entries:
        raise RemoteTakenError(
            f"{url} has {before.reached.entries} entries of the log of branches, and {directory.root} has "
            f"{timelines.refs.entries}: it is of an earlier time. {advice}"
        )
    for timeline, reached in before.reached.epochs.items():
        if is_same and timeline not in kept:
            continue
        end = kept.get(timeline) if is_same else None
        last = reached if end is None else min(reached, end)
        log = timelines.of_timeline(timeline)
        if log.first is not None and last < log.first and is_same:
            continue
        if last not in log:
            raise RemoteTakenError(
                f"{url} has epochs of timeline {timeline} up to {last}, and {directory.root} has them up to "
                f"{'none' if log.last is None else log.last}: it is of an earlier time, or another history. {advice}"
            )
        held = before.inventory.get(f"{MANIFESTS}/{timeline}/{last}.json")
        path = directory.root / MANIFESTS / timeline / f"{last}.json"
        if (
            held is not None
            and directory.env.exists(path)
            and blake3(directory.env.read(path)).hexdigest() != held.digest
        ):
            raise RemoteTakenError(
                f"{url} and {directory.root} have sealed epoch {last} of timeline {timeline} with other contents: these are two "
                f"histories. {advice}"
            )
