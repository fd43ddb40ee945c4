"""Event logs in real databases, through every client: conflicts, snapshots, two writers, kills."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.broker.events_process import ACCOUNT
from tests.broker.outbox_help import Database, database

from delivered.model.errors import BadRecord, InvariantBroken, Refused
from delivered.patterns.events import SNAPSHOTS, Conflict, DuplicateEvent, Event, ddl, new_id

ROOT = Path(__file__).parents[2]
DIALECTS = ["sqlite", "postgres", "mysql"]
SWEEP = ["sqlite", *(pytest.param(d, marks=pytest.mark.matrix) for d in DIALECTS[1:])]
REQUESTS = 12
_names = itertools.count()


class Bank(Database):
    """The log's tables, shared; an account of its own; connections of a client."""

    def __init__(self, dialect: str, url: str, client: str) -> None:
        super().__init__(dialect, url, client)
        self.account, self.balances = f"account {next(_names)}", f"balances{next(_names)}"
        for statement in (*ddl(dialect), f"CREATE TABLE {self.balances} (total INTEGER, n INTEGER)"):
            self.execute(statement)
        self.execute(f"INSERT INTO {self.balances} VALUES (0, 0)")


@pytest.fixture(params=[f"{d}-{c}" for d in DIALECTS for c in ("driver", "session")])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Bank:
    dialect, client = request.param.split("-")
    return database(Bank, request, dialect, tmp_path, client)


def deposits(*amounts: int) -> list[Event]:
    return [Event(new_id(), "deposited", {"amount": n, "note": "é"}) for n in amounts]


def test_state_is_the_fold_and_a_conflict_names_the_version_found(db: Bank) -> None:
    with contextlib.closing(db.connect()) as connection:
        assert ACCOUNT.load(connection, db.account) == ({"balance": 0, "events": 0}, 0)
        first = deposits(1, 2)
        assert ACCOUNT.append(connection, db.account, first, expected=0) == (2, True)
        connection.rollback()
        assert ACCOUNT.load(connection, db.account).version == 0
        assert ACCOUNT.append(connection, db.account, first, expected=0) == (2, True)
        connection.commit()
        assert ACCOUNT.append(connection, db.account, first, expected=0) == (2, False), "a repeat of the whole call"
        for other in ({"type": "withdrawn"}, {"payload": {"amount": True, "note": "é"}}):
            with pytest.raises(DuplicateEvent, match="as version 1 of account"):
                ACCOUNT.append(connection, db.account, [replace(first[0], **other), first[1]], expected=0)
        with pytest.raises(Refused, match=r"EVENTS_ROW.*twice"):
            ACCOUNT.append(connection, db.account, deposits(9) * 2, expected=2)
        for expected in (0, 1, 3):
            with pytest.raises(Conflict, match=f"is at version 2; expected was {expected}") as conflict:
                ACCOUNT.append(connection, db.account, deposits(9), expected=expected)
            assert conflict.value.found == 2
        with pytest.raises(DuplicateEvent, match="as version 1 of account"):
            ACCOUNT.append(connection, db.account, [*deposits(9), first[0]], expected=2)
        assert ACCOUNT.append(connection, db.account, deposits(3), expected=2).version == 3, "the transaction goes on"
        connection.commit()
        assert ACCOUNT.load(connection, db.account) == ({"balance": 6, "events": 3}, 3)
        assert ACCOUNT.load(connection, db.account + " ").version == 0
        connection.rollback()


def test_after_a_conflict_the_same_transaction_may_append_and_write_a_snapshot(db: Bank) -> None:
    """It began before the other's commit, which an ordinary read of MySQL does not see."""
    with contextlib.closing(db.connect()) as connection, contextlib.closing(db.raw()) as other:
        if db.dialect == "sqlite":
            pytest.skip("a transaction that has read cannot wait for a writer")
        assert ACCOUNT.load(connection, db.account).version == 0
        ACCOUNT.append(other, db.account, deposits(1, 2), expected=0)
        other.commit()
        with pytest.raises(Conflict) as conflict:
            ACCOUNT.append(connection, db.account, deposits(3), expected=0)
        ACCOUNT.append(connection, db.account, deposits(3), expected=conflict.value.found)
        connection.commit()
        assert ACCOUNT.load(connection, db.account) == ({"balance": 6, "events": 3}, 3)
        connection.rollback()
    states = db.execute(f"SELECT version, state FROM {SNAPSHOTS} WHERE aggregate_id = '{db.account}'")
    assert [(v, json.loads(s)) for v, s in states] == [(3, {"balance": 6, "events": 3})]


def test_snapshots_every_n_events_and_of_this_fold_only(db: Bank) -> None:
    with contextlib.closing(db.connect()) as connection:
        seen = []
        for n in range(10):
            ACCOUNT.append(connection, db.account, deposits(n), expected=n)
            connection.commit()
            of = f"FROM {SNAPSHOTS} WHERE aggregate_id = '{db.account}'"
            seen += [v for (v,) in db.execute(f"SELECT version {of}")]
        assert seen == [3, 3, 3, 6, 6, 6, 9, 9]
        db.execute(
            f"UPDATE {SNAPSHOTS} SET state = '{{\"balance\": 1000, \"events\": 9}}' WHERE aggregate_id = '{db.account}'"
        )
        assert ACCOUNT.load(connection, db.account).state["balance"] == 1009, "the snapshot is what is read"
        newer = replace(ACCOUNT, fold=2)
        assert newer.load(connection, db.account) == ({"balance": 45, "events": 10}, 10)
        newer.append(connection, db.account, deposits(0, 0), expected=10)
        connection.commit()
        assert db.execute(f"SELECT version, fold {of}") == [(12, 2)]
        assert ACCOUNT.load(connection, db.account) == ({"balance": 45, "events": 12}, 12)
        connection.rollback()


def test_a_snapshot_without_its_event_is_no_state(db: Bank) -> None:
    """Events were deleted, the snapshot was not: every append on its version would be in conflict."""
    with contextlib.closing(db.connect()) as connection:
        ACCOUNT.append(connection, db.account, deposits(1, 2, 3, 4), expected=0)
        connection.commit()
        assert ACCOUNT.load(connection, db.account).version == 4
        connection.rollback()
        for deleted in ("version >= 3", "version > 0"):
            db.execute(f"DELETE FROM delivered_event WHERE aggregate_id = '{db.account}' AND {deleted}")
            with pytest.raises(InvariantBroken, match=r"EVENTS_SNAPSHOT.*version 4"):
                ACCOUNT.load(connection, db.account)
            connection.rollback()
        db.execute(f"DELETE FROM {SNAPSHOTS} WHERE aggregate_id = '{db.account}'")
        assert ACCOUNT.load(connection, db.account).version == 0
        connection.rollback()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_gaps_missing_and_newer_tables_and_autocommit_are_refused(
    dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db = database(Bank, request, dialect, tmp_path)
    with contextlib.closing(db.raw()) as connection:
        ACCOUNT.append(connection, db.account, deposits(1, 2), expected=0)
        connection.commit()
        db.execute(f"DELETE FROM delivered_event WHERE aggregate_id = '{db.account}' AND version = 1")
        with pytest.raises(InvariantBroken, match="EVENTS_GAP"):
            ACCOUNT.load(connection, db.account)
        connection.rollback()
        try:
            db.execute("UPDATE delivered_event_format SET version = 2")
            with pytest.raises(Refused, match="FORMAT_NEWER"):
                ACCOUNT.load(connection, db.account)
            connection.rollback()
            db.execute("ALTER TABLE delivered_event_format RENAME TO away")
            with pytest.raises(Refused, match=r"EVENTS_TABLES.*events\.ddl"):
                ACCOUNT.append(connection, db.account, deposits(1), expected=0)
            connection.rollback()
        finally:
            with contextlib.suppress(Exception):
                db.execute("ALTER TABLE away RENAME TO delivered_event_format")
            db.execute("UPDATE delivered_event_format SET version = 1")
        lossy = replace(ACCOUNT, apply=lambda state, event: (1, 2), snapshot_every=1)
        with pytest.raises(BadRecord, match="EVENTS_STATE"):
            lossy.append(connection, f"{db.account} lossy", deposits(1), expected=0)
        connection.rollback()
        if dialect == "sqlite":
            connection.isolation_level = None
        else:
            connection.autocommit(True) if dialect == "mysql" else setattr(connection, "autocommit", True)
        with pytest.raises(Refused, match="AUTOCOMMIT"):
            ACCOUNT.append(connection, db.account, deposits(1), expected=0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("commits", [True, False])
def test_of_two_writers_at_one_version_one_is_in_conflict(
    dialect: str, commits: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    db = database(Bank, request, dialect, tmp_path)
    told: list[Any] = []
    asked = threading.Event()

    def second() -> None:
        with contextlib.closing(db.raw()) as connection:
            asked.set()
            try:
                told.append(ACCOUNT.append(connection, db.account, deposits(5), expected=1).version)
            except Conflict as conflict:
                told.append(f"found {conflict.found}")
            connection.commit()

    with contextlib.closing(db.raw()) as connection:
        ACCOUNT.append(connection, db.account, deposits(1), expected=0)
        connection.commit()
        ACCOUNT.append(connection, db.account, deposits(2), expected=1)
        thread = threading.Thread(target=second)
        thread.start()
        assert asked.wait(120)
        thread.join(0.2)
        assert thread.is_alive(), f"the second was told {told} before the first had ended"
        connection.commit() if commits else connection.rollback()
        thread.join(120)
        assert told == (["found 2"] if commits else [2])
        assert ACCOUNT.load(connection, db.account) == ({"balance": 3 if commits else 6, "events": 2}, 2)
        connection.rollback()


POINTS = [("before", 2), ("in", 4), ("in_late", 5), ("after", 8)]


@pytest.mark.parametrize("dialect", SWEEP)
@pytest.mark.parametrize("variant", ["", "id_per_try", "other_transaction"])
def test_events_and_business_rows_agree_after_kills(
    dialect: str, variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """F1: the application dies before, in and after its transaction; the checker finds both broken variants."""
    db = database(Bank, request, dialect, tmp_path)
    spec = {
        "dialect": dialect, "url": db.url, "account": db.account, "balances": db.balances,
        "ids": [str(new_id()) for _ in range(REQUESTS)], "variant": variant,
    }  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    for point, n in [*POINTS, ("", -1)]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.broker.events_process", json.dumps({**spec, "point": point, "n": n})],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == (-9 if point else 0), done.stderr
    with contextlib.closing(db.raw()) as connection:
        state, version = ACCOUNT.load(connection, db.account)
        whole = replace(ACCOUNT, fold=7).load(connection, db.account)  # no snapshot is of this fold
        connection.rollback()
    assert whole == (state, version), "a snapshot is the fold of its events"
    ((total, n),) = db.execute(f"SELECT total, n FROM {db.balances}")
    wanted = {"balance": sum(range(REQUESTS)), "events": REQUESTS}
    agrees = (state, version) == (wanted, REQUESTS) and (total, n) == (state["balance"], state["events"])
    assert agrees is not bool(variant), (state, version, total, n)
