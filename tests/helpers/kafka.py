"""Kafka without Kafka: librdkafka's own brokers for tests, and a source of Spark with the columns of Spark's connector.

The connector is a package of Maven, which tests do not fetch. What stands in for it reads the same brokers by the same
options, keeps the same offsets in Spark's checkpoint, and gives the same columns.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
FORMAT = "kafka_of_tests"
HIDDEN = "test.hidden"
"""An option of what stands in alone: offsets whose messages are gone, as after a compaction."""
_PATIENCE_S = 30


@contextmanager
def brokers() -> Iterator[str]:
    """Gives the address of librdkafka's brokers for tests. They are those of a producer, and go with it."""
    producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    found = next(iter(producer.list_topics(timeout=10).brokers.values()))
    yield f"{found.host}:{found.port}"
    producer.flush(0)


def send(servers: str, topic: str, messages: Sequence[tuple[str, str | None]]) -> None:
    """Sends keys and values. A value that is None says that the key is gone."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "log_level": 0, "acks": "all"})
    for key, value in messages:
        producer.produce(topic, key=key.encode(), value=None if value is None else value.encode())
    assert producer.flush(_PATIENCE_S) == 0, "messages were not taken"


@dataclass
class Range(InputPartition):
    """Offsets of a partition: `begin <= offset < end`."""

    partition: int
    begin: int
    end: int


class StandIn(DataSource):
    """What stands in for `format("kafka")`, a name that Spark keeps for the connector."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return _SCHEMA

    def streamReader(self, schema: StructType) -> Reader:
        return Reader(dict(self.options))


class Reader(DataSourceStreamReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        known = {"kafka.bootstrap.servers", "subscribe", "startingoffsets", "failondataloss", HIDDEN, "path"}
        others = {name for name in options if name.lower() not in known}
        assert not others, f"what stands in for the connector has no options {others}"
        options = {name.lower(): value for name, value in options.items()}
        assert options.get("startingoffsets") == "earliest", "it begins with the earliest offset"
        self._servers, self._topic = options["kafka.bootstrap.servers"], options["subscribe"]
        self._hidden = {int(offset) for offset in options.get(HIDDEN, "").split(",") if offset}

    def _consumer(self) -> Any:
        return confluent_kafka.Consumer(
            {"bootstrap.servers": self._servers, "group.id": "spark", "log_level": 0, "enable.auto.commit": False}
        )

    def initialOffset(self) -> dict[str, int]:
        return self._offsets(0)

    def latestOffset(self, *_: object) -> dict[str, int]:
        return self._offsets(1)

    def _offsets(self, end: int) -> dict[str, int]:
        """Returns of each partition the first offset (0), or that behind the last (1)."""
        consumer = self._consumer()
        try:
            partitions = consumer.list_topics(self._topic, timeout=_PATIENCE_S).topics[self._topic].partitions
            return {
                str(p): consumer.get_watermark_offsets(confluent_kafka.TopicPartition(self._topic, p), _PATIENCE_S)[end]
                for p in sorted(partitions)
            }
        finally:
            consumer.close()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [Range(int(p), start.get(p, 0), last) for p, last in end.items() if last > start.get(p, 0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, Range)
        consumer = self._consumer()
        consumer.assign([confluent_kafka.TopicPartition(self._topic, partition.partition, partition.begin)])
        try:
            at = partition.begin
            while at < partition.end:
                message = consumer.poll(_PATIENCE_S)
                assert message is not None, f"offset {at} of partition {partition.partition} did not come"
                assert message.error() is None, message.error()
                at = message.offset() + 1
                if message.offset() not in self._hidden:
                    yield _row(message)
        finally:
            consumer.close()


def _row(message: Any) -> tuple[Any, ...]:
    kind, millis = message.timestamp()
    time = datetime.datetime.fromtimestamp(millis / 1000, datetime.UTC)
    of = (message.topic(), message.partition(), message.offset(), time, kind - 1)
    return message.key(), message.value(), *of
