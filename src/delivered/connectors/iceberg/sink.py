"""The sink `delivered_iceberg`."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.connectors.iceberg.client import need
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.types import TYPES
from delivered.kits.sink import Parts
from delivered.kits.table.sink import FileTableSink
from delivered.model.capability import Commit, SinkCapability
from delivered.model.limits import LEDGER_HISTORY_BATCHES

_BACKUP = "catalog and table are backed up and restored as one"
_CATALOG = "the catalog commits by comparing and swapping, and answers with what was committed last"


@dataclass(frozen=True)
class IcebergSink(FileTableSink):
    options: IcebergOptions

    types = TYPES
    parts = Parts(
        __package__,
        needs=need,
        check="target:check",
        ready="target:ready",
        writer="writer:writer",
        scan="read:IcebergScan",
        store="store:IcebergStore",
        committer="committer:IcebergCommitter",
    )

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
