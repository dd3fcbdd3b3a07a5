"""Finds the epochs that the rows of a backfill come to. Pure.

Epochs follow one another: those between that have no rows run without any, as weeks in which nothing happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from nosync.lsm.errors import InvalidInputError, OutOfOrderError
from nosync.lsm.manifests.manifest import Manifest

MAX_GAP = 60
"""How many epochs in a row may have no rows. Where there are more, the number may not count epochs: 20130131, 20130201.
"""

Counts = Mapping[int, Mapping[str, int]]
"""The number of rows by epoch, and by source."""


def epochs_to_run(
    counts: Counts,
    sources: Collection[str],
    manifest_of: Callable[[int], Manifest | None],
    last: int | None,
    max_gap: int,
) -> range:
    """Returns the epochs from the next one to the last that has rows. `last`: the newest sealed one.

    Raises OutOfOrderError where rows are older than the store, InvalidInputError where a sealed epoch is given another
    number of rows than it has, and where more than `max_gap` epochs, one after the other, have no rows.
    """
    if not counts:
        raise InvalidInputError("no source has any row: there is nothing to backfill")
    epochs = sorted(counts)
    first = epochs[0] if last is None else last + 1
    for t in range(epochs[0], min(first, epochs[-1] + 1)):
        manifest = manifest_of(t)
        if manifest is None:
            raise OutOfOrderError(
                f"rows of epoch {t} are given, which is before the store's first; the next one is {first}"
            )
        _check_same(t, counts.get(t, {}), manifest, sources)
    at = first - 1
    for t in epochs:
        if t - at > max_gap + 1:
            raise InvalidInputError(
                f"no source has rows of the epochs {at + 1:,} to {t - 1:,}, and each would run: epochs follow one another, so "
                f"count them from a beginning, such as datediff(day, '2013-01-01') and not 20130101; or raise max_gap={max_gap}"
            )
        at = max(at, t)
    return range(first, at + 1)


def check_counted(t: int, counted: int, ran: int) -> None:
    """Raises InvalidInputError where an epoch ran with other rows than were counted."""
    if ran != counted:
        raise InvalidInputError(
            f"epoch {t} had {counted:,} rows when they were counted and {ran:,} when it ran: a DataFrame that was given has "
            "other rows each time it is read. Write it out and give what was written, after rewind() to the last sealed epoch "
            "(-1 where there is none): some of its rows are recorded already"
        )


def _check_same(t: int, given: Mapping[str, int], manifest: Manifest, sources: Collection[str]) -> None:
    recorded: dict[str, int] = {}
    for entry in manifest.entries:
        stage = entry.id.trace.stage
        recorded[stage] = recorded.get(stage, 0) + entry.rows
    for source in sources:
        rows = given.get(source, 0)
        if rows != recorded.get(source, 0):
            raise InvalidInputError(
                f"source {source}: epoch {t} is sealed with {recorded.get(source, 0):,} rows and is given {rows:,}: a sealed "
                "epoch stays as it is. Give rows that came late to a later epoch, or rewind() to before it"
            )
