"""Executor side: Parquet files in the table's folder, committed later (exactly_once) or at once."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from delivered.connectors.delta import statistics
from delivered.connectors.delta.client import Store, explained, require_table
from delivered.connectors.delta.commit import DataFile, StagedFiles, TableChange, commit
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import TYPES, required, same_columns
from delivered.contract.sink import Writer
from delivered.kits.sql.merge import check_rows
from delivered.kits.table import stage
from delivered.kits.table.parquet import PartFiles, split
from delivered.kits.table.shard import shard_writer
from delivered.kits.table.target import but_gone
from delivered.model.columns import fitted
from delivered.model.errors import BadRecord
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.outcome import Outcome

_NULL = "__HIVE_DEFAULT_PARTITION__"

_Part = tuple[tuple[str, str | None], ...]
"""Partition columns with their values, as in the log."""


def writer(options: DeltaOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    return shard_writer(work, guarantee, DeltaFiles(options, work, schema, direct=not exactly_once))


class DeltaFiles:
    """See `delivered.kits.table.shard.ShardFiles`. Adding a file to the log twice has no effect."""

    def __init__(self, options: DeltaOptions, work: Work, schema: pa.Schema, direct: bool) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        # An upsert's rows are staged unchanged: the driver writes the table's files.
        partitions = () if options.write.upserts else options.partition_by or ()
        self._partitions = [name for name in partitions if name in self._schema.names]
        self._stored = pa.schema([f for f in self._schema if f.name not in self._partitions])
        self._place = stage.new_place(work, direct)
        self._files: PartFiles[_Part] = PartFiles(
            lambda: Store(options), self._place, self._stored, {"compression": options.compression},
            _folder,
        )  # fmt: skip
        self._done: list[DataFile] = []
        self._table: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        batch = fitted(batch, self._schema)
        check_rows(self._options.write, batch)
        with but_gone(explained(self._options)):
            if not self._partitions:
                self._files.write((), batch)
                return
            for values, rows in split(batch.select(self._partitions), batch.select(self._stored.names)):
                part = tuple((n, text(n, v)) for n, v in zip(self._partitions, values, strict=True))
                self._files.write(part, rows)

    def finish(self) -> int:
        now = time.time_ns() // 1_000_000
        with but_gone(explained(self._options)):
            self._done = [
                DataFile(f.name, f.size, f.rows, dict(f.part), statistics.of_file(f.footer, f.not_a_number), now)
                for f in self._files.finish()
            ]
        return sum(f.rows for f in self._done)

    @property
    def done(self) -> list[DataFile]:
        """After `finish`."""
        return self._done

    @property
    def stem(self) -> str:
        """Common stem of its file names."""
        return self._place.stem

    def handle(self) -> StagedFiles | None:
        return StagedFiles(tuple(self._done)) if self._done else None

    def check(self) -> None:
        self._table = require_table(self._options)
        same_columns(self._options, self._table, self._schema)
        required(self._options, self._table, self._done)

    def commit(self) -> Outcome[None]:
        return commit(self._options, self._table, TableChange(adds=self._done))

    def discard(self) -> None:
        self._files.discard()


def _folder(part: _Part) -> str:
    """`day=2024-05-01/`, in Hive style. Readers use the log, not this name."""
    return "".join(f"{quote(k, safe='')}={_NULL if v is None else quote(v, safe='')}/" for k, v in part)


def text(name: str, value: Any) -> str | None:
    """A partition value, as in the log."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.date):
        return value.isoformat()
    written = str(value)
    if not written:
        raise BadRecord(
            "PARTITION_EMPTY",
            f"A row has an empty string in the partition column {name!r}, which Delta would read back as NULL.",
            next_step=f"replace it, for example: when({name} = '', 'none').otherwise({name})",
        )
    return written
