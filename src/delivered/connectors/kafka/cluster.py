"""What the senders of one process share, and whether settings allow them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from delivered.connectors.kafka import protocol, record_batch
from delivered.connectors.kafka.errors import ProducerError
from delivered.connectors.kafka.librdkafka import check_settings
from delivered.connectors.kafka.login import NoAnswer
from delivered.connectors.kafka.protocol import Wire
from delivered.connectors.kafka.sequences import verdict_of
from delivered.model.errors import UsageError

PARTITIONS_AGE_S_MAX = 300.0

_SETTINGS = frozenset(
    {
        "bootstrap.servers",
        "client.id",
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
        "sasl.jaas.config",
    }
)
SINK_SETTINGS = _SETTINGS | {
    "acks",
    "message.max.bytes",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "compression.type",
    "compression.codec",
    "linger.ms",
}
SOURCE_SETTINGS = _SETTINGS | {
    "isolation.level",
    "group.id",
    "max.partition.fetch.bytes",
    "fetch.max.bytes",
    "fetch.wait.max.ms",
}
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def by_arrow(owner: str, through: str, client: Mapping[str, str], known: Set[str]) -> bool:
    """Whether the option `client` (`through`) selects arrow. Raises UsageError: it is arrow, which lacks something."""
    if through == "librdkafka":
        return False
    missing = lacks(client, known)
    if missing is not None and through == "arrow":
        check_settings(owner, client)  # one that nobody knows
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option 'client' is arrow, but {missing}.",
            next_step="write client=auto or client=librdkafka",
        )
    return missing is None


def path(through: str, client: Mapping[str, str], known: Set[str], arrow: str) -> str:
    """By which client records travel, and why, for the plan. `arrow`: what it says of Arrow."""
    missing = lacks(client, known)
    if missing is not None:
        return f"librdkafka, because {missing}"
    return "librdkafka, because client=librdkafka; client=arrow is possible" if through == "librdkafka" else arrow


def lacks(client: Mapping[str, str], known: Set[str]) -> str | None:
    """Why only librdkafka can be used with these settings; None: nothing is missing."""
    if not record_batch.available():
        return "the package was built without a C compiler"
    if unknown := sorted(set(client) - known):
        return f"kafka.{unknown[0]} is a setting of librdkafka"
    mechanism = client.get("sasl.mechanism", client.get("sasl.mechanisms", "PLAIN")).upper()
    return None if mechanism in _MECHANISMS else f"SASL mechanism {mechanism} needs librdkafka"


@dataclass
class Cluster:
    """What the senders of one process share.

    Attributes:
        partitions: topic -> partition count, when it was asked for (time.monotonic()).
        throttled: broker -> when to send records to it again: it reads nothing earlier, and a request would time out.
    """

    wire: Wire
    servers: str
    partitions: dict[str, tuple[int, float]] = field(default_factory=dict)
    throttled: dict[int, float] = field(default_factory=dict)

    def count(self, topic: str) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        count, at = self.partitions.get(topic, (0, 0.0))
        if count and time.monotonic() - at < PARTITIONS_AGE_S_MAX:
            return count
        try:
            found = self.wire.topic(topic)
        except NoAnswer as error:
            if count:  # brokers are away; the last known count will do
                return count
            raise ProducerError("_TRANSPORT", str(error)) from None
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE):
            name, _ = verdict_of(found.error_code)
            raise ProducerError(name, protocol.name_of(found.error_code))
        count = len(found.partitions)
        self.partitions[topic] = (count, time.monotonic())
        return count

    def outdated(self, topic: str) -> None:
        """Ask again next time; until there is an answer, the last known count stands."""
        count, _ = self.partitions.get(topic, (0, 0.0))
        self.partitions[topic] = (count, float("-inf"))
