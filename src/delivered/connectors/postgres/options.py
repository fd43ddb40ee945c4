"""Options of `delivered_postgres`."""

from __future__ import annotations

from delivered.kits.sql.options import (
    LEDGER_SCHEMA_DEFAULT,
    ServerOptions,
    TableName,
    database_url,
    identifier,
    table_name,
)
from delivered.model.options import option

IDENTIFIER_BYTES_MAX = 63

_NAME = identifier(
    lambda name: len(name.encode()) <= IDENTIFIER_BYTES_MAX,
    f"PostgreSQL's names have 1 to {IDENTIFIER_BYTES_MAX} bytes",
)
_HINT = 'write .option("dbtable", "public.orders"); quote what PostgreSQL would fold: "public"."Orders"'


class PostgresOptions(ServerOptions, owner="delivered_postgres sink"):
    """`url` as libpq takes it; schema None: found by the search path."""

    url: str = option(
        "url",
        "The database: postgresql://host:5432/name, or the same after jdbc:. Parameters after ? go to libpq.",
        database_url(
            "postgresql://host:5432/database",
            ("postgresql", "postgres"),
            ("password", "sslpassword"),
        ),
        example="postgresql://localhost:5432/shop",
    )
    named: TableName = option(
        "dbtable",
        "The table that rows are written to: orders, or sales.orders.",
        table_name(_NAME, '"', str.lower, "schema", _HINT),
        example="public.orders",
    )
    ledger_schema: str = option(
        "ledgerSchema",
        "Schema of the database that holds the ledger's tables; made if missing.",
        _NAME,
        default=LEDGER_SCHEMA_DEFAULT,
    )
