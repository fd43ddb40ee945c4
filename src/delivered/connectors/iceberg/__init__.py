"""Iceberg as a sink, by the package `pyiceberg`, without a JAR: a batch is one snapshot of the table.

options.py   what the user named
client.py    the client library, catalogs, the files of a table, errors in plain words
disk.py      what the client writes to a local disk, made durable
types.py     Arrow types as Iceberg keeps them, and back
target.py    the table: create, compare
partition.py rows by the table's partitions
manifest.py  what a task tells the driver of its data files
writer.py    a task's side
records.py   what the ledger knows, in the table's properties and in the summaries of its snapshots
store.py     the ledger in the table: owner, decisions. The line that decides is there.
merge.py     what a batch replaces
staged.py    rows of an upsert, as tasks leave them
commit.py    one commit to the table, and what became of it
committer.py  files of undecided shards
read.py      the table as a source, for the audit
preflight.py whether this table can keep the promise
sink.py      all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.iceberg.options import SINK_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class IcebergConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "iceberg"
    extra: str = "iceberg"
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            "delivered_iceberg is a sink; a table's rows have no offsets that a stream could replay.",
            next_step='read an Iceberg table with format("iceberg"), or a log with delivered_log',
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.iceberg.sink import IcebergSink

        return IcebergSink(parse(options))


CONNECTOR = IcebergConnector()
