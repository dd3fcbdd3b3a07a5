"""Queries of chance, kept up to date, beside Spark's own."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, differences, flow_over_inputs, frames, run
from tests.views.clauses import SCHEMAS
from tests.views.random_queries import Queries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROUNDS = int(os.environ.get("NOSYNC_QUERIES", "4"))
TOGETHER = 12
EDITED = 8
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
    run(spark, open_store(), made(spark, 0, 2), Inputs(0), 2, [2])


@pytest.mark.long("make views")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_queries_of_chance(spark: SparkSession, open_store: OpenStore, seed: int) -> None:
    run(spark, open_store(), made(spark, seed, TOGETHER), Inputs(seed), 3, [2, 2, 1])


EDITS = [
    ("sum(", "max("), ("max(", "min("), ("avg(", "sum("), ("count(", "min("), ("LEFT JOIN", "JOIN"), ("UNION ALL", "UNION"),
    ("DISTINCT ", ""), (" IN (", " NOT IN ("), (" > ", " <= "), (" = ", " <> "), ("rank()", "dense_rank()"),
]  # fmt: skip
"""What may be changed in a text, so that much of it stays."""


def edited(spark: SparkSession, queries: Mapping[str, str], seed: int) -> dict[str, str]:
    """Returns other queries for the same views: each second one is the text with an edit, and others are of chance."""
    chance, others = random.Random(seed), made(spark, 1_000_000 + seed, len(queries))
    found = dict(others)
    for name in list(queries)[::2]:
        for old, new in chance.sample(EDITS, len(EDITS)):
            text = queries[name].replace(old, new)
            with contextlib.suppress(nosync.FlowError):
                if text != queries[name]:
                    flow_over_inputs().sql(name, text, spark=spark)
                    found[name] = text
                    break
    return found


@pytest.mark.long("make views")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_queries_of_chance_that_get_other_texts(spark: SparkSession, open_store: OpenStore, seed: int) -> None:
    """On a branch, and then by an upgrade; what an epoch before had stays."""
    before, inputs = made(spark, seed, EDITED), Inputs(seed)
    after = edited(spark, before, seed)
    job = run(spark, open_store(retain=100), before, inputs, 2, [2])
    seen = {name: sorted(map(repr, job.read(name).collect())) for name in before}

    def check(of: nosync.Job, what: str) -> None:
        found = list(differences(spark, of, after, {name: inputs.contents(name) for name in SCHEMAS}))
        assert not found, f"{what} of seed {seed}:\n" + "\n".join(found)

    branch = job.branch("other", at=0, views=after)
    branch.replay()
    check(branch, "the branch")
    flow = flow_over_inputs()
    for name, query in after.items():
        flow.sql(name, query, spark=spark)
    job.upgrade(flow)
    for t in (2, 3):
        job.advance(t, frames(spark, inputs.epoch(t)))
        check(job, f"epoch {t}")
    assert {name: sorted(map(repr, job.read(name, 1).collect())) for name in before} == seen
