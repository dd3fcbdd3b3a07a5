"""Sums and means against Python's own whole numbers, decimals and fractions, however rows are cut into epochs, and as they go."""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.kernels.groups import Groups
from nosync.kernels.sums import DoesNotFitError, sum_of
from nosync.lsm.columnar.hashing import hash32
from tests.helpers.depth import examples
from tests.helpers.oracles import state_of
from tests.helpers.runner import Runner

LEAST, MOST = -(2**63), 2**63 - 1
WHOLE = st.sampled_from([LEAST, MOST, MOST, LEAST + 1, 0, 1, -1, 2**62]) | st.integers(LEAST, MOST)
EDGE, BELOW = Decimal(10**38 - 1), Decimal(-(10**38) + 1)
DECIMALS = st.sampled_from([EDGE, BELOW, Decimal(1), Decimal(-1)]) | st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal)
FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 1.0, 2.5, -3.0, 0.0])
BIGINT, DECIMAL, DOUBLE = pa.int64(), pa.decimal128(38, 0), pa.float64()


def table(rows: list[tuple[int, str, Any]], type_: pa.DataType) -> pa.Table:
    ids, words, values = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "word": pa.array(words, pa.string()), "x": pa.array(values, type_)}
    )


def made(type_: str, *, changing: bool, **functions: nosync.Aggregate) -> nosync.Dataflow:
    """Rows that only come, or of each id the one that came last; without functions of Python."""
    flow = nosync.Dataflow("f")
    rows: nosync.Stage = flow.source("rows", f"id bigint, word string, x {type_}, at bigint")
    if changing:
        rows = rows.aggregate("newest", key=["id", "word"], x=nosync.last("x", by="at"))
    rows.aggregate("all", key=["word"], **functions)
    return flow


class Epochs:
    """Runs epochs, and knows which values there are."""

    def __init__(self, flow: nosync.Dataflow, root: Path, type_: pa.DataType, *, changing: bool) -> None:
        self.runner, self.type, self.changing = Runner(flow, root, 1), type_, changing
        self.t, self.there = -1, dict[Any, Any]()

    def advance(self, rows: list[tuple[int, str, Any]]) -> dict[Any, Any]:
        """The state after an epoch."""
        self.t += 1
        given = table(rows, self.type).append_column("at", pa.repeat(self.t, len(rows)))
        self.runner.advance(self.t, given)
        for i, (id, word, x) in enumerate(rows):
            self.there[(word, id) if self.changing else (word, self.t, i)] = x
        return state_of(self.runner.read("all", self.t), ["word"])

    def values(self, word: str) -> list[Any]:
        return [x for (w, *_), x in self.there.items() if w == word and x is not None]


def rows_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[tuple[int, str, Any]]]]:
    """Epochs, of which each has a row of an id once."""
    row = st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.none() | values)
    return st.lists(st.lists(row, max_size=6, unique_by=lambda r: r[:2]), min_size=1, max_size=4)


@given(rows_of(WHOLE), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_means_and_sums_of_whole_numbers(epochs: list[list[tuple[int, str, Any]]], changing: bool) -> None:
    flow = made("bigint", changing=changing, m=nosync.mean("x"), v=nosync.variance("x"))
    with tempfile.TemporaryDirectory() as root:
        run = Epochs(flow, Path(root) / "s", BIGINT, changing=changing)
        for rows in epochs:
            for (word,), (mean, _) in run.advance(rows).items():
                x = run.values(word)
                assert mean == (pytest.approx(float(Fraction(sum(x), len(x))), rel=1e-15) if x else None)


@given(rows_of(WHOLE), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_sum_is_an_error_where_it_does_not_fit_and_only_there(
    epochs: list[list[tuple[int, str, Any]]], changing: bool
) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = Epochs(made("bigint", changing=changing, s=nosync.sum("x")), Path(root) / "s", BIGINT, changing=changing)
        for rows in epochs:
            there = run.there | {(w, i) if changing else (w, run.t + 1, n): x for n, (i, w, x) in enumerate(rows)}
            sums = {word: sum(x for (w, *_), x in there.items() if w == word and x is not None) for word in "ab"}
            wrong = [
                f"of key {{'word': '{word}'}} is {s}, beyond" for word, s in sums.items() if not LEAST <= s <= MOST
            ]
            if wrong:
                with pytest.raises(nosync.StageError, match="|".join(map(re.escape, wrong))):
                    run.advance(rows)
                return
            assert run.advance(rows) == {
                (w,): (sums[w] if run.values(w) else None,) for w in {w for w, *_ in run.there}
            }


def test_the_error_names_key_epoch_column_and_cast(tmp_path: Path) -> None:
    run = Epochs(made("bigint", changing=False, s=nosync.sum("x")), tmp_path / "s", BIGINT, changing=False)
    run.advance([(1, "a", MOST), (2, "b", MOST)])
    with pytest.raises(nosync.StageError) as caught:
        run.advance([(3, "b", 1)])
    for part in (
        "stage all",
        "timestamp 1",
        "s, sum(x)",
        "{'word': 'b'}",
        str(2**63),
        "CAST(x AS DECIMAL(38, 0)) AS x",
    ):
        assert part in str(caught.value)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    """One epoch's part is beyond 64 bits in either direction; the total fits. So does -2^63, also where it is taken back."""
    run = Epochs(made("bigint", changing=False, s=nosync.sum("x")), tmp_path / "s", BIGINT, changing=False)
    run.advance([(1, "a", LEAST)])
    assert run.advance([(i, "a", MOST) for i in range(2)]) == {("a",): (MOST - 1,)}
    run = Epochs(
        made("bigint", changing=True, s=nosync.sum("x"), m=nosync.mean("x")), tmp_path / "t", BIGINT, changing=True
    )
    assert run.advance([(1, "a", LEAST)]) == {("a",): (LEAST, float(LEAST))}
    assert run.advance([(1, "a", 7)]) == {("a",): (7, 7.0)}


def test_nanosecond_times(tmp_path: Path) -> None:
    """Six rows of them are beyond 64 bits together."""
    now = 1_732_600_000_123_456_789
    for changing in (False, True):
        run = Epochs(
            made("bigint", changing=changing, m=nosync.mean("x")), tmp_path / str(changing), BIGINT, changing=changing
        )
        for t in range(4):
            found = run.advance([(10 * t + i, "a", now + i) for i in range(3)])
        assert found[("a",)][0] == pytest.approx(now + 1, rel=1e-15)


@given(rows_of(DECIMALS), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_decimals_of_38_digits(epochs: list[list[tuple[int, str, Any]]], changing: bool) -> None:
    flow = made("decimal(38,0)", changing=changing, m=nosync.mean("x"))
    with tempfile.TemporaryDirectory() as root:
        run = Epochs(flow, Path(root) / "s", DECIMAL, changing=changing)
        for rows in epochs:
            for (word,), (mean,) in run.advance(rows).items():
                x = [int(d) for d in run.values(word)]
                assert mean == (pytest.approx(float(Fraction(sum(x), len(x))), rel=1e-14, abs=1e-9) if x else None)


def test_sums_of_decimals_at_the_edge(tmp_path: Path) -> None:
    flow = made("decimal(38,0)", changing=True, s=nosync.sum("x"))
    run = Epochs(flow, tmp_path / "s", DECIMAL, changing=True)
    assert run.advance([(1, "a", EDGE), (2, "a", EDGE), (3, "a", BELOW)]) == {("a",): (EDGE,)}
    with pytest.raises(nosync.StageError, match=r"is -1999\d+, beyond the 38 digits of a decimal: cast 'x'.*AS DOUBLE"):
        run.advance([(1, "a", BELOW), (2, "a", Decimal(-1))])


def spark_sum(values: list[float]) -> float:
    return math.nan if math.inf in values and -math.inf in values else sum(values)


def spark_variance(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return statistics.variance(values) if all(map(math.isfinite, values)) else math.nan


@given(rows_of(FLOATS), st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_what_is_not_finite_goes_without_a_trace(epochs: list[list[tuple[int, str, Any]]], changing: bool) -> None:
    functions = {"s": nosync.sum("x"), "m": nosync.mean("x"), "v": nosync.variance("x"), "d": nosync.stddev("x")}
    with tempfile.TemporaryDirectory() as root:
        run = Epochs(made("double", changing=changing, **functions), Path(root) / "s", DOUBLE, changing=changing)
        for rows in epochs:
            for (word,), found in run.advance(rows).items():
                x = run.values(word)
                v = spark_variance(x)
                expected = [spark_sum(x), spark_sum(x) / len(x)] if x else [None, None]
                expected += [v, None if v is None else math.sqrt(v)]
                assert found == tuple(
                    pytest.approx(e, nan_ok=True, abs=1e-9) if e is not None else None for e in expected
                )


@pytest.mark.parametrize("type_", [pa.int64(), pa.uint64(), pa.int32(), pa.uint8()])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 2**64 - 1), st.sampled_from([1, -1]))))
@settings(max_examples=examples(50), deadline=None)
def test_wide_sums_of_every_whole_type(type_: pa.DataType, rows: list[tuple[str, int | None, int]]) -> None:
    low, high = (0, 2**type_.bit_width) if str(type_).startswith("u") else (-(2**63), 2**63)
    if type_ == pa.int32():
        low, high = -(2**31), 2**31
    values = [None if x is None else low + x % (high - low) for _, x, _ in rows]
    keys = pa.array([k for k, _, _ in rows], pa.string())
    groups = Groups.of([keys], hash32([keys]))
    weights = pa.array([w for _, _, w in rows], pa.int64())
    for signs in (None, weights):
        sum_ = sum_of("m", "__m_sum", pa.int64(), retracts=True, is_answer=False)
        found = sum_.of_groups(pa.array(values, type_), signs, groups)
        whole = pa.table({**found, "k": keys.take(pa.array(groups.first))}).to_pylist()
        expected: dict[str, int] = {}
        for (k, _, w), x in zip(rows, values, strict=True):
            if x is not None:
                expected[k] = expected.get(k, 0) + x * (1 if signs is None else w)
        for row in whole:
            assert whole_of(row) == expected.get(row["k"])
        twice = sum_.added(found, found)
        for row in pa.table({**twice, "k": keys.take(pa.array(groups.first))}).to_pylist():
            assert whole_of(row) == (2 * expected[row["k"]] if row["k"] in expected else None)


def whole_of(row: dict[str, Any]) -> int | None:
    if row["__m_sum"] is None:
        return None
    if row["__m_high"] is None:
        return int(row["__m_sum"])
    return int((row["__m_high"] << 64) | (row["__m_sum"] & (2**64 - 1)))


def test_a_sum_that_is_the_answer_says_which_row() -> None:
    sum_ = sum_of("s", "s", pa.int64(), retracts=False, is_answer=True)
    keys = pa.array(["a", "b", "b"])
    groups = Groups.of([keys], hash32([keys]))
    with pytest.raises(DoesNotFitError) as caught:
        sum_.recorded(sum_.of_groups(pa.array([1, MOST, MOST]), None, groups))
    assert caught.value.row == keys.take(pa.array(groups.first)).to_pylist().index("b")
    assert caught.value.value == 2 * MOST


@pytest.mark.parametrize("function", [nosync.sum, nosync.mean])
def test_sessions_that_grow_together(function: Callable[[str], nosync.Aggregate], tmp_path: Path) -> None:
    """Of three sessions that become one, two together are beyond 64 bits."""
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string, at timestamp, x bigint").window(
        "visits", key=["k"], time="at", gap="10 seconds", s=function("x")
    )
    runner = Runner(flow, tmp_path / "s", 1)
    values = [MOST, MOST, LEAST]

    def rows(seconds: list[int], x: list[int]) -> pa.Table:
        at = pa.array(np.array(seconds) * 1_000_000).cast(pa.timestamp("us", "UTC"))
        return pa.table({"k": ["a"] * len(x), "at": at, "x": pa.array(x, pa.int64())})

    runner.advance(0, rows([0, 20, 40], values))
    runner.advance(1, rows([10, 30], [0, 0]))
    (found,) = runner.read("visits", 1).to_pylist()
    total = sum(values)
    assert found["s"] == (total if function is nosync.sum else pytest.approx(total / 5, rel=1e-15))
