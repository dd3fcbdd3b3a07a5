"""What a node does with its directory whenever something was published, and when somebody waits for it."""

from __future__ import annotations

from nosync.lsm.node.discovery import Discovery
from nosync.lsm.node.durability import Durability
from nosync.lsm.node.epochs import Epochs
from nosync.lsm.node.learning import Learning
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.rechecks import Rechecks


class Upkeep:
    """Takes the parts of one node through their work in order."""

    def __init__(
        self,
        ownership: Ownership,
        discovery: Discovery,
        rechecks: Rechecks,
        epochs: Epochs,
        durability: Durability,
        learning: Learning,
    ) -> None:
        self._ownership, self._discovery, self._rechecks, self._epochs = ownership, discovery, rechecks, epochs
        self._durability, self._learning = durability, learning

    def drain(self, *, again: bool = False) -> None:
        """Makes durable what waits, and learns from it. `again`: also what failed just now, and would be tried later."""
        self._ownership.check()
        self._rechecks.look_at_suspects()
        self._epochs.write_times()
        self._durability.drain(again=again)
        self._learning.learn_noted()

    def make_durable_now(self) -> None:
        """Looks at what is on disk and makes it durable where that succeeds; what is torn goes to quarantine."""
        self._discovery.scan()
        self.drain()

    def sync(self) -> None:
        """Makes everything durable that was published before the call. Raises StorageError when that fails."""
        self._discovery.scan()
        waiting = self._durability.waiting()
        self.drain(again=True)
        self._durability.check_durable(waiting)
