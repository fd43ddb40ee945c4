"""Seals of audits in every ledger: one chain per sink, which no claim, decision or archive touches."""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.halted import killed
from tests.support.sinks import SCHEMA, SINKS
from tests.support.sweeps import sweep

from delivered import ledger as rules
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.step import Moment
from delivered.model.work import Account, Decision, Failed, Ok, Outcome, Owner, Started

STORES = [
    "memory-two-phase",
    "sqlite",
    "files-json",
    "delta",
    "delta-s3",
    "iceberg",
    "iceberg-s3",
    "iceberg-rest",
    "kafka",
    "postgres-one-transaction",
    "mysql-one-transaction",
    "rocketmq",
    "pulsar",
]
"""Of every kind of ledger; RocketMQ's is kept in SQLite, as those of all queues."""
QUICK = ["memory-two-phase", "sqlite", "files-json", "delta", "iceberg", "kafka", "postgres-one-transaction"]
SINK, OTHER = "sink", "second"
_numbers = itertools.count()


def ready(name: str, request: pytest.FixtureRequest) -> tuple[Sink, str]:
    """A sink with a table, and the name of a new pipeline."""
    sink = SINKS[name](request)
    sink.ready_target(SCHEMA)
    return sink, f"sealed{next(_numbers)}"


def text(sink: str, number: int, what: str = "held") -> str:
    """Not a real seal: stores look at no field. Long, and with letters outside ASCII."""
    return f'{{"number":{number},"sink":"{sink}","verdict":"{what}","wörter":"{"é" * 3000}"}}'


def decision(scope: Scope, batch: int, sequence: int) -> Decision:
    account = {scope.sink: Account(Fingerprint(batch + 1, 1, 2))}
    return Decision(scope, "d", Guarantee.EXACTLY_ONCE, batch, f'{{"0":{batch}}}', (), account, 0, sequence=sequence)


def owner_of(sink: Sink, scope: Scope, name: str) -> Ledger:
    ledger = open_ledger(sink, scope)
    ledger.claim(Owner(name, "host", 1, 2))
    return ledger


@pytest.mark.parametrize("name", sweep(STORES, QUICK.__contains__))
def test_seals_are_a_chain_per_sink_that_is_only_appended_to(name: str, request: pytest.FixtureRequest) -> None:
    sink, pipeline = ready(name, request)
    scope = Scope(pipeline, SINK, "i0")
    owner = owner_of(sink, scope, "a")
    audit = open_ledger(sink, scope)
    assert (audit.last_seal(SINK), list(audit.seals(SINK))) == (None, [])
    for number in range(3):
        for of in (SINK, OTHER):
            assert audit.add_seal(of, number, text(of, number)) == Ok(None)
            assert audit.last_seal(of) == text(of, number)
    again = open_ledger(sink, Scope(pipeline, SINK, "i1"))
    for of in (SINK, OTHER):
        assert list(again.seals(of)) == [text(of, n) for n in range(3)], "also for another checkpoint"
        assert list(again.seals(of, 1)) == [text(of, n) for n in (1, 2)]
        assert list(again.seals(of, 3)) == []
        for number in range(3):
            assert again.add_seal(of, number, text(of, number)) == Ok(None), "the same seal again"
            assert isinstance(again.add_seal(of, number, text(of, number, "broken")), Failed), "the number is taken"
        assert isinstance(again.add_seal(of, 4, text(of, 4)), Failed), "seal 3 is missing"
        assert list(again.seals(of)) == [text(of, n) for n in range(3)]
    assert owner.decide(decision(scope, 0, 1)) == Ok(None), "an audit fences no owner"
    stranger = open_ledger(sink, Scope(f"{pipeline}x", SINK, "i0"))
    assert stranger.last_seal(SINK) is None
    for ledger in (owner, audit, again, stranger):
        ledger.close()


@pytest.mark.parametrize("name", sweep(STORES, QUICK.__contains__))
def test_no_claim_decision_or_archive_touches_seals(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger keeps two decisions and one earlier checkpoint here."""
    monkeypatch.setattr(rules, "LEDGER_INCARNATIONS", 1)
    for module in (
        "delivered.kits.sql.ledger",
        "tests.support.memory.store",
        *(f"delivered.connectors.{s}.store" for s in ("files", "delta", "iceberg", "kafka", "pulsar")),
    ):
        monkeypatch.setattr(f"{module}.LEDGER_HISTORY_BATCHES", 2)
    monkeypatch.setattr("delivered.kits.table.shard.BLOCK_BATCHES", 1)
    sink, pipeline = ready(name, request)
    wanted: list[str] = []
    sequence = itertools.count(1)
    for number, incarnation in enumerate(("i0", "i1", "i2")):
        scope = Scope(pipeline, SINK, incarnation)
        audit = open_ledger(sink, scope)
        owner = owner_of(sink, scope, f"d{number}")
        for batch in range(3):
            assert owner.begin(Started(batch, "{}", next(sequence))) == Ok(None)
            wanted.append(text(SINK, len(wanted)))
            assert audit.add_seal(SINK, len(wanted) - 1, wanted[-1]) == Ok(None), "no claim fences an audit"
            assert owner.decide(decision(scope, batch, next(sequence))) == Ok(None), "between begin and decision"
        assert len(list(owner.history())) <= 2, "decisions are trimmed"
        owner.close()
        audit.close()
    last = open_ledger(sink, Scope(pipeline, SINK, "i3"))
    last.claim(Owner("d9", "host", 1, 2))
    assert list(last.seals(SINK)) == wanted
    last.close()


@pytest.mark.parametrize("name", sweep(STORES, QUICK.__contains__))
def test_of_two_audits_at_once_one_wins(name: str, request: pytest.FixtureRequest) -> None:
    sink, pipeline = ready(name, request)
    scope = Scope(pipeline, SINK, "i0")
    owner_of(sink, scope, "a").close()
    rounds, start = 5, threading.Barrier(2)
    outcomes: dict[tuple[str, int], Outcome[None]] = {}
    errors: list[BaseException] = []

    def audit(who: str) -> None:
        ledger = open_ledger(pickle.loads(pickle.dumps(sink)), scope)
        try:
            for number in range(rounds):
                start.wait(120)
                outcomes[who, number] = ledger.add_seal(SINK, number, text(SINK, number, who))
        except BaseException as error:
            errors.append(error)
            start.abort()
        finally:
            ledger.close()

    threads = [threading.Thread(target=audit, args=(who,)) for who in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    ledger = open_ledger(sink, scope)
    winners = []
    for number in range(rounds):
        won = [who for who in ("first", "second") if isinstance(outcomes[who, number], Ok)]
        lost = [outcomes[who, number] for who in ("first", "second") if who not in won]
        assert (len(won), [type(o) for o in lost]) == (1, [Failed]), outcomes
        winners.append(text(SINK, number, won[0]))
    assert list(ledger.seals(SINK)) == winners
    ledger.close()


AUDIT = """
import pickle, sys
from pathlib import Path
from delivered.crash import install_from_environment
from delivered.engine.context import open_ledger
sink, scope, number, text = pickle.loads(Path(sys.argv[1]).read_bytes())
install_from_environment()
open_ledger(sink, scope).add_seal(scope.sink, number, text)
"""
CRASHES = [(name, m) for name in STORES if not name.startswith(("memory", "iceberg-rest")) for m in Moment]


@pytest.mark.parametrize(("name", "moment"), sweep(CRASHES, lambda name, _: name == "sqlite"))
def test_an_audit_killed_at_its_seal_leaves_a_seal_or_none(
    name: str, moment: Moment, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sink, pipeline = ready(name, request)
    scope = Scope(pipeline, SINK, "i0")
    owner_of(sink, scope, "a").close()
    ledger = open_ledger(sink, scope)
    assert ledger.add_seal(SINK, 0, text(SINK, 0)) == Ok(None)
    given = tmp_path / "audit.pickle"
    given.write_bytes(pickle.dumps((sink, scope, 1, text(SINK, 1))))
    killed([sys.executable, "-c", AUDIT, str(given)], f"audit.seal:{moment}", tmp_path)
    there = [text(SINK, n) for n in range(2 if moment is Moment.AFTER else 1)]
    assert list(ledger.seals(SINK)) == there
    assert ledger.last_seal(SINK) == there[-1]
    number = len(there)
    assert ledger.add_seal(SINK, number, text(SINK, number, "next")) == Ok(None), "the next audit goes on"
    ledger.close()


def _killed_server(name: str, request: pytest.FixtureRequest) -> tuple[Sink, Any]:
    if name == "kafka":
        from delivered.connectors.kafka import CONNECTOR

        kafka = request.getfixturevalue("mortal_kafka")
        return CONNECTOR.sink({"kafka.bootstrap.servers": kafka.bootstrap, "topic": kafka.topic()}), kafka.broker
    server = request.getfixturevalue(f"new_{name}")()
    if name == "pulsar":
        from delivered.connectors.pulsar import CONNECTOR as PULSAR

        return PULSAR.sink({**server.options, "topic": server.topic()}), server.broker
    return server.sink(), server.broker


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["kafka", "postgres", "mysql", "pulsar"])
def test_seals_survive_a_kill_of_their_server(name: str, request: pytest.FixtureRequest) -> None:
    sink, broker = _killed_server(name, request)
    sink.ready_target(SCHEMA)
    scope = Scope(f"sealed{next(_numbers)}", SINK, "i0")
    owner_of(sink, scope, "a").close()
    for number in range(3):
        ledger = open_ledger(sink, scope)
        assert ledger.add_seal(SINK, number, text(SINK, number)) == Ok(None)
        broker.kill()
        broker.restart()
        assert ledger.last_seal(SINK) == text(SINK, number), "on connections of before"
        ledger.close()
        ledger = open_ledger(sink, scope)
        assert list(ledger.seals(SINK)) == [text(SINK, n) for n in range(number + 1)]
        ledger.close()
