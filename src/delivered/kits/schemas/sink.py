"""A sink whose keys or values have a schema: rows are encoded before they are staged.

Fingerprints and audits see the values as canonical text, which no schema version changes. The bytes name a schema, so a
batch keeps the ids that it was decided with: see `Sink.schema_columns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Committer, Sink, Writer
from delivered.contract.source import Address, Offsets, Slice
from delivered.kits.schemas import FormatOptions, Side
from delivered.kits.schemas.registry import Incompatible, Registered, connected
from delivered.kits.schemas.schema import Decoder, Encoder, schema_of, unfit
from delivered.kits.schemas.source import connected_later, find, mapped
from delivered.kits.schemas.values import canonical
from delivered.model.bad_row import plain_rows
from delivered.model.capability import SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.work import Promise

if TYPE_CHECKING:
    from delivered.ledger import Store


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
        found = list(self.sink.preflight(guarantee))
        try:
            for side in self.options.sides:
                mapped(self.owner, side, self._now(side, register=False))
        except DeliveredError as error:
            found.append(Finding.refusal(error))
        return found

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
        found = [connected(self.options.registry).by_id(ids[s.column]) for s in self.options.sides]
        if None in found:
            raise UsageError("SCHEMA_MISSING.DECIDED", owner=self.owner, schemas=dict(ids), url=self.options.url)
        return replace(self, schemas=tuple(f for f in found if f is not None))

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
            column, found = Encoder(registered, side.record, batch.column(at).type).column(batch.column(at))
            for row, why in enumerate(found):
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

    def slices(self, since: Offsets | None = None) -> Sequence[Slice]:
        return self.scan.slices(since)

    def address(self) -> Address | None:
        return self.scan.address()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        ask = connected_later(self.options)
        decoders = [(s.column, Decoder(None, s.record, ask)) for s in self.options.sides]
        for batch in self.scan.read(piece):
            made = batch
            for name, decoder in decoders:
                at = batch.schema.get_field_index(name)
                made = made.set_column(at, batch.schema.field(at), decoder.column(batch.column(at))[0])
            yield made


def _with_bytes(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    for name in columns:
        at = schema.get_field_index(name)
        if at >= 0:
            schema = schema.set(at, pa.field(name, pa.binary()))
    return schema
