"""A sink whose system makes sent messages visible at once, and which keeps its ledger elsewhere.

Ids of messages are stable across reruns of a batch, so consumers can detect duplicates.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import Committer, Sink, Writer
from delivered.contract.source import Finding
from delivered.ledger import Ledgers
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.patience import patiently, query_patience_s
from delivered.model.rows import EVERYTHING, too_long, unstorable
from delivered.model.work import Failed, Ok, Outcome, Prepared, Promise


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
        """See `kits.queue.SendingWriter`."""

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
    system: str, *, mechanism: str, send: str, assumes: Sequence[str], limits: Sequence[str] = (), **more: Any
) -> SinkCapability:
    """Capability of a sink that only sends, without two-phase commit.

    Args:
        mechanism: how delivery is confirmed.
        send: how it sends, and where to.
        more: other fields of the capability.
    """
    more.setdefault("no_position", "its messages cannot be read back")
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
    def sink_name(self) -> str: ...

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
        self._id = _short(f"{id_prefix(work.scope)}{work.batch}.{work.shard}")
        self._rows = 0
        self._publisher: Publisher[M] | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._publisher is None:
            self._publisher = patiently(self._options.sink_name, self._connect, patience_s=query_patience_s())
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
    def _connect(self) -> Publisher[M]:
        """Called again in a query while its server is unreachable; sends no message."""

    @abstractmethod
    def _messages(self, rows: pa.RecordBatch) -> list[M]:
        """One message per row, in order. Sends nothing; called for a row alone to find out whether it is invalid.

        Raises:
            BadRecord: a row cannot be a message. The text names its column, and no number of the row.
        """


def id_prefix(scope: Scope) -> str:
    """Of generated message ids, before batch, shard and row; but long ones are hashed."""
    # Names may contain dots, but no "%": two scopes never make the same id (P33).
    return "".join(f"{n.replace('.', '%2E')}." for n in (scope.pipeline, scope.sink, scope.incarnation))


def _short(prefix: str) -> str:
    """The same for every run of a batch; a long one ends with its hash, so that two never become one (P33)."""
    if len(prefix) <= _PREFIX_BYTES_MAX:
        return prefix
    digest = hashlib.sha256(prefix.encode()).hexdigest()
    return f"{prefix[: _PREFIX_BYTES_MAX - len(digest) - 1]}#{digest}"


TEXT = (pa.types.is_string, pa.types.is_large_string)
TEXT_OR_BYTES = (pa.types.is_binary, pa.types.is_large_binary, *TEXT)

_TYPES = {"value": TEXT_OR_BYTES, "key": TEXT_OR_BYTES, "message_id": TEXT}
COLUMNS = tuple(_TYPES)
"""In a reader's order. message_id: set by the user, replacing the generated one."""

ID = "delivered.id"
"""Header or property with a message's id, in systems whose messages have none of their own."""


def identified_schema(system: str, schema: pa.Schema, id_columns: Sequence[str]) -> pa.Schema:
    """The schema of `identified`. Raises UsageError if a column is missing, or is no text, bytes or integer."""
    if not id_columns:
        return schema
    for name in id_columns:
        type_ = schema.field(name).type if name in schema.names else None
        if type_ is None or not (pa.types.is_integer(type_) or any(fits(type_) for fits in TEXT_OR_BYTES)):
            raise UsageError(
                "COLUMNS.MESSAGE_ID",
                system=system,
                name=name,
                type=type_ or "no column",
                columns=", ".join(schema.names),
            )
    kept = [f for f in schema if f.name in ("key", "value") or f.name not in (*id_columns, "message_id")]
    return pa.schema([*kept, pa.field("message_id", pa.string())])


def identified(batch: pa.RecordBatch, id_columns: Sequence[str], *, nulls: bool = False) -> pa.RecordBatch:
    """The batch with a column message_id made of these columns. Those that are part of the id alone are dropped.

    Args:
        nulls: a row without an id gets null, instead of raising BadRecord.
    """
    if not id_columns:
        return batch
    parts = [_id_text(batch, name, nulls) for name in id_columns]
    ids = (
        parts[0] if len(parts) == 1 else _joined(parts, [pa.types.is_integer(batch.column(n).type) for n in id_columns])
    )
    ids = pc.if_else(pc.equal(ids, ""), pa.scalar(None, pa.string()), ids)
    if ids.null_count and not nulls:
        row = batch.slice(pc.index(pc.is_null(ids), True).as_py(), 1).select(id_columns).to_pylist()[0]
        raise BadRecord("MESSAGE_ID.NONE", row=row)
    kept = [n for n in batch.schema.names if n in ("key", "value") or n not in (*id_columns, "message_id")]
    return pa.RecordBatch.from_arrays([*(batch.column(n) for n in kept), ids], names=[*kept, "message_id"])


def _id_text(batch: pa.RecordBatch, name: str, nulls: bool) -> pa.Array:
    """A column as text; where it is not UTF-8, null if `nulls`, else BadRecord."""
    column = batch.column(name)
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    raw = column.cast(pa.binary())
    text = raw.view(pa.string())
    bad = unstorable(EVERYTHING, pa.record_batch([text], names=[name]))
    if bad is None:
        return text
    if not nulls:
        row = pc.index(pc.is_valid(bad), True).as_py()
        raise BadRecord("MESSAGE_ID.NOT_TEXT", row=row, value=raw[row].as_py(), name=name)
    return pc.if_else(bad.is_null(), text, pa.scalar(None, pa.string()))


def _joined(parts: Sequence[pa.Array], numbers: Sequence[bool]) -> pa.Array:
    """The values joined by "-"; where that is ambiguous, followed by "#" and the lengths of all but the last.

    Otherwise two rows could get the same id, and a reader would drop one (P33). One text among integers, such as
    topic, partition and offset, is ambiguous only with negative ones; several texts, if one of them holds a "-".

    Args:
        numbers: whether each column holds integers.
    """
    ids = pc.binary_join_element_wise(*parts, "-")
    if sum(numbers) >= len(parts) - 1:
        negative = [pc.starts_with(part, "-") for part, number in zip(parts, numbers, strict=True) if number]
        ambiguous = reduce(pc.or_, negative)
    else:
        ambiguous = pc.greater(pc.count_substring(ids, "-"), len(parts) - 1)
    lengths = [pc.utf8_length(part).cast(pa.string()) for part in parts[:-1]]
    suffix = lengths[0] if len(lengths) == 1 else pc.binary_join_element_wise(*lengths, ",")
    return pc.if_else(ambiguous, pc.binary_join_element_wise(ids, suffix, "#"), ids)


def check_types(schema: pa.Schema) -> None:
    """Raise UsageError for a column of `COLUMNS` that is neither text nor bytes."""
    for field in schema:
        if not any(fits(field.type) for fits in _TYPES[field.name]):
            raise UsageError("COLUMNS.NOT_BYTES", column=field.name, type=field.type)


def check_names(
    system: str, schema: pa.Schema, needed: Collection[str], known: Collection[str], next_step: str
) -> None:
    """Raise UsageError if a needed column is missing, or a column is unknown."""
    names = set(schema.names)
    if not set(needed) <= names <= set(known):
        raise UsageError(
            "COLUMNS.QUEUE",
            system=system,
            required=", ".join(sorted(needed)),
            optional=", ".join(sorted(set(known) - set(needed))),
            columns=", ".join(schema.names) or "no columns",
            action=next_step,
        )


def as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch's columns that are in `COLUMNS`, as bytes, as a reader sees them."""
    names = [n for n in COLUMNS if n in batch.schema.names]
    return pa.RecordBatch.from_arrays([batch.column(n).cast(pa.binary()) for n in names], names=names)


def column(rows: pa.RecordBatch, name: str, kind: pa.DataType | None = None) -> list[Any]:
    """A column's values, of this type if one is given; nulls if the column is missing."""
    if name not in rows.schema.names:
        return [None] * rows.num_rows
    values = rows.column(name)
    if kind is not None:
        values = values.cast(kind)
    try:
        return values.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        raise not_text(f"column {name!r}", error.object) from None


def text(value: str | bytes, what: str) -> str:
    """Args: what: for the error: "column 'key'". Raises BadRecord: it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise not_text(what, value) from None


def not_text(what: str, value: bytes) -> BadRecord:
    return BadRecord("NOT_TEXT", value=value, what=what)


@dataclass
class _Limit:
    accepted: int = -1
    limit: int | None = None


class ServerLimits:
    """Limits that this process has learned, by server; each is asked for once.

    A limit that is changed later is found by the next process; until then, the server itself refuses the message.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self._limits: dict[Hashable, _Limit] = {}

    def refused(self, batch: pa.RecordBatch, server: Hashable, ask: Callable[[int], int | None]) -> pa.Array | None:
        """See `delivered.contract.sink.Sink.refused_rows`: rows whose value is longer than the server accepts.

        Args:
            ask: the server's limit, if a value of so many bytes is above it; None: it is accepted.
        """
        lengths = pc.fill_null(pc.binary_length(batch.column("value").cast(pa.large_binary())), 0).cast(pa.int64())
        longest, known = pc.max(lengths).as_py() or 0, self._limits.setdefault(server, _Limit())
        if longest > known.accepted and known.limit is None:
            known.limit = ask(longest)
            if known.limit is None:
                known.accepted = longest
        if known.limit is None or longest <= known.limit:
            return None
        reasons = [
            too_long(self._system, "value", n, known.limit).message if n > known.limit else None
            for n in lengths.to_pylist()
        ]
        return pa.array(reasons, pa.string())
