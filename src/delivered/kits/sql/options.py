"""Options of sinks that write to a database table."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, parse_qs, urlsplit

from delivered.kits.options import if_not_exists, merge_schema, password_in_url, sink_name, write_mode
from delivered.model.capability import WriteMode
from delivered.model.options import (
    Options,
    OptionType,
    Unfit,
    check_postgres_words,
    choice,
    names_database,
    option,
    resolve_secret,
    whole,
)

LEDGER_SCHEMA_DEFAULT = "delivered"
LOCK_TIMEOUT_S_DEFAULT = 60


class Mechanism(StrEnum):
    """How a database server's sink provides exactly_once."""

    ONE_TRANSACTION = "one_transaction"
    """Tasks commit shards to staging tables; one driver transaction moves the rows and writes the decision."""
    TWO_PHASE = "two_phase"
    """Tasks leave prepared transactions; the driver decides, then commits each."""


class TableOptions(Options):
    """Base of a connector's options."""

    create: bool
    merge_schema: bool = merge_schema("before the first batch, after recovery; they are nullable")
    write: WriteMode = write_mode()

    @property
    @abstractmethod
    def table_text(self) -> str:
        """The table as the user wrote it."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The database, for messages: "at host:5432/shop"."""

    @property
    def sink_name(self) -> str:
        return sink_name(self.table_text)


@dataclass(frozen=True)
class TableName:
    """
    Attributes:
        schema, table: as stored at the server; schema None: the session's default.
    """

    schema: str | None
    table: str


class ServerOptions(TableOptions):
    """Base of the options of a sink that writes to a database server.

    A connector redeclares `url`, `named` and `ledger_schema` with its system's types.

    Attributes:
        url: without a password.
        password: the password or a reference; resolved where it is used.
    """

    url: str
    named: TableName
    user: str | None = option("user", "User to log in as.", default=None)
    password: str | None = option(
        "password",
        "The user's password; prefer env:NAME or file:PATH.",
        default=None,
        secret=True,
        example="env:PASSWORD",
    )
    mechanism: Mechanism = option(
        "mechanism",
        "How exactly_once is implemented: one_transaction or two_phase.",
        choice(Mechanism),
        default=Mechanism.ONE_TRANSACTION,
    )
    create: bool = if_not_exists(default=False)
    ledger_schema: str
    lock_timeout_s: int = option(
        "lockTimeout",
        "Seconds that a task or a decision waits for a lock held by another transaction.",
        whole(1, 3600),
        default=LOCK_TIMEOUT_S_DEFAULT,
    )

    @property
    def schema(self) -> str | None:
        return self.named.schema

    @property
    def table(self) -> str:
        return self.named.table

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
        """The resolved password; use at once, do not keep."""
        return None if self.password is None else resolve_secret("password", self.password)


def database_url(
    form: str,
    schemes: Collection[str],
    secret: Collection[str],
    check: Callable[[SplitResult], bool] | None = None,
) -> OptionType[str]:
    """URL of a database: one of these schemes, optionally after jdbc:, a database, no password.

    Args:
        form: example for messages.
        secret: parameters that hold passwords.
        check: the system's own rules; may raise Unfit, or ValueError as urlsplit does.
    """

    def read(text: str) -> str:
        url = text.strip().removeprefix("jdbc:")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in schemes and bool(parts.path.strip("/")) and names_database(parts)
            usable = usable and (check is None or check(parts))
        except ValueError:
            usable = False
        if not usable:
            # The value is not shown: an unparsable URL may contain a password.
            raise Unfit.build("OPTION_VALUE.FORM", form=form)
        if parts.password is not None or not parse_qs(parts.query).keys().isdisjoint(secret):
            raise password_in_url("env:DATABASE_PASSWORD")
        if parts.scheme.startswith("postgres"):
            check_postgres_words(parts.query)
        return url

    return OptionType(read)


def identifier(fits: Callable[[str], bool], rule: str) -> OptionType[str]:
    """An identifier of the server.

    Args:
        fits: whether the server accepts it.
        rule: what the server accepts, as a sentence.
    """

    def read(name: str) -> str:
        if not name.strip() or "\0" in name or not fits(name):
            raise Unfit.build("OPTION_VALUE.TABLE_PART", name=name, rule=rule)
        return name

    return OptionType(read)


def table_name(
    name: OptionType[str], quotes: str, fold: Callable[[str], str], outer: str, hint: str
) -> OptionType[TableName]:
    """A table name, with or without a schema.

    Args:
        outer: the system's term for a schema.
        quotes: quote characters for names; doubled inside a name.
        fold: case folding of unquoted names.
        hint: the next step if the text is not a table name.
    """
    part = "|".join([rf"{q}(?:[^{q}\0]|{q}{q})+{q}" for q in quotes] + [r"[^\W\d][\w$]*"])
    qualified = re.compile(rf"(?:({part})\s*\.\s*)?({part})")

    def plain(text: str) -> str:
        quote = text[0]
        return name.read(text[1:-1].replace(quote * 2, quote) if quote in quotes else fold(text))

    def read(text: str) -> TableName:
        match = qualified.fullmatch(text.strip())
        if match is None:
            raise Unfit.build("OPTION_VALUE.TABLE_NAME", text=text, outer=outer, action=hint)
        schema, table = match.groups()
        return TableName(schema and plain(schema), plain(table))

    return OptionType(read)
