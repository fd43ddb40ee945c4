"""The sink `delivered_postgres`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pyarrow as pa

from delivered.connectors.postgres.options import PostgresOptions
from delivered.connectors.postgres.types import TYPES, invalid_rows
from delivered.contract.finding import Finding
from delivered.contract.powers import KeyMemory
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.kits.sql.merge import without_key
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.sink import HISTORY, TableSink
from delivered.kits.sql.types import Types
from delivered.ledger.ledger import Ledger
from delivered.model.capability import Commit, SinkCapability
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work

_BACKUP = "the database is backed up and restored as one, with the ledger's schema"


@dataclass(frozen=True)
class PostgresSink(TableSink):
    """Holds options, no connection. Secrets travel as references."""

    options: PostgresOptions

    types: ClassVar[Types] = TYPES

    @property
    def _table(self) -> PostgresOptions:
        return self.options

    def capability(self) -> SinkCapability:
        table = self._into
        if self.options.mechanism is Mechanism.TWO_PHASE:
            return SinkCapability(
                system="postgres",
                commit=Commit.TWO_PHASE,
                mechanism="two-phase commit",
                stage=f"COPY into {table}, a transaction for each shard, invisible",
                prepare="a marker in the same transaction; PREPARE TRANSACTION, durable",
                decide="one row in the ledger, by the one driver that owns it",
                apply="COMMIT PREPARED for each shard, from the driver",
                send=f"COPY into {table}, one transaction for each shard, visible when it ends",
                batch_atomic=False,
                remembers=True,
                write=self.options.write,
                assumes=(
                    _BACKUP,
                    "no rows of one batch wait for each other's unique keys across shards",
                    *self._assumed,
                ),
                limits=(
                    "max_prepared_transactions of the server is above the number of shards",
                    "a reader may see some shards of a batch a few ms before the others",
                    "prepared rows of a pipeline that never starts again hold locks and stop VACUUM: "
                    "`delivered transactions list` shows them and their age",
                    HISTORY,
                ),
            )
        return SinkCapability(
            system="postgres",
            commit=Commit.ONE_TRANSACTION,
            mechanism="ledger row in the sink's transaction",
            stage="COPY into a staging table for each shard",
            prepare="the staging table is committed, durable",
            decide=f"one transaction: rows of all shards into {table}, and the ledger row",
            apply="nothing left to do; the rows are visible since the decision",
            send=f"COPY into {table}, one transaction for each shard, visible when it ends",
            batch_atomic=True,
            remembers=True,
            write=self.options.write,
            assumes=(_BACKUP, *self._assumed),
            limits=("rows are written twice: once staged, once moved", HISTORY, *self._bounds),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.postgres.preflight import preflight

        return preflight(self.options, guarantee)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return without_key(self.options.write, batch, invalid_rows(batch))

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        from delivered.connectors.postgres.writer import CopyWriter

        return CopyWriter(self.options, work, guarantee, schema)

    def scan(self) -> BoundedScan:
        from delivered.connectors.postgres.read import PostgresScan

        return PostgresScan(self.options)

    def ledger(self, scope: Scope) -> Ledger:
        from delivered.connectors.postgres.store import PostgresStore

        return Ledger(PostgresStore(self.options, scope), scope)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.postgres.committer import PostgresCommitter

        return PostgresCommitter(self.options, scope)

    def key_memory(self, scope: Scope) -> KeyMemory:
        from delivered.connectors.postgres.client import PostgresDatabase
        from delivered.connectors.postgres.store import dialect
        from delivered.kits.sql.keys import KeyTable, from_warm

        return KeyTable(dialect(self.options.ledger_schema), scope, partial(from_warm, PostgresDatabase(self.options)))
