"""Tables as inputs: rows that are added, changed and deleted by key. What a table holds is an update of its changes.

The rows that an epoch gives a table are recorded in a source of their own, with what each of them is in `change_type`.
The words are those of Delta's change data feed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.joins import distinct
from nosync.kernels.own_function import OwnFunction
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Indices, as_array
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.trace.change_feed import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE

GIVEN_CHANGE_TYPE = "change_type"
"""The column of a table's source that says what a row is. Inputs call it `_change_type`, as Delta does; there, as here, a
row without one is an upsert.
"""
CHANGE_TYPES = (INSERT, UPDATE_BEFORE, UPDATE_AFTER, DELETE)
VERSION = "nosync table 1"
"""It stands for the code below in fingerprints: another one is for other rows of the same changes."""
_IS_NEW, _IS_NAN = "__new", "__nan"


def version_by(sequence_by: str | None, type_: pa.DataType | None) -> str:
    """Returns what stands for the code of a table, given the column that says which row is newer, and its type."""
    has_nan = type_ is not None and pa.types.is_floating(type_)  # versions before took a NaN for the oldest
    return f"{VERSION} by {sequence_by}{' with NaN' if has_nan else ''}"


def source_of(table: str) -> str:
    """Returns the name of the source that has the changes of a table."""
    return f"{table}_changes"


@dataclass(frozen=True)
class NewestRows(OwnFunction):
    """The function of an update that holds a table: the row that each key has after an epoch's changes."""

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    """The columns of the table, the key included."""
    sequence_by: str | None = None
    """The column that says which of two rows of a key is newer."""

    def __call__(self, changes: pa.Table, state: pa.Table) -> pa.Table:
        """Returns the rows of the keys that are there. Raises InvalidInputError for changes that do not say what is to be
        there.
        """
        if not changes.num_rows:
            return state.slice(0, 0)
        kinds = pc.fill_null(changes.column(GIVEN_CHANGE_TYPE), INSERT)
        self._check_kinds(kinds)
        changes = changes.drop_columns([CHANGE_TYPE_COLUMN]).set_column(
            changes.schema.get_field_index(GIVEN_CHANGE_TYPE), GIVEN_CHANGE_TYPE, pc.equal(kinds, DELETE)
        )
        is_before = pc.equal(kinds, UPDATE_BEFORE)
        has_before = pc.any(is_before).as_py()
        if has_before:
            changes = changes.filter(pc.invert(is_before))  # its other half says what is there
        kept = state.slice(0, 0)
        if self.sequence_by is not None:
            chosen = self._newest(changes, state, self.sequence_by)
        else:
            chosen = self._only(changes)
            if has_before:  # a key of which only what it was before is said has no row in `chosen`: its row stays
                _, number = self._keys(chosen, state)
                kept = state.filter(pa.array(~np.isin(number[chosen.num_rows :], number[: chosen.num_rows])))
        there = chosen.filter(pc.invert(chosen.column(GIVEN_CHANGE_TYPE)))
        return pa.concat_tables([there.select(state.column_names).cast(state.schema), kept])

    def _check_kinds(self, kinds: pa.ChunkedArray) -> None:
        unknown = pc.unique(kinds.filter(pc.invert(pc.is_in(kinds, value_set=pa.array(CHANGE_TYPES)))))
        if len(unknown):
            raise InvalidInputError(
                f"table {self.table}: {CHANGE_TYPE_COLUMN} is {unknown[0].as_py()!r}, expected "
                f"{', '.join(map(repr, CHANGE_TYPES))}, or no such column where rows are only added or changed"
            )

    def _only(self, changes: pa.Table) -> pa.Table:
        """Returns the change of each key. Raises InvalidInputError where two say something else."""
        first, number = self._keys(changes)
        repeated = np.flatnonzero(np.bincount(number)[number] > 1) if len(first) < changes.num_rows else number[:0]
        contents = content_hash(changes.take(pa.array(repeated)))
        other = repeated[contents != contents[np.searchsorted(repeated, first[number[repeated]])]]
        if len(other):
            row = changes.slice(int(other[0]), 1).select(list(self.key)).to_pylist()[0]
            raise InvalidInputError(
                f"table {self.table}: an epoch has several changes of {row}, and nothing says which is the newest: give each "
                "key once in an epoch, or name the column that says it with sequence_by="
            )
        return changes.take(pa.array(first))

    def _newest(self, changes: pa.Table, state: pa.Table, by: str) -> pa.Table:
        """Returns the newest of the rows of each key, that of the state included; of equally new ones the state's, and else
        a deletion, and else the one that comes first in canonical order.
        """
        if changes.column(by).null_count:
            raise InvalidInputError(
                f"table {self.table}: {by!r} is null in a change, and it says which row is the newest"
            )
        changes = changes.append_column(_IS_NEW, pa.repeat(True, changes.num_rows))
        old = state.append_column(GIVEN_CHANGE_TYPE, pa.repeat(False, state.num_rows))
        old = old.append_column(_IS_NEW, pa.repeat(False, state.num_rows)).select(changes.column_names)
        rows = pa.concat_tables([old.cast(changes.schema), changes])
        order = [(by, "descending"), (_IS_NEW, "ascending"), (GIVEN_CHANGE_TYPE, "descending")]
        if pa.types.is_floating(rows.schema.field(by).type):  # a NaN is the largest, as in Spark; Arrow puts it last
            rows, order = rows.append_column(_IS_NAN, pc.is_nan(rows.column(by))), [(_IS_NAN, "descending"), *order]
        rows = rows.take(pc.sort_indices(rows, order))
        _, number = self._keys(rows)
        return rows.take(pa.array(np.unique(number, return_index=True)[1]))

    def _keys(self, *tables: pa.Table) -> tuple[Indices, Indices]:
        """Returns the first row of each key, and for each row the number of its key. A null is equal to a null."""
        keys = pa.concat_tables([table.select(list(self.key)) for table in tables])
        columns = [as_array(column) for column in keys.columns]
        return distinct(columns, hash32(columns))
