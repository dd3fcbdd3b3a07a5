"""The stretch of event time that an epoch is recorded with, as the windows of the flow saw it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import nosync
from nosync.testing import FlowTester

NOON = datetime(2026, 7, 4, 12, tzinfo=UTC)


def us(minutes: int) -> int:
    return (NOON + timedelta(minutes=minutes) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def spans(flow: nosync.Dataflow, *epochs: dict[str, list[tuple[object, ...]]]) -> list[tuple[int | None, int | None]]:
    with FlowTester(flow, shards=3) as tester:
        for rows in epochs:
            tester.advance(rows)
        return [(time.oldest_us, time.newest_us) for time in tester._store.epoch_times().values()]


def at(*minutes: int) -> list[tuple[object, ...]]:
    return [(f"k{m}", NOON + timedelta(minutes=m)) for m in minutes]


def test_the_rows_of_all_shards_and_windows_count_the_late_ones_too() -> None:
    flow = nosync.Dataflow("f")
    a, b = flow.source("a", "k string, at timestamp"), flow.source("b", "k string, at timestamp")
    a.window("hours", key=["k"], time="at", size="1 hour", watermark="1 minute", n=nosync.count())
    b.window("days", time="at", size="1 day", n=nosync.count())
    found = spans(flow, {"a": at(5, 9, 7), "b": at(30)}, {"a": at(-600)}, {}, {"b": [("x", None)]})
    assert found == [(us(5), us(30)), (us(-600), us(-600)), (None, None), (None, None)]


def test_nobody_knows_it_where_no_window_says_which_column_has_it() -> None:
    flow = nosync.Dataflow("f")
    flow.source("a", "k string, at timestamp").aggregate("n", key=["k"], n=nosync.count())
    assert spans(flow, {"a": at(1)}) == [(None, None)]
