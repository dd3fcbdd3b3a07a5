"""Which epoch a branch had at a time of the wall clock, and when its epochs were sealed.

Invariants
- As of a time is the last epoch that was sealed at or before it, of the timeline that the branch is now. What was
  rewound is on its own branch.
- For this look-up times never go back from one epoch to the next: where a clock was set back, an epoch counts as sealed
  when the newest one before it was. So later epochs are found at later times, whatever clocks did.
"""

from __future__ import annotations

import bisect
import itertools

from nosync.lsm.errors import LostEpochError, NotAvailableError
from nosync.lsm.facts.seal_times import SealTime, SealTimes
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.as_of import shown_time
from nosync.lsm.model.timestamp import Epoch


class EpochTimes:
    """The times of the epochs in one directory."""

    def __init__(self, times: SealTimes) -> None:
        self._times = times

    def read_anew(self, times: SealTimes) -> EpochTimes:
        """Returns the same of other times."""
        return EpochTimes(times)

    def of(self, timelines: Timelines, branch: str, t: int) -> SealTime | None:
        """Returns when an epoch of a branch was sealed, as its file says it; None where that is not known."""
        manifests = timelines.manifests(branch)
        return self._times.of_epoch(manifests.timeline_at(t), t) if t in manifests else None

    def of_branch(self, timelines: Timelines, branch: str) -> dict[Epoch, SealTime]:
        """Returns the times of a branch's sealed epochs, in order, as files say it; those before a fork are of its
        parent.
        """
        last = timelines.last_sealed(branch)
        found: dict[Epoch, SealTime] = {}
        if last is None:
            return found
        for timeline, left_at in timelines.refs.left(timelines.timeline(branch).id).items():
            end = last if left_at is None else min(last, left_at)
            found |= {t: time for t, time in self._times.of_timeline(timeline).items() if t <= end}
        return found

    def epoch_at(self, timelines: Timelines, branch: str, us: int, *, before_first: int | None = None) -> int:
        """Returns the last epoch of a branch that was sealed at or before a time.

        `before_first`: what to return for a time before the first epoch (None: an error). Raises NotAvailableError,
        also where the epochs of then were sealed without a time.
        """
        times, manifests = self.of_branch(timelines, branch), timelines.manifests(branch)
        if times and manifests.last is not None:
            for t in map(Epoch, range(max(times) + 1, manifests.last + 1)):
                # It was sealed just now, or just before a crash: its file says when.
                if (written_us := self._written_us(manifests, t)) is not None:
                    times[t] = SealTime(written_us)
        reached = list(itertools.accumulate((time.sealed_us for time in times.values()), max))
        at, epochs = bisect.bisect_right(reached, us), [*times]
        if at:
            if at < len(epochs) and (lost := epochs[at - 1] + 1) != epochs[at] and lost in manifests:
                raise NotAvailableError(
                    f"branch {branch}, as of {shown_time(us)}: that is epoch {lost - 1} or a later one, for the time of epoch "
                    f"{lost} is lost. Give the number of an epoch"
                )
            return epochs[at - 1]
        if before_first is not None and times and manifests.first == next(iter(times)):
            return before_first
        raise NotAvailableError(_nothing_at(branch, us, times, manifests))

    def check_none(self, timelines: Timelines, branch: str) -> None:
        """Raises LostEpochError where epochs of a branch were sealed, as their times say, and no manifest is there."""
        found = self._times.of_timeline(timelines.timeline(branch).id)
        if found:
            raise LostEpochError(
                f"branch {branch} was at epoch {max(found)}, as the times of its epochs say, and no manifest is there: bring "
                "manifests/ back, from a peer or a copy"
            )

    def _written_us(self, manifests: ManifestLog, t: Epoch) -> int | None:
        """Returns when the file of a manifest was written; None where it has none of its own, or that does not say it."""
        manifest = manifests.get(t)
        return None if manifest is None else self._times.written_us(manifest.path)


def _nothing_at(branch: str, us: int, times: dict[Epoch, SealTime], manifests: ManifestLog) -> str:
    """Says why there is no epoch at a time."""
    asked = f"branch {branch} has no epoch as of {shown_time(us)}"
    if manifests.first is None:
        return f"{asked}: no epoch is sealed yet"
    if not times:
        return (
            f"{asked}, for it is not known when its epochs {manifests.first} to {manifests.last} were sealed: they are of a "
            "version that did not record it, or were sealed just now. Give the number of an epoch; those sealed from now on "
            "are found by time, too"
        )
    first, time = next(iter(times.items()))
    since = f"epoch {first}, sealed at {shown_time(time.sealed_us)}"
    if first == manifests.first:
        return f"{asked}: its first is {since}"
    return (
        f"{asked} that is known by time: times are known from {since}, on, and epochs {manifests.first} to {first - 1} are of "
        "a version that did not record them. Give the number of an epoch"
    )
