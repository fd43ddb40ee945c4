"""Rows that an Iceberg table, or the library that writes its files, refuses."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
from pyiceberg.io import OutputFile

from delivered.connectors.iceberg import writer
from delivered.connectors.iceberg.client import require_table
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.required import unfilled
from delivered.connectors.iceberg.types import TYPES, parts_of, unstorable_parts
from delivered.connectors.iceberg.writer import IcebergFiles
from delivered.kits.sql.merge import stored
from delivered.kits.table.bad_rows import Nowhere, nobody, unwritable
from delivered.kits.table.store import Store
from delivered.model.columns import fitted
from delivered.model.ranges import first_of


class IcebergTrial:
    """See `delivered.kits.table.bad_rows.Trial`."""

    def __init__(self, options: IcebergOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._stored = stored(options.write, self._schema)
        self._table = require_table(options)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        batch = fitted(batch, self._schema)
        reasons = unfilled(self._options.write, self._table, batch)
        reasons = first_of(reasons, unstorable_parts(parts_of(self._table), batch))
        return unwritable(batch.select(self._stored.names), self._write, reasons)

    def _write(self, rows: pa.RecordBatch) -> None:
        files = _Files(self._options.appending, nobody(), self._stored, direct=False)
        files.table = self._table
        try:
            files.write(rows)
            files.finish()
            writer.put(self._table, _Uncounted(), files.done)
            for file in files.done:  # for the snapshot's summary
                self._table.spec().partition_to_path(file.partition, self._table.schema())
        finally:
            files.discard()


class _Files(IcebergFiles):
    table: Any = None

    def _column(self, field: pa.Field) -> pa.Field:
        return field.with_nullable(True)

    def _opened(self) -> Any:
        return self.table

    def _store(self) -> Store:
        return Nowhere()


class _Uncounted(OutputFile):
    """A manifest that is not kept."""

    def __init__(self) -> None:
        super().__init__("nowhere")

    def __len__(self) -> int:
        return 0

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> Any:
        raise NotImplementedError

    def create(self, overwrite: bool = False) -> Any:
        del overwrite
        return io.BytesIO()
