"""Every example runs, and finds what plain Python finds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from examples import fraud, orders_join, reachability, regression, rewound_sinks, sessions, word_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_word_count(spark: SparkSession, tmp_path: Path) -> None:
    assert word_count.run(spark, tmp_path) == Counter(" ".join(word_count.LINES).split())


@pytest.mark.long
def test_sessions(spark: SparkSession, tmp_path: Path) -> None:
    visits, late = sessions.run(spark, tmp_path)
    assert visits == [
        ("ada", 65, 3, "home", "item"),
        ("ada", 30, 1, "home", "home"),
        ("bob", 30, 1, "home", "home"),
        ("bob", 35, 2, "item", "home"),
    ]
    assert late == 1


def test_fraud(spark: SparkSession, tmp_path: Path) -> None:
    assert fraud.run(spark, tmp_path) == [(1, "1111", "insert"), (3, "2222", "insert"), (4, "1111", "expire")]


@pytest.mark.long
def test_orders_join(spark: SparkSession, tmp_path: Path) -> None:
    assert orders_join.run(spark, tmp_path) == [
        {"London": 10, None: 20},
        {"London": 15, "Paris": 27},
        {"Paris": 42},
    ]


@pytest.mark.long
def test_reachability(spark: SparkSession, tmp_path: Path) -> None:
    assert reachability.run(spark, tmp_path) == [["a", "b", "c", "d"], ["a", "b", "c", "d", "x", "y"], ["a"]]


@pytest.mark.long
def test_regression(spark: SparkSession, tmp_path: Path) -> None:
    found = regression.run(spark, tmp_path)
    for t, models in enumerate(found):
        rows = [row for e in range(t + 1) for row in regression.samples(e)]
        for sensor, coefficients in models.items():
            mine = np.array([row[1:] for row in rows if row[0] == sensor])
            x = np.column_stack([np.ones(len(mine)), mine[:, :2]])
            expected = np.linalg.lstsq(x, mine[:, 2], rcond=None)[0]
            np.testing.assert_allclose(coefficients, expected, rtol=1e-9)
    assert np.allclose(found[-1]["north"], regression.TRUE["north"], atol=0.05)


@pytest.mark.long
def test_rewound_sinks(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, right, known = rewound_sinks.run(spark, tmp_path)
    assert wrong == Counter(" ".join(rewound_sinks.LINES).split())
    assert right == Counter(" ".join(rewound_sinks.LINES).lower().split())
    assert known == sorted(right)
    assert "Those after 1 would run again, and the sink would skip them" in " ".join(capsys.readouterr().out.split())
