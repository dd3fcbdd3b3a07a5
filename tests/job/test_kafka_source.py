"""Topics of Kafka as sources: a batch that failed is given again with the messages that it had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import nosync
from nosync.job.sealing import Sealing
from tests.conftest import OpenStore
from tests.helpers.kafka import FORMAT, HIDDEN, StandIn, brokers, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def servers(spark: SparkSession) -> Iterator[str]:
    spark.dataSource.register(StandIn)
    with brokers() as address:
        yield address


def messages(spark: SparkSession, servers: str, topic: str, **options: str) -> DataFrame:
    reader = spark.readStream.format(FORMAT).option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    read = reader.option("startingOffsets", "earliest").options(**options).load()
    return read.selectExpr(
        "CAST(key AS STRING) AS key", "CAST(CAST(value AS STRING) AS BIGINT) AS value", "partition", "offset"
    )


def flow_of() -> nosync.Dataflow:
    flow = nosync.Dataflow("topic")
    rows = flow.source("rows", "key string, value bigint, partition int, offset bigint")
    rows.aggregate("sums", key=["key"], n=nosync.count(), total=nosync.sum("value"))
    return flow


def started(job: nosync.Job, stream: DataFrame, checkpoint: Path) -> StreamingQuery:
    return job.stream({"rows": stream}, checkpoint=str(checkpoint), trigger={"availableNow": True})


def sums(job: nosync.Job, t: int | None = None) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in job.read("sums", t).select("key", "n", "total").collect()}


@pytest.fixture
def sealing_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epoch is computed and recorded, and then its job dies."""
    real, died = Sealing.seal, list[int]()

    def seal(self: Sealing, flow: Any, t: int, *more: Any, **named: Any) -> None:
        if not died:
            died.append(t)
            raise OSError("died before it sealed")
        real(self, flow, t, *more, **named)

    monkeypatch.setattr(Sealing, "seal", seal)


@pytest.mark.long
@pytest.mark.usefixtures("sealing_fails_once")
def test_a_batch_that_failed_is_given_again_with_its_messages(
    spark: SparkSession, open_store: OpenStore, servers: str, tmp_path: Path
) -> None:
    topic, store = "again", open_store()
    send(servers, topic, [("a", "1"), ("b", "2"), ("a", "3")])
    job = nosync.Job(flow_of(), store, spark=spark, shards=2)
    with pytest.raises(Exception, match="died before it sealed"):
        started(job, messages(spark, servers, topic), tmp_path / "checkpoint").awaitTermination()
    send(servers, topic, [("a", "40")])
    job = nosync.Job(flow_of(), store, spark=spark, shards=2)
    for _ in range(2):  # of what stands in, Spark runs one batch each time
        started(job, messages(spark, servers, topic), tmp_path / "checkpoint").awaitTermination()
    assert sums(job, 0) == {("a", 2, 4), ("b", 1, 2)}, "the batch that failed had no more"
    assert sums(job) == {("a", 3, 44), ("b", 1, 2)}
    given = {tuple(row) for row in job.read("rows").select("partition", "offset").collect()}
    assert len(given) == 4, "each message once"


@pytest.mark.long
@pytest.mark.usefixtures("sealing_fails_once")
def test_a_batch_that_is_given_again_with_a_message_less_stops_the_job(
    spark: SparkSession, open_store: OpenStore, servers: str, tmp_path: Path
) -> None:
    topic, store = "less", open_store()
    send(servers, topic, [(key, "1") for key in "abcdefghij"])
    job = nosync.Job(flow_of(), store, spark=spark, shards=2)
    with pytest.raises(Exception, match="died before it sealed"):
        started(job, messages(spark, servers, topic), tmp_path / "checkpoint").awaitTermination()
    job = nosync.Job(flow_of(), store, spark=spark, shards=2)
    less = messages(spark, servers, topic, **{HIDDEN: "0"})
    with pytest.raises(nosync.DeterminismError, match="epoch 0"):
        started(job, less, tmp_path / "checkpoint").awaitTermination()
    assert store.last_sealed() is None
    job.rewind(-1)  # what was recorded of the batch goes
    started(job, less, tmp_path / "checkpoint").awaitTermination()
    left = [row["offset"] for row in job.read("rows").collect()]
    assert 0 < len(left) < 10
    assert min(left) > 0, "each partition's first message is the one that is gone"
    assert sum(total for _, _, total in sums(job)) == len(left)
