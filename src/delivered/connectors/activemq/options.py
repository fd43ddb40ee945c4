"""Options of `delivered_activemq`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from delivered.kits.options import BrokerOptions, broker_url, external_ledger, queue_sink_name
from delivered.model.options import TEXT_OR_NONE, OptionType, option, whole
from delivered.source.received import ReceiveOptions

DUPLICATE_ID = "_AMQ_DUPL_ID"
"""Header by which Artemis itself drops a message that it has seen."""
PREFETCH_BYTES = 16 << 20
PREFETCH_BYTES_MAX = 64 << 20
FRAME_BYTES_MIN = 200
"""No message is smaller on the wire, by the broker's own headers: a receiver holds so many at most, and the window of
known ids must be larger."""
EXAMPLE = "stomp://user@host:61613"


class Place(BrokerOptions):
    """
    Attributes:
        queue: or a topic's queue, as address::queue.
        key_header: None: messages have no key.
    """

    PORTS: ClassVar[Mapping[str, int]] = {"stomp": 61613}

    url: str = option("url", f"{EXAMPLE}; no password in it.", broker_url(tuple(PORTS), EXAMPLE), example=EXAMPLE)
    queue: str
    key_header: str | None


class ActivemqOptions(Place, owner="delivered_activemq source", beside=(ReceiveOptions,)):
    """
    Attributes:
        id_header: None: messages carry no id of their sender's.
    """

    queue: str = option("queue", "The queue to receive from: anycast and durable; or address::queue.", example="orders")
    id_header: str | None = option(
        "idHeader",
        "Header in which senders put a message's id, the same when they send it again; none: no message can be "
        "recognised.",
        TEXT_OR_NONE,
        default=None,
    )
    key_header: str | None = option(
        "keyHeader", "Header whose value becomes the column key; none: key is null.", TEXT_OR_NONE, default=None
    )
    prefetch_bytes: int = option(
        "prefetchBytes",
        "Bytes of messages that one receiver may hold unacknowledged.",
        whole(1, PREFETCH_BYTES_MAX),
        default=PREFETCH_BYTES,
    )


class ActivemqSinkOptions(Place, owner="delivered_activemq sink"):
    """
    Attributes:
        ledger: path of a SQLite file.
    """

    queue: str = option("queue", "The queue to send to: anycast.", example="orders")
    id_header: str = option(
        "idHeader",
        "Header for a message's id, the same when a batch runs again.",
        OptionType(lambda text: text or DUPLICATE_ID),
        default=DUPLICATE_ID,
    )
    key_header: str | None = option(
        "keyHeader", "Header for the column key; none: there is no such column.", TEXT_OR_NONE, default=None
    )
    ledger: str = external_ledger()

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"activemq.{self.queue}")
