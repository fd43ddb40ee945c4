"""SQLite as a sink, the embedded default: rows and the decision get in by one transaction of one database file.

options.py   what the user named
types.py     Arrow types as SQLite stores them, and back
database.py  connections, and errors in plain words
target.py    the user's table: create, check, insert
stage.py     files in which tasks leave their shards
writer.py    a task's side
ledger.py    the driver's side: owner, decisions. The line that decides is there.
resource.py  staged files of decided and undecided shards
read.py      the table as a source, for the audit
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.sqlite.options import SINK_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract import Sink, Source


@dataclass(frozen=True)
class SqliteConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "sqlite"
    extra: str = "sqlite"
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            "delivered_sqlite is a sink; a table has no offsets that a stream could replay.",
            next_step="read from delivered_log or delivered_kafka",
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.sqlite.sink import SqliteSink

        return SqliteSink(parse(options))


CONNECTOR = SqliteConnector()
