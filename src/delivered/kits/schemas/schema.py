"""One interface to schemas of every format."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, Protocol

import pyarrow as pa

from delivered.kits.schemas.avro import AVRO, Shape, Unmappable, Unreadable, any_shape_of, fastavro, read_avro
from delivered.kits.schemas.options import Format
from delivered.kits.schemas.registry import Registered
from delivered.kits.schemas.values import differences


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
    """Why rows of this type cannot be written with the schema; empty: they can.

    Args:
        column: "value".
    """
    there = schema.arrow
    if not (pa.types.is_struct(rows) and pa.types.is_struct(there)):
        return list(differences(column, rows, there))
    fields, columns = {f.name: f.type for f in there}, {f.name: f.type for f in rows}
    found = [w for n, kind in columns.items() if n in fields for w in differences(f"{column}.{n}", kind, fields[n])]
    found += [f"'{column}.{n}' is not a field of the schema" for n in columns if n not in fields]
    return found + [f"'{column}.{n}' may not be null, and has no column" for n in schema.required if n not in columns]
