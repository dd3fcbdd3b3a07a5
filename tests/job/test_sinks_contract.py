"""What a job promises its sinks: new ones, those left without an epoch, rewinds that they did not hear of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import nosync
from tests.helpers.totals import flow_of, given, totals

pytestmark = pytest.mark.spark


def test_a_sink_that_was_left_without_an_epoch_gets_it(
    spark: SparkSession, store: nosync.Store, tmp_path: Path
) -> None:
    got: list[int] = []
    fails: list[int] = []

    def take(changes: DataFrame, t: int) -> None:
        if t in fails:
            raise ConnectionError("the table is away")
        got.append(t)

    def job() -> nosync.Job:
        sinks: dict[str, Any] = {"sums": nosync.CallbackSink(take), "rows": nosync.ParquetSink(tmp_path / "out")}
        return nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks)

    first = job()
    first.advance(0, given(spark, ("a", 0)))
    fails.append(1)
    with pytest.raises(ConnectionError):
        first.advance(1, given(spark, ("a", 1)))
    fails.clear()
    first.advance(2, given(spark, ("a", 2)))
    assert got == [0, 1, 2]
    without = nosync.Job(flow_of(), store, spark=spark, shards=1)  # as one that died before it gave anything
    without.advance(3, given(spark, ("a", 3)))
    again = job()
    assert got == [0, 1, 2, 3]
    again.advance(4, given(spark, ("a", 4)))
    assert got == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "out").glob("epoch=*")) == [f"epoch={t}" for t in range(5)]


def test_a_new_sink_begins_with_the_next_epoch(spark: SparkSession, store: nosync.Store, tmp_path: Path) -> None:
    nosync.Job(flow_of(), store, spark=spark, shards=1).advance(0, given(spark, ("a", 0)))
    job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks={"sums": nosync.ParquetSink(tmp_path / "out")})
    job.advance(1, given(spark, ("a", 1)))
    assert [path.name for path in (tmp_path / "out").glob("epoch=*")] == ["epoch=1"]


@pytest.mark.long
def test_a_sink_hears_of_a_rewind_by_a_job_that_did_not_have_it(
    spark: SparkSession, store: nosync.Store, tmp_path: Path
) -> None:
    def job(**more: Any) -> nosync.Job:
        return nosync.Job(flow_of(), store, spark=spark, shards=1, **more)

    sinks = {"sums": nosync.ParquetSink(tmp_path / "out")}
    with_sink = job(sinks=sinks)
    for t in range(4):
        with_sink.advance(t, given(spark, ("a", 1)))
    without = job()
    without.rewind(1)
    for t in range(2, 5):
        without.advance(t, given(spark, ("a", 100)))
    job(sinks=sinks)
    out = spark.read.parquet(str(tmp_path / "out")).where("_change_type IN ('insert', 'update_postimage')")
    assert [row.total for row in out.orderBy("epoch").collect()] == [1, 2, 102, 202, 302]


@pytest.mark.parametrize("goes_on", ["the job", "another job"])
def test_what_a_call_wrote_that_failed_is_withdrawn_by_a_rewind(
    spark: SparkSession, store: nosync.Store, goes_on: str
) -> None:
    said: list[Any] = []
    fails = [1]

    def take(changes: DataFrame, t: int) -> None:
        said.append(
            (t, sorted(row.total for row in changes.collect() if row._change_type in ("insert", "update_postimage")))
        )
        if t in fails:
            raise ConnectionError("after a part was written")

    def job() -> nosync.Job:
        sink = nosync.CallbackSink(take, on_withdraw=lambda t: said.append(f"withdraw after {t}"))
        return nosync.Job(flow_of(), store, spark=spark, shards=1, sinks={"sums": sink})

    first = job()
    first.advance(0, given(spark, ("a", 1)))
    with pytest.raises(ConnectionError):
        first.advance(1, given(spark, ("a", 600)))
    fails.clear()
    (first if goes_on == "the job" else job_without(spark, store)).rewind(0)
    again = first if goes_on == "the job" else job()
    again.advance(1, given(spark, ("a", 1)))
    assert said == [(0, [1]), (1, [601]), "withdraw after 0", (1, [2])]
    job()
    assert len(said) == 4, "and nothing comes twice"


def job_without(spark: SparkSession, store: nosync.Store) -> nosync.Job:
    return nosync.Job(flow_of(), store, spark=spark, shards=1)


def test_a_rewind_to_before_a_sink_began_gives_it_no_older_epochs(
    spark: SparkSession, store: nosync.Store, tmp_path: Path
) -> None:
    called: list[int] = []
    before = job_without(spark, store)
    for t in range(3):
        before.advance(t, given(spark, ("a", 1)))
    sinks: dict[str, Any] = {
        "sums": nosync.ParquetSink(tmp_path / "out"),
        "rows": nosync.CallbackSink(lambda _, t: called.append(t)),
    }
    job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks)
    job.advance(3, given(spark, ("a", 1)))
    job.rewind(1)
    assert list((tmp_path / "out").glob("epoch=*")) == []
    job.advance(2, given(spark, ("a", 1)))
    assert [path.name for path in (tmp_path / "out").glob("epoch=*")] == ["epoch=2"]
    assert called == [3, 2]


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ({"sums": "out/"}, nosync.InvalidInputError, "is no sink"),
        ({"nope": nosync.CallbackSink(print)}, nosync.UnknownStageError, "stages: rows, sums"),
    ],
)
def test_a_sink_that_cannot_be_one_is_refused_before_anything_is_sealed(
    spark: SparkSession, store: nosync.Store, sinks: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        nosync.Job(flow_of(), store, spark=spark, shards=1, sinks=sinks)


def test_a_branch_without_the_stage_of_a_sink_is_not_promoted(
    spark: SparkSession, store: nosync.Store, tmp_path: Path
) -> None:
    job = nosync.Job(flow_of(), store, spark=spark, shards=1, sinks={"sums": nosync.ParquetSink(tmp_path / "out")})
    job.advance(0, given(spark, ("a", 1)))
    branch = job.branch("b", drop=["sums"])
    with pytest.raises(nosync.UnknownStageError):
        job.promote(branch)
    job.advance(1, given(spark, ("a", 1)))
    assert totals(store) == {"a": 2}
