"""The source of an outbox on real databases: by the log and by polling, replayed, late commits, bad days."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outbox_help import METHODS, Shop, Stream, ids, read, shop

from delivered.connectors.outbox import CONNECTOR
from delivered.contract.source import Source
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, Refused
from delivered.patterns import outbox


@pytest.fixture(params=METHODS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return shop(request, tmp_path, request.param)


@pytest.fixture
def logged(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return shop(request, tmp_path, "postgres-log")


def test_messages_are_routed_and_rows_are_deleted_once_the_pipeline_is_past_them(box: Shop) -> None:
    sent = box.send(0, 1)  # before there is a slot
    source = box.source()
    assert pickle.loads(pickle.dumps(source)) == source
    assert [f for f in source.preflight() if f.refuses] == []
    stream = Stream(source)
    first = stream.batch()
    assert first is not None
    assert ids(first) == sent
    row = first.drop_columns(["timestamp", "timestampType", "offset"]).to_pylist()[1]
    assert json.loads(row.pop("value")) == {"n": 1}
    assert row == {
        "key": b"1", "topic": "outbox.event.order",
        "headers": [{"key": "id", "value": sent[1].encode()}, {"key": "type", "value": b"created"}],
    }  # fmt: skip
    sent = box.send(2, payload=None) + box.send(3)
    second = stream.batch()
    assert second is not None
    assert ids(second) == sent
    assert second.column("value").to_pylist()[0] is None
    assert stream.batch() is None
    assert stream.batch() is None
    assert box.left() == 0
    stream.close()


def test_a_range_gives_the_same_rows_until_it_is_acknowledged_and_limits_cut_it(box: Shop) -> None:
    source = box.source()
    stream = Stream(source)
    assert stream.batch() is None or stream.at
    sent = box.send(*range(40))
    end = stream.driver.latest(stream.at, None)
    whole = read(source, stream.at, end)
    assert ids(whole) == sent
    box.send(40)
    assert read(source, stream.at, end).equals(whole), "the same rows, whatever came since"
    stream.close()

    again = Stream(source, stream.at)
    parts, at = [], again.at
    while (end := again.driver.latest(at, 7)) != at:
        parts.append(ids(read(source, at, end)))
        at = end
    assert [i for part in parts for i in part][:40] == sent
    assert max(map(len, parts)) <= 7
    again.close()


def naive(box: Shop, after: str) -> list[str]:
    """What polling by an increasing id finds."""
    return [str(i) for (i,) in box.execute(f"SELECT id FROM {box.table} WHERE id > '{after}' ORDER BY id")]


@pytest.mark.parametrize("how", METHODS[:3])  # SQLite has one writer: no transaction commits after a later one
def test_a_transaction_that_commits_late_is_not_skipped(
    how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Polling by an increasing id, in the same place, loses the row."""
    box = shop(request, tmp_path, how)
    by_id: list[str] = naive(box, "00000000-0000-0000-0000-000000000000")
    stream = Stream(box.source())
    assert stream.rest() == []
    with contextlib.closing(box.connect()) as late:
        early_id = box.put(late, 1)  # the id is given out, its transaction stays open
        later = box.send(2, 3, 4, 5)
        by_id += naive(box, "00000000-0000-0000-0000-000000000000")
        found = stream.rest()
        assert by_id == found == later
        assert box.left() == 0, "rows that were delivered wait for a transaction that is open"
        late.commit()
    by_id += naive(box, by_id[-1])
    found += stream.rest()
    assert sorted(found) == sorted([early_id, *later])
    assert early_id not in by_id, "naive polling found the row: this test shows nothing"
    stream.close()


def test_kept_rows_can_be_read_again_after_they_were_acknowledged(box: Shop) -> None:
    """For the audit: rows from before the slot, rows from the log, and those that are still to come."""
    source = box.source(keep="true")
    before = box.send(0, 1)
    stream = Stream(source)
    start = stream.at
    sent = before + box.send(2, 3)
    assert stream.rest() == sent
    sent += box.send(4)
    end = stream.driver.latest(stream.at, None)
    assert box.left() == 5
    assert ids(read(source, start, end)) == sent
    stream.close()


def test_two_pipelines_on_one_outbox_are_refused(box: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.outbox import source as outbox

    monkeypatch.setattr(outbox, "LOCK_WAIT_S", 1)
    first, second = Stream(box.source()), Stream(box.source())
    first.rest()
    with pytest.raises(DeliveredError, match=r"OUTBOX_IN_USE.*another pipeline.*keep=true for both"):
        second.batch()
    first.close()
    sent = box.send(1)
    assert second.rest() == sent
    second.close()


def bad(source: Source) -> Any:
    return [f.code for f in source.preflight() if f.refuses]


def test_what_preflight_refuses(box: Shop) -> None:
    assert bad(box.source(dbtable="nothing")) == ["OUTBOX_TABLE"]
    assert bad(box.source(columns="payload=body")) == ["OUTBOX_TABLE"]
    other = f"{box.table}_loose"
    box.execute(f"CREATE TABLE {other} AS SELECT * FROM {box.table}")
    assert bad(box.source(dbtable=other)) == ["OUTBOX_ID_NOT_UNIQUE"]


def test_a_payload_that_is_not_json_stops_the_query_and_can_be_let_through(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for how in METHODS:
        box = shop(request, tmp_path, how)
        box.execute(f"DROP TABLE {box.table}", outbox.ddl(box.dialect, box.layout, payload="bytes"))
        stream = Stream(box.source(payloadFormat="json"))
        stream.batch()
        (sent,) = box.send(1, payload=b"\x00no")
        with pytest.raises(BadRecord, match=rf"OUTBOX_PAYLOAD.*{sent}.*payloadFormat"):
            stream.batch()
        stream.close()
        again = Stream(box.source(), stream.at)
        assert again.batch().column("value").to_pylist() == [b"\x00no"]
        again.close()


def test_an_id_that_is_null_is_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    box = shop(request, tmp_path, "sqlite-poll")
    box.execute(
        f"DROP TABLE {box.table}",
        f"CREATE TABLE {box.table} (id TEXT PRIMARY KEY, aggregatetype TEXT, aggregateid TEXT, type TEXT, "
        "payload TEXT)",
        f"INSERT INTO {box.table} VALUES (NULL, 'order', '1', 'created', NULL)",
    )
    with pytest.raises(BadRecord, match=r"OUTBOX_ID.*HAVING"):
        Stream(box.source()).batch()


def test_an_id_that_comes_twice_in_the_log_is_refused(logged: Shop) -> None:
    """The application deletes each row in the transaction that inserted it, so the key does not see the second one."""
    stream = Stream(logged.source())
    stream.batch()
    row = f"INSERT INTO {logged.table} VALUES ('{outbox.new_id()}', 'order', '1', 'created', NULL)"
    logged.execute(row, f"DELETE FROM {logged.table}", row)
    with pytest.raises(BadRecord, match=r"OUTBOX_ID.*two rows"):
        stream.batch()
    stream.close()


def test_rows_that_were_deleted_at_once_are_read_from_the_log(logged: Shop) -> None:
    """As with Debezium: the outbox stays empty."""
    stream = Stream(logged.source())
    stream.batch()
    with contextlib.closing(logged.connect()) as connection:
        sent = logged.put(connection, 1)
        connection.execute(f"DELETE FROM {logged.table}")
        connection.commit()
    assert stream.rest() == [sent]
    stream.close()


def test_rows_that_somebody_else_deleted_are_noticed_when_polling(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for how in METHODS[1:]:
        box = shop(request, tmp_path, how)
        box.send(1, 2)
        source = box.source()
        stream = Stream(source)
        end = stream.driver.latest(stream.at, None)
        box.execute(f"DELETE FROM {box.table}")
        with pytest.raises(InvariantBroken, match=r"OUTBOX_ROWS_GONE.*positionsTable"):
            read(source, stream.at, end)
        stream.close()


def test_a_database_that_was_restored_is_noticed_when_polling(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The numbers of the lost rows are given out again: without the id beside the number, rows would be skipped."""
    for how in METHODS[1:]:
        box = shop(request, tmp_path, how)
        box.send(1, 2, 3)
        stream = Stream(box.source(keep="true"))
        stream.rest()
        stream.close()
        box.execute(
            f"DELETE FROM {box.table}_positions WHERE number > 1",
            f"INSERT INTO {box.table}_positions SELECT 0, number + 1, id FROM {box.table}_positions WHERE number = -1",
        )
        with pytest.raises(InvariantBroken, match="OUTBOX_DATABASE_BEHIND"):
            Stream(box.source(keep="true"), stream.at).batch()


def test_numbers_given_to_a_restored_database_hide_nothing(tmp_path: Path) -> None:
    """P29: ids that increase, and an available-now run, which reads to the end of the outbox at its start."""
    file = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE box (id INTEGER, aggregatetype, aggregateid, type, payload)")
        database.execute("CREATE UNIQUE INDEX ids ON box (id)")
        for first, count in ((0, 700), (700, 300)):
            rows = [(n, f'"old {n}"') for n in range(first, first + count)]
            database.executemany("INSERT INTO box VALUES (?, 'o', '1', 't', ?)", rows)
            database.commit()
            if first == 0:
                copy = file.read_bytes()
    options = {"url": f"sqlite://{file}", "dbtable": "box", "method": "poll"}
    source = CONNECTOR.source(options)
    stream = Stream(source)
    assert len(stream.rest()) == 1_000
    stream.close()
    file.write_bytes(copy)
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.executemany("INSERT INTO box VALUES (?, 'o', '1', 't', '1')", [(n,) for n in range(700, 1_700)])
        database.commit()
    for _ in range(2):
        with contextlib.closing(source.driver()) as driver:
            driver.freeze()
            with pytest.raises(InvariantBroken, match="OUTBOX_DATABASE_BEHIND"):
                driver.latest(stream.at, None)


def test_a_file_that_takes_the_databases_place_is_read_by_the_running_stream(tmp_path: Path) -> None:
    """As a restore does: the stream would ask the old file for ever, which nobody writes to any more."""
    file, copy = tmp_path / "a.db", tmp_path / "copy.db"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE box (id INTEGER PRIMARY KEY, aggregatetype, aggregateid, type, payload)")
        database.execute("INSERT INTO box VALUES (1, 'o', '1', 't', '1')")
        database.commit()
    stream = Stream(CONNECTOR.source({"url": f"sqlite://{file}", "dbtable": "box", "method": "poll", "keep": "true"}))
    assert len(stream.rest()) == 1
    copy.write_bytes(file.read_bytes())
    with contextlib.closing(sqlite3.connect(copy)) as database:
        database.execute("INSERT INTO box VALUES (2, 'o', '1', 't', '1')")
        database.commit()
    copy.replace(file)
    assert len(stream.rest()) == 1
    with contextlib.closing(sqlite3.connect(copy)) as database:
        database.execute("CREATE TABLE box (id INTEGER PRIMARY KEY, aggregatetype, aggregateid, type, payload)")
        database.commit()
    copy.replace(file)
    with pytest.raises(InvariantBroken, match="OUTBOX_DATABASE_BEHIND"):
        stream.rest()
    stream.close()


def test_a_new_row_with_the_id_of_a_deleted_one_is_not_lost(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """P29: ids that start again, as in a table that is emptied."""
    for how in METHODS[1:]:
        box = shop(request, tmp_path, how)
        [id_] = box.send(1)
        stream = Stream(box.source())
        assert stream.rest() == [id_]
        assert box.left() == 0
        box.send(2, id=id_)
        with pytest.raises(InvariantBroken, match=f"OUTBOX_ID_REUSED.*{id_}.*AUTOINCREMENT"):
            stream.batch()
        stream.driver.acknowledge(stream.at)
        stream.close()
        assert box.left() == 1, "it was deleted without being delivered"


@pytest.mark.matrix
@pytest.mark.parametrize("keep", ["false", "true"])
def test_files_of_a_server_that_were_restored_and_grew_past_the_position(new_postgres: Any, keep: str) -> None:
    """P29: the same timeline, and a WAL that is longer than the position. Slots go back in a crash, too."""
    server = new_postgres()
    box = Shop("postgres", server.url, server.url, "log")
    source = box.source(keep=keep)
    stream = Stream(source)
    assert stream.rest() == []
    box.send(*range(20))
    stream.driver.close()
    server.broker.stop()
    copy = server.broker.folder.with_name("copy")
    subprocess.run(["cp", "-a", server.broker.folder / "data", copy], check=True)
    server.broker.restart()
    box.send(*range(20, 30))
    assert len(stream.rest()) == 30
    known = stream.driver.landmarks(stream.at)
    assert known
    stream.driver.check_landmarks(stream.at, known)
    stream.close()
    server.broker.kill()
    server.broker.restart()
    with contextlib.closing(source.driver()) as crashed:
        crashed.check_landmarks(stream.at, known)
    server.broker.kill()
    shutil.rmtree(server.broker.folder / "data")
    copy.rename(server.broker.folder / "data")
    server.broker.restart()
    box.send(*range(100, 200))
    with contextlib.closing(source.driver()) as driver:
        for _ in range(2):
            with pytest.raises(InvariantBroken, match=r"OUTBOX_DATABASE_BEHIND.*another transaction"):
                driver.check_landmarks(stream.at, known)
    assert box.left() == 120


def moved_to(box: Shop, position: str = "pg_current_wal_lsn()") -> str:
    return f"SELECT pg_replication_slot_advance('delivered_{box.table}', {position})"


def test_bad_days_of_a_slot(logged: Shop) -> None:
    slot = f"delivered_{logged.table}"
    stream = Stream(logged.source())
    stream.batch()
    logged.send(1)
    stream.rest()
    stream.close()
    source, at = logged.source(), stream.at

    def refused(code: str, start: Any = at, source: Source = source) -> str:
        again = Stream(source, start)
        with pytest.raises(DeliveredError, match=code) as caught:
            again.batch()
        again.close()
        assert caught.value.next_step
        return str(caught.value)

    assert "system identifier 7" in refused("OUTBOX_OTHER_DATABASE", {**at, "#system": "7"})
    assert "on timeline 1, and the offsets" in refused("OUTBOX_TIMELINE", {**at, "#timeline": 9})
    refused("OUTBOX_DATABASE_BEHIND", {**at, "lsn": at["lsn"] + (1 << 40)})
    logged.execute(f"ALTER TABLE {logged.table} RENAME TO {logged.table}_x")
    assert f"renamed to {logged.table}_x" in refused("OUTBOX_TABLE_RENAMED")
    renamed = logged.source(dbtable=f"{logged.table}_x", slot=slot)
    logged.execute(f"INSERT INTO {logged.table}_x VALUES ('{outbox.new_id()}', 'order', '1', 'created', NULL)")
    again = Stream(renamed, at)
    assert len(again.rest()) == 1, "under its new name it goes on, and has lost nothing"
    again.close()
    logged.execute(f"ALTER TABLE {logged.table}_x RENAME TO {logged.table}")
    at = again.at

    logged.execute(f"ALTER PUBLICATION {slot} DROP TABLE {logged.table}")
    refused("OUTBOX_PUBLICATION", at)
    logged.execute(f"ALTER PUBLICATION {slot} ADD TABLE {logged.table} WHERE (type = 'created')")
    assert "filters rows" in refused("OUTBOX_PUBLICATION", at)
    logged.execute(f"DROP PUBLICATION {slot}")
    refused("OUTBOX_PUBLICATION", at)
    logged.execute(f"CREATE PUBLICATION {slot} FOR TABLE {logged.table} WITH (publish = 'insert')")

    logged.send(2)
    logged.execute(moved_to(logged))
    assert "another reader consumed" in refused("OUTBOX_SLOT_MOVED", at)
    logged.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    refused("OUTBOX_SLOT_MISSING", at)
    logged.execute(f"SELECT pg_create_physical_replication_slot('{slot}')")
    assert "is physical, of no plugin" in refused("OUTBOX_SLOT_PLUGIN", at)
    assert bad(source) == ["OUTBOX_SLOT_PLUGIN"]
    logged.execute(f"SELECT pg_drop_replication_slot('{slot}')")

    fresh = Stream(source)
    assert len(fresh.rest()) == 1, "a new checkpoint begins with what the outbox still has"
    fresh.close()


def test_wal_that_was_removed_and_wal_that_is_held_back(new_postgres: Any) -> None:
    server = new_postgres(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")
    box = Shop("postgres", server.url, server.url, "log")
    stream = Stream(box.source())
    stream.batch()
    stream.close()
    source: Any = box.source()
    box.execute("CREATE TABLE noise AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
    held = source.wal_held_back()
    assert held > 16 << 20
    (said,) = source.preflight()
    assert (said.code, said.refuses) == ("OUTBOX_WAL", False)
    assert f"holds back {held / 2**20:.1f} MiB" in said.message
    assert "limit is 1MB" in said.message
    for _ in range(3):
        server.execute("SELECT pg_switch_wal()")
        server.execute("CREATE TABLE more AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
        server.execute("DROP TABLE more")
        server.execute("CHECKPOINT")
    assert bad(source) == ["OUTBOX_WAL_REMOVED"]
    again = Stream(source, stream.at)
    with pytest.raises(InvariantBroken, match=r"OUTBOX_WAL_REMOVED.*max_slot_wal_keep_size is 1MB"):
        again.batch()
    again.close()


def test_an_idle_outbox_lets_the_server_remove_wal(logged: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.outbox import source as wal

    monkeypatch.setattr(wal, "IDLE_BYTES", 1 << 20)
    source: Any = logged.source()
    stream = Stream(source)
    stream.batch()
    logged.execute("CREATE TABLE IF NOT EXISTS idle AS SELECT repeat('x', 1000) FROM generate_series(1, 3000)")
    assert source.wal_held_back() > 1 << 20
    batch = stream.batch()
    assert batch is not None
    assert batch.num_rows == 0
    sent = logged.send(1)
    assert stream.rest() == sent
    stream.close()


def test_a_crash_while_the_slot_is_made_leaves_nothing_that_looks_complete(
    logged: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delivered.connectors.outbox.positions import Positions

    sent = logged.send(1, 2)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Positions, "restart", dies)
    stream = Stream(logged.source())
    with pytest.raises(KeyboardInterrupt):
        stream.batch()
    stream.close()
    monkeypatch.undo()
    sent += logged.send(3)
    again = Stream(logged.source())
    assert again.at == {"lsn": 0}
    assert again.rest() == sent
    again.close()


def test_a_slot_that_waits_for_a_transaction_names_it(
    new_postgres: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from delivered.connectors.outbox import slot
    from delivered.model import patience

    monkeypatch.setattr(slot, "SLOT_WAIT_S", 1)
    monkeypatch.setattr(patience, "TELL_AFTER_S", 0)
    server = new_postgres()
    box = Shop("postgres", server.url, server.url, "log")
    with contextlib.closing(box.connect()) as forgotten:
        box.put(forgotten, 1)
        box.execute("CREATE TABLE other (n int)", "INSERT INTO other VALUES (1)")
        with contextlib.closing(box.connect()) as two_phase:
            two_phase.execute("INSERT INTO other VALUES (2)")
            two_phase.execute("PREPARE TRANSACTION 'transfer'")
        stream = Stream(box.source())
        with pytest.raises(Refused, match="OUTBOX_SLOT_WAITS") as refused:
            stream.batch()
        for text in ("prepared 'transfer' since", f"pid {forgotten.info.backend_pid}", "idle in transaction", "1 s"):
            assert text in str(refused.value)
        assert "waits for transactions to end: " in caplog.text
        forgotten.commit()
    with contextlib.closing(box.connect()) as owner:
        owner.autocommit = True
        owner.execute("ROLLBACK PREPARED 'transfer'")
    sent = box.send(2)
    assert stream.rest()[-1:] == sent
    stream.close()


def test_without_rights_to_replication_polling_is_offered(logged: Shop) -> None:
    role = f"app_{logged.table}"
    logged.execute(
        f"CREATE ROLE {role} LOGIN", f"GRANT ALL ON {logged.table} TO {role}", f"GRANT ALL ON SCHEMA public TO {role}"
    )
    (finding,) = logged.source(user=role).preflight()
    assert finding.code == "OUTBOX_REPLICATION"
    assert '.option("method", "poll")' in (finding.next_step or "")
    sent = logged.send(1)
    assert Stream(logged.source(user=role, method="poll")).rest() == sent
