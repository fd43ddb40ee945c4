"""Options that every sink into a table has, and what it knows of its table by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from delivered.kits.sql.target import sink_name
from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.options import Option, choice, flag, resolve_secret, whole_number

LEDGER_SCHEMA_DEFAULT = "delivered"
LOCK_TIMEOUT_S_DEFAULT = 60

MODE_OPTIONS = (
    Option("mode", "append, or upsert: a row replaces the one with the same key.", "append"),
    Option("keyColumns", "With upsert: columns of the key, with commas; the table has a unique index over them."),
    Option("versionColumn", "With upsert: a row is written only if its version is greater than the stored one."),
    Option(
        "deleteColumn",
        "With upsert: a boolean column; a row where it is true deletes its key. The column itself is not stored.",
    ),
)


class Mechanism(StrEnum):
    """How exactly_once is had in a database server."""

    ONE_TRANSACTION = "one_transaction"
    """Tasks commit their shards into staging tables; one transaction of the driver moves them, with the decision."""
    TWO_PHASE = "two_phase"
    """Tasks leave prepared transactions; the driver decides, then commits each."""


def server_options(ledger: str) -> tuple[Option, ...]:
    """Options of every sink into a database server, beside where it is.

    Args:
        ledger: the doc of `ledgerSchema`.
    """
    return (
        Option("user", "Whom to log in as."),
        Option("password", "Its password, better as env:NAME or file:PATH.", secret=True),
        Option("mechanism", "one_transaction or two_phase: how exactly_once is had.", "one_transaction"),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "false"),
        Option("ledgerSchema", ledger, LEDGER_SCHEMA_DEFAULT),
        Option(
            "lockTimeout",
            "Seconds that a task, or a decision, waits for a lock that another transaction holds.",
            str(LOCK_TIMEOUT_S_DEFAULT),
        ),
        *MODE_OPTIONS,
    )


class TableOptions(ABC):
    """Base of a connector's options."""

    create: bool
    write: WriteMode

    @property
    @abstractmethod
    def table_text(self) -> str:
        """The table as the user named it."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The database, as it stands in a sentence: "at host:5432/shop"."""

    @property
    def sink_name(self) -> str:
        return sink_name(self.table_text)


@dataclass(frozen=True)
class ServerOptions(TableOptions):
    """Base of the options of a sink into a database server.

    Attributes:
        url: without a password.
        schema, table: as the server knows them; schema None: the one that a session starts in.
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
    ledger_schema: str = LEDGER_SCHEMA_DEFAULT
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


def parse_server(owner: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `ServerOptions` that mean the same everywhere.

    Raises:
        UsageError: a value out of bounds.
    """
    lock_timeout = options.get("lockTimeout", str(LOCK_TIMEOUT_S_DEFAULT))
    return {
        "user": options.get("user"),
        "password": options.get("password"),
        "mechanism": Mechanism(
            choice(owner, "mechanism", options.get("mechanism", "one_transaction"), list(Mechanism))
        ),
        "write": parse_mode(owner, options),
        "create": flag(owner, "ifNotExists", options.get("ifNotExists", "false")),
        "lock_timeout_s": whole_number(owner, "lockTimeout", lock_timeout, 1, 3600),
    }


def parse_mode(owner: str, options: Mapping[str, str]) -> WriteMode:
    """
    Raises:
        UsageError: an unknown mode, an upsert without key, options of an upsert without it, one column in two roles.
    """
    mode = choice(owner, "mode", options.get("mode", "append"), ["append", "upsert"])
    given = [n for n in ("keyColumns", "versionColumn", "deleteColumn") if n in options]
    if mode == "append":
        if given:
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: option {given[0]!r} is for mode upsert; the mode is append.",
                next_step='add .option("mode", "upsert"), or take the option out',
            )
        return APPEND
    keys = tuple(k.strip() for k in options.get("keyColumns", "").split(",") if k.strip())
    if not keys:
        raise UsageError(
            "OPTION_MISSING",
            f"{owner} needs the option 'keyColumns' for mode upsert: the columns that tell rows apart.",
            next_step='add .option("keyColumns", "id")',
        )
    version, delete = (options.get(n, "").strip() or None for n in ("versionColumn", "deleteColumn"))
    named = [*keys, *(n for n in (version, delete) if n is not None)]
    twice = next((n for n in named if named.count(n) > 1), None)
    if twice is not None:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: column {twice!r} is named twice in keyColumns, versionColumn and deleteColumn.",
            next_step="a column has one of these roles",
        )
    return WriteMode(keys, version, delete)
