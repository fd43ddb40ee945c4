"""Options of `delivered_sqlite`, checked once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from delivered.kits.sql.options import MODE_OPTIONS, TableOptions, parse_mode
from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, flag

RESERVED_PREFIX = "_delivered_"

SINK_OPTIONS = OptionTable(
    "delivered_sqlite sink",
    (
        Option("path", "The database file; made if it is not there.", required=True),
        Option("table", "The table that rows are written to.", required=True),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "true"),
        *MODE_OPTIONS,
    ),
)


@dataclass(frozen=True)
class SqliteOptions(TableOptions):
    """
    Attributes:
        path: absolute.
        create: whether a missing table is created.
    """

    path: str
    table: str
    create: bool = True
    write: WriteMode = APPEND

    @property
    def staging(self) -> Path:
        """Folder beside the database where tasks stage their shards."""
        return Path(f"{self.path}.delivered")

    @property
    def table_text(self) -> str:
        return self.table

    @property
    def where(self) -> str:
        """For messages."""
        return f"in {self.path!r}"


def parse(given: Mapping[str, str]) -> SqliteOptions:
    """
    Raises:
        UsageError: unknown option, missing path or table, or a table's name that is taken.
    """
    owner = SINK_OPTIONS.owner
    options = SINK_OPTIONS.restore(given)
    path, table = options["path"], options["table"]
    if not path.strip() or path == ":memory:" or path.startswith("file:"):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option 'path' is {path!r}; it must be a file: tasks and driver are different processes.",
            next_step='write .option("path", "/data/orders.db")',
        )
    if not table.strip() or "\0" in table or table.lower().startswith(("sqlite_", RESERVED_PREFIX)):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option 'table' is {table!r}; it must be a name that starts with neither sqlite_ nor "
            f"{RESERVED_PREFIX}.",
        )
    return SqliteOptions(
        path=str(Path(path).expanduser().absolute()),
        table=table,
        create=flag(owner, "ifNotExists", options.get("ifNotExists", "true")),
        write=parse_mode(owner, options),
    )
