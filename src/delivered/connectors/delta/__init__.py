"""Delta Lake as a sink, by the package `deltalake`, without a JAR: a batch is one commit of the table's own log.

options.py   what the user named
client.py    the client library, the files beside the table, errors in plain words
types.py     Arrow types as Delta keeps them
target.py    the table: create, compare, add columns
statistics.py  what the log says about a file
writer.py    a task's side
records.py   what the ledger knows, in files that the log points to
store.py     the ledger in the table: owner, decisions. The line that decides is there.
commit.py    one commit to the table's log, and what became of it
committer.py  files of undecided shards
read.py      the table as a source, for the audit
preflight.py whether this table can keep the promise
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.delta.options import SINK_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class DeltaConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "delta"
    extra: str = "delta"
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            "delivered_delta is a sink; a table's rows have no offsets that a stream could replay.",
            next_step='read a Delta table with format("delta"), or a log with delivered_log',
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.delta.sink import DeltaSink

        return DeltaSink(parse(options))


CONNECTOR = DeltaConnector()
