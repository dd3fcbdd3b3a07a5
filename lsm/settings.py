"""Settings of a store, apart from the components that use them."""

from __future__ import annotations

from dataclasses import dataclass

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.layers.merging import BLOCK_ROWS

ARCHIVE_EPOCHS = 1000


@dataclass(frozen=True)
class StoreSettings:
    """Says how a node keeps one data directory. It is frozen; every field states unit, default, and what it costs."""

    retain: int | None = None
    """How many sealed epochs before the newest stay readable. None: all of them, and space grows with history.
    With `retain=n`, `since` follows the newest sealed epoch at a distance of n; pins hold it back."""

    merge: bool = True
    """Whether to merge in the background. Off: reads slow down with the number of layers."""

    block_rows: int = BLOCK_ROWS
    """Most rows in one block of a merged layer, and so the work of one merge step (about 10 ms)."""

    merge_process_rows: int = 1 << 18
    """Merges of at least this many rows run in a process of their own, which takes a fifth of a second to start;
    smaller ones in a thread of this one, where appends may have to wait a few milliseconds for the interpreter lock.
    """

    scan_interval_s: float = 1.0
    """How often the node lists the directory for layers that other processes published and nobody announced.
    A crash of the machine can lose what was published since the last scan; it is then recomputed. Directories whose
    time of modification stands still are listed once a minute only, for file systems that do not keep it."""

    grace_s: float = 10.0
    """How long a merged-away file stays for processes that have listed but not yet opened it."""

    retry_s: float = 1.0
    """Pause before a layer whose fsync failed is written again. Meanwhile the safe point stands still."""

    archive_epochs: int | None = ARCHIVE_EPOCHS
    """Manifests of this many old epochs share a file, so that opening a store does not read one for each epoch that it
    ever had. None: each epoch keeps a file of its own. Give all nodes of a store the same.
    """

    background: bool = True
    """Whether threads do the node's work. Off (tests): only sync(), compact() and close() do."""

    def __post_init__(self) -> None:
        if self.retain is not None and (not isinstance(self.retain, int) or self.retain < 0):
            raise InvalidInputError(f"retain is {self.retain!r}, expected a number of epochs >= 0, or None to keep all")
        for name in ("block_rows", "merge_process_rows", "archive_epochs"):
            value = getattr(self, name)
            optional = name == "archive_epochs" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidInputError(f"{name} is {value!r}, expected a whole number")
        if self.block_rows < 1:
            raise InvalidInputError(f"block_rows is {self.block_rows}, expected at least 1")
        if self.merge_process_rows < 0:
            raise InvalidInputError(f"merge_process_rows is {self.merge_process_rows}, expected at least 0")
        if self.archive_epochs is not None and self.archive_epochs < 2:
            raise InvalidInputError(
                f"archive_epochs is {self.archive_epochs}, expected at least 2, or None for no archives"
            )
        for name in ("scan_interval_s", "grace_s", "retry_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidInputError(f"{name} is {value!r}, expected seconds >= 0")
