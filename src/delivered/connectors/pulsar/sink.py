"""The sink: rows become messages, encoded by a schema. `publisher.py` sends them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.pulsar import BYTES_MAX, EARLIEST, LATEST, PulsarSinkOptions, SourceOptions, Where, physical
from delivered.connectors.pulsar.client import Admin, Registered
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.contract.source import Finding
from delivered.kits.queue import ID, TEXT, MessageSink, SendingWriter, check_names, column, identified, text
from delivered.kits.schemas.avro import JSON, fastavro, shape_of
from delivered.kits.schemas.values import (
    BadValue,
    Unmappable,
    Unreadable,
    canonical,
    differences,
    in_units_of,
    is_list,
    plain,
)
from delivered.ledger import Ledgers, Store
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Promise
from delivered.source import HEADERS

if TYPE_CHECKING:
    from delivered.clients.pulsar.producer import Message

_COLUMNS = ("key", "value", "headers", "event_time", "message_id")


@dataclass(frozen=True)
class PulsarSink(MessageSink):
    options: PulsarSinkOptions
    ledgers: Ledgers | None = None  # type: ignore[assignment]

    def store(self, scope: Scope) -> Store:
        if self.ledgers is not None:
            return self.ledgers.store(scope)
        from delivered.connectors.pulsar.store import PulsarStore  # tasks do without it

        return PulsarStore(self.options, self.options.namespace, scope)

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:
        if self.ledgers is not None:
            return ()
        from delivered.connectors.pulsar.store import check_protected

        return check_protected(self.options, self.options.namespace, scope)

    def capability(self) -> SinkCapability:
        label, timeout_s = self.options.label, self.options.transaction_timeout_s
        return SinkCapability(
            system="pulsar",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"pulsar {label}: a transaction for each shard, invisible to readers",
            prepare="every message and a marker in the same transaction acknowledged; transaction left open",
            decide="one record in the ledger, by the one driver that owns it",
            apply="END_TXN(commit) for each shard, from the driver",
            send=f"pulsar {label}: every message acknowledged by the broker",
            batch_atomic=False,
            validates=True,
            no_position="",
            prepared_timeout_s=float(timeout_s),
            assumes=(
                f"the ledger {self._ledger} is kept as long as the checkpoint",
                "a replayed batch gives the same rows (only needed if the query keeps state or a transaction expired: "
                f"{timeout_s:,} s after it was opened)",
            ),
            transaction_limits=(
                "brokers have transactionCoordinatorEnabled=true",
                f"a batch must be decided, and applied by a start, within {timeout_s:,} s (transactionTimeout); after "
                "that its shards are written again from the source",
                "while a batch is open, readers of its partitions wait for what was sent behind it; readers may see "
                "some shards of a batch before the others",
            ),
            repeats="a replayed batch with the same rows in the same order has the same properties delivered.id, so "
            "that readers can detect duplicates",
        )

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        if guarantee is Guarantee.EXACTLY_ONCE:
            return TransactionalWriter(self.options, work)
        return super().writer(work, guarantee, schema)

    def committer(self, scope: Scope) -> Committer:
        from delivered.connectors.pulsar.committer import PulsarCommitter

        return PulsarCommitter(self.options, scope)

    @property
    def _ledger(self) -> str:
        return self.options.ledger or f"in Pulsar, in topics of {self.options.namespace.partition('://')[2]},"

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:

        options = self.options
        admin = Admin(options)
        count = admin.partitions(options.topic)
        topics = [physical((options.topic, n)) for n in (range(count) if count else (-1,))]
        known = [admin.deduplicates(topic) for topic in topics]
        known_schema = admin.schema(options.topic) if options.schema is not None else None
        check_connection(options, None if known_schema is None else (known_schema.kind, known_schema.text))
        if guarantee is Guarantee.AT_MOST_ONCE and not all(known):
            return [Finding.build("DEDUPLICATION_OFF", refuses=True, only=Guarantee.AT_MOST_ONCE, label=options.label)]
        if guarantee is Guarantee.EXACTLY_ONCE:
            from delivered.connectors.pulsar.committer import check_transactions

            return check_transactions(options, admin)
        return []

    def _check_schema(self, schema: pa.Schema) -> None:
        action = "select these columns, for example selectExpr('key', 'to_json(struct(*)) AS value')"
        check_names("pulsar", schema, {"value"}, _COLUMNS, action)
        if self.options.schema is not None:
            check_type(self.options, schema.field("value").type)
        for field in schema:
            if field.name == "value" and self.options.schema is not None:
                continue
            wanted = _wanted(field)
            if wanted is not None:
                raise UsageError("COLUMN_TYPE.PULSAR", column=field.name, type=field.type, wanted=wanted)

    def ready_target(self, schema: pa.Schema) -> None:
        """Register the rows' schema, or check them against the topic's."""
        if self.options.schema is not None:
            register(Admin(self.options), self.options, schema.field("value").type)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """key and value, a struct as text. Properties and event time are not compared: the sink adds properties."""
        batch = identified(batch, self.options.message_id_columns)
        if self.options.schema is not None:
            at = batch.schema.get_field_index("value")
            batch = batch.set_column(at, "value", canonical(batch.column(at)))
        n = batch.num_rows
        columns = [
            batch.column(c).cast(pa.binary()) if c in batch.schema.names else pa.nulls(n, pa.binary())
            for c in ("key", "value")
        ]
        # An empty key counts as none: readers cannot distinguish them.
        columns[0] = pc.if_else(pc.equal(pc.binary_length(columns[0]), 0), pa.scalar(None, pa.binary()), columns[0])
        return pa.RecordBatch.from_arrays(columns, names=["key", "value"])

    def _writer(self, work: Work, *, gives_up: bool) -> SendingWriter[Any, Any]:

        return PulsarWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        from delivered.connectors.pulsar.scan import PulsarScan
        from delivered.connectors.pulsar.source import PulsarSource

        options = self.options
        source = PulsarSource(
            SourceOptions(
                url=options.url,
                admin_url=options.admin_url,
                token=options.token,
                trusted=options.trusted,
                certificate=options.certificate,
                key=options.key,
                topics=(options.topic,),
                starting=Where("startingOffsets", EARLIEST),
                ending=Where("endingOffsets", LATEST),
                typed=options.schema is not None,
                canonical=options.schema is not None,
            )
        )
        return PulsarScan(source)


def _wanted(field: pa.Field) -> str | None:
    """The type a column must have, if it has another."""
    kind = field.type
    match field.name:
        case "key" | "value":
            tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
            return None if any(fits(kind) for fits in (*tests, pa.types.is_null)) else "text or binary"
        case "headers":
            return None if kind.equals(HEADERS.type) else "array<struct<key: string, value: binary>>"
        case "message_id":
            return None if any(fits(kind) for fits in TEXT) else "text"
    return None if pa.types.is_timestamp(kind) else "timestamp"


# Schemas in the sink: the one to write with, and the encoding of rows.
#
# A topic's schema is kept if the rows match; missing columns are added to it as nullable fields. A topic without a
# schema gets one derived from the columns.

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KINDS: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.bool_(), "boolean"),
    *((t, "int") for t in (pa.int8(), pa.int16(), pa.int32())),
    (pa.int64(), "long"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    *((t, "string") for t in (pa.string(), pa.large_string())),
    *((t, "bytes") for t in (pa.binary(), pa.large_binary())),
    (pa.date32(), {"type": "int", "logicalType": "date"}),
)


class Unfit(ValueError):
    """Rows that do not match the registered schema; the text names the difference."""


@dataclass(frozen=True)
class Settled:
    """The schema that rows are written with.

    Attributes:
        text: of the schema, registered or to be registered.
        added: fields missing from the registered one.
    """

    kind: str
    text: str
    added: tuple[str, ...]


def settled(kind: str, rows: pa.StructType, known: Registered | None) -> Settled:
    """
    Args:
        rows: type of the column value.
        known: the topic's schema.

    Raises:
        Unfit: the rows do not match it, even with added fields.
        Unmappable: a column has no Avro type, or a registered field no column type.
    """
    schema = derived(kind, rows)
    if known is None:
        return Settled(kind, json.dumps(schema), ())
    if known.kind != kind:
        raise Unfit(f"it is {known.kind}, but the option schema is {kind.lower()}")
    shape = shape_of(kind, known.text)
    document = json.loads(known.text)
    there = {f.name: f for f in shape.arrow}
    wrong = [w for f in rows if f.name in there for w in differences(f.name, f.type, there[f.name].type)]
    columns = {f.name for f in rows}
    wrong += [f"{n!r} may not be null there, and has no column" for n in shape.required if n not in columns]
    if wrong:
        raise Unfit("; ".join(wrong))
    added = [f for f in schema["fields"] if f["name"] not in there]
    if not added:
        return Settled(kind, known.text, ())
    document["fields"] = [*document["fields"], *added]
    return Settled(kind, json.dumps(document), tuple(f["name"] for f in added))


def derived(kind: str, rows: pa.DataType) -> dict[str, Any]:
    """A schema derived from a struct type, all fields nullable. Raises Unmappable."""
    if not pa.types.is_struct(rows):
        raise Unmappable(f"it is {rows}")
    schema: dict[str, Any] = _avro(rows, "", "Value")
    shape_of(kind, json.dumps(schema))
    return schema


class Encoder:
    """Encodes rows of one type."""

    def __init__(self, settled: Settled, rows: pa.StructType) -> None:
        self._kind = settled.kind
        self._shape = shape_of(settled.kind, settled.text)
        # A missing column is written as null, whatever the schema's default: that is what is read back.
        self._absent = dict.fromkeys(f.name for f in self._shape.filled if f.name not in {r.name for r in rows})
        self._units = in_units_of(rows, self._shape.filled)

    def encode(self, values: pa.Array) -> list[bytes | None]:
        """Raises BadValue for the first value that does not match."""
        try:
            objects = plain(values.cast(self._units))
        except pa.ArrowInvalid as error:
            raise BadValue(str(error)) from None
        encoded: list[bytes | None] = []
        for value in objects:
            try:
                encoded.append(None if value is None else self._one({**self._absent, **value}))
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
                kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__}: "
                raise BadValue(f"{kind}{error}") from None
        return encoded

    def _one(self, value: dict[str, Any]) -> bytes:
        if self._kind == JSON:
            self._shape.of_json(value)  # what a reader does
            return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        stream = io.BytesIO()
        fastavro().schemaless_writer(stream, self._shape.avro, value)
        return stream.getvalue()


def _avro(kind: pa.DataType, path: str, name: str) -> Any:
    """Not nullable: the caller adds that."""
    for known, avro in _KINDS:
        if kind.equals(known):
            return avro
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": f"{'local-' if kind.tz is None else ''}timestamp-micros"}
    if pa.types.is_decimal128(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_map(kind) and (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
        return {"type": "map", "values": _optional(kind.item_type, f"{path}{{}}", name)}
    if is_list(kind):
        return {"type": "array", "items": _optional(kind.value_type, f"{path}[]", name)}
    if pa.types.is_struct(kind):
        return {"type": "record", "name": name, "fields": [_field(f, path, name) for f in kind]}
    raise Unmappable(f"column {path[1:]!r} is {kind}, which has no Avro type")


def _field(field: pa.Field, path: str, name: str) -> dict[str, Any]:
    if not _NAME.fullmatch(field.name):
        raise Unmappable(
            f"column {(path + '.' + field.name)[1:]!r}: Avro names consist of ASCII letters, digits and underscores"
        )
    kind = _optional(field.type, f"{path}.{field.name}", f"{name}_{field.name}")
    return {"name": field.name, "type": kind, "default": None}


def _optional(kind: pa.DataType, path: str, name: str) -> list[Any]:
    return ["null", _avro(kind, path, name)]


def check_type(options: PulsarSinkOptions, rows: pa.DataType) -> None:
    """Raise UsageError if rows of this type have no schema. Sends no request."""
    try:
        derived(str(options.schema), rows)
    except Unmappable as error:
        raise UsageError("COLUMN_TYPE.PULSAR_SCHEMA", schema=str(options.schema).lower(), error=error) from None


def settle(admin: Admin, options: PulsarSinkOptions, rows: pa.StructType) -> Settled:
    """The schema to write with, given the topic's current one. Does not register it.

    Raises:
        UsageError: the rows do not match the registered schema.
    """
    known = admin.schema(options.topic)
    try:
        return settled(str(options.schema), rows, known)
    except (Unfit, Unmappable) as error:
        version = "" if known is None else f", version {known.version},"
        raise UsageError("SCHEMA_INCOMPATIBLE.ROWS", label=options.label, version=version, error=error) from None


# Executor side: rows to messages, sent asynchronously, with acknowledgements counted.
#
# Each message has the property delivered.id. The broker's deduplication is not used against replays: it compares only
# sequence numbers, and would drop rows that come in another order.


def check_connection(options: PulsarSinkOptions, schema: tuple[str, str] | None = None) -> None:
    """Raise Unreachable or UsageError if the topic cannot be written to. It must exist, or this would create it.

    Args:
        schema: kind and text; registered if missing.
    """
    from delivered.connectors.pulsar.publisher import Publisher  # where there are no rows, nothing loads its client

    Publisher(options, schema).close()


def register(admin: Admin, options: PulsarSinkOptions, rows: pa.StructType) -> None:
    """Register the rows' schema for the topic.

    Raises:
        UsageError: the rows do not match the registered schema, or the brokers rejected added fields.
    """
    settled = settle(admin, options, rows)
    try:
        check_connection(options, (settled.kind, settled.text))
    except UsageError as error:
        if error.code != "DELIVERED_SCHEMA_INCOMPATIBLE":
            raise
        what = f"with the added fields {', '.join(settled.added)}" if settled.added else "of the rows"
        raise UsageError("SCHEMA_INCOMPATIBLE.UPLOAD", what=what, label=options.label) from None


class PulsarWriter(SendingWriter[PulsarSinkOptions, "Message"]):
    def __init__(self, options: PulsarSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(options, work, gives_up)
        self._settled: Settled | None = None
        self._encoder: Encoder | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._encoder is None and self._options.schema is not None:
            rows = batch.schema.field("value").type
            self._settled = settle(Admin(self._options, patient=True), self._options, rows)
            self._encoder = Encoder(self._settled, rows)
        super().stage(batch)

    def unsendable(self, batch: pa.RecordBatch) -> pa.Array | None:
        """With a schema derived from the rows: the topic's takes the same values."""
        if self._encoder is None and self._options.schema is not None:
            rows = batch.schema.field("value").type
            self._encoder = Encoder(settled(str(self._options.schema), rows, None), rows)
        return super().unsendable(batch)

    def _connect(self) -> Any:
        from delivered.connectors.pulsar.publisher import Publisher

        settled = self._settled
        return Publisher(self._options, None if settled is None else (settled.kind, settled.text), self._gives_up)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        from delivered.clients.pulsar.producer import Message

        encoder = self._encoder
        columns = (
            column(rows, "value", pa.binary()) if encoder is None else self._encoded(encoder, rows.column("value")),
            column(rows, "key", pa.binary()),
            column(rows, "headers"),
            _event_times(rows),
            column(rows, "message_id", pa.binary()),
        )
        messages = []
        for value, key, pairs, time, id_ in zip(*columns, strict=True):
            properties = _properties(pairs or ())
            own = self._next_id()
            properties[ID] = text(id_ or b"", "column 'message_id'")
            self._check_size(value, key, properties)
            if not id_:
                properties[ID] = own
            messages.append(Message(value, text(key, "column 'key'") if key else None, properties, time))
        return messages

    def _encoded(self, encoder: Encoder, values: pa.Array) -> list[bytes | None]:
        try:
            return encoder.encode(values)
        except BadValue as error:
            raise BadRecord("VALUE.PULSAR", label=self._options.label, error=error) from None

    def _check_size(self, value: bytes | None, key: bytes | None, properties: dict[str, str]) -> None:
        """Check before the client does, which does not say which row it is. Brokers end the connection at a frame that
        is too long, which the client then sends again.

        Args:
            properties: with an empty id if it is our own, whose length depends on the batch: brokers take 10 KiB more.
        """
        longest = self._options.bytes_max
        lengths = {
            # Of each chunk, too, and twice in a batch of messages: the client sends the key with the batch as well.
            "key": len(key or b"") * (1 if longest is None else 2),
            "headers": sum(_property_bytes(name, text) for name, text in properties.items()),
        }
        if longest is not None:
            lengths["value"] = len(value or b"")
        size = sum(lengths.values())
        if size <= (BYTES_MAX if longest is None else longest):
            return
        largest = max(lengths, key=lambda name: lengths[name])
        parts = (
            "'key' and 'headers', which each chunk holds" if longest is None else "'value', 'key' (twice) and 'headers'"
        )
        chunks = longest is not None and largest == "value"
        raise BadRecord(
            "RECORD_TOO_LARGE.PULSAR",
            label=self._options.label,
            size=size,
            parts=parts,
            largest=largest,
            limit=BYTES_MAX if longest is None else longest,
            alternative="set the option chunking to true, or " if chunks else "",
        )


class TransactionalWriter(PulsarWriter):
    """exactly_once. The transaction is opened by the first rows; without rows there is none."""

    def __init__(self, options: PulsarSinkOptions, work: Work) -> None:
        super().__init__(options, work, gives_up=False)
        self._work = work

    def _connect(self) -> Any:
        from delivered.connectors.pulsar.publisher import OpenShard  # where there are no rows, nothing loads its client

        settled = self._settled
        return OpenShard(self._options, self._work, None if settled is None else (settled.kind, settled.text))

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            super().stage(batch)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Rows and marker acknowledged; the transaction stays open."""
        shard: Any = self._publisher
        if shard is None:
            return Promise()
        handle = shard.prepare(fingerprint)
        self._publisher = None  # from here on it belongs to the driver
        return Promise(handle)

    def abort(self) -> None:
        shard: Any = self._publisher
        self._publisher = None
        if shard is not None:
            shard.abort()


def _property_bytes(name: str, text: str) -> int:
    """As Protocol Buffers write it: each text, and both together, with a tag and a length."""
    size = 0
    for part in (name.encode(), text.encode()):
        size += 1 + _length_bytes(len(part)) + len(part)
    return 1 + _length_bytes(size) + size


def _length_bytes(length: int) -> int:
    return max(1, -(-length.bit_length() // 7))


def _properties(pairs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The properties of a row's headers; a header without a value has an empty one.

    Raises:
        BadRecord: a header without a name; two of one name, of which Pulsar would keep one; a value that is no text.
    """
    properties: dict[str, str] = {}
    for header in pairs:
        name = header["key"]
        if name is None or name in properties:
            raise BadRecord("HEADERS.UNNAMED" if name is None else "HEADERS.TWICE", name=name)
        properties[name] = text(header["value"] or b"", "column 'headers'")
    return properties


def _event_times(rows: pa.RecordBatch) -> list[int | None]:
    """In milliseconds.

    Raises:
        BadRecord: a time that a message cannot have: with microseconds, or not after 1970, as 0 stands for none.
    """
    if "event_time" not in rows.schema.names:
        return [None] * rows.num_rows
    times = rows.column("event_time")
    ms = times.cast(pa.timestamp("ms", times.type.tz), safe=False)
    rest = pc.not_equal(ms.cast(times.type, safe=False), times)
    early = pc.less_equal(ms.cast(pa.int64()), 0)
    for refused, why in ((rest, "has a fraction of a millisecond"), (early, "is not after 1970-01-01")):
        if pc.any(refused).as_py():
            raise _bad_time(times.filter(refused)[0], why)
    return ms.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]


def _bad_time(time: pa.Scalar, why: str) -> BadRecord:
    shown = np.datetime64(time.value, time.type.unit)
    return BadRecord("EVENT_TIME", value=shown, reason=why)
