"""Options of `delivered_rabbitmq`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from delivered.model.options import Option, OptionTable, server_url, whole_number
from delivered.source.received import OPTIONS

PREFETCH = 20_000
PREFETCH_MAX = 65_535
"""AMQP's field for it has 16 bits."""

SCHEMES = ("amqp", "amqps")
EXAMPLE = "amqp://user@host:5672/vhost"
KNOWN_PASSWORD = "guest"  # noqa: S105 - RabbitMQ's default, for localhost alone

SOURCE_OPTIONS = OptionTable(
    "delivered_rabbitmq source",
    (
        Option("url", "amqp://user@host:5672/vhost, or amqps://; no password in it.", required=True),
        Option("password", "Of the user in the URL.", secret=True),
        Option("queue", "The queue to receive from: durable, quorum by choice.", required=True),
        Option("prefetch", "Messages that one receiver may hold unacknowledged.", str(PREFETCH)),
        *OPTIONS,
    ),
    passthrough=("storage.",),
)


SINK_OPTIONS = OptionTable(
    "delivered_rabbitmq sink",
    (
        Option("url", "amqp://user@host:5672/vhost, or amqps://; no password in it.", required=True),
        Option("password", "Of the user in the URL.", secret=True),
        Option("exchange", "Where messages are published; empty: the default exchange, to a queue by its name.", ""),
        Option("routingKey", "For every message; none: the column key."),
        Option("ledger", "SQLite file of the driver in which batches are recorded.", required=True),
    ),
)


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        url: without a password.
        password: may be a reference; None: what the URL says.
    """

    url: str
    password: str | None

    @property
    def place(self) -> str:
        """Host and port, for people."""
        parts = urlsplit(self.url)
        default = 5671 if parts.scheme == "amqps" else 5672
        return f"{parts.hostname}:{parts.port or default}"

    @property
    def target(self) -> str:
        """What is asked for at the server, for people."""
        raise NotImplementedError


@dataclass(frozen=True)
class RabbitmqOptions(Place):
    queue: str
    prefetch: int = PREFETCH

    @property
    def target(self) -> str:
        return f"queue {self.queue!r}"


@dataclass(frozen=True)
class RabbitmqSinkOptions(Place):
    """
    Attributes:
        routing_key: None: the column key holds it.
        ledger: path of a SQLite file.
    """

    exchange: str
    routing_key: str | None
    ledger: str

    @property
    def target(self) -> str:
        return f"exchange {self.exchange!r}" if self.exchange else f"queue {self.routing_key!r}"

    @property
    def label(self) -> str:
        """Exchange and routing key, for people."""
        return " ".join(x for x in (self.exchange, self.routing_key) if x) or "the queues that rows name"

    @property
    def default_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"rabbitmq.{self.exchange or self.routing_key or 'queues'}")[:64]


def parse(options: Mapping[str, str]) -> RabbitmqOptions:
    """Raises UsageError for a URL that is none, a password in it, or a value out of bounds."""
    options = SOURCE_OPTIONS.restore(options)
    owner = SOURCE_OPTIONS.owner
    return RabbitmqOptions(
        url=server_url(owner, options["url"], SCHEMES, EXAMPLE, KNOWN_PASSWORD),
        password=options.get("password"),
        queue=options["queue"],
        prefetch=whole_number(owner, "prefetch", options.get("prefetch", str(PREFETCH)), 1, PREFETCH_MAX),
    )


def parse_sink(options: Mapping[str, str]) -> RabbitmqSinkOptions:
    """As `parse`."""
    options = SINK_OPTIONS.restore(options)
    return RabbitmqSinkOptions(
        url=server_url(SINK_OPTIONS.owner, options["url"], SCHEMES, EXAMPLE, KNOWN_PASSWORD),
        password=options.get("password"),
        exchange=options.get("exchange", ""),
        routing_key=options.get("routingKey"),
        ledger=options["ledger"],
    )
