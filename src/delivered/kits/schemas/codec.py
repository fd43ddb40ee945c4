"""Columns in the registry's wire format: a zero byte, the schema's id in four bytes, the value."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from delivered.kits.schemas.avro import Unmappable, Unreadable
from delivered.kits.schemas.registry import Registered
from delivered.kits.schemas.schema import Schema, schema_of
from delivered.kits.schemas.values import canonical, in_units_of, plain

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

    @property
    def type(self) -> pa.DataType:
        return pa.binary() if self._reader is None else self._reader.arrow

    def column(self, values: pa.Array) -> tuple[pa.Array, list[str | None]]:
        """The decoded values, and for each one why it cannot be decoded; None: it was."""
        found: list[Any] = []
        reasons: list[str | None] = []
        for data in values.to_pylist():
            try:
                found.append(None if data is None else self._read(data))
                reasons.append(None)
            except Unreadable as error:
                found.append(None if self._reader is not None else data)
                reasons.append(str(error))
        if self._reader is None:
            return pa.array(found, pa.binary()), reasons
        try:
            return _array(found, self._reader), reasons
        except _OUT_OF_RANGE:
            return self._one_by_one(found, reasons, self._reader)

    def _one_by_one(
        self, found: list[Any], reasons: list[str | None], reader: Schema
    ) -> tuple[pa.Array, list[str | None]]:
        """Find the values that do not fit the column: milliseconds that overflow as microseconds."""
        for at, value in enumerate(found):
            try:
                _array([value], reader)
            except _OUT_OF_RANGE as error:
                found[at], reasons[at] = None, str(error)[:200]
        return _array(found, reader), reasons

    def _read(self, data: bytes) -> Any:
        if len(data) < _PREFIX.size:
            raise Unreadable(f"it has {len(data)} bytes, and the registry's format begins with {_PREFIX.size}")
        magic, number = _PREFIX.unpack_from(data)
        if magic != 0:
            raise Unreadable(f"its first byte is {data[0]:#04x}, and 0x00 in the registry's format")
        written = self._written.get(number) or self._known(number)
        value = (self._reader or written).read(data[_PREFIX.size :], written)
        if self._reader is not None:
            return value
        try:
            return canonical(_array([value], written))[0].as_py()
        except _OUT_OF_RANGE as error:
            raise Unreadable(str(error)[:200]) from None

    def _known(self, number: int) -> Schema:
        found = self._ask(number)
        if found is None:
            raise Unreadable(f"the registry has no schema {number}")
        try:
            self._written[number] = schema_of(found, self._record)
        except Unmappable as error:
            raise Unreadable(f"schema {number} has no column type: {error}") from None
        return self._written[number]


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
            found: Sequence[Any] = plain(values.cast(self._units))
        except pa.ArrowInvalid as error:
            if len(values) == 1:
                return pa.nulls(1, pa.binary()), [str(error)]
            parts = [self.column(values.slice(i, 1)) for i in range(len(values))]
            return pa.concat_arrays([c for c, _ in parts]), [r for _, each in parts for r in each]
        encoded: list[bytes | None] = []
        reasons: list[str | None] = []
        for value in found:
            try:
                encoded.append(None if value is None else self._prefix + self._one(value))
                reasons.append(None)
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
                kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__}: "
                encoded.append(None)
                reasons.append(f"{kind}{error}"[:300])
        return pa.array(encoded, pa.binary()), reasons

    def _one(self, value: Any) -> bytes:
        # A missing column is written as null, whatever the schema's default: that is what is read back.
        return self._schema.write({**self._absent, **value} if self._absent else value)


_OUT_OF_RANGE = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError)


def _array(values: list[Any], schema: Schema) -> pa.Array:
    return pa.array(values, schema.filled).cast(schema.arrow)
