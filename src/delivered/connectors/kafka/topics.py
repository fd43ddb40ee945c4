"""The pipeline's internal topic: layout and creation."""

from __future__ import annotations

import time
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.answers import only
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.connectors.kafka.sink_options import LEDGER_TOPICS, SinkOptions
from delivered.model.errors import Refused, Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S

STATE_PARTITION = 0
"""Owners, newest decisions and begun batches: small, read at every start."""
HISTORY_PARTITION = 1
"""Decisions kept for the audit."""
MARKERS_FROM = 2
MARKER_PARTITIONS = 6
"""Shared by a pipeline's sinks; several, so that an open transaction of one sink rarely hides another's markers."""
PARTITIONS = MARKERS_FROM + MARKER_PARTITIONS

_CONFIG = {
    "cleanup.policy": "compact",
    # A read costs what compaction has not removed yet: one or two segments per partition.
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "600000",
    "max.message.bytes": str(2 << 20),
    "unclean.leader.election.enable": "false",
}
_MIN_ISR = "min.insync.replicas"
COPIES = 3
"""Replicas of the internal topic, where the sink's topics give no measure. Two of so many must be in sync."""
_DEFAULT_COPIES = -1
"""The broker's default."""


def ledger_topic(scope: Scope, named: str | None) -> str:
    """Name of the pipeline's internal topic."""
    return named or f"{LEDGER_TOPICS}{scope.pipeline}"


def ensure_topic(wire: Wire, topic: str, options: SinkOptions) -> None:
    """Create the topic if it does not exist, and wait until its partitions have leaders.

    Unless its replication factor is an option, it gets that of the sink's topic; a sink of several topics, 3.

    Raises:
        Refused: no permission, or the name is not allowed. Unreachable: no answer.
    """
    wire.forget()  # it may have been deleted since this process last saw it
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    if not _ready(wire, topic):
        _create(wire, topic, options)
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


def _create(wire: Wire, topic: str, options: SinkOptions) -> None:
    from kafka.protocol.admin.topics import CreateTopicsRequest

    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806
    Config = Topic.CreatableTopicConfig  # noqa: N806

    def ask() -> Any:
        copies = options.ledger_replication or copies_wanted(wire, options.topic)
        settings = _CONFIG | ({_MIN_ISR: "2"} if copies >= COPIES else {})
        request = CreateTopicsRequest(
            topics=[
                Topic(
                    name=topic,
                    num_partitions=PARTITIONS,
                    replication_factor=copies,
                    assignments=[],
                    configs=[Config(name=k, value=v) for k, v in settings.items()],
                )
            ],
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            validate_only=False,
            max_version=5,
        )
        found = only(wire.ask(request).topics, "topics")
        if found.error_code == protocol.INVALID_REPLICATION_FACTOR and options.ledger_replication is None:
            raise NoAnswer(f"fewer than {copies} brokers are up now")
        return found

    try:
        found = wire.patiently(ask)  # idempotent
    except NoAnswer as error:
        raise Unreachable(
            "LEDGER_UNAVAILABLE",
            f"The ledger's topic {topic!r} could not be created: {error}.",
            next_step="create the topic, or grant the user Create on it, then start again",
        ) from None
    if found.error_code in (protocol.NONE, protocol.TOPIC_ALREADY_EXISTS):
        return
    raise Refused(
        "LEDGER_TOPIC",
        f"The ledger's topic {topic!r} could not be created: {name_of(found.error_code)} {found.error_message or ''}.",
        next_step=f"create it with cleanup.policy=compact and {PARTITIONS} partitions; or set ledgerTopic to another",
    )


def copies_wanted(wire: Wire, beside: str | None) -> int:
    """Replication factor for the ledger of a sink that writes to this topic; None: to several."""
    if beside is not None:
        found: Any = wire.patiently(lambda: wire.topic(beside))
        if copies := min((len(p.replica_nodes) for p in found.partitions), default=0):
            return copies
    return COPIES if len(wire.nodes()) >= COPIES else _DEFAULT_COPIES


def topic_id(wire: Wire, topic: str) -> str | None:
    """A topic's id; None: the topic does not exist, or the brokers are too old for topic ids.

    Raises:
        NoAnswer: still no answer after 120 s.
    """

    def ask() -> Any:
        found = wire.topic(topic)
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE, protocol.UNKNOWN_TOPIC_OR_PARTITION):
            raise NoAnswer(f"topic {topic!r}: {name_of(found.error_code)}")
        return found

    found = wire.patiently(ask)
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    known: Any = found.topic_id
    return str(known) if known is not None and known.int else None
