"""Seals in servers: who may write them, lost replies, ledgers of earlier versions; in Kafka, whose records count."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.broker.sink_help import FIRST, Forger, Rig, decision, store_of, wait_for
from tests.support.servers import Kafka, Mysql, Postgres

from delivered.clients.kafka.transactions import describe, initialise
from delivered.connectors.kafka import store, topics
from delivered.connectors.kafka.store import Seals
from delivered.connectors.kafka.topics import HISTORY_PARTITION, Keys
from delivered.connectors.kafka.writes import Again, LedgerProducer, holders
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model.identity import Scope
from delivered.model.work import Failed, Ok, Unknown

SINK = "sink"


def text(number: int, what: str = "held") -> str:
    return f'{{"number":{number},"verdict":"{what}"}}'


@pytest.fixture
def rig(kafka: Kafka) -> Rig:
    return Rig(kafka, "no-data-here")


def seals_of(ledger: Ledger) -> Seals:
    return store_of(ledger)._seals(SINK)


def forged(rig: Rig, producer: int) -> list[tuple[bytes, bytes | None]]:
    """A seal that follows, another one for a number, the loss of one, and records that cannot be read."""
    keys = Keys(Scope(rig.scope.pipeline, SINK, "any"))

    def record(number: int) -> tuple[bytes, bytes]:
        value = {"seal": text(number, "forged"), "writers": [producer, *range(3000)]}
        return keys.key("seal", number), json.dumps(value).encode()

    return [record(2), record(3), record(0), (keys.key("seal", 1), None), (keys.key("seal", 1), b"[")]


@pytest.mark.parametrize("transactional", [False, True], ids=["plainly", "in a transaction"])
def test_what_another_application_writes_is_no_seal(
    rig: Rig, opened: Callable[[], Ledger], transactional: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = opened()
    one.claim(FIRST)
    for number in range(2):
        assert one.add_seal(SINK, number, text(number)) == Ok(None)
    forger = Forger(rig, transactional)
    forger.write(HISTORY_PARTITION, *forged(rig, 7))
    with caplog.at_level(logging.WARNING, "delivered"):
        assert opened().last_seal(SINK) == text(1)
        assert list(opened().seals(SINK)) == [text(0), text(1)]
    assert one.decide(decision(rig.scope, 0)) == Ok(None)
    assert [d.batch for d in opened().history()] == [0]
    assert one.add_seal(SINK, 2, text(2)) == Ok(None)
    assert list(opened().seals(SINK)) == [text(0), text(1), text(2)]


def test_an_open_transaction_of_another_application_hides_no_seal(rig: Rig, opened: Callable[[], Ledger]) -> None:
    one = opened()
    one.claim(FIRST)
    assert one.add_seal(SINK, 0, text(0)) == Ok(None)
    forger = Forger(rig, transactional=True)
    forger.hold(HISTORY_PARTITION, *forged(rig, 7))
    assert one.add_seal(SINK, 1, text(1)) == Ok(None)
    assert list(opened().seals(SINK)) == [text(0), text(1)]
    assert opened().last_seal(SINK) == text(1)


def test_the_newest_seal_is_found_from_the_end(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more decisions than are read first; and one that was sealed long ago is known, too. So are decisions."""
    monkeypatch.setattr(topics, "NEWEST_OFFSETS", 3)
    one = opened()
    one.claim(FIRST)
    for number in range(3):
        assert one.add_seal(SINK, number, text(number)) == Ok(None)
    for batch in range(6):
        assert one.decide(decision(rig.scope, batch)) == Ok(None)
    assert opened().last_seal(SINK) == text(2)
    assert opened().add_seal(SINK, 0, text(0)) == Ok(None)
    assert isinstance(opened().add_seal(SINK, 0, text(0, "broken")), Failed)
    assert opened().add_seal(SINK, 3, text(3)) == Ok(None)
    assert [d.batch for d in opened().history()] == [*range(6)]
    fresh = [*topics.starts_from_the_end(40)]
    assert fresh == [37, 16, 0]


@pytest.mark.parametrize("sent", [True, False])
def test_a_lost_reply_to_the_commit_of_a_seal_is_settled(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    one = opened()
    one.claim(FIRST)
    real, lost = LedgerProducer.commit, [True]

    def commit(self: LedgerProducer) -> Any:
        if lost and lost.pop():
            if sent:
                assert real(self)[0] == Ok(None)
            return Unknown("no answer"), Again.NO
        return real(self)

    monkeypatch.setattr(LedgerProducer, "commit", commit)
    assert one.add_seal(SINK, 0, text(0)) == Ok(None)
    assert list(opened().seals(SINK)) == [text(0)]
    lost.append(True)
    monkeypatch.setattr(store, "OUTAGE_PATIENCE_S", 0.0)
    assert isinstance(one.add_seal(SINK, 1, text(1)), Unknown)
    monkeypatch.undo()
    if sent:
        assert isinstance(opened().add_seal(SINK, 1, text(1, "another")), Failed)
    assert opened().add_seal(SINK, 1, text(1)) == Ok(None)
    assert list(opened().seals(SINK)) == [text(0), text(1)]


def test_an_audit_that_another_fences_has_failed(
    rig: Rig, opened: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened(), opened()
    one.claim(FIRST)
    real, first = LedgerProducer.write, [True]

    def write(self: LedgerProducer, writes: Any) -> Any:
        if first and first.pop():
            assert two.add_seal(SINK, 0, text(0, "second")) == Ok(None)
        return real(self, writes)

    monkeypatch.setattr(LedgerProducer, "write", write)
    assert isinstance(one.add_seal(SINK, 0, text(0, "first")), Failed)
    assert one.last_seal(SINK) == text(0, "second")
    assert one.decide(decision(rig.scope, 0)) == Ok(None), "no owner is fenced"


def test_a_seal_initialises_no_id_of_an_owner(rig: Rig, opened: Callable[[], Ledger]) -> None:
    """An owner that is fenced takes its id back, so its decisions alone do not show it."""
    one = opened()
    one.claim(FIRST)
    store = store_of(one)

    def held() -> list[Any]:
        return [describe(store._wire, store._id(role)) for role in ("plan", "decide")]

    before = [state.participant for state in held()]
    assert opened().add_seal(rig.scope.sink, 0, text(0)) == Ok(None)
    assert [state.participant for state in held()] == before


@pytest.mark.matrix
def test_seals_whose_id_the_brokers_forgot_count(new_kafka: Callable[..., Any]) -> None:
    """Audits a month apart: each gets another producer id."""
    forgets = {"transactional.id.expiration.ms": "3000", "producer.id.expiration.ms": "3000"}
    forgets |= {"transaction.remove.expired.transaction.cleanup.interval.ms": "500"}
    rig = Rig(new_kafka(properties=forgets), "no-data-here")
    one = rig.ledger()
    one.claim(FIRST)
    producers = set()
    for number in range(3):
        assert one.add_seal(SINK, number, text(number)) == Ok(None)
        chain = seals_of(one)
        producers |= holders(chain._wire, [chain._id]) or set()
        wait_for(lambda: not holders(chain._wire, [chain._id]))  # noqa: B023
        assert list(rig.ledger().seals(SINK)) == [text(n) for n in range(number + 1)], "nobody can be asked"
    assert len(producers) == 3
    assert isinstance(initialise(chain._wire, chain._id, 15_000, time.monotonic() + 60), Ok)
    assert list(rig.ledger().seals(SINK)) == [text(n) for n in range(3)], "its holder wrote nothing"
    assert one.add_seal(SINK, 3, text(3)) == Ok(None)
    Forger(rig, transactional=True).write(HISTORY_PARTITION, *forged(rig, 7))
    assert list(rig.ledger().seals(SINK)) == [text(n) for n in range(4)]


GRANTS = {
    "postgres": ("CREATE ROLE auditor LOGIN", "GRANT USAGE ON SCHEMA sealed TO auditor",
        "GRANT SELECT ON ALL TABLES IN SCHEMA sealed TO auditor"),
    "mysql": ("CREATE USER auditor@'127.0.0.1'", "GRANT SELECT ON dev.* TO auditor@'127.0.0.1'",
        "GRANT SELECT ON sealed.* TO auditor@'127.0.0.1'"),
}  # fmt: skip
SEALS = {
    "postgres": ("GRANT INSERT ON sealed.seal TO auditor",),
    "mysql": ("GRANT INSERT, UPDATE ON sealed.seal TO auditor@'127.0.0.1'",),
}


@pytest.mark.parametrize("system", GRANTS)
def test_an_auditor_may_read_and_hears_what_it_lacks_to_seal(system: str, request: pytest.FixtureRequest) -> None:
    server: Postgres | Mysql = request.getfixturevalue(system)
    sink = server.sink(ledgerSchema="sealed")
    scope = Scope("read", SINK, "i")
    ledger = open_ledger(sink, scope)
    ledger.claim(FIRST)
    assert ledger.add_seal(SINK, 0, text(0)) == Ok(None)
    for statement in GRANTS[system]:
        server.execute(statement)
    url = server.url.replace(server.url.partition("//")[2].partition("@")[0], "auditor", 1)
    theirs = open_ledger(replace(sink, options=replace(sink.options, url=url)), scope)
    assert theirs.last_seal(SINK) == text(0)
    outcome = theirs.add_seal(SINK, 1, text(1))
    assert isinstance(outcome, Failed)
    assert re.search("denied .*for table .*seal", outcome.reason), outcome
    for statement in SEALS[system]:
        server.execute(statement)
    assert theirs.add_seal(SINK, 1, text(1)) == Ok(None)
    assert list(ledger.seals(SINK)) == [text(0), text(1)]


@pytest.mark.parametrize("system", ["postgres", "mysql"])
def test_tables_of_an_earlier_version_have_no_seals_until_one_is_added(
    system: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Postgres | Mysql = request.getfixturevalue(system)
    module = f"delivered.connectors.{'postgres.target' if system == 'postgres' else 'mysql.client'}.MIGRATIONS"
    sink = server.sink(ledgerSchema="earlier")
    scope = Scope("earlier", SINK, "i")
    with monkeypatch.context() as before:
        import importlib

        name, _, attribute = module.rpartition(".")
        now = getattr(importlib.import_module(name), attribute)
        before.setattr(module, now[:4])
        owner = open_ledger(sink, scope)
        owner.claim(FIRST)
    ledger = open_ledger(sink, scope)
    assert (ledger.last_seal(SINK), list(ledger.seals(SINK))) == (None, [])
    assert server.execute("SELECT max(version) FROM earlier.migration") == [(4,)], "reading migrates nothing"
    assert ledger.add_seal(SINK, 0, text(0)) == Ok(None)
    assert ledger.last_seal(SINK) == text(0)
    assert owner.decide(decision(scope, 0, participants=0)) == Ok(None), "the owner goes on"


@pytest.mark.parametrize("system", ["postgres", "mysql"])
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_of_a_seal_without_an_answer(
    system: str, committed: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Postgres | Mysql = request.getfixturevalue(system)
    sink, scope = server.sink(), Scope(f"lost-{committed}", SINK, "i")
    ledger = open_ledger(sink, scope)
    ledger.claim(FIRST)
    database: Any = ledger._store
    database = type(database._database)
    real = database.connect

    def connect(self: Any, role: str, **more: Any) -> Any:
        connection = real(self, role, **more)
        if role == "seal":
            execute = connection.execute

            def lost(statement: str, *values: Any) -> Any:
                if statement == "COMMIT":
                    if committed:
                        execute(statement)
                    connection.close()
                    return execute("SELECT 1")
                return execute(statement, *values)

            connection.execute = lost
        return connection

    monkeypatch.setattr(database, "connect", connect)
    assert isinstance(ledger.add_seal(SINK, 0, text(0)), Unknown)
    monkeypatch.undo()
    assert ledger.last_seal(SINK) == (text(0) if committed else None)
    assert ledger.add_seal(SINK, 0, text(0)) == Ok(None)
    assert list(ledger.seals(SINK)) == [text(0)]
