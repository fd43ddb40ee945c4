"""Modes of the Iceberg sink that remove rows: overwrite by partition, upsert by key (see conformance, too)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.transforms import MonthTransform
from tests.support.iceberg import NAME, before_commit, others, sink_at, staged_in, strays, theirs
from tests.support.tables import SCOPE, UPSERT, claimed, days, decision, items

from delivered.connectors.iceberg import IcebergOptions
from delivered.connectors.iceberg.store import IcebergCommitter
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.work import Failed, Ok, Unknown

parse = IcebergOptions.parse

__all__ = ["before_commit"]
OVERWRITE = {"mode": "overwrite", "partitionBy": "day,city"}


def found(path: Path, *names: str) -> list[tuple[Any, ...]]:
    rows = theirs(path).scan().to_arrow().select(list(names)).to_pylist()
    return sorted((tuple(row.values()) for row in rows), key=str)


def files(path: Path) -> set[str]:
    return {p.name for p in (path / "shop").rglob("data/delivered/**/*") if p.is_file()}


def named(path: Path) -> set[str]:
    return {task.file.file_path.rpartition("/")[2] for task in theirs(path).scan().plan_files()}


def test_overwrite_replaces_the_partitions_of_the_batch_alone(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, **OVERWRITE)
    first = days(("1", "a", 1), ("1", "c=d/é%", 2), ("1", None, 3), ("2", "a", 4), ("2", None, 5))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    second = decision(
        1,
        staged_in(sink, days(("1", "c=d/é%", 20), ("2", None, 50)), 1),
        staged_in(sink, days(("2", None, 51)), 1, shard=1),
    )
    for _ in range(2):  # the second time is a repeat
        assert mine.decide(second) == Ok(None)
        assert {row[0]: row[1:] for row in found(tmp_path, "id", "day", "city")} == {
            1: ("1", "a"), 20: ("1", "c=d/é%"), 3: ("1", None), 4: ("2", "a"), 50: ("2", None), 51: ("2", None),
        }  # fmt: skip
    assert mine.decide(decision(2)) == Ok(None)  # a batch without rows replaces nothing
    assert len(found(tmp_path, "id")) == 6
    assert [s.summary.operation.value for s in theirs(tmp_path).snapshots() if "delivered.batch" in _said(s)] == [
        "append", "overwrite", "append",
    ]  # fmt: skip
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
    assert strays(tmp_path) == set()


def _said(snapshot: Any) -> dict[str, str]:
    return dict(snapshot.summary.additional_properties)


def test_overwrite_by_a_transform(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, mode="overwrite", partitionBy="truncate(1, day), bucket(4, id)")
    assert sink.capability().write.replaces == ("truncate(1, day)", "bucket(4, id)")
    first = days(("1a", None, 1), ("2a", None, 1), ("2b", None, 1))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert mine.decide(decision(1, staged_in(sink, days(("2c", None, 1)), 1))) == Ok(None)
    assert found(tmp_path, "day") == [("1a",), ("2c",)]


def test_overwrite_in_a_table_that_others_partition_by_a_double(tmp_path: Path) -> None:
    """The client commits NaN as a partition, but never again removes its files."""
    rows = pa.table({"key": [0.1, -math.inf, None], "v": [1, 1, 1]})
    sink_at(tmp_path).ready_target(rows.schema)
    with theirs(tmp_path).update_spec() as update:
        update.add_identity("key")
    sink = sink_at(tmp_path, mode="overwrite", partitionBy="key")
    mine = claimed(sink, rows)
    for batch in range(2):
        assert mine.decide(decision(batch, staged_in(sink, rows, batch))) == Ok(None)
    assert found(tmp_path, "v") == [(1,), (1,), (1,)]
    with pytest.raises(BadRecord, match="column 'key': NaN as a partition"):
        staged_in(sink, pa.table({"key": [math.nan], "v": [1]}), 2)


@pytest.mark.parametrize(
    "given", [{}, {"mode": "overwrite", "partitionBy": "v"}, {"mode": "upsert", "keyColumns": "v"}]
)
def test_a_partition_field_that_was_removed_in_format_version_1(tmp_path: Path, given: dict[str, str]) -> None:
    """It stays in the spec, without effect, also after an upgrade."""
    columns = pa.schema([("day", pa.date32()), ("v", pa.int64())])
    sink_at(tmp_path).ready_target(columns)
    others(tmp_path).drop_table(NAME)
    table = others(tmp_path).create_table(NAME, columns, properties={"format-version": "1"})
    with table.update_spec() as update:
        update.add_field("day", MonthTransform(), "month")
        update.add_identity("v")
    with table.update_spec() as update:
        update.remove_field("month")
    with table.transaction() as change:
        change.upgrade_table_version(2)
    rows, sink = pa.table({"v": [1, 0]}), sink_at(tmp_path, **given)
    mine = claimed(sink, rows)
    for batch in range(2):
        assert mine.decide(decision(batch, staged_in(sink, rows, batch))) == Ok(None)
    assert found(tmp_path, "v") == sorted([(0,), (1,)] * (1 if given else 2))
    with theirs(tmp_path).update_schema() as change:
        change.delete_column("day")
    with pytest.raises(Refused, match="the partition field month, whose column was dropped"):
        sink.ready_target(rows.schema)


def test_a_mode_that_cannot_be_had_is_refused_before_the_start(tmp_path: Path) -> None:
    for given in (
        {"mode": "overwrite"},
        {**OVERWRITE, "keyColumns": "id"},
        {"mode": "merge"},
        {"mode": "append", "keyColumns": "id"},
    ):
        with pytest.raises(UsageError, match="DELIVERED_OPTION_VALUE"):
            parse({"table": "shop.t", "warehouse": "/t", **given})
    for given in (UPSERT, OVERWRITE):
        [refusal] = sink_at(tmp_path, **given).preflight(Guarantee.AT_LEAST_ONCE)
        assert refusal.code == "MODE_GUARANTEE"


def test_files_of_other_partitions_than_the_tables_own_are_not_replaced_in_the_dark(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, mode="overwrite", partitionBy="day")
    first = days(("1", "a", 1))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    with theirs(tmp_path).update_spec() as update:
        update.add_identity("city")
    again = sink_at(tmp_path, mode="overwrite", partitionBy="day, city")
    outcome = claimed(again, first).decide(decision(1, staged_in(again, days(("1", "a", 2)), 1)))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_PARTITIONS" in outcome.reason
    assert found(tmp_path, "id") == [(1,)]


def test_upsert_leaves_files_alone_that_hold_no_key_of_the_batch(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, partitionBy="part", **UPSERT)
    first = items((1, 1, "a"), (2, 1, "a"), (3, 1, "b"))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    before = named(tmp_path)
    assert mine.decide(decision(1, staged_in(sink, items((1, 2, "c"), (2, 0, "late")), 1))) == Ok(None)  # 1 moves to c
    assert found(tmp_path, "id", "v", "part") == [(1, 2, "c"), (2, 1, "a"), (3, 1, "b")]
    assert len(before & named(tmp_path)) == 1
    assert files(tmp_path) == before | named(tmp_path)  # staged files are gone
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
    assert files(tmp_path) >= named(tmp_path), "recovery takes no file that the newest decision made"
    assert mine.decide(decision(2, staged_in(sink, items((2, 0, "later")), 2))) == Ok(None)
    assert found(tmp_path, "id", "v", "part") == [(1, 2, "c"), (2, 1, "a"), (3, 1, "b")]
    assert strays(tmp_path) == set()


@pytest.mark.parametrize("mode", [{**UPSERT, "partitionBy": "part"}, {"mode": "overwrite", "partitionBy": "part"}])
def test_rows_that_others_add_meanwhile_are_seen(
    tmp_path: Path, before_commit: Callable[..., None], mode: dict[str, str]
) -> None:
    """Rows added between the read and the commit: the change is recomputed on top of them."""
    sink = sink_at(tmp_path, **mode)
    first = items((1, 1, "a"))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    prepared = staged_in(sink, items((1, 3, "a"), (7, 3, "a")), 1)

    def meanwhile(ask: Callable[[], Any]) -> Any:
        theirs(tmp_path).append(items((7, 1, "a"), (8, 1, "a"), (9, 1, "b")))
        return ask()

    before_commit(meanwhile)
    assert mine.decide(decision(1, prepared)) == Ok(None)
    wanted = [(1, 3, "a"), (7, 3, "a"), (9, 1, "b")]
    if mode["mode"] == "upsert":
        wanted.insert(2, (8, 1, "a"))
    assert found(tmp_path, "id", "v", "part") == wanted
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
    there = {p for p in files(tmp_path) if p.startswith("1-")}
    assert there <= named(tmp_path), "files of the try that was overtaken are gone"
    assert strays(tmp_path) == set()


@pytest.mark.parametrize("got_in", [True, False])
def test_an_answer_that_was_lost(tmp_path: Path, before_commit: Callable[..., None], got_in: bool) -> None:
    """Committed: the upsert's files stay, even after recovery. Not committed: unknown; the next start removes them."""
    sink = sink_at(tmp_path, **UPSERT)
    first = items((1, 1, "a"))
    prepared = staged_in(sink, first)
    mine = claimed(sink, first)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    prepared = staged_in(sink, items((1, 2, "b")), 1)

    def lost(ask: Callable[[], Any]) -> Any:
        if got_in:
            ask()
        raise CommitStateUnknownException("the answer was lost")

    before_commit(lost)
    outcome = mine.decide(decision(1, prepared))
    assert outcome == Ok(None) if got_in else isinstance(outcome, Unknown)
    claimed(sink, first)
    committer = IcebergCommitter(sink.options, SCOPE)
    assert isinstance(committer.abort_orphans(()), Ok)
    assert found(tmp_path, "v") == [(2 if got_in else 1,)]
    assert {p for p in files(tmp_path) if p.startswith("1-")} == (named(tmp_path) if got_in else set())


def test_columns_are_added_on_request_before_the_first_claim(tmp_path: Path) -> None:
    """Repeated, and concurrently with another writer that adds one; earlier rows read as null there."""
    first = items((1, 1, "a"))
    sink = sink_at(tmp_path)
    prepared = staged_in(sink, first)
    assert claimed(sink, first).decide(decision(0, prepared)) == Ok(None)
    wider = first.append_column("note", pa.array(["n"])).append_column("tags", pa.array([["x", None]]))
    with pytest.raises(UsageError, match="COLUMN_MISSING") as caught:
        sink.ready_target(wider.schema)
    assert "mergeSchema" in str(caught.value)
    for given in ({}, UPSERT):
        merging = sink_at(tmp_path, mergeSchema="true", **given)
        merging.ready_target(wider.schema)
    assert [f.name for f in theirs(tmp_path).schema().fields] == ["id", "v", "part", "note", "tags"]
    batch = merging_rows = wider.set_column(1, "v", pa.array([2]))
    assert claimed(merging, batch).decide(decision(1, staged_in(merging, merging_rows, 1))) == Ok(None)
    assert found(tmp_path, "id", "v", "note", "tags") == [(1, 2, "n", ["x", None])]
    assert claimed(sink, first).decide(decision(2, staged_in(sink, items((2, 1, "b")), 2))) == Ok(None)
    assert found(tmp_path, "id", "note") == [(1, "n"), (2, None)]
    with pytest.raises(UsageError, match="COLUMN_CASE"):
        sink_at(tmp_path, mergeSchema="true").ready_target(first.append_column("NOTE", pa.array(["n"])).schema)


def test_a_column_that_somebody_else_adds_at_that_moment(tmp_path: Path, before_commit: Callable[..., None]) -> None:
    sink = sink_at(tmp_path, mergeSchema="true")
    first = items((1, 1, "a"))
    sink.ready_target(first.schema)

    def meanwhile(ask: Callable[[], Any]) -> Any:
        sink_at(tmp_path, mergeSchema="true").ready_target(first.append_column("note", pa.array(["n"])).schema)
        return ask()

    before_commit(meanwhile)
    sink.ready_target(first.append_column("note", pa.array(["n"])).append_column("more", pa.array([1])).schema)
    assert sorted(f.name for f in theirs(tmp_path).schema().fields) == ["id", "more", "note", "part", "v"]


PLACE = pa.struct([("a", pa.int64())])
SOME: dict[str, tuple[pa.DataType, list[Any]]] = {
    "list": (pa.list_(PLACE), [None, [], [{"a": 1}], [None]]),
    "map": (pa.map_(pa.string(), PLACE), [None, [], [("k", {"a": 1})], [("k", None)]]),
    "deep": (pa.list_(pa.struct([("a", pa.list_(PLACE))])), [[{"a": None}], [{"a": []}], None, [None]]),
}


def test_upsert_leaves_null_lists_and_maps_of_other_rows_null(tmp_path: Path) -> None:
    """pyiceberg's reader makes them empty; read here without it."""
    columns = {name: pa.array(values, kind) for name, (kind, values) in SOME.items()}
    rows = pa.table({"id": [1, 2, 3, 4], **columns})
    sink = sink_at(tmp_path, mode="upsert", keyColumns="id")
    mine = claimed(sink, rows)
    assert mine.decide(decision(0, staged_in(sink, rows))) == Ok(None)
    before = named(tmp_path)
    assert mine.decide(decision(1, staged_in(sink, rows.slice(3), 1))) == Ok(None)
    assert not before & named(tmp_path), "the file was rewritten"
    tasks = theirs(tmp_path).scan().plan_files()
    stored = pa.concat_tables(pq.read_table(task.file.file_path.removeprefix("file://")) for task in tasks)
    assert stored.sort_by("id").select(list(SOME)).to_pydict() == rows.select(list(SOME)).to_pydict()
    scan = sink.scan()
    batches = [b for piece in scan.slices() for b in scan.read(piece)]
    assert pa.Table.from_batches(batches).sort_by("id").select(list(SOME)).to_pydict() == (
        rows.select(list(SOME)).to_pydict()
    )


def test_null_lists_and_maps_in_a_large_row_group_are_read(tmp_path: Path) -> None:
    """Arrow reads it in pieces, all but the first of which are slices of one array."""
    times = 35_000
    columns = {name: pa.array(values, kind) for name, (kind, values) in SOME.items()}
    rows = pa.concat_tables([pa.table(columns)] * times).combine_chunks()
    rows = rows.add_column(0, "id", pa.array(range(rows.num_rows)))
    sink = sink_at(tmp_path)
    mine = claimed(sink, rows)
    assert mine.decide(decision(0, staged_in(sink, rows))) == Ok(None)
    (task,) = theirs(tmp_path).scan().plan_files()
    groups = pq.ParquetFile(task.file.file_path.removeprefix("file://")).metadata
    assert groups.row_group(0).num_rows > 131_072, "Arrow's pieces are smaller"
    scan = sink.scan()
    read = pa.Table.from_batches([b for piece in scan.slices() for b in scan.read(piece)])
    assert read.select(rows.column_names).sort_by("id").equals(rows)
