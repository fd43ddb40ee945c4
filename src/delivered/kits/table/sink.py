"""Base of sinks that write to a table of files."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.kits.sql.merge import stored
from delivered.kits.sql.sink import TableSink
from delivered.kits.table.target import preflight
from delivered.model.guarantee import Guarantee


class FileTableSink(TableSink):
    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        return preflight(self.options, guarantee, lambda: self.parts["check"](self.options))

    def ready_target(self, schema: pa.Schema) -> None:
        self.parts["ready"](self.options, stored(self.options.write, schema))
