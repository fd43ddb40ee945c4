"""What every sink into a table answers alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import pyarrow as pa

from delivered.kits.sql.merge import check_columns
from delivered.kits.sql.options import TableOptions
from delivered.kits.sql.types import Types
from delivered.model.columns import fitted
from delivered.model.limits import LEDGER_HISTORY_BATCHES

HISTORY = f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept"


class TableSink(ABC):
    """Holds no connection. Base of a dataclass with the field `options`."""

    types: ClassVar[Types]

    @property
    @abstractmethod
    def _table(self) -> TableOptions:
        """The options."""

    @property
    def name(self) -> str:
        return self._table.sink_name

    def check_schema(self, schema: pa.Schema) -> None:
        self.types.check(schema)
        if self._table.write.upserts:
            check_columns(self._table.write, schema, self.types)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return fitted(batch, self.types.canonical_schema(batch.schema))

    @property
    def _into(self) -> str:
        """Where rows go, and how, for the plan."""
        write = self._table.write
        text = f"table {self._table.table_text}"
        if write.upserts:
            text += f", by key ({write.keys_text})"
            text += f" where {write.version} grows" if write.version else ", the last row of a key"
            text += f", deleted where {write.delete}" if write.delete else ""
        return text

    @property
    def _assumed(self) -> tuple[str, ...]:
        """What an upsert takes for granted."""
        write = self._table.write
        if write.version is not None:
            return ("of two rows of one key and one version, either may be the one that stays",)
        return (
            "each key lies in one shard of a batch (refused otherwise), in the order of its changes",
        ) * write.upserts

    @property
    def _bounds(self) -> tuple[str, ...]:
        """What an upsert does not do."""
        write = self._table.write
        if write.version is None or write.delete is None:
            return ()
        return ("a deleted key forgets its version: an older row of a later batch brings it back",)
