"""Stages that are appended to directly (`Store.append`), not computed by a dataflow: which traces their layers are in.

Invariants
- The caller places keys, so each shard is a stage of its own, and may begin at another epoch than the others.
- After a rewind the main timeline is another timeline, whose epochs may be given other rows than the ones they replace.
  So each timeline has traces of its own: the state of a shard is what it was on the timelines before, up to where they
  were left, and its own layers from then on.
"""

from __future__ import annotations

from nosync.lsm.errors import HoleError
from nosync.lsm.manifests.branches import Timeline
from nosync.lsm.manifests.lost_ends import gap_text
from nosync.lsm.manifests.manifest import MAIN_TIMELINE, Entry, Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import Part, View
from nosync.lsm.model.layer import LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time, end_of, epoch_of, pack, show
from nosync.lsm.trace.directory import LayerDirectory

RAW_FINGERPRINT = "raw"
"""On the first timeline; on another one its id comes after it."""


def raw_fingerprint(timeline: Timeline) -> str:
    """Returns the fingerprint of the raw layers that a timeline has of its own."""
    return RAW_FINGERPRINT if timeline.id == MAIN_TIMELINE else f"{RAW_FINGERPRINT}-{timeline.id}"


def raw_traces(timelines: Timelines, directory: LayerDirectory, stage: str, branch: str) -> list[TraceId]:
    """Returns the traces of a stage that a branch's timeline has of its own, sealed or not."""
    fingerprint = raw_fingerprint(timelines.timeline(branch))
    return [trace for trace in directory.traces_of(stage, fingerprint) if not trace.shard.count]


def raw_traces_after(timelines: Timelines, directory: LayerDirectory, stage: str, branch: str) -> list[TraceId]:
    """Returns the traces of a stage at epochs that are not sealed. Shards to which this timeline did not append yet go
    on from the timeline before.
    """
    mine = raw_traces(timelines, directory, stage, branch)
    last = _listed(timelines.manifest(t, branch) if (t := timelines.last_sealed(branch)) is not None else None)
    fingerprint = raw_fingerprint(timelines.timeline(branch))
    going_on = {TraceId(stage, fingerprint, trace.shard) for trace in last if trace.stage == stage}
    return sorted(going_on.union(mine)) if mine else []


def raw_trace(timelines: Timelines, stage: str, index: int, t: int) -> TraceId:
    """Returns where the layer of a shard at an epoch of the main timeline is, or goes."""
    for trace in _listed(timelines.manifest(t)):
        if (trace.stage, trace.shard.index) == (stage, index):
            return trace
    return TraceId(stage, _fingerprint_at(timelines, t), Shard(index))


def raw_traces_at(timelines: Timelines, directory: LayerDirectory, t: int) -> list[TraceId]:
    """Returns the traces of all stages and shards that are known at an epoch of the main timeline."""
    sealed, last = timelines.manifest(t), timelines.last_sealed()
    if sealed is not None:
        return list(_listed(sealed))
    fingerprint = _fingerprint_at(timelines, t)
    found = {TraceId(trace.stage, fingerprint, trace.shard) for trace in _listed(_at(timelines, last))}
    return sorted(found.union(*(directory.traces_of(stage, fingerprint) for stage in directory.stages())))


def raw_begin(timelines: Timelines, trace: TraceId) -> Epoch | None:
    """Returns the first epoch of a trace that goes on where one of another timeline was left; None for one that does
    not.
    """
    last = timelines.last_sealed()
    before = [t for t in _listed(_at(timelines, last)) if (t.stage, t.shard) == (trace.stage, trace.shard)]
    return None if last is None or not before or trace in before else Epoch(last + 1)


def raw_layers(timelines: Timelines, directory: LayerDirectory, stage: str) -> list[tuple[LayerId, Time]]:
    """Returns the newest layer of each trace that holds rows of a stage on the main timeline, and until when it counts
    there: they say which columns the stage has.
    """
    found = []
    for id, until in timelines.refs.left(timelines.timeline().id).items():
        end = END_OF_TIME if until is None else end_of(until)
        for trace in directory.traces_of(stage, raw_fingerprint(timelines.refs.timelines[id])):
            if not trace.shard.count:
                known = [d for d in directory.descriptions(trace) if d.lower < end]
                found += [(LayerId(trace, max(known, key=lambda d: (d.upper, d.since))), end)] if known else []
    return found


def raw_view(timelines: Timelines, branch: str, id: TraceId, t: int) -> View:
    """Returns what the state of a shard at an epoch is made of. `id`: its trace then."""
    last, manifests = timelines.last_sealed(branch), timelines.manifests(branch)
    base = []
    for span in timelines.histories(branch).get(id.stage, ()):
        if last is None or span.fingerprint == id.fingerprint or span.lower > pack(t):
            continue
        upper, trace = min(span.upper, end_of(last)), TraceId(id.stage, span.fingerprint, id.shard)
        at = epoch_of(Time(upper - 1))
        if at not in manifests:
            raise HoleError(
                f"stage {id.stage}: {gap_text(at)}",
                stage=id.stage, shard=str(id.shard), lower=show(span.lower), upper=show(upper),
            )  # fmt: skip
        origin = _listed(manifests.get(at)).get(trace)
        if origin is not None:
            base.append(Part(trace, origin, upper))
    origin = _listed(manifests.get(Epoch(t))).get(id)
    if origin is None:
        origin = base[-1].upper if base else min(timelines.origins(id), default=None)
    return View(id, origin, base=tuple(base))


def _fingerprint_at(timelines: Timelines, t: int) -> str:
    """Returns the fingerprint of the main timeline's raw layers at an epoch that is not sealed, or whose manifest is
    lost: before the fork it is the parent's.
    """
    return raw_fingerprint(timelines.refs.timelines[timelines.manifests().timeline_at(t)])


def _at(timelines: Timelines, t: int | None) -> Manifest | None:
    return None if t is None else timelines.manifest(t)


def _listed(manifest: Manifest | None) -> dict[TraceId, Time]:
    """Returns the traces of raw layers in a manifest, each with where it begins."""
    entries: tuple[Entry, ...] = manifest.entries if manifest is not None else ()
    return {entry.id.trace: entry.origin for entry in entries if not entry.id.trace.shard.count}
