"""Differences between databases in SQL and client API.

Statements are written once, with `:name` for values and `{table}` for the ledger's tables; a `Dialect` translates them
for the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.kits.sql.database import Connection


@dataclass(frozen=True)
class Dialect:
    """
    Attributes:
        tables: the ledger's table names -> the database's, quoted for SQL.
        value: ":name" in the client's notation.
        written: table -> column that increases with a row's write time.
        hold: suffix of a SELECT that locks the row until the transaction ends.
        pack, unpack: convert a list of names to and from the client's form.
        hash: bytes as an SQL literal.
    """

    tables: dict[str, str]
    value: Callable[[str], str]
    written: dict[str, str]
    hold: str
    pack: Callable[[Sequence[str]], Any]
    unpack: Callable[[Any], Sequence[str]]
    hash: Callable[[bytes], str]

    def __call__(self, statement: str) -> str:
        return self.value(statement).format(**self.tables)

    def known(self, keys: str, column: str | None) -> str:
        """Suffix of an INSERT that updates `column` of existing rows; None: leaves them unchanged."""
        return f"ON CONFLICT ({keys}) DO " + (f"UPDATE SET {column} = excluded.{column}" if column else "NOTHING")

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Delete rows that are committed, or that this connection wrote. Inside an open transaction, or as its own."""
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), values)

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Bulk-delete rows that no other connection uses, by an index, inside an open transaction.

        Args:
            index: on the columns of `where`.
        """
        del index
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), {})
