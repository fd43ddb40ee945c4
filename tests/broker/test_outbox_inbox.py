"""Outbox and inbox in real databases, through every client; applications and consumers that are killed."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import sqlite3
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg.types.json import set_json_loads
from tests.broker.outbox_help import Database, database

from delivered.model.errors import InvariantBroken, Refused, UsageError
from delivered.patterns import outbox
from delivered.patterns.caller import NOW_MS, Caller
from delivered.patterns.inbox import Delivery, clean, consume, ddl, inbox
from delivered_lab.verify import applications

_names = itertools.count()
MESSAGES = 12
DIALECTS = ["sqlite", "postgres", "mysql"]
SWEEP = ["sqlite", *(pytest.param(d, marks=pytest.mark.matrix) for d in DIALECTS[1:])]


class Boxes(Database):
    """Fresh tables in one database, and connections of a client."""

    def __init__(self, dialect: str, url: str, client: str) -> None:
        super().__init__(dialect, url, client)
        n = next(_names)
        self.outbox, self.inbox, self.orders = f"outbox{n}", f"inbox{n}", f"orders{n}"
        self.layout = outbox.Layout(table=self.outbox)
        self.execute(outbox.ddl(dialect, self.layout))
        self.execute(ddl(dialect, self.inbox))
        self.execute(f"CREATE TABLE {self.orders} (n INTEGER, message VARCHAR(64))")

    def put(self, connection: Any, id_: Any, **given: Any) -> outbox.Entry:
        message = {"aggregate_type": "order", "aggregate_id": "7", "type": "created", "payload": {"b": 1, "a": "é"}}
        return outbox.put(connection, id=id_, **{"layout": self.layout} | message | given)


@pytest.fixture(params=[f"{d}-{c}" for d in DIALECTS for c in ("driver", "session", "connection")])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Boxes:
    dialect, client = request.param.split("-")
    return database(Boxes, request, dialect, tmp_path, client)


def test_a_message_is_there_if_its_transaction_is(db: Boxes) -> None:
    kept, undone = outbox.new_id(), outbox.new_id()
    with contextlib.closing(db.connect()) as connection:
        db.put(connection, undone)
        connection.rollback()
        assert db.put(connection, kept).stored
        connection.commit()
    assert [str(i) for (i,) in db.execute(f"SELECT id FROM {db.outbox}")] == [str(kept)]


def test_a_second_put_is_answered_with_the_first_row_and_the_transaction_goes_on(db: Boxes) -> None:
    id_ = outbox.new_id()
    with contextlib.closing(db.connect()) as connection:
        db.put(connection, id_)
        connection.commit()
        again = db.put(connection, str(id_), payload='{"a":"é","b":1}', on_duplicate="ignore")
        assert (again.id, again.aggregate_id, again.stored) == (id_, "7", False)
        with pytest.raises(outbox.DuplicateId, match=r"OUTBOX_DUPLICATE.*same message: order 7, created") as refused:
            db.put(connection, id_)
        assert 'on_duplicate="ignore"' in str(refused.value)
        for other in (
            {"aggregate_id": "8"},
            {"payload": {"b": 2, "a": "é"}},
            {"payload": {"b": True, "a": "é"}},
            {"payload": None},
        ):
            with pytest.raises(outbox.DuplicateId, match="OUTBOX_ID_REUSED"):
                db.put(connection, id_, on_duplicate="ignore", **other)
        second, numbers = outbox.new_id(), "[12345678901234567890123, 1e2, -0.0, 1.50, 18446744073709551615, true]"
        db.put(connection, second, payload=numbers)
        assert not db.put(connection, second, payload=numbers, on_duplicate="ignore").stored
        connection.commit()
    assert db.execute(f"SELECT COUNT(*) FROM {db.outbox}") == [(2,)]


@pytest.mark.parametrize("kind", ["json", "bytes"])
def test_json_of_every_kind_is_stored_and_recognised(db: Boxes, kind: Any) -> None:
    layout = outbox.Layout(table=f"{db.outbox}_{kind}")
    db.execute(outbox.ddl(db.dialect, layout, payload=kind))
    payloads = [{"path": "C:\\dir", "said": '"é"\n'}, {"total": 1.25}, '"text"', '"1"', "null", "[]", "true"]
    with contextlib.closing(db.connect()) as connection:
        if db.client == "driver" and db.dialect == "postgres":
            set_json_loads(partial(json.loads, parse_float=Decimal), connection)
        for payload in payloads:
            id_ = outbox.new_id()
            assert db.put(connection, id_, payload=payload, layout=layout).stored
            again = db.put(connection, id_, payload=payload, layout=layout, on_duplicate="ignore")
            assert not again.stored
            connection.commit()
            stored = db.execute(f"SELECT payload FROM {layout.table} WHERE id = '{id_}'")
            if kind == "bytes":
                raw = stored[0][0].encode() if isinstance(stored[0][0], str) else bytes(stored[0][0])
                assert json.loads(raw) == (json.loads(payload) if isinstance(payload, str) else payload)
            with pytest.raises(outbox.DuplicateId, match="OUTBOX_ID_REUSED"):
                db.put(connection, id_, payload={"other": 1}, layout=layout, on_duplicate="ignore")
        connection.rollback()


def test_an_error_of_rows_that_a_session_sends_late_is_the_callers(db: Boxes) -> None:
    db.execute(f"CREATE UNIQUE INDEX {db.orders}_n ON {db.orders} (n)")
    db.execute(f"INSERT INTO {db.orders} VALUES (1, '')")
    with contextlib.closing(db.connect()) as connection:
        if db.client != "session":
            pytest.skip("sends every row at once")
        orders = sqlalchemy.Table(
            db.orders, sqlalchemy.MetaData(), sqlalchemy.Column("n", sqlalchemy.Integer, primary_key=True)
        )
        mapped = type("Order", (), {})
        sqlalchemy.orm.registry().map_imperatively(mapped, orders)
        order = mapped()
        order.n = 1  # type: ignore[attr-defined]
        with (
            pytest.raises(sqlalchemy.exc.IntegrityError),
            inbox(connection, "1", consumer="a", table=db.inbox),
        ):
            connection.add(order)
        with inbox(connection, "2", consumer="a", table=db.inbox) as first:
            assert first
        connection.commit()
    assert db.execute(f"SELECT COUNT(*) FROM {db.inbox}") == [(1,)], "the transaction went on"


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_a_message_whose_row_a_trigger_drops_is_no_repeat(
    dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db = database(Boxes, request, dialect, tmp_path)
    drop = "BEGIN SELECT RAISE(IGNORE); END"
    if dialect == "postgres":
        db.execute(f"CREATE FUNCTION {db.inbox}_f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        drop = f"EXECUTE FUNCTION {db.inbox}_f()"
    db.execute(f"CREATE TRIGGER {db.inbox}_t BEFORE INSERT ON {db.inbox} FOR EACH ROW {drop}")
    with contextlib.closing(db.raw()) as connection:
        with pytest.raises(Refused, match="INBOX_ROW"), inbox(connection, "1", consumer="a", table=db.inbox):
            pass
        connection.rollback()


def test_cursors_and_pipelines_of_psycopg_change_no_answer(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    db = database(Boxes, request, "postgres", tmp_path)
    with contextlib.closing(db.raw()) as connection:
        for n, kind in enumerate((psycopg.Cursor, psycopg.RawCursor, psycopg.ClientCursor)):
            connection.cursor_factory, answers = kind, []
            with connection.pipeline():
                for _ in range(2):
                    with inbox(connection, str(n), consumer="a", table=db.inbox) as first:
                        answers.append(first)
                assert db.put(connection, outbox.new_id()).stored
            connection.commit()
            assert answers == [True, False], kind


def test_a_transaction_that_a_deadlock_ended_is_not_taken_for_open(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In autocommit, with a transaction begun by the caller: PyMySQL reports it as open after the server ended it."""
    db = database(Boxes, request, "mysql", tmp_path)
    db.execute(f"ALTER TABLE {db.orders} ADD PRIMARY KEY (n)")
    db.execute(f"INSERT INTO {db.orders} VALUES (1, ''), (2, '')")
    with contextlib.closing(db.raw()) as connection, contextlib.closing(db.raw()) as other:
        connection.autocommit(True)
        connection.begin()
        applications.execute(connection, f"UPDATE {db.orders} SET message = 'a' WHERE n = 1")
        applications.execute(other, f"INSERT INTO {db.orders} VALUES {', '.join(f'({n}, 0)' for n in range(3, 40))}")
        applications.execute(other, f"UPDATE {db.orders} SET message = 'b' WHERE n = 2")
        thread = threading.Thread(
            target=applications.execute, args=(other, f"UPDATE {db.orders} SET message = 'b' WHERE n = 1")
        )
        thread.start()
        thread.join(0.5)
        with pytest.raises(pymysql.err.OperationalError, match="Deadlock"):
            applications.execute(connection, f"UPDATE {db.orders} SET message = 'a' WHERE n = 2")
        thread.join(60)
        with pytest.raises(Refused, match="AUTOCOMMIT"), inbox(connection, "1", consumer="a", table=db.inbox):
            pass
        other.rollback()
    assert db.execute(f"SELECT COUNT(*) FROM {db.inbox}") == [(0,)]


def test_a_consumers_commit_is_on_disk_whatever_its_role_says(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """After a crash of the server, an acknowledged message would lack its effect."""
    db = database(Boxes, request, "postgres", tmp_path)
    with contextlib.closing(db.raw()) as connection:
        for level, expected in (("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")):
            applications.execute(connection, f"SET synchronous_commit = {level}")
            connection.commit()
            with consume(connection, Delivery(level, list, list), consumer="a", table=db.inbox):
                assert applications.execute(connection, "SHOW synchronous_commit") == [(expected,)]
            assert applications.execute(connection, "SHOW synchronous_commit") == [(level,)]
            connection.rollback()


def test_the_clock_runs_on_in_the_hour_that_comes_twice(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By local time, leases of sagas would end an hour early in autumn."""
    db = database(Boxes, request, "mysql", tmp_path)
    host, _, port = db.url.rpartition(":")
    back = 1_792_890_000  # at 3:00, to 2:00
    with contextlib.closing(pymysql.connect(host=host, port=int(port), user="root", database="dev")) as connection:
        for statement in (
            "INSERT INTO mysql.time_zone (Use_leap_seconds) VALUES ('N')",
            f"INSERT INTO mysql.time_zone_name VALUES ('Zone/{db.inbox}', LAST_INSERT_ID())",
            "INSERT INTO mysql.time_zone_transition_type VALUES "
            "(LAST_INSERT_ID(), 0, 3600, 0, 'CET'), (LAST_INSERT_ID(), 1, 7200, 1, 'CEST')",
            f"INSERT INTO mysql.time_zone_transition VALUES (LAST_INSERT_ID(), {back - 18_144_000}, 1), "
            f"(LAST_INSERT_ID(), {back}, 0)",
            f"SET time_zone = 'Zone/{db.inbox}'",
        ):
            applications.execute(connection, statement)
        for at in (back - 1, back, back + 1800, back + 3600):
            applications.execute(connection, f"SET timestamp = {at}")
            assert Caller(connection, what="test").execute(f"SELECT {NOW_MS['mysql']}").rows == [(at * 1000,)]


@pytest.mark.parametrize("threads", [False, True])
def test_a_connection_consumes_one_message_at_once(threads: bool, tmp_path: Path) -> None:
    """The commit of the second would commit the id of the first, before its effect."""
    connection = sqlite3.connect(tmp_path / "a.db", check_same_thread=False)
    connection.execute(ddl("sqlite"))
    ended: list[str] = []

    def second() -> None:
        with consume(connection, Delivery("2", ended.append, lambda: ended.append("back")), consumer="a"):
            pass

    with (
        contextlib.closing(connection),
        consume(connection, Delivery("1", lambda: ended.append("1"), list), consumer="a") as first,
    ):
        assert first
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match=r"INBOX_IN_USE.*'2'"):
            pool.submit(second).result() if threads else second()
    assert ended == ["back", "1"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit=True")
def test_a_message_is_acknowledged_after_the_commit_of_a_connection_in_autocommit(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db", autocommit=True)) as connection:  # type: ignore[call-overload]
        connection.execute(ddl("sqlite"))
        open_: list[bool] = []
        end = lambda: open_.append(connection.in_transaction)  # noqa: E731
        for n in range(2):
            connection.execute("BEGIN")
            with contextlib.suppress(ZeroDivisionError), consume(connection, Delivery(str(n), end, end), consumer="a"):
                _ = 1 / n
        assert open_ == [False, False]
        assert connection.execute("SELECT message_id FROM inbox").fetchall() == [("1",)]


def test_an_effect_happens_once_per_consumer(db: Boxes) -> None:
    with contextlib.closing(db.connect()) as connection:
        for consumer, message, expected in [("a", "1", True), ("a", "1 ", True), ("b", "1", True), ("a", "1", False)]:
            with inbox(connection, message, consumer=consumer, table=db.inbox) as first:
                assert first is expected, (consumer, message)
            connection.commit()
        with inbox(connection, "undone", consumer="a", table=db.inbox) as first:
            assert first
        connection.rollback()
        with inbox(connection, "undone", consumer="a", table=db.inbox) as first:
            assert first, "a rollback takes the id back"


def test_an_error_in_the_block_takes_the_id_back_even_if_the_caller_commits(db: Boxes) -> None:
    with contextlib.closing(db.connect()) as connection:
        id_ = outbox.new_id()
        with pytest.raises(ZeroDivisionError), inbox(connection, id_, consumer="a", table=db.inbox):
            db.put(connection, id_)
            _ = 1 / 0
        connection.commit()
        assert db.execute(f"SELECT COUNT(*) FROM {db.outbox}") == [(0,)]
        with inbox(connection, id_, consumer="a", table=db.inbox) as first:
            assert first
            with inbox(connection, id_, consumer="nested", table=db.inbox) as nested:
                assert nested
        connection.commit()
    assert db.execute(f"SELECT COUNT(*) FROM {db.inbox}") == [(2,)]


def test_a_commit_in_the_block_is_an_error(db: Boxes) -> None:
    with contextlib.closing(db.connect()) as connection:
        broken = InvariantBroken if db.client == "driver" else Exception
        with pytest.raises(broken), inbox(connection, "1", consumer="a", table=db.inbox):
            connection.commit()


def test_old_ids_are_deleted_a_few_at_a_time(db: Boxes) -> None:
    with contextlib.closing(db.connect()) as connection:
        for n in range(7):
            with inbox(connection, str(n), consumer="a", table=db.inbox):
                pass
        connection.commit()
        db.execute(
            f"UPDATE {db.inbox} SET received_ms = received_ms - 3600000 WHERE message_id IN ('0','1','2','3','4')"
        )
        ttl = dt.timedelta(minutes=30)
        deleted = []
        for _ in range(3):
            deleted.append(clean(connection, ttl=ttl, table=db.inbox, limit=3))
            connection.commit()
        assert deleted == [3, 2, 0]
        again = {}
        for n in (0, 6):
            with inbox(connection, str(n), consumer="a", table=db.inbox) as again[n]:
                pass
        connection.commit()
    assert again == {0: True, 6: False}, "a repeat later than the TTL is new"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("commits", [True, False])
def test_of_two_consumers_at_once_one_is_first(
    dialect: str, commits: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db = database(Boxes, request, dialect, tmp_path)
    told: list[bool] = []
    asked = threading.Event()

    def second() -> None:
        with contextlib.closing(db.raw()) as connection:
            asked.set()
            with inbox(connection, "1", consumer="a", table=db.inbox) as first:
                told.append(first)
            connection.commit()

    with contextlib.closing(db.raw()) as connection:
        with inbox(connection, "1", consumer="a", table=db.inbox) as first:
            assert first
        thread = threading.Thread(target=second)
        thread.start()
        assert asked.wait(120)
        thread.join(0.2)
        assert thread.is_alive(), f"the second was told {told} before the first had ended"
        connection.commit() if commits else connection.rollback()
        thread.join(120)
    assert told == [not commits]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_autocommit_and_missing_tables_are_refused(
    dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db = database(Boxes, request, dialect, tmp_path)
    with contextlib.closing(db.raw()) as connection:
        with pytest.raises(Refused, match=r"OUTBOX_TABLE.*outbox\.ddl"):
            outbox.put(
                connection, id=outbox.new_id(), aggregate_type="a", aggregate_id="1", type="t", payload=None,
                layout=outbox.Layout(table="nothing"),
            )  # fmt: skip
        connection.rollback()
        with (
            pytest.raises(Refused, match=r"INBOX_TABLE.*inbox\.ddl"),
            inbox(connection, "1", consumer="a", table="nothing"),
        ):
            pass
        connection.rollback()
        if dialect == "mysql":
            connection.autocommit(True)
        elif dialect == "postgres":
            connection.autocommit = True
        else:
            connection.isolation_level = None
        with pytest.raises(Refused, match="AUTOCOMMIT"):
            db.put(connection, outbox.new_id())
        with pytest.raises(Refused, match="AUTOCOMMIT"), inbox(connection, "1", consumer="a", table=db.inbox):
            pass
        applications.execute(connection, "BEGIN")
        assert db.put(connection, outbox.new_id()).stored, "a transaction that the caller began itself"
        connection.rollback()
    assert db.execute(f"SELECT COUNT(*) FROM {db.outbox}") == [(0,)]


POINTS = [("before", 2), ("in", 4), ("in_late", 6), ("after", 8)]


def disagreements(db: Boxes, ids: list[str], *tables: str) -> list[str]:
    """What a checker says of tables that should each hold every id once."""
    found = []
    for table, column in (t.split(".") for t in tables):
        got = Counter(str(i) for (i,) in db.execute(f"SELECT {column} FROM {table}"))
        lost, doubled = set(ids) - set(got), {i for i, n in got.items() if n > 1}
        unknown = set(got) - set(ids)
        found += [
            f"{table}: {len(x)} {w}" for w, x in [("lost", lost), ("doubled", doubled), ("unknown", unknown)] if x
        ]
    return found


@pytest.mark.parametrize("dialect", SWEEP)
@pytest.mark.parametrize("variant", ["", "id_per_try", "other_transaction"])
def test_business_rows_and_messages_agree_after_kills(
    dialect: str, variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """F1: the application dies before, in and after its transaction; the checker finds both broken variants."""
    db = database(Boxes, request, dialect, tmp_path)
    ids = [str(outbox.new_id()) for _ in range(MESSAGES)]
    spec = {
        "role": "application", "dialect": dialect, "url": db.url, "outbox": db.outbox, "orders": db.orders,
        "ids": ids, "variant": variant,
    }  # fmt: skip
    for point, n in POINTS:
        code, _ = applications.run_process({**spec, "point": point, "n": n})
        assert code == -9
    assert applications.run_process({**spec, "point": "", "n": -1})[0] == 0
    found = disagreements(db, ids, f"{db.orders}.message", f"{db.outbox}.id")
    assert bool(found) is bool(variant), found


@pytest.mark.parametrize("dialect", SWEEP)
@pytest.mark.parametrize("variant", ["", "other_transaction", "ack_before_commit"])
def test_an_effect_happens_once_though_messages_repeat_and_consumers_die(
    dialect: str, variant: str, request: pytest.FixtureRequest, tmp_path: Path, rabbitmq: Any
) -> None:
    """F6a, F6b, F6c: every second message is sent twice; the checker finds both broken variants."""
    db = database(Boxes, request, dialect, tmp_path)
    ids = [str(outbox.new_id()) for _ in range(MESSAGES)]
    queue = rabbitmq.queue()
    sent = [(i, b'{"n": %d}' % n) for n, i in enumerate(ids)]
    rabbitmq.send(queue, sent + sent[1::2])
    spec = {
        "role": "consumer", "dialect": dialect, "url": db.url, "inbox": db.inbox, "effects": db.orders,
        "broker": "rabbitmq", "address": rabbitmq.url, "queue": queue, "variant": variant,
    }  # fmt: skip
    for point, n in POINTS:
        code, _ = applications.run_process({**spec, "point": point, "n": n})
        assert code == -9
    code, repeats = applications.run_process({**spec, "point": "", "n": -1})
    assert code == 0
    assert int(repeats) >= 1
    assert rabbitmq.left(queue) == 0
    found = disagreements(db, ids, f"{db.orders}.message")
    assert bool(found) is bool(variant), found
