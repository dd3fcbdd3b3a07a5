"""What differs from Structured Streaming on purpose, as docs/convert.md lists it: it differs in just that way."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from tests.parity.both_ways import by_nosync, by_spark
from tests.parity.cases import CASES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
BY_NAME = {case.name: case for case in CASES}
TYPES = {"at": pa.timestamp("us", "UTC"), "k": pa.string(), "x": pa.int64()}


def rows(*given: tuple[datetime.datetime, str, int]) -> pa.Table:
    return pa.table({name: pa.array([row[i] for row in given], type_) for i, (name, type_) in enumerate(TYPES.items())})


@pytest.mark.long("make parity")
def test_times_before_1970_are_late_in_spark_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Its watermark begins there, and not with the first row."""
    case = BY_NAME["tumbling-append"]
    before, after = (datetime.datetime(year, 6, 1, tzinfo=datetime.UTC) for year in (1969, 1971))
    batches = [{"events": rows((before, "a", 1))}, {"events": rows((after, "a", 2))}, {"events": rows((after, "b", 3))}]
    there = by_spark(spark, case, batches, tmp_path / "spark")
    here = by_nosync(case, batches, tmp_path / "nosync", 1)
    assert there == Counter()
    assert [row[-1] for row in here] == [1]


@pytest.mark.long("make parity")
def test_null_keys_match_nothing_in_a_full_interval_join(spark: SparkSession, tmp_path: Path) -> None:
    """As in SQL, and in a batch of Spark. In a stream Spark joins them with each other."""
    case = BY_NAME["interval-full-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    left = pa.table({"at": pa.array([day], TYPES["at"]), "k": pa.array([None], pa.string()), "x": pa.array([1])})
    right = left.rename_columns(["seen", "j", "y"])
    batches = [{"events": left, "others": right}]
    assert [row[-1] for row in by_spark(spark, case, batches, tmp_path / "spark")] == [1], "a pair"
    assert by_nosync(case, batches, tmp_path / "nosync", 1) == Counter(), "neither is over yet"


@pytest.mark.long("make parity")
def test_a_null_key_moves_the_watermark_of_a_join(spark: SparkSession, tmp_path: Path) -> None:
    """Spark leaves it out before the watermark, so what it would make final is not final there."""
    case = BY_NAME["interval-left-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    events = rows((day, "a", 1), (day + datetime.timedelta(hours=2), "b", 2))
    others = pa.table(
        {
            "seen": pa.array([day, day + datetime.timedelta(hours=2)], TYPES["at"]),
            "j": pa.array(["z", None], pa.string()),
            "y": [1, 2],
        }
    )
    batches = [{"events": events, "others": others}]
    assert by_spark(spark, case, batches, tmp_path / "spark") == Counter()
    assert [row[0] for row in by_nosync(case, batches, tmp_path / "nosync", 1)] == ["a"], "its time is over"


def test_late_rows_are_recorded_and_not_dropped(tmp_path: Path) -> None:
    case = BY_NAME["tumbling-append"]
    day = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
    hour = datetime.timedelta(hours=1)
    batches = [{"events": rows((day + hour * n, "a", n))} for n in (5, 6, 0)]
    here = by_nosync(case, batches, tmp_path / "nosync", 1)
    assert {row[-1] for row in here} == {5}
    with nosync.open(tmp_path / "nosync") as store:
        assert store.read("w__late").column("x").to_pylist() == [0]
