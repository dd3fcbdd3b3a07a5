"""Whether a layer is there: the one answer for planner, tasks, daemons, fetches and status.

A directory lists more than what lasts: files that a merge replaced stay for a grace period, for readers that are about
to open them. Invariants
- A layer is *live* unless a merged layer beside it, which goes back no less, stands for it. Only live layers last.
- A layer is *there* when a listed one covers its time range. What covers it is live, or a live one covers that: so what
  is there now is there after the grace period as well, as long as the node takes back what lost its merged layer
  (`Compactor`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import Time, end_of, epoch_of


def live(listed: Collection[Description], frontier: Time) -> list[Description]:
    """Returns the layers of one trace that no merged one among them replaces.

    `frontier`: the compaction frontier. A merged layer that was compacted further replaces nothing: the others have
    more history.
    """
    merged = [d for d in listed if _is_merged(d) and d.since <= frontier]
    return [d for d in listed if not any(_replaces(m, d) for m in merged)]


def _is_merged(d: Description) -> bool:
    return d.since > 0 or d.upper > end_of(epoch_of(d.lower))


def _replaces(merged: Description, d: Description) -> bool:
    # Of two that stand for each other, as where history was compacted further, the one with more of it stays.
    return merged.covers(d) and not (d.covers(merged) and d <= merged)


def is_there(id: LayerId, listed: Iterable[Description]) -> bool:
    """Returns whether a layer, or a merged one that stands for it, is among the listed ones of its trace."""
    return any(d.covers(id.description) for d in listed)


class Presence:
    """Knows which layers are there, where each trace is listed at most once. Make one for each question: listings grow
    old.
    """

    def __init__(self, listed: Callable[[TraceId], Collection[Description]]) -> None:
        self._list = listed
        self._listed: dict[TraceId, Collection[Description]] = {}

    def listed(self, trace: TraceId) -> Collection[Description]:
        """Returns everything in the trace's directory."""
        if trace not in self._listed:
            self._listed[trace] = self._list(trace)
        return self._listed[trace]

    def has(self, id: LayerId) -> bool:
        """Returns whether a layer, or a merged one that stands for it, is there."""
        return is_there(id, self.listed(id.trace))
