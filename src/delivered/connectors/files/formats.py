"""Writes rows to files and reads them back, in bounded memory and without loss.

Parquet  booleans, numbers, texts, bytes, dates, times, lists, structs, maps
JSON     the same; bytes in base64, decimals and times as text; map keys must be texts
CSV      booleans, numbers, texts, dates, times
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from delivered.connectors.files import FilesOptions, schema_file
from delivered.kits.table import target
from delivered.model.errors import UsageError


class FilesTypes(target.TableTypes):
    system = "files"
    table = "a file"


TYPES = FilesTypes()


def check(options: FilesOptions, schema: pa.Schema) -> None:
    """Raises UsageError: no columns, duplicate names, a column named `batch`, or an unsupported type."""
    if not target.named_once(schema) or "batch" in (name.lower() for name in schema.names):
        raise UsageError("COLUMNS.FILES", columns=schema.names)
    if options.format == "csv" and len(schema) == 1:
        raise UsageError("COLUMNS.CSV_ONE", column=schema.names[0])
    for field in TYPES.canonical_schema(schema):
        fits = options.format == "parquet" or (_json(field.type) if options.format == "json" else _csv(field.type))
        target.kept(field, field.type if fits else None, f"a {options.format} file")


def _json(kind: pa.DataType) -> bool:
    t = pa.types
    if t.is_map(kind):
        return bool(t.is_string(kind.key_type)) and _json(kind.item_type)
    if t.is_list(kind):
        return _json(kind.value_type)
    return all(_json(f.type) for f in kind) if t.is_struct(kind) else True


def _csv(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind))


GROUP_ROWS = 1 << 20
GROUP_BYTES = 32 << 20
"""Size of a Parquet row group."""
BATCH_ROWS = 16_384


class Encoder(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None:
        """Finish the content; the file stays open."""


def encoder(format: str, file: Any, schema: pa.Schema) -> Encoder:  # noqa: A002
    kinds: dict[str, Callable[[Any, pa.Schema], Encoder]] = {"parquet": _Parquet, "json": _Json, "csv": _Csv}
    return kinds[format](file, schema)


def decode(format: str, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:  # noqa: A002
    return {"parquet": _from_parquet, "json": _from_json, "csv": _from_csv}[format](path, schema)


class _Parquet:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(file, schema)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._waiting), row_group_size=GROUP_ROWS)
            self._waiting, self._rows, self._bytes = [], 0, 0


class _Csv:
    """Quotes texts but not NULL, to distinguish it from an empty text."""

    def __init__(self, file: Any, schema: pa.Schema) -> None:
        from pyarrow import csv

        options = csv.WriteOptions(include_header=True, quoting_style="all_valid")
        self._writer = csv.CSVWriter(file, schema, write_options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()


class _Json:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            columns = [
                [_json_value(value, f.type) for value in column.to_pylist()]
                for f, column in zip(self._schema, batch.slice(start, BATCH_ROWS).columns, strict=True)
            ]
            names = self._schema.names
            lines = [
                json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, separators=(",", ":"))
                for row in zip(*columns, strict=True)
            ]
            self._file.write(("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """Nothing to finish."""


def _from_parquet(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pa.OSFile(str(path)) as source:
        for batch in pq.ParquetFile(source).iter_batches(BATCH_ROWS, use_threads=False):
            yield batch.cast(schema) if not batch.schema.equals(schema) else batch


def _from_csv(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from pyarrow import csv

    reader = csv.open_csv(
        str(path),
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    for batch in reader:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _from_json(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        rows: list[Any] = []
        for line in file:
            rows.append(json.loads(line))
            if len(rows) == BATCH_ROWS:
                yield _batch(rows, schema)
                rows = []
        if rows:
            yield _batch(rows, schema)


def _batch(rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([_meant(row.get(f.name), f.type) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""As Spark reads and writes them in JSON; other words would become null there."""


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """A value in JSON."""
    t = pa.types
    if value is None or t.is_boolean(kind) or t.is_integer(kind) or t.is_string(kind):
        return value
    if t.is_floating(kind):
        return value if math.isfinite(value) else _NOT_FINITE[str(value)]
    if t.is_binary(kind):
        return base64.b64encode(value).decode()
    if t.is_timestamp(kind):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if kind.tz else "")
    if t.is_map(kind):
        return {key: _json_value(item, kind.item_type) for key, item in value}
    if t.is_list(kind):
        return [_json_value(item, kind.value_type) for item in value]
    if t.is_struct(kind):
        return {f.name: _json_value(value[f.name], f.type) for f in kind}
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def _meant(value: Any, kind: pa.DataType) -> Any:
    t = pa.types
    if value is None or t.is_boolean(kind) or t.is_integer(kind) or t.is_string(kind):
        return value
    if t.is_floating(kind):
        return float(value)
    if t.is_binary(kind):
        return base64.b64decode(value)
    if t.is_timestamp(kind):
        moment = dt.datetime.fromisoformat(value.removesuffix("Z"))
        return moment.replace(tzinfo=dt.UTC) if kind.tz else moment
    if t.is_date32(kind):
        return dt.date.fromisoformat(value)
    if t.is_decimal(kind):
        return decimal.Decimal(value)
    if t.is_map(kind):
        return [(key, _meant(item, kind.item_type)) for key, item in value.items()]
    if t.is_list(kind):
        return [_meant(item, kind.value_type) for item in value]
    return {f.name: _meant(value[f.name], f.type) for f in kind}


def stored_schema(options: FilesOptions) -> pa.Schema | None:
    path: Path = schema_file(options)
    return pa.ipc.read_schema(pa.py_buffer(path.read_bytes())) if path.exists() else None
