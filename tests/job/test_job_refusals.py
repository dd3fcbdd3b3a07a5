"""Functions that go wrong, and jobs and inputs that do not fit: refused, naming the stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from tests.helpers.word_jobs import (
    SCHEMA,
    SHARDS,
    epochs,
    make_flow,
    run,
    to_spark,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
pytestmark = pytest.mark.spark


def _add_column(rows: pa.Table) -> pa.Table:
    return rows.append_column("y", rows["n"]) if rows.num_rows else rows


def _mutate_input(rows: pa.Table) -> pa.Table:
    if rows.num_rows:
        rows["n"].chunk(0).to_numpy()[0] = 7
    return rows


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_add_column, r"returned columns \(.*y int64\), expected \(word string, n int64, x double\)"),
        (lambda rows: rows if not rows.num_rows else rows.to_pylist(), "returned list, expected a pyarrow.Table"),
        (lambda rows: rows if not rows.num_rows else rows["nope"], "raised KeyError"),
        (_mutate_input, "raised ValueError: assignment destination is read-only"),
    ],
)
def test_functions_that_go_wrong(spark: SparkSession, store: nosync.Store, fn: Any, message: str) -> None:
    flow = nosync.Dataflow("f")
    flow.source("words", SCHEMA).map("m", fn)
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    with pytest.raises(nosync.StageError, match=message) as caught:
        job.advance(0, {"words": to_spark(spark, epochs(1, 1)[0])})
    assert (caught.value.stage, caught.value.t) == ("m", "0")
    assert store.verify().ok


def _update_stranger(changes: pa.Table, state: pa.Table) -> pa.Table:
    return pa.table({"word": ["stranger"], "v": pa.array([1], pa.int64())})


def test_an_update_may_only_return_its_keys(spark: SparkSession, store: nosync.Store) -> None:
    flow = nosync.Dataflow("f")
    flow.source("words", SCHEMA).update("u", key=["word"], state="v bigint", fn=_update_stranger)
    job = nosync.Job(flow, store, spark=spark, shards=1)
    with pytest.raises(nosync.StageError, match="'stranger'.*not among the changed ones"):
        job.advance(0, {"words": to_spark(spark, epochs(1, 1)[0])})


def test_randomness_is_caught(spark: SparkSession, store: nosync.Store) -> None:
    def roll(rows: pa.Table) -> pa.Table:
        import secrets

        return rows.set_column(1, "n", pa.array([secrets.randbelow(10**9) for _ in range(rows.num_rows)], pa.int64()))

    flow = nosync.Dataflow("f")
    flow.source("words", SCHEMA).map("dice", roll)
    job = nosync.Job(flow, store, spark=spark, shards=1)
    job.advance(0, {"words": to_spark(spark, epochs(1, 1)[0])})
    store.sync()
    for layer in store.layers():
        if layer.stage == "dice":
            Path(layer.path).unlink()
    with pytest.raises(nosync.DeterminismError, match="dice"):
        job.recover()
    assert job.safe_point() is None


def test_jobs_that_do_not_fit_the_store(spark: SparkSession, store: nosync.Store) -> None:
    frames = epochs(1, 1)
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    run(job, spark, frames)
    with pytest.raises(nosync.FlowError, match="key_groups=64"):
        nosync.Job(nosync.Dataflow("x", key_groups=64), store, spark=spark)
    with pytest.raises(nosync.FlowError, match="shards is 0"):
        nosync.Job(make_flow(), store, spark=spark, shards=0)
    with pytest.raises(nosync.FlowError, match="not a SparkSession"):
        nosync.Job(make_flow(), store, spark="local")  # type: ignore[arg-type]
    changed = nosync.Dataflow("words")
    kept = changed.source("words", SCHEMA).map("kept", lambda rows: rows)
    kept.aggregate("totals", key=["word"], n=nosync.count())
    with pytest.raises(nosync.FlowError, match="stage kept was recorded with fingerprint"):
        nosync.Job(changed, store, spark=spark, shards=SHARDS)
    nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)  # the same code again, compiled anew


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda s, f: {}, nosync.InvalidInputError, "source words has no input"),
        (lambda s, f: {"words": f, "x": f}, nosync.InvalidInputError, "'x' is not a source"),
        (lambda s, f: {"words": f.drop("n")}, nosync.SchemaError, "column 'n' is missing; expected"),
        (
            lambda s, f: {"words": f.withColumnRenamed("n", "N")},
            nosync.SchemaError,
            r"'n' is missing \(there is 'N': names",
        ),
        (
            lambda s, f: {"words": f.selectExpr("word", "cast(n as int) n", "x")},
            nosync.SchemaError,
            "int32, expected int64",
        ),
        (lambda s, f: {"words": [1]}, nosync.SchemaError, "expected a Spark DataFrame"),
        (
            lambda s, f: {
                "words": s.readStream.format("rate").load().selectExpr("'a' AS word", "value AS n", "1.5D AS x")
            },
            nosync.InvalidInputError,
            r"source words: a streaming DataFrame.*job\.stream",
        ),
    ],
)
def test_inputs_that_do_not_fit(
    spark: SparkSession, store: nosync.Store, inputs: Any, error: type[Exception], message: str
) -> None:
    job = nosync.Job(make_flow(), store, spark=spark, shards=SHARDS)
    frame = to_spark(spark, epochs(1, 1)[0])
    with pytest.raises(error, match=message):
        job.advance(0, inputs(spark, frame))
    with pytest.raises(nosync.NotAvailableError, match="no epoch was run"):
        job.read("totals")
    job.advance(0, {"words": frame})
    with pytest.raises(nosync.OutOfOrderError, match="next one is 1"):
        job.advance(5, {"words": frame})
    with pytest.raises(nosync.UnknownStageError, match="stages: words, kept"):
        job.read("nope")
    with pytest.raises(nosync.NotAvailableError, match="the newest is 0"):
        job.read("totals", as_of=3)
