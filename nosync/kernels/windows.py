"""Windows of event time: which windows a row belongs to, when they close, and how sessions grow together.

Times are int64 microseconds since 1970-01-01 UTC inside this module. A window is `[start, end)`.
The watermark of an epoch is the newest event time of all earlier epochs less the delay; it is the same in every shard,
because each shard that sends rows also says the newest time among them. It depends on the input only, never on a clock.
Rows are late by the watermark of the epoch before, and windows close by that of the epoch, after its rows are in: so
Spark does it since 3.5 (`inputWatermarkForLateEvents`, `inputWatermarkForEviction`).
Where rows come by several inputs, each has its own (nosync.flow.event_time).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import as_array
from nosync.lsm.columnar.ordering import order_of_columns
from nosync.lsm.errors import FlowError

START, END = "window_start", "window_end"
MIN, MAX = "min", "max"
UNTIL_COLUMN, UNTIL_TYPE = "__until", pa.timestamp("us", "UTC")
"""The event time up to which a row of a state counts, and the type of that and of other times in states."""
DUE_COLUMN = "__due"
"""The event time at which a key is to be looked at."""
MAX_WINDOWS_OF_A_ROW = 1000
_UNITS_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_DURATION = re.compile(r"\s*(\d+)\s*([a-z]+?)s?\s*\Z")
Times = npt.NDArray[np.int64]
NO_WATERMARK = -(1 << 62)
_FARTHEST_US = float(1 << 62)
"""Some 146,000 years from 1970: what is beyond cannot be told from no watermark, and its windows may not fit into 64
bits.
"""


@dataclass(frozen=True)
class Window:
    """The windows of a stage; durations in microseconds."""

    time: str
    """The column of event time."""
    size_us: int
    """The length of a window. A session has the gap here: what comes longer after its last row begins another one."""
    slide_us: int
    session: bool
    delay_us: int | None
    """The time by which the watermark is behind the newest time. None: windows never close."""
    keep_us: int | None
    """The time that a window stays in the state after closing. None: it stays for ever."""
    # What follows is not in the text of a window, which enters fingerprints: versions before did not have it.
    policy: str | None = field(default=None, repr=False)
    """Which watermark counts where rows come by several inputs: that of the slowest (MIN) or of the fastest (MAX).
    None: as the store was written, and MIN in a new one.
    """
    idle_after: int | None = field(default=None, repr=False)
    """After how many epochs without rows the window does not wait for an input; None: it always waits."""
    is_lenient: bool = field(default=False, repr=False)
    """Says whether a row is late by the watermark of the epoch before, and not by that of its own, and whether times
    count in whole milliseconds: as in Spark. Stores of earlier versions have windows that are not.
    """
    is_final: bool = field(default=False, repr=False)
    """Says whether each window is given once, when the watermark has passed it."""
    expands: bool = field(default=True, repr=False)
    """Says whether rows are put into windows. If not, only the event time of each row counts."""

    @classmethod
    def of_times(cls, time: str, delay_us: int, policy: str | None, idle_after: int | None) -> Window:
        """Returns what a stage has that goes by the event time of rows, and has no windows."""
        return cls(time, 0, 0, False, delay_us, None, policy, idle_after, is_lenient=True, expands=False)


def parse_window(
    stage: str,
    *,
    time: str,
    size: str | None,
    slide: str | None,
    gap: str | None,
    watermark: str | None,
    keep: str | None,
    policy: str | None = None,
    idle_after: int | None = None,
) -> Window:
    """Raises FlowError for durations that cannot be read or do not fit together."""
    if (size is None) == (gap is None):
        raise FlowError(f"stage {stage}: give size= for windows of a fixed size, or gap= for sessions")
    if slide is not None and size is None:
        raise FlowError(f"stage {stage}: slide= goes with size=, not with gap=")
    if keep is not None and watermark is None:
        raise FlowError(f"stage {stage}: keep= counts from when a window closes, which takes watermark=")
    check_policy(stage, watermark, policy, idle_after)
    size_us = duration_us(stage, size or gap or "")
    slide_us = duration_us(stage, slide) if slide is not None else size_us
    if slide_us > size_us or -(-size_us // slide_us) > MAX_WINDOWS_OF_A_ROW:
        raise FlowError(
            f"stage {stage}: slide={slide!r} must be at most size={size!r}, and at least 1/{MAX_WINDOWS_OF_A_ROW} of it"
        )
    return Window(
        time,
        size_us,
        slide_us,
        gap is not None,
        None if watermark is None else duration_us(stage, watermark, least=0),
        None if keep is None else duration_us(stage, keep, least=0),
        MIN if policy is None and idle_after is not None else policy,
        idle_after,
    )


def policy_of(policy: str | None, idle_after: int | None) -> str | None:
    """Returns the policy of watermarks that was given; where only idle inputs are spoken of, it is the minimum."""
    return MIN if policy is None and idle_after is not None else policy


def check_policy(stage: str, watermark: object, policy: str | None, idle_after: int | None) -> None:
    """Raises FlowError for a policy of inputs that there is not, or that goes without a watermark."""
    if policy not in (None, MIN, MAX):
        raise FlowError(
            f"stage {stage}: policy={policy!r}, expected {MIN!r} (the watermark of the slowest input) or {MAX!r} (of "
            "the fastest)"
        )
    if idle_after is not None:
        if isinstance(idle_after, bool) or not isinstance(idle_after, int) or idle_after < 1:
            raise FlowError(f"stage {stage}: idle_after={idle_after!r}, expected a number of epochs, 1 or more")
        if policy == MAX:
            raise FlowError(
                f"stage {stage}: policy={MAX!r} waits for no input: leave idle_after= out, or use policy={MIN!r}"
            )
    given = [name for name, value in (("policy", policy), ("idle_after", idle_after)) if value is not None]
    if given and watermark is None:
        raise FlowError(f"stage {stage}: {given[0]}= says how inputs move the watermark, which takes watermark=")


def duration_us(stage: str, text: str, *, least: int = 1) -> int:
    """Returns a text such as `"10 minutes"` in microseconds."""
    match = _DURATION.match(text.lower()) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS_US or int(match[1]) < least:
        raise FlowError(
            f"stage {stage}: {text!r} is not a duration: expected a number and a unit, such as '10 minutes' "
            f"(units: {', '.join(_UNITS_US)})"
        )
    us = int(match[1]) * _UNITS_US[match[2]]
    if us >= _FARTHEST_US:
        raise FlowError(f"stage {stage}: {text!r} is too long: a duration is 146,000 years at most")
    return us


def times_us(column: pa.ChunkedArray | pa.Array) -> tuple[Times, npt.NDArray[np.bool_]]:
    """Returns a timestamp or date column in microseconds (of nanoseconds: rounded down), and which rows have one.

    Spark has dates of which 64 bits have no microseconds. They come as the nearest number beyond what windows are made of.
    """
    array = as_array(column)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_date32(array.type):
        days = array.view(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        day_us = _UNITS_US["day"]
        most = (1 << 62) // day_us + 1
        return np.clip(days, -most, most) * day_us, valid
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        array = pc.floor_temporal(array, unit="microsecond")
    stamps = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)))
    micros: Times = stamps.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return micros, valid


def window_type(type_: pa.DataType) -> pa.DataType:
    """Returns the type of window_start and window_end over a time column of this type."""
    return pa.timestamp("us", type_.tz if pa.types.is_timestamp(type_) else "UTC")


def is_time(type_: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type_) or pa.types.is_date(type_))


def _event_times(rows: pa.Table, window: Window) -> tuple[Times, npt.NDArray[np.bool_]]:
    """Does what `times_us` does. A time whose windows would begin or end beyond 64 bits counts as none, so that its row
    is late.
    """
    time, valid = times_us(rows.column(window.time))
    fits = np.abs(time.astype(np.float64)) < _FARTHEST_US - window.size_us - window.slide_us
    return np.where(fits, time, 0), valid & fits


def with_windows(rows: pa.Table, window: Window) -> pa.Table:
    """Returns the rows, once for each window that they belong to, with window_start and window_end.

    For sessions it is the window of the row alone. A row without a time comes once, with null windows. Where only event
    times count these are the rows as they are.
    """
    if not window.expands:
        return rows
    time, valid = _event_times(rows, window)
    if window.session:
        starts, at = time, np.arange(len(time))
    else:
        newest = (time // window.slide_us) * window.slide_us
        n = -(-window.size_us // window.slide_us)
        candidates = newest[:, None] - np.arange(n - 1, -1, -1) * window.slide_us
        holds = candidates + window.size_us > time[:, None]
        holds[~valid] = False
        holds[~valid, 0] = True
        at, _ = np.nonzero(holds)
        starts = candidates[holds]
    type_ = window_type(rows.schema.field(window.time).type)
    missing = ~valid[at]
    expanded = rows if window.session or window.slide_us == window.size_us else rows.take(pa.array(at))
    for name, values in ((START, starts), (END, starts + window.size_us)):
        expanded = expanded.append_column(name, pa.array(values, mask=missing).cast(pa.timestamp("us")).cast(type_))
    return expanded


def event_span_us(rows: pa.Table, window: Window) -> tuple[int, int] | None:
    """Returns the oldest and the newest event time among the rows."""
    time, valid = _event_times(rows, window)
    return (int(time[valid].min()), int(time[valid].max())) if valid.any() else None


def newest_us_by(groups: npt.NDArray[np.integer[Any]], rows: pa.Table, window: Window) -> dict[int, int]:
    """Returns the newest event time of each group of rows that has any. `groups` has a small number for each row."""
    time, valid = _event_times(rows, window)
    groups, time = groups[valid], time[valid]
    newest = np.full(groups.max(initial=-1) + 1, NO_WATERMARK, dtype=np.int64)
    np.maximum.at(newest, groups, time)
    return {int(group): int(newest[group]) for group in np.unique(groups)}


def closed(rows: pa.Table, watermark_us: int) -> npt.NDArray[np.bool_]:
    """Returns which rows are for a window that the watermark has passed, or for none because they have no time."""
    ends, valid = times_us(rows.column(END))
    return ~valid | (ends <= watermark_us)


def late_rows(rows: pa.Table, window: Window, watermark_us: int) -> npt.NDArray[np.bool_]:
    """Returns which rows of `with_windows` came too late, or have no time."""
    if window.expands:
        return closed(rows, watermark_us)
    time, valid = _event_times(rows, window)
    return ~valid | (time <= watermark_us)


def sessions(group: Times, starts: Times, ends: Times) -> tuple[Times, Times, Times, Times]:
    """Grows intervals of one group that overlap or touch together, as Spark and Flink do.

    Takes intervals in any order. Returns for each interval the number of its session, and for each session its
    group, start and end; sessions are in order of (group, start).
    """
    order = order_of_columns(group, starts)
    order = np.lexsort((starts, group)) if order is None else order
    g, s, e = group[order], starts[order], ends[order]
    furthest = _furthest(g, e)[:-1]
    begins = np.ones(len(g), dtype=np.bool_)
    begins[1:] = (g[1:] != g[:-1]) | (s[1:] > furthest)
    number = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    session_ends = np.maximum.reduceat(e, first) if len(first) else e[:0]
    session_of = np.empty(len(g), dtype=np.int64)
    session_of[order] = number
    return session_of, g[first], s[first], session_ends


def _furthest(group: Times, ends: Times) -> Times:
    """Returns the largest end so far within each group. Groups are small numbers, in order."""
    if not len(ends):
        return ends
    # A running maximum over (group, end), in one number where there is room for both.
    least = int(ends.min())
    width = (int(ends.max()) - least).bit_length()
    if width + int(group[-1]).bit_length() < 63:
        furthest: Times = np.maximum.accumulate((group << width) | (ends - least)) & ((1 << width) - 1)
        return furthest + least
    ranked = np.unique(ends)
    reach = np.maximum.accumulate(group * (len(ranked) + 1) + np.searchsorted(ranked, ends))
    by_rank: Times = ranked[reach % (len(ranked) + 1)]
    return by_rank


def to_time(values: Times, type_: pa.DataType) -> pa.Array:
    """Microseconds as a column of `window_type`."""
    return pa.array(values).cast(pa.timestamp("us")).cast(type_)
