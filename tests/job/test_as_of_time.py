"""Jobs, diffs and the Data Source as of a time of the wall clock."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.clocks import NOON_US, SECOND_US, Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DAY_US = 24 * 3600 * SECOND_US
AT = "2026-07-05T18:00"
"""Between the second epoch and the third."""


def totals() -> nosync.Dataflow:
    flow = nosync.Dataflow("words")
    flow.source("words", "word string, n bigint").aggregate("totals", key=["word"], total=nosync.sum("n"))
    return flow


@pytest.fixture
def ran(open_store: OpenStore, spark: SparkSession) -> tuple[nosync.Job, nosync.Store, Clock]:
    """A job with an epoch a day, of which the first was sealed on 4 July 2026 at noon."""
    clock = Clock()
    store = open_store(env=clock)
    job = nosync.Job(totals(), store, spark=spark, shards=2)
    for t in range(4):
        clock.now_us = NOON_US + t * DAY_US
        report = job.advance(t, {"words": spark.createDataFrame([(f"w{t}", 1), ("all", 1)], "word string, n bigint")})
        assert report.sealed_at == datetime(2026, 7, 4 + t, 12, tzinfo=UTC)
    store.sync()  # without its thread the node writes nothing by itself, and other processes ask
    return job, store, clock


def test_a_job_reads_and_explains_as_of_a_time(ran: tuple[nosync.Job, nosync.Store, Clock]) -> None:
    job, _, _ = ran
    for at in (AT, datetime(2026, 7, 5, 18), date(2026, 7, 6)):
        assert job.epoch_as_of(at) == 1
        assert sorted(job.read("totals", at).collect()) == sorted(job.read("totals", 1).collect())
    feed = job.changes("totals", AT, "2026-07-06T12:00")
    assert sorted(feed.collect()) == sorted(job.changes("totals", 1, 2).collect())
    assert job.explain("totals", {"word": "all"}, AT).as_of == 1
    with pytest.raises(nosync.NotAvailableError, match="its first is epoch 0, sealed at 2026-07-04T12:00:00Z"):
        job.read("totals", "2026-07-04")


@pytest.mark.long
def test_a_branch_begins_at_a_time_and_has_its_own_times(ran: tuple[nosync.Job, nosync.Store, Clock]) -> None:
    job, store, clock = ran
    clock.now_us = NOON_US + 30 * DAY_US
    branch = job.branch("doubled", at=AT, replace={"totals": {"total": nosync.max("n")}})
    assert branch.last_sealed() == 1
    branch.replay()
    assert branch.epoch_as_of("2026-07-20") == 1, "its later epochs were computed in August"
    assert branch.epoch_as_of("2026-08-04") == 3
    assert job.epoch_as_of("2026-07-20") == 3
    same = nosync.diff(job, branch, "totals", "2026-07-20")
    assert sorted(same.collect()) == sorted(nosync.diff(job, branch, "totals", 3).collect())
    assert nosync.diff_summary(job, branch, "totals", "2026-07-20").as_of == 3
    fed = nosync.diff_changes(job, branch, "totals", AT, "2026-07-20")
    assert sorted(fed.collect()) == sorted(nosync.diff_changes(job, branch, "totals", 1, 3).collect())
    before_all = nosync.diff_changes(job, branch, "totals", "2020-01-01", "2026-07-20")
    assert sorted(before_all.collect()) == sorted(nosync.diff_changes(job, branch, "totals", -1, 3).collect())
    assert store.status().branches_sealed_at["doubled"].startswith("2026-08-03")


@pytest.mark.long("make spark")
def test_the_data_source_takes_times_as_delta_spells_them(
    ran: tuple[nosync.Job, nosync.Store, Clock], spark: SparkSession
) -> None:
    _, store, _ = ran
    nosync.register(spark)

    def load(**options: object) -> list[tuple[object, ...]]:
        reader = spark.read.format("nosync").option("stage", "totals")
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return sorted(tuple(row) for row in reader.load(str(store.directory.root)).collect())

    then = load(asOf=1)
    assert len(then) == 3
    assert load(timestampAsOf=AT) == load(asOf=AT) == load(versionAsOf=1) == then
    assert load(timestampAsOf="2026-07-05 20:00:00+02:00") == then
    for options, said in (
        ({"timestampAsOf": 1}, "is no time; for an epoch say versionAsOf"),
        ({"versionAsOf": AT}, "is not an epoch number"),
        ({"asOf": 1, "timestampAsOf": AT}, "say one thing twice"),
        ({"timestampAsOf": "soon"}, "neither the number of an epoch nor a time"),
        ({"timestampAsOf": "2020-01-01"}, "its first is epoch 0"),
        ({"timestampAsOf": AT, "readChangeFeed": "true"}, "timestampAsOf is for a state"),
    ):
        with pytest.raises(Exception, match=said):
            load(**options)
