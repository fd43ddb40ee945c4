"""The pipeline's internal topic: made when it is missing, compacted so that it stays small."""

from __future__ import annotations

import time

from delivered.connectors.kafka import protocol
from delivered.connectors.kafka.markers import PARTITIONS
from delivered.connectors.kafka.protocol import NoAnswer, Wire, name_of
from delivered.model.errors import Refused, Unreachable
from delivered.model.limits import OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S

_CONFIG = {
    "cleanup.policy": "compact",
    # Reading back costs what compaction has not yet taken: a segment or two a partition.
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "600000",
    "max.message.bytes": str(2 << 20),
}


def ensure_topic(wire: Wire, topic: str, replication: int | None) -> None:
    """Make the topic unless it is there, and wait until its partitions have leaders.

    Args:
        replication: None: the broker's default.

    Raises:
        Refused: no permission, or the name is not allowed. Unreachable: no answer.
    """
    wire.forget()  # it may have been deleted since this process last saw it
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    if not _ready(wire, topic):
        _create(wire, topic, replication)
    while not _ready(wire, topic):
        if time.monotonic() > deadline:
            raise Unreachable(
                "LEDGER_UNAVAILABLE",
                f"The ledger's topic {topic!r} has no leader for some partition after {OUTAGE_PATIENCE_S:.0f} s.",
                next_step="check the brokers",
            )
        time.sleep(0.02)


def _ready(wire: Wire, topic: str) -> bool:
    try:
        for partition in range(PARTITIONS):
            wire.leader(topic, partition)
    except NoAnswer:
        return False
    return True


def _create(wire: Wire, topic: str, replication: int | None) -> None:
    from kafka.protocol.admin.topics import CreateTopicsRequest

    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806
    Config = Topic.CreatableTopicConfig  # noqa: N806
    request = CreateTopicsRequest(
        topics=[
            Topic(
                name=topic,
                num_partitions=PARTITIONS,
                replication_factor=-1 if replication is None else replication,
                assignments=[],
                configs=[Config(name=k, value=v) for k, v in _CONFIG.items()],
            )
        ],
        timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
        validate_only=False,
        max_version=5,
    )
    try:
        answer = wire.ask_any(request)
    except NoAnswer as error:
        raise Unreachable("LEDGER_UNAVAILABLE", f"The ledger's topic {topic!r} could not be made: {error}.") from None
    found = answer.topics[0]
    if found.error_code in (protocol.NONE, protocol.TOPIC_ALREADY_EXISTS):
        return
    raise Refused(
        "LEDGER_TOPIC",
        f"The ledger's topic {topic!r} could not be made: {name_of(found.error_code)} {found.error_message or ''}.",
        next_step=f"create it by hand, compacted, with {PARTITIONS} partitions; or name another with ledgerTopic",
    )
