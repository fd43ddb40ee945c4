"""Options of `delivered_postgres`."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from delivered.kits.options import postgres_in_clear
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
