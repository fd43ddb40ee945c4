"""Check topic and brokers against the guarantee, before the first batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.channel import NoAnswer
from delivered.clients.kafka.consumer import BROKER_CONFIG, TOPIC_CONFIG, describe_configs
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.connectors.kafka.options import SinkOptions, is_internal
from delivered.connectors.kafka.topics import COPIES, PARTITIONS, find_replication_factor, ledger_topic
from delivered.contract.source import Finding
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable, did_you_mean
from delivered.model.identity import Scope

_TRANSACTION_LIMIT = "transaction.max.timeout.ms"
_MIN_ISR = "min.insync.replicas"
_UNCLEAN = "unclean.leader.election.enable"
_TRANSACTION_LOG = "__transaction_state"


def preflight(options: SinkOptions, guarantee: Guarantee) -> Sequence[Finding]:
    """Whatever breaks the guarantee, and warnings.

    Raises:
        Unreachable: no broker answered, or they rejected the credentials.
    """
    with _asking(options) as wire:
        return [
            *_topic(wire, options),
            *(_transactions(wire, options) if guarantee is Guarantee.EXACTLY_ONCE else ()),
        ]


@contextmanager
def _asking(options: SinkOptions) -> Iterator[Wire]:
    """A connection; raises Unreachable if the brokers stop answering."""
    wire = Wire(options.resolved())
    try:
        yield wire
    except NoAnswer as error:
        raise Unreachable(
            "KAFKA_NO_ANSWER.PREFLIGHT", servers=options.client["bootstrap.servers"], error=error
        ) from None
    finally:
        wire.close()


def _topic(wire: Wire, options: SinkOptions) -> list[Finding]:
    if options.topic is None:
        return []
    topic = options.topic
    found = wire.patiently(lambda: wire.topic(topic))
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        near = did_you_mean(topic, (t for t in wire.patiently(wire.topics) if not is_internal(t)))
        servers = options.client["bootstrap.servers"]
        return [Finding.build("TOPIC_UNKNOWN.START", refuses=True, topic=topic, servers=servers, hint=near)]
    if found.error_code == protocol.TOPIC_AUTHORIZATION_FAILED:
        return [Finding.build("KAFKA_PERMISSION.DESCRIBE", refuses=True, topic=options.topic)]
    if found.error_code != protocol.NONE:
        return [Finding.build("TOPIC_STATE", refuses=False, topic=options.topic, error=name_of(found.error_code))]
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    in_sync = _config(wire, TOPIC_CONFIG, options.topic, _MIN_ISR)
    findings = []
    if copies == 1:
        findings.append(Finding.build("ONE_COPY", refuses=False, topic=options.topic))
    elif in_sync is not None and int(in_sync) < 2:
        findings.append(
            Finding.build("ONE_COPY_ACKNOWLEDGED", refuses=False, topic=options.topic, copies=copies, in_sync=in_sync)
        )
    return findings


def check_ledger(options: SinkOptions, scope: Scope) -> Sequence[Finding]:
    """What may lose decisions or markers: settings of the internal topic, and of Kafka's log of transactions.

    Raises:
        Unreachable: no broker answered, or they rejected the credentials.
    """
    topic = ledger_topic(scope, options.ledger_topic)
    with _asking(options) as wire:
        return [*_ledger(wire, topic, options.topic), *_transaction_log(wire, options.topic)]


def _ledger(wire: Wire, topic: str, beside: str | None) -> Iterator[Finding]:
    found = wire.patiently(lambda: wire.topic(topic))
    if found.error_code != protocol.NONE:
        return  # it is created, with the settings that it needs, at the first start
    name = f"The ledger's topic {topic!r}"
    if len(found.partitions) < PARTITIONS:
        yield Finding.build(
            "LEDGER_PARTITIONS",
            refuses=True,
            name=name,
            actual=len(found.partitions),
            partitions=PARTITIONS,
            topic=topic,
        )
    policy = _config(wire, TOPIC_CONFIG, topic, "cleanup.policy")
    if policy is not None and policy != "compact":
        yield Finding.build(
            "LEDGER_CLEANUP", refuses=False, name=name, policy=policy, action=_set(topic, "cleanup.policy=compact")
        )
    if _config(wire, TOPIC_CONFIG, topic, _UNCLEAN) == "true":
        yield Finding.build("LEDGER_UNCLEAN", refuses=False, name=name, action=_set(topic, f"{_UNCLEAN}=false"))
    yield from _durability(wire, topic, found, beside, name, "decisions")


def _transaction_log(wire: Wire, beside: str | None) -> Iterator[Finding]:
    found = wire.patiently(lambda: wire.topic(_TRANSACTION_LOG))
    if found.error_code == protocol.NONE:  # else there was no transaction yet, or this user may not see it
        yield from _durability(wire, _TRANSACTION_LOG, found, beside, f"Topic {_TRANSACTION_LOG!r}", "transactions")


def _durability(wire: Wire, topic: str, found: Any, beside: str | None, name: str, what: str) -> Iterator[Finding]:
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    wanted = find_replication_factor(wire, beside)
    if copies < wanted:
        measure = f"topic {beside!r} has" if beside is not None else "there are brokers for"
        yield Finding.build(
            "FEW_COPIES", refuses=False, name=name, copies=copies, measure=measure, wanted=wanted, what=what
        )
    in_sync = _config(wire, TOPIC_CONFIG, topic, _MIN_ISR)
    if copies >= COPIES and in_sync is not None and int(in_sync) < 2:
        yield Finding.build(
            "FEW_COPIES_ACKNOWLEDGED",
            refuses=False,
            name=name,
            copies=copies,
            in_sync=in_sync,
            what=what,
            action=_set(topic, f"{_MIN_ISR}=2"),
        )


def _set(topic: str, setting: str) -> str:
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {setting}"


def _transactions(wire: Wire, options: SinkOptions) -> list[Finding]:
    # Any broker may coordinate a shard's transactions, so the strictest one counts.
    limits = [
        int(value)
        for node in wire.nodes()
        if (value := _config(wire, BROKER_CONFIG, str(node), _TRANSACTION_LIMIT, node)) is not None
    ]
    if not limits:
        return [
            Finding.build(
                "TRANSACTION_LIMIT_HIDDEN", refuses=False, transaction_timeout_s=options.transaction_timeout_s
            )
        ]
    limit_s = min(limits) // 1000
    if options.transaction_timeout_s > limit_s:
        return [
            Finding.build(
                "TRANSACTION_TIMEOUT_TOO_LONG",
                refuses=True,
                only=Guarantee.EXACTLY_ONCE,
                transaction_timeout_s=options.transaction_timeout_s,
                limit_s=limit_s,
            )
        ]
    return []


def _config(wire: Wire, kind: int, name: str, key: str, node: int | None = None) -> str | None:
    """A topic or broker setting; None: this user may not see it, or the broker left the cluster."""
    found = describe_configs(wire, kind, name, [key], node)
    return None if found is None else found.get(key)
