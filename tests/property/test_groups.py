"""Groups of rows, the index of a block's hashes, and rows gathered from several batches, against plain loops."""

from __future__ import annotations

import datetime
import decimal
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nosync.kernels.groups import MAX, MIN, SUM, Groups
from nosync.lsm.columnar.columns import gather
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.layers.hash_index import HashIndex

KEYS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=30)
FLOATS = st.sampled_from([0.1, -0.0, 0.0, 1e300, -1e300, math.inf, math.nan, 3.0])
DAYS = st.dates(datetime.date(2013, 1, 1), datetime.date(2013, 1, 5))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int64": (pa.int64(), st.integers(-(2**62), 2**62)),
    "int64 and nulls": (pa.int64(), st.none() | st.integers(-3, 3) | st.integers(-(2**62), 2**62)),
    "uint8": (pa.uint8(), st.integers(0, 255)),
    "double": (pa.float64(), FLOATS),
    "float and nulls": (
        pa.float32(),
        st.none() | st.sampled_from([0.5, -0.0, 0.0, -math.inf, math.nan, -math.nan, -3.0]),
    ),
    "date": (pa.date32(), DAYS),
    "timestamp": (pa.timestamp("us"), DAYS.map(lambda day: datetime.datetime(day.year, day.month, day.day))),
    "string": (pa.string(), st.text("xyz", max_size=2)),
    "decimal": (pa.decimal128(38, 2), st.integers(-500, 500).map(lambda i: decimal.Decimal(i) / 100)),
    "bool": (pa.bool_(), st.booleans()),
}
SUMMED = ("int64", "int64 and nulls", "double", "decimal")


def add_one_after_the_other(values: list[Any]) -> Any:
    return functools.reduce(operator.add, values, 0.0 if isinstance(values[0], float) else 0)


def of_floats(choose: Callable[..., Any], values: list[Any]) -> Any:
    """As Spark, which has NaN as the largest; of the two zeros -0.0 as the smaller one."""
    return choose(
        values, key=lambda v: (math.isnan(v), v, math.copysign(1, v)) if isinstance(v, float) else (False, v, 0)
    )


SLOWLY: dict[str, Callable[[list[Any]], Any]] = {
    SUM: add_one_after_the_other,
    MIN: functools.partial(of_floats, min),
    MAX: functools.partial(of_floats, max),
}
CASES = [(name, how) for name in COLUMNS for how in SLOWLY if how != SUM or name in SUMMED]


def rows_of(keys: list[str | None], of_hash: Callable[[str | None], int]) -> Groups:
    hashes = np.array([of_hash(key) for key in keys], dtype=np.uint32)
    return Groups.of([pa.array(keys, pa.string())], hashes)


@pytest.mark.parametrize("collide", [False, True])
@given(keys=KEYS)
def test_groups_are_the_rows_of_each_key_in_their_order(keys: list[str | None], collide: bool) -> None:
    numbers = {key: i for i, key in enumerate([None, "d", "c", "b", "a"])}
    groups = rows_of(keys, lambda key: numbers[key] // 3 if collide else numbers[key])
    expected: dict[str | None, list[int]] = {}
    for row, key in enumerate(keys):
        expected.setdefault(key, []).append(row)
    parts = np.split(groups.order, groups.starts[1:]) if keys else []
    assert len(groups) == len(expected)
    assert {keys[part[0]]: part.tolist() for part in parts} == expected
    assert groups.first.tolist() == [part[0] for part in parts]
    assert groups.sizes.tolist() == [len(part) for part in parts]
    number = groups.number_of_rows()
    assert all(number[row] == i for i, part in enumerate(parts) for row in part)
    hashes = [numbers[keys[row]] // (3 if collide else 1) for row in groups.first]
    assert hashes == sorted(hashes)


@given(keys=KEYS)
def test_either_way_gives_the_same_groups(keys: list[str | None]) -> None:
    column = pa.array(keys, pa.string())
    hashes = hash32([column]) % 3
    many, few = Groups._of_many([column], hashes), Groups._of_few([column], hashes)
    assert few.order.tolist() == many.order.tolist()
    assert few.starts.tolist() == many.starts.tolist()


@pytest.mark.parametrize(("keys", "few"), [(10, True), (1000, True), (1_000_000, False)])
def test_the_way_depends_on_how_many_keys_there_are(keys: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(Groups, "_of_few", lambda *_: used.append(True))
    monkeypatch.setattr(Groups, "_of_many", lambda *_: used.append(False))
    # In order, as the changes of another stage come.
    column = pa.array(np.sort(np.random.default_rng(0).integers(0, keys, 50_000)))
    Groups.of([column], hash32([column]))
    Groups.of([column.cast(pa.float64())], hash32([column]))
    assert used == [few, False]


@pytest.mark.parametrize(("name", "how"), CASES)
@given(data=st.data())
def test_reductions(name: str, how: str, data: st.DataObject) -> None:
    type_, strategy = COLUMNS[name]
    rows = data.draw(st.lists(st.tuples(st.sampled_from("abc"), strategy), max_size=20))
    groups = rows_of([key for key, _ in rows], lambda key: ord(key or "-"))
    column = pa.array([value for _, value in rows], type_)
    by_key = {key: [value for k, value in rows if k == key and value is not None] for key, _ in rows}
    if (
        how == SUM
        and name.startswith("int64")
        and any(not -(2**63) <= sum(values) < 2**63 for values in by_key.values())
    ):
        with pytest.raises(OverflowError):
            groups.reduce(column, how)
        return
    reduced = groups.reduce(column, how)
    assert reduced.type == type_
    expected = []
    for key in sorted({key for key, _ in rows}):
        values = [value for k, value in rows if k == key and value is not None]
        expected.append(SLOWLY[how](values) if values else None)
    # As text, so that NaN is NaN and -0.0 is not 0.0.
    assert list(map(repr, reduced.to_pylist())) == list(map(repr, pa.array(expected, type_).to_pylist()))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_sum_of_decimals_has_its_digits_or_is_an_error(n: int) -> None:
    column = pa.array([decimal.Decimal(9 * 10**37)] * n, pa.decimal128(38, 0))
    with pytest.raises(OverflowError, match="more digits than decimal128"):
        rows_of(["a"] * n, lambda _: 0).reduce(column, SUM)
    assert rows_of(["a"], lambda _: 0).reduce(column[:1], SUM).to_pylist() == [decimal.Decimal(9 * 10**37)]


def test_zeros_of_either_sign_are_one_key() -> None:
    keys = pa.array([0.0, 1.0, -0.0])
    assert Groups.of([keys], hash32([keys])).number_of_rows().tolist() in ([0, 1, 0], [1, 0, 1])


HASHES = st.integers(0, 2**32 - 1)


@given(
    hashes=st.lists(st.one_of(HASHES, st.integers(1000, 1010), st.sampled_from([0, 2**32 - 1])), min_size=1),
    wanted=st.lists(st.one_of(HASHES, st.integers(998, 1012), st.sampled_from([0, 2**32 - 1]))),
)
def test_an_index_says_what_binary_search_says(hashes: list[int], wanted: list[int]) -> None:
    ordered, of = np.sort(np.array(hashes, dtype=np.uint32)), np.array(wanted, dtype=np.uint32)
    found = HashIndex(ordered).last_at_most(of)
    assert found.tolist() == (np.searchsorted(ordered, of, side="right") - 1).tolist()


@pytest.mark.parametrize("rows", [1, 2, 70_000])
@pytest.mark.parametrize("versions", [1, 3000])
def test_an_index_of_many(rows: int, versions: int) -> None:
    """Also where thousands of rows have one hash, and others come right before them."""
    random = np.random.default_rng(0)
    hashes = random.integers(0, 2**32, rows, dtype=np.uint32)
    hashes = np.sort(np.concatenate([hashes, np.repeat(hashes[:3], versions)]))
    wanted = np.concatenate([random.choice(hashes, 1000), random.integers(0, 2**32, 1000, dtype=np.uint32)])
    wanted = np.concatenate([wanted, wanted - np.uint32(1), wanted + np.uint32(1)])
    found = HashIndex(hashes).last_at_most(wanted)
    assert np.array_equal(found, np.searchsorted(hashes, wanted, side="right") - 1)


@given(data=st.data())
def test_gathered_rows(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(COLUMNS)))
    type_, strategy = COLUMNS[name]
    batches = data.draw(st.lists(st.lists(strategy, min_size=1, max_size=5), max_size=4))
    picked = [data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5)) for values in batches]
    n = sum(map(len, picked))
    places = data.draw(st.permutations(range(n)))
    expected: list[Any] = [None] * n
    pieces, at = [], iter(places)
    for values, rows in zip(batches, picked, strict=True):
        to = [next(at) for _ in rows]
        for row, place in zip(rows, to, strict=True):
            expected[place] = values[row]
        batch = pa.record_batch({"x": pa.array(values, type_), "y": pa.array(map(str, values))})
        pieces.append((batch, np.array(rows, dtype=np.int64), np.array(to, dtype=np.int64)))
    found = gather(pieces, pa.schema([("x", type_), ("y", pa.string())]))
    assert found.schema.field("x").type == type_
    assert list(map(repr, found.column("x").to_pylist())) == list(map(repr, pa.array(expected, type_).to_pylist()))
    assert found.column("y").to_pylist() == list(map(str, expected))
