"""Paths into databases, tables and files, read by their own clients."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.catalogue.run import Path, Read, Row
from tests.support.catalogue.values import DIGITS, canonical, number

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.files import CONNECTOR as FILES
from delivered.connectors.iceberg import CONNECTOR as ICEBERG
from delivered.connectors.iceberg.client import keep_nulls
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink

UPSERT = {"mode": "upsert", "keyColumns": "id"}
_names = itertools.count()
_t = pa.types


def rows_of(table: pa.Table) -> list[Row]:
    """Raises ArrowInvalid: a text is not UTF-8, as other readers find out."""
    table.validate(full=True)
    columns = {n: canonical(table.column(n).combine_chunks()) for n in table.schema.names}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def decoded(schema: pa.Schema, rows: Sequence[Sequence[Any]], of: Callable[[Any, pa.DataType], Any]) -> list[Row]:
    """A client's values in canonical form; null stays null."""
    return [{f.name: None if v is None else of(v, f.type) for f, v in zip(schema, row, strict=True)} for row in rows]


def _quoted(name: str, quote: str) -> str:
    return quote + name.replace(quote, quote * 2) + quote


def _of_server(
    server: Any, quote: str, read: Callable[[str, pa.Schema], list[Row]], options: Mapping[str, str]
) -> Path:
    """Args: read: (quoted name of a table, columns) -> its rows."""

    def make(_: pa.Schema, name: str | None = None) -> tuple[Sink, Read]:
        table = _quoted(f"c{next(_names)}" if name is None else name, quote)
        if name is not None:  # of another path
            with contextlib.suppress(Exception):
                server.execute(f"DROP TABLE {table}")
        return server.sink(table, ifNotExists="true", **options), partial(read, table)

    return Path(make)


# PostgreSQL


def _postgres_expression(name: str, kind: pa.DataType) -> str:
    column = _quoted(name, '"')
    if _t.is_floating(kind):
        return f"float{kind.bit_width // 8}send({column})"
    if _t.is_string(kind):
        return f"convert_to({column}, 'UTF8')"
    if _t.is_decimal(kind):
        return f"{column}::text"
    if _t.is_date32(kind):
        return f"CASE WHEN isfinite({column}) THEN ({column} - date '1970-01-01')::text ELSE {column}::text END"
    if _t.is_timestamp(kind):
        return f"timestamp{'' if kind.tz is None else 'tz'}_send({column})"
    return f"(extract(epoch FROM {column}) * 1000000)::text" if _t.is_time(kind) else column


def _of_postgres(value: Any, kind: pa.DataType) -> Any:
    if _t.is_floating(kind):
        return number(struct.unpack(">f" if _t.is_float32(kind) else ">d", value)[0])
    if _t.is_decimal(kind):
        return Decimal(value).normalize(DIGITS)
    if _t.is_timestamp(kind):
        (since,) = struct.unpack(">q", value)
        return since + _EPOCH_2000 if -(2**63) < since < 2**63 - 1 else "infinity"
    if _t.is_temporal(kind):
        return int(Decimal(value)) if "infinity" not in value else value
    return value


_EPOCH_2000 = 946_684_800_000_000
"""Microseconds from 1970 to PostgreSQL's epoch."""


def postgres_value(connection: Any, table: str, column: str, kind: pa.DataType, row: int) -> Any:
    """One value; a column that is text in Spark as PostgreSQL writes it."""
    text = f"CASE WHEN {column} IS NOT NULL THEN convert_to(concat({column}), 'UTF8') END"
    expression = text if _t.is_string(kind) else _postgres_expression(column, kind)
    (value,) = connection.execute(f"SELECT {expression} FROM {table} WHERE id = {row}").fetchone()
    return None if value is None else _of_postgres(value, kind)


def postgres(request: pytest.FixtureRequest, server: str = "postgres", **options: str) -> Path:
    given: Any = request.getfixturevalue(server)

    def read(table: str, schema: pa.Schema) -> list[Row]:
        columns = ", ".join(_postgres_expression(f.name, f.type) for f in schema)
        with given.connect() as connection:
            connection.execute("SET client_encoding = 'UTF8'")
            found = connection.execute(f"SELECT {columns} FROM {table}").fetchall()
        return decoded(schema, found, _of_postgres)

    return _of_server(given, '"', read, options)


# MySQL, MariaDB


def _mysql_expression(name: str, kind: pa.DataType) -> str:
    column = _quoted(name, "`")
    if _t.is_floating(kind):
        return f"CAST({column} AS double)"
    if _t.is_string(kind):
        return f"CAST(CONVERT({column} USING utf8mb4) AS binary)"
    if _t.is_date32(kind):
        return f"TO_DAYS({column}) - 719528"
    if _t.is_timestamp(kind):
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column})"
    if _t.is_time(kind):
        return f"CAST(TIME_TO_SEC({column}) * 1000000 AS signed) DIV 1000000 * 1000000 + MICROSECOND({column})"
    return column


def _of_mysql(value: Any, kind: pa.DataType) -> Any:
    if _t.is_boolean(kind):
        return bool(value)
    if _t.is_floating(kind):
        return number(float(value))
    return value.normalize(DIGITS) if _t.is_decimal(kind) else int(value) if _t.is_temporal(kind) else value


def mysql(request: pytest.FixtureRequest, server: str = "mysql", **options: str) -> Path:
    given: Any = request.getfixturevalue(server)

    def read(table: str, schema: pa.Schema) -> list[Row]:
        columns = ", ".join(_mysql_expression(f.name, f.type) for f in schema)
        connection = given.connect()
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("SET sql_mode = ''")
            cursor.execute(f"SELECT {columns} FROM {table}")
            return decoded(schema, cursor.fetchall(), _of_mysql)

    return _of_server(given, "`", read, options)


# SQLite


def _of_sqlite(value: Any, kind: pa.DataType) -> Any:
    if _t.is_boolean(kind):
        return bool(value)
    if _t.is_floating(kind):
        return number(float(value))
    if _t.is_decimal(kind):
        return Decimal(value.decode()).normalize(DIGITS)
    if _t.is_date32(kind):
        return int(np.datetime64(value.decode(), "D").astype(np.int64))
    if _t.is_timestamp(kind):
        return int(np.datetime64(value.decode().removesuffix("Z"), "us").astype(np.int64))
    return value


def sqlite(request: pytest.FixtureRequest, **options: str) -> Path:
    folder: Folder = request.getfixturevalue("tmp_path")

    def make(_: pa.Schema, name: str | None = None) -> tuple[Sink, Read]:
        path, table = str(folder / f"{next(_names)}.db"), "c" if name is None else name

        def read(schema: pa.Schema) -> list[Row]:
            connection, quoted = sqlite3.connect(path), _quoted(table, '"')
            connection.text_factory = bytes
            with contextlib.closing(connection):
                columns = ", ".join(_quoted(n, '"') for n in schema.names)
                return decoded(schema, connection.execute(f"SELECT {columns} FROM {quoted}").fetchall(), _of_sqlite)

        return SQLITE.sink({"path": path, "table": table, **options}), read

    return Path(make)


# Columns with a role

Make = Callable[[pytest.FixtureRequest], Path]


def by_value(make: Callable[..., Path], twice: bool = False, **options: str) -> Make:
    """A path whose options give the column `v` a role: all values of a type go into it.

    Args:
        twice: see `Path`.
    """

    def role(request: pytest.FixtureRequest) -> Path:
        def rows(ids: pa.Array, values: pa.Array) -> pa.RecordBatch:
            return pa.RecordBatch.from_arrays([ids, values], names=["id", "v"])

        return replace(make(request, **options), rows=rows, column="v", twice=twice)

    return role


# Delta, Iceberg, files


def delta(request: pytest.FixtureRequest, **options: str) -> Path:
    folder: Folder = request.getfixturevalue("tmp_path")

    def make(_: pa.Schema, name: str | None = None) -> tuple[Sink, Read]:
        from deltalake import DeltaTable

        path = str(folder / f"t{next(_names)}" / ("t" if name is None else name))
        return DELTA.sink({"path": path, **options}), lambda _: rows_of(DeltaTable(path).to_pyarrow_table())

    return Path(make)


def iceberg(request: pytest.FixtureRequest, **options: str) -> Path:
    folder: Folder = request.getfixturevalue("tmp_path")

    def make(_: pa.Schema, name: str | None = None) -> tuple[Sink, Read]:
        from pyiceberg.catalog.sql import SqlCatalog

        table = f"c{next(_names)}" if name is None else name

        def read(_: pa.Schema) -> list[Row]:
            keep_nulls()  # the client would read null lists and maps of structs as empty ones
            catalog = SqlCatalog(
                "default", uri=f"sqlite:///{folder}/lake/catalog.db", warehouse=f"file://{folder}/lake"
            )
            return rows_of(catalog.load_table(f"shop.{table}").scan().to_arrow())

        return ICEBERG.sink({"warehouse": str(folder / "lake"), "table": f"shop.{table}", **options}), read

    return Path(make)


def files(request: pytest.FixtureRequest, kind: str) -> Path:
    folder: Folder = request.getfixturevalue("tmp_path")
    parse = {"parquet": _of_parquet, "json": _of_json, "csv": _of_csv}[kind]

    def make(_: pa.Schema, name: str | None = None) -> tuple[Sink, Read]:
        path = folder / f"f{next(_names)}" / ("f" if name is None else name)

        def read(schema: pa.Schema) -> list[Row]:
            return [row for file in path.glob(f"batch=*/[!_]*.{kind}") for row in parse(file, schema)]

        return FILES.sink({"path": str(path), "fileFormat": kind}), read

    return Path(make)


def _of_parquet(file: Folder, _: pa.Schema) -> list[Row]:
    import pyarrow.parquet as pq

    return rows_of(pq.ParquetFile(file).read())


def _of_csv(file: Folder, schema: pa.Schema) -> list[Row]:
    from pyarrow import csv

    texts = csv.read_csv(
        file,
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types={n: pa.binary() for n in schema.names}, null_values=[""], strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )  # fmt: skip
    return decoded(schema, list(zip(*(c.to_pylist() for c in texts.columns), strict=True)), _of_text)


def _of_text(value: bytes, kind: pa.DataType) -> Any:
    """As CSV and JSON write it."""
    if _t.is_string(kind):
        return value
    text = value.decode()
    if _t.is_boolean(kind):
        return {"true": True, "false": False}[text]
    if _t.is_integer(kind) or _t.is_duration(kind):
        return int(text)
    if _t.is_floating(kind):
        return number(float(text) if _t.is_float64(kind) else float(np.float32(text)))
    if _t.is_decimal(kind):
        return Decimal(text).normalize(DIGITS)
    if _t.is_date32(kind):
        return int(np.datetime64(text, "D").astype(np.int64))
    return int(np.datetime64(text.removesuffix("Z").replace(" ", "T"), "us").astype(np.int64))


def _of_json(file: Folder, schema: pa.Schema) -> list[Row]:
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    return decoded(schema, [[row[n] for n in schema.names] for row in rows], _of_json_value)


def _of_json_value(value: Any, kind: pa.DataType) -> Any:
    if value is None or _t.is_boolean(kind) or _t.is_integer(kind):
        return value
    if _t.is_string(kind):
        return value.encode("utf-8", "surrogatepass")
    if _t.is_binary(kind):
        return base64.b64decode(value)
    if _t.is_floating(kind):
        return number(float(value) if _t.is_float64(kind) else float(np.float32(value)))
    if _t.is_list(kind):
        return tuple(_of_json_value(v, kind.value_type) for v in value)
    if _t.is_map(kind):
        entries = [(_of_text(k.encode(), kind.key_type), _of_json_value(v, kind.item_type)) for k, v in value.items()]
        return tuple(sorted(entries, key=repr))
    if _t.is_struct(kind):
        return tuple((f.name, _of_json_value(value[f.name], f.type)) for f in kind)
    return _of_text(str(value).encode(), kind)
