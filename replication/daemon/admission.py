"""Who may ask a daemon for what, and how many such calls it answers at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from nosync.lsm.errors import BusyError, NosyncError, ReplicationError
from nosync.replication.daemon.config import DaemonConfig
from nosync.replication.daemon.members import Members
from nosync.replication.transport.calls import MEMBERS, OWNER, READERS, Call, Caller
from nosync.replication.transport.channel import PLACE_KEY

Slots = Mapping[str, threading.BoundedSemaphore]
"""So many calls of a kind there may be at once, by the caller's role."""


def slots(most: int) -> Slots:
    """Returns as many for each role."""
    return {role: threading.BoundedSemaphore(most) for role in (READERS, MEMBERS, OWNER)}


class Admission:
    """Lets callers in. `place`: what tells this daemon's directory from others on the host."""

    def __init__(self, config: DaemonConfig, members: Members, place: str) -> None:
        self._config, self._members, self._place = config, members, place

    @contextlib.contextmanager
    def answering(self, call: Call, who: str, slots: Slots | None = None) -> Iterator[None]:
        """Answers with an error that the caller can read. `slots`: how many such calls there may be at once, by
        role.
        """
        with contextlib.ExitStack() as taken:
            try:
                self.check(call, who)
                if slots is not None:
                    of_role = slots[self.role_of(call.caller)]
                    if not of_role.acquire(blocking=False):
                        raise BusyError(f"node {self._config.node} answers many such calls at the moment; try again")
                    taken.callback(of_role.release)
                yield
            except NosyncError as error:
                call.fail(error)

    def role_of(self, caller: Caller) -> str:
        """Returns what a caller is to this node. Without TLS nobody knows who calls its address, so whoever does may
        read.
        """
        if caller.is_local or caller.identity == self._config.node:
            return OWNER
        return MEMBERS if caller.identity in self._members.peers else READERS

    def check(self, call: Call, who: str) -> None:
        """Raises ReplicationError where another daemon is meant, or the caller may not ask for this."""
        place = call.metadata(PLACE_KEY)
        if place is not None and place != self._place:
            raise ReplicationError(
                f"the daemon that was there has ended, and node {self._config.node}, with its data in "
                f"{self._config.data.absolute()}, has its address now: start it again with nosync daemon"
            )
        role = self.role_of(call.caller)
        if who == READERS or role in (OWNER, who):
            return
        raise ReplicationError(
            f"{call.caller} may read this store and not change it: ask as the user of node {self._config.node}'s "
            f"daemon, on its host and by its data directory, or with the certificate of node {self._config.node}"
        )
