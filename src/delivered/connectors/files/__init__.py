"""Folders of Parquet, JSON or CSV files as a sink: a batch is one folder, and appears by one rename.

options.py  what the user named
types.py    Arrow types as each format keeps them
formats.py  rows into files, and back
disk.py     names, and what makes them durable
writer.py   a task's side
store.py    the ledger beside the batches: owner, decisions. The line that decides is there.
committer.py staged files of undecided shards
read.py     the folder as a source, for the audit
sink.py     all of these as the contract's sink
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.files.options import SINK_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class FilesConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "files"
    extra: str = "files"
    source_options: OptionTable | None = None
    sink_options: OptionTable | None = SINK_OPTIONS

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            "delivered_files is a sink.",
            next_step='read a folder with Spark\'s own format("parquet"), format("json") or format("csv")',
        )

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.files.sink import FilesSink

        return FilesSink(parse(options))


CONNECTOR = FilesConnector()
