"""The SQLite sink alone: types, tables, errors, sizes, memory."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import math
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.interpreter import fresh
from tests.support.scans import scanned_table
from tests.support.sinks import Rig, offsets

from delivered.connectors.sqlite import CONNECTOR, SqliteOptions, SqliteSink
from delivered.connectors.sqlite import client as database
from delivered.connectors.sqlite.client import MIGRATIONS, migrate
from delivered.connectors.sqlite.store import SqliteCommitter
from delivered.connectors.sqlite.writer import staging_folder
from delivered.engine.context import open_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Fenced, LedgerBehind, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.work import CheckpointView, Decision, Failed, Ok, Owner, Prepared, Promise

parse = SqliteOptions.parse

EXACT = Guarantee.EXACTLY_ONCE
SCOPE = Scope("orders", "t", "i0")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", None, "ü\0z"]})

SUMMER_TIME = dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC)

EVERY_TYPE = pa.table(
    {
        "flag": pa.array([True, False, None]),
        "tiny": pa.array([-128, 127, None], pa.int8()),
        "big": pa.array([-(2**63), 2**63 - 1, None], pa.int64()),
        "word": pa.array([0, 2**32 - 1, None], pa.uint32()),
        "single": pa.array([1.5, math.nan, None], pa.float32()),
        "double": pa.array([math.inf, math.nan, -0.0], pa.float64()),
        "text": pa.array(["", "NaN", "a\0b"]),
        "large": pa.array(["x", None, "é"], pa.large_string()),
        "bytes": pa.array([b"", b"\0\xff", None]),
        "kind": pa.array(["red", "blue", "red"]).dictionary_encode(),
        "price": pa.array([decimal.Decimal("0.0000000001"), decimal.Decimal(-10) ** 27, None], pa.decimal128(38, 10)),
        "day": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        "at": pa.array([-62_135_596_800_000_000, 253_402_300_799_999_999, None], pa.timestamp("us")),
        "at_zone": pa.array([SUMMER_TIME, SUMMER_TIME, None], pa.timestamp("us", "Europe/Berlin")),
        "clock": pa.array([dt.time(23, 59, 59, 999999), None, dt.time(0)], pa.time64("us")),
        "span": pa.array([dt.timedelta(days=-1), None, dt.timedelta(microseconds=1)], pa.duration("us")),
        "order": pa.array(["quoted", 'a "word"', "x"]),
    }
)  # fmt: skip


def sink_at(folder: Path, **options: str) -> SqliteSink:
    return CONNECTOR.sink({"path": str(folder / "sink.db"), "table": "t", **options})  # type: ignore[return-value]


def stage(sink: SqliteSink, table: pa.Table, shard: int = 0, scope: Scope = SCOPE, batch: int = 0) -> Prepared:
    work = Work(scope, batch, shard)
    writer = sink.writer(work, EXACT, table.schema)
    for part in table.to_batches():
        writer.stage(part)
    return Prepared.of(work, Fingerprint(table.num_rows), writer.prepare(Fingerprint()))


def decision(*prepared: Prepared, owner: str = "me", batch: int = 0, scope: Scope = SCOPE) -> Decision:
    return Decision(scope, owner, EXACT, batch, "{}", prepared, {}, 1)


def claimed(sink: SqliteSink, owner: str = "me", scope: Scope = SCOPE) -> Ledger:
    ledger = open_ledger(sink, scope)
    ledger.claim(Owner(owner))
    return ledger


def write(sink: SqliteSink, table: pa.Table, batch: int = 0) -> object:
    return claimed(sink).decide(decision(stage(sink, table, batch=batch), batch=batch))


def read(sink: SqliteSink) -> pa.Table:
    return scanned_table(sink)


def count(sink: SqliteSink, table: str = "t") -> int:
    connection = sqlite3.connect(sink.options.path)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_every_type_comes_back_as_it_was(tmp_path: Path, guarantee: Guarantee) -> None:
    sink = sink_at(tmp_path)
    sink.check_schema(EVERY_TYPE.schema)
    given = EVERY_TYPE.combine_chunks().to_batches()[0]
    if guarantee is EXACT:
        assert write(sink, EVERY_TYPE) == Ok(None)
    else:
        writer = sink.writer(Work(SCOPE, 0, 0), guarantee, EVERY_TYPE.schema)
        writer.stage(given)
        assert writer.prepare(Fingerprint()) == Promise()
    found, wanted = read(sink).combine_chunks().to_batches()[0], sink.records(given)
    assert found.schema == wanted.schema
    assert fingerprint(found, 1) == fingerprint(wanted, 1)
    for name in set(wanted.schema.names) - {"single", "double"}:  # NaN is not equal to itself
        assert found.column(name).equals(wanted.column(name)), name


def test_text_forms_are_those_of_the_documentation(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    write(sink, EVERY_TYPE)
    connection = sqlite3.connect(sink.options.path)
    row = connection.execute("SELECT flag, double, price, day, at, at_zone, clock, span FROM t").fetchone()
    assert row == (
        1, math.inf, "1E-10", "0001-01-01", "0001-01-01 00:00:00.000000", "2026-03-29 01:30:00.000000Z",
        86_399_999_999, -86_400_000_000,
    )  # fmt: skip
    assert connection.execute("SELECT datetime(at_zone) FROM t").fetchone() == ("2026-03-29 01:30:00",)


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        (pa.list_(pa.int32()), "to_json"),
        (pa.struct([pa.field("a", pa.int32())]), "to_json"),
        (pa.map_(pa.string(), pa.int32()), "to_json"),
        (pa.null(), "cast"),
        (pa.uint64(), "cast"),
    ],
)
def test_unmappable_type_is_refused_before_the_start(tmp_path: Path, kind: pa.DataType, way_out: str) -> None:
    with pytest.raises(UsageError, match="DELIVERED_TYPE_UNKNOWN") as caught:
        sink_at(tmp_path).check_schema(pa.schema([pa.field("bad", kind)]))
    assert way_out in str(caught.value.next_step)


@pytest.mark.parametrize("names", [["a", "A"], [""], ["a\0"], []])
def test_bad_column_names_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UsageError, match="DELIVERED_COLUMN"):
        sink_at(tmp_path).check_schema(pa.schema([pa.field(n, pa.int32()) for n in names]))


def test_date_that_text_cannot_hold_is_a_bad_record(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    far = pa.table({"at": pa.array([-(10**17)], pa.timestamp("us"))})
    with pytest.raises(BadRecord, match="DELIVERED_VALUE_UNSTORABLE"):
        stage(sink, far)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"path": "x.db"}, "OPTION_MISSING"),
        ({"path": "x.db", "table": "t", "tabel": "u"}, "OPTION_UNKNOWN"),
        ({"path": ":memory:", "table": "t"}, "OPTION_VALUE"),
        ({"path": "x.db", "table": "_delivered_owner"}, "OPTION_VALUE"),
        ({"path": "x.db", "table": "t", "ifNotExists": "maybe"}, "OPTION_VALUE"),
    ],
)
def test_bad_options(given: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        CONNECTOR.sink(given)


def test_options_in_any_case_and_names_of_sinks() -> None:
    options = parse({"PATH": "x.db", "TABLE": "Orders 2026", "ifnotexists": "FALSE"})
    assert Path(options.path).is_absolute()
    assert not options.create
    assert options.sink_name.startswith("Orders_2026-")
    assert parse({"path": "x", "table": "Orders_2026"}).sink_name == "Orders_2026"  # P13: two sinks, two names


def made(folder: Path, statement: str) -> SqliteSink:
    sink = sink_at(folder)
    connection = sqlite3.connect(sink.options.path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    return sink


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("CREATE TABLE t (id INTEGER)", "COLUMN_MISSING"),
        ("CREATE TABLE t (id TEXT, name TEXT)", "COLUMN_TYPE"),
        ("CREATE TABLE t (id INTEGER, name REAL)", "COLUMN_TYPE"),
    ],
)
def test_table_that_does_not_fit_is_told_by_the_task(tmp_path: Path, statement: str, code: str) -> None:
    sink = made(tmp_path, statement)
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        stage(sink, ROWS)
    with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
        sink.writer(Work(SCOPE, 0, 0), Guarantee.AT_LEAST_ONCE, ROWS.schema).stage(ROWS.to_batches()[0])
    assert count(sink) == 0


def test_table_that_changes_after_the_task_looked_fails_the_decision(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    prepared = stage(sink, ROWS)
    made(tmp_path, "CREATE TABLE t (id INTEGER)")
    outcome = claimed(sink).decide(decision(prepared))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_COLUMN_MISSING" in outcome.reason
    assert claimed(sink).look().last is None
    assert count(sink) == 0


def test_own_table_in_another_order_without_rowid_and_strict(tmp_path: Path) -> None:
    sink = made(tmp_path, "CREATE TABLE t (NAME TEXT, extra INT DEFAULT 7, id INT PRIMARY KEY) STRICT, WITHOUT ROWID")
    assert write(sink, ROWS) == Ok(None)
    assert read(sink).to_pylist() == ROWS.to_pylist()


def test_constraint_of_the_table_fails_the_whole_batch(tmp_path: Path) -> None:
    sink = made(tmp_path, "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
    good, bad = stage(sink, ROWS.slice(0, 2), 0), stage(sink, ROWS.slice(1, 2), 1)
    outcome = claimed(sink).decide(decision(good, bad))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_ROW_REFUSED" in outcome.reason
    assert count(sink) == 0


def test_missing_table_is_refused_when_it_may_not_be_made(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, ifNotExists="false")
    findings = sink.preflight(EXACT)
    assert [(f.code, f.refuses) for f in findings] == [("TABLE_MISSING", True)]
    with pytest.raises(UsageError, match="TABLE_MISSING"):
        stage(sink, ROWS)


def test_schema_of_the_rows_may_not_change(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert write(sink, ROWS) == Ok(None)
    narrower = claimed(sink).decide(decision(stage(sink, ROWS.select(["id"]), batch=1), batch=1))
    assert isinstance(narrower, Failed)
    assert "DELIVERED_SCHEMA_CHANGED" in narrower.reason
    assert claimed(sink).decide(decision(stage(sink, ROWS.select(["name", "id"]), batch=1), batch=1)) == Ok(None)
    assert count(sink) == 2 * ROWS.num_rows


def test_database_locked_for_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P19: one try, one clear answer, nothing half visible; the same batch gets in when the lock is gone."""
    monkeypatch.setattr(database, "REQUEST_TIMEOUT_S", 0.2)
    sink = sink_at(tmp_path)
    ledger, prepared = claimed(sink), stage(sink, ROWS)
    other = sqlite3.connect(sink.options.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    outcome = ledger.decide(decision(prepared))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_DATABASE_LOCKED" in outcome.reason
    with pytest.raises(Unreachable, match="DATABASE_LOCKED") as locked:
        sink.writer(Work(SCOPE, 0, 0), Guarantee.AT_MOST_ONCE, ROWS.schema).stage(ROWS.to_batches()[0])
    assert locked.value.may_come_back and locked.value.exit_code == 3
    other.execute("ROLLBACK")
    ledger.resume("me")
    assert ledger.decide(decision(prepared)) == Ok(None)
    assert count(sink) == ROWS.num_rows


def test_a_writer_killed_in_its_commit_keeps_nobody_from_reading(tmp_path: Path) -> None:
    """Its hot journal must be rolled back; a mode=ro connection may not do that, and would fail forever."""
    sink = sink_at(tmp_path)
    write(sink, pa.table({"id": [1, 2]}))
    path = sink.options.path
    killed_while_it_writes(path)
    assert Path(f"{path}-journal").stat().st_size > 512
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as plain:
        with pytest.raises(sqlite3.OperationalError) as refused:
            plain.execute("SELECT count(*) FROM t").fetchone()
        assert refused.value.sqlite_errorname == "SQLITE_READONLY_ROLLBACK"
    with contextlib.closing(database.connect(path, mode="ro")) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (2,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM t")
    killed_while_it_writes(path)
    assert [d.batch for d in open_ledger(sink, SCOPE).history()] == [0]
    assert count(sink) == 2


def killed_while_it_writes(path: str) -> None:
    """A transaction in mid-commit: its pages are already in the file, its journal still exists."""
    script = f"""
        import os, signal, sqlite3
        connection = sqlite3.connect({path!r}, isolation_level=None)
        connection.execute("PRAGMA cache_size=2")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO t VALUES (?)", ((n,) for n in range(20_000)))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)]).returncode == -9


def test_p19_commit_that_a_reader_blocks_is_not_in_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P19: elsewhere a retry around the commit doubled rows. The refusal comes at COMMIT itself here."""
    monkeypatch.setattr(database, "REQUEST_TIMEOUT_S", 0.2)
    sink = sink_at(tmp_path)
    assert write(sink, ROWS) == Ok(None)
    ledger, prepared = claimed(sink), stage(sink, ROWS, batch=1)
    reader = sqlite3.connect(sink.options.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM t").fetchone() == (ROWS.num_rows,)
    outcome = ledger.decide(decision(prepared, batch=1))
    assert isinstance(outcome, Failed)
    assert "DATABASE_LOCKED" in outcome.reason
    reader.execute("COMMIT")
    assert count(sink) == ROWS.num_rows
    ledger.resume("me")
    assert ledger.decide(decision(prepared, batch=1)) == Ok(None)
    assert count(sink) == 2 * ROWS.num_rows


def test_p16_decision_again_adds_nothing(tmp_path: Path) -> None:
    """P16: also when the staged files are gone already, and not for other rows under the same batch."""
    sink = sink_at(tmp_path)
    ledger, prepared = claimed(sink), stage(sink, ROWS)
    assert ledger.decide(decision(prepared)) == Ok(None)
    assert SqliteCommitter(sink.options, SCOPE).commit(Work(SCOPE, 0, 0), prepared) == Ok(None)
    assert ledger.decide(decision(prepared)) == Ok(None)
    other = ledger.decide(decision(stage(sink, ROWS)))
    assert isinstance(other, Failed)
    assert "DECIDED_OTHERWISE" in other.reason
    assert count(sink) == ROWS.num_rows


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "rows"])
def test_staged_file_that_is_not_what_was_prepared_is_not_decided(tmp_path: Path, damage: str) -> None:
    sink = sink_at(tmp_path)
    whole, prepared = stage(sink, ROWS, 0), stage(sink, ROWS, 1)
    path = staging_folder(sink.options, SCOPE) / str(prepared.handle["path"])
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()
    else:
        prepared = Prepared(1, 0, Fingerprint(99), prepared.handle, sink=SCOPE.sink)
    outcome = claimed(sink).decide(decision(whole, prepared))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_STAGED_" in outcome.reason
    assert count(sink) == 0


def test_names_cannot_leave_their_folder(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    for pipeline, name in (("..", ".."), ("a.b", "c"), ("a", "b.c")):
        prepared = stage(sink, ROWS, scope=Scope(pipeline, name, "i0"))
        path = staging_folder(sink.options, Scope(pipeline, name, "i0")) / str(prepared.handle["path"])
        assert path.resolve().is_relative_to(sink.options.staging.resolve())
    assert len({p.parent for p in sink.options.staging.rglob("*.arrow")}) == 3  # P13: "a.b"+"c" is not "a"+"b.c"


def test_superseded_owners_are_remembered_and_bounded(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    for i in range(OWNERS_REMEMBERED + 5):
        state = open_ledger(sink, SCOPE).claim(Owner(f"o{i}"))
        assert state.epoch == i + 1
    assert state.owner is not None
    assert state.owner.superseded == tuple(f"o{i}" for i in range(OWNERS_REMEMBERED + 3, 3, -1))
    with pytest.raises(Fenced, match="o20"):
        open_ledger(sink, SCOPE).claim(Owner("o4"))


def test_p4_earlier_incarnations_are_bounded(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    for i in range(LEDGER_INCARNATIONS + 20):
        scope = Scope("orders", "t", f"i{i}")
        ledger = claimed(sink, scope=scope)
        for batch in range(2):
            assert ledger.decide(decision(batch=batch, scope=scope)) == Ok(None)
    state = claimed(sink, scope=Scope("orders", "t", "last")).look()
    assert len(state.earlier) == LEDGER_INCARNATIONS
    assert [(d.scope.incarnation, d.batch) for d in state.earlier[:2]] == [("i119", 1), ("i118", 1)]
    assert count(sink, "_delivered_decision") == LEDGER_INCARNATIONS
    assert count(sink, "_delivered_archive") == 20
    assert claimed(sink, scope=Scope("orders", "t", "i3")).look().archived is not None


def test_look_and_history_write_nothing(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert open_ledger(sink, SCOPE).look().last is None
    assert list(open_ledger(sink, SCOPE).history()) == []
    assert not sink.committer(SCOPE).was_committed(Work(SCOPE, 0, 0), Prepared(0, 0, Fingerprint(), sink=SCOPE.sink))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DeliveredError):
        sink.scan().schema()


def test_migration_is_idempotent_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    connection = database.connect(sink.options.path)
    for _ in range(2):
        migrate(connection, sink.options.path)
    versions = connection.execute("SELECT version FROM _delivered_migration").fetchall()
    assert versions == [(i + 1,) for i in range(len(MIGRATIONS))]
    connection.execute("INSERT INTO _delivered_migration VALUES (99, 0)")
    with pytest.raises(UsageError, match="LEDGER_NEWER"):
        claimed(sink)


def test_a_new_file_is_durable_by_rollback_journal_and_extra(tmp_path: Path) -> None:
    connection = database.connect(str(tmp_path / "sink.db"))
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (3,)


@pytest.mark.parametrize("version", [(3, 51, 2), (3, 51, 3)])
def test_wal_is_kept_and_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    sink = made(tmp_path, "PRAGMA journal_mode=WAL")
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    assert [f.code for f in sink.preflight(EXACT)] == (["WAL_RACE"] if version < (3, 51, 3) else [])
    assert write(sink, ROWS) == Ok(None)
    assert sqlite3.connect(sink.options.path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_a_copy_that_takes_the_files_place_is_noticed_by_the_running_query(tmp_path: Path, journal: str) -> None:
    """In WAL mode SQLite itself does not notice: batches would be decided in a file that nobody sees."""
    path, copy = tmp_path / "sink.db", tmp_path / "copy.db"
    rig = Rig(CONNECTOR.sink({"path": str(path), "table": "orders"}))
    database.connect(str(path)).execute(f"PRAGMA journal_mode={journal}")
    context = rig.context()
    rig.run(0, context)
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    view = CheckpointView(rig.incarnation, 1, offsets(1), 0)
    assert commit_batch(context, 1, offsets(1), rig.write(plan_batch(context, view, first=False)))
    for name in ("sink.db-wal", "sink.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    copy.replace(path)
    with pytest.raises(LedgerBehind, match="newest decided batch is 0"):
        plan_batch(context, CheckpointView(rig.incarnation, 2, offsets(2), 1), first=False)


def test_not_a_database_and_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "sink.db").write_bytes(b"no database, " * 100)
    assert [f.code for f in sink_at(tmp_path).preflight(EXACT)] == ["DATABASE_DAMAGED"]
    assert [f.code for f in sink_at(tmp_path / "nowhere").preflight(EXACT)] == ["FOLDER_MISSING"]


CHILD = """
    import sys, os
    import pyarrow as pa
    from delivered.connectors.sqlite import CONNECTOR
    from delivered.engine.context import open_ledger
    from delivered.model.fingerprint import Fingerprint
    from delivered.model.capability import Guarantee
    from delivered.model.identity import Scope, Work
    from delivered.model.work import Prepared
    from delivered.model.work import Decision, Owner
    path, rows = sys.argv[1], int(sys.argv[2])
    sink, scope = CONNECTOR.sink({"path": path, "table": "t"}), Scope("orders", "t", "i0")
    schema = pa.schema([pa.field("value", pa.binary())])
    def peak_mib():  # of this process; ru_maxrss would include the parent's at the moment of the fork
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
"""


def child(body: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(CHILD) + textwrap.dedent(body)
    command = [*prefix, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_p26_a_large_shard_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    """P26: elsewhere all rows of a batch were collected before the send. 256 MB of rows; staging, then deciding."""
    body = """
        ledger = open_ledger(sink, scope); ledger.claim(Owner("me"))
        writer = sink.writer(Work(scope, 0, 0), Guarantee.EXACTLY_ONCE, schema)
        for i in range(rows // 1024):
            writer.stage(pa.record_batch([pa.array([i.to_bytes(4, "big") * 256] * 1024)], schema=schema))
        prepared = Prepared.of(Work(scope, 0, 0), Fingerprint(rows), writer.prepare(Fingerprint()))
        print(peak_mib())
        outcome = ledger.decide(Decision(scope, "me", Guarantee.EXACTLY_ONCE, 0, "{}", (prepared,), {}, 1))
        print(type(outcome).__name__, peak_mib())
    """
    peaks = []
    for rows in (8 * 1024, 256 * 1024):
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        done = child(body, str(tmp_path / "sink.db"), str(rows))
        assert done.stderr == ""
        staged, outcome, decided = done.stdout.split()
        assert outcome == "Ok"
        peaks.append((int(staged), int(decided)))
    assert all(large - small < 60 for small, large in zip(*peaks, strict=True)), peaks


def test_read_only_database(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert write(sink, ROWS) == Ok(None)
    body = """
        import delivered.connectors.sqlite.read  # the other user may not read root's Python
        if os.getuid() == 0: os.setuid(65534)
        print(*(f.code for f in sink.preflight(Guarantee.EXACTLY_ONCE)))
    """
    Path(sink.options.path).chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(tmp_path.parents[2]):
            folder.chmod(0o755)
    tmp_path.chmod(0o555)
    try:
        done = child(body, sink.options.path, "0")
    finally:
        tmp_path.chmod(0o755)
    assert done.stdout.strip() == "DATABASE_READONLY", done.stderr


def test_disk_full_leaves_nothing_half_visible(tmp_path: Path) -> None:
    """F4: first while staging, then in the transaction, where SQLite's page limit simulates a full disk."""
    body = """
        import signal, resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        writer = sink.writer(Work(scope, 0, 0), Guarantee.EXACTLY_ONCE, schema)
        try:
            for i in range(rows // 1024):
                writer.stage(pa.record_batch([pa.array([b"x" * 1024] * 1024)], schema=schema))
        except Exception as error:
            writer.abort()
            print(error.code, len(list(sink.options.staging.rglob("*.arrow*"))))
    """
    done = child(body, str(tmp_path / "sink.db"), str(8 * 1024))
    assert done.stdout.split() == ["DELIVERED_STAGING_FAILED", "0"], done.stderr

    sink = sink_at(tmp_path)
    assert write(sink, ROWS.select(["name"])) == Ok(None)
    ledger, big = claimed(sink), pa.table({"name": ["x" * 1000] * 5_000})
    prepared = stage(sink, big, batch=1)
    pages = ledger._store._open().execute("PRAGMA page_count").fetchone()[0]
    ledger._store._open().execute(f"PRAGMA max_page_count={pages + 100}")
    outcome = ledger.decide(decision(prepared, batch=1))
    assert isinstance(outcome, Failed)
    assert "DELIVERED_DISK_FULL" in outcome.reason
    assert count(sink) == ROWS.num_rows
    ledger.resume("me")
    assert ledger.decide(decision(prepared, batch=1)) == Ok(None)
    assert count(sink) == ROWS.num_rows + big.num_rows


def test_read_back_by_ranges_of_rowid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.sqlite import read as reading

    monkeypatch.setattr(reading, "SLICE_ROWS", 100)
    sink = sink_at(tmp_path)
    numbers = pa.table({"id": pa.array(range(1_000), pa.int64())})
    write(sink, numbers)
    assert len(sink.scan().slices()) == 10
    assert sink.scan().slices({"rowid": 1_001}) == []  # P17: an empty range reads nothing
    assert sorted(read(sink).column("id").to_pylist()) == list(range(1_000))


def test_connector_imports_no_database_and_no_spark() -> None:
    loaded = fresh("import pickle; from delivered.connectors.sqlite import CONNECTOR; pickle.dumps(CONNECTOR)")
    assert loaded & {"sqlite3", "pyspark", "deltalake"} == set()
