"""Finds where the watermarks of a store's windows are, and which inputs hold them back; as any process finds it
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import WATERMARK, declared_of, part_of
from nosync.flow.event_time import InputTime, Watermarks, read_watermarks
from nosync.flow.kinds import FORGET, RETRACT, UPDATE, WINDOW
from nosync.kernels.windows import MAX, MIN, NO_WATERMARK
from nosync.lsm.errors import NosyncError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.model.layer import TraceId
from nosync.lsm.model.timestamp import Time, last_of, pack
from nosync.lsm.status import InputStatus, WindowStatus
from nosync.lsm.store.store import Store
from nosync.lsm.trace.directory import LayerDirectory

WATERMARK_POLICIES = "watermark_policies"
"""The key, in a manifest, that says of windows which watermark of several inputs they go by, if not the fastest."""
EXPIRIES = "expiries"
"""The key, in a manifest, that says of which stages rows that expire are forgotten, and not taken back."""
LENIENT = "late_by_epoch_before"
"""The key, in a manifest, of the windows in which rows are late by the watermark of the epoch before."""
_PART = part_of("", WATERMARK)


def recorded_policies(manifest: Manifest | None) -> dict[str, str]:
    """Returns, for each window that an epoch lists, which watermark of several inputs it goes by.

    Versions before did not say it: the fastest.
    """
    if manifest is None:
        return {}
    said = manifest.meta.get(WATERMARK_POLICIES)
    said = said if isinstance(said, Mapping) else {}
    return {name: MIN if said.get(name) == MIN else MAX for name in _windows_of(manifest)}


def recorded_expiries(manifest: Manifest | None) -> dict[str, str]:
    """Returns, for each stage that an epoch lists, what becomes of what was made of its rows when they expire.

    Versions before did not say it: it was taken back.
    """
    if manifest is None:
        return {}
    said = manifest.meta.get(EXPIRIES)
    said = said if isinstance(said, Mapping) else {}
    stages = {entry.id.trace.stage for entry in manifest.entries}
    return {name: FORGET if said.get(name) == FORGET else RETRACT for name in stages}


def recorded_strict(manifest: Manifest | None) -> frozenset[str]:
    """Returns the windows that an epoch lists in which rows are late by the watermark of their own epoch.

    In versions before they were so in all.
    """
    if manifest is None:
        return frozenset()
    said = manifest.meta.get(LENIENT)
    return frozenset(_windows_of(manifest) - set(said if isinstance(said, list) else ()))


def lenient_to_record(flow: BoundFlow) -> list[str]:
    """Returns what an epoch's manifest says of its windows, for `recorded_strict`."""
    return sorted(
        declared_of(name)
        for name, stage in flow.stages.items()
        if stage.kind == WATERMARK and stage.window is not None and stage.window.is_lenient
    )


def _windows_of(manifest: Manifest) -> set[str]:
    return {e.id.trace.stage.removesuffix(_PART) for e in manifest.entries if e.id.trace.stage.endswith(_PART)}


def expiries_to_record(flow: BoundFlow) -> dict[str, str]:
    """Returns what an epoch's manifest says of stages whose state is bounded, for `recorded_expiries`."""
    keeps = (UPDATE, WINDOW)
    return {name: FORGET for name, stage in flow.stages.items() if stage.kind in keeps and stage.expires}


def policies_to_record(flow: BoundFlow) -> dict[str, str]:
    """Returns what an epoch's manifest says of its windows, for `recorded_policies`."""
    windows = {declared_of(name): stage.window for name, stage in flow.stages.items() if stage.kind == WATERMARK}
    return {name: MIN for name, window in windows.items() if window is not None and window.policy == MIN}


def window_status(store: Store, branch: str = MAIN) -> dict[str, WindowStatus]:
    """Returns the newest status of each window that has a watermark, but for those of which nothing is here."""
    last = store.last_sealed(branch)
    manifest = None if last is None else store.manifest(last, branch)
    traces: dict[str, list[TraceId]] = {}
    for entry in manifest.entries if manifest is not None else ():
        if entry.id.trace.stage.endswith(_PART):
            traces.setdefault(entry.id.trace.stage, []).append(entry.id.trace)
    found = {stage: _recorded(store.directory, of, last or 0) for stage, of in sorted(traces.items())}
    return {stage.removesuffix(_PART): _status(one) for stage, one in found.items() if one is not None}


def _recorded(directory: LayerDirectory, traces: Iterable[TraceId], t: int) -> Watermarks | None:
    """Returns what one shard recorded: all recorded the same, and other hosts may have those of others."""
    for trace in traces:
        try:
            row = directory.layer_at(trace, last_of(t)).changes(Time(pack(t) - 1), last_of(t))
        except NosyncError:
            continue  # it is among what is missing, if it is nowhere
        if row.num_rows:
            return read_watermarks(row)
    return None


def _status(recorded: Watermarks) -> WindowStatus:
    of = recorded.inputs
    awake = {name: one.watermark_us for name, one in of.items() if not one.idle}
    slowest, fastest = min(awake.values(), default=NO_WATERMARK), max(awake.values(), default=NO_WATERMARK)
    behind = tuple(name for name, us in awake.items() if us == slowest) if slowest < fastest else ()
    return WindowStatus(_shown(recorded.current_us), {name: _input(one) for name, one in of.items()}, behind)


def _input(one: InputTime) -> InputStatus:
    return InputStatus(_shown(one.watermark_us), one.silent_epochs, one.idle)


def _shown(us: int) -> str | None:
    if us == NO_WATERMARK:
        return None
    return str(np.datetime_as_string(np.datetime64(us, "us"), unit="us" if us % 1_000_000 else "s"))
