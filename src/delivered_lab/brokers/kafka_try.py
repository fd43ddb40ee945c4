"""Topics and records for a first try, with the client of the extra `kafka`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from delivered.model.errors import DeliveredError, MissingExtra, Unreachable

_TIMEOUT_S = 30.0
_READ_AT_ONCE = 1_000


def _client() -> Any:
    try:
        import confluent_kafka.admin
    except ImportError:
        raise MissingExtra("kafka") from None
    return confluent_kafka


def make_topics(bootstrap: str, names: Sequence[str], partitions: int) -> list[str]:
    """Create topics; returns the new ones.

    Raises:
        Unreachable: the server does not answer.
        DeliveredError: it rejects a name.
    """
    library = _client()
    admin = library.admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    wanted = [library.admin.NewTopic(n, partitions, 1) for n in dict.fromkeys(names)]
    made = []
    for name, future in admin.create_topics(wanted, request_timeout=_TIMEOUT_S).items():
        try:
            future.result(_TIMEOUT_S)
            made.append(name)
        except library.KafkaException as error:
            if error.args[0].code() == library.KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.args[0].retriable() or error.args[0].code() < 0:
                raise Unreachable(
                    "KAFKA_UNREACHABLE",
                    f"Kafka at {bootstrap} does not answer: {error.args[0].str()}",
                    next_step="delivered brokers start kafka",
                ) from None
            raise DeliveredError(
                "TOPIC",
                f"The topic {name!r} was not created: {error.args[0].str()}",
                next_step="delivered brokers topic NAME, with letters, digits, '.', '_' and '-'",
            ) from None
    return made


def produce(bootstrap: str, topic: str, records: int) -> None:
    """Send orders as JSON, keyed by customer, and wait until all are acknowledged.

    Raises:
        DeliveredError: not all were acknowledged.
    """
    library = _client()
    producer = library.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    failed: list[str] = []

    def on_delivery(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error.str())

    for i in range(records):
        value = json.dumps({"id": f"order-{i:04}", "amount": (i * 37) % 1000 / 10}).encode()
        while True:
            try:
                producer.produce(topic, key=f"customer-{i % 17}".encode(), value=value, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(_TIMEOUT_S) + len(failed):
        raise DeliveredError(
            "PRODUCE",
            f"{left} of {records} records were not acknowledged: {failed[0] if failed else 'no answer'}.",
            next_step=f"delivered brokers status kafka; delivered brokers topic {topic}",
        )


def consume(bootstrap: str, topic: str) -> Iterator[tuple[int, int, bytes | None, bytes | None]]:
    """Partition, offset, key and value of every record that is visible to a read_committed reader now.

    Raises:
        DeliveredError: the topic does not exist, or no answer.
    """
    library = _client()
    settings: dict[str, Any] = {"group.id": f"delivered-{uuid.uuid4().hex}", "isolation.level": "read_committed"}
    settings |= {"enable.partition.eof": True, "enable.auto.commit": False, "log_level": 0}
    consumer = library.Consumer({"bootstrap.servers": bootstrap, **settings})
    try:
        try:
            found = consumer.list_topics(topic, _TIMEOUT_S).topics[topic]
        except library.KafkaException as error:
            raise Unreachable(
                "KAFKA_UNREACHABLE",
                f"Kafka at {bootstrap} does not answer: {error.args[0].str()}",
                next_step="delivered brokers start kafka",
            ) from None
        if found.error is not None:
            raise DeliveredError(
                "TOPIC", f"{topic!r} at {bootstrap}: {found.error.str()}", f"delivered brokers topic {topic}"
            )
        left = set(found.partitions)
        consumer.assign([library.TopicPartition(topic, p, library.OFFSET_BEGINNING) for p in left])
        while left:
            for message in consumer.consume(_READ_AT_ONCE, _TIMEOUT_S):
                if message.error() is None:
                    yield message.partition(), message.offset(), message.key(), message.value()
                elif message.error().code() == library.KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
    finally:
        consumer.close()
