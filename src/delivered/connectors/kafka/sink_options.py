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
    "acks": "a guarantee needs acks=all",
    "request.required.acks": "a guarantee needs acks=all",
    "message.send.max.retries": "the guarantee chooses it",
    "retries": "the guarantee chooses it",
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
    """

    topic: str | None
    client: Mapping[str, str]
    compression: str | None
    transaction_timeout_s: int
    ledger_topic: str | None
    ledger_replication: int | None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SinkOptions:
        """Raise UsageError for what is unknown, missing or out of bounds."""
        values = SINK_OPTIONS.restore({k: v for k, v in given.items() if k.lower() != "path"})
        check_client(OWNER, {k: v for k, v in values.items() if not _is_acks_all(k, v)}, _RESERVED)
        compression = values.get("compression")
        replication = values.get("ledgerReplicationFactor")
        return cls(
            topic=_checked_topic("topic", values.get("topic")),
            client=client_options({k: v for k, v in values.items() if not _is_acks_all(k, v)}),
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


def _is_acks_all(key: str, value: str) -> bool:
    return key in ("kafka.acks", "kafka.request.required.acks") and value in ("all", "-1")


def _checked_topic(option: str, topic: str | None) -> str | None:
    if topic is None:
        return None
    if topic in (".", "..") or not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{TOPIC_LENGTH_MAX}}}", topic):
        raise UsageError(
            "TOPIC_INVALID",
            f"{OWNER}: option {option!r} is {topic!r}; Kafka allows 1 to {TOPIC_LENGTH_MAX} letters, digits, '.', '_' "
            "and '-'.",
            next_step="give the topic another name",
        )
    return topic
