"""The kinds of stages that users declare, and words that their declarations share."""

from __future__ import annotations

SOURCE, MAP, FILTER, UNION = "source", "map", "filter", "union"
SELECT, WHERE, STATIC_JOIN = "select", "where", "static_join"
AGGREGATE, UPDATE, DEDUPE, JOIN, WINDOW, LOOP = "aggregate", "update", "dedupe", "join", "window", "loop"
PER_KEY = "per_key"
IN_JVM = frozenset({SELECT, WHERE, STATIC_JOIN})
STATELESS = frozenset({MAP, FILTER, UNION}) | IN_JVM
FORGET, RETRACT = "forget", "retract"
"""What becomes of results when a row expires that they were made of: they stay, or are taken back."""
CHANGES, FINAL = "changes", "final"
"""What a window gives: its results each time they change, or each once when it is closed."""
PART_SEPARATOR = "__"
"""Stages that an operator consists of are named `<stage>__<part>`."""
INNER_PARTS = frozenset({"watermark", "left", "right", "all", "seen", "kept_left", "kept_right", "kept_rows"})
"""The parts that an operator keeps for itself; others hold rows for users: late ones, open windows, outputs."""


def is_shown(stage: str) -> bool:
    """Returns whether a stage is one that users read: one that they declared, or such a part of one."""
    _, _, part = stage.partition(PART_SEPARATOR)
    return part not in INNER_PARTS
