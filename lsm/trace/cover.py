"""Which layers of a trace serve a read: the fewest that are contiguous, or the first gap by its name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nosync.lsm.errors import CompactedError, HoleError, NotAvailableError
from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.model.timestamp import Time, epoch_of, show, show_as_of


def choose_cover(
    trace: TraceId, available: Sequence[Description], until: Time, as_of: Time, origin: Time | None = None
) -> list[Description]:
    """Returns the fewest contiguous layers, oldest first, that cover the trace from its beginning to `until`
    (exclusive).

    Only layers whose `since` is at most `as_of` can serve. Merged layers may overlap the layers they were made of; any
    contiguous choice gives the same state. Where none is contiguous, as after nodes that merged differently filled each
    other's gaps, layers that overlap in part serve too: each adds what comes after the end of the one before
    (`overlaps`). The trace begins at `origin`; None: at the smallest `lower` available. Raises HoleError naming the
    first gap, CompactedError if only too far compacted layers bridge it, and NotAvailableError if nothing reaches
    `until` yet.
    """
    if origin is None:
        origin = min((d.lower for d in available), default=Time(0))
    if until <= origin:
        return []
    steps_to_end: dict[Time, int] = {}
    choice: dict[Time, Description] = {}
    usable = sorted((d for d in available if d.since <= max(as_of, 0)), key=lambda d: (d.lower, d.since), reverse=True)
    for d in usable:
        steps = 0 if d.upper >= until else steps_to_end.get(d.upper)
        if steps is not None and (d.lower not in choice or steps + 1 < steps_to_end[d.lower]):
            steps_to_end[d.lower], choice[d.lower] = steps + 1, d
    if origin not in choice:
        overlapping = _overlapping_cover(usable, until, origin)
        if not overlapping:
            _raise_gap(trace, available, usable, origin, until, as_of)
        return overlapping
    cover = [choice[origin]]
    while cover[-1].upper < until:
        cover.append(choice[cover[-1].upper])
    return cover


def is_merged_away(trace: TraceId, available: Sequence[Description], until: Time, as_of: Time) -> bool:
    """Returns whether layers cover a trace up to `until`, and only those that were merged further than `as_of` do."""
    try:
        choose_cover(trace, available, until, as_of)
    except CompactedError:
        return True
    except (HoleError, NotAvailableError):
        return False
    return False


def _overlapping_cover(usable: Sequence[Description], until: Time, origin: Time) -> list[Description]:
    """Returns layers of which each begins in or right after the one before; none where there is a hole."""
    cover: list[Description] = []
    reached = origin
    while reached < until:
        following = [
            d
            for d in usable
            if d.lower <= reached < d.upper and (d.lower > cover[-1].lower if cover else d.lower == origin)
        ]
        if not following:
            return []
        cover.append(max(following, key=lambda d: (d.upper, d.lower)))
        reached = cover[-1].upper
    return cover


def overlaps(cover: Sequence[LayerId]) -> dict[LayerId, Time]:
    """Returns, of layers of one trace, oldest first, those that begin inside the one before, and where that one ends.

    What such a layer holds of that stretch the one before holds as well. For the state that does not matter: the newest
    entry of a key is the same in both. In a change feed, or a log, each entry must count once.
    """
    return {
        b: a.description.upper
        for a, b in itertools.pairwise(cover)
        if a.trace == b.trace and a.description.upper > b.description.lower
    }


def lost_tail(id: TraceId, until: Time, error: NotAvailableError) -> HoleError:
    """Returns the error for a trace that was recorded up to `until` and ends earlier: the rest is lost, and not still
    to come.
    """
    return HoleError(
        f"{id}: its last layers, up to {epoch_of(Time(until - 1))}, are missing ({error}); recover() recomputes them",
        stage=id.stage,
        shard=str(id.shard),
        lower="?",
        upper=show(until),
    )


def _raise_gap(
    trace: TraceId,
    available: Sequence[Description],
    usable: Sequence[Description],
    origin: Time,
    until: Time,
    as_of: Time,
) -> None:
    reached = _reach(usable, origin)
    if _reach(available, origin) > reached:
        raise CompactedError(
            f"{trace}: the state as of {show_as_of(as_of)} was merged away; the oldest exact timestamp is "
            f"{show(max(d.since for d in available))}. Keep more history with retain=, or hold a point with pin()"
        )
    later = [d.lower for d in available if d.lower > reached]
    if not later:
        raise NotAvailableError(
            f"{trace}: recorded up to {epoch_of(Time(reached - 1))}, not up to {epoch_of(Time(until - 1))}"
        )
    raise HoleError(
        f"{trace}: the layers [{show(reached)}, {show(min(later))}) are missing; recover() recomputes them",
        stage=trace.stage,
        shard=str(trace.shard),
        lower=show(reached),
        upper=show(min(later)),
    )


def _reach(descriptions: Sequence[Description], origin: Time) -> Time:
    reached = origin
    for d in sorted(descriptions):
        if d.lower <= reached < d.upper:
            reached = d.upper
    return reached
