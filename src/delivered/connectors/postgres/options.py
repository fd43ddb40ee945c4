"""Options of `delivered_postgres`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from delivered.kits.sql.options import LEDGER_SCHEMA_DEFAULT, ServerOptions, parse_server, server_options
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable

OWNER = "delivered_postgres sink"
IDENTIFIER_BYTES_MAX = 63

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option(
            "url",
            "The database: postgresql://host:5432/name, or the same after jdbc:. Parameters after ? go to libpq.",
            required=True,
        ),
        Option("dbtable", "The table that rows are written to: orders, or sales.orders.", required=True),
        *server_options("Schema of the database that holds the ledger's tables; made if missing."),
    ),
)


class PostgresOptions(ServerOptions):
    """`url` as libpq takes it; `schema` and `table` as PostgreSQL folds them; schema None: found by the search path."""


def parse(given: Mapping[str, str]) -> PostgresOptions:
    """
    Raises:
        UsageError: unknown option, missing url or table, a password inside the url, or a value out of bounds.
    """
    options = SINK_OPTIONS.restore(given)
    schema, table = _table(options["dbtable"])
    return PostgresOptions(
        url=_url(options["url"]),
        schema=schema,
        table=table,
        ledger_schema=_identifier("ledgerSchema", options.get("ledgerSchema", LEDGER_SCHEMA_DEFAULT)),
        **parse_server(OWNER, options),
    )


def _url(text: str) -> str:
    url = text.strip().removeprefix("jdbc:")
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
        # Not repeated here: what is not understood may hold a password.
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'url' is not of the form postgresql://host:5432/database.",
            next_step='write .option("url", "postgresql://localhost:5432/shop")',
        )
    if parts.password is not None or {"password", "sslpassword"} & parse_qs(parts.query).keys():
        raise UsageError(
            "PASSWORD_IN_URL",
            f"{OWNER}: option 'url' holds a password; urls are shown in plans and logs.",
            next_step='take it out and write .option("password", "env:PGPASSWORD_OF_MINE")',
        )
    return url


_PART = r'"(?:[^"\0]|"")+"|[^\W\d][\w$]*'


def _table(text: str) -> tuple[str | None, str]:
    match = re.fullmatch(rf"(?:({_PART})\s*\.\s*)?({_PART})", text.strip())
    if match is None:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option 'dbtable' is {text!r}; it must be a table's name, with its schema or without.",
            next_step='write .option("dbtable", "public.orders"); quote what PostgreSQL would fold: "public"."Orders"',
        )
    schema, table = match.groups()
    return schema and _identifier("dbtable", _folded(schema)), _identifier("dbtable", _folded(table))


def _folded(part: str) -> str:
    """As PostgreSQL reads it: in lower case, unless it is quoted."""
    return part[1:-1].replace('""', '"') if part.startswith('"') else part.lower()


def _identifier(option: str, name: str) -> str:
    if not name.strip() or "\0" in name or len(name.encode()) > IDENTIFIER_BYTES_MAX:
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {option!r} names {name!r}; PostgreSQL's names have 1 to {IDENTIFIER_BYTES_MAX} bytes.",
        )
    return name
