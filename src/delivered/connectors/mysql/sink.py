"""The sink `delivered_mysql`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pyarrow as pa

from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.types import TYPES, invalid_rows
from delivered.contract.finding import Finding
from delivered.contract.powers import KeyMemory
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.kits.sql.merge import without_key
from delivered.kits.sql.options import Mechanism
from delivered.kits.sql.sink import HISTORY, TableSink
from delivered.kits.sql.types import Types
from delivered.ledger.ledger import Ledger
from delivered.model.capability import Commit, SinkCapability
from delivered.model.columns import fitted
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work

_ASSUMED = (
    "the server is backed up and restored as one, with the ledger's database",
    "triggers of the table write to InnoDB tables alone",
)


@dataclass(frozen=True)
class MysqlSink(TableSink):
    """Holds options, no connection. Secrets travel as references."""

    options: MysqlOptions

    types: ClassVar[Types] = TYPES

    @property
    def _table(self) -> MysqlOptions:
        return self.options

    def capability(self) -> SinkCapability:
        table = self._into
        if self.options.mechanism is Mechanism.TWO_PHASE:
            return SinkCapability(
                system="mysql",
                commit=Commit.TWO_PHASE,
                mechanism="two-phase commit",
                stage=f"LOAD DATA into {table}, an XA transaction for each shard, invisible",
                prepare="a marker in the same transaction; XA PREPARE, durable; the session ends",
                decide="one row in the ledger, by the one driver that owns it",
                apply="XA COMMIT for each shard, from the driver",
                send=f"LOAD DATA into {table}, one transaction for each shard, visible when it ends",
                batch_atomic=False,
                remembers=True,
                write=self.options.write,
                assumes=(
                    *_ASSUMED,
                    "no rows of one batch wait for each other's unique keys across shards",
                    *self._assumed,
                ),
                limits=(
                    "a reader may see some shards of a batch a few ms before the others",
                    "prepared rows of a pipeline that never starts again hold locks: "
                    "`delivered transactions list` shows them and their age",
                    HISTORY,
                ),
            )
        return SinkCapability(
            system="mysql",
            commit=Commit.ONE_TRANSACTION,
            mechanism="ledger row in the sink's transaction",
            stage="LOAD DATA into a staging table for each shard",
            prepare="the staging table is committed, durable",
            decide=f"one transaction: rows of all shards into {table}, and the ledger row",
            apply="the staging tables are dropped; the rows are visible since the decision",
            send=f"LOAD DATA into {table}, one transaction for each shard, visible when it ends",
            batch_atomic=True,
            remembers=True,
            write=self.options.write,
            assumes=(*_ASSUMED, *self._assumed),
            limits=("rows are written twice: once staged, once moved", HISTORY, *self._bounds),
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        from delivered.connectors.mysql.preflight import preflight

        return preflight(self.options, guarantee)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        plain = fitted(batch, TYPES.plain_schema(batch.schema))
        return without_key(self.options.write, batch, invalid_rows(plain))

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        from delivered.connectors.mysql.writer import LoadWriter

        return LoadWriter(self.options, work, guarantee, schema)

    def scan(self) -> BoundedScan:
        from delivered.connectors.mysql.read import MysqlScan

        return MysqlScan(self.options)

    def ledger(self, scope: Scope) -> Ledger:
        from delivered.connectors.mysql.store import MysqlStore

        return Ledger(MysqlStore(self.options, scope), scope)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.mysql.committer import MysqlCommitter

        return MysqlCommitter(self.options, scope)

    def key_memory(self, scope: Scope) -> KeyMemory:
        from delivered.connectors.mysql.client import MysqlDatabase
        from delivered.connectors.mysql.store import dialect
        from delivered.kits.sql.keys import KeyTable, from_warm

        return KeyTable(dialect(self.options.ledger_schema), scope, partial(from_warm, MysqlDatabase(self.options)))
