"""Options of `delivered_activemq`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from delivered.model.options import Option, OptionTable, server_url, whole_number
from delivered.source.received import OPTIONS

DUPLICATE_ID = "_AMQ_DUPL_ID"
"""Header by which Artemis itself drops a message that it has seen."""
PREFETCH_BYTES = 16 << 20
PREFETCH_BYTES_MAX = 64 << 20
PORT = 61613

_SCHEMES = ("stomp",)
_EXAMPLE = "stomp://user@host:61613"

_PLACE = (
    Option("url", "stomp://user@host:61613; no password in it.", required=True),
    Option("password", "Of the user in the URL.", secret=True),
)

SOURCE_OPTIONS = OptionTable(
    "delivered_activemq source",
    (
        *_PLACE,
        Option("queue", "The queue to receive from: anycast and durable; or address::queue.", required=True),
        Option(
            "idHeader",
            "Header in which senders put a message's id, the same when they send it again; none: no message can be "
            "recognised.",
        ),
        Option("keyHeader", "Header whose value becomes the column key; none: key is null."),
        Option("prefetchBytes", "Bytes of messages that one receiver may hold unacknowledged.", str(PREFETCH_BYTES)),
        *OPTIONS,
    ),
    passthrough=("storage.",),
)

SINK_OPTIONS = OptionTable(
    "delivered_activemq sink",
    (
        *_PLACE,
        Option("queue", "The queue to send to: anycast.", required=True),
        Option("idHeader", "Header for a message's id, the same when a batch runs again.", DUPLICATE_ID),
        Option("keyHeader", "Header for the column key; none: there is no such column."),
        Option("ledger", "SQLite file of the driver in which batches are recorded.", required=True),
    ),
)


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        url: without a password.
        password: may be a reference; None: there is none.
        key_header: None: messages have no key.
    """

    url: str
    password: str | None
    queue: str
    key_header: str | None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or PORT

    @property
    def user(self) -> str | None:
        name = urlsplit(self.url).username
        return None if name is None else unquote(name)

    @property
    def place(self) -> str:
        """Host and port, for people."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ActivemqOptions(Place):
    """
    Attributes:
        id_header: None: messages carry no id of their sender's.
    """

    id_header: str | None = None
    prefetch_bytes: int = PREFETCH_BYTES


@dataclass(frozen=True)
class ActivemqSinkOptions(Place):
    """
    Attributes:
        ledger: path of a SQLite file.
    """

    id_header: str
    ledger: str

    @property
    def default_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"activemq.{self.queue}")[:64]


def parse(options: Mapping[str, str]) -> ActivemqOptions:
    """Raises UsageError for a URL that is none, a password in it, or a value out of bounds."""
    options = SOURCE_OPTIONS.restore(options)
    owner = SOURCE_OPTIONS.owner
    size = options.get("prefetchBytes", str(PREFETCH_BYTES))
    return ActivemqOptions(
        url=server_url(owner, options["url"], _SCHEMES, _EXAMPLE),
        password=options.get("password"),
        queue=options["queue"],
        key_header=options.get("keyHeader") or None,
        id_header=options.get("idHeader") or None,
        prefetch_bytes=whole_number(owner, "prefetchBytes", size, 1, PREFETCH_BYTES_MAX),
    )


def parse_sink(options: Mapping[str, str]) -> ActivemqSinkOptions:
    """As `parse`."""
    options = SINK_OPTIONS.restore(options)
    return ActivemqSinkOptions(
        url=server_url(SINK_OPTIONS.owner, options["url"], _SCHEMES, _EXAMPLE),
        password=options.get("password"),
        queue=options["queue"],
        key_header=options.get("keyHeader") or None,
        id_header=options.get("idHeader") or DUPLICATE_ID,
        ledger=options["ledger"],
    )
