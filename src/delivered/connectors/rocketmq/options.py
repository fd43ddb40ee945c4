"""Options of `delivered_rocketmq`."""

from __future__ import annotations

import re

from delivered.kits.options import external_ledger, queue_sink_name
from delivered.model.errors import UsageError
from delivered.model.options import FLAG, TEXT, Options, OptionType, Unfit, choice, option, whole
from delivered.source.received import ReceiveOptions

PREFETCH = 10_000
PREFETCH_MAX = 50_000
INVISIBLE_S = 60
INVISIBLE_S_MAX = 43_200
"""RocketMQ's own limit, 12 hours."""
TRANSACTION = "TRANSACTION"
KINDS = ("normal", "fifo", "delay", "transaction")

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _addresses(text: str) -> tuple[str, ...]:
    parts = tuple(text.rstrip(";").split(";"))
    for part in parts:
        found = _ENDPOINT.fullmatch(part)
        if found is None or not 0 < int(found[2]) < 65_536:
            raise Unfit(f"has {part!r}; it must be like host:8081;other:8081")
    return parts


class Place(Options):
    """
    Attributes:
        access_key: None: nobody is asked for.
        secret_key: may be a reference.
        trusted: PEM file of certificates; None: gRPC's own.
    """

    endpoints: str = option(
        "endpoints",
        "Of the proxies: host:8081, or several with semicolons.",
        OptionType(lambda text: ";".join(_addresses(text))),
        example="localhost:8081",
    )
    topic: str = option("topic", "The topic, as it was made.", example="orders")
    namespace: str = option("namespace", "Of topic and group, where the servers have them.", default="")
    access_key: str | None = option("accessKey", "Name of the user, where the servers ask for one.", default=None)
    secret_key: str | None = option("secretKey", "Of that user.", default=None, secret=True)
    tls: bool = option(
        "tls",
        "Whether the proxies are spoken to over TLS; certificates and host names are checked.",
        FLAG,
        default=False,
    )
    trusted: str | None = option(
        "tlsTrustCertsFile",
        "PEM file with the certificates to trust.",
        TEXT,
        default=None,
        shown="those that gRPC brings along",
    )

    def check(self, owner: str) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: accessKey and secretKey go together; one of them is missing.",
                next_step="set secretKey to env:NAME or file:PATH",
            )
        if self.trusted is not None and not self.tls:
            raise UsageError(
                "OPTION_CONFLICT",
                f"{owner}: option 'tlsTrustCertsFile' is set, and tls is false: nothing would be checked by it.",
                next_step="set tls to true, or take tlsTrustCertsFile out",
            )


class RocketmqOptions(Place, owner="delivered_rocketmq source", beside=(ReceiveOptions,)):
    """
    Attributes:
        by_key: the sender's key is the id of a message, not the id that its client made.
    """

    group: str = option(
        "group", "The group of consumers, as it was made; ordered, if the topic is FIFO.", example="delivered"
    )
    filter: str = option(
        "filter",
        "Tags to receive, as RocketMQ writes them: 'a || b'; *: all.",
        OptionType(lambda text: text or "*"),
        default="*",
    )
    by_key: bool = option(
        "idFrom",
        "What a message is recognised by: message_id, which the client of its sender gives it for every send; or "
        "keys, the one key that the sender set.",
        choice({"message_id": False, "keys": True}),
        default=False,
    )
    prefetch: int = option(
        "prefetch", "Messages that one receiver may hold unacknowledged.", whole(1, PREFETCH_MAX), default=PREFETCH
    )
    invisible_s: int = option(
        "invisibleSeconds",
        "So long a message stays hidden from other receivers after its receiver died; while one holds it, the time "
        "is renewed.",
        whole(1, INVISIBLE_S_MAX),
        default=INVISIBLE_S,
    )


class RocketmqSinkOptions(Place, owner="delivered_rocketmq sink"):
    """
    Attributes:
        kind: one of `KINDS`, as RocketMQ writes it.
        ledger: path of a SQLite file.
        name_servers: addresses; empty unless kind is TRANSACTION.
    """

    kind: str = option(
        "messageType",
        "What the topic takes: normal; fifo, with a column message_group; delay, with a column delivery_timestamp; "
        "transaction, which exactly_once needs.",
        choice({kind: kind.upper() for kind in KINDS}),
        default="NORMAL",
    )
    name_servers: tuple[str, ...] = option(
        "nameServers",
        "host:9876, or several with semicolons: for messageType=transaction, which speaks to the brokers.",
        OptionType(_addresses),
        default=(),
        shown="",
        example="localhost:9876",
    )
    ledger: str = external_ledger()

    def check(self, owner: str) -> None:
        if (self.kind == TRANSACTION) != bool(self.name_servers):
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: nameServers and messageType=transaction go together; one of them is missing.",
                next_step="set nameServers to host:9876, the address at which the brokers are registered",
            )
        super().check(owner)
        if self.kind == TRANSACTION and self.tls:
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: messageType=transaction speaks to the brokers themselves, which it cannot do over TLS yet.",
                next_step="set tls to false, or take another messageType with guarantee at_least_once",
            )

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"rocketmq.{self.topic}")
