"""A Kafka topic as a sink, by confluent-kafka: a message for each change. At least once.

Kafka can neither refuse an epoch that it has nor take one back. So what may come again can be told by readers: each
message says its epoch in a header, and epochs come in order. What is withdrawn is said by a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from nosync.job.sinks import AT_LEAST_ONCE
from nosync.job.table_sink import needs, said_by
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, SchemaError, StorageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.trace.change_feed import INSERT, UPDATE_AFTER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EPOCH_HEADER, CHANGE_HEADER, WITHDRAWN_HEADER = "nosync.epoch", "nosync.change_type", "nosync.withdrawn_after"
_SERVERS = "bootstrap.servers"
_WAIT_S = 1.0
_METADATA_S = 30.0

Message = tuple[bytes | None, bytes | None, dict[str, bytes]]
"""A key, a value and headers."""


@dataclass(frozen=True)
class KafkaSink:
    """Sends the changes of each epoch to a topic. At least once: an epoch may come again, with identical messages.

    `key`: the columns of the messages' key; messages of one key are in one partition, in order. `config`: of the producer,
    as librdkafka names it; `bootstrap.servers` is needed. Key and value are JSON objects; the headers `nosync.epoch` and
    `nosync.change_type` say the rest. Where epochs are withdrawn, each partition gets a message without a value whose
    header `nosync.withdrawn_after` says after which epoch, and then the epochs that are there now. The changes of an epoch
    go through the driver.
    """

    topic: str
    key: Sequence[str]
    config: Mapping[str, Any] = field(repr=False)

    guarantee = AT_LEAST_ONCE

    def __post_init__(self) -> None:
        if not self.topic:
            raise InvalidInputError("a KafkaSink needs the name of a topic: it is empty")
        if isinstance(self.key, str) or not all(isinstance(name, str) for name in self.key):
            raise InvalidInputError(f"key={self.key!r}: expected a list of columns, as in key=['customer']")
        if not self.config.get(_SERVERS):
            raise InvalidInputError(
                f"config= of a KafkaSink lacks {_SERVERS!r}: say where the brokers are, as in 'host:9092'"
            )
        needs("confluent_kafka", "kafka", self)
        _ = self._kafka

    @cached_property
    def _kafka(self) -> Any:
        from confluent_kafka import KafkaException, Producer  # noqa: PLC0415

        try:
            return Producer({"enable.idempotence": True, **self.config})
        except (KafkaException, TypeError, ValueError) as error:
            raise InvalidInputError(f"config= of the KafkaSink for topic {self.topic}: {said_by(error)}") from None

    def deliver(self, changes: Callable[[], DataFrame], t: int, marks: DeliveryLog) -> bool:
        given = self.last_given(marks)
        if given is not None and given >= t:
            return False
        marks.begin_sending(t)
        self._send(_messages(changes(), self.key, t), f"epoch {t}")
        marks.take_back(marks.unsent())
        return True

    def last_given(self, marks: DeliveryLog) -> int | None:
        return marks.last_sent()

    def check_columns(self, stage: str, schema: pa.Schema) -> None:
        """Raises SchemaError where the key is none of a stage's columns."""
        _check_key(self.key, schema.names, f"the KafkaSink of stage {stage}")

    def is_begun(self, marks: DeliveryLog) -> bool:
        return bool(marks.unsent())

    def withdraw(self, after: int, marks: DeliveryLog) -> None:
        if marks.left_after() is None:
            return  # what is not there any more was lost, and computed again it is the same
        said: Message = (WITHDRAWN_HEADER.encode(), None, {WITHDRAWN_HEADER: str(after).encode()})
        for partition in self._partitions():
            self._send([said], f"that the epochs after {after} are withdrawn", partition)
        marks.withdraw(after)

    def _partitions(self) -> list[int]:
        from confluent_kafka import KafkaException  # noqa: PLC0415

        try:
            found = self._kafka.list_topics(self.topic, timeout=_METADATA_S).topics[self.topic]
        except KafkaException as error:
            raise StorageError(
                f"cannot ask for the partitions of topic {self.topic}: {_told(error.args[0])}"
            ) from error
        if found.error is not None or not found.partitions:
            why = "it has none" if found.error is None else _told(found.error)
            raise StorageError(f"cannot ask for the partitions of topic {self.topic}: {why}")
        return sorted(found.partitions)

    def _send(self, messages: Iterator[Message] | list[Message], what: str, partition: int | None = None) -> None:
        """Sends messages, and waits until the brokers have all of them. Raises StorageError."""
        from confluent_kafka import KafkaException  # noqa: PLC0415

        failed: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        where = {} if partition is None else {"partition": partition}
        try:
            for key, value, headers in messages:
                while True:
                    try:
                        self._kafka.produce(
                            self.topic,
                            value,
                            key,
                            headers=headers,
                            on_delivery=delivered,
                            **where,
                        )
                        break
                    except BufferError:  # so many wait already
                        self._kafka.poll(_WAIT_S)
                self._kafka.poll(0)
                if failed:
                    break
            while self._kafka.flush(_WAIT_S):
                pass  # what does not come to the broker in message.timeout.ms fails, so this ends
        except KafkaException as error:
            failed.append(error.args[0])
        if failed:
            raise StorageError(f"cannot send {what} to topic {self.topic}: {_told(failed[0])}")


def _told(error: Any) -> str:
    return str(error.str()) if hasattr(error, "str") else said_by(error)


def _check_key(key: Sequence[str], columns: Sequence[str], whose: str) -> None:
    unknown = [name for name in key if name not in columns]
    if unknown:
        raise SchemaError(f"key={list(key)} of {whose}: {unknown[0]!r} is none of the columns {list(columns)}")


def _messages(changes: DataFrame, key: Sequence[str], t: int) -> Iterator[Message]:
    """Yields the messages of an epoch's changes: first what goes, then what comes, so that the last one of a key counts.

    Raises SchemaError for a key that is no column.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415

    from nosync.spark.expressions import quoted  # noqa: PLC0415

    _check_key(key, changes.columns, "a KafkaSink")
    options = {
        "ignoreNullFields": "false",
        "timeZone": "UTC",
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
        "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    }
    shown = [name for name in changes.columns if name not in (CHANGE_TYPE_COLUMN, EPOCH_COLUMN)]

    def as_json(names: Sequence[str]) -> Any:
        return F.to_json(F.struct(*(F.col(quoted(name)) for name in names)), options)

    rows = changes.select(
        as_json(key).alias("key") if key else F.lit(None).cast("string").alias("key"),
        as_json(shown).alias("value"),
        F.col(CHANGE_TYPE_COLUMN).alias("change"),
    )
    table = rows.toArrow()
    comes = pc.is_in(table.column("change"), pa.array([INSERT, UPDATE_AFTER]))
    ordered = pa.concat_tables([table.filter(pc.invert(comes)), table.filter(comes)])
    for batch in ordered.to_batches():
        columns = (batch.column(i).to_pylist() for i in range(3))
        for found, value, change in zip(*columns, strict=True):
            headers = {EPOCH_HEADER: str(t).encode(), CHANGE_HEADER: change.encode()}
            yield None if found is None else found.encode(), value.encode(), headers
