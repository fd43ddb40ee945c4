"""Columns of records with a schema of any format, in the registry's wire format.

The wire format is a zero byte, the schema's id in four bytes, the value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol

import pyarrow as pa

from delivered.kits.schemas import Format
from delivered.kits.schemas.avro import AVRO, Shape, any_shape_of, fastavro, read_avro
from delivered.kits.schemas.registry import BadSchema, Registered
from delivered.kits.schemas.values import (
    Unmappable,
    Unreadable,
    canonical,
    differences,
    in_units_of,
    in_words,
    plain,
    text_that_is_none,
)
from delivered.model.errors import DeliveredError


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
        import io

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


def array_of(objects: list[Any], filled: pa.DataType, arrow: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Values as a column of the type `arrow`, by way of `filled`; those that do not fit it become null.

    Returns:
        the column, and by place why a value does not fit: milliseconds that overflow as microseconds, half a surrogate
        pair.
    """
    try:
        return pa.array(objects, filled).cast(arrow), {}
    except Exception:
        unfit = dict[int, str]()
    for at, value in enumerate(objects):
        try:
            pa.array([value], filled).cast(arrow)
        except Exception as error:
            objects[at], unfit[at] = None, in_words(error)
    return pa.array(objects, filled).cast(arrow), unfit
