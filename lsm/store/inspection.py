"""What a store is made of, for people: its layers, its stages, its branches, and what of it is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nosync.lsm.compaction.policy import level_of
from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.completeness import MissingLayer, lost
from nosync.lsm.manifests.lost_ends import log_problem, lost_manifests
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.manifests.remembered import Remembered, recalled
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId, TraceId
from nosync.lsm.model.timestamp import Time, is_number, show
from nosync.lsm.platform.env import Stub
from nosync.lsm.status import BranchInfo, LayerStatus
from nosync.lsm.store.epoch_times import EpochTimes
from nosync.lsm.trace.directory import LayerDirectory

# --- layers and stages ------------------------------------------------------------------------------------------------


def layers(directory: LayerDirectory, durable: Collection[LayerId]) -> list[LayerStatus]:
    """Returns every layer file, by stage, shard and time; not those that a durable merged layer has replaced."""
    found = []
    for id in directory.layer_ids():
        if id not in durable and any(d.trace == id.trace and d.description.covers(id.description) for d in durable):
            continue
        stub = directory.env.stub(directory.path_of(id))
        if stub is not None:
            found.append(status_of_stub(id, directory.path_of(id), stub))
            continue
        try:
            reader = directory.reader(id)
        except FileNotFoundError:
            continue
        except NosyncError as error:
            found.append(status_of_bad(id, directory.path_of(id), error))
            continue
        found.append(status_of(reader, durable=id in durable))
    return found


def stages(found: Sequence[LayerStatus], timelines: Timelines) -> dict[str, dict[str, int]]:
    """Returns what `StoreStatus.stages` says of these layers."""
    stages: dict[str, dict[str, int]] = {}
    shards: dict[str, set[int]] = {}
    for layer in found:
        s = stages.setdefault(layer.stage, {"shards": 0, "layers": 0, "rows": 0, "bytes": 0, "upper": 0, "copies": 0})
        shards.setdefault(layer.stage, set()).add(layer.shard)
        s["layers"] += 1
        s["rows"] += layer.rows
        s["bytes"] += layer.bytes
        s["shards"] = len(shards[layer.stage])
        s["upper"] = max(s["upper"], int(str(layer.upper).partition(".")[0]))
    newest = timelines.manifest(timelines.last_sealed() or 0)
    for entry in newest.entries if newest is not None else ():
        if entry.id.trace.stage in stages:
            stages[entry.id.trace.stage]["copies"] = entry.copies
    return stages


def sealed_at(directory: LayerDirectory, timelines: Timelines, times: EpochTimes) -> str | None:
    """Returns when the last epoch of the main timeline was sealed; where that was not recorded, when its manifest got
    its file here. None where there is none, or an archive has it.
    """
    last = timelines.last_sealed()
    manifest = None if last is None else timelines.manifest(last)
    if manifest is None:
        return None
    recorded = recorded_time(timelines, times, manifest.t)
    if recorded is not None:
        return recorded
    try:
        written_ns = directory.env.identity(directory.root / manifest.path).written_ns
    except FileNotFoundError:
        return None
    return datetime.fromtimestamp(written_ns // 10**9, UTC).isoformat()


def recorded_time(timelines: Timelines, times: EpochTimes, t: int | None, branch: str = MAIN) -> str | None:
    """Returns when an epoch was sealed, to the second, as its file says it; None where none does."""
    with contextlib.suppress(NosyncError):  # a damaged file, of which `verify` tells
        time = None if t is None else times.of(timelines, branch, t)
        return None if time is None else datetime.fromtimestamp(time.sealed_us // 10**6, UTC).isoformat()
    return None


def branches_sealed_at(timelines: Timelines, times: EpochTimes) -> dict[str, str]:
    """Returns, by branch, when its newest epoch was sealed, where that was recorded."""
    names = sorted(timelines.refs.names)
    found = {name: recorded_time(timelines, times, timelines.last_sealed(name), name) for name in names}
    return {name: at for name, at in found.items() if at is not None}


def shown(time: Time) -> int | str:
    text = show(time)
    return int(text) if is_number(text) else text


def status_of(reader: LayerReader, *, durable: bool) -> LayerStatus:
    d, trace, info = reader.id.description, reader.id.trace, reader.info
    return LayerStatus(
        trace.stage,
        trace.fingerprint,
        trace.shard.index,
        trace.shard.count,
        shown(d.lower),
        shown(d.upper),
        shown(d.since),
        info.rows,
        info.tombstones,
        reader.size_bytes,
        reader.digest,
        "disk" if durable else "memory",
        level_of(info.rows, has_key=bool(info.key)),
        str(reader.path),
    )


def status_of_bad(id: LayerId, path: Path, error: NosyncError) -> LayerStatus:
    return _status_of_file(id, path, "corrupt")


def status_of_stub(id: LayerId, path: Path, stub: Stub) -> LayerStatus:
    """Returns what is known of a layer without fetching anything of it."""
    return _status_of_file(id, path, "remote", stub.size_bytes, stub.digest)


def _status_of_file(id: LayerId, path: Path, level: str, size_bytes: int = 0, digest: str = "") -> LayerStatus:
    d, trace = id.description, id.trace
    ends = (shown(d.lower), shown(d.upper), shown(d.since))
    return LayerStatus(
        trace.stage, trace.fingerprint, trace.shard.index, trace.shard.count, *ends, 0, 0, size_bytes, digest, level, 0,
        str(path),
    )  # fmt: skip


# --- branches ---------------------------------------------------------------------------------------------------------


def describe_branch(directory: LayerDirectory, timelines: Timelines, name: str) -> BranchInfo:
    """Returns where a branch comes from, and what of it is shared with others and what is its own."""
    timeline = timelines.refs.timeline_of(name)
    mine = _files_of(directory, timelines, name)
    others = set().union(*(_files_of(directory, timelines, other) for other in timelines.refs.names if other != name))
    sizes = {id: directory.env.size_bytes(directory.path_of(id)) for id in mine if directory.has_file(id)}
    own = sum(size for id, size in sizes.items() if id not in others)
    # After a rewind a timeline has another name than it began with.
    branch_of = {id: branch for branch, id in timelines.refs.names.items()}
    lineage = tuple(
        f"{branch_of.get(o.parent, '(deleted)')} at {o.at}"
        for o in reversed(timelines.refs.lineage(timeline.id))
        if o.parent is not None
    )
    last = timelines.last_sealed(name)
    return BranchInfo(
        name, timeline.id, lineage, timeline.at, last, timeline.changed, len(mine - others), own, len(mine & others),
        sum(sizes.values()) - own,
    )  # fmt: skip


def branches_of(
    directory: LayerDirectory, timelines: Timelines, layers: Sequence[LayerStatus]
) -> list[tuple[str, ...]]:
    """Returns for each of these layers the branches whose epochs it holds; none for what no sealed epoch lists."""
    holds = {name: {*map(_place, _files_of(directory, timelines, name))} for name in sorted(timelines.refs.names)}
    places = [(x.stage, x.fingerprint, x.shard, x.shards, x.lower, x.upper) for x in layers]
    return [tuple(name for name, files in holds.items() if place in files) for place in places]


def _files_of(directory: LayerDirectory, timelines: Timelines, branch: str) -> set[LayerId]:
    """Returns the layer files that hold what a branch's manifests list."""
    traces: dict[TraceId, list[tuple[Time, Time]]] = {}
    for piece in timelines.manifests(branch).pieces():
        for trace, _ in piece.traces():
            traces.setdefault(trace, []).append((piece.begin, piece.end))
    found = set()
    for trace, listed in traces.items():
        low, high = min(begin for begin, _ in listed), max(end for _, end in listed)
        found |= {LayerId(trace, d) for d in directory.descriptions(trace) if d.lower < high and d.upper > low}
    return found


def _place(id: LayerId) -> tuple[str, str, int, int, int | str, int | str]:
    """Returns what tells a layer file from others in its `LayerStatus`."""
    trace, d = id.trace, id.description
    return trace.stage, trace.fingerprint, trace.shard.index, trace.shard.count, shown(d.lower), shown(d.upper)


# --- what is missing --------------------------------------------------------------------------------------------------


def lost_manifests_of(timelines: Timelines, safe: int | None) -> dict[str, str]:
    """Returns the problems of a store without a node. `safe`: the safe point of the main timeline."""
    found: dict[str, str] = {}
    for name in sorted(timelines.refs.names):
        found |= lost_manifests(timelines, name, safe if name == MAIN else None)
    return found


def known_pins(pins: Callable[[], dict[str, int]], problems: dict[str, str]) -> dict[str, int]:
    """Returns the pins. Where one cannot be read `problems` say so, and there are none."""
    try:
        return pins()
    except CorruptionError as error:
        problems["pins"] = str(error)
        return {}


def lost_on(branch: str, directory: LayerDirectory, timelines: Timelines, safe: int | None) -> list[MissingLayer]:
    """Returns the layers that a branch lists and no file holds, as a process that only reads can say. `safe`: the safe
    point of main.
    """
    return lost(timelines, directory, Released.of(directory.root, directory.env, timelines, safe), branch)


def holes(directory: LayerDirectory, remembered: Remembered | None, safe_point: Callable[[], int | None]) -> list[str]:
    """Returns what manifests list, or what ought to be a manifest, and no file holds. Files are looked at as they are
    now.

    `remembered`: what is remembered of the timelines (None: the catalog on disk is asked).
    """
    root, env = directory.root, directory.env
    try:
        timelines = Timelines(root, env, lambda: recalled(root) if remembered is None else remembered)
    except NosyncError:
        return []  # a file that cannot be read, which has been told of
    problem = log_problem(timelines, root, env)
    if problem is not None:
        return [] if timelines.refs.later else [problem]  # of those after one that is missing it has been told
    safe = None
    with contextlib.suppress(CorruptionError):  # of a manifest that cannot be read, which has been told of
        safe = safe_point()
    found: dict[str, None] = {}
    for name in sorted(timelines.refs.names):
        found |= {f"branch {name}: {text}": None for text in lost_manifests(timelines, name, None).values()}
        # What branches share is told of once.
        found |= {
            f"{one.entry.id}: is gone; recover() computes it again": None
            for one in lost_on(name, directory, timelines, safe)
        }
    return list(found)
