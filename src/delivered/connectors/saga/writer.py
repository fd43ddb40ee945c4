"""Executor side: rows are recorded as sagas, which the task then runs until they are at rest."""

from __future__ import annotations

import contextlib
import logging

import pyarrow as pa

from delivered.connectors.saga.options import SagaOptions
from delivered.kits.queue.columns import column
from delivered.model.fingerprint import Fingerprint
from delivered.model.prepared import Promise
from delivered.patterns.saga import Log, Status, run
from delivered.patterns.saga.definition import load

log = logging.getLogger(__name__)

_ROWS = 1_000


def log_of(options: SagaOptions) -> Log:
    return Log(options.log, options.password)


class SagaWriter:
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
        with contextlib.closing(log_of(self._options).open()) as opened:
            for at in range(0, len(rows), _ROWS):
                opened.begin(self._saga, rows[at : at + _ROWS])
        self._ids.update(dict.fromkeys(id_ for id_, _ in rows))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Return once every saga of the shard is at rest."""
        del fingerprint
        if self._ids:
            options = self._options
            rested = run(log_of(options), self._saga, ids=list(self._ids), threads=options.threads)
            if stuck := rested.get(Status.STUCK, 0):
                log.warning("%d sagas are stuck; see them: delivered sagas list --log %s", stuck, options.log)
        return Promise()

    def abort(self) -> None:
        """Nothing: what is recorded is run by the next attempt, or by any worker."""
