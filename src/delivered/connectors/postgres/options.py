"""Options of `delivered_postgres`, checked once and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qs, urlsplit

from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, choice, flag, resolve_secret, whole_number
from delivered.sql.options import MODE_OPTIONS, TableOptions, parse_mode

OWNER = "delivered_postgres sink"
IDENTIFIER_BYTES_MAX = 63
LOCK_TIMEOUT_S_DEFAULT = 60


class Mechanism(StrEnum):
    """How exactly_once is had."""

    ONE_TRANSACTION = "one_transaction"
    """Tasks commit their shards into staging tables; one transaction of the driver moves them, with the decision."""
    TWO_PHASE = "two_phase"
    """Tasks leave prepared transactions; the driver decides, then commits each."""


SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option(
            "url",
            "The database: postgresql://host:5432/name, or the same after jdbc:. Parameters after ? go to libpq.",
            required=True,
        ),
        Option("dbtable", "The table that rows are written to: orders, or sales.orders.", required=True),
        Option("user", "Whom to log in as."),
        Option("password", "Its password, better as env:NAME or file:PATH.", secret=True),
        Option("mechanism", "one_transaction or two_phase: how exactly_once is had.", "one_transaction"),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "false"),
        Option("ledgerSchema", "Schema of the database that holds the ledger's tables; made if missing.", "delivered"),
        Option(
            "lockTimeout",
            "Seconds that a task, or a decision, waits for a lock that another transaction holds.",
            str(LOCK_TIMEOUT_S_DEFAULT),
        ),
        *MODE_OPTIONS,
    ),
)


@dataclass(frozen=True)
class PostgresOptions(TableOptions):
    """
    Attributes:
        url: as libpq takes it, without a password.
        schema, table: as PostgreSQL folds them; schema None: found by the search path.
        password: a reference, or the password itself; resolved where it is used.
    """

    url: str
    schema: str | None
    table: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    mechanism: Mechanism = Mechanism.ONE_TRANSACTION
    create: bool = False
    write: WriteMode = APPEND
    ledger_schema: str = "delivered"
    lock_timeout_s: int = LOCK_TIMEOUT_S_DEFAULT

    @property
    def place(self) -> str:
        """Host, port and database, for messages."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path

    @property
    def table_text(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"

    @property
    def where(self) -> str:
        """For messages."""
        return f"at {self.place}"

    def password_resolved(self) -> str | None:
        """Use at once, do not keep."""
        return None if self.password is None else resolve_secret("password", self.password)


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
        user=options.get("user"),
        password=options.get("password"),
        mechanism=Mechanism(choice(OWNER, "mechanism", options.get("mechanism", "one_transaction"), list(Mechanism))),
        write=parse_mode(OWNER, options),
        create=flag(OWNER, "ifNotExists", options.get("ifNotExists", "false")),
        ledger_schema=_identifier("ledgerSchema", options.get("ledgerSchema", "delivered")),
        lock_timeout_s=whole_number(
            OWNER, "lockTimeout", options.get("lockTimeout", str(LOCK_TIMEOUT_S_DEFAULT)), 1, 3600
        ),
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
