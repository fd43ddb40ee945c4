"""Options of `delivered_rabbitmq_stream`, checked once and frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from delivered.connectors.rabbitmq.options import EXAMPLE, KNOWN_PASSWORD, SCHEMES, Place
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, flag, server_url, whole_number

OWNER = "delivered_rabbitmq_stream source"
EARLIEST, LATEST = "earliest", "latest"
PREFETCH = 2_000
PREFETCH_MAX = 65_535

STREAM_OPTIONS = OptionTable(
    OWNER,
    (
        Option("url", "amqp://user@host:5672/vhost, or amqps://; no password in it.", required=True),
        Option("password", "Of the user in the URL.", secret=True),
        Option(
            "streams",
            "Streams (queues with x-queue-type=stream), with commas between; of a super stream, its partitions.",
            required=True,
        ),
        Option(
            "startingOffsets",
            'earliest, latest or {"orders": 12} for every stream: the offset of the first message to read. Counts for '
            "a new checkpoint; streams that are named later start at their earliest.",
            "latest for a stream, earliest for a batch",
        ),
        Option("endingOffsets", 'Batch only: latest, or {"orders": 34}: the offset after the last message.', LATEST),
        Option("maxOffsetsPerTrigger", "At most about so many messages in one batch.", "no bound"),
        Option("prefetch", "Messages that RabbitMQ sends a task ahead of what it has read.", str(PREFETCH)),
        Option(
            "failOnDataLoss", "Stop when messages are gone before they were read; false: go on, with a warning.", "true"
        ),
        Option("includeHeaders", "Add the column headers: those of a message, and AMQP's own as amqp.*.", "false"),
    ),
)

Where = str | dict[str, int]
"""earliest, latest, or an offset for each stream."""


@dataclass(frozen=True)
class StreamOptions(Place):
    """
    Attributes:
        starting, ending: None: the default.
    """

    streams: tuple[str, ...]
    starting: Where | None
    ending: Where | None
    rows_max: int | None
    prefetch: int
    fail_on_data_loss: bool
    headers: bool

    @property
    def target(self) -> str:
        return f"stream {', '.join(self.streams)}"


def parse_stream(given: Mapping[str, str]) -> StreamOptions:
    """Raises UsageError for a URL that is none, a password in it, or a value out of bounds."""
    values = STREAM_OPTIONS.restore({k: v for k, v in given.items() if k.lower() != "path"})
    streams = tuple(dict.fromkeys(s.strip() for s in values["streams"].split(",") if s.strip()))
    if not streams:
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'streams' is {values['streams']!r}; it names no stream.")
    rows = values.get("maxOffsetsPerTrigger")
    return StreamOptions(
        url=server_url(OWNER, values["url"], SCHEMES, EXAMPLE, KNOWN_PASSWORD),
        password=values.get("password"),
        streams=streams,
        starting=_where("startingOffsets", values.get("startingOffsets"), (EARLIEST, LATEST)),
        ending=_where("endingOffsets", values.get("endingOffsets"), (LATEST,)),
        rows_max=None if rows is None else whole_number(OWNER, "maxOffsetsPerTrigger", rows, 1),
        prefetch=whole_number(OWNER, "prefetch", values.get("prefetch", str(PREFETCH)), 1, PREFETCH_MAX),
        fail_on_data_loss=flag(OWNER, "failOnDataLoss", values.get("failOnDataLoss", "true")),
        headers=flag(OWNER, "includeHeaders", values.get("includeHeaders", "false")),
    )


def _where(option: str, text: str | None, words: tuple[str, ...]) -> Where | None:
    if text is None or text.strip().lower() in words:
        return None if text is None else text.strip().lower()
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(n) is int and n >= 0 for n in found.values()):
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {option!r} is {text!r}; it must be {' or '.join(words)}, or an offset for each stream: "
            '{"orders": 12}.',
        )
    return found
