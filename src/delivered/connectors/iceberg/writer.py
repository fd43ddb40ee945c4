"""Executor side: Parquet files in the table's folder, committed later (exactly_once) or at once."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import manifest
from delivered.connectors.iceberg.client import data_path, require_table, store, writing
from delivered.connectors.iceberg.commit import TableChange, commit
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.partition import parts_of, unstorable_parts
from delivered.connectors.iceberg.required import unfilled
from delivered.connectors.iceberg.staged import StagedFiles
from delivered.connectors.iceberg.target import check_features, compare, same_columns
from delivered.connectors.iceberg.types import TYPES, to_arrow
from delivered.contract.sink import Writer
from delivered.kits.table import required, stage
from delivered.kits.table.parquet import PartFiles
from delivered.kits.table.shard import shard_writer
from delivered.kits.table.store import Store
from delivered.kits.table.target import but_gone
from delivered.model.columns import fitted
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.outcome import Outcome
from delivered.model.ranges import check


def writer(options: IcebergOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    if exactly_once and options.write.upserts:
        from delivered.connectors.iceberg.staged import StagedRows

        return shard_writer(work, guarantee, StagedRows(options, work, schema))
    return shard_writer(work, guarantee, IcebergFiles(options, work, schema, direct=not exactly_once, requires=True))


class IcebergFiles:
    """See `delivered.kits.table.shard.ShardFiles`. Reads the table on the first row.

    Args:
        requires: whether nulls are checked that the table refuses.
    """

    def __init__(
        self, options: IcebergOptions, work: Work, schema: pa.Schema, direct: bool, requires: bool = False
    ) -> None:
        self._options = options
        self._requires = requires
        self._work = work
        self._schema = TYPES.canonical_schema(schema)
        self._place = stage.new_place(work, direct)
        self._table: Any = None
        self._stored: pa.Schema | None = None
        self._files: PartFiles[manifest.Part] | None = None
        self._done: list[Any] = []

    def write(self, batch: pa.RecordBatch) -> None:
        TYPES.check_values(batch)
        with but_gone(writing(self._options)):
            files, stored = self._begun()
            check(TYPES.system, batch, unstorable_parts(parts_of(self._table), batch))
            plain = fitted(batch, self._schema)
            if self._requires:
                required.check(self._options.where, plain, unfilled(self._options.write, self._table, plain))
            for part, rows in manifest.parts(self._table, plain, fitted(plain, stored)):
                files.write(part, rows)

    @property
    def done(self) -> list[Any]:
        """After `finish`: the client's data files."""
        return self._done

    @property
    def writer(self) -> str:
        """Common prefix of the file names."""
        return f"{self._place.folder}/{self._place.stem}"

    def finish(self) -> int:
        if self._files is None:
            return 0
        with but_gone(writing(self._options)):
            path = data_path(self._table)
            self._done = manifest.data_files(self._table, path, self._files.finish())
        return sum(int(f.record_count) for f in self._done)

    def handle(self) -> StagedFiles | None:
        if not self._done:
            return None
        with but_gone(writing(self._options)):
            name = self._place.sibling("manifest.avro")
            output = self._table.io.new_output(f"{data_path(self._table)}/{name}")
            size = manifest.put(self._table, output, self._done)
        now = self._table.metadata
        columns = tuple(self._columns())
        return StagedFiles(self.writer, len(self._done), size, now.current_schema_id, now.default_spec_id, columns)

    def check(self) -> None:
        self._fits(require_table(self._options))

    def commit(self) -> Outcome[None]:
        def change(now: Any) -> TableChange:
            self._fits(now)
            scope = self._work.scope
            summary = {
                "delivered.pipeline": scope.pipeline,
                "delivered.sink": scope.sink,
                "delivered.incarnation": scope.incarnation,
                "delivered.batch": str(self._work.batch),
                "delivered.shard": str(self._work.shard),
            }
            return TableChange(
                folder=stage.direct_folder(scope), prefix=f"{self._work.batch}-", summary=summary, files=self._done
            )

        return commit(self._options, change)

    def discard(self) -> None:
        if self._files is not None:
            self._files.discard()
            with contextlib.suppress(Exception):
                store(self._table, data_path(self._table)).remove([self._place.sibling("manifest.avro")])

    def _begun(self) -> tuple[PartFiles[manifest.Part], pa.Schema]:
        if self._files is None or self._stored is None:
            table = self._table = self._opened()
            check_features(self._options, table)
            compare(self._options, table, self._schema)
            columns = {f.name: f for f in to_arrow(table.schema())}
            self._stored = pa.schema([self._column(columns[name]) for name in self._schema.names])
            options = {"compression": self._options.compression, "store_decimal_as_integer": True}
            self._files = PartFiles(self._store, self._place, self._stored, options)
        return self._files, self._stored

    def _column(self, field: pa.Field) -> pa.Field:
        """A column in the files."""
        return field

    def _opened(self) -> Any:
        return require_table(self._options)

    def _store(self) -> Store:
        return store(self._table, data_path(self._table))

    def _fits(self, now: Any) -> None:
        written = self._table.metadata
        same_columns(self._options, now, written.current_schema_id, written.default_spec_id, self._columns())

    def _columns(self) -> list[int]:
        """Field ids in the files."""
        return [f.field_id for f in self._table.schema().fields if f.name in self._schema.names]
