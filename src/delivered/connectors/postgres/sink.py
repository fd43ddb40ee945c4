"""The sink `delivered_postgres`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.postgres import types
from delivered.connectors.postgres.options import Mechanism, PostgresOptions
from delivered.contract import Finding, Ledger, Resource, ShardWriter, Source
from delivered.model.capability import Commit, SinkCapability
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES

_HISTORY = f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept"
_BACKUP = "the database is backed up and restored as one, with the ledger's schema"


@dataclass(frozen=True)
class PostgresSink:
    """Holds options, no connection. Secrets travel as references."""

    options: PostgresOptions

    @property
    def name(self) -> str:
        return self.options.sink_name

    def capability(self) -> SinkCapability:
        table = f"table {self.options.table_text}"
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
                assumes=(_BACKUP, "no rows of one batch wait for each other's unique keys across shards"),
                limits=(
                    "max_prepared_transactions of the server is above the number of shards",
                    "a reader may see some shards of a batch a few ms before the others",
                    "prepared rows of a pipeline that never starts again hold locks and stop VACUUM: "
                    "`delivered transactions list` shows them and their age",
                    _HISTORY,
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
            assumes=(_BACKUP,),
            limits=("rows are written twice: once staged, once moved", _HISTORY),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.postgres.preflight import preflight

        return preflight(self.options, guarantee)

    def check_schema(self, schema: pa.Schema) -> None:
        types.check(schema)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        return types.refused(batch)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return types.with_schema(batch, types.canonical_schema(batch.schema))

    def shard_writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> ShardWriter:
        from delivered.connectors.postgres.writer import CopyWriter

        return CopyWriter(self.options, work, guarantee, schema)

    def read_back(self) -> Source:
        from delivered.connectors.postgres.read import PostgresTable

        return PostgresTable(self.options)

    def ledger(self, scope: Scope) -> Ledger:
        from delivered.connectors.postgres.ledger import PostgresLedger

        return PostgresLedger(self.options, scope)

    def resource(self, scope: Scope) -> Resource:
        from delivered.connectors.postgres.resource import PostgresResource

        return PostgresResource(self.options, scope)
