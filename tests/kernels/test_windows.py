"""Which windows rows belong to, at the far ends of time as well."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nosync.kernels.windows import END, START, event_span_us, parse_window, with_windows

HOUR_US, SLIDE_US = 3_600_000_000, 1_200_000_000


@pytest.mark.parametrize(
    ("size", "slide", "gap", "expected"),
    [
        ("1 hour", "20 minutes", None, [(-HOUR_US + i * SLIDE_US, i * SLIDE_US) for i in range(3)]),
        ("1 hour", None, None, [(-HOUR_US, 0)]),
        (None, None, "1 hour", [(-1, HOUR_US - 1)]),
    ],
)
def test_times_whose_windows_do_not_fit_into_64_bits_count_as_none(
    size: str | None, slide: str | None, gap: str | None, expected: list[tuple[int, int]]
) -> None:
    window = parse_window("w", time="at", size=size, slide=slide, gap=gap, watermark=None, keep=None)
    far = [2**63 - 1, -(2**63) + 1, 2**62, -(2**62)]
    rows = pa.table({"at": pa.array([*far, None, -1], pa.timestamp("us")), "n": range(6)})
    found = with_windows(rows, window)
    starts, ends = (found.column(name).cast(pa.int64()).to_pylist() for name in (START, END))
    of_row = list(zip(found.column("n").to_pylist(), starts, ends, strict=True))
    assert [one for one in of_row if one[0] != 5] == [(n, None, None) for n in range(5)]
    assert [(start, end) for n, start, end in of_row if n == 5] == expected
    assert event_span_us(rows, window) == (-1, -1)


def test_dates_that_64_bits_have_no_microseconds_for_count_as_none() -> None:
    window = parse_window("w", time="on", size="1 day", slide=None, gap=None, watermark=None, keep=None)
    days = [110_000_000, -200_000_000, 2**31 - 1, -(2**31), None, -1]
    found = with_windows(pa.table({"on": pa.array(days, pa.int32()).cast(pa.date32())}), window)
    starts = found.column(START).cast(pa.int64()).to_pylist()
    assert starts == [None] * 5 + [-24 * HOUR_US]
    assert event_span_us(pa.table({"on": pa.array([-1], pa.int32()).cast(pa.date32())}), window) == (-24 * HOUR_US,) * 2
