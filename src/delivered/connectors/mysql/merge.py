"""Upserts in MySQL's words: an UPDATE of what is there, an INSERT of what is not.

Not INSERT ... ON DUPLICATE KEY UPDATE: there a row that meets *any* unique index counts as the same row, so that one
with a new key and a taken e-mail address would overwrite another key's row in silence; it has no WHERE, which a version
asks for; and it fires triggers of an insert for rows that are updated.

Rows of the target are reached through the key's index alone, and only those that are staged: a scan would wait for
locks that other shards' prepared transactions hold on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from delivered.kits.sql.database import quoted
from delivered.kits.sql.merge import ORDER, Merge


@dataclass(frozen=True)
class MysqlMerge(Merge):
    """
    Attributes:
        index: the unique index over exactly the keys.
    """

    index: str = "PRIMARY"

    def reduce(self, staged: str) -> str:
        order = quoted(ORDER)
        by = f"{order} DESC"
        if self.mode.version is not None:
            by = f"{quoted(self.mode.version)} DESC, {order}"
        ranked = (
            f"SELECT {order} AS o, row_number() OVER (PARTITION BY {self._keys()} ORDER BY {by}) AS n FROM {staged}"
        )
        return f"DELETE s FROM {staged} AS s JOIN ({ranked}) AS r ON r.o = s.{order} WHERE r.n > 1"

    def before_upsert(self, staged: str) -> str | None:
        others = [quoted(c) for c in self.columns if c not in self.mode.keys]
        if not others:
            return None
        changes = ", ".join(f"t.{c} = s.{c}" for c in others)
        where = " AND ".join(x for x in (self._stays(), self._if_newer("", "s").strip()) if x)
        return f"UPDATE {self._found(staged)} SET {changes} WHERE {where or 'TRUE'}"

    def upsert(self, staged: str) -> str:
        columns = ", ".join(map(quoted, self.columns))
        rows = ", ".join(f"s.{quoted(c)}" for c in self.columns)
        absent = f"t.{quoted(self.mode.keys[0])} IS NULL"
        where = " AND ".join(x for x in (absent, self._stays()) if x)
        return (
            f"INSERT INTO {self.target} ({columns}) SELECT {rows} FROM {staged} AS s "
            f"LEFT JOIN {self._target} ON {self._same} WHERE {where}"
        )

    def delete(self, staged: str) -> str:
        gone = f"s.{quoted(str(self.mode.delete))} IS TRUE"
        return f"DELETE t FROM {self._found(staged)} WHERE {gone}{self._if_newer('AND', 's')}"

    def _found(self, staged: str) -> str:
        return f"{staged} AS s STRAIGHT_JOIN {self._target} ON {self._same}"

    def _stays(self) -> str:
        return "" if self.mode.delete is None else f"s.{quoted(self.mode.delete)} IS NOT TRUE"

    @property
    def _target(self) -> str:
        return f"{self.target} AS t FORCE INDEX ({quoted(self.index)})"

    @property
    def _same(self) -> str:
        return " AND ".join(f"t.{quoted(k)} = s.{quoted(k)}" for k in self.mode.keys)
