"""A source whose keys or values have a schema: its records, decoded to columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.queue import DedupWindow, ReceiverReport
from delivered.contract.source import (
    COORDINATES,
    Address,
    Offsets,
    Resumption,
    Slice,
    Source,
    SourceDriver,
)
from delivered.kits.schemas import FormatOptions, Side, version_option
from delivered.kits.schemas.avro import Unmappable
from delivered.kits.schemas.registry import Registered, connected
from delivered.kits.schemas.schema import Ask, Decoder, schema_of
from delivered.model.capability import SourceCapability
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.rows import Origin, Rejection, Rows


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
    found = connected(options.registry).find(subject, side.version)
    if found is None:
        which = "no schema" if side.version is None else f"no version {side.version}"
        raise UsageError(
            "SCHEMA_MISSING.SUBJECT", owner=owner, subject=subject, which=which, url=options.url, column=side.column
        )
    if found.kind is not side.format:
        raise UsageError(
            "SCHEMA_KIND.FORMAT", owner=owner, actual=found, kind=found.kind, column=side.column, format=side.format
        )
    return found


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
