"""Rows that a Delta table, or the library that writes its files, refuses."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.required import Required
from delivered.connectors.delta.target import TYPES
from delivered.connectors.delta.writer import DeltaFiles
from delivered.kits.table.bad_rows import Nowhere, nobody, unwritable
from delivered.model.columns import fitted


class DeltaTrial:
    """See `delivered.kits.table.bad_rows.Trial`."""

    def __init__(self, options: DeltaOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._required = Required(options)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        return unwritable(batch, self._write, self._required.reasons(fitted(batch, self._schema)))

    def _write(self, rows: pa.RecordBatch) -> None:
        files = DeltaFiles(self._options.appending, nobody(), self._schema, direct=False, into=Nowhere)
        try:
            files.write(rows)
            files.finish()
        finally:
            files.discard()
