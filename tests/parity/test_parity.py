"""Rows at the sink of a Structured Streaming query, and of the flow that it becomes.

`make test` tries each kind of operator once with rows of chance, `make parity` as often as CASES says, and prints the seed of
what differs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.parity.both_ways import Case, by_nosync, by_spark
from tests.parity.cases import CASES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS = int(os.environ.get("NOSYNC_PARITY", "1"))
FIRST_SEED = int(os.environ.get("NOSYNC_PARITY_SEED", "0")) or int(np.random.default_rng().integers(1, 1 << 30))
IN_SHORT = {
    "aggregate-update", "tumbling-append", "session-append", "interval-left-append",
    "dedupe-then-window-append", "state-update",
}  # fmt: skip
"""A case of most kinds of operators."""
assert {case.name for case in CASES} >= IN_SHORT
SETTINGS = {"spark.sql.shuffle.partitions": "1", "spark.sql.session.timeZone": "UTC"}


@contextlib.contextmanager
def settings_of(spark: SparkSession, case: Case) -> Iterator[None]:
    """Has the settings of Spark that a query needs, as long as it runs."""
    settings, before = {**SETTINGS, **case.settings}, spark.conf.getAll
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name in settings:
            if name in before:
                spark.conf.set(name, before[name])
            else:
                spark.conf.unset(name)


@pytest.mark.spark
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in IN_SHORT else [pytest.mark.long("make parity")], id=case.name)
        for case in CASES
    ],
)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_the_rows_at_the_sink_are_those_of_spark(spark: SparkSession, tmp_path: Path, case: Case, number: int) -> None:
    """With other shards at each epoch and a restart between them; and again after all layers were lost."""
    seed = FIRST_SEED + number
    batches = case.batches(np.random.default_rng(seed))
    with settings_of(spark, case):
        expected = by_spark(spark, case, batches, tmp_path / "spark")
    found = by_nosync(case, batches, tmp_path / "nosync", seed, lose=True)
    assert found == expected, (
        f"NOSYNC_PARITY_SEED={seed}: {case.name}: only here {found - expected}, only in Spark {expected - found}"
    )
