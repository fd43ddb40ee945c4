"""RabbitMQ over AMQP 0-9-1: a source through the write-ahead receiver, a source of streams, and a sink. Streams are
replayable, so they have a format of their own, rabbitmq_stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import (
    BrokerOptions,
    TlsOptions,
    broker_url,
    data_loss_option,
    external_ledger,
    headers_option,
    message_id_columns,
    names,
    queue_sink_name,
    rows_max_option,
)
from delivered.model.options import OptionType, Unfit, integer, option
from delivered.receiver import ReceiveOptions

# Options of `delivered_rabbitmq`.

PREFETCH = 20_000
PREFETCH_MAX = 65_535
"""AMQP's field has 16 bits."""
EXAMPLE = "amqp://user@host:5672/vhost"
PARAMETERS = ("channel_max", "client_properties", "frame_max", "locale", "tcp_options")
"""Those of pika that have an effect; ssl_options could turn verification off."""


class Place(BrokerOptions, TlsOptions):
    PORTS: ClassVar[Mapping[str, int]] = {"amqp": 5672, "amqps": 5671}

    url: str = option(
        "url",
        f"{EXAMPLE}, or amqps://, without a password.",
        # RabbitMQ's default password only works from localhost.
        broker_url(tuple(PORTS), EXAMPLE, "guest", PARAMETERS, names_max=1),
        example=EXAMPLE,
    )

    def check(self, owner: str) -> None:
        self.check_tls(owner, self.tls, "amqps://host:5671")

    @property
    def tls(self) -> bool:
        return self.url.startswith("amqps")

    @property
    def vhost(self) -> str:
        return unquote(urlsplit(self.url).path[1:]) or "/"

    @property
    def target(self) -> str:
        """The requested resource, for messages."""
        raise NotImplementedError


class RabbitmqOptions(Place, owner="delivered_rabbitmq source", more=(ReceiveOptions,)):
    queue: str = option("queue", "Queue to receive from: durable, preferably quorum.", example="orders")
    prefetch: int = option(
        "prefetch",
        "Maximum number of unacknowledged messages per receiver.",
        integer(1, PREFETCH_MAX),
        default=PREFETCH,
    )

    @property
    def target(self) -> str:
        return f"queue {self.queue!r}"


class RabbitmqSinkOptions(Place, owner="delivered_rabbitmq sink"):
    """
    Attributes:
        routing_key: None: the column key.
        ledger: path of a SQLite file.
    """

    exchange: str = option(
        "exchange", "Exchange to publish to; empty: the default exchange, which routes by queue name.", default=""
    )
    routing_key: str | None = option("routingKey", "Routing key of every message; none: the column key.", default=None)
    message_id_columns: tuple[str, ...] = message_id_columns()
    ledger: str = external_ledger()

    @property
    def target(self) -> str:
        return f"exchange {self.exchange!r}" if self.exchange else f"queue {self.routing_key!r}"

    @property
    def label(self) -> str:
        """Describes exchange and routing key, for messages."""
        return " ".join(x for x in (self.exchange, self.routing_key) if x) or "the queues that rows name"

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"rabbitmq.{self.exchange or self.routing_key or 'queues'}")


# Options of `delivered_rabbitmq_stream`.

OWNER = "delivered_rabbitmq_stream source"
EARLIEST, LATEST = "earliest", "latest"
STREAM_PREFETCH = 2_000

Where = str | dict[str, int]
"""earliest, latest, or an offset for each stream."""


def _where(*words: str) -> OptionType[Where]:
    def read(text: str) -> Where:
        if text.strip().lower() in words:
            return text.strip().lower()
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict) or not all(type(n) is int and n >= 0 for n in document.values()):
            example = '{"orders": 12}'
            raise Unfit.build("OPTION_VALUE.STREAM_OFFSETS", text=text, known=" or ".join(words), example=example)
        return document

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
        integer(1, PREFETCH_MAX),
        default=STREAM_PREFETCH,
    )
    fail_on_data_loss: bool = data_loss_option("messages")
    headers: bool = headers_option("Add the column headers: a message's headers, and AMQP properties as amqp.*.")

    @property
    def target(self) -> str:
        return f"stream {', '.join(self.streams)}"


CONNECTOR = Connector(
    "rabbitmq",
    "rabbitmq",
    queues=Factory(RabbitmqOptions, "delivered.connectors.rabbitmq.queue:RabbitmqQueue"),
    sinks=Factory(RabbitmqSinkOptions, "delivered.connectors.rabbitmq.queue:RabbitmqSink"),
    external_ledger=True,
    messaging=True,
)
