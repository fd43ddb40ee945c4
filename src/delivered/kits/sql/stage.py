"""Mechanism one_transaction: the driver moves rows from the tasks' staging tables to the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delivered.kits.sql.conditional import Conditional
from delivered.kits.sql.database import Connection, Dialect, Server, quoted
from delivered.kits.sql.merge import Merge, key_in_two_shards
from delivered.kits.sql.options import ServerOptions
from delivered.kits.sql.transactions import PreparedRows
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Work
from delivered.model.prepared import Prepared


@dataclass(frozen=True)
class Staging:
    """Staging tables in the ledger's schema. Calls run inside an open transaction and raise the client's errors."""

    options: ServerOptions
    server: Server[Any]
    dialect: Dialect

    def full(self, table: str) -> str:
        """The qualified name, quoted for SQL."""
        return f"{quoted(self.options.ledger_schema)}.{quoted(table)}"

    def drop(self, connection: Connection, table: str) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {self.full(table)}")

    def reduce(self, connection: Connection, table: str, merge: Merge, rows: int) -> int:
        """Keep the winning staged row of each key; return their number. If every row counts, number them instead.

        Args:
            rows: number of staged rows.
        """
        if not self.options.write.upserts:
            return rows
        if self.options.write.keeps_all:
            connection.execute(merge.number(self.full(table)))
            return rows
        return rows - int(connection.execute(merge.reduce(self.full(table))).rowcount)

    def add(self, connection: Connection, table: str, merge: Merge, work: Work) -> None:
        """Merge reduced rows into the target, except deletes (see `delete`)."""
        name = self.full(table)
        if self.options.write.conditional:
            judge = Conditional(
                connection, self.server, self.dialect, merge, name, work, str(int(work.shard)), self.options.table_text
            )
            judge.run()
            return
        first = merge.before_upsert(name)
        if first is not None:
            connection.execute(first)
        connection.execute(merge.upsert(name))

    def move(self, connection: Connection, prepared: Prepared, work: Work) -> None:
        """Move a shard's rows into the target.

        Raises:
            InvariantBroken: the rows differ from those prepared.
            The client's error: the server rejected it, for instance because the staged rows are gone.
        """
        handle = PreparedRows.of(prepared)
        table, target, columns = handle.staged, handle.target, handle.columns
        staged = self.full(table)
        if self.options.write.merges:
            row = connection.execute(f"SELECT count(*) FROM {staged}").fetchone()
            rows, prepared_rows = row[0] if row else 0, handle.kept
            self.add(connection, table, self._merge(prepared), work)
        else:
            rows = connection.execute(f"INSERT INTO {target} ({columns}) SELECT {columns} FROM {staged}").rowcount
            prepared_rows = prepared.fingerprint.count
        if rows != prepared_rows:
            raise InvariantBroken(
                "STAGED_ROWS_DIFFER",
                f"Shard {prepared.shard}: {rows} rows were inserted into {target}, but {prepared_rows} were prepared.",
                next_step="check whether a trigger or rule of the table drops rows; then start the pipeline again, "
                "which repeats the batch",
            )

    def check_keys(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Check the shards of a batch, before the first `move`.

        Raises:
            UsageError: a key is in two shards, so their order is undefined.
        """
        write = self.options.write
        if len(staged) > 1 and write.upserts and (write.version is None or write.keeps_all):
            tables = [self.full(PreparedRows.of(p).staged) for p in staged]
            duplicate_key = connection.execute(self._merge(staged[0]).key_in_two(tables)).fetchone()
            if duplicate_key is not None:
                raise key_in_two_shards(write, duplicate_key, self.options.table_text)

    def delete(self, connection: Connection, staged: Sequence[Prepared]) -> None:
        """Apply the deletes of all shards, after the last `move`: with a version, a delete must find older rows of any
        shard."""
        if self.options.write.delete is not None:
            for prepared in staged:
                connection.execute(self._merge(prepared).delete(self.full(PreparedRows.of(prepared).staged)))

    def _merge(self, prepared: Prepared) -> Merge:
        handle = PreparedRows.of(prepared)
        return Merge(self.options.write, handle.target, handle.stored)
