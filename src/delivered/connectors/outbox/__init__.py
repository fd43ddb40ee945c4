"""An application's outbox as a source: by PostgreSQL's logical decoding, or by polling any database. Also a PostgreSQL
table as a change stream. An outbox has the columns of `delivered.patterns.outbox`.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from delivered.contract.connector import Connector, Factory
from delivered.kits.mysql import parse_tls
from delivered.kits.options import mysql_in_clear, password_in_url, postgres_in_clear, rows_max_option
from delivered.model.errors import UsageError
from delivered.model.options import (
    FLAG,
    Options,
    OptionType,
    Unfit,
    check_database_url,
    choice,
    integer,
    names_database,
    option,
    resolve_secret,
)
from delivered.patterns.caller import NAME_LENGTHS_MAX

OWNER = "delivered_outbox source"
EARLIEST, LATEST = "earliest", "latest"
LOG, POLL = "log", "poll"
STOP, NEW = "stop", "new"
ROUTE = "{aggregatetype}"
DIALECTS = {"postgresql": "postgres", "postgres": "postgres", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
COLUMNS = ("id", "aggregatetype", "aggregateid", "type", "payload")
SLOT_LENGTH_MAX = 63
_EXAMPLES = "postgresql://host/db, mysql://host/db or sqlite:///folder/file.db"

Where = str | dict[str, Any]
"""earliest, latest, or offsets."""
Renamed = tuple[tuple[str, str], ...]
"""A column's usual name, and the table's."""


def _url(text: str) -> str:
    url = text.strip().removeprefix("jdbc:")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in DIALECTS and bool(parts.path.strip("/")) and names_database(parts)
    except ValueError:
        usable = False
    if not usable:
        # The value is not shown: an unparsable URL may contain a password.
        raise Unfit.build("OPTION_VALUE.DATABASE_URL")
    if parts.password is not None or "password" in dict(parse_qsl(parts.query)):
        raise password_in_url("env:DATABASE_PASSWORD")
    if DIALECTS[parts.scheme] == "mysql":
        parse_tls(parts.query)
    if DIALECTS[parts.scheme] != "sqlite":
        check_database_url(url)
    return url


def _where(text: str) -> Where:
    if text.strip().lower() in (EARLIEST, LATEST):
        return text.strip().lower()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    # Also accepts the result of the driver's `initial`, which is stored next to a checkpoint.
    if not isinstance(document, dict) or not {"lsn", "number"} & set(document):
        raise Unfit.build("OPTION_VALUE.OUTBOX_OFFSETS", text=text)
    return document


def _table(text: str) -> str:
    parts = text.strip().split(".")
    if not all(parts) or len(parts) > 2 or any(c in text for c in '\0%?"`'):
        raise Unfit.build("OPTION_VALUE.OUTBOX_TABLE", text=text)
    return text.strip()


def _columns(text: str) -> Renamed:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    named = tuple((before.strip(), after.strip()) for before, _, after in pairs)
    if not all(before in COLUMNS and after for before, after in named):
        raise Unfit.build("OPTION_VALUE.OUTBOX_COLUMNS", text=text, columns=", ".join(COLUMNS))
    return named


def _schema_change(text: str) -> str:
    value = text.strip()
    if value.lower() in (STOP, NEW):
        return value.lower()
    if not re.fullmatch(r"[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}", value):
        raise Unfit.build("OPTION_VALUE.SCHEMA_CHANGE", text=text)
    return value


def _slot(text: str) -> str:
    if not re.fullmatch(rf"[a-z0-9_]{{1,{SLOT_LENGTH_MAX}}}", text):
        raise Unfit.build("OPTION_VALUE.SLOT", text=text, slot_length_max=SLOT_LENGTH_MAX)
    return text


class OutboxOptions(Options, owner=OWNER, ignored=("path",)):
    """
    Attributes:
        changes: a table as a change stream; None: an outbox is read.
        method: log or poll; None: the default of the database.
        renamed: columns that the table names otherwise.
        slot_named, publication_named, positions_named: None: the default.
    """

    @property
    def in_clear(self) -> tuple[str, ...]:
        kind = {"postgres": postgres_in_clear, "mysql": mysql_in_clear}.get(DIALECTS[urlsplit(self.url).scheme])
        return () if kind is None else kind(self.url)

    url: str = option(
        "url", f"URL of the database: {_EXAMPLES}.", OptionType(_url), example="postgresql://localhost/shop"
    )
    user: str | None = option("user", "User to log in as.", default=None)
    password: str | None = option(
        "password", "The user's password.", default=None, secret=True, example="env:DATABASE_PASSWORD"
    )
    outbox: str = option("dbtable", "The outbox table: outbox, or shop.outbox.", OptionType(_table), default="outbox")
    changes: str | None = option(
        "table",
        "A PostgreSQL table to read as a change stream, instead of an outbox: its inserts, updates and deletes.",
        OptionType(_table),
        default=None,
        example="orders",
    )
    method: str | None = option(
        "method",
        "log: PostgreSQL's logical decoding, its default; poll: queries, the default for other databases.",
        choice((LOG, POLL)),
        default=None,
    )
    renamed: Renamed = option(
        "columns",
        f"Columns of the outbox that have other names than {', '.join(COLUMNS)}: payload=body. Of a column that was "
        "renamed while rows were unread, its former names after it: payload=content, payload=body.",
        OptionType(_columns),
        default=(),
        shown="",
        example="payload=body, type=kind",
    )
    order: str | None = option(
        "orderColumn",
        "Column that orders the rows of one poll, and those from before the "
        "slot; by default their ids. In SQLite rowid, too.",
        default=None,
        example="created_at",
    )
    topic: str = option(
        "topic", f"Value of the column topic; {ROUTE} is the row's aggregate type.", default=f"outbox.event.{ROUTE}"
    )
    json: bool = option(
        "payloadFormat",
        "json: a payload that is not JSON stops the query; any: payloads are not checked.",
        choice({"json": True, "any": False}),
        default=False,
    )
    keep: bool = option(
        "keep",
        "true: keep delivered rows, with their offsets, so that they can be read again (audit); false: delete them.",
        FLAG,
        default=False,
    )
    starting: Where = option(
        "startingOffsets",
        "Where a new checkpoint starts: earliest: with the rows that are in the outbox; latest; or offsets.",
        OptionType(_where, lambda where: where if isinstance(where, str) else json.dumps(where)),
        default=EARLIEST,
    )
    rows_max: int | None = rows_max_option("rows")
    slot_named: str | None = option(
        "slot",
        "Logical replication slot, by default delivered_<table>; created for a new checkpoint if it is missing.",
        OptionType(_slot),
        default=None,
        example="delivered_outbox",
    )
    publication_named: str | None = option(
        "publication", "Publication of the table, by default named as the slot; created with it.", default=None
    )
    positions_named: str | None = option(
        "positionsTable",
        "Table in which the source numbers the rows, by default <dbtable>_positions; created if missing.",
        OptionType(_table),
        default=None,
        example="outbox_positions",
    )
    schema_change: str = option(
        "schemaChange",
        "When the table of a change stream gets other columns, another identity or other partitions. stop: the query "
        "stops there; new: it continues with the table as it is then; a position, as the error names it: "
        "it continues after this change alone.",
        OptionType(_schema_change),
        default=STOP,
        example="0/1A2B3C8",
    )
    timeline: int | None = option(
        "timeline",
        "Timeline of the server after a failover, once you have checked that no row was lost in it.",
        integer(1),
        default=None,
        example="2",
    )

    def check(self, owner: str) -> None:
        if self.dialect != "postgres" and (self.method == LOG or self.changes is not None):
            name = "table" if self.changes is not None else "method"
            raise UsageError("OPTION_CONFLICT.OUTBOX_POSTGRES", owner=owner, name=name, dialect=self.dialect)
        if self.changes is not None and self.method == POLL:
            raise UsageError("OPTION_CONFLICT.OUTBOX_POLL", owner=owner)
        if isinstance(self.starting, dict) and ("lsn" in self.starting) != self.by_log:
            method, text = LOG if self.by_log else POLL, json.dumps(self.starting)
            raise UsageError("OPTION_CONFLICT.OUTBOX_START", owner=owner, method=method, text=text)
        self._check_names(owner)

    def _check_names(self, owner: str) -> None:
        """PostgreSQL would cut a name that is too long, and read or make another table."""
        limit, given = NAME_LENGTHS_MAX.get(self.dialect), [("table" if self.changes else "dbtable", self.table)]
        given += [("columns", name) for names in self.names for name in names]
        given += [("orderColumn", self.order)] if self.order is not None else []
        given.append(("publication", self.publication) if self.by_log else ("positionsTable", self.positions))
        for option_name, name in given:
            for part in name.split(".") if "able" in option_name else (name,):
                length = len(part) if self.dialect == "mysql" else len(part.encode())
                if limit is not None and length > limit:
                    unit = "characters" if self.dialect == "mysql" else "bytes"
                    raise UsageError(
                        "NAME_TOO_LONG.OUTBOX",
                        owner=owner,
                        name=part,
                        length=length,
                        unit=unit,
                        dialect=self.dialect,
                        limit=limit,
                        option_name=option_name,
                    )

    @property
    def dialect(self) -> str:
        """postgres, mysql or sqlite."""
        return DIALECTS[urlsplit(self.url).scheme]

    @property
    def by_log(self) -> bool:
        return self.method == LOG or (self.method is None and self.dialect == "postgres")

    @property
    def table(self) -> str:
        """The table that is read."""
        return self.changes or self.outbox

    @property
    def slot(self) -> str:
        plain = re.sub(r"[^a-z0-9_]", "_", self.table.lower())
        return self.slot_named or f"delivered_{plain}"[:SLOT_LENGTH_MAX]

    @property
    def publication(self) -> str:
        return self.publication_named or self.slot

    @property
    def positions(self) -> str:
        return self.positions_named or f"{self.outbox}_positions"

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the outbox: id, aggregate type, aggregate id, type, payload."""
        return tuple(names[0] for names in self.names)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Of each of `columns`: its name, then former ones."""
        renames = {name: [after for before, after in self.renamed if before == name] for name in COLUMNS}
        return tuple(tuple(dict.fromkeys([*renames[name], name])) for name in COLUMNS)

    @property
    def accepted(self) -> int | None:
        """Position in the WAL up to which the user accepts what changed with the table; None: none."""
        high, slash, low = self.schema_change.partition("/")
        return (int(high, 16) << 32) + int(low, 16) if slash else None

    def accepts(self, position: int) -> bool:
        return self.accepted is not None and position <= self.accepted

    @property
    def place(self) -> str:
        """Host, port and database, or the file; for messages."""
        parts = urlsplit(self.url)
        return self.file if self.dialect == "sqlite" else parts.netloc.rpartition("@")[2] + parts.path

    @property
    def system(self) -> str:
        """For messages."""
        return {"postgres": "PostgreSQL at ", "mysql": "MySQL at ", "sqlite": "SQLite "}[self.dialect] + self.place

    @property
    def file(self) -> str:
        """Of SQLite."""
        return "/" + unquote(urlsplit(self.url).path).lstrip("/")

    def password_resolved(self) -> str | None:
        """The resolved password; use at once, do not keep."""
        return None if self.password is None else resolve_secret("password", self.password)


CONNECTOR = Connector(
    "outbox",
    "outbox",
    sources=Factory(OutboxOptions, "delivered.connectors.outbox.source:OutboxSource"),
    instead="an application writes to its outbox with delivered.patterns.outbox.put",
)
