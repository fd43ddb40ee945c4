"""The sink `delivered_delta`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import TYPES
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


@dataclass(frozen=True)
class DeltaSink:
    """Holds options, no connection. Secrets travel as references."""

    options: DeltaOptions

    @property
    def name(self) -> str:
        return self.options.sink_name

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="delta",
            commit=Commit.ONE_TRANSACTION,
            mechanism="application transaction in the table's log",
            stage="Parquet files in the table's folder, which its log does not name",
            prepare="files closed and durable, with their statistics",
            decide="one version of the table's log: files of all shards, batch and ledger record",
            apply="nothing left to do; the rows are visible since the decision",
            send="one commit of the log for each shard, visible when it ends",
            batch_atomic=True,
            write=self.options.write,
            local=self.options.local,
            assumes=(
                "the table's folder is backed up and restored as one, with _delivered in it",
                "the object store writes a log version only if it is not there (S3 conditional writes, Azure, GCS)",
            )
            if not self.options.local
            else ("the table's folder is backed up and restored as one, with _delivered in it",),
            limits=(
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept; the newest one for ever",
                "each batch is a version of the table, and a file for each shard: compact it now and then",
            ),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.delta.target import check

        return preflight(self.options, guarantee, lambda: check(self.options))

    def check_schema(self, schema: pa.Schema) -> None:
        TYPES.check(schema)
        if self.options.write.upserts:
            check_columns(self.options.write, schema, TYPES)

    def ready_target(self, schema: pa.Schema) -> None:
        from delivered.connectors.delta.target import ready

        ready(self.options, stored(self.options.write, schema))

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, TYPES.canonical_schema(batch.schema))

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        from delivered.connectors.delta.writer import DeltaFiles
        from delivered.kits.table.shard import DirectWriter, StagingWriter

        if guarantee is Guarantee.EXACTLY_ONCE:
            return StagingWriter(work, DeltaFiles(self.options, work, schema, direct=False))
        return DirectWriter(work, guarantee, DeltaFiles(self.options, work, schema, direct=True))

    def scan(self) -> BoundedScan:
        from delivered.connectors.delta.read import DeltaScan

        return DeltaScan(self.options)

    def ledger(self, scope: Scope) -> Ledger:
        from delivered.connectors.delta.store import DeltaStore

        return Ledger(DeltaStore(self.options, scope), scope)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.delta.committer import DeltaCommitter

        return DeltaCommitter(self.options, scope)
