"""The sink: at_least_once, with an external ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.saga.options import SagaOptions
from delivered.connectors.saga.writer import SagaWriter, log_of
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Writer
from delivered.kits.queue.columns import TEXT, check_names, column
from delivered.kits.queue.sink import SendingSink, sends
from delivered.ledger.store import Ledgers
from delivered.model.capability import SinkCapability
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.patterns.saga.definition import load
from delivered.patterns.saga.tables import checked


@dataclass(frozen=True)
class SagaSink(SendingSink):
    options: SagaOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        return sends(
            "saga",
            mechanism="a saga log",
            send=f"saga {options.saga}: a row is one saga, by its id; the task runs it until it is at rest",
            assumes=(
                f"the ledger {options.ledger} is kept with the checkpoint, and the saga log {options.log}",
                "a service that takes a step's key honours it longer than a batch may be repeated",
            ),
            limits=(
                "no saga is half done at rest: it ends complete, compensated, or stuck for a person "
                "(delivered sagas list)",
                "effects of a saga's steps happen at least once, unless the step takes its key",
            ),
            local="://" not in options.log,
            can_disable_retries=False,
        )

    def _look(self, guarantee: Guarantee) -> Iterator[Finding]:
        del guarantee
        saga = load(self.options.saga)
        if unsafe := [s.name for s in saga.steps if not s.repeatable and s.ask is None]:
            yield Finding(
                "SAGA_STEP_UNSAFE",
                f"Saga {saga.name} has steps that take no key and cannot be asked: {', '.join(unsafe)}. If a task dies "
                "in one of them, the saga turns back, because nobody can know whether the step was done.",
                refuses=False,
                next_step="pass takes_key=True if the service honours the key, or ask=...",
            )
        self._create()

    def _create(self) -> None:
        log_of(self.options).create()
        log_of(self.options).open().close()

    def ready_target(self, schema: pa.Schema) -> None:
        """Make the log's tables, unless they are there."""
        self.check_schema(schema)
        self._create()

    def check_schema(self, schema: pa.Schema) -> None:
        check_names(
            "saga", schema, {"id"}, {"id", "data"}, 'write .selectExpr("order_id AS id", "to_json(...) AS data")'
        )
        for field in schema:
            if not any(fits(field.type) for fits in TEXT):
                raise UsageError(
                    "COLUMNS",
                    f"Column {field.name!r} is {field.type}; it must be text.",
                    next_step="cast the column to string",
                )

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """See `delivered.contract.powers.ValidatesRows`."""
        reasons = [self._reason(*row) for row in zip(column(batch, "id"), column(batch, "data"), strict=True)]
        return pa.array(reasons, pa.string()) if any(reasons) else None

    @staticmethod
    def _reason(id_: str, data: str) -> str | None:
        try:
            checked(id_, data)
        except BadRecord as error:
            return error.message
        return None

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [n for n in ("id", "data") if n in batch.schema.names]
        return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.string()) for n in names], names=names)

    def _writer(self, work: Work, *, gives_up: bool) -> Writer:
        del work, gives_up
        return SagaWriter(self.options)

    def scan(self) -> BoundedScan:
        raise Refused(
            "NOT_READABLE",
            f"Saga {self.options.saga} has effects in other systems, which cannot be read back.",
            next_step=f"delivered sagas list --all --log {self.options.log}",
        )
