"""mechanism one_transaction: what tasks committed into staging tables gets into the target, by the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.kits.sql.database import Connection, quoted
from delivered.kits.sql.merge import Merge, key_in_two_shards
from delivered.kits.sql.options import ServerOptions
from delivered.model.errors import InvariantBroken
from delivered.model.work import Prepared

KEY = "staged"
"""Name of the staging table in a participant's handle."""


@dataclass(frozen=True)
class Staging:
    """Staging tables in the ledger's schema. Each call is inside an open transaction and raises the client's errors.

    Attributes:
        merge: the statements of an upsert, in the database's words.
    """

    options: ServerOptions
    merge: type[Merge] = Merge

    def full(self, table: str) -> str:
        """Its name with the schema, quoted for SQL."""
        return f"{quoted(self.options.ledger_schema)}.{quoted(table)}"

    def drop(self, connection: Connection, table: str) -> None:
        """Give staged rows back."""
        connection.execute(f"DROP TABLE IF EXISTS {self.full(table)}")

    def reduce(self, connection: Connection, table: str, merge: Merge, rows: int) -> int:
        """Of each key keep the staged row that counts; return how many there are.

        Args:
            rows: that are staged.
        """
        return rows - int(connection.execute(merge.reduce(self.full(table))).rowcount)

    def add(self, connection: Connection, table: str, merge: Merge) -> None:
        """Make reduced rows those of the target; deletions only by `delete`."""
        name = self.full(table)
        first = merge.before_upsert(name)
        if first is not None:
            connection.execute(first)
        connection.execute(merge.upsert(name))

    def move(self, connection: Connection, prepared: Prepared) -> None:
        """Move a shard's rows into the target.

        Raises:
            InvariantBroken: the rows are not those that were prepared.
            The client's error: the server said no, perhaps because the staged rows are gone.
        """
        table, target = str(prepared.handle[KEY]), prepared.handle["target"]
        staged, columns = self.full(table), prepared.handle["columns"]
        if self.options.write.upserts:
            row = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            rows, wanted = row[0] if row else 0, prepared.handle["kept"]
            self.add(connection, table, self._merge(prepared))
        else:
            rows = connection.execute(f"INSERT INTO {target} ({columns}) SELECT {columns} FROM {staged}").rowcount
            wanted = prepared.fingerprint.count
        if rows != wanted:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows got into {target}, prepared were {wanted}. Does a trigger or "
                "rule of the table take rows away?",
                next_step="start the pipeline again; the batch runs again",
            )

    def check_keys(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Before the first `move`.

        Raises:
            UsageError: a key lies in two shards, and nothing tells which of its rows is the last.
        """
        write = self.options.write
        if len(staged) > 1 and write.upserts and write.version is None:
            tables = [self.full(str(p.handle[KEY])) for p in staged]
            found = connection.execute(self._merge(staged[0]).key_in_two(tables)).fetchone()
            if found is not None:
                raise key_in_two_shards(write, found, self.options.table_text)

    def delete(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Deletions of all shards. After the last `move`: with a version, a row of any shard that is older than one
        is found by it."""
        if self.options.write.delete is not None:
            for prepared in staged:
                connection.execute(self._merge(prepared).delete(self.full(str(prepared.handle[KEY]))))

    def _merge(self, prepared: Prepared) -> Merge:
        return self.merge(self.options.write, prepared.handle["target"], tuple(prepared.handle["stored"]))
