"""What the seals of a sink say together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.seals import chain, linked, texts

from delivered.audit.evidence import Verdict
from delivered.audit.seal import REASONS_MAX, Seal, State, Sums, current, read_sealed
from delivered.model.identity import Scope
from delivered.model.work import Account


def never_audited(seal: Seal) -> Seal:
    """As the auditor seals batches whose source records have expired."""
    handed = Sums(ledger=Account(seal.sums.ledger.total))
    why = ("the source had dropped them",)
    return replace(seal, audited=False, verdict=Verdict.UNKNOWN, unknowns=why, sums=handed)


def mixed() -> list[str]:
    seals = chain(7)
    seals[2] = replace(seals[2], verdict=Verdict.BROKEN, breaches=("1 records are lost; exactly_once promises none",))
    seals[4], seals[5] = never_audited(seals[4]), never_audited(seals[5])
    return texts(linked(seals))


def test_seals_with_one_state_are_one_range() -> None:
    sealed = read_sealed(mixed())
    assert sealed.faults == ()
    assert [(r.state, r.batches) for r in sealed.ranges] == [
        (State.HELD, "0 to 19"),
        (State.BROKEN, "20 to 29"),
        (State.HELD, "30 to 39"),
        (State.NEVER_AUDITED, "40 to 59"),
        (State.HELD, "60 to 69"),
    ]
    (expired,) = sealed.of(State.NEVER_AUDITED)
    assert (expired.records, expired.reasons) == (20, ("the source had dropped them",))
    assert (expired.first_seal, expired.last_seal) == (4, 5)


def test_a_broken_range_stays_broken_and_the_chain_goes_on() -> None:
    sealed = read_sealed(mixed())
    assert sealed.verdict is Verdict.BROKEN
    assert sealed.last is not None
    assert (sealed.last.number, sealed.last.verdict, sealed.digest) == (6, Verdict.HELD, sealed.last.digest)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda seals: seals, Verdict.HELD),
        (lambda seals: [seals[0], replace(seals[1], verdict=Verdict.UNKNOWN), seals[2]], Verdict.UNKNOWN),
        (lambda seals: [seals[0], never_audited(seals[1]), seals[2]], Verdict.UNKNOWN),
    ],
)
def test_verdict(change: object, verdict: Verdict) -> None:
    assert read_sealed(texts(linked(change(chain(3))))).verdict is verdict  # type: ignore[operator]


def test_nothing_was_sealed() -> None:
    sealed = read_sealed([])
    assert (sealed.verdict, sealed.last, sealed.age_s(1), sealed.ranges) == (None, None, None, ())


def test_a_chain_that_does_not_hold_is_never_held() -> None:
    seals = mixed()
    sealed = read_sealed([seals[0], seals[3]])
    assert sealed.verdict is Verdict.UNKNOWN
    assert sealed.faults[0] == "seal 3 follows seal 0"


def test_what_is_no_seal_is_a_fault_and_hides_nothing_else() -> None:
    for text in ("{}", "[]", "7", '"seal"', "null", "", '{"format":1,"pipeline":1}'):
        sealed = read_sealed([*texts(chain(2)), text])
        assert sealed.faults[0].startswith("the seal at place 2 cannot be read"), text
        assert (sealed.verdict, [r.batches for r in sealed.ranges]) == (Verdict.UNKNOWN, ["0 to 19"])


def test_checkpoints_are_ranges_of_their_own() -> None:
    seals = chain(2)
    seals[1] = replace(seals[1], scope=Scope("orders", "kafka", "9c1d"), first=0, start="", total=seals[1].sums)
    sealed = read_sealed(texts(linked(seals)))
    assert not sealed.faults
    assert [(r.incarnation, r.batches) for r in sealed.ranges] == [("5b2f", "0 to 9"), ("9c1d", "0 to 19")]


def test_a_seal_that_continues_an_earlier_one_again() -> None:
    """`--full` of batches 10 to 39 after their source dropped the first ones, and once more from batch 20 on."""
    seals = chain(4)
    again = [replace(seals[3], first=10, number=4), replace(seals[3], first=20, number=5)]
    assert [s.number for s in current([*seals, again[0]])] == [0, 4]
    assert [s.number for s in current([*seals, *again])] == [0, 1, 5]


def test_age_is_of_the_newest_and_never_negative() -> None:
    (seal,) = chain(1)
    sealed = read_sealed([replace(seal, sealed_at_ms=5_000).text])
    assert sealed.age_s(7_500) == 2.5
    assert sealed.age_s(1_000) == 0.0


def test_reasons_are_bounded() -> None:
    seals = [replace(s, verdict=Verdict.UNKNOWN, unknowns=(f"reason {s.number}",)) for s in chain(REASONS_MAX + 5)]
    (one,) = read_sealed(texts(linked(seals))).ranges
    assert len(one.reasons) == REASONS_MAX
