"""Executor side: staged messages are visible at once. Their ids are stable across reruns of a batch, so consumers can
detect duplicates."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.queue.columns import identified
from delivered.model.errors import BadRecord, OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.prepared import Promise

_ROWS = 1_000
OWN_ID_BYTES_MAX = 255
"""Of a generated message id: what RabbitMQ accepts."""
_PREFIX_BYTES_MAX = OWN_ID_BYTES_MAX - 20
"""A row's number, and a dot, have at most 20 digits."""

M = TypeVar("M", contravariant=True)


class HasIdColumns(Protocol):
    """Options of a sink."""

    @property
    def message_id_columns(self) -> Sequence[str]: ...


Given = TypeVar("Given", bound=HasIdColumns)


class Publisher(Protocol[M]):
    """One sending connection with many messages in flight."""

    @property
    def unconfirmed(self) -> int:
        """Number of messages in flight."""

    def send(self, messages: Sequence[M]) -> None:
        """Send; blocks while too many messages are in flight. Raises if one was rejected."""

    def flush(self) -> None:
        """Wait until every message is confirmed. Raises if one was rejected; OutcomeUnknown or Unreachable if that is
        unknown."""

    def close(self) -> None:
        """May be called again."""


class SendingWriter(ABC, Generic[Given, M]):
    """
    Args:
        options: with `message_id_columns`.
        gives_up: at_most_once: unconfirmed messages are counted as given up and not sent again.
    """

    def __init__(self, options: Given, work: Work, gives_up: bool) -> None:
        self._options = options
        self._gives_up = gives_up
        scope = work.scope
        # Names may contain dots, but no "%": two scopes never make the same id (P33).
        names = (n.replace(".", "%2E") for n in (scope.pipeline, scope.sink, scope.incarnation))
        self._id = _short(".".join((*names, str(work.batch), str(work.shard))))
        self._rows = 0
        self._publisher: Publisher[M] | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._publisher is None:
            self._publisher = self._connect()
        batch = identified(batch, self._options.message_id_columns)
        for at in range(0, batch.num_rows, _ROWS):
            part, before = batch.slice(at, _ROWS), self._rows
            try:
                messages = self._messages(part)
            except BadRecord as error:
                row, own = next(self._invalid(part), (0, error))  # the part's may be another row's
                raise (own if isinstance(own, BadRecord) else error).placed(f"Row {before + row} of a shard") from own
            self._publisher.send(messages)

    def unsendable(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The reason for each row that cannot be a message, null for the others; None: all can. Sends nothing."""
        columns = self._options.message_id_columns
        rows, reasons = identified(batch, columns, nulls=True), dict[int, str]()
        if columns:
            why = f"no message id: {', '.join(map(repr, columns))} is null, empty or not UTF-8"
            reasons = dict.fromkeys(pc.indices_nonzero(pc.is_null(rows.column("message_id"))).to_pylist(), why)
        for at, error in self._invalid(rows):
            reasons.setdefault(
                at, error.message if isinstance(error, BadRecord) else f"{type(error).__name__}: {error}"
            )
        return pa.array([reasons.get(at) for at in range(rows.num_rows)], pa.string()) if reasons else None

    def _invalid(self, rows: pa.RecordBatch) -> Iterator[tuple[int, Exception]]:
        """Rows that cannot be messages, in their order, each with its error: found by halving."""
        left = [(at, min(_ROWS, rows.num_rows - at)) for at in range(0, rows.num_rows, _ROWS)][::-1]
        while left:
            at, count = left.pop()
            try:
                self._messages(rows.slice(at, count))
            except (BadRecord, ValueError, ArithmeticError, pa.ArrowException) as error:
                if count == 1:
                    yield at, error
                else:
                    left += [(at + count // 2, count - count // 2), (at, count // 2)]

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        del fingerprint
        publisher = self._publisher
        if publisher is None:
            return Promise()
        try:
            publisher.flush()
        except (OutcomeUnknown, Unreachable):
            if not self._gives_up:
                raise
            return Promise(given_up={"unconfirmed": publisher.unconfirmed})
        finally:
            publisher.close()
        return Promise()

    def abort(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _next_id(self) -> str:
        """Message id of the next row of this shard."""
        message_id = f"{self._id}.{self._rows}"
        self._rows += 1
        return message_id

    @abstractmethod
    def _connect(self) -> Publisher[M]: ...

    @abstractmethod
    def _messages(self, rows: pa.RecordBatch) -> list[M]:
        """One message per row, in order. Sends nothing; called for a row alone to find out whether it is invalid.

        Raises:
            BadRecord: a row cannot be a message. The text names its column, and no number of the row.
        """


def _short(prefix: str) -> str:
    """The same for every run of a batch; a long one ends with its hash, so that two never become one (P33)."""
    if len(prefix) <= _PREFIX_BYTES_MAX:
        return prefix
    digest = hashlib.sha256(prefix.encode()).hexdigest()
    return f"{prefix[: _PREFIX_BYTES_MAX - len(digest) - 1]}#{digest}"
