"""The copies of one store in object stores, as the node knows them: it ends them when it ends, and never waits else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nosync.lsm.errors import RemoteError
from nosync.lsm.node.api import RemoteCopies


def push_all(all_copies: Sequence[RemoteCopies], root: Path, timeout_s: float) -> None:
    """Returns when what is durable is in each of the object stores. Raises RemoteError where there are none, or it takes
    longer.
    """
    if not all_copies:
        raise RemoteError(f"{root} is opened without remote=, so there is nowhere to copy it to")
    for copies in all_copies:
        if not copies.push(timeout_s):
            status = copies.status()
            why = status.problem or f"{status.waiting_bytes:,} bytes wait"
            raise RemoteError(f"{status.url}: not all is there after {timeout_s} s: {why}")


class Remotes:
    """Holds what makes copies in this process; mostly there is none, or one."""

    def __init__(self) -> None:
        self._all: list[RemoteCopies] = []

    def attach(self, copies: RemoteCopies) -> None:
        """Copies are made for as long as the node runs."""
        self._all.append(copies)

    def __iter__(self) -> Iterator[RemoteCopies]:
        return iter(tuple(self._all))

    def safe_point(self) -> int:
        """Returns the newest epoch of main that is remotely safe everywhere; -1 where none is, or there are no copies."""
        found = [copies.status().safe_point for copies in self._all]
        return min((-1 if t is None else t for t in found), default=-1)

    def finish(self) -> None:
        """Puts what is left, for as long as settings say."""
        for copies in self._all:
            copies.finish()

    def abandon(self) -> None:
        """Ends all at once. Those that ended are left alone."""
        for copies in self._all:
            copies.abandon()
        self._all.clear()
