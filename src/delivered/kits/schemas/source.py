"""A source whose keys or values have a schema: its records, decoded to columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.finding import Finding
from delivered.contract.queue import DedupWindow, ReceiverReport
from delivered.contract.source import (
    COORDINATES,
    RAW,
    REJECTED,
    Address,
    Offsets,
    Resumption,
    Slice,
    Source,
    SourceDriver,
)
from delivered.kits.schemas.avro import Unmappable
from delivered.kits.schemas.options import FormatOptions, Side, version_option
from delivered.kits.schemas.registry import Registered, connected
from delivered.kits.schemas.schema import Ask, Decoder, schema_of
from delivered.model.capability import SourceCapability
from delivered.model.errors import BadRecord, DeliveredError, UsageError


@dataclass(frozen=True)
class FormattedSource(Source):
    """See `delivered.contract.source.Source`; what it does not decode is the inner source's.

    Attributes:
        schemas: of the columns of `options.sides`, in their order; empty: asked for when needed.
        rejects: records that cannot be decoded do not fail the read.
        kept: they become rows with the column REJECTED.
        raw: rows have the column RAW.
    """

    owner: str
    source: Source
    options: FormatOptions
    schemas: tuple[Registered, ...] = ()
    rejects: bool = False
    kept: bool = False
    raw: bool = False

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
        found = list(self.source.preflight())
        try:
            self.planned().schema()
        except DeliveredError as error:
            found.append(Finding.refusal(error))
        return found

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
        schema = _without_rejected(full.source.schema())
        for side, registered in zip(self.options.sides, full.schemas, strict=True):
            kind = mapped(self.owner, side, registered)
            schema = schema.set(schema.get_field_index(side.column), pa.field(side.column, kind))
        schema = schema.append(RAW) if self.raw else schema
        return schema.append(REJECTED) if self.kept else schema

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

    def rejecting(self, *, kept: bool, raw: bool = False) -> Self:
        return replace(self, source=self.source.rejecting(kept=kept), rejects=True, kept=kept, raw=raw)

    def raw_schema(self) -> pa.Schema:
        return self.source.raw_schema()

    def decoded(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        full = self.planned()
        return full._decoded(full.source.decoded(raw), full._decoders(), full.schema())

    def driver(self) -> SourceDriver:
        return self.source.driver()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        full = self.planned()
        decoders, schema = full._decoders(), full.schema()
        for batch in full.source.read(piece):
            yield self._decoded(batch, decoders, schema)

    def _decoders(self) -> list[tuple[Side, Decoder]]:
        ask = connected_later(self.options)
        return [(s, Decoder(r, s.record, ask)) for s, r in zip(self.options.sides, self.schemas, strict=True)]

    def _decoded(
        self, batch: pa.RecordBatch, decoders: Sequence[tuple[Side, Decoder]], schema: pa.Schema
    ) -> pa.RecordBatch:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        bad: dict[int, str] = {}
        for side, decoder in decoders:
            columns[side.column], reasons = decoder.column(batch.column(side.column))
            for row, why in enumerate(reasons):
                if why is not None:
                    bad.setdefault(row, f"its {side.column}: {why}")
        if bad and not self.rejects:
            raise self._undecodable(batch, *next(iter(bad.items())))
        if self.raw:
            parts = [batch.column(f.name).cast(f.type) for f in RAW.type]
            columns[RAW.name] = pa.StructArray.from_arrays(parts, fields=list(RAW.type))
        if self.kept:
            already = columns.get(REJECTED.name)
            own = _rejected(batch, bad)
            columns[REJECTED.name] = own if already is None else pc.if_else(pc.is_valid(already), already, own)
        made = pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
        if bad and not self.kept:
            made = made.filter(pa.array([row not in bad for row in range(made.num_rows)]))
        return made

    def _undecodable(self, batch: pa.RecordBatch, row: int, why: str) -> BadRecord:
        at = {n: batch.column(n)[row].as_py() for n in COORDINATES if n in batch.schema.names}
        return BadRecord(
            "RECORD_UNDECODABLE",
            f"{self.owner}: the record at {', '.join(f'{n} {v}' for n, v in at.items())} cannot be decoded: {why}. "
            "Nothing of its batch counts, and nothing was skipped.",
            next_step="register the schema that is missing; or set on_bad_row: dead_letter with a dead_letter sink, "
            "which keeps such records with their bytes (docs/schemas.md)",
        )


def connected_later(options: FormatOptions) -> Ask:
    """Ask the registry, connected at the first question: an executor that knows all schemas loads no client."""
    return lambda number: connected(options.registry).by_id(number)


def find(owner: str, options: FormatOptions, side: Side, subject: str) -> Registered:
    """The version that the options name. Raises UsageError: there is none, or it is of another format."""
    found = connected(options.registry).find(subject, side.version)
    if found is None:
        which = "no schema" if side.version is None else f"no version {side.version}"
        raise UsageError(
            "SCHEMA_MISSING",
            f"{owner}: the subject {subject!r} has {which} in the registry {options.url}.",
            next_step=f'register one; or declare it: .option("{side.column}.schema", "file:/data/order.avsc")',
        )
    if found.kind is not side.format:
        raise UsageError(
            "SCHEMA_KIND",
            f"{owner}: {found} is {found.kind}, and {side.column}.format is {side.format}.",
            next_step=f"set {side.column}.format to {found.kind}",
        )
    return found


def mapped(owner: str, side: Side, registered: Registered) -> pa.DataType:
    """The column's type. Raises UsageError: the schema has none."""
    try:
        return schema_of(registered, side.record).arrow
    except Unmappable as error:
        raise UsageError(
            "SCHEMA_UNMAPPABLE",
            f"{owner}: {registered} has no column type for the {side.column}: {error}.",
            next_step=f"set {side.column}.format to bytes, and decode it yourself",
        ) from None


def _without_rejected(schema: pa.Schema) -> pa.Schema:
    at = schema.get_field_index(REJECTED.name)
    return schema if at < 0 else schema.remove(at)


def _rejected(batch: pa.RecordBatch, bad: dict[int, str]) -> pa.Array:
    kind = REJECTED.type
    if not bad:
        return pa.nulls(batch.num_rows, kind)
    names = [f.name for f in kind if f.name in (*COORDINATES, "key", "value") and f.name in batch.schema.names]
    rows = batch.select(names).take(pa.array(list(bad))).to_pylist()
    found = {at: {**row, "reason": why} for (at, why), row in zip(bad.items(), rows, strict=True)}
    return pa.array([found.get(n) for n in range(batch.num_rows)], kind)
