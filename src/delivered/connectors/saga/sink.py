"""The sink: at_least_once, with an external ledger.

Rows are recorded as sagas, which the task then runs until they are at rest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.saga import SagaOptions
from delivered.contract.sink import BoundedScan, Writer
from delivered.contract.source import Finding
from delivered.kits.queue import TEXT, SendingSink, check_names, column, sends
from delivered.ledger import Ledgers
from delivered.model.capability import Guarantee, SinkCapability
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.work import Promise
from delivered.patterns.saga import Log, Status, run
from delivered.patterns.saga.definition import load
from delivered.patterns.saga.log import check_row


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
            yield Finding.build("SAGA_STEP_UNSAFE", refuses=False, saga=saga.name, unsafe=", ".join(unsafe))
        self._create()

    def _create(self) -> None:
        open_log(self.options).create()
        open_log(self.options).open().close()

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
                raise UsageError("COLUMNS.NOT_TEXT", column=field.name, type=field.type)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        reasons = [self._reason(*row) for row in zip(column(batch, "id"), column(batch, "data"), strict=True)]
        return pa.array(reasons, pa.string()) if any(reasons) else None

    @staticmethod
    def _reason(id_: str, data: str) -> str | None:
        try:
            check_row(id_, data)
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
        raise Refused("NOT_READABLE.SAGA", saga=self.options.saga, log=self.options.log)


log = logging.getLogger(__name__)

_ROWS = 1_000


def open_log(options: SagaOptions) -> Log:
    return Log(options.log, options.password)


class SagaWriter(Writer):
    """See `delivered.contract.sink.Writer`."""

    def __init__(self, options: SagaOptions) -> None:
        self._options = options
        self._saga = load(options.saga)
        self._ids: dict[str, None] = {}

    def stage(self, batch: pa.RecordBatch) -> None:
        """Record the rows; a row that is recorded already changes nothing."""
        if not batch.num_rows:
            return
        rows = list(zip(column(batch, "id"), column(batch, "data"), strict=True))
        with contextlib.closing(open_log(self._options).open()) as opened:
            for at in range(0, len(rows), _ROWS):
                opened.begin(self._saga, rows[at : at + _ROWS])
        self._ids.update(dict.fromkeys(id_ for id_, _ in rows))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Return once every saga of the shard is at rest."""
        del fingerprint
        if self._ids:
            options = self._options
            rested = run(open_log(options), self._saga, ids=list(self._ids), threads=options.threads)
            if stuck := rested.get(Status.STUCK, 0):
                log.warning("%d sagas are stuck; see them: delivered sagas list --log %s", stuck, options.log)
        return Promise()

    def abort(self) -> None:
        """Nothing: what is recorded is run by the next attempt, or by any worker."""
