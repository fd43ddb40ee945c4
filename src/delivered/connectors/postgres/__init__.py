"""PostgreSQL as a sink: rows, written by binary COPY, and decisions in one database. Its options, and the types of its
columns."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from delivered.contract.connector import Connector, Factory
from delivered.contract.sink import Parts
from delivered.kits.options import postgres_in_clear
from delivered.kits.sql.sink import ServerSink, ServerTerms
from delivered.kits.sql.table import (
    LEDGER_SCHEMA_DEFAULT,
    ServerOptions,
    ServerTypes,
    TableName,
    database_url,
    identifier,
    table_name,
)
from delivered.model.options import option
from delivered.model.rows import RANGES

IDENTIFIER_BYTES_MAX = 63

_NAME = identifier(
    lambda name: len(name.encode()) <= IDENTIFIER_BYTES_MAX,
    f"PostgreSQL identifiers have 1 to {IDENTIFIER_BYTES_MAX} bytes",
)
_HINT = 'write .option("dbtable", "public.orders"); quote names that PostgreSQL would fold: "public"."Orders"'


class PostgresOptions(ServerOptions, owner="delivered_postgres sink"):
    """`url` in libpq's form; schema None: resolved by the search path."""

    url: str = option(
        "url",
        "URL of the database: postgresql://host:5432/name, optionally after jdbc:; a primary and its standbys: "
        "//a:5432,b:5432/name. Parameters after ? go to libpq.",
        database_url(
            "postgresql://host:5432/database",
            ("postgresql", "postgres"),
            ("password", "sslpassword"),
        ),
        example="postgresql://localhost:5432/shop",
    )

    @property
    def several_hosts(self) -> bool:
        """Whether the url names several servers, and does not say which of them to use."""
        parts = urlsplit(self.url)
        query = parse_qs(parts.query)
        return "target_session_attrs" not in query and "," in parts.netloc + "".join(query.get("host", []))

    named: TableName = option(
        "dbtable",
        "Table to write to: orders, or sales.orders.",
        table_name(_NAME, '"', str.lower, "schema", _HINT),
        example="public.orders",
    )
    ledger_schema: str = option(
        "ledgerSchema",
        "Schema for the ledger's tables; created if missing.",
        _NAME,
        default=LEDGER_SCHEMA_DEFAULT,
    )

    @property
    def in_clear(self) -> tuple[str, ...]:
        return postgres_in_clear(self.url)


# Arrow types as PostgreSQL stores them, without loss.
#
# Arrow                     created as         also accepted
# boolean                   boolean
# int8, int16, uint8        smallint           integer, bigint
# int32, uint16             integer            bigint
# int64, uint32             bigint
# float                     real               double precision
# double                    double precision
# decimal(p, s)             numeric(p, s)      numeric without precision; numeric(p', s) with p' >= p
# string                    text               varchar, citext, enum, json, jsonb
# binary                    bytea
# date                      date
# timestamp with time zone  timestamptz
# timestamp without         timestamp
# time                      time
# null                      -                  any
# list, struct, map, duration, uint64, others: refused

ENUM = "enum"
"""Any enum type."""

_SQL = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
}


class PostgresTypes(ServerTypes):
    system = "PostgreSQL"
    columns_max = 1_600  # PostgreSQL's own limits
    name_max = (63, "bytes")
    range = RANGES["postgres"]
    nested_hint = "; a jsonb column accepts JSON texts"

    def declared(self, kind: pa.DataType) -> str | None:
        fitting = self.fitting(kind)
        if not fitting:
            return None
        name = fitting[0]
        return f"numeric({kind.precision},{kind.scale})" if name == "numeric" else _SQL.get(name, name)

    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
        t = pa.types
        if t.is_boolean(kind):
            return ("bool",)
        if kind in (pa.int8(), pa.int16(), pa.uint8()):
            return ("int2", "int4", "int8")
        if kind in (pa.int32(), pa.uint16()):
            return ("int4", "int8")
        if kind in (pa.int64(), pa.uint32()):
            return ("int8",)
        if t.is_float32(kind):
            return ("float4", "float8")
        if t.is_float64(kind):
            return ("float8",)
        if t.is_decimal128(kind):
            return ("numeric",) if 0 <= kind.scale <= kind.precision else ()
        if t.is_string(kind):
            return ("text", "varchar", "citext", ENUM, "json", "jsonb")
        if t.is_binary(kind):
            return ("bytea",)
        if t.is_date32(kind):
            return ("date",)
        if t.is_timestamp(kind):
            return () if kind.unit == "ns" else ("timestamp",) if kind.tz is None else ("timestamptz",)
        if t.is_time(kind):
            return () if kind.unit == "ns" else ("time",)
        return ()


TYPES = PostgresTypes()


@dataclass(frozen=True)
class PostgresSink(ServerSink):
    options: PostgresOptions

    types = TYPES
    parts = Parts(
        __package__,
        look="read:look",
        add_columns="target:add_columns",
        table_check="target:table_check",
        writer="writer:CopyWriter",
        scan="read:PostgresScan",
        store="store:build_store",
        committer="store:build_committer",
        database="client:PostgresDatabase",
        refused_rows="writer:refused_rows",
    )
    terms = ServerTerms(
        load="COPY",
        transaction="a transaction",
        prepare="PREPARE TRANSACTION, durable",
        commit="COMMIT PREPARED",
        moved="nothing to do; the decision made the rows visible",
        holds="hold locks and stop VACUUM",
        assumes=("the database is backed up and restored as one, with the ledger's schema",),
        limits=("the server's max_prepared_transactions must exceed the number of shards",),
    )


CONNECTOR = Connector(
    "postgres",
    "postgres",
    sinks=Factory(PostgresOptions, "delivered.connectors.postgres:PostgresSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
