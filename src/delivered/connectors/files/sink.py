"""The sink `delivered_files`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.files import FilesOptions, failed, identity_file, schema_file
from delivered.connectors.files.formats import TYPES, check, encoder, stored_schema
from delivered.contract.finding import Finding
from delivered.kits.sink import Parts, StoreSink
from delivered.kits.table.bad_rows import unwritable
from delivered.kits.table.durable import make_folder, put, put_first
from delivered.model import ranges
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.ranges import fitted


@dataclass(frozen=True)
class FilesSink(StoreSink):
    options: FilesOptions

    parts = Parts(
        __package__,
        writer="writer:writer",
        scan="formats:FolderScan",
        store="store:FilesStore",
        committer="store:FilesCommitter",
    )

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="files",
            commit=Commit.ONE_TRANSACTION,
            mechanism="rename of the batch's folder",
            stage=f"one {self.options.format} file per shard, in a folder that readers ignore",
            prepare="the file is closed and durable",
            decide="files of all shards and the record in one folder, which is renamed into place",
            apply="nothing to do; the decision made the rows visible",
            send="one folder per shard, renamed into place",
            batch_atomic=True,
            validates=True,
            local=True,
            assumes=(
                "the folder is on one file system with atomic rename, and is backed up and restored as one",
                "readers ignore names that start with _ (Spark, Hive and Arrow do)",
            ),
            limits=(
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept",
                "each batch is a folder, with one file per shard",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        probe = self.options.folder / "_delivered" / f"probe-{uuid.uuid4().hex}"
        try:
            put(probe, b"may this user write here?")
            probe.unlink()
        except OSError as error:
            found = failed(self.options, error)
            return [Finding.refusal(found)]
        return []

    def check_schema(self, schema: pa.Schema) -> None:
        check(self.options, schema)

    def ready_target(self, schema: pa.Schema) -> None:
        schema = TYPES.canonical_schema(schema)
        try:
            known = stored_schema(self.options)
            if known is None:
                make_folder(self.options.folder)
                put(schema_file(self.options), schema.serialize().to_pybytes())
                known = stored_schema(self.options)
            if not identity_file(self.options).exists():
                put_first(identity_file(self.options), uuid.uuid4().hex.encode())
        except OSError as error:
            raise failed(self.options, error) from error
        if known is None or not known.equals(schema):
            raise UsageError(
                "SCHEMA_CHANGED.FILES", path=self.options.path, known=_columns(known), columns=_columns(schema)
            )

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return ranges.unstorable(self.options.range, batch)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        schema = TYPES.canonical_schema(batch.schema)

        def write(rows: pa.RecordBatch) -> None:
            file = encoder(self.options.format, pa.MockOutputStream(), schema)
            file.write(fitted(rows, schema))
            file.close()

        return unwritable(batch, write)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, TYPES.canonical_schema(batch.schema))


def _columns(schema: pa.Schema | None) -> str:
    return "none" if schema is None else ", ".join(f"{f.name} {f.type}" for f in schema)
