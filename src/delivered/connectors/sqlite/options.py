"""Options of `delivered_sqlite`, checked once and frozen."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from delivered.model.errors import UsageError
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import Option, OptionTable, flag

RESERVED_PREFIX = "_delivered_"

SINK_OPTIONS = OptionTable(
    "delivered_sqlite sink",
    (
        Option("path", "The database file; made if it is not there.", required=True),
        Option("table", "The table that rows are added to.", required=True),
        Option("ifNotExists", "Whether a missing table is created from the rows' schema.", "true"),
    ),
)


@dataclass(frozen=True)
class SqliteOptions:
    """
    Attributes:
        path: absolute.
        create: whether a missing table is created.
    """

    path: str
    table: str
    create: bool = True

    @property
    def staging(self) -> Path:
        """Folder beside the database where tasks stage their shards."""
        return Path(f"{self.path}.delivered")

    @property
    def sink_name(self) -> str:
        """The table's name, made fit for a sink's name; two tables never share one."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", self.table)[: NAME_LENGTH_MAX - 9]
        if plain == self.table:
            return plain
        return f"{plain}-{hashlib.blake2b(self.table.encode(), digest_size=4).hexdigest()}"


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
    )
