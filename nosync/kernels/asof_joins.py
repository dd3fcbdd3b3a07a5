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

from nosync.kernels.interval_joins import PASSED_US, Matches, SideChanges, SideRows, beside, has_null, of_keys, until_us
from nosync.kernels.join_types import JoinSpec
from nosync.kernels.joins import ROW_ID, distinct
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
    order, number = _in_order(versions, due, on)
    found = _newest_not_younger(versions.take(pa.array(order)), due, number, order, spec.within_us)

    parts = [beside(due.filter(pa.array(found >= 0)), versions.take(pa.array(found[found >= 0])), spec.join, schema)]
    if spec.join.keeps_left:
        parts.append(beside(due.filter(pa.array(found < 0)), None, spec.join, schema))
    of_left = SideChanges(
        left.new.rows.filter(pa.array(~is_due)), left.new.hashes[~is_due], old_left, _hashes(old_left, on),
        np.ones(old_left.num_rows, dtype=np.bool_),
    )  # fmt: skip
    is_replaced = _replaced(versions, order, number, watermark_us)
    return Matches((of_left, _of_versions(right, versions, is_replaced, on)), pa.concat_tables(parts))


def _in_order(versions: pa.Table, due: pa.Table, on: tuple[str, ...]) -> tuple[Indices, Indices]:
    """Returns the order of versions by key and time, of equal times the one that came last being last, and a number for
    the key of each version and then of each row that is due: -1 where it is null.
    """
    columns = [pa.concat_arrays([as_array(side.column(name)) for side in (versions, due)]) for name in on]
    _, number = distinct(columns, hash32(columns))
    number = np.where(np.concatenate([has_null(versions, on), has_null(due, on)]), -1, number)
    came = [versions.column(name).to_numpy() for name in reversed(ROW_ID)]
    order: Indices = np.lexsort((*came, until_us(versions), number[: versions.num_rows]))
    return order, number


def _newest_not_younger(
    versions: pa.Table, due: pa.Table, number: Indices, order: Indices, within_us: int | None
) -> Indices:
    """Returns, for each row that is due, the place of the version that it is joined with; -1: there is none. `versions`
    are in `order`.
    """
    n, times, due_us = versions.num_rows, until_us(versions), until_us(due)
    of_version, of_due = number[:n][order], number[n:]
    ranks = np.unique(times)
    width = len(ranks) + 1
    places = of_version * width + np.searchsorted(ranks, times)
    # The last version before the place that a younger one would have.
    at = np.searchsorted(places, of_due * width + np.searchsorted(ranks, due_us, "right")) - 1
    is_there = (at >= 0) & (of_due >= 0)
    safe = np.where(is_there, at, 0)
    if n:
        is_there &= of_version[safe] == of_due
        if within_us is not None:
            is_there &= due_us - times[safe] <= within_us
    found: Indices = np.where(is_there, order[safe] if n else -1, -1)
    return found


def _replaced(versions: pa.Table, order: Indices, number: Indices, watermark_us: int) -> Bools:
    """Returns of each version whether the watermark has passed a newer one of its key: no row that comes is joined with it."""
    of_version = number[: versions.num_rows][order]
    passed = (until_us(versions) <= watermark_us - PASSED_US)[order]
    found = np.zeros(versions.num_rows, dtype=np.bool_)
    # In order of time, so what follows a version that was passed tells: a version of its key that was passed, too.
    found[order[:-1]] = (of_version[1:] == of_version[:-1]) & passed[1:]
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
