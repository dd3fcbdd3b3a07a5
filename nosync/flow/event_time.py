"""Watermarks of windows that get rows by several inputs: each input has its own, and the window goes by one of them.
Pure.

An input is a source, or a stage that keeps state, from which rows come to the window through stateless stages and the
dedupe of rows that are only added. From where the rows of several inputs come together up to the window, each row says
in `__input` by which it came (the number in the stage's `origins`). What an input had in an epoch counts from the next
epoch on; how long it has been silent is counted in epochs. So nothing here depends on a clock, on the number of shards,
or on how often an epoch is run.

Times are int64 microseconds, as in nosync.kernels.windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from nosync.kernels.windows import NO_WATERMARK, Window, times_us, to_time
from nosync.lsm.columnar.columns import INTERNAL_PREFIX

INPUT_COLUMN = INTERNAL_PREFIX + "input"
"""The column that says by which input a row came, as a number. Rows of a stage with `origins` have it."""
INPUT_FIELD = pa.field(INPUT_COLUMN, pa.int8())
MOST_INPUTS = 128
WATERMARK_BEFORE, WATERMARK_AFTER, LATE_ROWS, OF_INPUTS = "watermark_before", "watermark", "late_rows", "inputs"
LATE_UNTIL = "late_until"
"""The columns that a window records for each shard and epoch. It has the inputs only where it goes by the minimum, and
up to when rows were late only where that is the watermark of the epoch before.
"""


@dataclass(frozen=True)
class InputTime:
    """The progress of an input."""

    watermark_us: int = NO_WATERMARK
    silent_epochs: int = 0
    """The number of epochs in a row, up to the last one, in which it had no row with a time."""
    idle: bool = False
    """Says whether these are so many that the window does not wait for it."""

    def after(self, newest_us: int | None, window: Window, delay_us: int | None = None) -> InputTime:
        """Returns its progress after one more epoch, in which its newest time was that one. None: it had none.

        `delay_us` is the input's own delay, if it is another one than the window's.
        """
        if newest_us is None:
            silent = self.silent_epochs + 1
            return InputTime(self.watermark_us, silent, window.idle_after is not None and silent >= window.idle_after)
        delay_us = window.delay_us if delay_us is None else delay_us
        assert delay_us is not None, "it has a watermark"
        newest_us = in_force_of(newest_us, window)
        return InputTime(max(self.watermark_us, newest_us - delay_us))


@dataclass(frozen=True)
class Watermarks:
    """The watermarks that the epoch before recorded."""

    previous_us: int = NO_WATERMARK
    """The watermark that was in force at the epoch before."""
    current_us: int = NO_WATERMARK
    """The watermark that is in force at this one."""
    before_previous_us: int = NO_WATERMARK
    """The watermark that was in force two epochs before, where that is recorded."""
    inputs: Mapping[str, InputTime] = field(default_factory=dict)
    """The progress of each input, where there are several. One that is not in it has had no epoch yet."""


def in_force_of(newest_us: int, window: Window) -> int:
    """Returns a newest time as watermarks count it: in milliseconds, as Spark, but for windows of earlier versions."""
    return newest_us // 1000 * 1000 if window.is_lenient else newest_us


def minimum(inputs: Iterable[InputTime], in_force_us: int) -> int:
    """Returns the watermark from the next epoch on: that of the slowest input that is not idle, and never less than it
    was.

    Where all are idle it stays.
    """
    awake = [one.watermark_us for one in inputs if not one.idle]
    return max(in_force_us, min(awake, default=in_force_us))


def maximum(inputs: Iterable[InputTime], in_force_us: int) -> int:
    """Returns the watermark from the next epoch on: that of the fastest input, and never less than it was."""
    return max(in_force_us, *(one.watermark_us for one in inputs))


def inputs_field(time: pa.DataType) -> pa.Field:
    """Returns the column that says of each input how far it has come."""
    fields = [("input", pa.string()), ("watermark", time), ("epochs_without_rows", pa.int64()), ("idle", pa.bool_())]
    return pa.field(OF_INPUTS, pa.list_(pa.struct(fields)))


def recorded_inputs(inputs: Mapping[str, InputTime], column: pa.Field) -> pa.Array:
    """Returns one row of `inputs_field`."""
    struct = column.type.value_type
    times = np.array([one.watermark_us for one in inputs.values()], dtype=np.int64)
    stamps = pa.array(times, mask=times == NO_WATERMARK).cast(pa.timestamp("us")).cast(struct.field("watermark").type)
    silent = pa.array([one.silent_epochs for one in inputs.values()], pa.int64())
    idle = pa.array([one.idle for one in inputs.values()], pa.bool_())
    rows = pa.StructArray.from_arrays([pa.array(list(inputs), pa.string()), stamps, silent, idle], fields=list(struct))
    return pa.ListArray.from_arrays(pa.array([0, len(inputs)], pa.int32()), rows, type=column.type)


def read_watermarks(row: pa.Table) -> Watermarks:
    """Returns what a window recorded at an epoch, back from its one row."""
    previous, current = (_time_of(row.column(name)) for name in (WATERMARK_BEFORE, WATERMARK_AFTER))
    before = _time_of(row.column(LATE_UNTIL)) if LATE_UNTIL in row.column_names else NO_WATERMARK
    return Watermarks(previous, current, before, _inputs_of(row))


def _inputs_of(row: pa.Table) -> dict[str, InputTime]:
    if OF_INPUTS not in row.column_names:  # one input, or a line that this one comes from had one
        return {}
    inputs = row.column(OF_INPUTS).combine_chunks().flatten()
    us, valid = times_us(inputs.field("watermark"))
    times: list[int] = np.where(valid, us, NO_WATERMARK).tolist()
    names, silent, idle = (inputs.field(name).to_pylist() for name in ("input", "epochs_without_rows", "idle"))
    return dict(zip(names, map(InputTime, times, silent, idle), strict=True))


def _time_of(column: pa.ChunkedArray) -> int:
    us, valid = times_us(column)
    return int(us[0]) if valid[0] else NO_WATERMARK


def stamp(time_us: int, type_: pa.DataType) -> pa.Array:
    """Returns a watermark as a column of one row."""
    return to_time(np.array([time_us]), type_) if time_us != NO_WATERMARK else pa.nulls(1, type_)


def split_by_input(rows: pa.Table, inputs: int) -> list[tuple[int, pa.Table]]:
    """Returns the rows of each input that has any, without the column that says which."""
    came_by = rows.column(INPUT_COLUMN).to_numpy()
    rest = rows.drop_columns([INPUT_COLUMN])
    present = np.flatnonzero(np.bincount(came_by, minlength=inputs))
    if len(present) == 1:
        return [(int(present[0]), rest)]
    return [(int(i), rest.filter(pa.array(came_by == i))) for i in present]


def with_input(rows: pa.Table, came_by: Any) -> pa.Table:
    """Returns the rows with the number of their input. `came_by` has one for each row, or is one for all."""
    numbers = np.broadcast_to(np.asarray(came_by, dtype=np.int8), rows.num_rows)
    return rows.append_column(INPUT_FIELD, pa.array(np.ascontiguousarray(numbers), pa.int8()))


def without_input(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([INPUT_COLUMN]) if INPUT_COLUMN in rows.column_names else rows
