"""The sink `delivered_iceberg`."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.connectors.iceberg import IcebergOptions
from delivered.connectors.iceberg.client import need
from delivered.connectors.iceberg.target import TYPES
from delivered.contract.sink import Parts
from delivered.kits.table.target import FileTableSink
from delivered.model.capability import Commit, SinkCapability
from delivered.model.limits import LEDGER_HISTORY_BATCHES

_BACKUP = "catalog and table are backed up and restored together"
_CATALOG = "the catalog commits by compare-and-swap, and always returns the last committed state"


@dataclass(frozen=True)
class IcebergSink(FileTableSink):
    options: IcebergOptions

    types = TYPES
    parts = Parts(
        __package__,
        needs=need,
        check="target:check",
        ready="target:ready",
        open_table="client:open_table",
        compare="target:compare",
        check_created="target:check_created",
        unstorable_parts="target:unstorable_parts",
        writer="writer:writer",
        trial="writer:IcebergTrial",
        scan="scan:IcebergScan",
        store="store:IcebergStore",
        committer="store:IcebergCommitter",
    )

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="iceberg",
            commit=Commit.ONE_TRANSACTION,
            mechanism="one commit to the table, fenced by one of its branches",
            stage="Parquet files in the table's folder, not yet in any snapshot",
            prepare="files closed and durable, with a manifest next to them",
            decide="one commit: a snapshot with the files of all shards, and the ledger's record",
            apply="nothing to do; the decision made the rows visible",
            send="one snapshot per shard, visible when it is committed",
            batch_atomic=True,
            validates=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            no_position=self.options.write.no_position,
            local=self.options.local,
            assumes=(_BACKUP,) if self.options.local else (_BACKUP, _CATALOG),
            limits=(
                f"the last {LEDGER_HISTORY_BATCHES} decisions are readable as long as their snapshots are kept; the "
                "newest one permanently",
                "each batch adds a snapshot and a file per shard: compact the table and expire snapshots regularly",
            ),
        )
