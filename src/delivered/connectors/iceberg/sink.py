"""The sink `delivered_iceberg`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.iceberg.client import need
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.types import TYPES
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.kits.sql.merge import check_columns, stored
from delivered.kits.table.target import preflight
from delivered.ledger.ledger import Ledger
from delivered.model.capability import Commit, SinkCapability
from delivered.model.columns import fitted
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES

_BACKUP = "catalog and table are backed up and restored as one"
_CATALOG = "the catalog commits by comparing and swapping, and answers with what was committed last"


@dataclass(frozen=True)
class IcebergSink:
    """Holds options, no connection. Secrets travel as references."""

    options: IcebergOptions

    @property
    def name(self) -> str:
        return self.options.sink_name

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="iceberg",
            commit=Commit.ONE_TRANSACTION,
            mechanism="one commit to the table, fenced by a branch of it",
            stage="Parquet files in the table's folder, which no snapshot names",
            prepare="files closed and durable, with a manifest of them beside",
            decide="one commit: a snapshot with the files of all shards, and the ledger's record",
            apply="nothing left to do; the rows are visible since the decision",
            send="one snapshot for each shard, visible when it is committed",
            batch_atomic=True,
            write=self.options.write,
            local=self.options.local,
            assumes=(_BACKUP,) if self.options.local else (_BACKUP, _CATALOG),
            limits=(
                f"of older decisions the last {LEDGER_HISTORY_BATCHES} are read, as far as their snapshots are kept; "
                "the newest one stays for ever",
                "each batch is a snapshot, and a file for each shard: compact the table and expire snapshots",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.iceberg.target import check

        return preflight(self.options, guarantee, lambda: check(self.options))

    def check_schema(self, schema: pa.Schema) -> None:
        TYPES.check(schema)
        if self.options.write.upserts:
            check_columns(self.options.write, schema, TYPES)

    def ready_target(self, schema: pa.Schema) -> None:
        from delivered.connectors.iceberg.target import ready

        ready(self.options, stored(self.options.write, schema))

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, TYPES.canonical_schema(batch.schema))

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        need()
        from delivered.connectors.iceberg.staged import StagedRows
        from delivered.connectors.iceberg.writer import IcebergFiles
        from delivered.kits.table.shard import DirectWriter, StagingWriter

        if guarantee is Guarantee.EXACTLY_ONCE:
            if self.options.write.upserts:
                return StagingWriter(work, StagedRows(self.options, work, schema))
            return StagingWriter(work, IcebergFiles(self.options, work, schema, direct=False))
        return DirectWriter(work, guarantee, IcebergFiles(self.options, work, schema, direct=True))

    def scan(self) -> BoundedScan:
        from delivered.connectors.iceberg.read import IcebergScan

        return IcebergScan(self.options)

    def ledger(self, scope: Scope) -> Ledger:
        need()
        from delivered.connectors.iceberg.store import IcebergStore

        return Ledger(IcebergStore(self.options, scope), scope)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.iceberg.committer import IcebergCommitter

        return IcebergCommitter(self.options, scope)
