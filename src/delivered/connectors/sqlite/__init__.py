"""SQLite as a sink, the embedded default: one transaction writes rows and decision to one database file."""

from __future__ import annotations

from pathlib import Path

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import DATABASE_FILE, if_not_exists
from delivered.kits.sql.table import TableOptions
from delivered.model.options import OptionType, Unfit, option

RESERVED_PREFIX = "_delivered_"


def _table(text: str) -> str:
    if not text.strip() or "\0" in text or text.lower().startswith(("sqlite_", RESERVED_PREFIX)):
        raise Unfit.build("OPTION_VALUE.SQLITE_TABLE", text=text)
    return text


class SqliteOptions(TableOptions, owner="delivered_sqlite sink"):
    """
    Attributes:
        path: absolute.
    """

    path: str = option("path", "Database file; created if missing.", DATABASE_FILE, example="/data/orders.db")
    table: str = option("table", "Table to write to.", OptionType(_table), example="orders")
    create: bool = if_not_exists(default=True)

    @property
    def staging(self) -> Path:
        """Folder next to the database for staged shards."""
        return Path(f"{self.path}.delivered")

    @property
    def table_text(self) -> str:
        return self.table

    @property
    def where(self) -> str:
        """For messages."""
        return f"in {self.path!r}"


CONNECTOR = Connector(
    "sqlite",
    "sqlite",
    sinks=Factory(SqliteOptions, "delivered.connectors.sqlite.sink:SqliteSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
