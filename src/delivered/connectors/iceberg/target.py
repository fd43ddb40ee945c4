"""The user's table: create it, compare it with the rows. Changes no rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from delivered.connectors.iceberg import IcebergOptions, Part, types
from delivered.connectors.iceberg.client import (
    catalog,
    data_path,
    explained,
    local_store_folders,
    open_table,
    require_table,
    store,
)
from delivered.connectors.iceberg.types import TYPES
from delivered.kits.table import target
from delivered.model.errors import UsageError

FORMAT_VERSION = 2
_CREATED_WITH = {
    "format-version": str(FORMAT_VERSION),
    # Each batch adds a metadata version and a manifest; both are cleaned up continuously.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
    "commit.manifest-merge.enabled": "true",
}
ADD_ATTEMPTS_MAX = 10
"""Retries against concurrent commits when columns are added."""
_DAYS, _HOURS = ("year", "month", "day"), ("hour",)


def ready(options: IcebergOptions, schema: pa.Schema) -> None:
    """
    Raises:
        UsageError: the table does not exist and must not be created; or rows of this schema do not match it.
        Refused: the table requires writer features that this sink does not support.
    """
    TYPES.check(schema)
    schema = TYPES.canonical_schema(schema)
    table = open_table(options)
    if table is None:
        table = _create(options, schema)
    check_features(options, table)
    if compare(options, table, schema, adds=True):
        _add_columns(options, table, schema)
        compare(options, require_table(options), schema)


def check(options: IcebergOptions) -> None:
    """Raise if this table cannot be written. Writes and deletes a small file next to its data."""
    catalog(options)
    table = open_table(options)
    if table is None and not options.create:
        require_table(options)
    if table is not None:
        check_features(options, table)
        with explained(options):
            target.probe(store(table, data_path(table)), "delivered")


def _add_columns(options: IcebergOptions, table: Any, schema: pa.Schema) -> None:
    """Add missing columns as optional ones, in a separate commit that changes no rows. Retried on conflicts with
    concurrent commits, perhaps of another driver doing the same."""
    from pyiceberg.exceptions import CommitFailedException

    for attempt in range(ADD_ATTEMPTS_MAX):
        lower = {f.name.lower() for f in table.schema().fields}
        missing = [f for f in types.to_iceberg(schema).fields if f.name.lower() not in lower]
        if not missing:
            return
        with explained(options):
            try:
                with table.update_schema() as update:
                    for field in missing:
                        update.add_column(field.name, field.field_type)
                return
            except CommitFailedException:
                if attempt == ADD_ATTEMPTS_MAX - 1:
                    raise
        table = require_table(options)


def check_features(options: IcebergOptions, table: Any) -> None:
    """Raises Refused: the table requires a writer feature that this sink does not support."""
    unsupported = []
    if table.metadata.format_version != FORMAT_VERSION:
        unsupported.append(f"format version {table.metadata.format_version} (this sink writes {FORMAT_VERSION})")
    if table.properties.get("write.wap.enabled", "false").lower() == "true":
        unsupported.append("write.wap.enabled: snapshots are published separately")
    unsupported += sorted(key for key in table.properties if key.startswith("encryption."))
    target.check_supported(options, unsupported)


def compare(options: IcebergOptions, table: Any, schema: pa.Schema, *, adds: bool = False) -> list[pa.Field]:
    """See `delivered.kits.table.target.compare`. Also raises UsageError if the options have other partitions."""
    spec = [(table.schema().find_column_name(f.source_id), str(f.transform)) for f in table.spec().fields]
    wanted = None if options.partition_by is None else [(p.column, p.transform) for p in options.partition_by]
    if wanted not in (None, spec):
        raise UsageError(
            "PARTITIONS.ICEBERG", where=options.where, current=_spec_text(spec), wanted=_spec_text(wanted or [])
        )
    return target.compare(options, types.to_arrow(table.schema()), schema, [name for name, _ in spec], adds=adds)


def same_columns(options: IcebergOptions, table: Any, schema_id: int, spec_id: int, columns: Iterable[int]) -> None:
    """Check the table again at commit: others may have altered it since the files were written.

    Args:
        schema_id, spec_id: that the files were written with.
        columns: their field ids.

    Raises:
        UsageError: the files no longer match the table.
    """
    check_features(options, table)
    if table.metadata.default_spec_id != spec_id:
        raise _altered(options, "its partition spec was changed")
    if table.metadata.current_schema_id == schema_id:
        return
    old, new = table.schemas()[schema_id], table.schema()
    for column in columns:
        name, there = old.find_column_name(column), new.find_column_name(column)
        if name != there or old.find_field(column).field_type != new.find_field(column).field_type:
            raise _altered(options, f"column {name!r} was changed or dropped")
    needed = [f.name for f in new.fields if f.required and f.field_id not in set(columns)]
    if needed:
        raise _altered(options, f"columns {needed} became required")


def _altered(options: IcebergOptions, what: str) -> UsageError:
    return UsageError("TABLE_ALTERED", where=options.where, what=what)


def _create(options: IcebergOptions, schema: pa.Schema) -> Any:
    if not options.create:
        return require_table(options)
    from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError

    columns = types.to_iceberg(schema)
    spec = _spec(options, schema, columns)
    known = catalog(options)
    with explained(options):
        try:
            known.create_namespace(options.namespace)
        except NamespaceAlreadyExistsError:
            pass
        except Exception:
            # Another driver may have created it; if not, raise the reason.
            if not known.namespace_exists(options.namespace):
                raise
        with contextlib.suppress(TableAlreadyExistsError):
            known.create_table(options.identifier, columns, partition_spec=spec, properties=_CREATED_WITH)
    table = require_table(options)
    local_store_folders(table)
    return table


def _spec(options: IcebergOptions, schema: pa.Schema, columns: Any) -> Any:
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.transforms import parse_transform

    fields = []
    for number, part in enumerate(options.partition_by or ()):
        kind = schema.field(part.column).type if part.column in schema.names else None
        if kind is None or not _fits(part, kind):
            raise UsageError(
                "PARTITION_TYPE.TRANSFORM",
                column=part.column,
                transform=part.transform,
                kind=kind or "not a column of the rows",
            )
        fields.append(
            PartitionField(
                source_id=columns.find_field(part.column).field_id,
                field_id=PARTITION_FIELD_ID_START + number,
                transform=parse_transform(part.transform),
                name=part.name,
            )
        )
    return PartitionSpec(*fields)


def _fits(part: Part, kind: pa.DataType) -> bool:
    t = pa.types
    word = part.transform.partition("[")[0]
    exact = t.is_integer(kind) or t.is_string(kind) or t.is_binary(kind) or t.is_decimal(kind)
    if word in _HOURS:
        return bool(t.is_timestamp(kind))
    if word in _DAYS:
        return bool(t.is_timestamp(kind) or t.is_date(kind))
    if word == "truncate":
        return bool(exact)
    return bool(exact or t.is_timestamp(kind) or t.is_date(kind) or (word == "identity" and t.is_boolean(kind)))


def _spec_text(spec: list[tuple[str, str]]) -> str:
    return ", ".join(c if t == "identity" else f"{t}({c})" for c, t in spec) or "nothing"
