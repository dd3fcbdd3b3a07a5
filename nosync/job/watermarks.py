"""Finds where the watermarks of a store's windows are, and which inputs hold them back; as any process finds it
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nosync.flow.event_time import InputTime, Watermarks, read_watermarks
from nosync.job.meanings import WATERMARK_PART
from nosync.kernels.windows import NO_WATERMARK
from nosync.lsm.errors import NosyncError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.layer import TraceId
from nosync.lsm.model.timestamp import Time, last_of, pack
from nosync.lsm.status import InputStatus, WindowStatus
from nosync.lsm.store.store import Store
from nosync.lsm.trace.directory import LayerDirectory


def window_status(store: Store, branch: str = MAIN) -> dict[str, WindowStatus]:
    """Returns the newest status of each window that has a watermark, but for those of which nothing is here."""
    last = store.last_sealed(branch)
    manifest = None if last is None else store.manifest(last, branch)
    traces: dict[str, list[TraceId]] = {}
    for entry in manifest.entries if manifest is not None else ():
        if entry.id.trace.stage.endswith(WATERMARK_PART):
            traces.setdefault(entry.id.trace.stage, []).append(entry.id.trace)
    found = {stage: _recorded(store.directory, of, last or 0) for stage, of in sorted(traces.items())}
    return {stage.removesuffix(WATERMARK_PART): _status(one) for stage, one in found.items() if one is not None}


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
