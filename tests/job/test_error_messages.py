"""What went wrong, and what to do, is the first thing that an error says."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import nosync
from tests.conftest import OpenStore

pytestmark = pytest.mark.spark
SCHEMA = "k string, v bigint"


def refuses_negatives(rows: pa.Table) -> pa.Table:
    if any(v < 0 for v in rows.column("v").to_pylist()):
        raise ValueError("a negative value")
    return rows


def flow() -> nosync.Dataflow:
    made = nosync.Dataflow("f")
    made.source("rows", SCHEMA).map("checked", refuses_negatives).aggregate("sums", key=["k"], total=nosync.sum("v"))
    return made


@pytest.mark.long
def test_a_failed_epoch_of_a_stream(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"k": "a", "v": -1}')
    job = nosync.Job(flow(), open_store(), spark=spark, shards=1)

    def start(checkpoint: str) -> StreamingQuery:
        rows = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in"))
        return job.stream({"rows": rows}, checkpoint=tmp_path / checkpoint, trigger={"availableNow": True})

    query = start("one")
    with pytest.raises(nosync.StageError, match=r"^stage checked .*ValueError: a negative value") as raised:
        query.awaitTermination()
    assert raised.value.stage == "checked"
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    said = query.exception()
    assert said is not None
    assert str(said).splitlines()[0].startswith("StageError: stage checked")
    with pytest.raises(nosync.StageError):
        start("one").processAllAvailable()

    (tmp_path / "in" / "0.json").write_text('{"k": "a", "v": 1}')
    with pytest.raises(nosync.DeterminismError, match=r"^job.rewind\(-1\) first, then epoch 0 can be given these rows"):
        start("two").awaitTermination()
    assert job.rewind(-1) is None
    start("two").awaitTermination()
    assert [row.total for row in job.read("sums").collect()] == [1]


@pytest.mark.long
def test_corrected_rows_for_an_epoch_that_failed(spark: SparkSession, open_store: OpenStore) -> None:
    job = nosync.Job(flow(), open_store(), spark=spark, shards=1)

    def given(v: int) -> dict[str, object]:
        return {"rows": spark.createDataFrame([("a", v)], SCHEMA)}

    job.advance(5, given(1))
    with pytest.raises(nosync.StageError):
        job.advance(6, given(-1))
    with pytest.raises(
        nosync.DeterminismError, match=r"^job.rewind\(5\) first, then epoch 6 .*stage rows shard"
    ) as raised:
        job.advance(6, given(2))
    assert (raised.value.stage, raised.value.t) == ("rows", "6")
    assert job.rewind(5) is None
    job.advance(6, given(2))
    assert [row.total for row in job.read("sums").collect()] == [3]
    with pytest.raises(
        nosync.DeterminismError, match="^stage rows shard"
    ):  # sealed: rows of an epoch are what they are
        job.advance(6, given(3))


def test_nothing_is_written_by_way_of_the_format(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([("a", 1)], SCHEMA)
    for mode in ("append", "overwrite"):
        with pytest.raises(PySparkException) as raised:
            rows.write.format("nosync").mode(mode).save(str(tmp_path / "s"))
        line = next(line for line in str(raised.value).splitlines()[:5] if "InvalidInputError:" in line)
        assert (
            "format 'nosync' is for reading: a store gets its rows as epochs of a job, from job.advance(t, {...})"
            in line
        )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"k": "a", "v": 1}')
    stream = spark.readStream.schema(SCHEMA).json(str(tmp_path / "in")).writeStream.format("nosync")
    with pytest.raises(PySparkException, match="format 'nosync' is for reading"):
        stream.option("checkpointLocation", str(tmp_path / "cp")).start(str(tmp_path / "s")).awaitTermination(120)
    with pytest.raises(PySparkException):  # Spark refuses its default mode by itself
        rows.write.format("nosync").save(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()
