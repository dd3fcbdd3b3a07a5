"""Each clause that a view can have, kept up to date under insertions, changes and deletions; and what is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.spark.session import ZONE, active_in_jvm, conf_set
from tests.conftest import OpenStore
from tests.views.both_ways import Inputs, flow_over_inputs, named, parts, run
from tests.views.clauses import CLAUSES, REFUSED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROUNDS = int(os.environ.get("NOSYNC_VIEWS", "1"))
VIEWS = named(CLAUSES)
PARTS = parts(VIEWS, 22)
SOME = [*list(VIEWS)[3::12], "frames_by_decimals", "other_places"]
"""What `make test` has time for; `make views` has all."""


@pytest.mark.timeout(400)
def test_some_views_are_what_spark_gives(spark: SparkSession, open_store: OpenStore) -> None:
    run(spark, open_store(), {name: VIEWS[name] for name in SOME}, Inputs(0), 2, [2])


@pytest.mark.long("make views")
@pytest.mark.parametrize("part", range(len(PARTS)))
@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_all_views_are_what_spark_gives(spark: SparkSession, open_store: OpenStore, seed: int, part: int) -> None:
    shards = [1, 4, 4, 2] if seed % 2 else [2, 2, 3]
    run(spark, open_store(), {name: VIEWS[name] for name in PARTS[part]}, Inputs(seed), 4, shards)


def test_frames_of_days_are_refused_in_a_zone_where_clocks_change(spark: SparkSession) -> None:
    query = (
        "SELECT count(*) OVER (ORDER BY at RANGE BETWEEN INTERVAL 7 DAYS PRECEDING AND CURRENT ROW) AS n FROM orders"
    )
    flow = flow_over_inputs()
    with (
        active_in_jvm(spark.newSession()),  # whose zone is UTC
        conf_set(spark, {ZONE: "Europe/Rome"}),
        pytest.raises(nosync.FlowError, match="as in Europe/Rome, a day is not"),
    ):
        flow.sql("mine", query, spark=spark)
    flow.sql("mine", query, spark=spark)


@pytest.mark.parametrize("clause", REFUSED)
def test_what_cannot_be_kept_up_to_date_is_refused_where_it_is_declared(spark: SparkSession, clause: str) -> None:
    query, said = REFUSED[clause]
    flow = flow_over_inputs()
    before = [stage.name for stage in flow.stages]
    with pytest.raises(nosync.NosyncError, match=f"(?s)view mine: .*{said}"):
        flow.sql("mine", query, spark=spark)
    assert [stage.name for stage in flow.stages] == before, "nothing is half declared"
    assert not flow.views
