"""A Kafka topic as a sink: messages in order, given again after a death, and what readers can tell of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import nosync
from nosync.job import kafka_sink
from nosync.job.kafka_sink import Message
from nosync.lsm.facts.deliveries import DeliveryLog
from tests.conftest import OpenStore
from tests.helpers.kafka import brokers
from tests.helpers.runner import StoreRunner
from tests.job.test_table_sinks import KILLS, Killed, delivery_of, flow_of, rows_of

confluent_kafka = pytest.importorskip("confluent_kafka")
COLUMNS = "k string, v bigint"


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with brokers() as address:
        yield address


@pytest.fixture
def topic(tmp_path: Path) -> str:
    return tmp_path.name


def sink_of(servers: str, topic: str) -> nosync.KafkaSink:
    return nosync.KafkaSink(topic, ["k"], {"bootstrap.servers": servers, "log_level": 0})


def read(servers: str, topic: str, until: Callable[[list[Any]], bool]) -> list[Any]:
    """Returns the messages of a topic, in order within each partition. The last that is waited for is said by `until`."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "readers", "log_level": 0, "enable.partition.eof": True}
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([confluent_kafka.TopicPartition(topic, p, confluent_kafka.OFFSET_BEGINNING) for p in partitions])
    found, ended = list[Any](), set[int]()
    for _ in range(1000):
        message = consumer.poll(0.1)
        if message is None:
            continue
        if message.error() is None:
            found.append(message)
        else:
            ended.add(message.partition())
        if len(ended) == len(partitions):
            break
    consumer.close()
    assert until(found)
    return found


def epoch_of(message: Any) -> int:
    return int(dict(message.headers())["nosync.epoch"])


@pytest.mark.spark
def test_messages_say_their_key_value_epoch_and_change(
    spark: SparkSession, open_store: OpenStore, servers: str, topic: str
) -> None:
    store = open_store(retain=100)
    job = nosync.Job(flow_of(), store, spark=spark, shards=2, sinks={"sums": sink_of(servers, topic)})
    job.advance(0, {"rows": spark.createDataFrame([("a", 1), (None, None)], COLUMNS)})
    job.advance(1, {"rows": spark.createDataFrame([("a", 2)], COLUMNS)})
    job.rewind(0)
    job.advance(1, {"rows": spark.createDataFrame([("a", 40)], COLUMNS)})
    found = read(servers, topic, lambda found: len(found) > 5)
    of_a = [m for m in found if m.key() == b'{"k":"a"}']
    assert [(epoch_of(m), dict(m.headers())["nosync.change_type"], json.loads(m.value())) for m in of_a] == [
        (0, b"insert", {"k": "a", "total": 1}),
        (1, b"update_preimage", {"k": "a", "total": 1}),
        (1, b"update_postimage", {"k": "a", "total": 3}),
        (1, b"update_preimage", {"k": "a", "total": 1}),
        (1, b"update_postimage", {"k": "a", "total": 41}),
    ]
    assert len({m.partition() for m in of_a}) == 1
    (without,) = (m for m in found if m.key() == b'{"k":null}')
    assert json.loads(without.value()) == {"k": None, "total": None}
    said = [m for m in found if m.key() == b"nosync.withdrawn_after"]
    partitions = {m.partition() for m in said}
    assert {m.partition() for m in found} <= partitions
    assert {(m.value(), dict(m.headers())["nosync.withdrawn_after"]) for m in said} == {(None, b"0")}
    (at,) = (m.offset() for m in said if m.partition() == of_a[0].partition())
    assert of_a[2].offset() < at < of_a[3].offset()


def as_messages(changes: Any, key: Any, t: int) -> Iterator[Message]:
    for row in changes.toArrow().to_pylist():
        yield row["k"].encode(), json.dumps(row).encode(), {"nosync.epoch": str(t).encode()}


def test_each_epoch_comes_in_order_and_again_at_most_where_the_job_died(
    open_store: OpenStore, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, left, kills, sent = random.Random(3), [0], 0, list[int]()
    mark, send = DeliveryLog.mark, nosync.KafkaSink._send

    def passed() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def marked(marks: DeliveryLog, t: int) -> None:
        passed()
        mark(marks, t)
        passed()

    def some_sent(sink: nosync.KafkaSink, messages: Any, what: str, partition: int | None = None) -> None:
        given = list(messages)
        passed()
        sent.append(len(given))
        send(sink, given[: len(given) // 2], what, partition)
        passed()
        send(sink, given[len(given) // 2 :], what, partition)
        passed()

    monkeypatch.setattr(kafka_sink, "_messages", as_messages)
    monkeypatch.setattr(DeliveryLog, "mark", marked)
    monkeypatch.setattr(nosync.KafkaSink, "_send", some_sent)
    store, sink = open_store(retain=1000), sink_of(servers, topic)
    while kills < KILLS:
        left[0] = chance.randint(1, 12)
        try:
            delivery, last = delivery_of(store, sink), store.last_sealed()
            for t in range(0 if last is None else last + 1, 1000):
                StoreRunner(flow_of(), store, t, shards=1).advance(t, rows_of(t))
                delivery.deliver(t)
        except Killed:
            kills += 1
    left[0] = 0
    delivery_of(store, sink)
    last = store.last_sealed()
    assert last is not None
    rows = store.changes("sums", -1, last).to_pylist()
    found = read(servers, topic, lambda found: len(found) >= len(rows))
    assert {json.dumps(row) for row in rows} == {m.value().decode() for m in found}
    assert len(rows) < len(found) <= sum(sent)
    newest: dict[int, int] = {}
    for m in found:  # readers drop what is older than the newest epoch that they have seen in the partition
        assert epoch_of(m) >= newest.get(m.partition(), 0)
        newest[m.partition()] = epoch_of(m)


def test_brokers_that_do_not_answer_are_said_and_the_epoch_is_given_again(
    open_store: OpenStore, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "_messages", as_messages)
    away = {"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 300, "log_level": 0}
    store = open_store(retain=100)
    StoreRunner(flow_of(), store, 0, shards=1).advance(0, pa.table({"k": ["a"], "v": [1]}))
    delivery = delivery_of(store, nosync.KafkaSink(topic, ["k"], away))  # type: ignore[arg-type]
    StoreRunner(flow_of(), store, 1, shards=1).advance(1, pa.table({"k": ["a"], "v": [1]}))
    with pytest.raises(nosync.StorageError, match=f"cannot send epoch 1 to topic {topic}: .*timed out"):
        delivery.deliver(1)
    delivery_of(store, sink_of(servers, topic))  # type: ignore[arg-type]
    assert {epoch_of(m) for m in read(servers, topic, bool)} == {1}


def test_what_was_sent_in_part_is_withdrawn_where_the_epoch_is_another_one(
    open_store: OpenStore, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "_messages", as_messages)
    store, sink = open_store(retain=100), sink_of(servers, topic)
    run_one = delivery_of(store, sink)  # type: ignore[arg-type]
    for t in (0, 1):
        StoreRunner(flow_of(), store, t, shards=1).advance(t, pa.table({"k": ["a", "b"], "v": [t, t]}))
        if t == 0:
            run_one.deliver(0)
    send = nosync.KafkaSink._send

    def some_sent(sink: nosync.KafkaSink, messages: Any, what: str, partition: int | None = None) -> None:
        send(sink, list(messages)[:1], what, partition)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(nosync.KafkaSink, "_send", some_sent)
        with pytest.raises(Killed):
            run_one.deliver(1)
    assert sink.last_given(run_one.marks("sums")) == 0
    store.rewind(0, keep_as="before")
    delivery_of(store, sink)  # type: ignore[arg-type]
    found = read(servers, topic, lambda found: len(found) > 3)
    said = {m.partition() for m in found if m.key() == b"nosync.withdrawn_after"}
    assert said >= {m.partition() for m in found if m.value() is not None and epoch_of(m) == 1}
    assert said
    assert sink.last_given(delivery_of(store, sink).marks("sums")) == 0  # type: ignore[arg-type]


def test_a_topic_of_which_brokers_know_nothing_is_not_taken_for_one_without_partitions(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(servers, topic)
    for error, said in ((confluent_kafka.KafkaError(3), "Unknown topic"), (None, "it has none")):
        known = SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions={})})
        broker = SimpleNamespace(list_topics=lambda *_, known=known, **__: known)
        monkeypatch.setitem(vars(sink), "_kafka", broker)
        with pytest.raises(nosync.StorageError, match=f"partitions of topic {topic}: .*{said}"):
            sink._partitions()


@pytest.mark.spark
def test_times_keep_their_microseconds(spark: SparkSession) -> None:
    rows = spark.sql(
        "SELECT timestamp'2024-01-01 00:00:00.000001Z' AS at, timestamp_ntz'2024-01-01 00:00:00.5' AS local, "
        "'insert' AS _change_type, 0L AS _epoch"
    )
    ((key, value, _),) = kafka_sink._messages(rows, ["at"], 0)
    assert json.loads(key or b"") == {"at": "2024-01-01T00:00:00.000001Z"}
    assert json.loads(value or b"") == {"at": "2024-01-01T00:00:00.000001Z", "local": "2024-01-01T00:00:00.500000"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nosync.KafkaSink("", ["k"], {"bootstrap.servers": "h:1"}), "needs the name of a topic"),
        (lambda: nosync.KafkaSink("t", "k", {"bootstrap.servers": "h:1"}), r"key='k': expected a list of columns"),
        (lambda: nosync.KafkaSink("t", ["k"], {}), "lacks 'bootstrap.servers'"),
        (lambda: nosync.KafkaSink("t", ["k"], {"bootstrap.servers": "h:1", "acks": "most"}), "topic t: .*acks"),
        (lambda: nosync.KafkaSink("t", ["k"], {"bootstrap.servers": "h:1", "nosuch": 1}), "topic t: .*nosuch"),
    ],
)
def test_a_mistake_is_said_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(nosync.InvalidInputError, match=message):
        make()
