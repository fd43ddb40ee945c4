"""The ledger in Pulsar: fencing by the order of the log, kills of the broker, policies that delete, rights."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.pulsar import native
from tests.support.servers import Pulsar

from delivered.connectors.pulsar import CONNECTOR, journal, store
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Topic, topic_name
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.errors import Fenced, InvariantBroken, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision, Failed, Ok, Outcome, Owner, Started, Unknown
from delivered_lab.brokers import pulsar as lab
from delivered_lab.verify.services import wait_for

_numbers = itertools.count()
SINK = "sink"


def sink_of(pulsar: Pulsar, namespace: str = "public/default", **options: str) -> Sink:
    topic = pulsar.topic(namespace=namespace)
    return CONNECTOR.sink({**pulsar.options, "topic": topic, **options})


def new_scope(incarnation: str = "i0") -> Scope:
    return Scope(f"ledger{next(_numbers)}", SINK, incarnation)


def decision(scope: Scope, batch: int, owner: str = "d") -> Decision:
    account = {SINK: Account(Fingerprint(batch + 1, 1, 2))}
    return Decision(scope, owner, Guarantee.EXACTLY_ONCE, batch, f'{{"0":{batch}}}', (), account, 0, sequence=batch + 1)


def claimed(sink: Sink, scope: Scope, owner: str) -> Ledger:
    ledger = open_ledger(sink, scope)
    ledger.claim(Owner(owner, "host", 1, 2))
    return ledger


def ledger_topic(sink: Any, scope: Scope) -> str:
    return topic_name(sink.options.namespace, scope, "ledger")


def kept(sink: Sink, scope: Scope) -> list[int]:
    """Batches of the history, as another process sees it."""
    ledger = open_ledger(sink, scope)
    try:
        return [d.batch for d in ledger.history()]
    finally:
        ledger.close()


def test_of_two_drivers_at_once_each_decision_is_of_the_newest(pulsar: Pulsar) -> None:
    """Both claim and decide as fast as they can. Each batch is decided once, by whoever claimed last."""
    sink, scope, rounds = sink_of(pulsar), new_scope(), 12
    start, lock = threading.Barrier(2), threading.Lock()
    outcomes: list[tuple[str, int, Outcome[None]]] = []
    errors: list[BaseException] = []

    def drive(name: str) -> None:
        try:
            for number in range(rounds):
                start.wait(60)
                ledger = open_ledger(sink, scope)
                try:
                    state = ledger.claim(Owner(f"{name}{number}", "host", 1, 2))
                    batch = 0 if state.last is None else state.last.batch + 1
                    outcome = ledger.decide(decision(scope, batch, name))
                    with lock:
                        outcomes.append((name, batch, outcome))
                except Fenced:
                    pass
                finally:
                    ledger.close()
        except BaseException as error:
            errors.append(error)
            start.abort()

    drivers = [threading.Thread(target=drive, args=(name,)) for name in ("a", "b")]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert not errors
    won = [batch for _, batch, outcome in outcomes if outcome == Ok(None)]
    assert sorted(won) == list(range(len(won))), "no batch twice, none missing"
    assert len(won) >= rounds
    assert {type(o) for _, _, o in outcomes} <= {Ok, Failed}
    assert kept(sink, scope) == sorted(won)


@pytest.mark.matrix  # of the server, not of what we do
def test_a_fenced_producer_may_have_stored_what_it_reports_as_fenced(pulsar: Pulsar) -> None:
    """Why the ledger does not rely on the access mode ExclusiveWithFencing: its error is not definite. No message is
    stored behind the first one of the producer that fenced it."""
    import pulsar as library

    mode = library.ProducerAccessMode.ExclusiveWithFencing
    topic, found = pulsar.topic(), Counter[tuple[str, bool]]()
    for number in itertools.count():
        results: dict[bytes, str] = {}
        answered = threading.Event()
        clients = [
            library.Client(pulsar.broker.url, logger=library.ConsoleLogger(library.LoggerLevel.Error)) for _ in range(2)
        ]
        old = clients[0].create_producer(topic, access_mode=mode, max_pending_messages=50_000)

        def on_answer(
            result: Any, _: Any, key: bytes, results: dict[bytes, str] = results, answered: threading.Event = answered
        ) -> None:
            results[key] = str(result).rpartition(".")[2]
            answered.set()

        sent = [b"%d/%d" % (number, n) for n in range(2_000)]
        for key in sent:
            old.send_async(key, lambda result, id_, key=key, on_answer=on_answer: on_answer(result, id_, key))
        assert answered.wait(60)
        clients[1].create_producer(topic, access_mode=mode).send(b"claim")
        with contextlib.suppress(library.PulsarException):
            old.flush()
        stored = _values(pulsar, topic)
        behind = stored[len(stored) - 1 - stored[::-1].index(b"claim") :]
        assert behind == [b"claim"]
        found.update((results.get(key, "none"), key in stored) for key in sent)
        for client in clients:
            client.close()
        if found["ProducerFenced", True] or number == 30:
            break
    assert found["ProducerFenced", True], found
    assert not found["Ok", False]


def _values(pulsar: Pulsar, topic: str) -> list[bytes]:
    return [m.data() for m in native(pulsar, topic)]


def test_a_record_of_an_outdated_driver_that_arrives_late_never_counts(pulsar: Pulsar) -> None:
    """It was paused between its check and its send, past a claim and a decision of another one."""
    sink, scope = sink_of(pulsar), new_scope()
    old = claimed(sink, scope, "a")
    resumed = threading.Event()
    paused = threading.Event()
    outcomes: list[Outcome[None]] = []
    topic: Any = old._store._topic  # type: ignore[attr-defined]
    send = topic.send

    def late(data: bytes) -> Any:
        paused.set()
        assert resumed.wait(60)
        return send(data)

    topic.send = late
    thread = threading.Thread(target=lambda: outcomes.append(old.decide(decision(scope, 0, "a"))))
    thread.start()
    assert paused.wait(60)
    new = claimed(sink, scope, "b")
    assert new.decide(decision(scope, 0)) == Ok(None)
    resumed.set()
    thread.join()
    assert isinstance(outcomes[0], Failed)
    assert len(_values(pulsar, ledger_topic(sink, scope))) == 4, "it is in the topic"
    assert new.decide(decision(scope, 1)) == Ok(None)
    assert kept(sink, scope) == [0, 1]
    for ledger in (old, new):
        ledger.close()


def test_an_unknown_outcome_is_settled(pulsar: Pulsar) -> None:
    """The client reports an error for a record that was stored, or was not: the next record takes its number."""
    sink, scope = sink_of(pulsar), new_scope()
    ledger = claimed(sink, scope, "a")
    topic: Any = ledger._store._topic  # type: ignore[attr-defined]
    send = topic.send
    for batch, stored in enumerate((True, False, True)):

        def lost(data: bytes, stored: bool = stored) -> Any:
            topic.send = send
            if stored:
                send(data)
            raise journal.OutcomeUnknown("PULSAR_LEDGER.UNCONFIRMED", topic="t", reason="lost")

        topic.send = lost
        assert ledger.decide(decision(scope, batch)) == Ok(None)
        assert ledger.begin(Started(batch + 1, "{}", batch + 2)) == Ok(None)
    assert kept(sink, scope) == [0, 1, 2]
    ledger.close()


def test_copies_of_the_state_bound_the_topic(pulsar: Pulsar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor follows, so that Pulsar may delete what lies before; what is kept is complete from there."""
    monkeypatch.setattr(store, "LEDGER_HISTORY_BATCHES", 5)
    monkeypatch.setattr(store, "_ARCHIVE_ENTRIES", 2)
    monkeypatch.setattr("delivered.ledger.LEDGER_INCARNATIONS", 2)
    sink, scope = sink_of(pulsar), new_scope("last")
    for number in range(8):
        earlier = Scope(scope.pipeline, SINK, f"i{number}")
        ledger = claimed(sink, earlier, f"e{number}")
        assert ledger.decide(decision(earlier, number)) == Ok(None)
        ledger.close()
    ledger = claimed(sink, scope, "a")
    for batch in range(40):
        assert ledger.begin(Started(batch, "{}", batch + 1)) == Ok(None)
        assert ledger.decide(decision(scope, batch)) == Ok(None)
    state = ledger.look()
    ledger.close()
    other = open_ledger(sink, scope)
    assert other.look() == state
    archived = other._store._archived("i0")  # type: ignore[attr-defined]
    assert archived is not None
    assert archived.rows == 1
    other.close()
    assert kept(sink, scope) == [35, 36, 37, 38, 39]
    topic = Topic(sink.options, ledger_topic(sink, scope))  # type: ignore[attr-defined]
    bounds = topic.bounds()
    assert bounds is not None
    total, behind = bounds.last.entry + 1, bounds.cursors[SUBSCRIPTION].entry + 1
    topic.close()
    assert behind > 40, "what the cursor has passed"
    assert total - behind < 60


@pytest.mark.matrix
def test_pulsar_deletes_what_the_cursor_has_passed_and_nothing_else(
    new_pulsar: Callable[..., Pulsar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No retention, ledgers of 20 entries, inactive topics are deleted after seconds, as brokers do by default."""
    pulsar = new_pulsar(
        defaultRetentionTimeInMinutes="0",
        defaultRetentionSizeInMB="0",
        managedLedgerMaxEntriesPerLedger="20",
        managedLedgerMinLedgerRolloverTimeMinutes="0",
        brokerDeleteInactiveTopicsEnabled="true",
        brokerDeleteInactiveTopicsFrequencySeconds="1",
        brokerDeleteInactiveTopicsMaxInactiveDurationSeconds="1",
        retentionCheckIntervalInSeconds="1",
    )
    monkeypatch.setattr(store, "LEDGER_HISTORY_BATCHES", 20)
    sink, scope = sink_of(pulsar), new_scope()
    assert sink.check_ledger(scope) == []
    ledger = claimed(sink, scope, "a")
    for batch in range(150):
        assert ledger.decide(decision(scope, batch)) == Ok(None)
        if batch % 50 == 0:
            assert ledger.add_seal(SINK, batch // 50, f"seal {batch}") == Ok(None)
    ledger.close()
    topic = Topic(sink.options, ledger_topic(sink, scope))  # type: ignore[attr-defined]

    def entries() -> int:
        bounds = topic.bounds()
        assert bounds is not None
        return sum(count for _, count in bounds.ledgers)

    name = topic.name.partition("://")[2].rpartition("/")[2].replace(":", "%3A")
    pulsar.admin("PUT", f"persistent/public/default/{name}/unload")
    found = open_ledger(sink, scope)
    state = found.look()
    assert state.last == decision(scope, 149)
    assert [d.batch for d in found.history()] == list(range(130, 150))
    assert list(found.seals(SINK)) == ["seal 0", "seal 50", "seal 100"]
    found.close()
    wait_for(lambda: entries() < 100, 200, "Pulsar deletes")
    found = open_ledger(sink, scope)
    assert found.look() == state
    found.close()
    topic.close()


def test_a_ledger_that_starts_in_the_middle_is_an_error(pulsar: Pulsar) -> None:
    """As after a time to live: its first records are gone."""
    sink, scope = sink_of(pulsar), new_scope()
    ledger = claimed(sink, scope, "a")
    for batch in range(3):
        assert ledger.decide(decision(scope, batch)) == Ok(None)
    ledger.close()
    short = Scope(scope.pipeline, "short", "i0")
    pulsar.send(ledger_topic(sink, short), _values(pulsar, ledger_topic(sink, scope))[1:])
    for use in (Ledger.look, lambda found: found.claim(Owner("b", "host", 1, 2))):
        broken = open_ledger(sink, short)
        with pytest.raises(InvariantBroken, match=r"PULSAR_LEDGER.*starts in the middle"):
            use(broken)
        broken.close()


def test_a_moved_cursor_loses_nothing_that_pulsar_keeps(pulsar: Pulsar) -> None:
    sink, scope = sink_of(pulsar), new_scope()
    ledger = claimed(sink, scope, "a")
    assert ledger.decide(decision(scope, 0)) == Ok(None)
    topic = Topic(sink.options, ledger_topic(sink, scope))  # type: ignore[attr-defined]
    bounds = topic.bounds()
    assert bounds is not None
    topic.admin.move(topic.name, SUBSCRIPTION, bounds.last, exists=True)
    topic.close()
    other = open_ledger(sink, scope)
    assert other.look().last == decision(scope, 0)
    other.close()
    ledger.close()


def test_foreign_messages_are_ignored(pulsar: Pulsar) -> None:
    sink, scope = sink_of(pulsar), new_scope()
    ledger = claimed(sink, scope, "a")
    pulsar.send(ledger_topic(sink, scope), [b"", b"{}", b"\xff", b'{"number":2}'], batch=2)
    assert ledger.decide(decision(scope, 0)) == Ok(None)
    assert kept(sink, scope) == [0]
    ledger.close()


@pytest.mark.parametrize(
    ("policy", "value", "said"),
    [
        ("messageTTL", 60, r"expire after 60 s \(message TTL\)"),
        ("subscriptionExpirationTime", 5, "subscriptions expire after 5 min"),
        (
            "backlogQuota",
            {"limitSize": 1_000_000, "policy": "consumer_backlog_eviction"},
            r"evicted \(consumer_backlog_eviction\)",
        ),
    ],
)
def test_policies_that_delete_records_are_refused(pulsar: Pulsar, policy: str, value: Any, said: str) -> None:
    namespace = pulsar.namespace(retention={"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}, **{policy: value})
    sink, scope = sink_of(pulsar, namespace), new_scope()
    (finding,) = sink.check_ledger(scope)
    assert finding.refuses
    assert finding.code == "PULSAR_LEDGER_UNPROTECTED"
    assert_matches(said, finding.message)
    claimed(sink, scope, "a").close()  # now the topic is there
    (finding,) = sink.check_ledger(scope)
    assert_matches(said, finding.message)
    pulsar.admin("POST", f"namespaces/{namespace}/retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    assert sink.check_ledger(new_scope()) == []


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.matrix
def test_rights_and_topics_that_cannot_be_created(new_pulsar: Callable[..., Pulsar]) -> None:
    secret = secrets.token_bytes(32)
    server = new_pulsar(**lab.with_tokens(secret), allowAutoTopicCreation="false")
    admin = Pulsar(server.broker, lab.make_token(secret, lab.ADMIN))
    admin.admin("POST", "namespaces/public/default/permissions/role", ["produce", "consume"])
    sink, scope = sink_of(admin, token=lab.make_token(secret, "role")), new_scope()
    (finding,) = sink.check_ledger(scope)
    assert (finding.code, finding.refuses) == ("PULSAR_LEDGER_UNSEEN", False)
    ledger = open_ledger(sink, scope)
    with pytest.raises(Refused, match="pulsar-admin topics create persistent://public/default/delivered:"):
        ledger.claim(Owner("a", "host", 1, 2))
    name = ledger_topic(sink, scope).rpartition("/")[2].replace(":", "%3A")
    admin.admin("PUT", f"persistent/public/default/{name}", {})
    ledger.claim(Owner("a", "host", 1, 2))
    assert ledger.decide(decision(scope, 0)) == Ok(None)
    assert kept(sink, scope) == [0]
    ledger.close()
    admin.close()


@pytest.mark.matrix
def test_p7_decisions_over_kills_of_the_broker_are_known(new_pulsar: Callable[..., Pulsar]) -> None:
    """Decides without a pause, while the broker is killed and started again. What was reported holds; what is unknown
    is known once it was claimed again."""
    pulsar = new_pulsar()
    sink, scope = sink_of(pulsar), new_scope()
    ledger = claimed(sink, scope, "a0")
    stop, reported, errors = threading.Event(), list[tuple[int, str]](), list[BaseException]()

    def drive(ledger: Ledger) -> None:
        try:
            batch, claims = 0, 0
            while not stop.is_set():
                outcome = ledger.decide(decision(scope, batch))
                reported.append((batch, type(outcome).__name__))
                if isinstance(outcome, Ok):
                    batch += 1
                    continue
                assert isinstance(outcome, Unknown), outcome
                ledger.close()
                claims += 1
                ledger = claimed(sink, scope, f"a{claims}")
                last = ledger.look().last
                batch = 0 if last is None else last.batch + 1
        except BaseException as error:
            errors.append(error)
        finally:
            ledger.close()

    driver = threading.Thread(target=drive, args=(ledger,))
    driver.start()
    for _ in range(4):
        before = len(reported)
        while len(reported) < before + 20 and driver.is_alive():
            stop.wait(0.01)
        pulsar.broker.kill()
        pulsar.broker.restart()
    before = len(reported)
    while len(reported) < before + 5 and driver.is_alive():
        stop.wait(0.01)
    stop.set()
    driver.join()
    assert not errors
    batches = kept(sink, scope)
    assert batches == list(range(len(batches)))
    assert {b for b, what in reported if what == "Ok"} <= set(batches)
