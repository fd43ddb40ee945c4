"""Arrow types that each format stores without loss.

Parquet  booleans, numbers, texts, bytes, dates, times, lists, structs, maps
JSON     the same; bytes in base64, decimals and times as text; map keys must be texts
CSV      booleans, numbers, texts, dates, times
"""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.files.options import FilesOptions
from delivered.kits.table import columns
from delivered.model.errors import UsageError


class FilesTypes(columns.TableTypes):
    system = "files"
    table = "a file"


TYPES = FilesTypes()


def check(options: FilesOptions, schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: no columns, duplicate names, a column named `batch`, or an unsupported type.
    """
    if not columns.named_once(schema) or "batch" in (name.lower() for name in schema.names):
        raise UsageError(
            "COLUMNS",
            f"The rows have the columns {schema.names}; they need at least one, names that are unique ignoring case, "
            "and no column 'batch', which readers derive from the folder names.",
            next_step="rename columns",
        )
    if options.format == "csv" and len(schema) == 1:
        raise UsageError(
            "COLUMNS",
            f"The rows have only one column, {schema.names[0]!r}: NULL would be an empty CSV line, which readers skip.",
            next_step='add a column, or write .option("fileFormat", "json")',
        )
    for field in TYPES.canonical_schema(schema):
        fits = options.format == "parquet" or (_json(field.type) if options.format == "json" else _csv(field.type))
        columns.kept(field, field.type if fits else None, f"a {options.format} file")


def _json(kind: pa.DataType) -> bool:
    t = pa.types
    if t.is_map(kind):
        return bool(t.is_string(kind.key_type)) and _json(kind.item_type)
    if t.is_list(kind):
        return _json(kind.value_type)
    return all(_json(f.type) for f in kind) if t.is_struct(kind) else True


def _csv(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind))
