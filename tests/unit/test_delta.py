"""The Delta sink alone: types, partitions, schemas, errors, concurrent writers, sizes."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.support.delta import sink_at
from tests.support.scans import scanned_table
from tests.support.tables import (
    EVERY_TYPE,
    EXACT,
    ROWS,
    SCOPE,
    claimed,
    decision,
    staged,
    total,
)

from delivered.connectors.delta import DeltaOptions, store
from delivered.connectors.delta.client import TableChange, commit, open_table
from delivered.connectors.delta.sink import DeltaSink
from delivered.connectors.delta.store import DeltaCommitter
from delivered.engine.context import open_ledger
from delivered.model.errors import BadRecord, Fenced, InvariantBroken, Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.work import Failed, Ok, Owner


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_every_type_comes_back_as_it_went_in(tmp_path: Path, compression: str) -> None:
    sink = sink_at(tmp_path, compression=compression)
    prepared = staged(sink, EVERY_TYPE)
    assert claimed(sink, EVERY_TYPE).decide(decision(0, prepared)) == Ok(None)
    assert total(scanned_table(sink), EVERY_TYPE.schema.names) == prepared.fingerprint
    theirs = pa.table(DeltaTable(str(tmp_path / "t")).to_pyarrow_table())
    for name in ("text", "bytes", "price", "day", "at", "at_zone", "list", "struct", "map", "big"):
        assert theirs[name].to_pylist() == EVERY_TYPE[name].to_pylist(), name


@pytest.mark.parametrize(
    "kind", [pa.uint8(), pa.timestamp("ns"), pa.time64("us"), pa.duration("us"), pa.null(), pa.list_(pa.uint64())]
)
def test_a_type_that_would_change_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="DELIVERED_COLUMN_TYPE"):
        sink_at(tmp_path).check_schema(pa.schema([pa.field("a", kind)]))


def test_local_times_in_maps_alone_are_refused_before_the_table_exists(tmp_path: Path) -> None:
    """The client makes a table of them that nobody can open."""
    local = pa.timestamp("us")
    for kind in (pa.map_(pa.string(), local), pa.list_(pa.map_(pa.string(), pa.struct([("a", local)])))):
        schema = pa.schema([("id", pa.int64()), ("v", kind)])
        with pytest.raises(UsageError, match=r"TYPE_UNKNOWN.*within maps"):
            sink_at(tmp_path).ready_target(schema)
        assert not (tmp_path / "t" / "_delta_log").exists()
    sink_at(tmp_path).ready_target(schema.append(pa.field("at", local)))


def test_partitions_are_written_apart_and_read_by_any_client(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "id": range(8),
            "day": pa.array([dt.date(2026, 1, 1), None] * 4),
            "city": ["a b", "c=d/é%", None, "x", "a b", "%20", "x", "x"],
            "paid": [True, False, None, True, True, True, False, None],
        }
    )
    sink = sink_at(tmp_path, partitionBy="day, city,paid")
    prepared = staged(sink, rows)
    assert len(prepared.handle["files"]) == 8 - 1
    assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
    theirs = pa.table(DeltaTable(str(tmp_path / "t")).to_pyarrow_table()).sort_by("id")
    assert theirs.select(rows.schema.names).to_pylist() == rows.to_pylist()
    assert total(scanned_table(sink), rows.schema.names) == prepared.fingerprint
    some = DeltaTable(str(tmp_path / "t")).to_pyarrow_table(filters=[("city", "=", "c=d/é%")])
    assert pa.table(some)["id"].to_pylist() == [1]


def test_more_partitions_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.kits.table.shard.OPEN_FILES_MAX", 3)
    rows = pa.table({"id": range(40), "k": [i % 7 for i in range(40)]})
    sink = sink_at(tmp_path, partitionBy="k")
    prepared = staged(sink, rows)
    assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
    assert scanned_table(sink).sort_by("id")["id"].to_pylist() == list(range(40))


def test_an_empty_text_in_a_partition_is_refused_not_turned_into_null(tmp_path: Path) -> None:
    rows = pa.table({"id": [1], "k": [""]})
    with pytest.raises(BadRecord, match=r"DELIVERED_VALUE_UNSTORABLE.*'k': an empty text"):
        staged(sink_at(tmp_path, partitionBy="k"), rows)


def test_statistics_bound_the_rows_and_let_readers_skip_files(tmp_path: Path) -> None:
    at = dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)
    price = pa.array([decimal.Decimal("1.5"), None], pa.decimal128(12, 2))
    rows = pa.table(
        {"id": [5, 7], "at": [at, at], "name": ["z" * 40, "b"], "f": [1.0, -2.5], "b": [b"x", b"y"], "no": [None, None]}
    )
    rows = rows.set_column(5, "no", pa.nulls(2, pa.string())).append_column("price", price)
    sink = sink_at(tmp_path)
    prepared = staged(sink, rows)
    found = json.loads(prepared.handle["files"][0]["statistics"])
    assert found["minValues"] == {"id": 5, "at": "2026-01-01T00:00:00.000Z", "name": "b", "f": -2.5, "price": 1.5}
    assert found["maxValues"] == {
        "id": 7, "at": "2026-01-01T00:00:00.001Z", "name": "z" * 32 + "\U0010ffff", "f": 1.0, "price": 1.5,
    }  # fmt: skip
    assert found["nullCount"] == {"id": 0, "at": 0, "name": 0, "f": 0, "b": 0, "no": 2, "price": 1}
    assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
    dataset = DeltaTable(str(tmp_path / "t")).to_pyarrow_dataset()
    for column, least in (("name", "c"), ("f", 0.5), ("id", 6), ("at", at), ("b", b"y"), ("price", decimal.Decimal(1))):
        wanted = 2 if column == "at" else 1
        assert dataset.count_rows(filter=pc.field(column) >= pa.scalar(least, rows.schema.field(column).type)) == wanted
    assert list(dataset.get_fragments(filter=pc.field("id") > 7)) == []


def test_bounds_are_there_for_all_columns_or_for_none(tmp_path: Path) -> None:
    """deltalake skips rows of a file with bounds for only some columns."""
    rows = pa.table({"id": [5, 7], "name": ["a", "b"], "f": [1.0, math.nan]})
    sink = sink_at(tmp_path)
    prepared = staged(sink, rows)
    assert json.loads(prepared.handle["files"][0]["statistics"]).keys() == {"numRecords", "nullCount"}
    assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
    dataset = DeltaTable(str(tmp_path / "t")).to_pyarrow_dataset()
    assert dataset.count_rows(filter=pc.field("name") > "a") == 1


def test_columns_are_added_on_request_alone(tmp_path: Path) -> None:
    claimed(sink_at(tmp_path)).decide(decision(0, staged(sink_at(tmp_path), ROWS)))
    wider = ROWS.append_column("note", pa.array(["x", "y", None]))
    with pytest.raises(UsageError, match="DELIVERED_COLUMN_MISSING"):
        sink_at(tmp_path).ready_target(wider.schema)
    sink = sink_at(tmp_path, mergeSchema="true")
    sink.ready_target(wider.schema)
    sink.ready_target(wider.schema)
    assert claimed(sink, wider).decide(decision(1, staged(sink, wider, 1))) == Ok(None)
    assert sorted(str(v) for v in scanned_table(sink)["note"].to_pylist()) == ["None"] * 4 + ["x", "y"]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (pa.table({"id": [1]}).cast(pa.schema([("id", pa.int32())])), "COLUMN_TYPE"),
        (pa.table({"ID": [1]}), "COLUMN_CASE"),
        (pa.table({"id": [1], "more": [1]}), "COLUMN_MISSING"),
        (pa.table({"id": [1], "Id": [1]}), "COLUMNS"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_start(tmp_path: Path, rows: pa.Table, code: str) -> None:
    sink_at(tmp_path).ready_target(ROWS.schema)
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        sink_at(tmp_path).ready_target(rows.schema)


def test_a_column_that_needs_a_value_gets_no_null(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string(), nullable=False)])
    DeltaTable.create(str(tmp_path / "t"), schema)
    sink = sink_at(tmp_path)
    with pytest.raises(UsageError, match="DELIVERED_COLUMN_REQUIRED"):
        sink.ready_target(ROWS.select(["id"]).schema)
    outcome = claimed(sink).decide(decision(0, staged(sink, ROWS)))
    assert isinstance(outcome, Failed)
    assert "COLUMN_REQUIRED" in outcome.reason
    assert scanned_table(sink).num_rows == 0


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ({"delta.setTransactionRetentionDuration": "interval 1 days"}, "TABLE_FORGETS"),
        ({"delta.constraints.low": "id > 5"}, "TABLE_FEATURES"),
    ],
)
def test_a_table_that_asks_for_more_is_refused(tmp_path: Path, properties: Mapping[str, str], code: str) -> None:
    DeltaTable.create(str(tmp_path / "t"), ROWS.schema)
    table = DeltaTable(str(tmp_path / "t"))
    if "constraints" in next(iter(properties)):
        table.alter.add_constraint({"low": "id > 5"})
    else:
        table.alter.set_table_properties(dict(properties), raise_if_not_exists=False)
    with pytest.raises(Refused, match=f"DELIVERED_{code}"):
        sink_at(tmp_path).ready_target(ROWS.schema)
    assert [f.code for f in sink_at(tmp_path).preflight(EXACT) if f.refuses] == [code]


def test_missing_table_and_unsafe_store_are_refused(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, ifNotExists="false")
    assert [f.code for f in sink.preflight(EXACT)] == ["TABLE_MISSING"]
    with pytest.raises(UsageError, match="DELIVERED_TABLE_MISSING"):
        sink.ready_target(ROWS.schema)
    with pytest.raises(Refused, match="DELIVERED_COMMIT_UNSAFE"):
        DeltaOptions.parse({"path": "s3://b/t", "storage.AWS_S3_ALLOW_UNSAFE_RENAME": "true"})
    with pytest.raises(UsageError, match="partitionBy"):
        sink_at(tmp_path, partitionBy="a,a")
    sink_at(tmp_path).ready_target(ROWS.schema)
    with pytest.raises(UsageError, match="DELIVERED_PARTITIONS"):
        sink_at(tmp_path, partitionBy="id").ready_target(ROWS.schema)


def test_others_may_append_and_compact_while_a_batch_is_decided(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged(sink, ROWS))) == Ok(None)
    prepared = staged(sink, ROWS, 1)
    stale = mine._store._table
    write_deltalake(str(tmp_path / "t"), ROWS, mode="append")
    DeltaTable(str(tmp_path / "t")).optimize.compact()
    mine._store._refresh = lambda: stale
    assert mine.decide(decision(1, prepared)) == Ok(None)
    assert scanned_table(sink).num_rows == 3 * ROWS.num_rows


def test_a_decision_under_way_fails_behind_a_later_claim(tmp_path: Path) -> None:
    """The driver is paused after reading the log; another one claims, but has not decided yet."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged(sink, ROWS)
    seen = mine._store._refresh()
    open_ledger(sink, SCOPE).claim(Owner("other"))
    mine._store._refresh = lambda: seen
    outcome = mine.decide(decision(0, prepared))
    assert isinstance(outcome, Failed)
    assert "Concurrent transaction" in outcome.reason
    assert scanned_table(sink).num_rows == 0
    assert open_ledger(sink, SCOPE).look().last is None


def test_p7_a_commit_that_met_itself_is_in(tmp_path: Path) -> None:
    """P7: the answer was lost, the client sent the commit again, and it failed as a conflict although it is in."""
    sink = sink_at(tmp_path)
    sink.ready_target(ROWS.schema)
    one, other = open_table(sink.options), open_table(sink.options)

    def there(version: int):  # type: ignore[no-untyped-def]
        return lambda now: now.transaction_version("x") == version

    assert commit(sink.options, one, TableChange((), {"x": 1}), there(1)) == Ok(None)
    assert commit(sink.options, other, TableChange((), {"x": 1}), there(1)) == Ok(None)
    assert isinstance(commit(sink.options, open_at(sink, 0), TableChange((), {"x": 2}), there(2)), Failed)


def test_p7_a_decision_whose_answer_was_lost_is_found_behind_later_ones(tmp_path: Path) -> None:
    """Meanwhile another driver claimed, and decided the next batch: ours is in all the same, with its record."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged(sink, ROWS)
    seen = mine._store._refresh()
    twin = open_ledger(sink, SCOPE)
    twin.resume("o")
    assert twin.decide(decision(0, prepared)) == Ok(None)
    other = open_ledger(sink, SCOPE)
    other.claim(Owner("other"))
    assert other.decide(decision(1, staged(sink, ROWS, 1), owner="other")) == Ok(None)
    mine._store._refresh = lambda: seen
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert [d.batch for d in other.history()] == [0, 1]
    assert scanned_table(sink).num_rows == 2 * ROWS.num_rows


def open_at(sink: DeltaSink, version: int) -> DeltaTable:
    return DeltaTable(sink.options.path, version=version)


def test_two_drivers_that_claim_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    sink.ready_target(ROWS.schema)
    epochs: list[int] = []
    fenced: list[Fenced] = []

    def claim(name: str) -> None:
        try:
            epochs.append(open_ledger(sink, SCOPE).claim(Owner(name)).epoch)
        except Fenced as error:
            fenced.append(error)

    threads = [threading.Thread(target=claim, args=(f"o{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(epochs)) == len(epochs) == 6 - len(fenced) > 0
    assert open_ledger(sink, SCOPE).look().epoch in epochs
    owner = open_ledger(sink, SCOPE).look().owner
    assert owner is not None
    assert len(owner.superseded) == 5


def test_abort_takes_nothing_away_that_counts(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared, stray = staged(sink, ROWS), staged(sink, ROWS)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    committer = DeltaCommitter(sink.options, SCOPE)
    assert committer.abort(prepared) == Ok(None)
    assert committer.abort_orphans(()) == Ok(1)
    assert committer.abort(stray) == Ok(None)
    assert scanned_table(sink).num_rows == ROWS.num_rows


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_decision_never_names_a_file_that_is_not_whole(tmp_path: Path, damage: str) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    one, other = staged(sink, ROWS), staged(sink, ROWS, shard=1)
    file = tmp_path / "t" / other.handle["files"][0]["path"]
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    outcome = mine.decide(decision(0, one, other))
    assert isinstance(outcome, Failed)
    assert "STAGED_FILE_GONE" in outcome.reason
    assert scanned_table(sink).num_rows == 0


def test_abort_orphans_leaves_files_of_others_in_the_table_alone(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    claimed(sink)
    write_deltalake(str(tmp_path / "t"), ROWS, mode="append")
    foreign = tmp_path / "t" / "part-0.parquet"
    foreign.write_bytes(b"of somebody else")
    theirs = staged(sink, ROWS, scope=Scope("orders", "t.more", "i0"))
    assert DeltaCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
    assert foreign.exists()
    assert (tmp_path / "t" / theirs.handle["files"][0]["path"]).exists()
    assert scanned_table(sink).num_rows == ROWS.num_rows


def test_a_lost_record_of_the_ledger_is_told(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert claimed(sink).decide(decision(0, staged(sink, ROWS))) == Ok(None)
    for file in (tmp_path / "t" / "_delivered").rglob("0-*.json"):
        file.unlink()
    with pytest.raises(InvariantBroken, match="DELIVERED_LEDGER_RECORD_MISSING"):
        open_ledger(sink, SCOPE).look()


def test_p4_ledger_and_log_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: a ledger that grew until the service hung."""
    monkeypatch.setattr(store, "LEDGER_HISTORY_BATCHES", 50)
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    DeltaTable(str(tmp_path / "t")).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "25"}
    )
    sizes = []
    for batch in range(151):
        assert mine.decide(decision(batch)) == Ok(None)
        if batch % 50 == 0:
            mine.claim(Owner("o"))
            sizes.append(
                (
                    len(list((tmp_path / "t/_delta_log").iterdir())),
                    len(list((tmp_path / "t/_delivered").rglob("*.json"))),
                )
            )
    assert [d.batch for d in mine.history()] == list(range(101, 151))
    assert max(n for n, _ in sizes) <= 60
    assert max(n for _, n in sizes) <= 115
    checkpoint = sorted((tmp_path / "t/_delta_log").glob("*.checkpoint.parquet"))[-1]
    import pyarrow.parquet as pq

    known = [t for t in pq.read_table(checkpoint, columns=["txn"])["txn"].to_pylist() if t and t["appId"]]
    assert len(known) == 3
