"""Databases and tables with upserts, as a sink and from outside."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.iceberg import CONNECTOR as ICEBERG
from delivered.connectors.mysql import CONNECTOR as MYSQL
from delivered.connectors.postgres import CONNECTOR as POSTGRES
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.connector import Connector
from delivered.contract.sink import Sink

COLUMNS = "region text, id bigint, version bigint, text text NOT NULL, note text DEFAULT 'kept'"
KEYED = COLUMNS.replace("region text", "region varchar(64) COLLATE utf8mb4_nopad_bin")
"""MySQL: indexes do not accept unbounded text, and its texts compare case-insensitively."""


@dataclass
class Store:
    """A database from outside."""

    sink: Callable[..., Sink]
    execute: Callable[[str], list[tuple[Any, ...]]]
    deletes: bool
    connector: Connector
    columns: str = COLUMNS
    not_whole: str = "(id) WHERE id > 0"
    staging: str = ""


def _sqlite(request: pytest.FixtureRequest) -> Store:
    path = str(request.getfixturevalue("tmp_path") / "sink.db")

    def execute(statement: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(path)
        try:
            with connection:
                return connection.execute(statement).fetchall()
        finally:
            connection.close()

    return Store(lambda **o: SQLITE.sink({"path": path, "table": o.pop("table"), **o}), execute, True, SQLITE)


def _server(request: pytest.FixtureRequest, name: str, mechanism: str) -> Store:
    server: Any = request.getfixturevalue(name)
    if name == "postgres":
        request.addfinalizer(server.roll_back_prepared)
    connector, *texts = {
        "postgres": (POSTGRES, COLUMNS, "(id) WHERE id > 0"),
        "mysql": (MYSQL, KEYED, "(text(3))"),
    }[name]
    staging = (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'delivered' AND "
        "table_name LIKE 's\\_%\\_0\\_0\\_%'"
    )
    return Store(
        lambda **o: server.sink(mechanism=mechanism, **o),
        server.execute,
        mechanism == "one_transaction",
        connector,
        *texts,
        staging,
    )


def _delta(request: pytest.FixtureRequest) -> Store:
    folder: Path = request.getfixturevalue("tmp_path")

    def sink(**o: str) -> Sink:
        name = o.pop("table")
        return DELTA.sink({"path": str(folder / name), "mergeSchema": "false", **o})

    def execute(statement: str) -> list[tuple[Any, ...]]:
        words = statement.split()
        if words[0] == "CREATE":
            columns = [("region", pa.string()), ("id", pa.int64()), ("version", pa.int64())]
            nullable = pa.field("text", pa.string(), nullable="NOT NULL" not in statement)
            fields = [*(pa.field(n, k) for n, k in columns), nullable, pa.field("note", pa.string())]
            DeltaTable.create(str(folder / re.split(r"[ (]", words[2])[0]), pa.schema(fields))
            return []
        names = statement.removeprefix("SELECT ").removeprefix("DISTINCT ").split(" FROM ")[0].split(", ")
        if not (folder / words[-1]).exists():
            return []
        rows = [
            tuple(r[n] for n in names)
            for r in pa.table(DeltaTable(str(folder / words[-1])).to_pyarrow_table()).to_pylist()
        ]
        return sorted(set(rows)) if "DISTINCT" in statement else rows

    return Store(sink, execute, True, DELTA)


def _iceberg(request: pytest.FixtureRequest) -> Store:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import NoSuchTableError
    from pyiceberg.schema import Schema
    from pyiceberg.types import LongType, NestedField, StringType

    folder: Path = request.getfixturevalue("tmp_path")

    def catalog() -> SqlCatalog:
        return SqlCatalog("default", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")

    def sink(**o: str) -> Sink:
        return ICEBERG.sink({"warehouse": str(folder), "ifNotExists": "false", **o, "table": f"shop.{o['table']}"})

    def execute(statement: str) -> list[tuple[Any, ...]]:
        words = statement.split()
        if words[0] == "CREATE":
            kinds = {"region": StringType(), "id": LongType(), "version": LongType(), "text": StringType()}
            fields = [
                NestedField(n, name, kind, required=name == "text" and "NOT NULL" in statement)
                for n, (name, kind) in enumerate({**kinds, "note": StringType()}.items(), 1)
            ]
            catalog().create_namespace_if_not_exists("shop")
            catalog().create_table(f"shop.{re.split(r'[ (]', words[2])[0]}", Schema(*fields))
            return []
        names = statement.removeprefix("SELECT ").removeprefix("DISTINCT ").split(" FROM ")[0].split(", ")
        try:
            there = catalog().load_table(f"shop.{words[-1]}").scan().to_arrow()
        except NoSuchTableError:
            return []
        rows = [tuple(r[n] for n in names) for r in there.to_pylist()]
        return sorted(set(rows)) if "DISTINCT" in statement else rows

    return Store(sink, execute, True, ICEBERG)


STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "sqlite": _sqlite,
    "delta": _delta,
    "iceberg": _iceberg,
    "postgres-one-transaction": lambda r: _server(r, "postgres", "one_transaction"),
    "postgres-two-phase": lambda r: _server(r, "postgres", "two_phase"),
    "mysql-one-transaction": lambda r: _server(r, "mysql", "one_transaction"),
    "mysql-two-phase": lambda r: _server(r, "mysql", "two_phase"),
}
