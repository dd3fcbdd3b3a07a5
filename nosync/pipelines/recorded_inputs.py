"""What a store has of a project's inputs, which says by which names their rows go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from nosync.job.branch_checks import added_columns, recorded_schema
from nosync.lsm.errors import HoleError, SchemaError
from nosync.lsm.store.store import Store

ROW_ID = "row_id"
"""The key of a table's rows: what they have in their columns, and which of equal rows it is. See `row_id_beside`."""


@dataclass(frozen=True)
class Recorded:
    """The key and the columns that a stage has, or had, in a store."""

    key: tuple[str, ...]
    columns: pa.Schema


def recorded_stages(store: Store) -> Mapping[str, Recorded]:
    """Returns the stages that the main line of a store has, and those that it had."""
    found = {name: recorded_stage(store, name) for name in store.node.histories()}
    return {name: one for name, one in found.items() if one is not None}


def recorded_stage(store: Store, name: str) -> Recorded | None:
    """Returns a stage of the main line; None for one that it never had, or of which nothing is left to go on from."""
    spans = store.node.timelines.history(name)
    if not spans:
        return None
    try:
        return Recorded(*recorded_schema(spans[-1].trace(name, 0), store.directory))
    except HoleError:
        return None


def name_going_on(base: str, columns: pa.Schema, recorded: Mapping[str, Recorded]) -> str:
    """Returns the name by which a table of these columns, of which the first is its key, is recorded: `base`, or with a
    number where what has that name has other columns.

    Rows that are recorded stay what they are, so a table that lost a column, or has another type in one, begins anew under
    another name. The number is the same in each run, for it follows from what is recorded.
    """
    name, number = base, 1
    while (after := f"{base}-{number + 1}") in recorded:
        name, number = after, number + 1
    had = recorded.get(name)
    return name if had is None or _goes_on(name, columns, had) else after


def row_id_beside(columns: Iterable[str]) -> str:
    """Returns the name of the key of a table that has these columns: one that none of them has, in whatever case."""
    taken, name = {column.lower() for column in columns}, ROW_ID
    while name in taken:
        name += "_"
    return name


def is_table(one: Recorded | None) -> bool:
    """Returns whether an input was read as a table."""
    return one is not None and one.key == (row_id_beside(name for name in one.columns.names if name not in one.key),)


def _goes_on(name: str, columns: pa.Schema, had: Recorded) -> bool:
    try:
        added_columns(name, had.columns, columns)
    except SchemaError:
        return False
    return is_table(had) and had.key == (columns.names[0],)
