"""Column types: which ones are supported, their canonical form for fingerprints, and invalid rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.model import ranges
from delivered.model.errors import BadRecord, UsageError


class Types(ABC):
    """A database's support of Arrow types. Stateless."""

    system: ClassVar[str]
    """Display name of the system."""
    columns_max: ClassVar[int]
    name_max: ClassVar[tuple[int, str] | None] = None
    """Length of a column's name, in bytes or characters."""
    folds_case: ClassVar[bool] = False
    """Names are case-insensitive."""
    nested_hint: ClassVar[str] = ""
    range: ClassVar[ranges.Range]
    """The values that it stores."""

    def unstorable(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The reason for each row that no table accepts, null for the others; None: all rows are valid.

        Constraints of the table are up to the database: a row that violates one fails the query.
        """
        return ranges.unstorable(self.range, batch)

    def check_values(self, batch: pa.RecordBatch) -> None:
        """Raise BadRecord for the first row that `unstorable` has a reason for."""
        ranges.check(self.system, batch, self.unstorable(batch))

    @abstractmethod
    def declared(self, kind: pa.DataType) -> str | None:
        """SQL type of a new column for a plain type; None: unsupported."""

    def keeps(self, kind: pa.DataType) -> bool:
        """Whether values of a plain type are stored without loss."""
        return self.declared(kind) is not None

    def orders(self, kind: pa.DataType) -> bool:
        """Whether values of a plain type sort as they do in Arrow and Spark."""
        t = pa.types
        return bool(t.is_integer(kind) or t.is_date32(kind) or t.is_timestamp(kind))

    def plain(self, kind: pa.DataType) -> pa.DataType:
        """The representative of all types with the same values."""
        t = pa.types
        if t.is_dictionary(kind):
            return self.plain(kind.value_type)
        if t.is_large_string(kind) or t.is_string_view(kind):
            return pa.string()
        if t.is_large_binary(kind) or t.is_binary_view(kind):
            return pa.binary()
        if t.is_timestamp(kind) and kind.tz is not None:
            return pa.timestamp(kind.unit, "UTC")
        return kind

    def plain_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of `schema` in their order, with plain types, without metadata."""
        return pa.schema([pa.field(f.name, self.plain(f.type)) for f in schema])

    def canonical_schema(self, schema: pa.Schema) -> pa.Schema:
        """Plain types, columns sorted by name: a table's column order does not matter."""
        return pa.schema(sorted(self.plain_schema(schema), key=lambda f: f.name))

    def check(self, schema: pa.Schema) -> None:
        """
        Raises:
            UsageError: a column cannot be stored.
        """
        if not 1 <= len(schema) <= self.columns_max:
            raise UsageError(
                "COLUMNS",
                f"The rows have {len(schema)} columns; a table must have 1 to {self.columns_max}.",
                next_step="select fewer columns, or put them into one of JSON",
            )
        seen: dict[str, str] = {}
        for field in schema:
            self._check_name(field.name, seen)
            if not self.keeps(self.plain(field.type)):
                nested = pa.types.is_nested(field.type)
                way = f'to_json("{field.name}")' if nested else f'col("{field.name}").cast("string")'
                raise UsageError(
                    "TYPE_UNKNOWN",
                    f"Column {field.name!r} is {field.type}; {self.system} has no type that stores it without loss.",
                    next_step=f'df.withColumn("{field.name}", {way}){self.nested_hint}',
                )

    def _check_name(self, name: str, seen: dict[str, str]) -> None:
        known = name.lower() if self.folds_case else name
        if known in seen:
            why = f"are the same to {self.system}, which ignores case" if seen[known] != name else "have the same name"
            raise UsageError(
                "COLUMN_TWICE",
                f"Columns {seen[known]!r} and {name!r} {why}.",
                next_step=f'rename one: df.withColumnRenamed("{name}", ...)',
            )
        seen[known] = name
        limit, unit = self.name_max or (None, "")
        length = len(name.encode()) if unit == "bytes" else len(name)
        if not name or "\0" in name or (limit is not None and length > limit):
            bound = f": {self.system} allows 1 to {limit} {unit}" if limit is not None else ""
            raise UsageError(
                "COLUMN_NAME",
                f"{name!r} is not a valid column name{bound}.",
                next_step="rename it: df.withColumnRenamed(...)",
            )


class ServerTypes(Types):
    """Types of a database whose columns are typed."""

    @abstractmethod
    def fitting(self, kind: pa.DataType) -> tuple[str, ...]:
        """Names of the database's types that store values of `kind` without loss, the best match first."""

    def keeps(self, kind: pa.DataType) -> bool:
        return bool(self.fitting(kind)) or bool(pa.types.is_null(kind))

    def orders(self, kind: pa.DataType) -> bool:
        return super().orders(kind) or bool(pa.types.is_decimal128(kind))

    def plain(self, kind: pa.DataType) -> pa.DataType:
        kind, t = super().plain(kind), pa.types
        if t.is_timestamp(kind) and kind.unit != "ns":
            return pa.timestamp("us", kind.tz)
        return pa.time64("us") if t.is_time(kind) and kind.unit != "ns" else kind


def shown(schema: pa.Schema) -> str:
    """Columns and types, for messages."""
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def check_widths(batch: pa.RecordBatch, widths: Mapping[str, int]) -> None:
    """
    Args:
        widths: column -> maximum number of characters.

    Raises:
        BadRecord: a text is longer; a server cuts spaces at its end without an error.
    """
    for name, width in widths.items():
        column = batch.column(name)
        longest = 0 if pa.types.is_null(column.type) else pc.max(pc.utf8_length(column)).as_py() or 0
        if longest > width:
            raise BadRecord(
                "TEXT_TOO_LONG",
                f"Column {name!r} has a text of {longest} characters; the table's column holds {width}.",
                next_step="widen the table's column, or cut the text: "
                f'df.withColumn("{name}", col("{name}").substr(1, {width}))',
            )


def check_nulls(batch: pa.RecordBatch, filled: Collection[str]) -> None:
    """
    Args:
        filled: columns whose nulls the database replaces by values of its own.

    Raises:
        BadRecord: a row has null there.
    """
    for name in filled:
        if name in batch.schema.names and batch.column(name).null_count:
            raise BadRecord(
                "NULL_FILLED",
                f"A row has null in {name!r}: the table's column holds none, and the database would store a number or "
                "time of its own, so the stored row would differ from the sent one.",
                next_step=f'df.drop("{name}"), if the database should fill it in every row; else '
                f'df.filter(col("{name}").isNotNull())',
            )
