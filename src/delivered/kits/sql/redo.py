"""A shard sent again in the same task, after its server was lost and came back."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from delivered.contract.sink import Writer
from delivered.kits.sql.database import Server
from delivered.kits.sql.transactions import PreparedRows
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.limits import REDO_MEMORY_BYTES
from delivered.model.patience import query_patience_s
from delivered.model.prepared import Promise

log = logging.getLogger("delivered.outage")
T = TypeVar("T")


class ShardWriter(Writer, Protocol):
    @property
    def possible(self) -> PreparedRows | None:
        """What `prepare` may have left at the server when it raised; None: nothing."""


class RedoWriter:
    """See `delivered.contract.sink.Writer`.

    Until a shard is prepared, losing its connection rolls it back, so it may be sent again. After an unknown outcome of
    `prepare`, too, under exactly_once: the driver never hears of the first handle, and no decision can name it; it is
    ended on the new connection. Under at_least_once that may repeat the shard; under at_most_once the task fails.

    Args:
        make: a new writer, which first ends what earlier ones may have left.
    """

    def __init__(
        self, server: Server[Any], guarantee: Guarantee, make: Callable[[Sequence[PreparedRows]], ShardWriter]
    ) -> None:
        self._server = server
        self._guarantee = guarantee
        self._make = make
        self._left: list[PreparedRows] = []
        self._writer = make(())
        self._rows = _Rows()

    def stage(self, batch: pa.RecordBatch) -> None:
        if query_patience_s():
            self._rows.add(batch)
        try:
            self._writer.stage(batch)
        except DeliveredError as error:
            self._again(error, lambda _: None)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        try:
            promise: Promise = self._writer.prepare(fingerprint)
        except DeliveredError as error:
            if self._guarantee is Guarantee.AT_MOST_ONCE:
                raise
            promise = self._again(error, lambda writer: writer.prepare(fingerprint))
        self._rows.close()
        return promise

    def abort(self) -> None:
        self._rows.close()
        self._writer.abort()

    def _again(self, error: DeliveredError, then: Callable[[ShardWriter], T]) -> T:
        if not query_patience_s() or not self._server.is_away(error):
            raise error

        def once() -> T:
            if (left := self._writer.possible) is not None:
                self._left.append(left)
            self._writer.abort()
            self._writer = self._make(self._left)
            for batch in self._rows:
                self._writer.stage(batch)
            return then(self._writer)

        log.warning("%s; sending the shard again once the server is back", error.message.rstrip("."))
        return self._server.waiting(once)


class _Rows:
    """The rows of a shard: in memory, and beyond `REDO_MEMORY_BYTES` in a temporary file."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._filed = 0
        self._file: Any = None
        self._out: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._bytes += batch.nbytes
        if self._bytes <= REDO_MEMORY_BYTES:
            self._held.append(batch)
            return
        if self._out is None:
            self._file = tempfile.NamedTemporaryFile(prefix="delivered-shard-")  # noqa: SIM115 - see `close`
            self._out = pa.ipc.new_stream(self._file, batch.schema)
        self._out.write_batch(batch)
        self._filed += 1

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """May be left early, and followed by more rows."""
        yield from self._held
        if self._filed:
            self._file.flush()
            with pa.OSFile(self._file.name) as file, pa.ipc.open_stream(file) as reader:
                for _ in range(self._filed):
                    yield reader.read_next_batch()

    def close(self) -> None:
        self._held, self._filed = [], 0
        if self._file is not None:
            self._file.close()
            self._file = self._out = None
