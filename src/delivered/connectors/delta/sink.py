"""The sink `delivered_delta`."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.target import TYPES, unstorable_parts
from delivered.kits.sink import Parts
from delivered.kits.table.sink import FileTableSink
from delivered.model.capability import Commit, SinkCapability
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.ranges import first_of


@dataclass(frozen=True)
class DeltaSink(FileTableSink):
    options: DeltaOptions

    types = TYPES
    parts = Parts(
        __package__,
        check="target:check",
        ready="target:ready",
        writer="writer:writer",
        trial="writer:DeltaTrial",
        scan="target:DeltaScan",
        store="store:DeltaStore",
        committer="store:DeltaCommitter",
    )

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        reasons, parts = super().invalid_rows(batch), unstorable_parts(self.options.partition_by or (), batch)
        return first_of(reasons, parts)

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="delta",
            commit=Commit.ONE_TRANSACTION,
            mechanism="application transaction in the table's log",
            stage="Parquet files in the table's folder, not yet in its log",
            prepare="files closed and durable, with their statistics",
            decide="one version of the table's log: files of all shards, batch and ledger record",
            apply="nothing to do; the decision made the rows visible",
            send="one commit of the log per shard, visible when it completes",
            batch_atomic=True,
            validates=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            local=self.options.local,
            assumes=(
                "the table's folder is backed up and restored as one, with _delivered in it",
                "the object store creates a log version only if it does not exist (S3 conditional writes, Azure, GCS)",
            )
            if not self.options.local
            else ("the table's folder is backed up and restored as one, with _delivered in it",),
            limits=(
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept; the newest one permanently",
                "each batch adds a version of the table and a file per shard: run OPTIMIZE regularly",
            ),
        )
