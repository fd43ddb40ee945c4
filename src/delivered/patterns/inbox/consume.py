"""A message of confluent-kafka, pika or RocketMQ that is acknowledged after its effect has been committed.

The clients are the caller's; none is imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.patterns.inbox.table import TABLE, inbox

KAFKA_HEADERS = ("delivered.id", "id")
"""Of the sinks (messageIdColumns), and of an outbox."""


@dataclass(frozen=True)
class Delivery:
    """One delivery of a message, by any broker.

    Attributes:
        id: assigned by the sender; None: it assigned none.
        acknowledge: tell the broker that the message is done.
        give_back: let the broker deliver it again.
    """

    id: str | bytes | None
    acknowledge: Callable[[], object]
    give_back: Callable[[], object]


@contextlib.contextmanager
def consume(connection: Any, delivery: Delivery, *, consumer: str, table: str = TABLE) -> Iterator[bool]:
    """Whether the message is new to this consumer. At the end of the block: commit, then acknowledge.

    An exception in the block or in the commit is raised after a rollback, and the message is given back. If the
    acknowledgement fails, the client's error is raised: the effect stays, and the message comes again without effect.

    Args, Raises: as `inbox`.
    """
    try:
        with inbox(connection, delivery.id, consumer=consumer, table=table) as first:
            yield first
        connection.commit()
    except BaseException:
        with contextlib.suppress(Exception):  # the connection is gone, and with it the transaction
            connection.rollback()
        delivery.give_back()
        raise
    delivery.acknowledge()


def from_kafka(consumer: Any, message: Any, *, headers: Sequence[str] = KAFKA_HEADERS) -> Delivery:
    """Of a `confluent_kafka.Consumer` with enable.auto.commit=false: automatic commits acknowledge before the effect.

    A message that is given back is read again before any later one of its partition: committing one of those would
    acknowledge it, too.

    Args:
        headers: where the id is; the first one that the message has.
    """

    def give_back() -> None:
        from confluent_kafka import TopicPartition

        consumer.seek(TopicPartition(message.topic(), message.partition(), message.offset()))

    found = dict(message.headers() or ())
    message_id = next((found[name] for name in headers if name in found), None)
    return Delivery(message_id, lambda: consumer.commit(message, asynchronous=False), give_back)


def from_rabbitmq(channel: Any, method: Any, properties: Any) -> Delivery:
    """Of a pika channel: what basic_get returns, or a consumer's callback gets. The id is the property message_id."""

    def give_back() -> None:
        with contextlib.suppress(Exception):  # a closed channel has returned its messages
            channel.basic_nack(method.delivery_tag)

    return Delivery(properties.message_id, lambda: channel.basic_ack(method.delivery_tag), give_back)


def from_rocketmq(consumer: Any, message: Any) -> Delivery:
    """Of a `rocketmq.SimpleConsumer`. The id is the message's only key, or that of its keys which is its message id.

    A message that is given back comes again when its invisible duration ends.
    """
    keys = set(message.keys)
    chosen = keys if len(keys) == 1 else keys & {message.message_id}  # the client keeps keys in no order
    return Delivery(next(iter(chosen), None), lambda: consumer.ack(message), lambda: None)
