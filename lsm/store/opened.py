"""The stores that this process has open for writing.

Invariants
- A store that nothing refers to any more does not keep its directory for ever: it is closed when that is opened again.
- In a process that was forked since, they only read: the threads, the lock and the catalog are the parent's.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Protocol, TypeVar

from nosync.lsm.node.api import StoreBackend
from nosync.lsm.trace.directory import LayerDirectory


class Writer(Protocol):
    """Is a store, as far as it is known here."""

    directory: LayerDirectory

    @property
    def node(self) -> StoreBackend:
        """Returns what the store closes when it is closed."""

    def only_read(self, parent: int) -> None:
        """From now on this is a child's copy of a store of that process."""


W = TypeVar("W", bound=Writer)
_opened: dict[int, tuple[weakref.ref[Writer], StoreBackend, Path]] = {}
"""By the id of the node."""


def note_opened(store: W) -> W:
    """Remembers a store until `note_closed`, and returns it."""
    _opened[id(store.node)] = weakref.ref(store), store.node, store.directory.root
    return store


def note_closed(node: StoreBackend) -> None:
    """Forgets the store of a node."""
    _opened.pop(id(node), None)


class Abandoned(Protocol):
    """Is a node in this process."""

    def abandon(self) -> None:
        """Gives the directory back without making anything durable."""


def abandon(node: Abandoned) -> None:
    """Does to a store what the death of its process does, and forgets it."""
    _opened.pop(id(node), None)
    node.abandon()


def close_lost(root: Path) -> bool:
    """Closes the store of a directory if nothing refers to it. Returns whether there was one. Raises as closing does."""
    here = [(store, node) for store, node, path in list(_opened.values()) if _is_same(path, root)]
    if not here:
        return False
    gc.collect()  # a job and its store may refer to each other
    lost = [node for store, node in here if store() is None]
    for node in lost:
        note_closed(node)
        node.close()
    return bool(lost)


def _is_same(path: Path, root: Path) -> bool:
    try:
        return path.samefile(root)
    except OSError:
        return False


def _only_read_in_child() -> None:
    for reference, _, _ in _opened.values():
        store = reference()
        if store is not None:
            store.only_read(os.getppid())


os.register_at_fork(after_in_child=_only_read_in_child)
