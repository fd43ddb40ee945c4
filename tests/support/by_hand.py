"""Sinks of every kind, whose rows a test changes with the system's own client."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from tests.kafka_tools import produce, read_committed

import delivered
from delivered.pipeline.endpoint import Endpoint

Row = dict[str, Any]


@dataclass
class Sink:
    """
    Attributes:
        endpoint: the sink with more options.
        rows: reads all rows.
        add: appends rows.
        delete: deletes the rows of a key; None: the system cannot.
    """

    endpoint: Callable[..., Endpoint]
    rows: Callable[[], list[Row]]
    add: Callable[[list[Row]], None]
    delete: Callable[[str, Any], None] | None = None

    def alter(self, column: str, key: Any, change: Row) -> None:
        found = [r for r in self.rows() if r[column] == key]
        self.remove(column, key)
        self.add([{**r, **change} for r in found])

    def remove(self, column: str, key: Any) -> None:
        assert self.delete is not None
        before = len(self.rows())
        self.delete(column, key)
        assert len(self.rows()) < before


def _sql(
    endpoint: Callable[..., Endpoint], execute: Callable[..., list[tuple[Any, ...]]], table: str, mark: str
) -> Sink:
    def add(rows: list[Row]) -> None:
        for row in rows:
            execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join([mark] * len(row))})", *row.values())

    def columns() -> list[str]:
        if mark == "?":
            return [r[1] for r in execute(f"PRAGMA table_info({table})")]
        by = "SELECT column_name FROM information_schema.columns WHERE table_name = %s ORDER BY ordinal_position"
        return [r[0] for r in execute(by, table)]

    return Sink(
        endpoint,
        lambda: [dict(zip(columns(), r, strict=True)) for r in execute(f"SELECT * FROM {table}")],
        add,
        lambda column, key: (execute(f"DELETE FROM {table} WHERE {column} = {mark}", key), None)[1],
    )


def _sqlite(_: pytest.FixtureRequest, folder: Path) -> Sink:
    def execute(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(folder / "out.db")) as connection, connection:
            as_text = [str(v) if isinstance(v, Decimal) else v for v in values]
            return connection.execute(statement, as_text).fetchall()

    return _sql(lambda **o: delivered.sqlite(str(folder / "out.db"), "rows", **o), execute, "rows", "?")


def _server(request: pytest.FixtureRequest, system: str, make: Callable[..., Endpoint], **options: Any) -> Sink:
    server: Any = request.getfixturevalue(system)
    table = server.table(None)
    return _sql(lambda **o: make(server.url, table, ifNotExists=True, **options, **o), server.execute, table, "%s")


def _delta(_: pytest.FixtureRequest, folder: Path) -> Sink:
    path = str(folder / "table")

    def add(rows: list[Row]) -> None:
        write_deltalake(path, pa.Table.from_pylist(rows, pa.schema(DeltaTable(path).schema())), mode="append")

    return Sink(
        lambda **o: delivered.delta(path, **o),
        lambda: pa.table(DeltaTable(path).to_pyarrow_table()).to_pylist(),
        add,
        lambda column, key: (DeltaTable(path).delete(f"{column} = '{key}'"), None)[1],
    )


def _iceberg(_: pytest.FixtureRequest, folder: Path) -> Sink:
    def table() -> Any:
        found = SqlCatalog("default", uri=f"sqlite:///{folder}/lake/catalog.db", warehouse=f"file://{folder}/lake")
        return found.load_table("shop.rows")

    return Sink(
        lambda **o: delivered.iceberg("shop.rows", warehouse=str(folder / "lake"), **o),
        lambda: table().scan().to_arrow().to_pylist(),
        lambda rows: table().append(pa.Table.from_pylist(rows, table().schema().as_arrow())),
        lambda column, key: table().delete(f"{column} == '{key}'"),
    )


def _kafka(request: pytest.FixtureRequest, _: Path) -> Sink:
    server: Any = request.getfixturevalue("kafka")
    topic = server.topic(2)
    return Sink(
        lambda **o: delivered.kafka(server.bootstrap, topic=topic, **o),
        lambda: [{"key": m.key(), "value": m.value()} for m in read_committed(server.bootstrap, topic)],
        lambda rows: produce(server.bootstrap, topic, [(r["key"], r["value"]) for r in rows]),
    )


SINKS: dict[str, Callable[[pytest.FixtureRequest, Path], Sink]] = {
    "sqlite": _sqlite,
    "delta": _delta,
    "iceberg": _iceberg,
    "postgres": lambda r, _: _server(r, "postgres", delivered.postgres),
    "mysql": lambda r, _: _server(r, "mysql", delivered.mysql),
    "kafka": _kafka,
}
