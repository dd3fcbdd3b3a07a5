"""The canonical order of rows: that of a slow sort by hash and text, also where rows are equal or hashes collide."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.operators import canonical
from nosync.operators.canonical import by_content, canonical_order

COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "n": (pa.int64(), [None, 1, 2]),
    "d": (pa.float64(), [None, 0.0, -0.0, math.nan, 1.5]),
    "text": (pa.string(), [None, "", "a"]),
    "list": (pa.list_(pa.int64()), [None, [], [1], [None]]),
}


@pytest.mark.parametrize("names", [["n"], ["d"], ["text", "n"], ["list"], ["n", "d", "text", "list"]])
@pytest.mark.parametrize("hashes", [1, 3, 1000])
def test_the_order_is_that_of_hashes_and_then_of_texts(names: list[str], hashes: int) -> None:
    chance = random.Random(hashes)
    rows = pa.table(
        {name: pa.array([chance.choice(COLUMNS[name][1]) for _ in range(200)], COLUMNS[name][0]) for name in names}
    )
    texts = [repr(row) for row in rows.to_pylist()]
    hash_of = {text: chance.randrange(hashes) - 1 for text in sorted(set(texts))}
    given = rows.append_column(HASH64_COLUMN, pa.array([hash_of[text] for text in texts], pa.int64()))
    expected = sorted(range(200), key=lambda i: (hash_of[texts[i]], texts[i], i))
    order = canonical_order(given)
    assert [texts[i] for i in order] == [texts[i] for i in expected]
    assert repr(by_content(given).to_pylist()) == repr(rows.take(pa.array(expected)).to_pylist())


def test_equal_rows_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(rows: pa.Table) -> list[str]:
        raise AssertionError(f"{rows.num_rows} equal rows were written as texts")

    monkeypatch.setattr(canonical, "_texts", texts)
    n = np.arange(3000) % 7
    rows = pa.table({"n": n, "text": pa.array([None if i == 3 else str(i) for i in n]), HASH64_COLUMN: n * 11})
    assert by_content(rows).column("n").to_pylist() == sorted(n.tolist())
