"""Which layers of a trace may be merged: durable, sealed, and contiguous from where a timeline began to write them.

Unsealed layers are never merged: the manifest still has to name them by their digest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from nosync.lsm.compaction.policy import Chain
from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Time
from nosync.lsm.trace.cover import choose_cover, overlaps


def candidates(
    trace: TraceId,
    durable: Iterable[Description],
    origins: Sequence[Time],
    sealed_until: Time,
    frontier: Callable[[Time, Time], Time],
    *,
    first_origin: Time | None,
    is_input: bool,
) -> list[Chain]:
    """Returns the chains of a trace that may be merged.

    `origins`: where its stretches begin, in order. `frontier(origin, reached)`: up to where the history of a stretch
    may be compacted. `first_origin`: where the first layer begins in which values of its keys may be. `is_input`: what
    is oldest may have been released.
    """
    # Rounds of a loop are about to be dropped: the layer of their epoch stands for all of them.
    sealed = [d for d in durable if d.upper <= sealed_until and not d.is_of_rounds]
    chains = []
    for origin, end in itertools.pairwise([*origins, END_OF_TIME]):
        within = sorted(d for d in sealed if origin <= d.lower and d.upper <= end)
        begin = max(origin, within[0].lower) if is_input and within else origin
        reached = begin
        for d in within:
            if d.lower <= reached < d.upper:
                reached = d.upper
        cover = choose_cover(trace, within, reached, END_OF_TIME, begin) if reached > begin else []
        # Where another layout, or another timeline, came first, older values of these keys lie in its layers.
        bottom = origin == first_origin
        since = frontier(origin, reached)
        ids = [LayerId(trace, d) for d in cover]
        torn = overlaps(ids)
        # What begins inside the layer before is not merged with it.
        starts = [0, *(n for n, id in enumerate(ids) if id in torn), len(ids)]
        chains += [Chain(ids[low:high], bottom and low == 0, since) for low, high in itertools.pairwise(starts)]
    return chains
