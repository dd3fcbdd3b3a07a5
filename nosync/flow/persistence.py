"""Persistence levels: how well a stage's layers are kept, as the number of durable copies that the safe point waits for.

- `none`: not recorded, and computed again from its input whenever it is needed (stateless stages only). A crash costs
  nothing but time.
- `memory`: published, and not waited for. A crash costs computing again what the machine had not written yet.
- `disk`: durable on this node (fsync, read back, in the catalog) before the safe point passes. A crash costs nothing.
- `replicated(k)`: durable on k nodes before the safe point passes. Nothing is lost unless k nodes are.
- `remote()`, `replicated(k, remote=True)`: as `disk` and as `replicated(k)`, and inputs are released only when the object
  store has the epoch, too. Nothing is lost unless the bucket is lost as well.
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
_NAME_OF_REMOTE, _REMOTE = "remote", "+remote"
_REPLICATED = re.compile(r"replicated\((\d+)\)\Z")


def replicated(copies: int, *, remote: bool = False) -> str:
    """Returns the level of `copies` durable copies on different nodes, this one included, for `persist=`.

    `remote`: what was computed also has to be in the store's object stores (`remote=`) before inputs are released.
    """
    return f"replicated({copies}){_REMOTE if remote else ''}"


def remote() -> str:
    """Returns the level of what is durable on this node, for `persist=`; inputs are released when it is in the store's
    object stores, too.
    """
    return _NAME_OF_REMOTE


def asks_for_remote(text: str | None) -> bool:
    """Returns whether a level asks for copies in an object store."""
    return isinstance(text, str) and (text == _NAME_OF_REMOTE or text.endswith(_REMOTE))


def parse_level(text: str, whose: str) -> Level:
    """Raises FlowError for anything but the names of levels."""
    if text in _NAMES:
        return _NAMES[text]
    if text == _NAME_OF_REMOTE:
        return DISK
    match = _REPLICATED.match(text.removesuffix(_REMOTE)) if isinstance(text, str) else None
    if match and 2 <= int(match[1]) <= MAX_COPIES:
        return Level(int(match[1]))
    raise FlowError(
        f"{whose}: persist={text!r} is not a level: use 'none', 'memory', 'disk', nosync.remote() or "
        f"nosync.replicated(k) with k of 2 to {MAX_COPIES}"
    )


def show_level(level: Level) -> str:
    return {v: k for k, v in _NAMES.items()}.get(level) or replicated(level)
