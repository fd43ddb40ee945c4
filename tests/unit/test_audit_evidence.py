"""Each class of damage, on handwritten histories, and which of them each guarantee allows."""

from __future__ import annotations

import pytest
from tests.support.reconcile import Seen, reconcile

from delivered.audit.evidence import Counts, Damage, Verdict, breaches
from delivered.audit.report import AuditReport, unknown_report
from delivered.model.capability import Guarantee

SENT = [Seen("a", 1, key="k", position=0), Seen("b", 2, key="k", position=1), Seen("c", 3, key="j", position=2)]


def total(sent: list[Seen], found: list[Seen]) -> Counts:
    return sum(reconcile(sent, found).values(), Counts())


def test_a_clean_history_has_no_damage() -> None:
    counts = total(SENT, SENT)
    assert counts == Counts(sent=3, delivered=3)


def test_a_missing_record_is_lost() -> None:
    assert total(SENT, SENT[:2]) == Counts(sent=3, delivered=2, lost=1)


def test_a_second_copy_is_a_duplicate() -> None:
    assert total(SENT, [*SENT, SENT[1]]) == Counts(sent=3, delivered=4, duplicated=1)


def test_another_value_under_the_same_id_is_altered() -> None:
    assert total(SENT, [*SENT[:2], Seen("c", 99)]) == Counts(sent=3, delivered=3, altered=1)


def test_an_id_nobody_sent_is_unexpected() -> None:
    assert total(SENT, [*SENT, Seen("x", 1)]) == Counts(sent=3, delivered=4, unexpected=1)


def test_a_doubled_pair_is_two_duplicates() -> None:
    """Under an XOR of hashes a doubled pair cancels."""
    assert total(SENT, [*SENT, *SENT[:2]]) == Counts(sent=3, delivered=5, duplicated=2)


def test_three_copies_are_two_duplicates() -> None:
    """Under an XOR of hashes three copies look like one."""
    assert total(SENT, [*SENT, SENT[1], SENT[1]]) == Counts(sent=3, delivered=5, duplicated=2)


def test_two_copies_and_a_loss_are_two_findings_though_the_counts_cancel() -> None:
    assert total(SENT, [SENT[0], SENT[0], SENT[1]]) == Counts(sent=3, delivered=3, lost=1, duplicated=1)


def test_two_copies_and_a_loss_under_one_id_are_not_an_alteration() -> None:
    sent = [Seen("a", 1), Seen("a", 2)]
    assert total(sent, [Seen("a", 1), Seen("a", 1)]) == Counts(sent=2, delivered=2, lost=1, duplicated=1)


def test_a_copy_with_another_value_beside_the_right_one_is_a_duplicate() -> None:
    assert total(SENT, [*SENT, Seen("a", 99)]) == Counts(sent=3, delivered=4, duplicated=1)


def test_what_the_source_held_twice_is_no_duplicate() -> None:
    twice = [*SENT, Seen("a", 1, key="k", position=3)]
    assert total(twice, twice) == Counts(sent=4, delivered=4)


def test_a_swap_within_a_key_is_reordered_and_across_keys_is_not() -> None:
    swapped = [Seen("b", 2, position=0), Seen("a", 1, position=1), Seen("c", 3, position=2)]
    assert total(SENT, swapped).reordered == 1
    across = [Seen("c", 3, position=0), Seen("a", 1, position=1), Seen("b", 2, position=2)]
    assert total(SENT, across).reordered == 0


def test_records_without_a_key_have_no_order() -> None:
    sent = [Seen("a", 1, position=0), Seen("b", 2, position=1)]
    assert total(sent, [Seen("b", 2, position=0), Seen("a", 1, position=1)]).reordered == 0


def test_a_batch_in_progress_may_be_there_and_need_not() -> None:
    sent = [*SENT, Seen("d", 4, in_progress=True)]
    assert total(sent, SENT) == Counts(sent=3, delivered=3)
    assert total(sent, [*SENT, Seen("d", 4)]) == Counts(sent=3, delivered=4, in_progress=1)
    assert total(sent, [*SENT, Seen("d", 4), Seen("d", 4)]).duplicated == 1


def test_empty_against_empty() -> None:
    assert total([], []) == Counts()
    assert total([], [Seen("x", 1)]).unexpected == 1
    assert total([Seen("x", 1)], []).lost == 1


ALLOWED = {
    Guarantee.EXACTLY_ONCE: set[Damage](),
    Guarantee.AT_LEAST_ONCE: {Damage.DUPLICATED},
    Guarantee.AT_MOST_ONCE: {Damage.LOST},
}


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("damage", [d for d in Damage if d is not Damage.REORDERED])
def test_every_guarantee_forbids_what_it_does_not_allow(guarantee: Guarantee, damage: Damage) -> None:
    counts = Counts(sent=10, delivered=10, **{damage.value: 1})
    given_up = int(guarantee.may_lose)
    assert (breaches(guarantee, counts, given_up=given_up) == []) == (damage in ALLOWED[guarantee])
    assert guarantee.may_lose or breaches(guarantee, Counts(sent=10, delivered=10), given_up=1)


def test_order_is_reported_and_promised_by_none() -> None:
    for guarantee in Guarantee:
        assert breaches(guarantee, Counts(sent=2, delivered=2, reordered=1), 0) == []


def test_at_most_once_may_lose_what_it_recorded_as_given_up_and_no_more() -> None:
    counts = Counts(sent=10, delivered=7, lost=3)
    assert breaches(Guarantee.AT_MOST_ONCE, counts, 3) == []
    assert breaches(Guarantee.AT_MOST_ONCE, counts, 2) == [
        "3 records are lost but only 2 were recorded as given up; the other 1 are unaccounted for"
    ]


def test_broken_beats_unknown_beats_held() -> None:
    held = AuditReport("p", "s", Guarantee.EXACTLY_ONCE)
    assert (held.verdict, held.exit_code) == (Verdict.HELD, 0)
    unknown = unknown_report("p", "s", Guarantee.EXACTLY_ONCE, "the sink did not answer")
    assert (unknown.verdict, unknown.exit_code) == (Verdict.UNKNOWN, 3)
    broken = AuditReport("p", "s", Guarantee.EXACTLY_ONCE, counts=Counts(1, 0, lost=1), unknowns=("no ledger",))
    assert (broken.verdict, broken.exit_code) == (Verdict.BROKEN, 1)


def test_counts_that_do_not_add_up_are_seen() -> None:
    assert Counts(sent=3, delivered=3, lost=1, duplicated=1).adds_up
    assert Counts(sent=3, delivered=3, altered=1).adds_up
    assert not Counts(sent=3, delivered=2).adds_up
