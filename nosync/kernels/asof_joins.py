"""As-of joins: each row of the left side with the newest row of the right side that has its key and is not younger.

A left row is joined once the watermark has passed its event time, for then no right row that is in time can come between.
So the result does not depend on the order in which rows came, or on the epochs that they came in. Of the right side a key
keeps the rows that the watermark has not passed, and the newest that it has; the left side keeps what it has not passed.
Nothing is ever taken back. That is Flink's temporal join by event time, and `merge_asof` of Pandas.

Times are int64 microseconds, as in nosync.kernels.windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nosync.kernels.interval_joins import (
    PASSED_US,
    Matches,
    SideChanges,
    SideRows,
    Times,
    beside,
    numbered_keys,
    of_keys,
    until_us,
)
from nosync.kernels.join_types import JoinSpec
from nosync.kernels.joins import ROW_ID
from nosync.lsm.columnar.columns import Bools, Indices, as_array
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.model.timestamp import Time


@dataclass(frozen=True)
class AsofSpec:
    """The join's columns and type, which is inner or left, and how old a right row may be at most. None: any age."""

    join: JoinSpec
    within_us: int | None

    @property
    def tracks(self) -> tuple[bool, bool]:
        """Returns of each side whether it matters if a row had a match: of none, for each left row is joined once."""
        return False, False


def asof_matches(
    left: SideRows, right: SideRows, spec: AsofSpec, schema: pa.Schema, watermark_us: int, before: Time
) -> Matches:
    """Returns the results of an epoch, and what becomes of the states of both sides. `schema` is of the results."""
    on = spec.join.on
    is_due = until_us(left.new.rows) <= watermark_us - PASSED_US
    old_left = pa.Table.from_batches([left.expired]).select(left.new.rows.column_names)
    due = pa.concat_tables([left.new.rows.filter(pa.array(is_due)), old_left])

    passed = pa.Table.from_batches([right.expired]).select(right.new.rows.column_names)
    new_passed = right.new.rows.filter(pa.array(until_us(right.new.rows) <= watermark_us - PASSED_US))
    wanted = pa.concat_tables([table.select(list(on)) for table in (due, passed, new_passed)])
    versions = pa.concat_tables([right.new.rows, of_keys(right, wanted, on, before)])
    of_version, of_due = numbered_keys(versions, due, on)
    times = until_us(versions)
    came = [versions.column(name).to_numpy() for name in reversed(ROW_ID)]
    order: Indices = np.lexsort((*came, times, of_version))
    found = _newest_not_younger(of_version[order], times[order], of_due, until_us(due), spec.within_us)
    matched = versions.take(pa.array(order[found[found >= 0]]))

    parts = [beside(due.filter(pa.array(found >= 0)), matched, spec.join, schema)]
    if spec.join.keeps_left:
        parts.append(beside(due.filter(pa.array(found < 0)), None, spec.join, schema))
    of_left = SideChanges(
        left.new.rows.filter(pa.array(~is_due)), left.new.hashes[~is_due], old_left, _hashes(old_left, on),
        np.ones(old_left.num_rows, dtype=np.bool_),
    )  # fmt: skip
    # What comes after a version in order of time, and was passed, replaces it, if it is of the same key.
    is_passed = times <= watermark_us - PASSED_US
    is_replaced = np.zeros(versions.num_rows, dtype=np.bool_)
    is_replaced[order[:-1]] = (of_version[order][1:] == of_version[order][:-1]) & is_passed[order][1:]
    return Matches((of_left, _of_versions(right, versions, is_replaced, on)), pa.concat_tables(parts))


def _newest_not_younger(
    of_version: Indices, times: Times, of_due: Indices, due_us: Times, within_us: int | None
) -> Indices:
    """Returns, for each row that is due, the place of the version that it is joined with; -1: there is none.

    `of_version`, `times`: the keys and times of versions, in order of these. `of_due`, `due_us`: those of what is due.
    """
    if not len(times):
        return np.full(len(of_due), -1, dtype=np.int64)
    ranks = np.unique(times)
    width = len(ranks) + 1
    places = of_version * width + np.searchsorted(ranks, times)
    # The last version before the place that a younger one would have.
    at = np.searchsorted(places, of_due * width + np.searchsorted(ranks, due_us, "right")) - 1
    is_there = (at >= 0) & (of_due >= 0) & (of_version[at] == of_due)
    if within_us is not None:
        is_there &= due_us - times[at] <= within_us
    found: Indices = np.where(is_there, at, -1)
    return found


def _of_versions(right: SideRows, versions: pa.Table, is_replaced: Bools, on: tuple[str, ...]) -> SideChanges:
    """`versions` are the new rows, and then those of the state."""
    n = right.new.rows.num_rows
    stays, gone = ~is_replaced[:n], versions.slice(n).filter(pa.array(is_replaced[n:]))
    return SideChanges(
        right.new.rows.filter(pa.array(stays)), right.new.hashes[stays], gone, _hashes(gone, on),
        np.ones(gone.num_rows, dtype=np.bool_),
    )  # fmt: skip


def _hashes(rows: pa.Table, on: tuple[str, ...]) -> U32:
    return hash32([as_array(rows.column(name)) for name in on])
