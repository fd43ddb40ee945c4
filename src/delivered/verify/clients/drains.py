"""Which client reads which sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered import brokers
from delivered.verify.clients.activemq import ArtemisQueue
from delivered.verify.clients.base import Drain
from delivered.verify.clients.delta import DeltaTable
from delivered.verify.clients.files import Files
from delivered.verify.clients.iceberg import IcebergTable
from delivered.verify.clients.kafka import Topic
from delivered.verify.clients.messages import Messages
from delivered.verify.clients.mysql import MysqlTable
from delivered.verify.clients.postgres import PgTable
from delivered.verify.clients.pulsar import PulsarTopic
from delivered.verify.clients.rabbitmq import RabbitExchange
from delivered.verify.clients.rocketmq import RocketTopic, RocketTransactions
from delivered.verify.clients.sqlite import Table
from delivered.verify.sinks import (
    ACTIVEMQ,
    DELTA,
    FILES,
    ICEBERG,
    KAFKA,
    MYSQL,
    POSTGRES,
    PULSAR,
    RABBITMQ,
    ROCKETMQ,
    SQLITE,
    SinkKind,
)
from delivered.verify.workloads import Workload

_BIG_RECORDS = {"kafka.message.max.bytes": "2097152"}


@dataclass(frozen=True)
class Place:
    """Where a case has its sink.

    Attributes:
        name: of the case.
        server: that holds the sink; None: files of this machine.
        disk: for files.
        pipeline_address: address of a proxy before the server; None: the server's own.
        typed: the judge makes the table, with the columns of the workload; else the pipeline does.
        small: a small disk that the server must put the table on; None: where it likes.
        extra: more options of the sink in the pipeline file.
    """

    name: str
    server: brokers.Broker | None
    disk: Path
    pipeline_address: str | None
    workload: Workload
    typed: bool = True
    small: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held_by(self) -> brokers.Broker:
        if self.server is None:
            raise TypeError(f"the sink of case {self.name} has no server")
        return self.server


def make(kind: SinkKind, at: Place) -> Drain:
    """The client of a sink that is one."""
    return _MAKERS[kind.format](kind, at)


def _kafka(kind: SinkKind, at: Place) -> Drain:
    del kind
    big = _BIG_RECORDS if at.workload.name == "big" else {}
    bootstrap, topics = at.held_by.bootstrap, at.workload.topics
    return Topic(bootstrap, f"{at.name}-out", at.pipeline_address, extra={**big, **at.extra}, topics=topics)


def _postgres(kind: SinkKind, at: Place) -> Drain:
    kinds = at.workload.kinds if at.typed else None
    return PgTable(
        at.held_by, at.name, at.pipeline_address, kinds, two_phase=kind.two_phase, disk=at.small, extra=dict(at.extra)
    )


def _mysql(kind: SinkKind, at: Place) -> Drain:
    two_phase = kind.two_phase
    return MysqlTable(at.held_by, at.name, at.pipeline_address, at.workload.kinds, two_phase, dict(at.extra))


def _sent(made: type[Messages]) -> Callable[[SinkKind, Place], Drain]:
    return lambda _, at: made(at.held_by, at.name, at.disk / "ledger.db", at.pipeline_address, dict(at.extra))


_MAKERS: dict[str, Callable[[SinkKind, Place], Drain]] = {
    SQLITE: lambda _, at: Table(at.disk / "effects.db", extra=dict(at.extra)),
    FILES: lambda _, at: Files(at.disk / "effects", extra=dict(at.extra)),
    DELTA: lambda _, at: DeltaTable(at.disk / "effects", extra=dict(at.extra)),
    ICEBERG: lambda _, at: IcebergTable(at.disk / "effects", extra=dict(at.extra)),
    KAFKA: _kafka,
    POSTGRES: _postgres,
    MYSQL: _mysql,
    RABBITMQ: _sent(RabbitExchange),
    ACTIVEMQ: _sent(ArtemisQueue),
    PULSAR: _sent(PulsarTopic),
    ROCKETMQ: lambda kind, at: _sent(RocketTransactions if kind.two_phase else RocketTopic)(kind, at),
}
