"""Window functions beside Pandas', and where rows are not told apart by the order."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import nosync
from nosync.kernels.over_partition import PEERS, ROWS, WHOLE, Between, Order, OverColumn, OverPartition, Within
from nosync.testing import FlowTester


def rows_of(n: int, seed: int) -> pa.Table:
    chance = np.random.default_rng(seed)
    x = chance.integers(-5, 6, n).astype(float)
    x[chance.random(n) < 0.2] = np.nan
    return pa.table({
        "id": chance.permutation(n), "k": chance.choice(["a", "b", "c"], n), "x": pa.array(x, from_pandas=True),
        "n": chance.integers(-9, 9, n),
    })  # fmt: skip


def made(rows: pa.Table, order: Order, *columns: OverColumn) -> pd.DataFrame:
    return OverPartition(("k",), (order,), columns)(rows).to_pandas().set_index("id").sort_index()


@pytest.mark.parametrize("seed", range(5))
def test_places_and_sums_are_those_of_pandas(seed: int) -> None:
    rows = rows_of(60, seed)
    by_id, by_x = Order("id"), Order("x", ascending=False, nulls_first=False)
    found = made(
        rows, by_id, OverColumn("row", "row_number", pa.int32()), OverColumn("before", "lag", pa.int64(), "n", number=2),
        OverColumn("running", "sum", pa.int64(), "n", ROWS), OverColumn("mean", "avg", pa.float64(), "x", WHOLE),
        OverColumn("least", "min", pa.int64(), "n", ROWS),
        OverColumn("last", "last_value", pa.float64(), "x", PEERS, ignores_nulls=True),
    )  # fmt: skip
    ranks = made(rows, by_x, OverColumn("rank", "rank", pa.int32()), OverColumn("dense", "dense_rank", pa.int32()))
    expected = rows.to_pandas().set_index("id").sort_index()
    groups = expected.groupby("k")
    assert found["row"].tolist() == (groups.cumcount() + 1).tolist()
    assert found["before"].fillna(-99).tolist() == groups["n"].shift(2).fillna(-99).tolist()
    assert found["running"].tolist() == groups["n"].cumsum().tolist()
    assert np.allclose(found["mean"], groups["x"].transform("mean"))
    assert found["least"].tolist() == groups["n"].cummin().tolist()
    assert found["last"].fillna(-99).tolist() == groups["x"].ffill().fillna(-99).tolist()
    for name, method in (("rank", "min"), ("dense", "dense")):
        assert (
            ranks[name].tolist() == groups["x"].rank(method, ascending=False, na_option="bottom").astype(int).tolist()
        )


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-2, 0), (-1, 1), (1, 3), (-4, -2), (None, -1), (None, 2), (-100, 100), (2, 1), (0, None), (-3, None), (2, None)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_frames_of_rows_are_those_of_a_loop(seed: int, lower: int | None, upper: int | None) -> None:
    rows = rows_of(40, seed)
    frame = Between(lower, upper)
    functions = {
        "count": pa.int64(),
        "sum": pa.float64(),
        "avg": pa.float64(),
        "min": pa.float64(),
        "max": pa.float64(),
    }
    columns = [OverColumn(f"{name}_", name, type_, "x", frame) for name, type_ in functions.items()]
    for ignores in (False, True):
        for name in ("first_value", "last_value"):
            columns.append(OverColumn(f"{name}{ignores}", name, pa.float64(), "x", frame, ignores_nulls=ignores))
        columns.append(OverColumn(f"nth{ignores}", "nth_value", pa.float64(), "x", frame, 2, ignores_nulls=ignores))
    columns.append(OverColumn("whole", "sum", pa.int64(), "n", frame))
    found = OverPartition(("k",), (Order("id"),), tuple(columns))(rows).to_pylist()
    of_key = {key: sorted((row for row in found if row["k"] == key), key=lambda row: row["id"]) for key in "abc"}
    for partition in of_key.values():
        for place, row in enumerate(partition):
            begin = 0 if lower is None else max(0, place + lower)
            inside = partition[begin:] if upper is None else partition[begin : max(begin, place + upper + 1)]
            there = [one["x"] for one in inside if one["x"] is not None]
            assert row["count_"] == len(there)
            assert row["sum_"] == (sum(there) if there else None)
            assert row["avg_"] == (sum(there) / len(there) if there else None)
            assert row["min_"] == min(there, default=None)
            assert row["max_"] == max(there, default=None)
            assert row["first_valueFalse"] == (inside[0]["x"] if inside else None)
            assert row["last_valueFalse"] == (inside[-1]["x"] if inside else None)
            assert row["first_valueTrue"] == (there[0] if there else None)
            assert row["last_valueTrue"] == (there[-1] if there else None)
            assert row["nthFalse"] == (inside[1]["x"] if len(inside) > 1 else None)
            assert row["nthTrue"] == (there[1] if len(there) > 1 else None)
            assert row["whole"] == (sum(one["n"] for one in inside) if inside else None)


@pytest.mark.parametrize("by", [-3, -1, 1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lag_and_lead_that_pass_over_nulls_are_those_of_a_loop(seed: int, by: int) -> None:
    name = "lag" if by < 0 else "lead"
    rows = rows_of(50, seed)
    given = [OverColumn("got", name, pa.float64(), "x", number=abs(by), ignores_nulls=True)]
    given += [OverColumn("else", name, pa.int64(), "n", number=abs(by), default="id", ignores_nulls=True)]
    rows = rows.set_column(
        3, "n", pa.array([None if row["id"] % 3 else row["n"] for row in rows.to_pylist()], pa.int64())
    )
    found = made(rows, Order("id"), *given).reset_index()
    for _, partition in found.groupby("k"):
        for place in range(len(partition)):
            others = partition.iloc[:place][::-1] if by < 0 else partition.iloc[place + 1 :]
            for column, of, otherwise in (("got", "x", np.nan), ("else", "n", partition["id"].iloc[place])):
                there = others[of].dropna().tolist()
                expected = there[abs(by) - 1] if len(there) >= abs(by) else otherwise
                assert np.array_equal([partition[column].iloc[place]], [expected], equal_nan=True)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-2, 0), (-1, 1), (1, 3), (None, -1), (None, 2.5), (-100, 100), (2, 1), (0, None), (-1, None), (1, None), (0, 0)],
)
@pytest.mark.parametrize("order", [Order("x"), Order("x", False), Order("x", True, False), Order("x", False, False)])
@pytest.mark.parametrize(
    "dtype",
    [pa.float64(), pa.float32(), pa.int32(), pa.decimal128(9, 0), pa.timestamp("us", "UTC"), pa.date32()],
    ids=str,
)
def test_frames_by_values_are_those_of_a_loop(
    dtype: pa.DataType, order: Order, lower: float | None, upper: float | None
) -> None:
    rows = rows_of(70, 4)
    x = rows["x"].to_pylist()
    of_type = pa.array(x, pa.float64(), from_pandas=True).cast(pa.int32() if dtype == pa.date32() else pa.int64())
    if pa.types.is_decimal(dtype):
        of_type = pa.array([None if v is None else decimal.Decimal(int(v)) for v in x], dtype)
    rows = rows.set_column(2, "x", pa.array(x, dtype) if pa.types.is_floating(dtype) else of_type.cast(dtype))
    upper = upper if pa.types.is_floating(dtype) or upper is None else int(upper)
    frame = Within(lower, upper)
    names = {"sum": pa.int64(), "count": pa.int64(), "min": pa.int64(), "max": pa.int64()}
    columns = [OverColumn(f"{name}_", name, type_, "n", frame) for name, type_ in names.items()]
    columns += [OverColumn(f"{name}_", name, pa.int64(), "id", frame) for name in ("first_value", "last_value")]
    found = OverPartition(("k",), (order,), tuple(columns))(rows).append_column("v", pa.array(x)).to_pylist()

    def is_inside(one: dict[str, Any], row: dict[str, Any]) -> bool:
        mine, its = row["v"], one["v"]
        if one["k"] != row["k"] or (its is None and mine is None):
            return bool(one["k"] == row["k"])
        if its is None or mine is None:  # one of them is before all values, or after them
            return (lower is None and order.nulls_first is (its is None)) or (
                upper is None and order.nulls_first is (mine is None)
            )
        far = (its - mine) * (1 if order.ascending else -1)
        return (lower is None or far >= lower) and (upper is None or far <= upper)

    for row in found:
        there = [one for one in found if is_inside(one, row)]
        numbers = [one["n"] for one in there]
        assert (row["count_"], row["sum_"]) == (len(numbers), sum(numbers) if numbers else None)
        assert (row["min_"], row["max_"]) == (min(numbers, default=None), max(numbers, default=None))
        ends = [row["first_value_"], row["last_value_"]]
        assert (ends == [None, None]) is (not there)
        assert {*ends} <= {None, *(one["id"] for one in there)}


def test_the_ends_of_64_bits_are_in_frames_by_values() -> None:
    most = 2**63 - 1
    rows = pa.table({"id": pa.array([-most - 1, -most, 0, most - 1, most], pa.int64()), "k": ["a"] * 5})
    for by in (-2, 2):
        found = made(rows, Order("id"), OverColumn("n", "count", pa.int64(), None, Within(min(by, 0), max(by, 0))))
        assert found["n"].tolist() == ([1, 2, 1, 1, 2] if by < 0 else [2, 1, 1, 2, 1])


def test_a_sum_that_64_bits_do_not_have_is_an_error() -> None:
    rows = pa.table({"id": [0, 1, 2], "k": ["a"] * 3, "n": [2**62, 2**62 - 1, 1]})
    column = OverColumn("s", "sum", pa.int64(), "n", ROWS)
    assert made(rows.slice(0, 2), Order("id"), column)["s"].tolist() == [2**62, 2**63 - 1]
    with pytest.raises(OverflowError, match="a sum is 9223372036854775808, which is beyond 64 bits"):
        made(rows, Order("id"), column)


def test_decimals_keep_all_of_their_digits() -> None:
    large = decimal.Decimal("12345678901234567890123456789012345678")
    rows = pa.table({"id": [0, 1], "k": ["a", "a"], "d": pa.array([large, decimal.Decimal(1)], pa.decimal128(38, 0))})
    found = made(rows, Order("id"), OverColumn("s", "sum", pa.decimal128(38, 0), "d", ROWS))
    assert found["s"].tolist() == [large, decimal.Decimal("12345678901234567890123456789012345679")]


def test_rows_that_the_order_does_not_tell_apart_have_the_same_places_in_any_run() -> None:
    function = OverPartition(("k",), (Order("x"),), (OverColumn("place", "row_number", pa.int32()),))
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "id bigint, k string, x double")
    rows.per_key("placed", key=["k"], fn=function, schema="id bigint, x double, place int", version="1")
    found: list[Any] = []
    for seed, shards, epochs in ((0, 1, 1), (1, 3, 1), (2, 2, 4)):
        given = np.random.default_rng(seed).permutation(24)
        with FlowTester(flow, shards=shards) as tester:
            for part in np.array_split(given, epochs):
                tester.advance({"rows": [{"id": int(i), "k": "ab"[i % 2], "x": float(i % 3)} for i in part]})
            found.append(sorted(map(repr, tester.read("placed").to_pylist())))
    assert found[0] == found[1] == found[2]
