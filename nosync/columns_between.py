"""The columns that go to tasks and back beside those of users, who therefore cannot have any of these names."""

from __future__ import annotations

TAG_COLUMN = "_tag"
REPORT_COLUMN = "_report"
SIDE_COLUMN = "_side"
HASH64_COLUMN = "_hash64"
MATCHED_COLUMN = "_matched"
COLUMNS_BETWEEN = frozenset({TAG_COLUMN, REPORT_COLUMN, SIDE_COLUMN, HASH64_COLUMN, MATCHED_COLUMN})
