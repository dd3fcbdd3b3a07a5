"""Slow and obvious oracles, and generators, that several tests share."""

from __future__ import annotations

import datetime
import decimal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import strategies as st

from nosync.lsm.columnar.hashing import hash32

State = dict[tuple[Any, ...], tuple[Any, ...]]


def colliding(columns: Sequence[pa.Array]) -> npt.NDArray[np.uint32]:
    """A hash with three values, at the ends and in the middle of the range: nearly all keys collide."""
    spread = np.array([0, 2**31, 2**32 - 1], dtype=np.uint32)
    return spread[hash32(columns) % 3]


def state_of(table: pa.Table, key: Sequence[str]) -> State:
    """A table as a dict; fails where a key occurs twice."""
    state: State = {}
    values = [name for name in table.column_names if name not in key]
    for row in table.to_pylist():
        k = tuple(row[name] for name in key)
        assert k not in state, f"key {k} occurs twice"
        state[k] = tuple(row[name] for name in values)
    return state


KEY_VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "string": (pa.string(), st.text(max_size=40)),
    "binary": (pa.binary(), st.binary(max_size=70)),
    "date": (pa.date32(), st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1), timezones=st.just(datetime.UTC)),
    ),
    "decimal": (
        pa.decimal128(12, 2),
        st.decimals(decimal.Decimal("-9999999999.99"), decimal.Decimal("9999999999.99"), places=2),
    ),
    "wide decimal": (
        pa.decimal128(38, 0),
        st.decimals(-(10**37), 10**37, places=0),
    ),
    "bool": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "null": (pa.null(), st.none()),
}


def weights(rows: pa.Table) -> Counter[str]:
    """How often each row is there; of a log of changes what is left of it, which may be less than nothing in between."""
    found = Counter[str]()
    for row in rows.to_pylist():
        went = row.pop("_change_type", "insert") in ("delete", "update_preimage")
        found[repr(sorted(row.items()))] += -1 if went else 1
    return Counter({row: n for row, n in found.items() if n})
