"""Supported combinations: every source with every sink under every guarantee, as the planner answers. Nothing by hand.

A connector that is installed and has no example here stops `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import delivered
from delivered.model.capability import Commit, Guarantee
from delivered.pipeline.registry import connectors
from delivered.planner.answer import Plan, Refusal

GUARANTEES = tuple(reversed(Guarantee))


@dataclass(frozen=True)
class Example:
    """
    Attributes:
        label: what stands in the table; the same system may have several.
    """

    label: str
    system: str
    options: Mapping[str, str] = field(default_factory=dict)


_ROCKETMQ = {"endpoints": "localhost:8081", "topic": "orders"}
_ACTIVEMQ = {"url": "stomp://localhost", "queue": "orders"}

SOURCES = (
    Example("Kafka", "kafka", {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "orders"}),
    Example("local log", "log", {"path": "/data/log"}),
    Example("[outbox](connectors/outbox.md)", "outbox", {"url": "postgresql://localhost/shop"}),
    Example(
        "RabbitMQ, through a [receiver](receiver.md)",
        "rabbitmq",
        {"url": "amqp://localhost", "queue": "orders", "log": "/data/log"},
    ),
    Example(
        "RabbitMQ, senders set no `message_id`",
        "rabbitmq",
        {"url": "amqp://localhost", "queue": "orders", "log": "/data/log", "messageId": "none"},
    ),
    Example("RabbitMQ stream", "rabbitmq_stream", {"url": "amqp://localhost", "streams": "orders"}),
    Example(
        "ActiveMQ, through a [receiver](receiver.md)",
        "activemq",
        {**_ACTIVEMQ, "log": "/data/log", "idHeader": "_AMQ_DUPL_ID"},
    ),
    Example("ActiveMQ, senders set no id (`idHeader`)", "activemq", {**_ACTIVEMQ, "log": "/data/log"}),
    Example(
        "Pulsar",
        "pulsar",
        {"url": "pulsar://localhost:6650", "adminUrl": "http://localhost:8080", "topics": "orders"},
    ),
    Example(
        "RocketMQ, through a [receiver](receiver.md)", "rocketmq", {**_ROCKETMQ, "group": "lake", "log": "/data/log"}
    ),
)
SINKS = (
    Example("Kafka", "kafka", {"kafka.bootstrap.servers": "localhost:9092", "topic": "clean"}),
    Example("PostgreSQL", "postgres", {"url": "postgresql://localhost/shop", "dbtable": "orders"}),
    Example(
        'PostgreSQL, `mechanism="two_phase"`',
        "postgres",
        {"url": "postgresql://localhost/shop", "dbtable": "orders", "mechanism": "two_phase"},
    ),
    Example("MySQL, MariaDB", "mysql", {"url": "mysql://localhost/shop", "dbtable": "orders"}),
    Example(
        'MySQL, MariaDB, `mechanism="two_phase"`',
        "mysql",
        {"url": "mysql://localhost/shop", "dbtable": "orders", "mechanism": "two_phase"},
    ),
    Example("SQLite", "sqlite", {"path": "/data/out.db", "table": "orders"}),
    Example("Delta Lake", "delta", {"path": "/data/orders"}),
    Example("Iceberg", "iceberg", {"warehouse": "/data/lake", "table": "shop.orders"}),
    Example("Parquet, JSON, CSV", "files", {"path": "/data/orders"}),
    Example(
        "RabbitMQ",
        "rabbitmq",
        {"url": "amqp://localhost", "exchange": "orders", "routingKey": "clean", "ledger": "/data/ledger.db"},
    ),
    Example("ActiveMQ", "activemq", {**_ACTIVEMQ, "ledger": "/data/ledger.db"}),
    Example(
        "Pulsar",
        "pulsar",
        {
            "url": "pulsar://localhost:6650",
            "adminUrl": "http://localhost:8080",
            "topic": "clean",
            "ledger": "/data/ledger.db",
        },
    ),
    Example("RocketMQ", "rocketmq", {**_ROCKETMQ, "ledger": "/data/ledger.db"}),
    Example(
        'RocketMQ, `messageType="transaction"`',
        "rocketmq",
        {
            **_ROCKETMQ,
            "ledger": "/data/ledger.db",
            "messageType": "transaction",
            "nameServers": "localhost:9876",
        },
    ),
    Example(
        "[Saga](saga.md)",
        "saga",
        {"saga": "shop.sagas:checkout", "log": "postgresql://localhost/shop", "ledger": "/data/ledger.db"},
    ),
)


def plan(source: Example, sink: Example, guarantee: Guarantee) -> Plan | Refusal:
    return delivered.Pipeline(
        name="orders",
        guarantee=guarantee.value,
        checkpoint="/data/checkpoint",
        source=delivered.endpoint(source.system, **source.options),
        sinks=[delivered.endpoint(sink.system, **sink.options)],
    ).plan(offline=True)


def check() -> None:
    """
    Raises:
        LookupError: a connector has no example.
    """
    for name, connector in connectors().items():
        for kind, table, examples in (
            ("source", connector.source_options, SOURCES),
            ("sink", connector.sink_options, SINKS),
        ):
            if table is not None and name not in {e.system for e in examples}:
                raise LookupError(f"docs/support.py has no example of {name!r} as a {kind}")


def _cell(found: Plan | Refusal) -> str:
    return (
        _yes(found) if found.guarantee is not Guarantee.EXACTLY_ONCE or isinstance(found, Refusal) else found.mechanism
    )


def _yes(found: Plan | Refusal) -> str:
    return "yes" if isinstance(found, Plan) else f"refused: `{found.code.removeprefix('DELIVERED_')}`"


def by_sink() -> list[str]:
    """Sinks against guarantees, with a replayable source."""
    lines = ["| sink | " + " | ".join(f"`{g}`" for g in GUARANTEES) + " |", "|---" * (1 + len(GUARANTEES)) + "|"]
    lines += [
        f"| {sink.label} | " + " | ".join(_cell(plan(SOURCES[0], sink, g)) for g in GUARANTEES) + " |" for sink in SINKS
    ]
    return lines


def by_source() -> list[str]:
    """Sources against guarantees, with a transactional sink."""
    lines = ["| source | " + " | ".join(f"`{g}`" for g in GUARANTEES) + " |", "|---" * (1 + len(GUARANTEES)) + "|"]
    for source in SOURCES:
        said = [_yes(plan(source, SINKS[0], g)) for g in GUARANTEES]
        lines.append(f"| {source.label} | " + " | ".join(said) + " |")
    return lines


_MODES = {
    "complete": {"mode": "complete"},
    "overwrite": {"mode": "overwrite", "partitionBy": "day"},
    "upsert": {"mode": "upsert", "keyColumns": "id"},
    "insert": {"mode": "insert", "keyColumns": "id"},
    "delete": {"mode": "upsert", "keyColumns": "id", "deleteColumn": "gone"},
}


def by_power() -> list[str]:
    """What a sink can do besides append, by its options and its capability."""
    heads = ("sink", *(f"`{m}`" for m in _MODES), "atomic batches", "in a group of sinks", "`dedup` in a table")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for sink in SINKS:
        can = delivered.endpoint(sink.system, **sink.options).sink().capability()
        among = {Commit.TWO_PHASE: "prepares", Commit.ONE_TRANSACTION: "decides, at most one", Commit.NONE: "no"}
        said = [_takes(sink, options) for options in _MODES.values()]
        if can.commit is Commit.TWO_PHASE:  # planner and preflight say why
            said[0] = said[-1] = "no"
        said += ["yes" if can.batch_atomic else "no", among[can.commit], "yes" if can.remembers else "no"]
        lines.append(f"| {sink.label} | " + " | ".join(said) + " |")
    return lines


def _takes(sink: Example, options: dict[str, str]) -> str:
    try:
        delivered.endpoint(sink.system, **{**sink.options, **options}).sink()
    except delivered.UsageError:
        return "no"
    return "yes"


def page() -> str:
    """Every source with every sink under exactly_once, and its assumptions."""
    check()
    lines = [
        "# Supported combinations",
        "",
        "Generated by `make docs`: the planner's answer for every pair of source and sink, without a transform. A",
        "refusal shows its error code; `delivered plan` also names the nearest guarantee that is possible.",
        "",
        "## Sinks, with a replayable source",
        "",
        *by_sink(),
        "",
        "## Sources, with a transactional sink",
        "",
        *by_source(),
        "",
        "## Beyond append, under `exactly_once`",
        "",
        *by_power(),
        "",
        "## Every pair under `exactly_once`",
        "",
        "| source | " + " | ".join(s.label for s in SINKS) + " |",
        "|---" * (1 + len(SINKS)) + "|",
    ]
    for source in SOURCES:
        said = [_yes(plan(source, sink, Guarantee.EXACTLY_ONCE)) for sink in SINKS]
        lines.append(f"| {source.label} | " + " | ".join(said) + " |")
    lines += ["", "## Assumptions of `exactly_once`", ""]
    for sink in SINKS:
        answer = plan(SOURCES[0], sink, Guarantee.EXACTLY_ONCE)
        assumes = delivered.endpoint(sink.system, **sink.options).sink().capability().assumes
        said = [answer.reason] if isinstance(answer, Refusal) else list(assumes)
        lines += [f"**{sink.label}**", "", *(f"- {text}" for text in said), ""]
    return "\n".join(lines)
