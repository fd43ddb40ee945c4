"""Every ledger store against a small model, under any order of claims, decisions and lost replies.

Two drivers with two processes each, several checkpoints in sequence. No rows: test_sinks tests what moves with a
decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.support.sinks import SCHEMA, SINKS
from tests.support.sweeps import sweep

from delivered import ledger as rules
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model import identity, work
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Fenced, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision, Failed, Ok, Owner, Started

STORES = {
    "memory-two-phase": 60,
    "sqlite": 12,
    "files-json": 12,
    "delta": 2,
    "iceberg": 4,
    "kafka": 4,
    "kafka-librdkafka": 4,
    "postgres-one-transaction": 4,
    "mysql-one-transaction": 4,
    "pulsar": 4,
}
"""One sink per kind of store, and its number of histories."""
STORES_IN_TEST = pytest.mark.parametrize("name", sweep(STORES, lambda name: name != "kafka-librdkafka"))
"""Requests of the ledger are those of `kafka`, whichever client sends rows."""
DRIVERS, PROCESSES, STEPS = 2, 2, 25
_pipelines = itertools.count()
_moments = itertools.count(1_700_000_000_000, -3_600_000)
"""By a clock that is set back an hour before each decision: it must not order anything (P30)."""


@dataclass
class Checkpoint:
    """One incarnation's records in the model."""

    last: Decision | None = None
    started: Started | None = None


@dataclass
class Model:
    owner: str | None = None
    superseded: set[str] = field(default_factory=set)
    claims: int = 0
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    sequence: int = 0


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self.sink = sink
        self.model = Model()
        self.pipeline = f"store{next(_pipelines)}"
        self.incarnation = ""
        self.names = itertools.count()
        self.drivers: list[str] = []
        self.ledgers: list[list[Any]] = []
        self.held: dict[tuple[int, int], int] = {}
        """(driver, process) -> number of its claim."""
        self.begin_checkpoint()

    @property
    def scope(self) -> Scope:
        return Scope(self.pipeline, "sink", self.incarnation)

    @property
    def mine(self) -> Checkpoint:
        return self.model.checkpoints.setdefault(self.incarnation, Checkpoint())

    def teardown(self) -> None:
        for ledger in itertools.chain(*self.ledgers):
            ledger.close()

    @precondition(lambda self: self.mine.last is not None or self.mine.started is not None)
    @rule()
    def another_checkpoint(self) -> None:
        self.begin_checkpoint()

    def begin_checkpoint(self) -> None:
        """Another checkpoint, with other drivers."""
        self.teardown()
        self.incarnation = f"i{next(self.names)}"
        self.drivers = [f"d{next(self.names)}" for _ in range(DRIVERS)]
        self.ledgers = [[open_ledger(self.sink, self.scope) for _ in range(PROCESSES)] for _ in range(DRIVERS)]
        self.held = {}

    @rule(d=st.integers(0, DRIVERS - 1), p=st.integers(0, PROCESSES - 1))
    def claim(self, d: int, p: int) -> None:
        name, model = self.drivers[d], self.model
        try:
            state = self.ledgers[d][p].claim(Owner(name, "host", 1, 2))
        except Fenced:
            assert name in model.superseded, "fenced, and nobody superseded it"
            return
        assert name not in model.superseded, "who was superseded claimed again"
        if model.owner is not None and model.owner != name:
            model.superseded.add(model.owner)
        model.owner, model.claims = name, model.claims + 1
        self.held[d, p] = model.claims
        assert state.owner is not None
        assert state.owner.id == name
        self.same(state)

    @rule(d=st.integers(0, DRIVERS - 1), batches=st.integers(1, 2))
    def claim_and_decide(self, d: int, batches: int) -> None:
        """The common case: otherwise few histories would reach a second batch."""
        self.claim(d, 0)
        self.resume(d, 1)
        for _ in range(batches):
            self.decide(d, 1, "next")

    @rule(d=st.integers(0, DRIVERS - 1), p=st.integers(0, PROCESSES - 1))
    def resume(self, d: int, p: int) -> None:
        try:
            state = self.ledgers[d][p].resume(self.drivers[d])
        except DeliveredError:  # Fenced; or the ledger does not exist yet
            assert self.model.owner != self.drivers[d]
            return
        assert self.model.owner == self.drivers[d]
        self.held[d, p] = self.model.claims
        self.same(state)

    @rule(d=st.integers(0, DRIVERS - 1), p=st.integers(0, PROCESSES - 1), ahead=st.integers(0, 1))
    def begin(self, d: int, p: int, ahead: int) -> None:
        if (d, p) not in self.held:
            return
        batch = self.mine.last.batch + 1 + ahead if self.mine.last else ahead
        self.model.sequence += 1
        started = Started(batch, f'{{"0":{batch}}}', self.model.sequence)
        outcome = self.ledgers[d][p].begin(started)
        if self.current(d, p):
            assert outcome == Ok(None)
            if self.mine.started != started:
                self.mine.started = started
        else:
            assert isinstance(outcome, Failed)

    @rule(
        d=st.integers(0, DRIVERS - 1),
        p=st.integers(0, PROCESSES - 1),
        what=st.sampled_from(["next", "next", "next", "again", "otherwise", "revised", "older"]),
    )
    def decide(self, d: int, p: int, what: str) -> None:
        last = self.mine.last
        if (d, p) not in self.held or (last is None and what != "next") or (what == "older" and not last.batch):
            return
        decision = self.decision(what, last)
        outcome = self.ledgers[d][p].decide(decision)
        if what == "again":
            # Written: a later claim can no longer fence it.
            assert outcome == Ok(None) or (isinstance(outcome, Failed) and not self.current(d, p))
        elif self.current(d, p) and what in ("next", "revised"):
            assert outcome == Ok(None), outcome
            self.mine.last = decision
        else:
            assert isinstance(outcome, Failed), f"{what} got in"

    @invariant()
    def whoever_looks_sees_what_is_in(self) -> None:
        self.same(self.ledgers[0][0].look())

    def decision(self, what: str, last: Decision | None) -> Decision:
        match what:
            case "again":
                assert last is not None
                return last
            case "otherwise":
                assert last is not None
                return replace(last, decided_at_ms=next(_moments))
            case "revised":
                assert last is not None
                return replace(last, revision=last.revision + 1, decided_at_ms=next(_moments))
            case _:
                batch = 0 if last is None else last.batch + 1 if what == "next" else last.batch - 1
                self.model.sequence += 1
                return Decision(
                    self.scope, "driver", Guarantee.EXACTLY_ONCE, batch, f'{{"0":{batch}}}', (),
                    {self.scope.sink: Account(Fingerprint(batch + 1, 1, 2))}, next(_moments),
                    sequence=self.model.sequence,
                )  # fmt: skip

    def current(self, d: int, p: int) -> bool:
        return self.model.owner == self.drivers[d] and self.held[d, p] == self.model.claims

    def same(self, state: Any) -> None:
        others = {i: c for i, c in self.model.checkpoints.items() if i != self.incarnation}
        assert (state.owner.id if state.owner else None) == self.model.owner
        assert state.last == self.mine.last
        assert state.started == self.mine.started
        decided = sorted((c.last for c in others.values() if c.last), key=lambda d: -d.sequence)
        assert list(state.earlier) == decided, "newest first"
        started = [(i, c.started) for i, c in others.items() if c.started and not c.last]
        assert list(state.earlier_started) == sorted(started, key=lambda b: -b[1].sequence), "newest first"
        assert state.followed == sum(1 for d in decided if self.mine.last and d.sequence > self.mine.last.sequence)


def check(sink: Sink, histories: int, phases: Collection[Phase] = tuple(Phase)) -> None:
    sink.ready_target(SCHEMA)
    run_state_machine_as_test(
        lambda: StoreMachine(sink),
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@STORES_IN_TEST
def test_store_agrees_with_the_model(name: str, request: pytest.FixtureRequest) -> None:
    check(SINKS[name](request), STORES[name])


@pytest.mark.parametrize("name", [name for name in STORES if not name.startswith("memory")])
def test_ledger_of_a_later_version_is_refused(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written by this version, with later numbers in its records."""
    sink, scope = SINKS[name](request), Scope(f"store{next(_pipelines)}", "sink", "i")
    sink.ready_target(SCHEMA)
    decision = Decision(
        scope,
        "a",
        Guarantee.EXACTLY_ONCE,
        0,
        '{"0":0}',
        (),
        {scope.sink: Account(Fingerprint(1, 1, 2))},
        next(_moments),
    )
    ledger = open_ledger(sink, scope)
    with monkeypatch.context() as later:
        later.setattr(work, "RECORD_FORMAT", work.RECORD_FORMAT + 1)
        later.setattr(work, "check_format", lambda *_: None)
        ledger.claim(Owner("a", "host", 1, 2))
        assert ledger.decide(decision) == Ok(None)
    ledger.close()
    uses: list[Callable[[Ledger], object]] = [Ledger.look, lambda found: found.claim(Owner("b", "host", 1, 2))]
    for use in uses:
        ledger = open_ledger(sink, scope)
        with pytest.raises(Refused, match="FORMAT_NEWER"):
            use(ledger)
        ledger.close()


@pytest.mark.parametrize("name", STORES)
def test_records_of_an_earlier_release_precede_later_ones(name: str, request: pytest.FixtureRequest) -> None:
    """They have no sequence. The newest of them has a time ahead of all others."""
    sink, pipeline = SINKS[name](request), f"store{next(_pipelines)}"
    sink.ready_target(SCHEMA)
    hour_ms, start_ms = 3_600_000, 1_700_000_000_000
    for incarnation, at_ms, sequence in (
        ("old", start_ms, 0), ("newest-old", start_ms + 2 * hour_ms, 0), ("new", start_ms + hour_ms, 1)
    ):  # fmt: skip
        scope = Scope(pipeline, "sink", incarnation)
        ledger = open_ledger(sink, scope)
        ledger.claim(Owner(incarnation, "host", 1, 2))
        fingerprint = Fingerprint(1, 1, 2)
        decision = Decision(
            scope, incarnation, Guarantee.EXACTLY_ONCE, 0, '{"0":0}', (), {scope.sink: Account(fingerprint)}, at_ms,
            sequence=sequence,
        )  # fmt: skip
        assert ledger.decide(decision) == Ok(None)
        ledger.close()
    ledger = open_ledger(sink, Scope(pipeline, "sink", "next"))
    state = ledger.look()
    ledger.close()
    assert [d.scope.incarnation for d in state.earlier] == ["new", "newest-old", "old"]
    assert state.next_sequence == 2


NEIGHBOURS = [("a", "sink"), ("b", "sink"), ("a.b", "c"), ("a", "b.c")]
"""Pipelines and sinks in one place: the same sink name; names that join to the same text (P33)."""


def in_one_place(sink: Sink) -> Sink:
    """Kafka's ledgers have a topic for each pipeline, unless it is named."""
    return (
        replace(sink, options=replace(sink.options, ledger_topic=f"shared{next(_pipelines)}"))
        # type: ignore
        if (sink.capability().system == "kafka")
        else sink
    )


@STORES_IN_TEST
def test_p33_pipelines_in_one_place_do_not_touch_each_others_ledgers(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same names of sinks, incarnations and owners: no claim fences, archives or finds another's."""
    monkeypatch.setattr(rules, "LEDGER_INCARNATIONS", 1)
    if name.startswith(("postgres", "mysql", "pulsar")):  # other tests' ledgers are in the same database or namespace
        monkeypatch.setattr(identity, "OTHERS_MAX", 10_000)
    sink, unique = in_one_place(SINKS[name](request)), f"n{next(_pipelines)}"
    sink.ready_target(SCHEMA)

    def scope(at: int, incarnation: str) -> Scope:
        return Scope(f"{unique}{NEIGHBOURS[at][0]}", NEIGHBOURS[at][1], incarnation)

    def decision(of: Scope, batch: int, sequence: int) -> Decision:
        total = Fingerprint(batch + 1, 1, 2)
        return Decision(
            of, "d", Guarantee.EXACTLY_ONCE, batch, of.pipeline, (), {of.sink: Account(total)}, 0, sequence=sequence
        )

    for number, incarnation in enumerate(("i0", "i1", "i2")):
        ledgers = [open_ledger(sink, scope(at, incarnation)) for at in range(len(NEIGHBOURS))]
        for ledger in ledgers:
            state = ledger.claim(Owner(f"d{number}", "host", 1, 2))
            assert {d.scope.pipeline for d in state.earlier} <= {ledger._scope.pipeline}
            assert min(number, 1) <= len(state.earlier) <= number
            assert state.last is None
        for at, ledger in enumerate(ledgers):
            of = scope(at, incarnation)
            assert ledger.begin(Started(0, of.pipeline, number + 1)) == Ok(None)
            assert ledger.decide(decision(of, 0, number + 1)) == Ok(None), "another pipeline's claim fences nothing"
            assert ledger.look().started == Started(0, of.pipeline)
            assert ledger.look().last == decision(of, 0, number + 1)
            assert [d.scope for d in ledger.history()] == [of]
        for ledger in ledgers:
            ledger.close()
    stranger = open_ledger(sink, Scope(f"{unique}z", "sink", "i0"))
    assert (stranger.look().owner, stranger.look().archived, stranger.look().earlier) == (None, None, ())
    stranger.close()
    first = open_ledger(sink, scope(0, "i0"))
    assert (found := first.look().archived) is None or found.decided
    first.claim(Owner("d9", "host", 1, 2))
    named = {(o.pipeline.removeprefix(unique), o.sink): o.same_incarnation for o in first.others()}
    same = {named[k] for k in NEIGHBOURS[1:]}  # each is found
    # The checkpoint's batches were archived: Kafka's compaction drops them ledger by ledger, at any time.
    assert len(same) == 1 or sink.capability().system == "kafka"
    first.close()


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "nobody is fenced": (Ledger, "_check_claim", lambda self, claim, head: None),
    "whoever was superseded may claim": (
        Ledger,
        "_successor",
        lambda self, owner, head, batch: replace(owner, superseded=()),
    ),
    "another decision takes a batch's place": (rules, "_revises", lambda decision, last: True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_rule_is_found(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        check(SINKS["memory-two-phase"](request), 200, (Phase.generate,))
