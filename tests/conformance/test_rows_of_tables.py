"""Rows that a table of files, or the library that writes it, refuses: to the dead letters, with the column; the others
are written. The tables are made by other clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support import delta, iceberg
from tests.support.scans import scanned
from tests.support.sinks import Rig

from delivered.connectors.memory import CONNECTOR as MEMORY
from delivered.connectors.memory.world import make_world, world
from delivered.contract.sink import Sink
from delivered.group.sinks import Group
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import DeliveredError

UPSERT = {"mode": "upsert", "keyColumns": "id"}
Value = tuple[pa.DataType, Any, Any]
"""Type of the column `v`, a good value, and a bad one."""

_REQUIRED = pa.field("a", pa.int64(), nullable=False)
NESTED: dict[str, tuple[pa.Field, Any, Any, str]] = {
    "column": (pa.field("v", pa.string(), nullable=False), "x", None, "'v'"),
    "field of a struct": (pa.field("v", pa.struct([_REQUIRED])), {"a": 1}, {"a": None}, "'v.a'"),
    "element of a list": (
        pa.field("v", pa.list_(pa.field("element", pa.int64(), nullable=False))), [1], [2, None], "'v[]'",
    ),
    "value of a map": (
        pa.field("v", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))), [("k", 1)],
        [("k", 2), ("l", None)], "'v.value'",
    ),
    "field of a struct in a list": (
        pa.field("v", pa.list_(pa.field("element", pa.struct([_REQUIRED])))), [{"a": 1}], [{"a": None}], "'v[].a'",
    ),
}  # fmt: skip
"""The table's column `v` with what it requires; a row that it holds, one that it does not, and how the reason names it."""


def nullable(kind: pa.DataType) -> pa.DataType:
    """As Spark's rows have it."""
    t = pa.types
    if t.is_struct(kind):
        return pa.struct([(f.name, nullable(f.type)) for f in kind])
    if t.is_map(kind):
        return pa.map_(kind.key_type, nullable(kind.item_type))
    return pa.list_(pa.field("element", nullable(kind.value_type))) if t.is_list(kind) else kind


def rows_of(kind: pa.DataType, *values: Any) -> pa.RecordBatch:
    kind = nullable(kind)
    return pa.record_batch({"id": pa.array(range(len(values)), pa.int64()), "v": pa.array(values, kind)})


def delta_table(path: Path, field: pa.Field) -> Sink:
    from deltalake import DeltaTable

    DeltaTable.create(str(path / "t"), pa.schema([pa.field("id", pa.int64()), field]))
    return delta.sink_at(path)


def delta_upsert(path: Path, field: pa.Field) -> Sink:
    delta_table(path, field)
    return delta.sink_at(path, **UPSERT)


def iceberg_table(path: Path, field: pa.Field) -> Sink:
    catalog = iceberg.others(path)
    catalog.create_namespace("shop")
    catalog.create_table(iceberg.NAME, pa.schema([pa.field("id", pa.int64()), field]))
    return iceberg.sink_at(path)


def iceberg_upsert(path: Path, field: pa.Field) -> Sink:
    iceberg_table(path, field)
    return iceberg.sink_at(path, **UPSERT)


TABLES = [delta_table, delta_upsert, iceberg_table, iceberg_upsert]


@dataclass
class Written:
    rows: list[dict[str, Any]]
    letters: dict[int, str]


def written(sink: Sink, rows: pa.RecordBatch, name: str) -> Written:
    """What became of a batch with dead letters."""
    make_world(name)
    letters = MEMORY.sink({"world": name, "commit": "two_phase"})
    group = Group.of([("sink", sink, None)], OnBadRow.DEAD_LETTER, ("letters", letters))
    rig = Rig(group, schema=rows.schema)  # type: ignore[arg-type]
    rig.run_rows(0, [rows])
    found = [json.loads(v) for _, batch in world(name).visible for v in batch.column("value").to_pylist()]
    return Written(
        [r for b in scanned(sink) for r in b.to_pylist()], {letter["row"]: letter["reason"] for letter in found}
    )


def failure(sink: Sink, rows: pa.RecordBatch) -> DeliveredError:
    """Why a batch fails whose bad rows do."""
    rig = Rig(sink, schema=rows.schema)
    with pytest.raises(DeliveredError) as caught:
        rig.run_rows(0, [rows])
    return caught.value


@pytest.mark.parametrize("make", TABLES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", NESTED)
def test_null_where_the_table_requires_a_value_is_a_bad_row(
    tmp_path: Path, make: Callable[[Path, pa.Field], Sink], case: str
) -> None:
    field, good, bad, named = NESTED[case]
    sink, rows = make(tmp_path, field), rows_of(field.type, good, bad, good)
    error = failure(sink, rows)
    assert "COLUMN_REQUIRED" in str(error), error
    assert named in str(error), error
    assert "Row 1 of" in str(error), error
    found = written(sink, rows, f"{make.__name__}-{case}")
    assert sorted(r["id"] for r in found.rows) == [0, 2]
    assert list(found.letters) == [1]
    assert named in found.letters[1]
