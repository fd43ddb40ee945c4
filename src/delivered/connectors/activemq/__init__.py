"""ActiveMQ over STOMP 1.2, Artemis first: a source through the write-ahead receiver, and a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import (
    BrokerOptions,
    TlsOptions,
    broker_url,
    external_ledger,
    message_id_columns,
    queue_sink_name,
)
from delivered.model.options import TEXT_OR_NONE, OptionType, Unfit, integer, option
from delivered.receiver import ReceiveOptions

DUPLICATE_ID = "_AMQ_DUPL_ID"
"""Header by which Artemis detects duplicates."""
PREFETCH_BYTES = 16 << 20
PREFETCH_BYTES_MAX = 64 << 20
FRAME_BYTES_MIN = 200
"""Minimum size of a message on the wire, due to the broker's headers. It bounds the messages that a receiver holds, and
the window of known ids must be larger."""
EXAMPLE = "stomp://user@host:61613"
FRAME_HEADERS = frozenset(
    {
        *("subscription", "message-id", "ack", "destination", "content-length", "redelivered", "expires", "priority"),
        *("persistent", "timestamp", "destination-type", "ingress-timestamp", "JMSXUserID", "receipt"),
    }
)
"""Headers of the frame and the broker, which are not part of the message."""


def _header(text: str) -> str | None:
    if text in FRAME_HEADERS:
        raise Unfit.build("OPTION_VALUE.FRAME_HEADER", text=text)
    return text or None


OWN_HEADER = OptionType(_header)
"""Of the message: a redelivered one has another message-id, and so would count as another message."""


class Place(BrokerOptions, TlsOptions):
    """
    Attributes:
        queue: a queue, or a topic's queue as address::queue.
        key_header: None: messages have no key.
    """

    PORTS: ClassVar[Mapping[str, int]] = {"stomp": 61613, "stomp+ssl": 61612}

    url: str = option(
        "url", f"{EXAMPLE}, or stomp+ssl://, without a password.", broker_url(tuple(PORTS), EXAMPLE), example=EXAMPLE
    )
    queue: str
    key_header: str | None

    def check(self, owner: str) -> None:
        self.check_tls(owner, self.tls, "stomp+ssl://host:61612")

    @property
    def tls(self) -> bool:
        return self.url.startswith("stomp+ssl://")


class ActivemqOptions(Place, owner="delivered_activemq source", more=(ReceiveOptions,)):
    """
    Attributes:
        id_header: None: messages have no id set by the sender.
    """

    queue: str = option("queue", "Queue to receive from: anycast and durable; or address::queue.", example="orders")
    id_header: str | None = option(
        "idHeader",
        "Header with the message id, which senders keep when they resend; none: duplicates are not detected.",
        OWN_HEADER,
        default=None,
    )
    key_header: str | None = option(
        "keyHeader", "Header to read the column key from; none: key is null.", TEXT_OR_NONE, default=None
    )
    prefetch_bytes: int = option(
        "prefetchBytes",
        "Maximum bytes of unacknowledged messages per receiver.",
        integer(1, PREFETCH_BYTES_MAX),
        default=PREFETCH_BYTES,
    )


class ActivemqSinkOptions(Place, owner="delivered_activemq sink"):
    """
    Attributes:
        ledger: path of a SQLite file.
    """

    queue: str = option("queue", "Queue to send to: anycast.", example="orders")
    id_header: str = option(
        "idHeader",
        "Header for the message id, which a replayed batch repeats.",
        OptionType(lambda text: _header(text) or DUPLICATE_ID),
        default=DUPLICATE_ID,
    )
    key_header: str | None = option(
        "keyHeader", "Header to write the column key to; none: no column key.", OWN_HEADER, default=None
    )
    message_id_columns: tuple[str, ...] = message_id_columns()
    ledger: str = external_ledger()

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"activemq.{self.queue}")


CONNECTOR = Connector(
    "activemq",
    "activemq",
    queues=Factory(ActivemqOptions, "delivered.connectors.activemq.queue:ActivemqQueue"),
    sinks=Factory(ActivemqSinkOptions, "delivered.connectors.activemq.queue:ActivemqSink"),
    external_ledger=True,
    messaging=True,
)
