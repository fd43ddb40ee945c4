"""Check topic and brokers against the guarantee, before the first batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.errors import NoAnswer
from delivered.clients.kafka.protocol import Wire, ask_member, name_of
from delivered.connectors.kafka.options import SinkOptions
from delivered.connectors.kafka.topics import COPIES, PARTITIONS, copies_wanted, ledger_topic
from delivered.contract.finding import Finding
from delivered.model.errors import Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.patience import patience_s

_TRANSACTION_LIMIT = "transaction.max.timeout.ms"
_MIN_ISR = "min.insync.replicas"
_UNCLEAN = "unclean.leader.election.enable"
_TRANSACTION_LOG = "__transaction_state"
_TOPIC_CONFIG, _BROKER_CONFIG = 2, 4


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
            "KAFKA_NO_ANSWER",
            f"The brokers at {options.client['bootstrap.servers']} stopped answering: {error}.",
            next_step="check the brokers",
        ) from None
    finally:
        wire.close()


def _topic(wire: Wire, options: SinkOptions) -> list[Finding]:
    if options.topic is None:
        return []
    topic = options.topic
    found = wire.patiently(lambda: wire.topic(topic))
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        return [
            Finding(
                "TOPIC_UNKNOWN",
                f"Topic {options.topic!r} does not exist at {options.client['bootstrap.servers']}.",
                refuses=True,
                next_step=f"create it, for example kafka-topics.sh --create --topic {options.topic}",
            )
        ]
    if found.error_code == protocol.TOPIC_AUTHORIZATION_FAILED:
        return [
            Finding(
                "KAFKA_PERMISSION",
                f"This user is not authorized to describe topic {options.topic!r}.",
                refuses=True,
                next_step="grant Write and Describe on it",
            )
        ]
    if found.error_code != protocol.NONE:
        return [Finding("TOPIC_STATE", f"Topic {options.topic!r}: {name_of(found.error_code)}.", refuses=False)]
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    in_sync = _config(wire, _TOPIC_CONFIG, options.topic, _MIN_ISR)
    findings = []
    if copies == 1:
        findings.append(
            Finding(
                "ONE_COPY",
                f"Topic {options.topic!r} has a replication factor of 1: losing a broker's disk loses records.",
                refuses=False,
                next_step="use a replication factor of 3 and min.insync.replicas=2",
            )
        )
    elif in_sync is not None and int(in_sync) < 2:
        findings.append(
            Finding(
                "ONE_COPY_ACKNOWLEDGED",
                f"Topic {options.topic!r} has {copies} replicas and min.insync.replicas={in_sync}: an acknowledged "
                "record may be on only one disk.",
                refuses=False,
                next_step="set min.insync.replicas=2",
            )
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
        yield Finding(
            "LEDGER_PARTITIONS",
            f"{name} has {len(found.partitions)} partitions; it needs {PARTITIONS}.",
            refuses=True,
            next_step=f"kafka-topics.sh --alter --topic {topic} --partitions {PARTITIONS}",
        )
    policy = _config(wire, _TOPIC_CONFIG, topic, "cleanup.policy")
    if policy is not None and policy != "compact":
        yield Finding(
            "LEDGER_CLEANUP",
            f"{name} has cleanup.policy={policy}; it must be compact, or decisions are deleted by age.",
            refuses=False,
            next_step=_set(topic, "cleanup.policy=compact"),
        )
    if _config(wire, _TOPIC_CONFIG, topic, _UNCLEAN) == "true":
        yield Finding(
            "LEDGER_UNCLEAN",
            f"{name} has {_UNCLEAN}=true: a replica that lacks decisions may become its leader, and they are lost.",
            refuses=False,
            next_step=_set(topic, f"{_UNCLEAN}=false"),
        )
    yield from _durability(wire, topic, found, beside, name, "decisions")


def _transaction_log(wire: Wire, beside: str | None) -> Iterator[Finding]:
    found = wire.patiently(lambda: wire.topic(_TRANSACTION_LOG))
    if found.error_code == protocol.NONE:  # else there was no transaction yet, or this user may not see it
        yield from _durability(wire, _TRANSACTION_LOG, found, beside, f"Topic {_TRANSACTION_LOG!r}", "transactions")


def _durability(wire: Wire, topic: str, found: Any, beside: str | None, name: str, what: str) -> Iterator[Finding]:
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    wanted = copies_wanted(wire, beside)
    if copies < wanted:
        measure = f"topic {beside!r} has" if beside is not None else "there are brokers for"
        yield Finding(
            "FEW_COPIES",
            f"{name} has a replication factor of {copies}, {measure} {wanted}: {what} are lost with fewer disks than "
            "the records.",
            refuses=False,
            next_step=f"raise it to {wanted} with kafka-reassign-partitions.sh, and set min.insync.replicas=2",
        )
    in_sync = _config(wire, _TOPIC_CONFIG, topic, _MIN_ISR)
    if copies >= COPIES and in_sync is not None and int(in_sync) < 2:
        yield Finding(
            "FEW_COPIES_ACKNOWLEDGED",
            f"{name} has {copies} replicas and {_MIN_ISR}={in_sync}: acknowledged {what} may be on only one disk.",
            refuses=False,
            next_step=_set(topic, f"{_MIN_ISR}=2"),
        )


def _set(topic: str, setting: str) -> str:
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {setting}"


def _transactions(wire: Wire, options: SinkOptions) -> list[Finding]:
    # Any broker may coordinate a shard's transactions, so the strictest one counts.
    limits = [
        int(value)
        for node in wire.nodes()
        if (value := _config(wire, _BROKER_CONFIG, str(node), _TRANSACTION_LIMIT, node)) is not None
    ]
    if not limits:
        return [
            Finding(
                "TRANSACTION_LIMIT_HIDDEN",
                f"The brokers do not disclose their {_TRANSACTION_LIMIT}; the first batch will show whether "
                f"{options.transaction_timeout_s} s is allowed.",
                refuses=False,
                next_step="grant DescribeConfigs on the cluster",
            )
        ]
    limit_s = min(limits) // 1000
    if options.transaction_timeout_s > limit_s:
        return [
            Finding(
                "TRANSACTION_TIMEOUT_TOO_LONG",
                f"transactionTimeout is {options.transaction_timeout_s} s, but the brokers allow at most {limit_s} s "
                f"({_TRANSACTION_LIMIT}).",
                refuses=True,
                next_step=f'add .option("transactionTimeout", "{limit_s}"), or raise {_TRANSACTION_LIMIT}',
                only=Guarantee.EXACTLY_ONCE,
            )
        ]
    return []


def _config(wire: Wire, kind: int, name: str, key: str, node: int | None = None) -> str | None:
    """A topic or broker setting; None: this user may not see it, or the broker left the cluster."""
    from kafka.protocol.admin.configs import DescribeConfigsRequest

    Resource = DescribeConfigsRequest.DescribeConfigsResource  # noqa: N806
    request = DescribeConfigsRequest(
        resources=[Resource(resource_type=kind, resource_name=name, configuration_keys=[key])],
        include_synonyms=False,
        max_version=1,
    )
    answer: Any
    if node is None:
        answer = wire.patiently(lambda: wire.ask(request))
    else:
        answer = ask_member(wire, node, request, time.monotonic() + patience_s(answered=True))
    found = next(iter(answer.results), None) if answer is not None else None
    if found is None or found.error_code != protocol.NONE:
        return None
    return next((c.value for c in found.configs if c.name == key), None)
