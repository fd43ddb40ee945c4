"""Rows that a table of files, or the library that writes it, refuses: to the dead letters, with the column; the others
are written. The tables are made by other clients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support import delta, iceberg
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import make_world, world
from tests.support.scans import scanned
from tests.support.sinks import Rig
from tests.support.sweeps import sweep

from delivered.connectors.files import CONNECTOR as FILES
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.model.errors import BadRecord, DeliveredError
from delivered.model.rows import OnBadRow

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
"""The table's column `v`; a value that it holds, one that it does not, and how the reason names what is missing."""


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
    group = Sinks.of([("sink", sink, None)], OnBadRow.DEAD_LETTER, ("letters", letters))
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


@pytest.mark.parametrize(
    ("make", "case"),
    sweep(
        itertools.product(TABLES, NESTED),
        lambda make, case: make in (delta_table, iceberg_upsert) and case in ("column", "value of a map"),
    ),
)
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


def far_day(path: Path) -> Sink:
    """A table partitioned by day: the sink takes the partitions from it."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import DayTransform
    from pyiceberg.types import LongType, NestedField, TimestamptzType

    catalog = iceberg.others(path)
    catalog.create_namespace("shop")
    schema = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "v", TimestamptzType()))
    spec = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=DayTransform(), name="day"))
    catalog.create_table(iceberg.NAME, schema, partition_spec=spec)
    return iceberg.sink_at(path)


def test_a_partition_that_the_client_cannot_commit_is_a_bad_row(tmp_path: Path) -> None:
    far = pa.array([0, 6_585_442 * 86_400_000_000, 1], pa.int64()).cast(pa.timestamp("us", "UTC"))
    rows = pa.record_batch({"id": pa.array([0, 1, 2], pa.int64()), "v": far})
    found = written(far_day(tmp_path), rows, "far day")
    assert sorted(r["id"] for r in found.rows) == [0, 2]
    assert list(found.letters) == [1]
    assert "column 'v'" in found.letters[1]


def table_of_files(kind: str) -> Callable[[Path, pa.Field], Sink]:
    def make(path: Path, _: pa.Field) -> Sink:
        return FILES.sink({"path": str(path / "t"), "fileFormat": kind})

    make.__name__ = kind
    return make


EVERY = [*TABLES, *map(table_of_files, ("parquet", "json", "csv"))]
MARK = "refuse me"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """No value is known any more for which these libraries raise while rows are written: one is made up."""

    def fail(error: Exception) -> None:
        import pyarrow.parquet as pq

        from delivered.connectors.files import formats

        def wrap(owner: Any, name: str) -> None:
            honest = getattr(owner, name)

            def instead(self: Any, rows: Any, *given: Any, **more: Any) -> Any:
                if MARK in rows.column("v").to_pylist():
                    raise error
                return honest(self, rows, *given, **more)

            monkeypatch.setattr(owner, name, instead)

        wrap(pq.ParquetWriter, "write_table")
        wrap(formats._Csv, "write")
        wrap(formats._Json, "write")

    return fail


FIELD = pa.field("v", pa.string())


@pytest.mark.parametrize("make", EVERY, ids=lambda f: f.__name__)
def test_what_a_library_raises_for_a_value_is_of_its_row(
    tmp_path: Path, make: Callable[[Path, pa.Field], Sink], failing: Callable[[Exception], None]
) -> None:
    sink, rows = make(tmp_path, FIELD), rows_of(pa.string(), "a", "b", MARK, None, MARK, "c")
    failing(pa.ArrowInvalid("it is odd"))
    error = failure(sink, rows)
    assert "ROW_UNWRITABLE" in str(error)
    assert "Row 2 of the shard, column 'v': ArrowInvalid: it is odd" in str(error)
    found = written(sink, rows, make.__name__)
    assert sorted(r["id"] for r in found.rows) == [0, 1, 3, 5]
    assert set(found.letters.values()) == {"column 'v': ArrowInvalid: it is odd"}
    assert sorted(found.letters) == [2, 4]


MACHINE = [
    OSError(28, "No space left on device"), PermissionError(13, "denied"), pa.ArrowMemoryError("malloc"), MemoryError(),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error"),
    sweep(
        itertools.product(EVERY, MACHINE),
        lambda make, error: make is iceberg_table if error in MACHINE[:3:2] else make.__name__ == "json",
    ),
)
def test_what_the_machine_raises_is_of_no_row(
    tmp_path: Path, make: Callable[[Path, pa.Field], Sink], failing: Callable[[Exception], None], error: Exception
) -> None:
    sink, rows = make(tmp_path, FIELD), rows_of(pa.string(), "a", MARK)
    failing(error)
    make_world(repr((make.__name__, error)))
    letters = MEMORY.sink({"world": repr((make.__name__, error)), "commit": "two_phase"})
    for one in (sink, Sinks.of([("sink", sink, None)], OnBadRow.DEAD_LETTER, ("letters", letters))):
        rig = Rig(one, schema=rows.schema)  # type: ignore[arg-type]
        with pytest.raises((OSError, MemoryError, DeliveredError)) as caught:
            rig.run_rows(0, [rows])
        assert not isinstance(caught.value, BadRecord)
    assert world(repr((make.__name__, error))).visible == []


@pytest.mark.parametrize("make", EVERY, ids=lambda f: f.__name__)
def test_what_fails_for_every_row_is_of_none(
    tmp_path: Path, make: Callable[[Path, pa.Field], Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    from delivered.connectors.files import formats
    from delivered.kits.table.shard import _Open

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    sink, rows = make(tmp_path, FIELD), rows_of(pa.string(), "a", "b")
    for owner, name in (
        (formats._Csv, "write"),
        (formats._Json, "write"),
        (formats._Parquet, "write"),
        (_Open, "flush"),
    ):
        monkeypatch.setattr(owner, name, broken)
    make_world(make.__name__ + " broken")
    letters = MEMORY.sink({"world": make.__name__ + " broken", "commit": "two_phase"})
    rig = Rig(Sinks.of([("sink", sink, None)], OnBadRow.DEAD_LETTER, ("letters", letters)), schema=rows.schema)  # type: ignore[arg-type]
    with pytest.raises((ValueError, DeliveredError), match="broken"):
        rig.run_rows(0, [rows])
    assert world(make.__name__ + " broken").visible == []


def test_a_map_that_has_a_key_twice_is_a_bad_row(tmp_path: Path) -> None:
    """Each reader would keep another entry."""
    kind = pa.map_(pa.string(), pa.int64())
    rows = rows_of(kind, [("a", 1)], [("a", 1), ("a", 2)], [("a", 1), ("b", 1)])
    for make in EVERY[:-1]:
        (tmp_path / make.__name__).mkdir()
        found = written(make(tmp_path / make.__name__, pa.field("v", kind)), rows, f"{make.__name__} map")
        assert sorted(r["id"] for r in found.rows) == [0, 2]
        assert found.letters == {1: "column 'v': a map has a key twice"}
