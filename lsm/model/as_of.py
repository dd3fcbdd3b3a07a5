"""Points in the past as callers give them: the number of an epoch, or a time of the wall clock.

A time is looked up among the times at which epochs were sealed (nosync.lsm.store.epoch_times). Times are int64
microseconds since 1970 in UTC here. A text or a datetime without a zone is in UTC, whatever the host's zone is, so that
a question has one answer on every host.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.timestamp import is_number

AsOf = int | str | datetime | date
"""An epoch; or a time of the wall clock, as ISO 8601 text, datetime or date (its first moment)."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_US, _LAST_US = ((at.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND for at in (datetime.min, datetime.max))
_EXAMPLES = '"2026-07-04", "2026-07-04T12:00" (UTC) or "2026-07-04T12:00+02:00"'


def wall_clock_us(as_of: str | datetime | date) -> int:
    """Returns a time of the wall clock in microseconds. Raises InvalidInputError for a text that is none."""
    if isinstance(as_of, str):
        as_of = _parsed(as_of)
    if not isinstance(as_of, datetime):
        as_of = datetime(as_of.year, as_of.month, as_of.day)
    if as_of.tzinfo is None:
        as_of = as_of.replace(tzinfo=UTC)
    return (as_of - _EPOCH) // _MICROSECOND


def _parsed(text: str) -> datetime:
    if is_number(text.strip()):
        raise InvalidInputError(
            f"{text!r} is a text of digits: give an epoch as a number ({int(text)}), and a time as {_EXAMPLES}"
        )
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInputError(
            f"{text!r} is neither the number of an epoch nor a time in ISO 8601, such as {_EXAMPLES}"
        ) from None


def parse_as_of(text: str) -> int | str:
    """Returns what a text stands for where all comes as text, as on a command line: digits are an epoch. Raises
    InvalidInputError for what is neither.
    """
    if is_number(text.removeprefix("-")):  # a negative one is refused as any number is that is no epoch
        return int(text)
    wall_clock_us(text)
    return text


def is_in_calendar(us: int) -> bool:
    """Returns whether a time is in the years 1 to 9999."""
    return _FIRST_US <= us <= _LAST_US


def shown_time(us: int) -> str:
    """Returns a time in UTC as ISO 8601 has it, to the second where it is a whole one; a number where no calendar has it."""
    if not is_in_calendar(us):
        return f"{us:,} us since 1970"
    return (_EPOCH + us * _MICROSECOND).isoformat().replace("+00:00", "Z")
