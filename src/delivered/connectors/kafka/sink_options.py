"""Options of the Kafka sink."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from delivered.connectors.kafka.client_options import check_client, client_options, resolved
from delivered.model.errors import UsageError
from delivered.model.limits import NAME_LENGTH_MAX, TRANSACTION_TIMEOUT_S
from delivered.model.options import Option, OptionTable, choice, whole_number

OWNER = "delivered_kafka sink"
TOPIC_LENGTH_MAX = 249

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option("kafka.bootstrap.servers", "Brokers to start from, as host:port, separated by commas.", required=True),
        Option("topic", "Topic for every row. Without it, rows name theirs in a column `topic`."),
        Option(
            "kafka.acks",
            "all; with at_most_once also 1, the leader alone: records that a leader loses are not counted as given up.",
            "all",
        ),
        Option("kafka.retries", "Accepted as in Spark, without effect: the guarantee chooses it."),
        Option("compression", "none, gzip, snappy, lz4 or zstd.", "none"),
        Option(
            "transactionTimeout",
            "Seconds that a prepared batch waits for its decision before the broker drops it (exactly_once).",
            str(int(TRANSACTION_TIMEOUT_S)),
        ),
        Option("ledgerTopic", "Name of the pipeline's internal topic.", "__delivered_<pipeline>"),
        Option("ledgerReplicationFactor", "Of the internal topic, when it is made.", "the broker's default"),
    ),
    passthrough=("kafka.",),
)

_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_RESERVED = {
    "transactional.id": "the sink chooses it",
    "enable.idempotence": "the guarantee chooses it",
    "transaction.timeout.ms": "write the option transactionTimeout, in seconds",
    "delivery.report.only.error": "the sink sets it",
    "partitioner": "rows are partitioned as the Java client does",
}


@dataclass(frozen=True)
class SinkOptions:
    """
    Attributes:
        client: librdkafka's settings, without the prefix `kafka.`; secrets are references still.
        transaction_timeout_s: whole seconds.
        acks: all or 1; the ledger and transactions always have all.
    """

    topic: str | None
    client: Mapping[str, str]
    compression: str | None
    transaction_timeout_s: int
    ledger_topic: str | None
    ledger_replication: int | None
    acks: str = "all"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Raise UsageError for what is unknown, missing or out of bounds."""
        values = SINK_OPTIONS.restore({k: v for k, v in given.items() if k.lower() != "path"})
        check_client(OWNER, values, _RESERVED)
        for name in _RETRIES & values.keys():
            whole_number(OWNER, name, values[name], 0)
        compression = values.get("compression")
        replication = values.get("ledgerReplicationFactor")
        return cls(
            topic=_checked_topic("topic", values.get("topic")),
            client=client_options({k: v for k, v in values.items() if k not in _ACKS | _RETRIES}),
            compression=None if compression is None else choice(OWNER, "compression", compression, _CODECS),
            transaction_timeout_s=whole_number(
                OWNER,
                "transactionTimeout",
                values.get("transactionTimeout", str(int(TRANSACTION_TIMEOUT_S))),
                1,
                86_400,
            ),
            ledger_topic=_checked_topic("ledgerTopic", values.get("ledgerTopic")),
            ledger_replication=(
                None if replication is None else whole_number(OWNER, "ledgerReplicationFactor", replication, 1, 32_767)
            ),
            acks=_acks(values),
        )

    def resolved(self) -> dict[str, str]:
        """Client settings with secrets followed. Call it where they are used."""
        return resolved(self.client)

    @property
    def default_name(self) -> str:
        """A sink's name made from its topic: names may not hold what topics may not, and may be shorter."""
        if self.topic is None:
            return "topics"
        if len(self.topic) <= NAME_LENGTH_MAX:
            return self.topic
        return self.topic[:51] + "-" + hashlib.blake2b(self.topic.encode(), digest_size=6).hexdigest()


_ACKS = {"kafka.acks", "kafka.request.required.acks"}
_RETRIES = {"kafka.retries", "kafka.message.send.max.retries"}


def _acks(values: Mapping[str, str]) -> str:
    for name in _ACKS & values.keys():
        value = values[name].strip().lower()
        if value not in ("all", "-1", "1"):
            raise UsageError(
                "OPTION_VALUE",
                f"{OWNER}: option {name!r} is {values[name]!r}; it must be all or, with at_most_once, 1: without "
                "acknowledgements nobody knows what was lost.",
                next_step=f"take {name!r} out",
            )
        return "1" if value == "1" else "all"
    return "all"


def is_topic(name: str) -> bool:
    """Whether Kafka allows the name."""
    return name not in (".", "..") and re.fullmatch(rf"[A-Za-z0-9._-]{{1,{TOPIC_LENGTH_MAX}}}", name) is not None


def _checked_topic(option: str, topic: str | None) -> str | None:
    if topic is None:
        return None
    if not is_topic(topic):
        raise UsageError(
            "TOPIC_INVALID",
            f"{OWNER}: option {option!r} is {topic!r}; Kafka allows 1 to {TOPIC_LENGTH_MAX} letters, digits, '.', '_' "
            "and '-'.",
            next_step="give the topic another name",
        )
    return topic
