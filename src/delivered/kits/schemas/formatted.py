"""A source and a sink whose keys or values have a schema, around those of a connector whose records are bytes.

Records are decoded to columns; rows are encoded before they are staged. Fingerprints and audits see the values as
canonical text, which no schema version changes. The bytes name a schema, so a batch keeps the ids that it was decided
with: see `Sink.schema_columns`.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import BoundedScan, Changes, Committer, Expired, Sink, Writer
from delivered.contract.source import (
    COORDINATES,
    Address,
    DedupWindow,
    Finding,
    Offsets,
    ReceiverReport,
    Resumption,
    Slice,
    Source,
    SourceDriver,
)
from delivered.kits.schemas import Format, FormatOptions, Side, version_option
from delivered.kits.schemas.avro import AVRO, Shape, any_shape_of, fastavro, read_avro
from delivered.kits.schemas.registry import BadSchema, Incompatible, Registered, connected
from delivered.kits.schemas.values import (
    Unmappable,
    Unreadable,
    array_of,
    canonical,
    differences,
    in_units_of,
    in_words,
    plain,
    text_that_is_none,
)
from delivered.model.capability import Guarantee, SinkCapability, SourceCapability
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.rows import Origin, Rejection, Rows, plain_rows
from delivered.model.work import Promise

if TYPE_CHECKING:
    from delivered.ledger import Store


@dataclass(frozen=True)
class FormattedSource(Source):
    """See `delivered.contract.source.Source`; what it does not decode is the inner source's.

    Attributes:
        schemas: of the columns of `options.sides`, in their order; empty: asked for when needed.
    """

    owner: str
    source: Source
    options: FormatOptions
    schemas: tuple[Registered, ...] = ()

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.source.rows_per_batch_max

    def capability(self) -> SourceCapability:
        inner = self.source.capability()
        read = "; ".join(self._described(s) for s in self.options.sides)
        return replace(
            inner,
            records="; ".join([*([inner.records] if inner.records else []), read]),
            decodes=True,
            assumes=(*inner.assumes, f"the schema registry {self.options.url} keeps the schemas that records name"),
        )

    def _described(self, side: Side) -> str:
        if side.declared is not None:
            by = "the declared schema"
        else:
            which = "the newest version" if side.version is None else f"version {side.version}"
            by = f"{which} of {self._subject(side)}"
        return f"{side.column} from {side.format} by {by}"

    def _subject(self, side: Side) -> str:
        names = getattr(self.source.address(), "names", None)
        return side.subject_of(self.owner, next(iter(names)) if names is not None and len(names) == 1 else None)

    def preflight(self) -> Sequence[Finding]:
        findings = list(self.source.preflight())
        try:
            self.planned().schema()
        except DeliveredError as error:
            findings.append(Finding.refusal(error))
        return findings

    def planned(self) -> Self:
        if self.schemas:
            return self
        schemas = tuple(self._registered(s) for s in self.options.sides)
        return replace(self, source=self.source.planned(), schemas=schemas)

    def _registered(self, side: Side) -> Registered:
        declared = side.declared_text()
        if declared is not None:
            return Registered(0, side.format, declared)
        return find(self.owner, self.options, side, self._subject(side))

    def schema(self) -> pa.Schema:
        full = self.planned()
        schema = full.source.schema()
        for side, registered in zip(self.options.sides, full.schemas, strict=True):
            kind = mapped(self.owner, side, registered)
            schema = schema.set(schema.get_field_index(side.column), pa.field(side.column, kind))
        return schema

    def newest_versions(self) -> dict[str, int]:
        open_ = [s for s in self.options.sides if s.declared is None and s.version is None]
        return {s.column: find(self.owner, self.options, s, self._subject(s)).version for s in open_}

    def by_versions(self, versions: Mapping[str, int]) -> dict[str, str]:
        return {version_option(column): str(version) for column, version in versions.items()}

    def address(self) -> Address | None:
        return self.source.address()

    def resumption(self, stopped: Offsets | str | int) -> Resumption | None:
        return self.source.resumption(stopped)

    def rate(self) -> float | None:
        return self.source.rate()

    def receivers(self) -> Sequence[ReceiverReport] | None:
        return self.source.receivers()

    def dedup_window(self) -> DedupWindow | None:
        return self.source.dedup_window()

    def wal_held_back(self) -> int | None:
        return self.source.wal_held_back()

    def recheck(self) -> None:
        self.source.recheck()

    def earlier(self, end: Offsets, until: Offsets) -> Offsets:
        return self.source.earlier(end, until)

    def raw_schema(self) -> pa.Schema:
        return self.source.raw_schema()

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        full = self.planned()
        (rows,) = full._decoded(iter([full.source.decoded(raw)]))
        return rows

    def driver(self) -> SourceDriver:
        return self.source.driver()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        full = self.planned()
        for rows in full._decoded(map(Rows, full.source.read(piece))):
            if rows.rejected:
                raise self._undecodable(rows.rejected[0])
            yield rows.good

    def read_rows(self, piece: Slice) -> Iterator[Rows]:
        full = self.planned()
        return full._decoded(full.source.read_rows(piece))

    def _decoded(self, read: Iterator[Rows]) -> Iterator[Rows]:
        ask, schema = connected_later(self.options), self.schema()
        decoders = [(s, Decoder(r, s.record, ask)) for s, r in zip(self.options.sides, self.schemas, strict=True)]
        for rows in read:
            batch, bad = rows.good, dict[int, str]()
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for side, decoder in decoders:
                columns[side.column], reasons = decoder.column(batch.column(side.column))
                for row, why in enumerate(reasons):
                    if why is not None:
                        bad.setdefault(row, f"its {side.column}: {why}")
            decoded = pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
            raw = batch.select(["key", "value"])
            if bad:
                good = pa.array([row not in bad for row in range(batch.num_rows)])
                yield Rows(decoded.filter(good), [*rows.rejected, *_rejections(batch, bad)], raw.filter(good))
            else:
                yield Rows(decoded, rows.rejected, raw)

    def _undecodable(self, rejected: Rejection) -> BadRecord:
        at = {n: getattr(rejected, n) for n in COORDINATES if getattr(rejected, n) is not None}
        return BadRecord(
            "RECORD_UNDECODABLE",
            owner=self.owner,
            position=", ".join((f"{n} {v}" for n, v in at.items())),
            reason=rejected.reason,
        )


def connected_later(options: FormatOptions) -> Ask:
    """Ask the registry, connected at the first question: an executor that knows all schemas loads no client."""
    return lambda number: connected(options.registry).by_id(number)


def find(owner: str, options: FormatOptions, side: Side, subject: str) -> Registered:
    """The version that the options name. Raises UsageError: there is none, or it is of another format."""
    schema = connected(options.registry).find(subject, side.version)
    if schema is None:
        which = "no schema" if side.version is None else f"no version {side.version}"
        raise UsageError(
            "SCHEMA_MISSING.SUBJECT", owner=owner, subject=subject, which=which, url=options.url, column=side.column
        )
    if schema.kind is not side.format:
        raise UsageError(
            "SCHEMA_KIND.FORMAT", owner=owner, actual=schema, kind=schema.kind, column=side.column, format=side.format
        )
    return schema


def mapped(owner: str, side: Side, registered: Registered) -> pa.DataType:
    """The column's type. Raises UsageError: the schema has none."""
    try:
        return schema_of(registered, side.record).arrow
    except Unmappable as error:
        raise UsageError(
            "SCHEMA_UNMAPPABLE.REGISTRY", owner=owner, registered=registered, column=side.column, error=error
        ) from None


def _rejections(batch: pa.RecordBatch, bad: Mapping[int, str]) -> Iterator[Rejection]:
    """The records with these reasons."""
    names = [n for n in (*COORDINATES, "key", "value") if n in batch.schema.names]
    for row, why in zip(batch.select(names).take(pa.array(list(bad))).to_pylist(), bad.values(), strict=True):
        position = {n: row.pop(n) for n in COORDINATES if n in row}
        yield Rejection(Origin.SOURCE, why, row, **position)


@dataclass(frozen=True)
class FormattedSink(Sink):
    """See `delivered.contract.sink.Sink`; what it does not encode is the inner sink's.

    Attributes:
        schemas: of the columns of `options.sides`, in their order; empty: not settled yet.
    """

    owner: str
    sink: Sink
    options: FormatOptions
    schemas: tuple[Registered, ...] = ()

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def routed_by(self) -> str | None:
        return self.sink.routed_by

    def capability(self) -> SinkCapability:
        inner = self.sink.capability()
        written = "; ".join(self._described(s) for s in self.options.sides)
        records = "; ".join([*([inner.records] if inner.records else []), written])
        return replace(inner, records=records, validates=True)

    def _described(self, side: Side) -> str:
        if side.declared is not None:
            by = f"the declared schema, registered under {self._subject(side)}"
        elif side.version is not None:
            by = f"version {side.version} of {self._subject(side)}"
        else:
            by = f"the newest version of {self._subject(side)} at the start"
        return f"{side.column} as {side.format} by {by}"

    def _subject(self, side: Side) -> str:
        names = getattr(self.sink.scan().address(), "names", None)
        return side.subject_of(self.owner, next(iter(names)) if names is not None and len(names) == 1 else None)

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        findings = list(self.sink.preflight(guarantee))
        try:
            for side in self.options.sides:
                mapped(self.owner, side, self._now(side, register=False))
        except DeliveredError as error:
            findings.append(Finding.refusal(error))
        return findings

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:
        return self.sink.check_ledger(scope)

    def check_guarantee(self, guarantee: Guarantee) -> None:
        self.sink.check_guarantee(guarantee)

    def check_schema(self, schema: pa.Schema) -> None:
        for side in self.options.sides:
            if side.column in schema.names and pa.types.is_binary(kind := schema.field(side.column).type):
                raise UsageError(
                    "COLUMN_TYPE.SCHEMA", owner=self.owner, column=side.column, kind=kind, format=side.format
                )
        self.sink.check_schema(self._encoded_schema(schema))

    def target_check(self) -> Callable[[pa.Schema], None] | None:
        check = self.sink.target_check()
        return None if check is None else lambda schema: check(self._encoded_schema(schema))

    def ready_target(self, schema: pa.Schema) -> None:
        self.sink.ready_target(self._encoded_schema(schema))

    def add_columns(self, schema: pa.Schema) -> None:
        self.sink.add_columns(self._encoded_schema(schema))

    def check_rows(self, schema: pa.Schema) -> None:
        for side in self.options.sides:
            self._fits(side, schema, self._now(side, register=False))

    @property
    def schema_columns(self) -> Sequence[str]:
        return [s.column for s in self.options.sides]

    def settled(self, schema: pa.Schema) -> Self:
        self.check_rows(schema)
        return replace(self, schemas=tuple(self._now(s, register=True) for s in self.options.sides))

    def schema_ids(self) -> Mapping[str, int]:
        return {s.column: r.id for s, r in zip(self.options.sides, self.schemas, strict=False)}

    def by_ids(self, ids: Mapping[str, int]) -> Self:
        schemas = [connected(self.options.registry).by_id(ids[s.column]) for s in self.options.sides]
        if None in schemas:
            raise UsageError("SCHEMA_MISSING.DECIDED", owner=self.owner, schemas=dict(ids), url=self.options.url)
        return replace(self, schemas=tuple(f for f in schemas if f is not None))

    def _now(self, side: Side, *, register: bool) -> Registered:
        """The schema to write with. Raises UsageError: there is none, or the registry refuses it."""
        declared, subject = side.declared_text(), self._subject(side)
        if declared is None:
            return find(self.owner, self.options, side, subject)
        registry = connected(self.options.registry)
        try:
            if register:
                return registry.register(subject, side.format, declared)
            if registry.accepts(subject, side.format, declared):
                return Registered(0, side.format, declared)
            why = "it is not compatible with the versions that are registered"
        except Incompatible as error:
            why = str(error)
        raise UsageError(
            "SCHEMA_REFUSED", owner=self.owner, url=self.options.url, column=side.column, subject=subject, reason=why
        )

    def _fits(self, side: Side, schema: pa.Schema, registered: Registered) -> None:
        if side.column not in schema.names:
            return
        mapped(self.owner, side, registered)
        wrong = unfit(schema.field(side.column).type, schema_of(registered, side.record), side.column)
        if wrong:
            raise UsageError(
                "SCHEMA_UNFIT", owner=self.owner, registered=registered, wrong="; ".join(wrong), column=side.column
            )

    def _encoded_schema(self, schema: pa.Schema) -> pa.Schema:
        return _with_bytes(schema, self.schema_columns)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        encoded, reasons = self._encoded(batch)
        inner = self.sink.invalid_rows(encoded)
        if not reasons:
            return inner
        own = pa.array([reasons.get(n) for n in range(batch.num_rows)], pa.string())
        return own if inner is None else pc.coalesce(own, inner)

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return self.sink.refused_rows(self.encoded(batch))

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """As the inner sink's, with canonical text in place of encoded values."""
        for side in self.options.sides:
            at = batch.schema.get_field_index(side.column)
            if at >= 0 and not pa.types.is_binary(batch.column(at).type):
                batch = batch.set_column(at, pa.field(side.column, pa.binary()), self._text(batch, at))
        return self.sink.records(batch)

    def _text(self, batch: pa.RecordBatch, at: int) -> pa.Array:
        try:
            return canonical(batch.column(at))
        except (ValueError, OverflowError):  # text that is not UTF-8, times beyond what columns hold
            self.encoded(batch)  # says which row
            raise

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        return _EncodingWriter(self, self.sink.writer(work, guarantee, self._encoded_schema(schema)))

    def encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows as the inner sink writes them. Raises BadRecord."""
        encoded, reasons = self._encoded(batch)
        if reasons:
            row, why = next(iter(reasons.items()))
            shown = str(plain_rows(batch.slice(row, 1))[0])[:300]
            raise BadRecord("RECORD_UNENCODABLE", owner=self.owner, row=row, reason=why, value=shown)
        return encoded

    def _encoded(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        if not self.schemas:
            raise InvariantBroken("SCHEMAS_UNSETTLED", owner=self.owner)
        reasons: dict[int, str] = {}
        for side, registered in zip(self.options.sides, self.schemas, strict=True):
            at = batch.schema.get_field_index(side.column)
            if at < 0:
                continue
            column, reasons_ = Encoder(registered, side.record, batch.column(at).type).column(batch.column(at))
            for row, why in enumerate(reasons_):
                if why is not None:
                    reasons.setdefault(row, f"its {side.column}: {why}")
            batch = batch.set_column(at, pa.field(side.column, pa.binary()), column)
        return batch, reasons

    def scan(self) -> BoundedScan:
        return FormattedScan(self.sink.scan(), self.options)

    def store(self, scope: Scope) -> Store:
        return self.sink.store(scope)

    def committer(self, scope: Scope) -> Committer:
        return self.sink.committer(scope)


class _EncodingWriter(Writer):
    """See `delivered.contract.sink.Writer`."""

    def __init__(self, sink: FormattedSink, writer: Writer) -> None:
        self._sink = sink
        self._writer = writer

    def stage(self, batch: pa.RecordBatch) -> None:
        self._writer.stage(self._sink.encoded(batch))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        return self._writer.prepare(fingerprint)

    def abort(self) -> None:
        self._writer.abort()


@dataclass(frozen=True)
class FormattedScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`: the sink's records, each read by the schema it was written with."""

    scan: BoundedScan
    options: FormatOptions

    def planned(self) -> Self:
        return replace(self, scan=self.scan.planned())

    def schema(self) -> pa.Schema:
        return self.scan.schema()

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        return self.scan.slices(since, until)

    def position(self) -> Offsets | None:
        return self.scan.position()

    def kept(self, position: Offsets) -> Mapping[str, Any] | None:
        return self.scan.kept(position)

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        return self.scan.changes(position, before)

    def expired(self) -> Mapping[str, Expired]:
        return self.scan.expired()

    def compacted(self) -> Sequence[str]:
        return self.scan.compacted()

    def address(self) -> Address | None:
        return self.scan.address()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        ask = connected_later(self.options)
        decoders = [(s.column, Decoder(None, s.record, ask)) for s in self.options.sides]
        for batch in self.scan.read(piece):
            decoded = batch
            for name, decoder in decoders:
                at = batch.schema.get_field_index(name)
                decoded = decoded.set_column(at, batch.schema.field(at), decoder.column(batch.column(at))[0])
            yield decoded


def _with_bytes(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    for name in columns:
        at = schema.get_field_index(name)
        if at >= 0:
            schema = schema.set(at, pa.field(name, pa.binary()))
    return schema


# Columns of records with a schema of any format, in the registry's wire format: a zero byte, the schema's id in four
# bytes, the value.


class Schema(Protocol):
    """A schema with a column type. Immutable; not picklable."""

    @property
    def arrow(self) -> pa.DataType:
        """Type of the column."""

    @property
    def filled(self) -> pa.DataType:
        """Arrow type for what `read` returns; casts to `arrow`."""

    @property
    def required(self) -> Collection[str]:
        """Fields that may not be null."""

    def read(self, data: bytes, written: Schema) -> Any:
        """A value, in this schema's fields.

        Args:
            data: without the registry's prefix of five bytes.
            written: the schema that it was written with; this one, perhaps.

        Raises:
            Unreadable, or what a library raises for the kind of garbage.
        """

    def write(self, value: Any) -> bytes:
        """The inverse of `read`, of a value as `values.plain` gives it, in units of `filled`.

        Raises:
            ValueError, TypeError, OverflowError, KeyError, AttributeError: it does not match.
        """


class AvroSchema:
    """See `Schema`."""

    def __init__(self, registered: Registered) -> None:
        self._shape: Shape = any_shape_of(AVRO, registered.text, tuple(text for _, text in registered.references))
        self.arrow, self.filled, self.required = self._shape.arrow, self._shape.filled, self._shape.required

    def read(self, data: bytes, written: Schema) -> Any:
        if not isinstance(written, AvroSchema):
            raise Unreadable("it was not written with an Avro schema")
        foreign = {} if written._shape is self._shape else written._shape.meanings
        for path, meaning in foreign.items():
            now = self._shape.meanings.get(path, meaning)
            if now != meaning:
                raise Unreadable(
                    f"field {path[1:]!r} was written as {meaning or 'a plain number'} and is read as "
                    f"{now or 'a plain number'}"
                )
        return read_avro(data, written._shape, self._shape)

    def write(self, value: Any) -> bytes:
        stream = io.BytesIO()
        fastavro().schemaless_writer(stream, self._shape.avro, value)
        return stream.getvalue()


@lru_cache(maxsize=256)
def schema_of(registered: Registered, record: str | None = None) -> Schema:
    """
    Args:
        record: the message type, of Protobuf.

    Raises:
        Unmappable: the schema has no column type.
        MissingExtra
    """
    match registered.kind:
        case Format.AVRO:
            return AvroSchema(registered)
        case Format.PROTOBUF:
            from delivered.kits.schemas.protobuf import ProtobufSchema

            return ProtobufSchema(registered, record)
        case Format.JSON_SCHEMA:
            from delivered.kits.schemas.json_schema import JsonSchema

            return JsonSchema(registered)
        case _:
            raise Unmappable(f"{registered.kind} has no schema")


def unfit(rows: pa.DataType, schema: Schema, column: str) -> list[str]:
    """Why rows of this type cannot be written with the schema; empty: they can. Args: column: "value"."""
    there = schema.arrow
    if not (pa.types.is_struct(rows) and pa.types.is_struct(there)):
        return list(differences(column, rows, there))
    fields, columns = {f.name: f.type for f in there}, {f.name: f.type for f in rows}
    problems = [w for n, kind in columns.items() if n in fields for w in differences(f"{column}.{n}", kind, fields[n])]
    problems += [f"'{column}.{n}' is not a field of the schema" for n in columns if n not in fields]
    return problems + [
        f"'{column}.{n}' may not be null, and has no column" for n in schema.required if n not in columns
    ]


_PREFIX = struct.Struct(">bI")

Ask = Callable[[int], Registered | None]
"""For the schema of an id."""


class Decoder:
    """Decodes one column on an executor. Schemas are asked for once."""

    def __init__(self, planned: Registered | None, record: str | None, ask: Ask) -> None:
        """
        Args:
            planned: the schema that all values are converted to; None: each is read as it was written, as canonical
                text; one that cannot be read stays as it is.

        Raises:
            Unmappable
        """
        self._reader = None if planned is None else schema_of(planned, record)
        self._record = record if planned is None else None
        self._ask = ask
        self._written: dict[int, Schema] = {}
        self._unusable: dict[int, str] = {}

    @property
    def type(self) -> pa.DataType:
        return pa.binary() if self._reader is None else self._reader.arrow

    def column(self, values: pa.Array) -> tuple[pa.Array, list[str | None]]:
        """The decoded values, and for each one why it cannot be decoded; None: it was."""
        decoded: list[Any] = []
        reasons: list[str | None] = []
        for data in values.to_pylist():
            try:
                decoded.append(None if data is None else self._read(data))
                reasons.append(None)
            except Unreadable as error:
                decoded.append(None if self._reader is not None else data)
                reasons.append(in_words(error))
        if self._reader is None:
            return pa.array(decoded, pa.binary()), reasons
        array, unfit = array_of(decoded, self._reader.filled, self._reader.arrow)
        for at, why in unfit.items():
            reasons[at] = why
        return array, reasons

    def _read(self, data: bytes) -> Any:
        """Raises Unreadable: whatever else decoding raises is this record's fault, and must not stop the query."""
        try:
            return self._decoded(data)
        except (Unreadable, DeliveredError):
            raise
        except Exception as error:
            raise Unreadable(in_words(error)) from None

    def _decoded(self, data: bytes) -> Any:
        if len(data) < _PREFIX.size:
            raise Unreadable(f"it has {len(data)} bytes, and the registry's format begins with {_PREFIX.size}")
        magic, number = _PREFIX.unpack_from(data)
        if magic != 0:
            raise Unreadable(f"its first byte is {data[0]:#04x}, and 0x00 in the registry's format")
        written = self._written.get(number) or self._known(number)
        value = (self._reader or written).read(data[_PREFIX.size :], written)
        if self._reader is not None:
            return value
        return canonical(pa.array([value], written.filled).cast(written.arrow))[0].as_py()

    def _known(self, number: int) -> Schema:
        why = self._unusable.get(number)
        if why is None:
            try:
                registered = self._ask(number)
                if registered is None:
                    raise Unreadable(f"the registry has no schema {number}")
                self._written[number] = schema_of(registered, self._record)
                return self._written[number]
            except Unmappable as error:
                why = f"schema {number} has no column type: {in_words(error)}"
            except BadSchema as error:
                why = f"schema {number} cannot be used: {error.message}"
            self._unusable[number] = why  # each record may name it
        raise Unreadable(why)


class Encoder:
    """Encodes one column."""

    def __init__(self, written: Registered, record: str | None, rows: pa.DataType) -> None:
        """Raises Unmappable."""
        self._schema = schema_of(written, record)
        self._prefix = _PREFIX.pack(0, written.id)
        filled = self._schema.filled
        struct_ = pa.types.is_struct(rows) and pa.types.is_struct(filled)
        names = {f.name for f in rows} if struct_ else set()
        self._absent = dict.fromkeys(f.name for f in filled if f.name not in names) if struct_ else {}
        self._units = in_units_of(rows, filled)

    def column(self, values: pa.Array) -> tuple[pa.Array, list[str | None]]:
        """The encoded values, and for each one why it cannot be encoded; None: it was."""
        try:
            objects: Sequence[Any] = plain(values.cast(self._units))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if len(values) == 1:
                return pa.nulls(1, pa.binary()), [text_that_is_none(values) or in_words(error)]
            parts = [self.column(values.slice(i, 1)) for i in range(len(values))]
            return pa.concat_arrays([c for c, _ in parts]), [r for _, each in parts for r in each]
        encoded: list[bytes | None] = []
        reasons: list[str | None] = []
        for value in objects:
            try:
                encoded.append(None if value is None else self._prefix + self._one(value))
                reasons.append(None)
            except Exception as error:  # the exception depends on what does not match
                encoded.append(None)
                reasons.append(in_words(error))
        return pa.array(encoded, pa.binary()), reasons

    def _one(self, value: Any) -> bytes:
        # A missing column is written as null, whatever the schema's default: that is what is read back.
        return self._schema.write({**self._absent, **value} if self._absent else value)
