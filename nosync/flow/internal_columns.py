"""The columns that go to tasks and back beside those of users, who therefore cannot have any of these names."""

from __future__ import annotations

from nosync.lsm.columnar.columns import (
    END_AT_COLUMN,
    RESERVED,
    START_AT_COLUMN,
    is_internal,
)

TAG_COLUMN = "_tag"
REPORT_COLUMN = "_report"
SIDE_COLUMN = "_side"
HASH64_COLUMN = "_hash64"
"""Spark's hash of a row's key. A source's rows have that of all columns."""
MATCHED_COLUMN = "_matched"
COLUMNS_BETWEEN = frozenset({TAG_COLUMN, REPORT_COLUMN, SIDE_COLUMN, HASH64_COLUMN, MATCHED_COLUMN})
TOUCHED_COLUMN = "__touched"
"""The epoch of each key's last change. The state of an update with a time to live has it."""
COUNT, LIVE = "__n", "__live"
"""The number of a row's derivations, and whether the row is in the set. The variable of a loop has them."""


def is_kept(name: str) -> bool:
    """Returns whether a name is kept for nosync, so that no stage can add a column of that name."""
    return name.startswith("_") and name not in (START_AT_COLUMN, END_AT_COLUMN)


def is_ours(name: str) -> bool:
    """Returns whether columns of users cannot have a name, which Spark may take for another one in upper case."""
    return name.lower() in RESERVED | COLUMNS_BETWEEN or is_internal(name)
