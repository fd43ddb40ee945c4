"""Options that every sink into a table has, and what it knows of its table by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from delivered.model.capability import APPEND, WriteMode
from delivered.model.errors import UsageError
from delivered.model.options import Option, choice
from delivered.sql.target import sink_name

MODE_OPTIONS = (
    Option("mode", "append, or upsert: a row replaces the one with the same key.", "append"),
    Option("keyColumns", "With upsert: columns of the key, with commas; the table has a unique index over them."),
    Option("versionColumn", "With upsert: a row is written only if its version is greater than the stored one."),
    Option(
        "deleteColumn",
        "With upsert: a boolean column; a row where it is true deletes its key. The column itself is not stored.",
    ),
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
