"""What a database's SQL and its client have of their own.

Statements are written once, with `:name` for values and `{table}` for our tables; a `Dialect` puts them into the form
that the client wants.
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
        tables: our names of tables -> theirs, quoted for SQL.
        value: ":name" as the client writes it.
        written: table -> column that grows with the time at which a row was written.
        hold: what a SELECT ends in that keeps the row from others until the transaction's end.
        pack, unpack: a list of names as the client takes and gives it.
        hash: bytes as SQL writes them.
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
        """What an INSERT ends in that gives `column` its new value where the keys are there already; None: that does
        nothing there."""
        return f"ON CONFLICT ({keys}) DO " + (f"UPDATE SET {column} = excluded.{column}" if column else "NOTHING")

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Delete what others have committed, or this connection wrote. Inside an open transaction, or as one."""
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), values)

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Delete many rows that no other connection works on, by an index, inside an open transaction.

        Args:
            index: over the columns that `where` names.
        """
        del index
        connection.execute(self(f"DELETE FROM {{{table}}} WHERE {where}"), {})
