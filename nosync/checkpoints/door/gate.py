"""Strict mode: `offsets/n` is answered when it is on enough nodes, and with it the commit of the batch before.

The gate is a state machine without files or waiting: it is told when an answer is to be held, and is asked
whether it may be given now.

Invariants
- An answer that is held in state STRICT is given when its files are on `nodes` nodes, or when patience is over.
- When patience is over the gate is DEGRADED, and says so. Answers are not held until what it gave up on is there, or what
  is newest.
- The gate holds nothing while it is CATCHING_UP: before it is STRICT, all but the batch that runs is on `nodes` nodes.
  So what was there before the gate does not use up the patience of the first answer.

    CATCHING_UP --the batch before is there--> STRICT --patience is over--> DEGRADED
         ^----------------what was given up on, or the newest, is there--------'
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

log = logging.getLogger("nosync")

Copies = Callable[[Sequence[str]], int]
"""Returns the number of nodes that have a file durably, of the file that is on the fewest."""

PATIENCE_S = 20.0
"""Hadoop's client waits for 60 seconds, and its query would fail then."""


class GateState(Enum):
    """Says whether answers are held."""

    CATCHING_UP = "catching up"
    STRICT = "strict"
    DEGRADED = "degraded"


@dataclass(frozen=True)
class Held:
    """An answer that is held. `until_s`: when patience is over; None where it is not held at all."""

    needs: tuple[str, ...]
    until_s: float | None


class Gate:
    """The gate of one checkpoint. Several threads may use it."""

    def __init__(
        self,
        name: str,
        copies: Copies,
        now_s: Callable[[], float],
        *,
        nodes: int = 1,
        patience_s: float = PATIENCE_S,
        before: Sequence[str] = (),
    ) -> None:
        """`before`: the files of the newest batch that was there before the gate."""
        self._name, self._copies, self._now_s = name, copies, now_s
        self._nodes, self._patience_s = nodes, patience_s
        self._state = GateState.CATCHING_UP
        self._newest = tuple(before)
        self._given_up: tuple[str, ...] = ()
        self._lock = threading.RLock()

    @property
    def state(self) -> GateState:
        """The state as of now."""
        with self._lock:
            # What was given up on may be removed before it is there: then what is newer stands for it.
            if self._state is GateState.DEGRADED and (self._are_there(self._given_up) or self._are_there(self._newest)):
                self._change(GateState.CATCHING_UP, "the nodes that were missing are back")
            if self._state is GateState.CATCHING_UP and self._are_there(self._newest):
                self._change(GateState.STRICT, f"all before is on {self._nodes} nodes")
            return self._state

    def hold(self, needs: Sequence[str]) -> Held:
        """Holds an answer until the files that it needs are on enough nodes."""
        with self._lock:
            is_strict = self.state is GateState.STRICT
            self._newest = tuple(needs)
        return Held(tuple(needs), self._now_s() + self._patience_s if is_strict else None)

    def may_answer(self, held: Held) -> bool:
        """Returns whether an answer may be given now."""
        if held.until_s is None or self._state is not GateState.STRICT or self._are_there(held.needs):
            return True
        if self._now_s() < held.until_s:
            return False
        with self._lock:
            self._given_up = held.needs
            self._change(GateState.DEGRADED, f"{', '.join(held.needs)} did not get to {self._nodes} nodes in time")
        return True

    def _are_there(self, needs: Sequence[str]) -> bool:
        return not needs or self._copies(needs) >= self._nodes

    def _change(self, state: GateState, why: str) -> None:
        self._state = state
        level = logging.WARNING if state is GateState.DEGRADED else logging.INFO
        log.log(level, "checkpoint %s: strict mode is %s: %s", self._name, state.value, why)
