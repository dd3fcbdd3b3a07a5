"""As-of joins beside an oracle that looks at all rows that ever came in time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.errors import FlowError, SchemaError
from nosync.testing import FlowTester
from tests.helpers.depth import examples
from tests.helpers.two_sides import Row, TwoSides
from tests.property.test_event_time import DELAY, SIDE, side
from tests.property.test_stateful_operators import SEED, running

OF_A_TIME = SIDE.map(lambda rows: list(dict.fromkeys(rows)))  # of equal rows of one epoch nobody says which came last
EPOCHS = st.lists(st.tuples(st.integers(1, 3), SIDE, OF_A_TIME), min_size=1, max_size=8)


def asof_flow(how: str, within: int | None, delays: tuple[int, int]) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    left = flow.source("l", "k string, at timestamp, x bigint")
    right = flow.source("r", "k string, seen timestamp, y bigint")
    joined = left.join_asof(
        "joined", right, on=["k"], how=how, time=("at", "seen"), watermark=tuple(f"{d} minutes" for d in delays),
        within=None if within is None else f"{within} minutes",
    )  # fmt: skip
    joined.aggregate("counted", key=["k"], n=nosync.count())
    joined.late_right.map("late_again", lambda rows: rows)
    return flow


def best(row: Row, rights: list[tuple[Any, int, int]], within: int | None) -> int | None:
    """Returns the number of the newest right row that is not younger; of equal times the last that came."""
    fitting = [r for r in rights if r[0] is not None and r[0] == row[0] and r[1] <= row[1]]
    newest = max(fitting, key=lambda r: (r[1], r[2] // 100), default=None)
    if newest is None or (within is not None and row[1] - newest[1] > within):
        return None
    return newest[2]


A_RATE_AND_ORDERS = [(2, [("a", 3), ("a", 9), (None, 5)], [("a", 2), ("a", 6)]), (1, [("a", 30)], [("b", 30)]), (3, [], []),
                     (2, [("a", 31)], [("a", 31)]), (1, [("b", 60)], [("b", 60)]), (1, [], [])]  # fmt: skip


@given(EPOCHS, SEED, st.sampled_from(["inner", "left"]), st.none() | st.integers(0, 6), st.tuples(DELAY, DELAY))
@example(A_RATE_AND_ORDERS, 0, "left", None, (0, 0))
@example(A_RATE_AND_ORDERS, 0, "inner", 2, (0, 3))
@settings(max_examples=examples(80))
def test_each_row_with_the_newest_that_is_not_younger(
    epochs: list[Any], seed: int, how: str, within: int | None, delays: tuple[int, int]
) -> None:
    with running(asof_flow(how, within, delays), seed) as runner:
        sides = TwoSides(delays)
        lefts, rights = sides.in_time
        for t, (shards, ls, rs) in enumerate(epochs):
            runner.shards = shards
            runner.advance(t, {"l": side(ls, "at", "x", 100 * t), "r": side(rs, "seen", "y", 100 * t)})
            sides.take(t, (ls, rs))
            watermark = sides.watermark
            due = [r for r in lefts if watermark is not None and r[1] < watermark]
            results = Counter((r[0], r[2], best(r, rights, within)) for r in due)
            if how == "inner":
                results = Counter({r: n for r, n in results.items() if r[2] is not None})
            found = runner.read("joined", t).select(["k", "x", "y"]).to_pylist()
            assert Counter(tuple(row.values()) for row in found) == results
            assert {r["k"]: r["n"] for r in runner.read("counted", t).to_pylist()} == Counter(
                r[0] for r in results.elements()
            )
            assert [runner.read(f"joined__late_{name}", t).num_rows for name in ("left", "right")] == sides.late
            waiting = {r[2] for r in lefts if (r[0] is not None or how == "left") and r not in due}
            assert set(runner.read("joined__kept_left", t).column("x").to_pylist()) == waiting
            assert set(runner.read("joined__kept_right", t).column("y").to_pylist()) == versions(rights, watermark)


def versions(rights: list[Row], watermark: int | None) -> set[int]:
    """Returns what the right side has to keep: what is to come, and of each key the newest that is there."""
    kept = set()
    for k in {r[0] for r in rights if r[0] is not None}:
        of_key = sorted((r for r in rights if r[0] == k), key=lambda r: (r[1], r[2] // 100))
        passed = [r for r in of_key if watermark is not None and r[1] < watermark]
        kept |= {r[2] for r in of_key[max(len(passed) - 1, 0) :]}
    return kept


def test_it_is_the_merge_asof_of_pandas() -> None:
    """All rows in one epoch, and then each in one of its own: the result is that of Pandas, which knows no epochs."""
    orders = [("EUR", 10 * i % 47, i) for i in range(40)] + [("USD", 7 * i % 43, 100 + i) for i in range(40)]
    rates = [("EUR", 5 * i, i) for i in range(10)] + [("USD", 11 * i + 3, 100 + i) for i in range(4)]
    end = [("EUR", 1000, -1)]
    frames = [pd.DataFrame(rows, columns=["k", "at", "n"]).sort_values("at") for rows in (orders, rates)]
    expected = pd.merge_asof(*frames, on="at", by="k", suffixes=("_order", "_rate"))
    wanted = Counter((k, x, None if pd.isna(y) else int(y)) for k, x, y in expected[["k", "n_order", "n_rate"]].values)

    def rows(of: list[Row], time: str, value: str) -> Any:
        table = side([(k, minute) for k, minute, _ in of], time, value, 0)
        return table.set_column(2, value, pa.array([number for _, _, number in of], pa.int64()))

    flow = asof_flow("left", None, (60, 60))
    flow_rows = {True: [(orders, rates)], False: [(orders[i::9], rates[i::9]) for i in range(9)]}
    for given_rows in flow_rows.values():
        with FlowTester(flow) as tester:
            for ls, rs in [*given_rows, (end, end), ([], [])]:
                tester.advance({"l": rows(ls, "at", "x"), "r": rows(rs, "seen", "y")})
            found = tester.read("joined")
            assert Counter(tuple(row.values()) for row in found.select(["k", "x", "y"]).to_pylist()) == wanted


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"how": "right"}, "stage j: how='right', expected 'inner' or 'left'"),
        ({"time": ("at",)}, r"stage j: time=\('at',\), expected the columns of event time of both sides"),
        ({"time": ("at", "sen")}, "stage j: time column 'sen' is not in its input r .*did you mean 'seen'"),
        ({"time": ("at", "y")}, "stage j: time column 'y' is int64, expected a timestamp"),
        ({"watermark": None}, "stage j: watermark=None, expected how late rows may be"),
        ({"within": "soon"}, "stage j: 'soon' is not a duration"),
        ({"on": []}, "stage j: key is"),
        ({"on": ["z"]}, "stage j: .*'z'"),
    ],
)
def test_what_is_no_asof_join_is_refused_where_it_is_declared(wrong: dict[str, Any], said: str) -> None:
    flow = nosync.Dataflow("f")
    left = flow.source("l", "k string, at timestamp, x bigint")
    right = flow.source("r", "k string, seen timestamp, y bigint")
    how: dict[str, Any] = {"on": ["k"], "time": ("at", "seen"), "watermark": "1 minute", **wrong}
    with pytest.raises((FlowError, SchemaError), match=said):
        left.join_asof("j", right, **how)
