"""The files sink alone: types in every format, what other readers see, errors, fencing, sizes."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from tests.support.scans import scanned

from delivered.connectors.files import CONNECTOR, FilesOptions, Places, store
from delivered.connectors.files.sink import FilesSink
from delivered.connectors.files.store import FilesCommitter
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import Fenced, Refused, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.step import install
from delivered.model.work import Account, Decision, Failed, Ok, Owner, Prepared, Started

EXACT = Guarantee.EXACTLY_ONCE
SCOPE = Scope("orders", "t", "i0")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", None, "ü z"]})
SUMMER_TIME = dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC)
FLAT = pa.table(
    {
        "flag": pa.array([True, False, None]),
        "tiny": pa.array([-128, 127, None], pa.int8()),
        "big": pa.array([-(2**63), 2**63 - 1, None], pa.int64()),
        "double": pa.array([math.inf, math.nan, -2.5e-300], pa.float64()),
        "single": pa.array([0.1, None, -math.inf], pa.float32()),
        "text": pa.array(["", None, 'a,"b"\n c\r\nü']),
        "price": pa.array([decimal.Decimal("0.0000000001"), decimal.Decimal(-10) ** 27, None], pa.decimal128(38, 10)),
        "day": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        "at": pa.array([-62_135_596_800_000_000, 253_402_300_799_999_999, None], pa.timestamp("us")),
        "at_zone": pa.array([SUMMER_TIME, dt.datetime(1, 1, 1, tzinfo=dt.UTC), None], pa.timestamp("us", "UTC")),
    }
)
NESTED = (
    FLAT.append_column("bytes", pa.array([b"", b"\0\xff", None]))
    .append_column("list", pa.array([[1, None], [], None], pa.list_(pa.int32())))
    .append_column("struct", pa.array([{"a": 1, "b": SUMMER_TIME}, {"a": None, "b": None}, None]))
    .append_column("map", pa.array([[("k", 1.5)], [], None], pa.map_(pa.string(), pa.float64())))
)


def sink_at(path: Path, **given: str) -> FilesSink:
    sink = CONNECTOR.sink({"path": str(path / "t"), **given})
    assert isinstance(sink, FilesSink)
    return sink


def staged(sink: FilesSink, rows: pa.Table, batch: int = 0, shard: int = 0, guarantee: Guarantee = EXACT) -> Prepared:
    work = Work(SCOPE, batch, shard)
    writer = sink.writer(work, guarantee, rows.schema)
    total = Fingerprint()
    for part in rows.to_batches():
        total += fingerprint(sink.records(part), 0)
        writer.stage(part)
    return Prepared.of(work, total, writer.prepare(total))


def decision(batch: int, *prepared: Prepared) -> Decision:
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    return Decision(SCOPE, "o", EXACT, batch, "{}", prepared, {SCOPE.sink: Account(total)}, batch + 1)


def claimed(sink: FilesSink, rows: pa.Table = ROWS) -> Ledger:
    sink.ready_target(rows.schema)
    found = open_ledger(sink, SCOPE)
    found.claim(Owner("o"))
    return found


def read_back(sink: FilesSink) -> Fingerprint:
    return sum((fingerprint(b, 0) for b in scanned(sink)), Fingerprint())


@pytest.mark.parametrize(("kind", "rows"), [("parquet", NESTED), ("json", NESTED), ("csv", FLAT)])
def test_every_type_comes_back_as_it_went_in(tmp_path: Path, kind: str, rows: pa.Table) -> None:
    sink = sink_at(tmp_path, fileFormat=kind)
    sink.check_schema(rows.schema)
    prepared = staged(sink, rows)
    assert claimed(sink, rows).decide(decision(0, prepared)) == Ok(None)
    assert read_back(sink) == prepared.fingerprint


@pytest.mark.checkpoint("the files sink's `fileFormat`", "continues", "an audit reads the files of every format")
def test_files_of_an_earlier_format_are_read(tmp_path: Path) -> None:
    """Regression: an audit counted their rows as lost. Files of others count in the present format alone."""
    total = Fingerprint()
    for batch, kind in enumerate(["parquet", "json", "csv"]):
        sink = sink_at(tmp_path, fileFormat=kind)
        prepared = staged(sink, FLAT, batch)
        total += prepared.fingerprint
        before = decision(batch, prepared)
        assert claimed(sink, FLAT).decide(replace(before, accounts={SCOPE.sink: Account(total)})) == Ok(None)
        (tmp_path / "t" / "others.json").write_text("[]")
        assert read_back(sink_at(tmp_path, fileFormat="csv")) == total


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_other_readers_find_the_rows_and_nothing_of_ours(tmp_path: Path, kind: str) -> None:
    sink = sink_at(tmp_path, fileFormat=kind)
    mine = claimed(sink)
    assert mine.decide(decision(0, staged(sink, ROWS), staged(sink, ROWS, shard=1))) == Ok(None)
    staged(sink, ROWS, 1)  # undecided
    theirs = ds.dataset(str(tmp_path / "t"), format=kind, partitioning="hive").to_table()
    assert sorted(theirs["id"].to_pylist()) == [1, 1, 2, 2, 3, 3]
    assert set(theirs["batch"].to_pylist()) == {"i0-0000000000"}
    [folder] = [p for p in (tmp_path / "t").iterdir() if not p.name.startswith("_")]
    assert sorted(p.name for p in folder.iterdir()) == [f"00000.{kind}", f"00001.{kind}", "_decision.json"]


@pytest.mark.parametrize(
    ("kind", "schema", "code"),
    [
        ("csv", pa.schema([("a", pa.int64()), ("b", pa.binary())]), "COLUMN_TYPE"),
        ("csv", pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int64()))]), "COLUMN_TYPE"),
        ("csv", pa.schema([("a", pa.int64())]), "COLUMNS"),
        ("json", pa.schema([("a", pa.map_(pa.int64(), pa.int64()))]), "COLUMN_TYPE"),
        ("parquet", pa.schema([("a", pa.null())]), "COLUMN_TYPE"),
        ("parquet", pa.schema([("batch", pa.int64())]), "COLUMNS"),
        ("parquet", pa.schema([("a", pa.int64()), ("A", pa.int64())]), "COLUMNS"),
    ],
)
def test_what_a_format_would_lose_is_refused(tmp_path: Path, kind: str, schema: pa.Schema, code: str) -> None:
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        sink_at(tmp_path, fileFormat=kind).check_schema(schema)


def test_another_schema_and_an_object_store_are_refused(tmp_path: Path) -> None:
    sink_at(tmp_path).ready_target(ROWS.schema)
    with pytest.raises(UsageError, match="DELIVERED_SCHEMA_CHANGED"):
        sink_at(tmp_path).ready_target(ROWS.select(["id"]).schema)
    with pytest.raises(Refused, match="DELIVERED_NO_RENAME"):
        FilesOptions.parse({"path": "s3://lake/t"})
    assert not sink_at(tmp_path).preflight(EXACT)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    [finding] = sink_at(tmp_path).preflight(EXACT)
    assert (finding.code, finding.refuses) == ("PATH_KIND", True)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_decision_never_takes_a_file_that_is_not_whole(tmp_path: Path, damage: str) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    one, other = staged(sink, ROWS), staged(sink, ROWS, shard=1)
    file = Places(sink.options, SCOPE).staged("i0") / other.handle["file"]
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    outcome = mine.decide(decision(0, one, other))
    assert isinstance(outcome, Failed)
    assert "STAGED_FILE_GONE" in outcome.reason
    assert read_back(sink) == Fingerprint()


@pytest.mark.parametrize("what", ["decide", "decide nothing", "begin"])
def test_what_is_under_way_behind_a_later_claim_fails(tmp_path: Path, what: str) -> None:
    """The driver is paused after checking its ownership; another one claims, but has not decided yet."""
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    files = mine._store
    assert isinstance(files, store.FilesStore)
    prepared = staged(sink, ROWS)
    seen, look = files._head(), files._head
    open_ledger(sink, SCOPE).claim(Owner("other"))
    looks = iter([lambda: seen])
    files._head = lambda: next(looks, look)()  # type: ignore[method-assign]
    if what == "begin":
        outcome = mine.begin(Started(0, "{}"))
    else:
        outcome = mine.decide(decision(0, *([prepared] if what == "decide" else [])))
    assert isinstance(outcome, Failed)
    assert "FENCED" in outcome.reason
    state = open_ledger(sink, SCOPE).look()
    assert (state.last, state.started) == (None, None)
    assert read_back(sink) == Fingerprint()


def test_a_claim_in_the_middle_of_a_decision_fences_it(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged(sink, ROWS)

    def claim(point: str, facts: dict[str, object]) -> None:
        if point == "commit.apply:after":
            install(None)
            open_ledger(sink, SCOPE).claim(Owner("other"))

    install(claim)
    try:
        outcome = mine.decide(decision(0, prepared))
    finally:
        install(None)
    assert isinstance(outcome, Failed)
    assert "FENCED" in outcome.reason
    assert read_back(sink) == Fingerprint()
    with pytest.raises(Fenced):
        mine.claim(Owner("o"))


def test_the_last_batch_is_known_when_the_copy_of_its_record_is_missing(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    for batch in range(3):
        assert mine.decide(decision(batch, staged(sink, ROWS, batch))) == Ok(None)
    (Places(sink.options, SCOPE).decided("i0") / "0000000002.json").unlink()
    state = open_ledger(sink, SCOPE).look()
    assert state.last is not None
    assert state.last.batch == 2
    assert [d.batch for d in mine.history()] == [0, 1, 2]
    assert mine.decide(decision(3, staged(sink, ROWS, 3))) == Ok(None)
    assert [d.batch for d in mine.history()] == [0, 1, 2, 3]


def test_batches_that_a_user_deletes_are_still_decided(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    import shutil

    for batch in range(2):
        assert mine.decide(decision(batch, staged(sink, ROWS, batch))) == Ok(None)
    for folder in (tmp_path / "t").glob("batch=*"):
        shutil.rmtree(folder)
    state = open_ledger(sink, SCOPE).look()
    assert state.last is not None
    assert state.last.batch == 1


def test_abort_orphans_and_abort_take_nothing_away_that_counts(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    prepared = staged(sink, ROWS)
    staged(sink, ROWS)
    assert mine.decide(decision(0, prepared)) == Ok(None)
    committer = FilesCommitter(sink.options, SCOPE)
    assert committer.abort(prepared) == Ok(None)
    assert committer.abort_orphans(()) == Ok(1)
    assert read_back(sink) == prepared.fingerprint


def test_p4_ledger_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: a ledger that grew until the service hung."""
    monkeypatch.setattr(store, "LEDGER_HISTORY_BATCHES", 50)
    sink = sink_at(tmp_path)
    mine = claimed(sink)
    sizes = []
    for batch in range(200):
        assert mine.decide(decision(batch)) == Ok(None)
        if batch % 10 == 0:
            mine.claim(Owner("o"))
            sizes.append(len(list((tmp_path / "t" / "_delivered").rglob("*"))))
    assert [d.batch for d in mine.history()] == list(range(150, 200))
    assert sizes[-1] <= 50 + 16 + 15
    assert json.loads((tmp_path / "t/_delivered/p-orders/s-t/decided/i0/0000000199.json").read_text())["batch"] == 199
