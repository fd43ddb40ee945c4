"""Lengths that RabbitMQ, ActiveMQ and RocketMQ accept: the one place that knows. A longer value is a bad row.

The size of a value can be configured: RabbitMQ and RocketMQ are asked for it (`kits/queue/columns.py`). Kafka's and
Pulsar's limits are options of their sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from delivered.model.errors import BadRecord

BYTES_MAX: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # AMQP 0-9-1: a short string has one byte for its length. max_message_size cannot be set above 512 MiB.
        "rabbitmq": {"key": 255, "message_id": 255, "value": 512 << 20},
        # Classic's STOMP reads header lines of 10 KiB. Artemis stores headers as UTF-16: together 490 KiB
        # (journal-buffer-size), and 100 KiB with a value of 100 KiB and more (minLargeMessageSize).
        "activemq": {"key": 10_000, "message_id": 10_000, "value": 2**31 - 1},
        # The proxy says that 64 bytes are the limit, and refuses them.
        "rocketmq": {"message_group": 63, "value": 2**31 - 1},
    }
)
"""By system, by column of the sink, in bytes of UTF-8."""

ROCKETMQ_WORDS_BYTES_MAX = 16 << 10
"""Of a message's keys, with the id among them, and its tag: the proxy's maxUserPropertySize."""
ROCKETMQ_PROPERTIES_BYTES_MAX = 32_000
"""Of all that a broker stores of a message except the value: 32,767, minus what proxy and broker add themselves."""


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
        length = bytes_of(value)
        if length > limits[name]:
            raise too_long(system, name, length, limits[name])


def bytes_of(value: str | bytes | None) -> int:
    return 0 if value is None else len(value if isinstance(value, bytes) else value.encode())


def too_long(system: str, column: str, length: int, limit: int) -> BadRecord:
    return BadRecord(
        "VALUE_TOO_LONG",
        f"A row's column {column!r} has {length} bytes; {system} accepts at most {limit}.",
        next_step="shorten the column, or filter such rows; on_bad_row: dead_letter keeps them",
    )
