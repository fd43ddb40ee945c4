"""What the senders of one process share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from delivered.clients.kafka import protocol
from delivered.clients.kafka.errors import ProducerError
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.sequences import verdict_of

PARTITIONS_AGE_S_MAX = 300.0


@dataclass
class Cluster:
    """
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
