"""Rows in order of their keys: as a slow sort has it, whatever the keys are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nosync.lsm.columnar.ordering import order_by_key, order_of, sort_hashes
from tests.helpers.depth import examples


@given(
    st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.integers(-3, 3).map(lambda i: i << 31)))
)
def test_order_of_is_the_stable_order(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    assert order_of(array).tolist() == sorted(range(len(values)), key=values.__getitem__)
    assert sort_hashes(array.astype(np.uint32))[0].tolist() == sorted(
        range(len(values)), key=lambda i: values[i] % 2**32
    )


def test_order_of_many() -> None:
    random = np.random.default_rng(7)
    for span in (3, 2**20, 2**63 - 1):
        values = random.integers(-span, span, 100_000)
        assert np.array_equal(order_of(values), np.argsort(values, kind="stable"))


_FEW, _MOST = st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)
KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "small": (pa.int64(), _FEW),
    "far": (pa.int64(), st.one_of(_FEW, _MOST)),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "unsigned": (pa.uint32(), st.integers(0, 2**32 - 1)),
    "large": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "time": (pa.timestamp("us", "UTC"), st.one_of(_FEW, st.integers(1_700_000_000_000_000, 1_700_000_900_000_000))),
    "day": (pa.date32(), _FEW),
    "some": (pa.int64(), st.none() | _FEW),
    "text": (pa.string(), st.sampled_from(["", "a", "b"])),
}


@given(st.data())
@settings(max_examples=examples(200))
def test_rows_of_one_hash_are_in_order_of_their_keys(data: st.DataObject) -> None:
    """Nulls come last, and rows of one key stay in the order that they came in."""
    names = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 2), *(KEYS[name][1] for name in names)), max_size=30))
    keys = []
    for i, name in enumerate(names):
        type_ = KEYS[name][0]
        numbers = {"time": pa.int64(), "day": pa.int32()}.get(name, type_)
        keys.append(pa.array([row[i + 1] for row in rows], numbers).cast(type_))
    order, same_key = order_by_key(np.array([row[0] for row in rows], dtype=np.uint32), keys)

    def place(i: int) -> tuple[Any, ...]:
        return rows[i][0], [(value is None, value if value is not None else 0) for value in rows[i][1:]]

    of_one_hash_and_key = {(hash_, tuple(key)) for hash_, *key in rows}
    if len({hash_ for hash_, _ in of_one_hash_and_key}) < len(of_one_hash_and_key):
        assert order.tolist() == sorted(range(len(rows)), key=place)
    assert same_key.tolist() == [rows[a] == rows[b] for a, b in itertools.pairwise(order)]


@pytest.mark.parametrize("span", [2, 2**20, 2**40])
def test_many_versions_of_a_key_are_in_order(span: int) -> None:
    random = np.random.default_rng(span)
    who, begin = random.integers(0, 500, 20_000), random.integers(-span, span, 20_000)
    order, same_key = order_by_key(who.astype(np.uint32) % 100, [pa.array(who), pa.array(begin)])
    expected = np.lexsort((begin, who, who % 100))
    assert np.array_equal(order, expected)
    assert np.array_equal(same_key, (np.diff(who[expected]) == 0) & (np.diff(begin[expected]) == 0))
