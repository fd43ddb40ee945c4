"""Systems that the verifier can break, and feed a pipeline from, one auto-discovered module each.

Clients are the judge's own: they share no code with the product's connectors, so as not to repeat its mistakes.

Here are all of them, and several sinks that share every batch: each has its own client, and all are read and judged.

base.py       the client protocols, what the fault catalogue must know of a system, tables of SQL servers
tables.py     tables of files
messages.py   what clients of brokers share
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from delivered_lab.verify.systems import mysql
from delivered_lab.verify.systems.base import Poll, Row, SinkClient, SinkKind, SourceClient, SourceKind, System

SQLITE, POSTGRES, POSTGRES_2PC, DELTA, FILES = "sqlite", "postgres", "postgres-2pc", "delta", "files"
KAFKA, KAFKA_LIBRDKAFKA = "kafka", "kafka-librdkafka"
MYSQL, MYSQL_XA, ICEBERG = "mysql", "mysql-xa", "iceberg"
MARIADB, MARIADB_XA = "mariadb", "mariadb-xa"
RABBITMQ, PULSAR, RABBITMQ_STREAM, LOG = "rabbitmq", "pulsar", "rabbitmq_stream", "log"
GROUP = f"{KAFKA}-{POSTGRES}-{DELTA}"
_SINK_ORDER = (
    SQLITE, KAFKA, KAFKA_LIBRDKAFKA, POSTGRES, POSTGRES_2PC, MYSQL, MYSQL_XA, MARIADB, MARIADB_XA,
    DELTA, ICEBERG, FILES, GROUP, RABBITMQ,
)  # fmt: skip
_SOURCE_ORDER = (LOG, KAFKA, KAFKA_LIBRDKAFKA, PULSAR, RABBITMQ_STREAM, RABBITMQ)
"""In the order of cases and pages; all others follow by name."""

# Two prepare; Delta, which cannot, decides as the last resource.
_MEMBERS = (KAFKA, POSTGRES_2PC, DELTA)
_GROUP = System((SinkKind(GROUP, "", None, server=KAFKA, source=KAFKA, two_phase=True, members=_MEMBERS),))

Kind = TypeVar("Kind", SinkKind, SourceKind)


def find() -> dict[str, System]:
    """Every system of this folder by its module's name, and MariaDB, which is read as MySQL."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    systems = {m.__name__.rpartition(".")[2]: m.SYSTEM for m in modules if hasattr(m, "SYSTEM")}
    return {"group": _GROUP, "mariadb": mysql.MARIADB, **systems}


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


class GroupClient:
    """Args: members: by name in the pipeline file, in its order."""

    system = "group"
    batch_atomic = False
    """All or nothing, but not at one moment."""

    def __init__(self, members: Mapping[str, SinkClient]) -> None:
        self.members = dict(members)

    def create(self) -> None:
        for member in self.members.values():
            member.create()

    def options(self) -> dict[str, Any]:
        raise TypeError("a group of sinks has several options: see sink_entries")

    def read(self) -> list[Row]:
        return [replace(row, sink=name) for name, member in self.members.items() for row in member.read()]

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        lock = threading.Lock()

        def one(name: str) -> None:
            def tell(poll: Poll) -> None:
                with lock:
                    seen(Poll([replace(row, sink=name) for row in poll.rows], snapshot=False))

            self.members[name].follow(tell, stop)

        with ThreadPoolExecutor(len(self.members)) as pool:
            for done in [pool.submit(one, name) for name in self.members]:
                done.result()

    def open_transactions(self, pipeline: str) -> list[str]:
        return [
            f"{name}: {text}" for name, member in self.members.items() for text in member.open_transactions(pipeline)
        ]

    def remove(self) -> None:
        for member in self.members.values():
            member.remove()


def sink_names(sink: SinkClient) -> tuple[str, ...]:
    """As in `Row.sink`: one empty name for a single sink."""
    return tuple(sink.members) if isinstance(sink, GroupClient) else ("",)


def sink_entries(sink: SinkClient) -> list[dict[str, Any]]:
    """Sinks in the pipeline file."""
    if isinstance(sink, GroupClient):
        return [{"name": name, **member.options()} for name, member in sink.members.items()]
    return [sink.options()]


def at_sink(sink: str, name: str) -> str:
    """Sinks of a group get the same effects; each sink's effect is distinct."""
    return f"{sink}: {name}" if sink else name
