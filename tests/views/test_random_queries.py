"""Queries of chance, kept up to date, beside Spark's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, flow_over_inputs, run
from tests.views.random_queries import Queries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROUNDS = int(os.environ.get("NOSYNC_QUERIES", "4"))
TOGETHER = 12
MAY_BE_REFUSED = 0.25


def made(spark: SparkSession, seed: int, many: int) -> dict[str, str]:
    """Returns queries that can be views. Fails where too many are refused."""
    queries = Queries(seed)
    found: dict[str, str] = {}
    refused = []
    while len(found) < many:
        query = queries.query()
        name = f"q{len(found)}"
        try:
            flow_over_inputs().sql(name, query, spark=spark)
            found[name] = query
        except nosync.FlowError as error:
            refused.append(f"{error}")
            assert len(refused) <= many * MAY_BE_REFUSED, "\n".join(refused)
    return found


@pytest.mark.timeout(600)
def test_some_queries_of_chance(spark: SparkSession, open_store: OpenStore) -> None:
    run(spark, open_store(), made(spark, 0, 4), Inputs(0), 2, [2])


@pytest.mark.long("make views")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_queries_of_chance(spark: SparkSession, open_store: OpenStore, seed: int) -> None:
    run(spark, open_store(), made(spark, seed, TOGETHER), Inputs(seed), 3, [2, 2, 1])
