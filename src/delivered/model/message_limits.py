"""Lengths that RabbitMQ, ActiveMQ and RocketMQ accept: the one place that knows. A longer value is a bad row.

Where an administrator can set a limit, it is the default; a lower one is reported by the broker. Kafka's and Pulsar's
limits are options of their sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from delivered.model.errors import BadRecord

BYTES_MAX: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # AMQP 0-9-1: a short string has one byte for its length. max_message_size is at most 512 MiB.
        "rabbitmq": {"key": 255, "message_id": 255, "value": 512 << 20},
        # Classic's STOMP reads header lines of 10 KiB. Artemis keeps all headers of a message in one journal record.
        "activemq": {"key": 10_000, "message_id": 10_000, "value": 2**31 - 1},
        # maxMessageSize of proxy and broker; the properties of a message share 32,767 bytes.
        "rocketmq": {"key": 8_000, "message_id": 8_000, "tag": 8_000, "message_group": 64, "value": 4 << 20},
    }
)
"""By system, by column of the sink, in bytes of UTF-8."""


def check_lengths(system: str, **columns: str | bytes | None) -> None:
    """
    Args:
        columns: a row's values.

    Raises:
        BadRecord: one is longer than the system accepts.
    """
    limits = BYTES_MAX[system]
    for name, value in columns.items():
        # A text has at most four bytes for each character.
        if value is None or len(value) * 4 <= limits[name]:
            continue
        length = len(value if isinstance(value, bytes) else value.encode())
        if length > limits[name]:
            raise BadRecord(
                "VALUE_TOO_LONG",
                f"A row's column {name!r} has {length} bytes; {system} accepts at most {limits[name]}.",
                next_step="shorten the column, or filter such rows; on_bad_row: dead_letter keeps them",
            )
