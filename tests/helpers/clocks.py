"""Wall clocks that stand where a test sets them."""

from __future__ import annotations

from nosync.lsm.platform.env import Env

SECOND_US = 1_000_000
NOON_US = 1_783_166_400 * SECOND_US
"""2026-07-04T12:00:00Z."""


class Clock(Env):
    """A host whose wall clock says `now_us`, until a test says otherwise."""

    def __init__(self, now_us: int = NOON_US) -> None:
        self.now_us = now_us

    def utc_us(self) -> int:
        return self.now_us
