"""Outbox and inbox in real databases, through every client; applications and consumers that are killed."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outbox_help import Database, database

from delivered.model.errors import InvariantBroken, Refused
from delivered.patterns import outbox
from delivered.patterns.inbox import clean, ddl, inbox
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
        return outbox.put(connection, id=id_, layout=self.layout, **message | given)


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
