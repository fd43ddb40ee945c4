"""Mode upsert: a task stages its rows unchanged, in plain Parquet; the driver writes the table's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg.client import data_path, require_table, store, writing
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.partition import parts_of, unstorable_parts
from delivered.connectors.iceberg.required import unfilled
from delivered.connectors.iceberg.target import check_features, compare
from delivered.connectors.iceberg.types import TYPES
from delivered.kits.sql.merge import check_rows, stored
from delivered.kits.table import required, stage
from delivered.kits.table.parquet import PartFiles, Written
from delivered.model.columns import fitted
from delivered.model.errors import InvariantBroken
from delivered.model.identity import Work
from delivered.model.outcome import Outcome
from delivered.model.prepared import Handle
from delivered.model.ranges import check


@dataclass(frozen=True)
class StagedFiles(Handle):
    """One shard's.

    Attributes:
        writer: prefix of the files' names; files: their number.
        bytes: size of the manifest that lists them; schema, spec, columns: ids they were written with.
        rows: mode upsert: name, size and number of rows of each. Nothing else then.
    """

    writer: str
    files: int
    bytes: int = 0
    schema: int = -1
    spec: int = -1
    columns: tuple[int, ...] = ()
    rows: tuple[tuple[str, int, int], ...] = ()

    @property
    def manifest(self) -> str:
        return f"{self.writer}-manifest.avro"


class StagedRows:
    """See `delivered.kits.table.shard.ShardFiles`."""

    def __init__(self, options: IcebergOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._place = stage.new_place(work, direct=False)
        self._table: Any = None
        self._files: PartFiles[tuple[()]] | None = None
        self._done: list[Written[tuple[()]]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        TYPES.check_values(batch)
        batch = fitted(batch, self._schema)
        check_rows(self._options.write, batch)
        with writing(self._options):
            files = self._begun()
            required.check(self._options.where, batch, unfilled(self._options.write, self._table, batch))
            check(TYPES.system, batch, unstorable_parts(parts_of(self._table), batch))
            files.write((), batch)

    def finish(self) -> int:
        if self._files is not None:
            with writing(self._options):
                self._done = list(self._files.finish())
        return sum(f.rows for f in self._done)

    def handle(self) -> StagedFiles | None:
        rows = tuple((f.name, f.size, f.rows) for f in self._done)
        return StagedFiles(f"{self._place.folder}/{self._place.stem}", len(rows), rows=rows) if rows else None

    def check(self) -> None:
        raise InvariantBroken("MODE_GUARANTEE", "Mode upsert requires exactly_once.")

    def commit(self) -> Outcome[None]:
        raise InvariantBroken("MODE_GUARANTEE", "Mode upsert requires exactly_once.")

    def discard(self) -> None:
        if self._files is not None:
            self._files.discard()

    def _begun(self) -> PartFiles[tuple[()]]:
        if self._files is None:
            table = self._table = require_table(self._options)
            check_features(self._options, table)
            compare(self._options, table, TYPES.canonical_schema(stored(self._options.write, self._schema)))
            options = {"compression": self._options.compression}
            self._files = PartFiles(lambda: store(table, data_path(table)), self._place, self._schema, options)
        return self._files
