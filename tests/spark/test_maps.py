"""Maps with null values, at any depth, in stages that change: read, compared and taken back rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.spark.maps import without_maps
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MADE = [
    "id",
    "map('p', p, 'id', id) AS m",
    "array(map('q', p)) AS l",
    "named_struct('m', map('r', map('s', p))) AS s",
    "IF(p = 7, NULL, map('t', p)) AS n",
]
ROWS = [(1, None), (2, 5), (3, 7), (4, 0)]


def expected(rows: list[tuple[int, int | None]]) -> dict[int, Any]:
    return {i: ({"p": p, "id": i}, [{"q": p}], ({"r": {"s": p}},), None if p == 7 else {"t": p}) for i, p in rows}


def found(job: nosync.Job) -> dict[int, Any]:
    return {row.id: (row.m, row.l, tuple(row.s), row.n) for row in job.read("made").collect()}


@pytest.mark.long
def test_maps_of_rows_that_change_keep_their_nulls(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    flow.table("rows", "id bigint, p bigint", key=["id"]).select("made", *MADE)
    job = nosync.Job(flow, open_store(retain=10), spark=spark, shards=2)
    job.advance(0, {"rows": spark.createDataFrame(ROWS, "id bigint, p bigint")})
    assert found(job) == expected(ROWS)
    changed = [(1, 3), (2, None)]
    job.advance(1, {"rows": spark.createDataFrame(changed, "id bigint, p bigint")})
    assert found(job) == expected([*changed, *ROWS[2:]])
    branch = job.branch("other", at=0, replace={"made": [*MADE[:1], "map('p', 0L, 'id', id) AS m", *MADE[2:]]})
    branch.replay()
    rows = {(row["_side"], row.id): row.m for row in nosync.diff_changes(job, branch, "made", 0, 1).collect()}
    assert rows["a", 1] in ({"p": 3, "id": 1}, {"p": None, "id": 1})


def test_what_has_no_maps_is_as_it_was(spark: SparkSession) -> None:
    frame = spark.range(2)
    assert without_maps(frame)[0] is frame
