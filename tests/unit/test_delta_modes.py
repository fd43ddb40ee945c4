"""Modes of the Delta sink that remove rows: overwrite by partition, upsert by key (see conformance, too)."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.support.delta import sink_at
from tests.support.tables import EXACT, SCOPE, UPSERT, claimed, days, decision, items, staged

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.store import DeltaCommitter
from delivered.engine.context import open_ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, UsageError
from delivered.model.work import Failed, Ok, Owner

parse = DeltaOptions.parse

OVERWRITE = {"mode": "overwrite", "partitionBy": "day,city"}


def found(path: Path) -> list[tuple[Any, ...]]:
    rows = pa.table(DeltaTable(str(path / "t")).to_pyarrow_table()).to_pylist()
    return sorted((tuple(row.values()) for row in rows), key=str)


def files(path: Path) -> set[str]:
    return {p.name for p in (path / "t" / "delivered").rglob("*.parquet")}


def named(path: Path) -> set[str]:
    return {uri.rpartition("/")[2] for uri in DeltaTable(str(path / "t")).file_uris()}


def test_overwrite_replaces_the_partitions_of_the_batch_alone(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, **OVERWRITE)
    first = days(("1", "a", 1), ("1", "c=d/é%", 2), ("1", None, 3), ("2", "a", 4), ("2", None, 5))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    second = decision(
        1, staged(sink, days(("1", "c=d/é%", 20), ("2", None, 50)), 1), staged(sink, days(("2", None, 51)), 1, shard=1)
    )
    for _ in range(2):  # the second time is a repeat
        assert mine.decide(second) == Ok(None)
        assert {row[2]: row[:2] for row in found_by(tmp_path)} == {
            1: ("1", "a"), 20: ("1", "c=d/é%"), 3: ("1", None), 4: ("2", "a"), 50: ("2", None), 51: ("2", None),
        }  # fmt: skip
    assert mine.decide(decision(2)) == Ok(None)  # a batch without rows replaces nothing
    assert len(found_by(tmp_path)) == 6
    assert DeltaCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)


def found_by(path: Path) -> list[tuple[Any, ...]]:
    table = pa.table(DeltaTable(str(path / "t")).to_pyarrow_table()).select(["day", "city", "id"])
    return [tuple(row.values()) for row in table.to_pylist()]


def test_a_mode_that_cannot_be_had_is_refused_before_the_start(tmp_path: Path) -> None:
    for given in (
        {"mode": "overwrite"},
        {**OVERWRITE, "keyColumns": "id"},
        {"mode": "merge"},
        {"mode": "append", "keyColumns": "id"},
    ):
        with pytest.raises(UsageError, match="DELIVERED_OPTION_VALUE"):
            parse({"path": "/t", **given})
    for given in (UPSERT, OVERWRITE):
        [refusal] = sink_at(tmp_path, **given).preflight(Guarantee.AT_LEAST_ONCE)
        assert refusal.code == "MODE_GUARANTEE"
    sink_at(tmp_path).ready_target(items().schema)
    DeltaTable(str(tmp_path / "t")).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(Refused, match="DELIVERED_TABLE_FEATURES"):
        sink_at(tmp_path, **UPSERT).ready_target(items().schema)
    assert [f.code for f in sink_at(tmp_path, **UPSERT).preflight(EXACT) if f.refuses] == ["TABLE_FEATURES"]


def test_upsert_leaves_files_alone_that_hold_no_key_of_the_batch(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, partitionBy="part", **UPSERT)
    first = items((1, 1, "a"), (2, 1, "a"), (3, 1, "b"))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    before = named(tmp_path)
    assert mine.decide(decision(1, staged(sink, items((1, 2, "c"), (2, 0, "late")), 1))) == Ok(None)  # 1 moves to c
    assert found(tmp_path) == [(1, 2, "c"), (2, 1, "a"), (3, 1, "b")]
    assert len(before & named(tmp_path)) == 1
    assert files(tmp_path) == before | named(tmp_path)  # staged files are gone
    assert mine.decide(decision(2, staged(sink, items((2, 0, "later")), 2))) == Ok(None)
    assert found(tmp_path) == [(1, 2, "c"), (2, 1, "a"), (3, 1, "b")]
    assert DeltaCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (pa.timestamp("us", "UTC"), dt.datetime(2024, 1, 1, microsecond=123_456, tzinfo=dt.UTC)),
        (pa.timestamp("us"), dt.datetime.fromisoformat("1969-12-31T23:59:59.999999")),
        (pa.timestamp("us"), dt.datetime.fromisoformat("9999-12-31T23:59:59.999999")),
        (pa.decimal128(18, 2), decimal.Decimal("1234567890123456.78")),
        (pa.decimal128(38, 0), decimal.Decimal(10**37 + 1)),
        (pa.date32(), dt.date(2024, 1, 1)),
        (pa.string(), "x" * 100),
        (pa.binary(), b"\xff"),
        (pa.int64(), -(1 << 63)),
    ],
    ids=str,
)
def test_upsert_finds_the_keys_in_files_of_other_writers(tmp_path: Path, kind: pa.DataType, key: Any) -> None:
    """Their bounds of a column are rounded: the row would be in the table twice."""
    old = pa.table({"k.y": pa.array([key], kind), "k": pa.array([{"y": 7}]), "v": pa.array([0])})
    write_deltalake(tmp_path / "t", old)
    sink = sink_at(tmp_path, mode="upsert", keyColumns="k.y")
    batch = pa.table({"k.y": pa.array([key], kind), "k": pa.array([{"y": 8}]), "v": pa.array([1])})
    mine = claimed(sink, batch)
    assert mine.decide(decision(0, staged(sink, batch))) == Ok(None)
    assert pa.table(DeltaTable(str(tmp_path / "t")).to_pyarrow_table())["v"].to_pylist() == [1]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
def test_an_empty_text_in_the_log_is_a_partition_of_null(tmp_path: Path, kind: pa.DataType) -> None:
    """Writers may spell it so; rows that were added since a position are read by the log."""
    rows = pa.table({"k": pa.array([None], kind), "v": [1]})
    write_deltalake(tmp_path / "t", rows.slice(0, 0), partition_by=["k"])
    scan = sink_at(tmp_path, partitionBy="k").scan()
    before = scan.position()
    write_deltalake(tmp_path / "t", rows, mode="append")
    log = tmp_path / "t" / "_delta_log" / f"{1:020}.json"
    log.write_text(log.read_text().replace('"partitionValues":{"k":null}', '"partitionValues":{"k":""}'))
    assert '{"k":""}' in log.read_text()
    for since in (None, before):
        assert [r for s in scan.slices(since) for b in scan.read(s) for r in b.to_pylist()] == rows.to_pylist()


def test_upsert_by_a_column_that_partitions_the_table(tmp_path: Path) -> None:
    """Its values are in no file."""
    sink = sink_at(tmp_path, mode="upsert", keyColumns="part", partitionBy="part")
    first = items((1, 1, "a"), (2, 1, "b"))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    assert mine.decide(decision(1, staged(sink, items((3, 1, "b"), (4, 1, "c")), 1))) == Ok(None)
    assert found(tmp_path) == [(1, 1, "a"), (3, 1, "b"), (4, 1, "c")]


@pytest.fixture
def in_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`in_commit(do)`: call `do` right before the next decision's commit is written."""
    real = DeltaTable.create_write_transaction

    def at_next(do: Any) -> None:
        def instead(self: DeltaTable, *given: Any, **more: Any) -> Any:
            monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
            do()
            return real(self, *given, **more)

        monkeypatch.setattr(DeltaTable, "create_write_transaction", instead)

    yield at_next


def test_what_a_dead_driver_wrote_of_an_upsert_is_removed(tmp_path: Path, in_commit: Any) -> None:
    sink = sink_at(tmp_path, **UPSERT)
    first = items((1, 1, "a"), (2, 1, "a"))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    prepared = staged(sink, items((1, 2, "b"), (3, 1, "b")), 1)
    before = files(tmp_path)

    def die() -> None:
        raise KeyboardInterrupt

    in_commit(die)
    with pytest.raises(KeyboardInterrupt):
        mine.decide(decision(1, prepared))
    assert len(files(tmp_path)) == len(before) + 1
    mine.claim(Owner("o"))
    assert DeltaCommitter(sink.options, SCOPE).abort_orphans([prepared]) == Ok(1)
    assert files(tmp_path) == before
    assert found(tmp_path) == [(1, 1, "a"), (2, 1, "a")]
    assert mine.decide(decision(1, prepared)) == Ok(None)
    assert found(tmp_path) == [(1, 2, "b"), (2, 1, "a"), (3, 1, "b")]
    mine.claim(Owner("o"))
    assert DeltaCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(
        0
    )  # files written by the upsert do not count as staged
    assert found(tmp_path) == [(1, 2, "b"), (2, 1, "a"), (3, 1, "b")]


def test_an_upsert_under_way_fails_behind_a_later_claim(tmp_path: Path, in_commit: Any) -> None:
    sink = sink_at(tmp_path, **UPSERT)
    first = items((1, 1, "a"))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    prepared, before = staged(sink, items((1, 2, "b")), 1), files(tmp_path)
    in_commit(lambda: open_ledger(sink, SCOPE).claim(Owner("other")))
    assert isinstance(mine.decide(decision(1, prepared)), Failed)
    assert found(tmp_path) == [(1, 1, "a")]
    assert files(tmp_path) == before


def test_files_that_others_compacted_meanwhile_are_not_replaced_twice(tmp_path: Path, in_commit: Any) -> None:
    sink = sink_at(tmp_path, **UPSERT)
    first = items((1, 1, "a"))
    mine = claimed(sink, first)
    assert mine.decide(decision(0, staged(sink, first))) == Ok(None)
    assert mine.decide(decision(1, staged(sink, items((2, 1, "a")), 1))) == Ok(None)
    prepared = staged(sink, items((1, 2, "b")), 2)
    in_commit(lambda: DeltaTable(str(tmp_path / "t")).optimize.compact())
    assert mine.decide(decision(2, prepared)) == Ok(None)
    assert found(tmp_path) == [(1, 2, "b"), (2, 1, "a")]


@pytest.mark.parametrize("root", ["", "file://", "s3://"])
def test_a_shallow_clone_is_refused_where_its_files_are_read(tmp_path: Path, root: str) -> None:
    """Its log names files of another table by their absolute paths."""
    rows = pa.table({"id": [1, 2], "v": [1, 1]})
    write_deltalake(str(tmp_path / "original"), rows)
    name = f"_delta_log/{0:020}.json"
    log = [json.loads(line) for line in (tmp_path / "original" / name).read_text().splitlines()]
    for entry in log:
        if "add" in entry:
            entry["add"]["path"] = f"{root}{tmp_path / 'original'}/{entry['add']['path']}"
    (tmp_path / "t" / "_delta_log").mkdir(parents=True)
    (tmp_path / "t" / name).write_text("".join(json.dumps(entry) + "\n" for entry in log))
    sink = sink_at(tmp_path, **UPSERT)
    with pytest.raises(Refused, match=r"TABLE_FEATURES.*original/part-.*shallow clone"):
        [list(sink.scan().read(piece)) for piece in sink.scan().slices()]
    outcome = claimed(sink, rows).decide(decision(0, staged(sink, rows)))
    assert isinstance(outcome, Failed) and "TABLE_FEATURES" in outcome.reason
