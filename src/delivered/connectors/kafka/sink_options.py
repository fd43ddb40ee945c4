"""Options of the Kafka sink."""

from __future__ import annotations

import re
from collections.abc import Mapping

from delivered.clients.kafka.settings import check_client, client_options, in_clear, path_option, resolved
from delivered.connectors.kafka.options import SERVERS
from delivered.kits.options import message_id_columns
from delivered.kits.schemas.options import FormatOptions
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import fitted_name
from delivered.model.limits import TRANSACTION_TIMEOUT_S
from delivered.model.options import Option, Options, OptionType, Unfit, choice, option, several, whole

OWNER = "delivered_kafka sink"
TOPIC_LENGTH_MAX = 249

_WRITER_RESERVED = {
    "transactional.id": "the sink chooses it",
    "enable.idempotence": "the guarantee chooses it",
    "transaction.timeout.ms": "write the option transactionTimeout, in seconds",
    "delivery.report.only.error": "the sink sets it",
    "partitioner": "rows are partitioned as the Java client does",
}
_ACKS = ("kafka.acks", "kafka.request.required.acks")
_RETRIES = ("kafka.retries", "kafka.message.send.max.retries")


def _writer_client(owner: str, values: Mapping[str, str]) -> dict[str, str]:
    check_client(owner, values, _WRITER_RESERVED)
    for name in _RETRIES:
        if name in values:
            whole(0).parse(owner, name, values[name])
    return client_options({k: v for k, v in values.items() if k not in (*_ACKS, *_RETRIES)})


def _acks(owner: str, values: Mapping[str, str]) -> str:
    for name in _ACKS:
        value = values.get(name, "all").strip().lower()
        if value not in ("all", "-1", "1"):
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: option {name!r} is {values[name]!r}; it must be all or, with at_most_once, 1: without "
                "acknowledgements, lost records cannot be counted.",
                next_step=f"take {name!r} out",
            )
        if value == "1":
            return "1"
    return "all"


def is_topic(name: str) -> bool:
    """Whether Kafka allows the name."""
    return name not in (".", "..") and re.fullmatch(rf"[A-Za-z0-9._-]{{1,{TOPIC_LENGTH_MAX}}}", name) is not None


LEDGER_TOPICS = "__delivered_"
"""Prefix of internal topics without a configured name."""
_INTERNAL = re.compile(rf"__consumer_offsets|__transaction_state|__share_group_state|{LEDGER_TOPICS}.*")


def is_internal(name: str, ledger_topic: str | None = None) -> bool:
    """Whether a topic is Kafka's own or holds a ledger: a row written there could forge a decision.

    Args:
        ledger_topic: the option of that name.
    """
    return name == ledger_topic or _INTERNAL.fullmatch(name) is not None


def _topic(text: str) -> str:
    if not is_topic(text):
        raise Unfit(
            f"is {text!r}; Kafka allows 1 to {TOPIC_LENGTH_MAX} letters, digits, '.', '_' and '-'",
            "use another topic name",
            "TOPIC_INVALID",
        )
    return text


class SinkOptions(Options, owner=OWNER, ignored=("path",), more=(FormatOptions,)):
    """
    Attributes:
        client: librdkafka's settings, without the prefix `kafka.`; secrets are not resolved yet.
        acks: all or 1; the ledger and transactions always use all.
        topic: None: taken from each row.
        through: auto, arrow or librdkafka.
        transaction_timeout_s: whole seconds.
    """

    client: Mapping[str, str] = several(
        _writer_client,
        SERVERS,
        Option("kafka.retries", "Accepted as in Spark, without effect: the guarantee chooses it."),
        passthrough=("kafka.",),
        secret=True,
    )
    acks: str = several(
        _acks,
        Option(
            "kafka.acks",
            "all; with at_most_once also 1 (leader only): records that a leader loses are not counted as given up.",
            "all",
        ),
        default="all",
    )
    topic: str | None = option(
        "topic",
        "Topic for every row. Without it, each row names its topic in the column `topic`.",
        OptionType(_topic),
        default=None,
    )
    compression: str | None = option(
        "compression",
        "none, gzip, snappy, lz4 or zstd.",
        choice(("none", "gzip", "snappy", "lz4", "zstd")),
        default=None,
        shown="none",
    )
    through: str = path_option("How records are produced: arrow encodes whole columns")
    transaction_timeout_s: int = option(
        "transactionTimeout",
        "Seconds that a prepared batch waits for its decision before the broker drops it (exactly_once).",
        whole(1, 86_400),
        default=int(TRANSACTION_TIMEOUT_S),
    )
    message_id_columns: tuple[str, ...] = message_id_columns()
    ledger_topic: str | None = option(
        "ledgerTopic",
        "Name of the pipeline's internal topic.",
        OptionType(_topic),
        default=None,
        shown=f"{LEDGER_TOPICS}<pipeline>",
    )
    ledger_replication: int | None = option(
        "ledgerReplicationFactor",
        "Of the internal topic, when it is created.",
        whole(1, 32_767),
        default=None,
        shown="the topic's",
        example="3",
    )

    def check(self, owner: str) -> None:
        if self.topic is not None and is_internal(self.topic, self.ledger_topic):
            raise UsageError(
                "TOPIC_INTERNAL",
                f"{owner}: option 'topic' is {self.topic!r}, which is Kafka's own or holds a ledger; a row there could "
                "forge a decision.",
                next_step="write to another topic, or choose another ledgerTopic",
            )

    @property
    def in_clear(self) -> tuple[str, ...]:
        return in_clear(self.client)

    def resolved(self) -> dict[str, str]:
        """Client settings with secrets resolved. Call it only where they are used."""
        return resolved(self.client)

    @property
    def default_name(self) -> str:
        """A sink's name derived from its topic. Names may be shorter than topics, with the same characters."""
        if self.topic is None:
            return "topics"
        return fitted_name(self.topic)


DELIVERY_TIMEOUT_S = 120
"""at_least_once: how long a record may wait for its acknowledgement; longer than a broker restart."""


def producer_config(options: SinkOptions, guarantee: Guarantee, transactional_id: str | None) -> dict[str, str]:
    """A producer's settings by librdkafka's names; the user's override the defaults, not what the guarantee needs."""
    config = {"message.max.bytes": "1048588"}  # the broker's default
    if options.compression is not None:
        config["compression.type"] = options.compression
    config |= {**options.resolved(), "acks": "all"}
    match guarantee:
        case Guarantee.EXACTLY_ONCE:
            config |= {
                "transactional.id": transactional_id or "",
                "transaction.timeout.ms": str(options.transaction_timeout_s * 1000),
                "enable.idempotence": "true",
            }
            config.setdefault("message.timeout.ms", str(options.transaction_timeout_s * 1000))
        case Guarantee.AT_LEAST_ONCE:
            config |= {"enable.idempotence": "true"}
            config.setdefault("message.timeout.ms", str(DELIVERY_TIMEOUT_S * 1000))
        case Guarantee.AT_MOST_ONCE:
            # A request without an answer may have been stored, so it is given up instead of retried.
            config |= {"enable.idempotence": "false", "message.send.max.retries": "0", "acks": options.acks}
            config.setdefault("message.timeout.ms", "30000")
    return config
