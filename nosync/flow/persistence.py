"""Persistence levels: how well a stage's layers are kept, as the number of durable copies that the safe point waits
for.

| level | meaning | a crash costs | |---|---|---| | `none` | not recorded: computed again from its input whenever it is
needed (stateless stages only) | nothing but time | | `memory` | published, not waited for | recomputation of what the
machine had not written yet | | `disk` | durable on this node (fsync, read back, in the catalog) before the safe point
passes | nothing, unless it is lost | | `replicated(k)` | durable on k nodes before the safe point passes | nothing,
unless k nodes are lost |
"""

from __future__ import annotations

import re
from typing import NewType

from nosync.lsm.errors import FlowError

Level = NewType("Level", int)
"""Durable copies required; -1: not recorded."""

NONE, MEMORY, DISK = Level(-1), Level(0), Level(1)
MAX_COPIES = 9
_NAMES = {"none": NONE, "memory": MEMORY, "disk": DISK}
_REPLICATED = re.compile(r"replicated\((\d+)\)\Z")


def replicated(copies: int) -> str:
    """Returns the level of `copies` durable copies on different nodes, this one included, for `persist=`."""
    return f"replicated({copies})"


def parse_level(text: str, whose: str) -> Level:
    """Raises FlowError for anything but the names of levels."""
    if text in _NAMES:
        return _NAMES[text]
    match = _REPLICATED.match(text) if isinstance(text, str) else None
    if match and 2 <= int(match[1]) <= MAX_COPIES:
        return Level(int(match[1]))
    raise FlowError(
        f"{whose}: persist={text!r} is not a level: use 'none', 'memory', 'disk' or nosync.replicated(k) "
        f"with k of 2 to {MAX_COPIES}"
    )


def show_level(level: Level) -> str:
    return {v: k for k, v in _NAMES.items()}.get(level) or replicated(level)
