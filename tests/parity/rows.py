"""Random micro-batches: late rows, silent sources, duplicates, nulls, all within some hours."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa

BASES = [
    datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(1970, 1, 1, 0, 1, tzinfo=datetime.UTC),  # to Spark all before is late: its watermark begins there
    datetime.datetime(2024, 3, 31, 0, 30, tzinfo=datetime.UTC),  # clocks change in Europe
]
MINUTE = datetime.timedelta(minutes=1)
KEYS = ["a", "b", "c", "d", None]


def batches_of(
    random: np.random.Generator, *columns: str, batches: int = 5, most: int = 8, nulls: bool = True, time: str = "at"
) -> list[pa.Table]:
    """Returns batches whose times go on by some minutes each, with some rows far behind. Each is in order of time.

    `columns` are of `k` (a key), `x` (a whole number), `y` (a double, also NaN), `d` (a decimal).
    """
    base = BASES[int(random.integers(len(BASES)))]
    found, now = [], 30
    for _ in range(batches):
        now += int(random.integers(0, 25))
        n = int(random.integers(0, most + 1)) if random.random() > 0.15 else 0
        minutes = sorted(max(0, now - int(random.exponential(8))) for _ in range(n))
        table: dict[str, Any] = {time: pa.array([base + m * MINUTE for m in minutes], pa.timestamp("us", "UTC"))}
        for name in columns:
            table[name] = _MADE[name](random, n, nulls)
        found.append(pa.table(table))
    return found


def _keys(random: np.random.Generator, n: int, nulls: bool) -> pa.Array:
    return pa.array([KEYS[int(i)] for i in random.integers(0, len(KEYS) - (not nulls), n)], pa.string())


def _numbers(random: np.random.Generator, n: int, nulls: bool) -> pa.Array:
    return pa.array(
        [None if nulls and random.random() < 0.1 else int(random.integers(0, 9)) for _ in range(n)], pa.int64()
    )


def _doubles(random: np.random.Generator, n: int, nulls: bool) -> pa.Array:
    made = [float("nan"), -0.0, 0.0, 1.5, -2.25, 1e12, None if nulls else 3.0]
    return pa.array([made[int(i)] for i in random.integers(0, len(made), n)], pa.float64())


def _decimals(random: np.random.Generator, n: int, nulls: bool) -> pa.Array:
    values = [None if nulls and random.random() < 0.1 else int(random.integers(-999, 999)) for _ in range(n)]
    return pa.array([None if v is None else decimal.Decimal(v).scaleb(-2) for v in values], pa.decimal128(10, 2))


_MADE = {"k": _keys, "x": _numbers, "y": _doubles, "d": _decimals}
