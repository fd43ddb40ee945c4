"""Options of `delivered_rocketmq`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, choice, flag, whole_number
from delivered.source.received import OPTIONS

PREFETCH = 10_000
PREFETCH_MAX = 50_000
INVISIBLE_S = 60
INVISIBLE_S_MAX = 43_200
"""RocketMQ's own limit, 12 hours."""
IDS = ("message_id", "keys")
TRANSACTION = "TRANSACTION"
KINDS = ("normal", "fifo", "delay", "transaction")

_PLACE = (
    Option("endpoints", "Of the proxies: host:8081, or several with semicolons.", required=True),
    Option("topic", "The topic, as it was made.", required=True),
    Option("namespace", "Of topic and group, where the servers have them.", ""),
    Option("accessKey", "Name of the user, where the servers ask for one."),
    Option("secretKey", "Of that user.", secret=True),
    Option("tls", "Whether the proxies are spoken to over TLS; certificates and host names are checked.", "false"),
    Option("tlsTrustCertsFile", "PEM file with the certificates to trust.", "those that gRPC brings along"),
)

SOURCE_OPTIONS = OptionTable(
    "delivered_rocketmq source",
    (
        *_PLACE,
        Option("group", "The group of consumers, as it was made; ordered, if the topic is FIFO.", required=True),
        Option("filter", "Tags to receive, as RocketMQ writes them: 'a || b'; *: all.", "*"),
        Option(
            "idFrom",
            "What a message is recognised by: message_id, which the client of its sender gives it for every send; or "
            "keys, the one key that the sender set.",
            IDS[0],
        ),
        Option("prefetch", "Messages that one receiver may hold unacknowledged.", str(PREFETCH)),
        Option(
            "invisibleSeconds",
            "So long a message stays hidden from other receivers after its receiver died; while one holds it, the time "
            "is renewed.",
            str(INVISIBLE_S),
        ),
        *OPTIONS,
    ),
    passthrough=("storage.",),
)

SINK_OPTIONS = OptionTable(
    "delivered_rocketmq sink",
    (
        *_PLACE,
        Option(
            "messageType",
            "What the topic takes: normal; fifo, with a column message_group; delay, with a column delivery_timestamp; "
            "transaction, which exactly_once needs.",
            KINDS[0],
        ),
        Option(
            "nameServers",
            "host:9876, or several with semicolons: for messageType=transaction, which speaks to the brokers.",
        ),
        Option("ledger", "SQLite file of the driver in which batches are recorded.", required=True),
    ),
)

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        access_key: None: nobody is asked for.
        secret_key: may be a reference.
        trusted: PEM file of certificates; None: gRPC's own.
    """

    endpoints: str
    topic: str
    namespace: str
    access_key: str | None
    secret_key: str | None
    tls: bool
    trusted: str | None


@dataclass(frozen=True)
class RocketmqOptions(Place):
    """
    Attributes:
        by_key: the sender's key is the id of a message, not the id that its client made.
    """

    group: str
    filter: str = "*"
    by_key: bool = False
    prefetch: int = PREFETCH
    invisible_s: int = INVISIBLE_S


@dataclass(frozen=True)
class RocketmqSinkOptions(Place):
    """
    Attributes:
        kind: one of `KINDS`, as RocketMQ writes it.
        ledger: path of a SQLite file.
        name_servers: addresses; empty unless kind is TRANSACTION.
    """

    kind: str
    ledger: str
    name_servers: tuple[str, ...] = ()

    @property
    def default_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"rocketmq.{self.topic}")[:64]


def parse(options: Mapping[str, str]) -> RocketmqOptions:
    """Raises UsageError for an address that is none, or a value out of bounds."""
    options = SOURCE_OPTIONS.restore(options)
    owner = SOURCE_OPTIONS.owner
    invisible = options.get("invisibleSeconds", str(INVISIBLE_S))
    return RocketmqOptions(
        **_place(owner, options),
        group=options["group"],
        filter=options.get("filter") or "*",
        by_key=choice(owner, "idFrom", options.get("idFrom", IDS[0]), IDS) == IDS[1],
        prefetch=whole_number(owner, "prefetch", options.get("prefetch", str(PREFETCH)), 1, PREFETCH_MAX),
        invisible_s=whole_number(owner, "invisibleSeconds", invisible, 1, INVISIBLE_S_MAX),
    )


def parse_sink(options: Mapping[str, str]) -> RocketmqSinkOptions:
    """As `parse`."""
    options = SINK_OPTIONS.restore(options)
    owner = SINK_OPTIONS.owner
    kind = choice(owner, "messageType", options.get("messageType", KINDS[0]), KINDS).upper()
    servers = options.get("nameServers")
    if (kind == TRANSACTION) != (servers is not None):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: nameServers and messageType=transaction go together; one of them is missing.",
            next_step="set nameServers to host:9876, the address at which the brokers are registered",
        )
    place = _place(owner, options)
    if kind == TRANSACTION and place["tls"]:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: messageType=transaction speaks to the brokers themselves, which it cannot do over TLS yet.",
            next_step="set tls to false, or take another messageType with guarantee at_least_once",
        )
    return RocketmqSinkOptions(
        **place,
        kind=kind,
        ledger=options["ledger"],
        name_servers=tuple(_addresses(owner, "nameServers", servers)) if servers is not None else (),
    )


def _addresses(owner: str, name: str, text: str) -> list[str]:
    parts = text.rstrip(";").split(";")
    for part in parts:
        found = _ENDPOINT.fullmatch(part)
        if found is None or not 0 < int(found[2]) < 65_536:
            raise UsageError(
                "OPTION_VALUE", f"{owner}: option {name!r} has {part!r}; it must be like host:8081;other:8081."
            )
    return parts


def _place(owner: str, options: Mapping[str, str]) -> dict[str, Any]:
    endpoints = ";".join(_addresses(owner, "endpoints", options["endpoints"]))
    if ("accessKey" in options) != ("secretKey" in options):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: accessKey and secretKey go together; one of them is missing.",
            next_step="set secretKey to env:NAME or file:PATH",
        )
    tls, trusted = flag(owner, "tls", options.get("tls", "false")), options.get("tlsTrustCertsFile")
    if trusted is not None and not tls:
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option 'tlsTrustCertsFile' is set, and tls is false: nothing would be checked by it.",
            next_step="set tls to true, or take tlsTrustCertsFile out",
        )
    return {
        "endpoints": endpoints,
        "topic": options["topic"],
        "namespace": options.get("namespace", ""),
        "access_key": options.get("accessKey"),
        "secret_key": options.get("secretKey"),
        "tls": tls,
        "trusted": trusted,
    }
