"""SQLite as a sink, the embedded default: one transaction writes rows and decision to one database file. Its
options, and the types of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from delivered.contract.connector import Connector, Factory
from delivered.contract.sink import Parts
from delivered.kits.options import DATABASE_FILE, if_not_exists
from delivered.kits.sql.merge import describe_checks
from delivered.kits.sql.sink import HISTORY, DatabaseSink
from delivered.kits.sql.table import TableOptions, Types
from delivered.model.capability import Commit, SinkCapability
from delivered.model.options import OptionType, Unfit, option
from delivered.model.rows import RANGES

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


# Arrow types as SQLite stores them.
#
# Arrow                       declared   stored as
# boolean                     INTEGER    0, 1
# int8..int64, uint8..uint32  INTEGER    itself
# float, double               REAL       itself; NaN as the text 'NaN' (SQLite would turn it into NULL); -0.0 as 0.0
# string                      TEXT       itself
# binary                      BLOB       itself
# decimal                     TEXT       exact digits (SQLite has no decimal numbers)
# date                        TEXT       YYYY-MM-DD
# timestamp                   TEXT       YYYY-MM-DD HH:MM:SS.ffffff, with time zone: in UTC with a Z at the end
# time, duration              INTEGER    in the type's unit (for Spark: microseconds)
# list, struct, map, others   refused


class SqliteTypes(Types):
    system = "SQLite"
    columns_max = 2_000  # SQLite's own default limit
    folds_case = True
    range = RANGES["sqlite"]

    def declared(self, kind: pa.DataType) -> str | None:
        t = pa.types
        if t.is_boolean(kind) or (t.is_integer(kind) and kind != pa.uint64()) or t.is_time(kind) or t.is_duration(kind):
            return "INTEGER"
        if t.is_float32(kind) or t.is_float64(kind):
            return "REAL"
        if t.is_string(kind) or t.is_decimal128(kind) or t.is_date32(kind) or t.is_timestamp(kind):
            return "TEXT"
        return "BLOB" if t.is_binary(kind) else None


TYPES = SqliteTypes()


@dataclass(frozen=True)
class SqliteSink(DatabaseSink):
    options: SqliteOptions

    types = TYPES
    parts = Parts(
        __package__,
        preflight="read:look",
        definition="target:read_definition",
        table_check="target:table_check",
        ready_target="target:ready_target",
        add_columns="target:extend_target",
        writer="writer:writer",
        scan="read:SqliteScan",
        store="store:build_store",
        committer="store:SqliteCommitter",
        database="store:build_database",
        refused_rows="writer:refused_rows",
    )

    def capability(self) -> SinkCapability:
        table = self._into
        return SinkCapability(
            system="sqlite",
            commit=Commit.ONE_TRANSACTION,
            mechanism="ledger row in the sink's transaction",
            stage="one Arrow file per shard, next to the database",
            prepare="file and folder fsynced, with a checksum",
            decide=f"one transaction: rows of all shards into {table}, and the ledger row",
            apply="delete the staged files; the decision made the rows visible",
            send=f"short transactions into {table}, visible at once",
            batch_atomic=True,
            remembers=True,
            validates=True,
            local=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            no_position=self.options.write.no_position,
            assumes=("the database file is backed up and restored with its ledger tables", *self._assumed),
            limits=(
                "one machine: driver and tasks open the same file",
                "one writer at a time: shards of a batch are written in sequence",
                HISTORY,
                *self._bounds,
            ),
        )

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        reasons: pa.Array | None = self.parts["refused_rows"](self.options, batch)
        return reasons

    def checked_target(self) -> Sequence[str]:
        database = self._database
        if not database.exists():
            return ()
        found = database.ask(lambda connection: self.parts["definition"](connection, self.options))
        return describe_checks(self.options, found)

    def ready_target(self, schema: pa.Schema) -> None:
        self.parts["ready_target"](self.options, schema)

    def add_columns(self, schema: pa.Schema) -> None:
        if self.options.merge_schema:
            self.parts["add_columns"](self.options, schema)


CONNECTOR = Connector(
    "sqlite",
    "sqlite",
    sinks=Factory(SqliteOptions, "delivered.connectors.sqlite:SqliteSink"),
    transactions="",
    key_table=True,
    instead="read from delivered_log or delivered_kafka; a table has no offsets that a stream could replay",
)
