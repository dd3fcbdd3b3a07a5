"""What a stage's state is made of at an epoch of a branch: of each shard the traces, and from where to where each
counts.
"""

from __future__ import annotations

from nosync.lsm.errors import NotAvailableError, UnknownStageError
from nosync.lsm.manifests.lost_ends import check_there
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import Span, View, views_of
from nosync.lsm.model.layer import TraceId, check_name
from nosync.lsm.model.timestamp import epoch_of, pack
from nosync.lsm.platform.nearest import did_you_mean, named_stages
from nosync.lsm.store.direct import raw_traces_after, raw_view
from nosync.lsm.trace.directory import LayerDirectory


def stage_views(directory: LayerDirectory, timelines: Timelines, stage: str, t: int, branch: str) -> list[View]:
    """Returns a view for each shard; of a log whose shards were other ones before, for each shard of then and now.

    Epochs that are not sealed yet can be asked for, too. Raises UnknownStageError for a stage that the branch does not
    have, NotAvailableError for an epoch after a fork that only other branches have, LostEpochError for one whose
    manifest is lost at the end of the branch.
    """
    check_name(stage, "stage name")
    check_there(timelines, branch, t)
    sealed, history = timelines.manifest(t, branch), timelines.histories(branch).get(stage, ())
    ids = sorted({e.id.trace for e in sealed.entries if e.id.trace.stage == stage} if sealed else set())
    ids = (
        ids
        or raw_traces_after(timelines, directory, stage, branch)
        or _unsealed(directory, timelines, stage, t, branch)
    )
    if ids[0].shard.count and len(history) > 1 and pack(t) >= history[0].lower:
        log = not directory.reader_of_any(ids[0]).info.key
        return views_of(history, stage, pack(t), directory.key_groups, log=log)
    return [
        View(id, min(timelines.origins(id), default=None)) if id.shard.count else raw_view(timelines, branch, id, t)
        for id in ids
    ]


def _unsealed(directory: LayerDirectory, timelines: Timelines, stage: str, t: int, branch: str) -> list[TraceId]:
    """Returns the traces of a stage that no manifest lists at an epoch: it begins later, or the epoch is not sealed
    yet.
    """
    directory.check_stage(stage)
    history, last = timelines.histories(branch).get(stage, ()), timelines.last_sealed(branch)
    if last is None:
        fingerprint = directory.fingerprint_of(stage)
        return [trace for trace in directory.traces(stage) if trace.fingerprint == fingerprint]
    if history and pack(t) < history[0].lower:
        return _of(timelines, branch, stage, history[0])
    if history and t > last:
        if timelines.timeline(branch).parent is not None:
            # Layers of such an epoch are another branch's: of what was rewound, or of inputs that are to be replayed.
            raise NotAvailableError(
                f"branch {branch} is sealed up to {last}: there is no state of stage {stage} as of {t}"
            )
        return _of(timelines, branch, stage, history[-1])
    raise _not_there(timelines, stage, t, branch)


def check_listed(timelines: Timelines, stage: str, t: int, branch: str) -> None:
    """Raises UnknownStageError where a sealed epoch has not a stage that was there before: an upgrade had taken it out."""
    sealed, history = timelines.manifest(t, branch), timelines.histories(branch).get(stage, ())
    begun = bool(history) and pack(t) >= history[0].lower
    if begun and sealed is not None and all(entry.id.trace.stage != stage for entry in sealed.entries):
        raise _not_there(timelines, stage, t, branch)


def _not_there(timelines: Timelines, stage: str, t: int, branch: str) -> UnknownStageError:
    known = sorted(timelines.histories(branch))
    return UnknownStageError(
        f"branch {branch} has no stage {stage} at {t}, which others have; its stages: {named_stages(known)}"
        f"{did_you_mean(stage, known)}"
    )


def _of(timelines: Timelines, branch: str, stage: str, span: Span) -> list[TraceId]:
    first = timelines.manifests(branch).first
    listed = timelines.manifest(
        max(epoch_of(span.lower), first or 0), branch
    )  # appended to perhaps before anything was sealed
    assert listed is not None, "a span begins with an epoch that lists it"
    return sorted({entry.id.trace for entry in listed.entries if entry.id.trace.stage == stage})
