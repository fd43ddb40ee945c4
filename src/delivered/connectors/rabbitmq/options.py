"""Options of `delivered_rabbitmq`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from delivered.kits.options import BrokerOptions, broker_url, external_ledger, message_id_columns, queue_sink_name
from delivered.kits.tls import TlsOptions
from delivered.model.errors import UsageError
from delivered.model.options import option, whole
from delivered.source.received import ReceiveOptions

PREFETCH = 20_000
PREFETCH_MAX = 65_535
"""AMQP's field has 16 bits."""
EXAMPLE = "amqp://user@host:5672/vhost"


class Place(BrokerOptions, TlsOptions):
    PORTS: ClassVar[Mapping[str, int]] = {"amqp": 5672, "amqps": 5671}

    url: str = option(
        "url",
        f"{EXAMPLE}, or amqps://, without a password.",
        # RabbitMQ's default password only works from localhost.
        broker_url(tuple(PORTS), EXAMPLE, known_password="guest"),  # noqa: S106
        example=EXAMPLE,
    )

    def check(self, owner: str) -> None:
        self.check_tls(owner, self.tls, "amqps://host:5671")
        if "ssl_options" in parse_qs(urlsplit(self.url).query):
            raise UsageError(
                "OPTION_CONFLICT",
                f"{owner}: the url has ssl_options, which could turn verification off.",
                next_step="write tlsTrustCertsFile, tlsCertificateFile and tlsKeyFile",
            )

    @property
    def tls(self) -> bool:
        return self.url.startswith("amqps")

    @property
    def target(self) -> str:
        """The requested resource, for messages."""
        raise NotImplementedError


class RabbitmqOptions(Place, owner="delivered_rabbitmq source", more=(ReceiveOptions,)):
    queue: str = option("queue", "Queue to receive from: durable, preferably quorum.", example="orders")
    prefetch: int = option(
        "prefetch", "Maximum number of unacknowledged messages per receiver.", whole(1, PREFETCH_MAX), default=PREFETCH
    )

    @property
    def target(self) -> str:
        return f"queue {self.queue!r}"


class RabbitmqSinkOptions(Place, owner="delivered_rabbitmq sink"):
    """
    Attributes:
        routing_key: None: taken from the column key.
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
