"""Points in the past, in the forms in which people give them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.as_of import parse_as_of, shown_time, wall_clock_us
from tests.helpers.clocks import NOON_US


@pytest.mark.parametrize(
    "given",
    [
        "2026-07-04T12:00",
        "2026-07-04 12:00:00",
        " 2026-07-04T12:00:00.000000Z ",
        "2026-07-04T14:00+02:00",
        datetime(2026, 7, 4, 12),
        datetime(2026, 7, 4, 12, tzinfo=UTC),
        datetime(2026, 7, 4, 5, tzinfo=timezone(timedelta(hours=-7))),
    ],
)
def test_one_moment_in_many_spellings(given: str | datetime) -> None:
    assert wall_clock_us(given) == NOON_US


def test_a_day_is_its_first_moment_in_utc() -> None:
    midnight_us = NOON_US - 12 * 3600 * 1_000_000
    assert wall_clock_us(date(2026, 7, 4)) == wall_clock_us("2026-07-04") == midnight_us


def test_microseconds_are_exact_also_before_1970() -> None:
    for us in (NOON_US + 1, -1, -(10**15) - 7):
        assert wall_clock_us(shown_time(us)) == us


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert shown_time(253_402_300_799_999_999) == "9999-12-31T23:59:59.999999Z"
    assert shown_time(253_402_300_800_000_000) == "253,402,300,800,000,000 us since 1970"
    assert shown_time(-(1 << 61)).startswith("-2,305,843,009,213,693,952 us")


def test_digits_are_an_epoch_on_a_command_line_and_refused_elsewhere() -> None:
    assert parse_as_of("26") == 26
    assert parse_as_of("2026-07-04") == "2026-07-04"
    with pytest.raises(InvalidInputError, match=r"'20260704' is a text of digits: give an epoch as a number"):
        wall_clock_us("20260704")


@pytest.mark.parametrize("given", ["yesterday", "", "2026-13-01", "12:00", "2026-07-04T25:00"])
def test_what_is_no_time_is_refused_with_what_is_one(given: str) -> None:
    with pytest.raises(InvalidInputError, match=r'such as "2026-07-04"'):
        parse_as_of(given)
