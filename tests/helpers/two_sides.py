"""What comes by two streams, as oracles of joins by event time keep it: all rows that were in time, and the watermark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Given = tuple[Any, int | None]
"""A key, and minutes or none."""
Row = tuple[Any, int, int]
"""A key, minutes, and a number: a hundred for each epoch, and the place in it."""


class TwoSides:
    """Rows of the left side and of the right one. `delays`: how far the watermark of each is behind, in minutes."""

    def __init__(self, delays: tuple[int, int], policy: str = "min") -> None:
        """`policy`: "max" goes by the faster side, and does not wait for the other."""
        self._delays, self._is_fastest = delays, policy == "max"
        self._newest: list[int | None] = [None, None]
        self.in_time: tuple[list[Row], list[Row]] = ([], [])
        self.late = [0, 0]
        self.watermark: int | None = None
        """The watermark in force, of all epochs before."""

    def take(self, t: int, given: tuple[Sequence[Given], Sequence[Given]]) -> None:
        """Takes the rows of epoch `t`. They are late by the watermark of the epoch before."""
        late_by = self.watermark
        behind = [n - d for n, d in zip(self._newest, self._delays, strict=True) if n is not None]
        if len(behind) == 2 or (behind and self._is_fastest):
            of_both = max(behind) if self._is_fastest else min(behind)
            self.watermark = of_both if late_by is None else max(of_both, late_by)
        for i, rows in enumerate(given):
            for n, (k, minute) in enumerate(rows):
                if minute is None or (late_by is not None and minute <= late_by):
                    self.late[i] += 1
                else:
                    self.in_time[i].append((k, minute, 100 * t + n))
            self._newest[i] = max((m for m in (self._newest[i], *(m for _, m in rows)) if m is not None), default=None)
