"""Which settings a guarantee needs of librdkafka, and which client drives it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from delivered.connectors.kafka import native
from delivered.connectors.kafka.librdkafka import producer_library
from delivered.connectors.kafka.produce import Producer, ProducerError
from delivered.connectors.kafka.sink_options import OWNER, SinkOptions
from delivered.model.errors import MissingExtra, UsageError
from delivered.model.guarantee import Guarantee

log = logging.getLogger(__name__)

QUEUE_KBYTES_MAX = 65_536
"""Rows that wait in the client, per producer. It bounds a worker's memory, whatever the size of a batch."""

QUEUE_RECORDS_MAX = 400_000
DELIVERY_TIMEOUT_S = 120
"""At least once: how long a record may wait for its acknowledgement, a broker's restart included."""

FALLBACK_VARIABLE = "DELIVERED_KAFKA_CLIENT"
"""Set to `confluent` to send through confluent-kafka's own calls instead of librdkafka's: slower, the same result."""


def producer_config(options: SinkOptions, guarantee: Guarantee, transactional_id: str | None) -> dict[str, str]:
    """All settings of a producer, as librdkafka names them; the user's win where they may."""
    config = {
        "client.id": "delivered",
        "linger.ms": "5",
        "queue.buffering.max.kbytes": str(QUEUE_KBYTES_MAX),
        "queue.buffering.max.messages": str(QUEUE_RECORDS_MAX),
        "message.max.bytes": "1048588",  # the broker's default; the client's own is below it
        "socket.nagle.disable": "true",
        "reconnect.backoff.ms": "20",
        "retry.backoff.ms": "20",
        "topic.metadata.refresh.fast.interval.ms": "50",
        "topic.metadata.propagation.max.ms": "5000",
    }
    if options.compression is not None:
        config["compression.type"] = options.compression
    config |= options.resolved()
    config |= {
        "acks": "all",
        "partitioner": "murmur2_random",
        "delivery.report.only.error": "true",
    }
    match guarantee:
        case Guarantee.EXACTLY_ONCE:
            config |= {
                "transactional.id": transactional_id or "",
                "transaction.timeout.ms": str(options.transaction_timeout_s * 1000),
                "enable.idempotence": "true",
            }
            config.setdefault("message.timeout.ms", str(options.transaction_timeout_s * 1000))
        case Guarantee.AT_LEAST_ONCE:
            config |= {"enable.idempotence": "true"}
            config.setdefault("message.timeout.ms", str(DELIVERY_TIMEOUT_S * 1000))
        case Guarantee.AT_MOST_ONCE:
            # A request without an answer may have been stored. It is given up, not sent again.
            config |= {"enable.idempotence": "false", "message.send.max.retries": "0", "acks": options.acks}
            config.setdefault("message.timeout.ms", "30000")
    return config


def make_producer(config: Mapping[str, str]) -> Producer:
    """A producer over librdkafka itself, or over confluent-kafka where its symbols cannot be reached.

    Raises:
        UsageError: a setting that librdkafka does not take.
        MissingExtra: no client is installed.
    """
    try:
        import confluent_kafka  # noqa: F401
    except ImportError:
        raise MissingExtra("kafka") from None
    try:
        if os.environ.get(FALLBACK_VARIABLE, "") != "confluent" and producer_library() is not None:
            return native.NativeProducer(config)
        from delivered.connectors.kafka.confluent import ConfluentProducer

        return ConfluentProducer(config)
    except ProducerError as error:
        if error.config:
            raise UsageError(
                "CLIENT_SETTING",
                f"{OWNER}: the Kafka client refused its settings: {error.reason}.",
                next_step="options kafka.* are librdkafka's, with `kafka.` before each",
            ) from None
        raise
