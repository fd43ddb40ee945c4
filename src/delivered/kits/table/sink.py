"""Base of sinks that write to a table of files."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.kits.sql.merge import stored
from delivered.kits.sql.sink import TableSink
from delivered.kits.table.bad_rows import Trial
from delivered.kits.table.target import preflight
from delivered.kits.warm import WarmClients
from delivered.model.guarantee import Guarantee

TRIAL_AGE_S = 10
"""How long a task judges rows by what it read of the table. Writers read it again."""
_trials: WarmClients[Trial] = WarmClients(4)


class FileTableSink(TableSink):
    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        return preflight(self.options, guarantee, lambda: self.parts["check"](self.options))

    def ready_target(self, schema: pa.Schema) -> None:
        self.parts["ready"](self.options, stored(self.options.write, schema))

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        key = (self.options, batch.schema, int(time.monotonic() // TRIAL_AGE_S))
        with _trials.lent(key, lambda: self.parts["trial"](self.options, batch.schema)) as trial:
            return trial.refused(batch)
