"""Options of `delivered_rabbitmq_stream`."""

from __future__ import annotations

import json

from delivered.connectors.rabbitmq.options import Place
from delivered.kits.options import data_loss_option, headers_option, names, rows_max_option
from delivered.model.options import OptionType, Unfit, option, whole

OWNER = "delivered_rabbitmq_stream source"
EARLIEST, LATEST = "earliest", "latest"
PREFETCH = 2_000
PREFETCH_MAX = 65_535

Where = str | dict[str, int]
"""earliest, latest, or an offset for each stream."""


def _where(*words: str) -> OptionType[Where]:
    def read(text: str) -> Where:
        if text.strip().lower() in words:
            return text.strip().lower()
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(type(n) is int and n >= 0 for n in found.values()):
            example = '{"orders": 12}'
            raise Unfit(f"is {text!r}; it must be {' or '.join(words)}, or an offset for each stream: {example}")
        return found

    return OptionType(read)


class StreamOptions(Place, owner=OWNER, ignored=("path",)):
    """
    Attributes:
        starting, ending: None: the default.
    """

    streams: tuple[str, ...] = option(
        "streams",
        "Comma-separated streams (queues with x-queue-type=stream); for a super stream, its partitions.",
        names("stream"),
        example="orders",
    )
    starting: Where | None = option(
        "startingOffsets",
        'earliest, latest or {"orders": 12} for every stream: the offset of the first message to read. Applies to '
        "a new checkpoint; streams added later start at their earliest message.",
        _where(EARLIEST, LATEST),
        default=None,
        shown="latest for a stream, earliest for a batch",
        example=EARLIEST,
    )
    ending: Where | None = option(
        "endingOffsets",
        'Batch only: latest, or {"orders": 34}: the offset after the last message.',
        _where(LATEST),
        default=None,
        shown=LATEST,
        example=LATEST,
    )
    rows_max: int | None = rows_max_option("messages")
    prefetch: int = option(
        "prefetch",
        "Number of unacknowledged messages that RabbitMQ sends to a task.",
        whole(1, PREFETCH_MAX),
        default=PREFETCH,
    )
    fail_on_data_loss: bool = data_loss_option("messages")
    headers: bool = headers_option("Add the column headers: a message's headers, and AMQP properties as amqp.*.")

    @property
    def target(self) -> str:
        return f"stream {', '.join(self.streams)}"
