"""The Iceberg sink alone: types, partitions, errors, concurrent writers, lost replies."""

from __future__ import annotations

import datetime as dt
import decimal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalogBaseTable
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, NestedField, StringType
from tests.support.iceberg import NAME, before_commit, others, seen, sink_at, staged_in, strays, theirs
from tests.support.scans import scanned_table
from tests.support.tables import EVERY_TYPE, EXACT, ROWS, SCOPE, claimed, decision, staged, total

from delivered.connectors.iceberg import CONNECTOR, IcebergOptions, client
from delivered.connectors.iceberg.sink import IcebergSink
from delivered.connectors.iceberg.store import IcebergCommitter, Names, Records, ledger_key
from delivered.engine.context import open_ledger
from delivered.kits.table import shard
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, Fenced, InvariantBroken, Refused, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.work import Failed, Ok, Owner, Promise, Unknown

__all__ = ["before_commit"]


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_every_type_comes_back_as_it_went_in(tmp_path: Path, compression: str) -> None:
    sink = sink_at(tmp_path, compression=compression)
    prepared = staged_in(sink, EVERY_TYPE)
    assert claimed(sink, EVERY_TYPE).decide(decision(0, prepared)) == Ok(None)
    assert total(scanned_table(sink), EVERY_TYPE.schema.names) == prepared.fingerprint
    found = seen(tmp_path)
    assert [str(f.field_type) for f in theirs(tmp_path).schema().fields][:5] == ["boolean", "int", "int", "int", "long"]
    for name in ("tiny", "text", "bytes", "price", "day", "at", "at_zone", "list", "struct", "map", "big"):
        assert found[name].to_pylist() == EVERY_TYPE[name].to_pylist(), name


@pytest.mark.parametrize(
    "kind", [pa.uint8(), pa.timestamp("ns"), pa.time64("us"), pa.duration("us"), pa.null(), pa.list_(pa.uint64())]
)
def test_a_type_that_would_change_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    with pytest.raises(UsageError, match="DELIVERED_COLUMN_TYPE"):
        sink_at(tmp_path).check_schema(pa.schema([pa.field("a", kind)]))


def test_partitions_are_known_to_any_reader(tmp_path: Path) -> None:
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    rows = pa.table(
        {
            "id": range(8),
            "day": pa.array([dt.date(2026, 1, 1), None] * 4),
            "city": ["a b", "c=d/é%", None, "x", "", "%20", "x", "x"],
            "at": pa.array([noon + dt.timedelta(days=i // 4) for i in range(8)], pa.timestamp("us", "UTC")),
            "price": pa.array([decimal.Decimal(i) for i in range(8)], pa.decimal128(9, 2)),
            "paid": [True, False, None, True, True, True, False, None],
        }
    )
    for number, spec in enumerate(["day,city, paid", "days(at)", "bucket(4, id),truncate(1,city)", "price,years(day)"]):
        folder = tmp_path / str(number)
        sink = sink_at(folder, partitionBy=spec)
        prepared = staged_in(sink, rows)
        assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
        assert seen(folder).sort_by("id").select(rows.schema.names).to_pylist() == rows.to_pylist()
        assert total(scanned_table(sink), rows.schema.names) == prepared.fingerprint
        assert theirs(folder).scan(row_filter="id == 5").to_arrow()["id"].to_pylist() == [5]
    table = theirs(tmp_path / "0")
    assert [f.name for f in table.spec().fields] == ["day", "city", "paid"]
    assert len(list(table.scan(row_filter="city == 'c=d/é%'").plan_files())) == 1
    table = theirs(tmp_path / "1")
    assert [f.name for f in table.spec().fields] == ["at_day"]
    [task] = table.scan(row_filter="at >= '2026-01-02T00:00:00+00:00'").plan_files()
    assert task.file.partition[0] == (noon.date() - dt.date(1970, 1, 1)).days + 1
    # The client itself puts the same rows into the same partitions.
    for number in ("1", "2"):
        table = theirs(tmp_path / number)
        mine = {task.file.partition for task in table.scan().plan_files()}
        table.append(rows.cast(table.schema().as_arrow()))
        assert {task.file.partition for task in theirs(tmp_path / number).scan().plan_files()} == mine


def test_statistics_let_readers_leave_files_out(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert claimed(sink).decide(decision(0, staged_in(sink))) == Ok(None)
    for filter_, files in (("id > 3", 0), ("id >= 3", 1), ("name < 'a'", 0), ("name is null", 1), ("id is null", 0)):
        assert len(list(theirs(tmp_path).scan(row_filter=filter_).plan_files())) == files, filter_


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
    fields = NestedField(1, "id", LongType(), required=True), NestedField(2, "name", StringType(), required=True)
    tmp_path.mkdir(exist_ok=True)
    catalog = others(tmp_path)
    catalog.create_namespace("shop")
    catalog.create_table(NAME, Schema(*fields))
    sink = sink_at(tmp_path)
    with pytest.raises(UsageError, match="DELIVERED_COLUMN_REQUIRED"):
        sink.ready_target(ROWS.select(["id"]).schema)
    with pytest.raises(BadRecord, match="DELIVERED_COLUMN_REQUIRED"):
        staged_in(sink)
    whole = ROWS.slice(0, 1)
    assert claimed(sink, whole).decide(decision(0, staged_in(sink, whole))) == Ok(None)
    assert seen(tmp_path)["id"].to_pylist() == [1]


@pytest.mark.parametrize("properties", [{"format-version": "1"}, {"write.wap.enabled": "true"}])
def test_a_table_that_asks_for_more_is_refused(tmp_path: Path, properties: dict[str, str]) -> None:
    catalog = others(tmp_path)
    catalog.create_namespace("shop")
    catalog.create_table(NAME, ROWS.schema, properties=properties)
    with pytest.raises(Refused, match="DELIVERED_TABLE_FEATURES"):
        sink_at(tmp_path).ready_target(ROWS.schema)
    assert [f.code for f in sink_at(tmp_path).preflight(EXACT) if f.refuses] == ["TABLE_FEATURES"]


def test_equality_deletes_of_another_writer_stop_what_must_read_them(tmp_path: Path) -> None:
    catalog = others(tmp_path)
    catalog.create_namespace("shop")
    table = catalog.create_table(NAME, ROWS.schema)
    table.append(ROWS)
    path = f"{table.location()}/data/deletes.parquet"
    deletes = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES, file_path=path, file_format=FileFormat.PARQUET, partition=Record(),
        record_count=1, file_size_in_bytes=10, equality_ids=[1], spec_id=0,
    )  # fmt: skip
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as commit:
        commit.append_data_file(deletes)
    assert [f.code for f in sink_at(tmp_path).preflight(EXACT) if f.refuses] == []
    with pytest.raises(Refused, match=r"TABLE_FEATURES.*equality deletes.*rewrite_data_files"):
        sink_at(tmp_path).scan().slices()
    upserts = sink_at(tmp_path, mode="upsert", keyColumns="id")
    assert [f.code for f in upserts.preflight(EXACT) if f.refuses] == ["TABLE_FEATURES"]


def test_what_is_named_wrong_is_refused_before_the_start(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, ifNotExists="false")
    assert [f.code for f in sink.preflight(EXACT)] == ["TABLE_MISSING"]
    with pytest.raises(UsageError, match="DELIVERED_TABLE_MISSING"):
        sink.ready_target(ROWS.schema)
    for given in (
        {"table": "orders", "warehouse": "/tmp/w"},
        {"table": "a.b"},
        {"table": "a.b", "warehouse": "/tmp/w", "catalog.uri": "http://somewhere"},
        {"table": "a.b", "warehouse": "s3://lake"},
        {"table": "a.b", "warehouse": "/tmp/w", "partitionBy": "days(a"},
        {"table": "a.b", "warehouse": "/tmp/w", "partitionBy": "bucket(a)"},
        {"table": "a.b", "warehouse": "/tmp/w", "partitionBy": "weeks(a)"},
        {"table": "a.b", "warehouse": "/tmp/w", "partitionBy": "a,a"},
        {"table": "a.b", "catalog.uri": "http://somewhere", "catalog.type": "hive"},
        {"table": "a.b", "catalog.uri": "http://somewhere", "catalog.py-io-impl": "mine.FileIO"},
    ):
        with pytest.raises(UsageError, match="DELIVERED_OPTION_VALUE"):
            IcebergOptions.parse(given)
    with pytest.raises(UsageError, match="DELIVERED_PARTITION_TYPE"):
        sink_at(tmp_path, partitionBy="days(id)").ready_target(ROWS.schema)
    sink_at(tmp_path).ready_target(ROWS.schema)
    with pytest.raises(UsageError, match="DELIVERED_PARTITIONS"):
        sink_at(tmp_path, partitionBy="id").ready_target(ROWS.schema)
    with pytest.raises(UsageError, match="PASSWORD_IN_URL") as caught:
        IcebergOptions.parse({"table": "a.b", "catalog.uri": "http://u:hunter2@somewhere"})
    assert "hunter2" not in str(caught.value)
    options = IcebergOptions.parse({"table": "a.b", "catalog.uri": "http://h", "catalog.credential": "hunter2"})
    assert "hunter2" not in repr(options)


def test_a_catalog_that_does_not_answer_is_told(tmp_path: Path) -> None:
    sink = CONNECTOR.sink({"table": NAME, "catalog.uri": "http://127.0.0.1:9"})
    [found] = sink.preflight(EXACT)
    assert found.code == "STORAGE_UNREACHABLE"
    assert found.refuses


def test_rows_that_others_append_meanwhile_fence_nobody(tmp_path: Path, before_commit: Any) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged_in(sink))) == Ok(None)

    def append(ask: Callable[[], Any]) -> Any:
        table = theirs(tmp_path)
        table.append(ROWS.cast(table.schema().as_arrow()))
        return ask()

    before_commit(append)
    assert mine.decide(decision(1, staged_in(sink, ROWS, 1))) == Ok(None)
    assert seen(tmp_path).num_rows == 3 * ROWS.num_rows
    assert mine.resume("o").last.batch == 1
    assert strays(tmp_path) == set()  # those of the first attempt are gone


def test_a_claim_of_another_pipeline_meanwhile_fences_nobody(tmp_path: Path, before_commit: Any) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged_in(sink))) == Ok(None)

    def claim(ask: Callable[[], Any]) -> Any:
        open_ledger(sink, Scope("more", "t", "i0")).claim(Owner("else"))
        return ask()

    before_commit(claim)
    assert mine.decide(decision(1, staged_in(sink, ROWS, 1))) == Ok(None)
    assert seen(tmp_path).num_rows == 2 * ROWS.num_rows


def test_a_decision_under_way_fails_behind_a_later_claim(tmp_path: Path, before_commit: Any) -> None:
    """The driver is paused after reading the table; another one claims, but has not decided yet."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)

    def claim(ask: Callable[[], Any]) -> Any:
        open_ledger(sink, SCOPE).claim(Owner("other"))
        return ask()

    before_commit(claim)
    outcome = mine.decide(decision(0, prepared))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_FENCED" in outcome.reason
    assert scanned_table(sink).num_rows == 0
    assert open_ledger(sink, SCOPE).look().last is None
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(1)
    assert strays(tmp_path) == set()


@pytest.mark.parametrize("error", [CommitStateUnknownException, CommitFailedException, ConnectionResetError])
def test_p7_a_decision_whose_answer_was_lost_is_in(tmp_path: Path, before_commit: Any, error: type[Exception]) -> None:
    """P7: the commit got in; its answer was lost, or was that of the same request sent once more."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)

    def lose(ask: Callable[[], Any]) -> Any:
        ask()
        raise error("lost")

    before_commit(lose)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert scanned_table(sink).num_rows == ROWS.num_rows
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert scanned_table(sink).num_rows == ROWS.num_rows


def test_a_decision_that_may_still_get_in_is_unknown_and_fenced_by_a_claim(tmp_path: Path, before_commit: Any) -> None:
    """The request is in flight; the driver claims again and checks; then the request arrives."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)
    late: list[Callable[[], Any]] = []

    def hang(ask: Callable[[], Any]) -> Any:
        late.append(ask)
        raise ConnectionResetError("no answer")

    before_commit(hang)
    outcome = mine.decide(decision(0, prepared))
    assert isinstance(outcome, Unknown)
    assert mine.claim(Owner("o")).last is None
    with pytest.raises(CommitFailedException):
        late[0]()
    assert scanned_table(sink).num_rows == 0
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert scanned_table(sink).num_rows == ROWS.num_rows


def test_p7_a_decision_is_found_behind_later_ones(tmp_path: Path, before_commit: Any) -> None:
    """Its answer was lost, and another driver claimed and decided the next batch before anybody looked."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)
    other = open_ledger(sink, SCOPE)

    def lose(ask: Callable[[], Any]) -> Any:
        ask()
        other.claim(Owner("other"))
        assert other.decide(decision(1, staged_in(sink, ROWS, 1), owner="other")) == Ok(None)
        raise CommitStateUnknownException("lost")

    before_commit(lose)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert [d.batch for d in other.history()] == [0, 1]
    assert scanned_table(sink).num_rows == 2 * ROWS.num_rows


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_a_shard_sent_without_an_answer(tmp_path: Path, before_commit: Any, guarantee: Guarantee) -> None:
    sink = sink_at(tmp_path)
    sink.ready_target(ROWS.schema)
    writer = sink.writer(Work(SCOPE, 0, 0), guarantee, ROWS.schema)
    whole = staged(sink, ROWS).fingerprint  # type: ignore[arg-type]
    for part in ROWS.to_batches():
        writer.stage(part)

    def hang(ask: Callable[[], Any]) -> Any:
        raise ConnectionResetError("no answer")

    before_commit(hang)
    if guarantee is Guarantee.AT_MOST_ONCE:
        assert writer.prepare(whole) == Promise(given_up={"unknown": ROWS.num_rows})
    else:
        with pytest.raises(Exception, match="DELIVERED_COMMIT_UNKNOWN"):
            writer.prepare(whole)
    writer.abort()
    assert list((tmp_path / "shop" / "t" / "data" / "delivered").rglob("direct/*.parquet"))  # it may still be committed


@pytest.mark.parametrize("other_is_done", [False, True])
def test_drivers_may_create_a_catalog_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_is_done: bool
) -> None:
    """The client looks for both tables of a SQL catalog, then creates them: another driver is faster in between."""
    metadata = SqlCatalogBaseTable.metadata
    create, others_tables = metadata.create_all, [*metadata.sorted_tables][: 2 if other_is_done else 1]

    def late(engine: Any) -> None:
        monkeypatch.setattr(metadata, "create_all", create)
        create(engine, tables=others_tables)
        create(engine, checkfirst=False)

    monkeypatch.setattr(metadata, "create_all", late)
    assert claimed(sink_at(tmp_path), ROWS).look().owner is not None


def test_drivers_that_claim_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    """On a table without snapshots, which the client's own branch check rejects."""
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
    state = open_ledger(sink, SCOPE).look()
    assert state.epoch == 6
    assert state.owner is not None
    assert len(state.owner.superseded) == 5
    assert len(theirs(tmp_path).snapshots()) == 1


def test_expired_snapshots_take_no_decision_along(tmp_path: Path) -> None:
    """P3: a replay recognised only within the retained snapshot history."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    decisions = [decision(batch, staged_in(sink, ROWS, batch)) for batch in range(3)]
    for one in decisions:
        assert mine.decide(one) == Ok(None)
    table = theirs(tmp_path)
    table.append(ROWS.cast(table.schema().as_arrow()))
    refs = {ref.snapshot_id for ref in table.refs().values()}
    table.maintenance.expire_snapshots().by_ids(
        [s.snapshot_id for s in table.snapshots() if s.snapshot_id not in refs]
    ).commit()
    assert len(theirs(tmp_path).snapshots()) == 2
    assert open_ledger(sink, SCOPE).look().last == decisions[-1]
    assert mine.decide(decisions[-1]) == Ok(None)
    outcome = mine.decide(decisions[0])
    assert isinstance(outcome, Failed)
    assert "DECIDED_OTHERWISE" in outcome.reason
    assert seen(tmp_path).num_rows == 4 * ROWS.num_rows
    assert [d.batch for d in mine.history()] == [2]
    assert mine.decide(decision(3, staged_in(sink, ROWS, 3))) == Ok(None)


def test_a_claim_that_somebody_drops_is_missed_and_made_again(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)
    theirs(tmp_path).manage_snapshots().remove_branch(Names(SCOPE).branch).commit()
    outcome = mine.decide(decision(0, prepared))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_FENCED" in outcome.reason
    mine.claim(Owner("o"))
    assert mine.decide(decision(0, prepared)) == Ok(None)


def test_columns_altered_while_a_batch_is_written(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged_in(sink)
    with theirs(tmp_path).update_schema() as update:
        update.add_column("note", StringType())
    assert mine.decide(decision(0, prepared)) == Ok(None)  # a column that the rows lack
    prepared = staged_in(sink, ROWS, 1)
    with theirs(tmp_path).update_schema() as update:
        update.rename_column("name", "called")
    outcome = mine.decide(decision(1, prepared))
    assert isinstance(outcome, Failed)
    assert "TABLE_ALTERED" in outcome.reason
    assert scanned_table(sink).num_rows == ROWS.num_rows


def test_abort_takes_nothing_away_that_counts(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared, stray = staged_in(sink), staged_in(sink)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    committer = IcebergCommitter(sink.options, SCOPE)
    assert committer.abort(prepared) == Ok(None)
    assert committer.abort_orphans(()) == Ok(1)
    assert committer.abort(stray) == Ok(None)
    assert scanned_table(sink).num_rows == ROWS.num_rows


@pytest.mark.parametrize("damage", ["gone", "cut", "manifest gone"])
def test_a_decision_never_names_a_file_that_is_not_whole(tmp_path: Path, damage: str) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    one, other = staged_in(sink), staged_in(sink, shard=1)
    kind = "manifest.avro" if damage == "manifest gone" else "0.parquet"
    file = tmp_path / "shop" / "t" / "data" / f"{other.handle['writer']}-{kind}"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    outcome = mine.decide(decision(0, one, other))
    assert isinstance(outcome, Failed)
    assert "STAGED_FILE_GONE" in outcome.reason
    assert scanned_table(sink).num_rows == 0


def test_abort_orphans_leaves_files_of_others_in_the_table_alone(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    claimed(sink)
    table = theirs(tmp_path)
    table.append(ROWS.cast(table.schema().as_arrow()))
    foreign = [tmp_path / "shop" / "t" / kind / "part-0.parquet" for kind in ("data", "metadata")]
    for file in foreign:
        file.write_bytes(b"of somebody else")
    more = Scope("orders", "t.more", "i0")
    prepared = staged_in(sink, scope=more)
    open_ledger(sink, more).claim(Owner("else"))
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
    assert all(file.exists() for file in foreign)
    assert (tmp_path / "shop" / "t" / "data" / f"{prepared.handle['writer']}-0.parquet").exists()
    assert open_ledger(sink, more).resume("else").epoch == 1
    assert seen(tmp_path).num_rows == ROWS.num_rows


def test_manifests_of_a_driver_that_died_in_its_commit_are_removed(tmp_path: Path, before_commit: Any) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged_in(sink))) == Ok(None)

    def die(ask: Callable[[], Any]) -> Any:
        raise KeyboardInterrupt

    for step in (lambda: mine.decide(decision(1, staged_in(sink, ROWS, 1))), lambda: mine.claim(Owner("o"))):
        before_commit(die)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert len(strays(tmp_path)) == 3  # two of the decision, one of the claim
    mine.claim(Owner("o"))
    assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(1)
    assert strays(tmp_path) == set()
    assert seen(tmp_path).num_rows == ROWS.num_rows
    assert mine.decide(decision(1, staged_in(sink, ROWS, 1))) == Ok(None)


def test_f7_a_driver_that_lost_its_claim_removes_nothing(tmp_path: Path) -> None:
    """F7: paused between claim and aborting orphans; meanwhile another driver claims, and its tasks write."""
    sink = sink_at(tmp_path)
    claimed(sink)
    mine = open_ledger(sink, SCOPE).look().epoch
    other = open_ledger(sink, SCOPE)
    other.claim(Owner("other"))
    prepared = staged_in(sink)
    shard.record_claim(ledger_key(sink.options, SCOPE), mine)  # as in the first driver's process
    outcome = IcebergCommitter(sink.options, SCOPE).abort_orphans(())
    assert isinstance(outcome, Unknown)
    assert "DELIVERED_FENCED" in outcome.reason
    assert other.decide(decision(0, prepared, owner="other")) == Ok(None)
    assert seen(tmp_path).num_rows == ROWS.num_rows


def test_a_spoiled_record_of_the_ledger_is_told(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert claimed(sink).decide(decision(0, staged_in(sink))) == Ok(None)
    with theirs(tmp_path).transaction() as change:
        change.set_properties({Names(SCOPE).decided("i0"): "0 mark ???"})
    with pytest.raises(InvariantBroken, match="DELIVERED_LEDGER_RECORD_MISSING"):
        open_ledger(sink, SCOPE).look()


def test_what_the_catalog_points_to_is_durable_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files and their names are synced before the commit; the client itself syncs nothing."""
    synced: set[Path] = set()
    real = client.sync
    monkeypatch.setattr(client, "sync", lambda paths: (synced.update(paths), real(paths)))
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged_in(sink))) == Ok(None)
    table = theirs(tmp_path)
    snapshot = table.current_snapshot()
    named = {table.metadata_location, snapshot.manifest_list} | {m.manifest_path for m in snapshot.manifests(table.io)}
    paths = {Path(name.removeprefix("file://")) for name in named}
    assert paths | {p.parent for p in paths} <= synced


def test_p4_ledger_and_metadata_stay_bounded(tmp_path: Path) -> None:
    """P4: a ledger that grew until the service hung. Snapshots are for the table's owner to expire."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    with theirs(tmp_path).transaction() as change:
        change.set_properties({"write.metadata.previous-versions-max": "5"})
    sizes = []
    for batch in range(41):
        assert mine.decide(decision(batch)) == Ok(None)
        if batch % 20 == 0:
            mine.claim(Owner("o"))
            assert IcebergCommitter(sink.options, SCOPE).abort_orphans(()) == Ok(0)
            table = theirs(tmp_path)
            refs = {ref.snapshot_id for ref in table.refs().values()}
            old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id not in refs]
            if old:
                table.maintenance.expire_snapshots().by_ids(old).commit()
            files = len(list((tmp_path / "shop" / "t" / "metadata").glob("*.json")))
            sizes.append((files, len(table.properties), len(theirs(tmp_path).metadata.model_dump_json())))
    assert [d.batch for d in mine.history()] == [40]
    assert sizes[-1][0] <= 8
    assert sizes[-1][1] == sizes[-2][1]
    assert sizes[-1][2] < sizes[-2][2] + 500
    assert Records(theirs(tmp_path), SCOPE).newest("i0") == 40


def test_rest_catalog_whose_answer_is_lost(tmp_path: Path, rest_catalog: Any) -> None:
    sink = CONNECTOR.sink({"table": NAME, "catalog.uri": rest_catalog.url, "partitionBy": "id"})
    assert isinstance(sink, IcebergSink)
    mine = claimed(sink)
    prepared = staged_in(sink)
    rest_catalog.lose_answers, before = 1, rest_catalog.commits
    assert mine.decide(decision(0, prepared)) == Ok(None)
    assert rest_catalog.commits == before + 1
    assert scanned_table(sink).num_rows == ROWS.num_rows
    open_ledger(sink, SCOPE).claim(Owner("other"))
    assert "DELIVERED_FENCED" in mine.decide(decision(1, staged_in(sink, ROWS, 1))).reason
