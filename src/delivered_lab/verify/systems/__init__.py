"""Systems that the verifier can break, and feed a pipeline from, one auto-discovered module each.

Clients are the judge's own: they share no code with the product's connectors, so as not to repeat its mistakes.

base.py      the client protocols, and what the fault catalogue must know of a system
sql.py, tables.py, messages.py   shared code for SQL servers, tables of files, and brokers
group.py     several sinks that share every batch
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from delivered_lab.verify.systems.base import SinkKind, SourceClient, SourceKind, System

SQLITE, POSTGRES, POSTGRES_2PC, DELTA, FILES = "sqlite", "postgres", "postgres-2pc", "delta", "files"
KAFKA, KAFKA_LIBRDKAFKA = "kafka", "kafka-librdkafka"
MYSQL, MYSQL_XA, ICEBERG = "mysql", "mysql-xa", "iceberg"
RABBITMQ, PULSAR, RABBITMQ_STREAM, LOG = "rabbitmq", "pulsar", "rabbitmq_stream", "log"
GROUP = f"{KAFKA}-{POSTGRES}-{DELTA}"
_SINK_ORDER = (
    SQLITE, KAFKA, KAFKA_LIBRDKAFKA, POSTGRES, POSTGRES_2PC, MYSQL, MYSQL_XA, DELTA, ICEBERG, FILES, GROUP, RABBITMQ,
)  # fmt: skip
_SOURCE_ORDER = (LOG, KAFKA, KAFKA_LIBRDKAFKA, PULSAR, RABBITMQ_STREAM, RABBITMQ)
"""In the order of cases and pages; all others follow by name."""

Kind = TypeVar("Kind", SinkKind, SourceKind)


def find() -> dict[str, System]:
    """Every system of this folder by its module's name."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    return {m.__name__.rpartition(".")[2]: m.SYSTEM for m in modules if hasattr(m, "SYSTEM")}


def _ordered(kinds: Sequence[Kind], first: Sequence[str]) -> dict[str, Kind]:
    def rank(kind: Kind) -> tuple[int, str]:
        return (first.index(kind.name) if kind.name in first else len(first), kind.name)

    return {k.name: k for k in sorted(kinds, key=rank)}


SYSTEMS = find()
SINK_KINDS = _ordered([k for s in SYSTEMS.values() for k in s.sinks], _SINK_ORDER)
SOURCE_KINDS = _ordered([k for s in SYSTEMS.values() for k in s.sources], _SOURCE_ORDER)


def from_address(address: Mapping[str, Any]) -> SourceClient:
    """Recreate a client from `base.address`."""
    arguments = dict(address)
    return SOURCE_KINDS[arguments.pop("system")].client(**arguments)
