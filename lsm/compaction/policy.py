"""Which layers of a trace to merge next. Pure: sizes and time ranges in, a choice out.

Layers have levels by their rows, as in an LSM tree. So many of one level with nothing larger after them become one, and
what `since` has made stale is merged into the oldest layer once it is a quarter of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nosync.lsm.model.layer import Description, LayerId
from nosync.lsm.model.timestamp import Time

FANOUT = 4
LOG_FANOUT = 16
"""Nobody looks keys up in all layers of a log, so more of them may lie side by side: rows are written again half as
often.
"""
_SMALLEST_LEVEL_ROWS = 1024
_STALE_SHARE = 0.25


@dataclass(frozen=True)
class Candidate:
    """A layer of a trace as the policy sees it."""

    rows: int
    description: Description
    has_key: bool = True


def level_of(rows: int, *, has_key: bool = True) -> int:
    """Returns a layer's level: 0 below 1024 rows, then one more for each factor of FANOUT, of logs of LOG_FANOUT."""
    if rows < _SMALLEST_LEVEL_ROWS:
        return 0
    return int(math.log(rows / _SMALLEST_LEVEL_ROWS, FANOUT if has_key else LOG_FANOUT)) + 1


def _level(layer: Candidate) -> int:
    return level_of(layer.rows, has_key=layer.has_key)


def choose_merge(trace: Sequence[Candidate], since: Time, *, taken: int = 0) -> tuple[int, int] | None:
    """Returns which layers `[i, j)` of a contiguous trace, oldest first, to merge next; None when it is in shape.

    `taken`: so many of the oldest are being merged already, and left alone.

    Two rules. *Geometric levels*: FANOUT layers of one level (LOG_FANOUT of a log), with nothing larger after them,
    become one, together with older ones that are smaller than what comes of it; so a trace of n rows has at most
    (FANOUT - 1) layers at each of O(log n) levels. *Stale rows*: when the layers above the oldest that `since` has
    passed hold more than a quarter of its rows, they are merged into it, so that superseded rows do not take more than
    about that share of the space.
    """
    # A small layer with a larger one after it counts as one of that level: it waits for the same merge.
    fanout = FANOUT if not trace or trace[0].has_key else LOG_FANOUT
    levels = [_level(layer) for layer in trace]
    levels = list(itertools.accumulate(reversed(levels), max))[::-1]
    levels[:taken] = []
    for level in sorted(set(levels)):
        if levels.count(level) >= fanout:
            first = taken + levels.index(level)
            total = sum(layer.rows for layer in trace[first:])
            # Many may have waited: they outgrow what is below.
            while first > taken and _level(trace[first - 1]) < level_of(total, has_key=trace[0].has_key):
                first -= 1
                total += trace[first].rows
            return first, len(trace)
    if not taken and len(trace) > 1 and trace[0].has_key:
        passed = next((i for i in range(1, len(trace)) if trace[i].description.upper > since + 1), len(trace))
        if sum(layer.rows for layer in trace[1:passed]) > _STALE_SHARE * trace[0].rows:
            return 0, passed
    return None


def is_behind(trace: Sequence[Candidate]) -> bool:
    """Returns whether there are far more layers than merging leaves: so many that reading feels it."""
    fanout = FANOUT if not trace or trace[0].has_key else LOG_FANOUT
    levels = {_level(layer) for layer in trace}
    return len(trace) > (fanout - 1) * len(levels) + 2 * FANOUT**2


@dataclass(frozen=True)
class Chain:
    """Contiguous layers of one trace, oldest first. `bottom`: no older value of their keys lies anywhere else."""

    ids: list[LayerId]
    bottom: bool
    since: Time
    """The compaction frontier that a merge of them may use."""

    def after(self, is_left_out: Callable[[LayerId], bool]) -> Chain:
        """Returns the layers that come after the last one that is left out."""
        begin = next((i for i in range(len(self.ids), 0, -1) if is_left_out(self.ids[i - 1])), 0)
        return self if begin == 0 else Chain(self.ids[begin:], False, self.since)
