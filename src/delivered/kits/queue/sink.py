"""A sink whose system makes sent messages visible at once, and which keeps its ledger elsewhere.

Ids of messages are stable across reruns of a batch, so consumers can detect duplicates.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.finding import Finding
from delivered.contract.sink import Committer, Sink, Writer
from delivered.kits.queue.columns import as_bytes, identified, identified_schema
from delivered.ledger import Ledgers
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.work import Prepared, Promise


class SendingSink(Sink):
    """Driver side of such a sink; subclasses write the rows.

    Attributes:
        options: with `sink_name`.
        ledgers: hold the sink's, elsewhere.
    """

    options: Any
    ledgers: Ledgers

    @property
    def name(self) -> str:
        return str(self.options.sink_name)

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        try:
            return list(self._look(guarantee))
        except DeliveredError as error:
            return [Finding.refusal(error)]

    @abstractmethod
    def _look(self, guarantee: Guarantee) -> Iterable[Finding]:
        """Findings about the live system; raises if it is unreachable."""

    def writer(
        self,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,  # noqa: ARG002 - each batch brings its own
    ) -> Writer:
        return self._writer(work, gives_up=guarantee is Guarantee.AT_MOST_ONCE)

    @abstractmethod
    def _writer(self, work: Work, *, gives_up: bool) -> Writer:
        """See `kits.queue.sink.SendingWriter`."""

    def committer(self, scope: Scope) -> Committer:
        del scope
        return Nothing()


class MessageSink(SendingSink):
    """A row is a message, with an id.

    Attributes:
        options: also with `message_id_columns`.
    """

    def check_schema(self, schema: pa.Schema) -> None:
        self._check_schema(identified_schema(self.capability().system, schema, self.options.message_id_columns))

    @abstractmethod
    def _check_schema(self, schema: pa.Schema) -> None:
        """As `check_schema`, of rows with a column message_id if one was requested."""

    @abstractmethod
    def _writer(self, work: Work, *, gives_up: bool) -> SendingWriter[Any, Any]: ...

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return self._writer(Work(Scope("p", self.name, "i"), 0, 0), gives_up=False).unsendable(batch)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_bytes(identified(batch, self.options.message_id_columns))


def sends(
    system: str, *, mechanism: str, send: str, assumes: Sequence[str], limits: Sequence[str], **more: Any
) -> SinkCapability:
    """Capability of a sink that only sends, without two-phase commit.

    Args:
        mechanism: how delivery is confirmed.
        send: how it sends, and where to.
        more: other fields of the capability.
    """
    return SinkCapability(
        system=system,
        commit=Commit.NONE,
        mechanism=mechanism,
        stage="not possible",
        prepare="not possible",
        decide="not possible",
        apply="not possible",
        send=send,
        batch_atomic=False,
        validates=True,
        assumes=tuple(assumes),
        limits=tuple(limits),
        **more,
    )


class Nothing(Committer):
    """Committer without participants: sent messages are visible at once."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Failed(f"shard {work.shard} was sent already and cannot be committed")

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        del work, prepared
        return False

    def abort(self, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        del keep
        return Ok(0)


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


class SendingWriter(Writer, Generic[Given, M]):
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
