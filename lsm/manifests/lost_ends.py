"""The ends of what is kept in order: epochs of a timeline, and the log of branches. Which of them are lost, and what is
said of it.

A manifest that is lost in the middle shows, for later ones are there (`ManifestLog.gap`). At the ends only something
else shows it: what the catalog remembers, where a timeline was left, and, in a directory without peers, merged layers
and pins, for only sealed epochs are merged and pinned. With peers those may be here before the manifests are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nosync.lsm.errors import CorruptionError, LostEpochError
from nosync.lsm.manifests.branches import MAIN, missing_entry
from nosync.lsm.manifests.remembered import END, Kept, entries_lost, timelines_without_entry
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Epoch, Time, end_of, epoch_of
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS, PLACE_FILE

LOST_MANIFEST, LOST_END = "a lost manifest of ", "lost epochs at the end of "
"""Of the problems of a node those begin with these, before a branch, that are of manifests."""


def lost_end(timelines: Timelines, branch: str = MAIN) -> range:
    """Returns the epochs at the end of a branch that were sealed, and whose manifests are not there; empty where none
    are.
    """
    timeline, last = timelines.timeline(branch), timelines.last_sealed(branch)
    kept = timelines.remembered.of_timeline(timeline.id)
    ends = [end for end in (None if kept is None else kept.last, timeline.at) if end is not None]
    begin = last + 1 if last is not None else lost_begin(timelines, branch)
    if begin is None:
        begin = max(ends, default=0)
    return range(begin, max(ends, default=begin - 1) + 1)


def lost_begin(timelines: Timelines, branch: str = MAIN) -> Epoch | None:
    """Returns the first epoch of a branch, where it is lost; None where it is there, or there was none."""
    first = timelines.manifests(branch).first
    if timelines.remembered.earliest >= (END if first is None else first):
        return None
    left = timelines.refs.left(timelines.timeline(branch).id)
    kept = {timeline: timelines.remembered.of_timeline(timeline) for timeline in left}
    firsts = [k.first for timeline, k in kept.items() if k and ((end := left[timeline]) is None or k.first <= end)]
    begin = min(firsts, default=None)
    return begin if begin is not None and (first is None or begin < first) else None


def first_lost(timelines: Timelines, branch: str, safe: int | None) -> Epoch | None:
    """Returns the first epoch of a branch whose manifest is lost: at the beginning, in the middle beyond `safe` (None:
    anywhere), or at the end.
    """
    begin, gap, end = lost_begin(timelines, branch), timelines.manifests(branch).gap(safe), lost_end(timelines, branch)
    return min((Epoch(t) for t in (begin, gap, *end[:1]) if t is not None), default=None)


def lost_manifests(timelines: Timelines, branch: str, safe: int | None) -> dict[str, str]:
    """Returns what to say of the manifests of a branch that are lost, under the name of the problem; nothing where none
    are.
    """
    at, end = first_lost(timelines, branch, safe), lost_end(timelines, branch)
    found = {LOST_MANIFEST + branch: gap_text(at)} if at is not None and at not in end else {}
    return found | ({LOST_END + branch: lost_end_text(timelines, branch, end)} if end else {})


def gap_text(t: int) -> str:
    """Returns what to say of an epoch whose manifest is lost while later ones are there."""
    return (
        f"the manifest of epoch {t} is not there, and later ones are, so the safe point stops before it: put the file back, from "
        f"a backup or another node; or seal the epoch again (a job: advance({t}) with the same rows, until its layers are merged)"
    )


def lost_end_text(timelines: Timelines, branch: str, epochs: range) -> str:
    """Returns what to say of epochs that are lost at the end of a branch."""
    where = f"{MANIFESTS}/{timelines.manifests(branch).timeline_at(epochs[0])}"
    return (
        f"branch {branch} was sealed up to epoch {epochs[-1]}, and the manifests of {epochs_text(epochs)} are not in {where}: "
        f"put them back, from a backup or another node; or seal them again, in order (a job: advance({epochs[0]}) with the "
        f"same rows), until their layers are merged; or rewind to an epoch before. Those before can be read with as_of="
    )


def check_there(timelines: Timelines, branch: str, t: int | None) -> None:
    """Raises LostEpochError where a read as of an epoch (None: of the newest one) would need one at the end that is
    lost.
    """
    last = timelines.last_sealed(branch)
    if (t is None or last is None or t > last) and lost_end(timelines, branch):
        timelines.reload()  # they may have come, or been discarded, since this process looked
        if epochs := lost_end(timelines, branch):
            raise LostEpochError(lost_end_text(timelines, branch, epochs))


def epochs_text(epochs: range) -> str:
    """Returns a text for messages: `epoch 7`, or `epochs 7 to 9`."""
    return f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"


# --- the log of branches ----------------------------------------------------------------------------------------------


def log_problem(timelines: Timelines, root: Path, env: Env) -> str | None:
    """Returns what to say where an entry of the log of branches is lost; None where none is. With peers one may be on
    its way, so there it is lost only where it was here.
    """
    refs, lost, alone = (
        timelines.refs,
        [*entries_lost(timelines.refs, timelines.remembered)],
        not env.exists(root / PLACE_FILE),
    )
    if refs.later and refs.entries + 1 not in refs.later and (lost or alone):
        return missing_entry(root, refs)
    strays = timelines_without_entry(root, refs, env) if alone else []
    if not lost and (not strays or refs.later):
        return None
    what = ", ".join(f"{n}.json" for n in lost) or f"an entry after {refs.entries}.json"
    stray = f", and no entry names timeline {', '.join(strays)} of {root / MANIFESTS}" if strays else ""
    return (
        f"{root / BRANCHES}: {what} is missing{stray}, so which timeline is main is not known. Put it back, from a backup or "
        f"another node; or say `nosync verify --repair {root}`, which first says what it will do"
    )


def check_log(timelines: Timelines, root: Path, env: Env) -> None:
    """Raises CorruptionError where an entry of the log of branches is lost: `main` may be another timeline."""
    if log_problem(timelines, root, env) is not None:
        timelines.reload()
        problem = log_problem(timelines, root, env)
        if problem is not None:
            raise CorruptionError(problem)


# --- what else shows that an epoch was sealed ---------------------------------------------------------------------------


def inferred(
    timelines: Timelines, layers: Iterable[LayerId], pins: Iterable[Epoch], announced: Mapping[str, Epoch]
) -> dict[str, Kept]:
    """Returns what layers, pins and safe points that were told show of timelines: epochs were sealed, and no manifest
    says so.

    For a directory without peers. Where a timeline was cut, layers and pins of what was cut may be left, so they show
    nothing.
    """
    ends = {timeline: t for timeline, t in announced.items() if timeline in timelines.refs.timelines}
    kept, layers = timelines.refs.kept_until(), list(layers)
    if all(kept.get(timeline, -1) is None for timeline in timelines.refs.timelines):
        main = timelines.timeline(MAIN).id
        newest = max(timelines.newest(), default=Epoch(-1))
        merged = [_sealed_by(id, timelines) for id in layers]
        for timeline, t in [*merged, *((main, t) for t in pins if t > newest)]:
            ends[timeline] = max(t, ends.get(timeline, t))
    found = {}
    for timeline, t in ends.items():
        last = timelines.of_timeline(timeline).last
        if t > (-1 if last is None else last):
            first = timelines.of_timeline(timeline).first
            begin = min((epoch_of(id.description.lower) for id in layers), default=t) if first is None else first
            found[timeline] = Kept(min(begin, t), t)
    return found


def _sealed_by(id: LayerId, timelines: Timelines) -> tuple[str, Epoch]:
    """Returns the timeline that a merged layer shows something of, and the last epoch that it shows was sealed; -1:
    none.
    """
    d = id.description
    is_merged = not d.is_of_rounds and d.upper > end_of(epoch_of(d.lower))
    main = timelines.timeline(MAIN).id
    if not is_merged or d.upper <= timelines.sealed_until(id.trace):
        return main, Epoch(-1)
    owners = [timeline for timeline in timelines.refs.timelines if id.trace.fingerprint.endswith(f"-{timeline}")]
    for name in (MAIN, *timelines.refs.names):
        last = timelines.last_sealed(name)
        manifest = None if last is None else timelines.manifest(last, name)
        if manifest is not None and any(entry.id.trace == id.trace for entry in manifest.entries):
            owners.append(timelines.timeline(name).id)
    return (owners[0] if owners else main), epoch_of(Time(d.upper - 1))
