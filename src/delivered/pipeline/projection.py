"""Which of a pipeline's rows and columns a sink gets: `select` and `where`, next to its options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from delivered.group import Columns
from delivered.model.errors import UsageError

_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_NAMED = re.compile(r"(?P<sql>.+?)\s+AS\s+(?P<name>[A-Za-z_]\w*|`[^`]+`)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One column of a sink. `sql`: None: the column of that name as it is."""

    name: str
    sql: str | None = None


@dataclass(frozen=True)
class Projection:
    """
    Attributes:
        items: empty: all columns.
        where: SQL; rows for which it is not true are dropped. None: all rows.
    """

    items: tuple[Item, ...] = ()
    where: str | None = None

    @property
    def is_all(self) -> bool:
        return not self.items and self.where is None

    @property
    def is_plain(self) -> bool:
        """Whether it only picks columns, which needs no SQL."""
        return self.where is None and all(i.sql is None for i in self.items)

    @property
    def route(self) -> Columns | None:
        """The route of a sink that only picks columns."""
        return None if self.is_all else Columns(tuple((i.name, i.name) for i in self.items))

    @property
    def texts(self) -> tuple[str, ...]:
        """All the SQL in it."""
        return tuple(t for t in (self.where, *(i.sql for i in self.items)) if t is not None)


def parse_projection(select: Iterable[str], where: str | None) -> Projection:
    """Parse column names and named expressions ("amount * 2 AS double").

    Raises:
        UsageError: an expression without a name, a name twice, or an empty condition.
    """
    items = tuple(_item(text) for text in select)
    names = [i.name for i in items]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(
            "SELECT_NAME_TWICE",
            f"The sink's select has the column {twice[0]!r} twice.",
            next_step="name each column once",
        )
    if where is not None and not where.strip():
        raise UsageError("WHERE_EMPTY", "The sink's where is empty.", next_step="write a condition, or remove it")
    return Projection(items, where)


def _item(text: str) -> Item:
    text = text.strip()
    if _COLUMN.fullmatch(text):
        return Item(text.strip("`"))
    named = _NAMED.fullmatch(text)
    if named is None:
        raise UsageError(
            "SELECT_UNNAMED",
            f"The sink's select has {text!r}, which is neither a column name nor a named expression.",
            next_step='give it a name, as in "amount * 2 AS double_amount"',
        )
    return Item(named["name"].strip("`"), named["sql"])
