"""Apache RocketMQ 5 over gRPC: a source through the write-ahead receiver, and a sink.

With messageType=transaction, which exactly_once needs, the sink connects to the brokers directly (`remoting.py`).
"""

from __future__ import annotations

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import external_ledger, message_id_columns, not_blank, queue_sink_name
from delivered.model.errors import UsageError
from delivered.model.options import FLAG, Options, OptionType, choice, integer, option, parse_address
from delivered.receiver import ReceiveOptions

PREFETCH = 10_000
PREFETCH_MAX = 50_000
INVISIBLE_S = 60
INVISIBLE_S_MAX = 43_200
"""RocketMQ's own limit, 12 hours."""
TRANSACTION = "TRANSACTION"
KINDS = ("normal", "fifo", "delay", "transaction")


def _addresses(text: str) -> tuple[str, ...]:
    parts = tuple(text.rstrip(";").split(";"))
    for part in parts:
        parse_address(part)
    return parts


class Place(Options):
    """
    Attributes:
        access_key: None: no authentication.
        secret_key: may be a reference.
        trusted: PEM file of certificates; None: gRPC's own.
    """

    endpoints: str = option(
        "endpoints",
        "Proxies: host:8081, separated by semicolons.",
        OptionType(lambda text: ";".join(_addresses(text))),
        example="localhost:8081",
    )
    topic: str = option("topic", "Name of the topic.", example="orders")
    namespace: str = option("namespace", "Namespace of topic and group, if used.", default="")
    access_key: str | None = option("accessKey", "User name, if the servers require authentication.", default=None)
    secret_key: str | None = option("secretKey", "Secret key of the user.", default=None, secret=True)
    tls: bool = option("tls", "Use TLS; certificates and host names are verified.", FLAG, default=False)
    trusted: str | None = option(
        "tlsTrustCertsFile",
        "PEM file with trusted certificates.",
        OptionType(not_blank),
        default=None,
        shown="gRPC's built-in ones",
    )

    def check(self, owner: str) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise UsageError("OPTION_VALUE.ROCKETMQ_KEYS", owner=owner)
        if self.trusted is not None and not self.tls:
            raise UsageError("OPTION_CONFLICT.ROCKETMQ_TLS", owner=owner)


class RocketmqOptions(Place, owner="delivered_rocketmq source", more=(ReceiveOptions,)):
    """
    Attributes:
        by_key: messages are identified by the sender's key instead of the client's message id.
    """

    group: str = option("group", "Consumer group; must be ordered if the topic is FIFO.", example="delivered")
    filter: str = option(
        "filter",
        "Tags to receive, in RocketMQ's notation: 'a || b'; *: all.",
        OptionType(lambda text: text or "*"),
        default="*",
    )
    by_key: bool = option(
        "idFrom",
        "Id for deduplication: message_id, which the sender's client assigns on every send; or "
        "keys, the single key set by the sender.",
        choice({"message_id": False, "keys": True}),
        default=False,
    )
    prefetch: int = option(
        "prefetch",
        "Maximum number of unacknowledged messages per receiver.",
        integer(1, PREFETCH_MAX),
        default=PREFETCH,
    )
    invisible_s: int = option(
        "invisibleSeconds",
        "Seconds until a message is redelivered after its receiver died; renewed while a receiver holds it.",
        integer(1, INVISIBLE_S_MAX),
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
        "Message type of the topic: normal; fifo, with a column message_group; delay, with a column "
        "delivery_timestamp; transaction, which exactly_once needs.",
        choice({kind: kind.upper() for kind in KINDS}),
        default="NORMAL",
    )
    name_servers: tuple[str, ...] = option(
        "nameServers",
        "host:9876, separated by semicolons; for messageType=transaction, which connects to the brokers.",
        OptionType(_addresses),
        default=(),
        shown="",
        example="localhost:9876",
    )
    message_id_columns: tuple[str, ...] = message_id_columns()
    ledger: str = external_ledger()

    def check(self, owner: str) -> None:
        if (self.kind == TRANSACTION) != bool(self.name_servers):
            raise UsageError("OPTION_VALUE.ROCKETMQ_TRANSACTION", owner=owner)
        super().check(owner)
        if self.kind == TRANSACTION and self.tls:
            raise UsageError("OPTION_VALUE.ROCKETMQ_TLS", owner=owner)

    @property
    def sink_name(self) -> str:
        return queue_sink_name(f"rocketmq.{self.topic}")


CONNECTOR = Connector(
    "rocketmq",
    "rocketmq",
    queues=Factory(RocketmqOptions, "delivered.connectors.rocketmq.queue:RocketmqQueue"),
    sinks=Factory(RocketmqSinkOptions, "delivered.connectors.rocketmq.sink:RocketmqSink"),
    external_ledger=True,
    transactions="messageType=transaction",
    messaging=True,
)
