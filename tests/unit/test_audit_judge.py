"""The verdict of an audit's counts and the ledger's totals: broken, unknown or held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delivered.audit.evidence import Counts, Damage, Fingerprints, PartitionLine, Sample, Verdict
from delivered.audit.judge import account_for_earlier, judge
from delivered.audit.report import AuditReport
from delivered.audit.request import Earlier
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint


def prints(count: int, more: int = 0) -> Fingerprint:
    return Fingerprint(count, count * 17 + more, count * 31 + more)


def report(
    counts: Counts, ledger: int, sent_more: int = 0, delivered_more: int = 0, given_up: int = 0, **changes: object
) -> AuditReport:
    three = Fingerprints(
        prints(counts.sent, sent_more), prints(ledger), prints(given_up), prints(counts.delivered, delivered_more)
    )
    made = AuditReport("p", "s", Guarantee.EXACTLY_ONCE, counts=counts, fingerprints=three, given_up=given_up)
    return replace(made, **changes)  # type: ignore[arg-type]


def verdict(made: AuditReport, known: bool = True) -> Verdict:
    return judge(made, versions_known=known).verdict


def test_records_that_match_nothing_are_possibly_foreign() -> None:
    """In a shared sink, records that the ledger does not account for prove nothing against this pipeline."""
    shared = judge(report(Counts(10, 15, unexpected=5), ledger=10), versions_known=True)
    assert shared.verdict is Verdict.UNKNOWN
    assert "5 records match nothing that was sent" in shared.unknowns[0]
    assert "possibly foreign" in shared.unknowns[0]
    assert verdict(report(Counts(10, 15, unexpected=5), ledger=10, own="true")) is Verdict.BROKEN
    # Without `judge` it is no pass either.
    assert AuditReport("p", "s", Guarantee.EXACTLY_ONCE, counts=Counts(1, 2, unexpected=1)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "counts",
    [
        Counts(10, 11, duplicated=1),
        Counts(10, 9, lost=1),
        Counts(10, 10, lost=1, duplicated=1),
        Counts(10, 10, altered=1),
        Counts(10, 16, duplicated=1, unexpected=5),
        Counts(10, 14, lost=1, unexpected=5),
    ],
)
def test_losses_and_duplicates_break_it_in_a_shared_sink_too(counts: Counts) -> None:
    for known in (True, False):
        assert verdict(report(counts, ledger=10, delivered_more=3), known) is Verdict.BROKEN


def test_where_ledger_and_sink_agree_the_source_side_is_in_doubt() -> None:
    """The sink has what the tasks wrote. Two causes explain that the source now gives other records."""
    counts = Counts(10, 10, lost=4, unexpected=4)
    other = judge(report(counts, ledger=10, sent_more=5), versions_known=True)
    assert other.verdict is Verdict.UNKNOWN
    assert "not deterministic" in other.unknowns[0]
    assert verdict(report(Counts(10, 10, altered=2), ledger=10, sent_more=5)) is Verdict.UNKNOWN
    # Records that the tasks never wrote, and one written twice: no transform explains that.
    assert verdict(report(Counts(12, 10, lost=2), ledger=10)) is Verdict.BROKEN
    assert verdict(report(Counts(10, 10, lost=1, duplicated=1), ledger=10)) is Verdict.BROKEN
    # Unless it ran with an undeclared transform.
    assert verdict(report(Counts(12, 10, lost=2), ledger=10), known=False) is Verdict.UNKNOWN
    # at_most_once gave up what is missing, which its guarantee allows.
    gave_up = report(Counts(12, 10, lost=2), ledger=10, given_up=2, guarantee=Guarantee.AT_MOST_ONCE)
    assert verdict(gave_up, known=False) is Verdict.HELD


EARLIER = Earlier("0 to 4", prints(40))


def of_versions(counts: Counts, delivered_more: int = 0, guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> AuditReport:
    """An audit that recomputed 10 records, of a sink that earlier batches wrote 40 to."""
    partitions = (
        PartitionLine("in-0", replace(counts, unexpected=0), prints(0), prints(0)),
        PartitionLine("-", Counts(0, counts.unexpected, unexpected=counts.unexpected), prints(0), prints(0)),
    )
    samples = tuple(Sample(d, "id", None, None, None, 0, 1) for d in Damage if counts.of(d))
    made = report(counts, ledger=50, delivered_more=delivered_more, partitions=partitions, samples=samples)
    return judge(account_for_earlier(replace(made, guarantee=guarantee), EARLIER), versions_known=True)


def test_records_of_another_version_are_known_by_the_ledger() -> None:
    made = of_versions(Counts(10, 50, unexpected=40))
    assert made.verdict is Verdict.UNKNOWN
    assert made.counts == Counts(10, 50, earlier=40)
    assert made.counts.adds_up
    assert made.samples == ()
    assert made.partitions[1].counts == Counts(0, 40, earlier=40)
    assert made.fingerprints is not None
    assert made.fingerprints.says == "source, ledger and sink agree"
    assert "batches 0 to 4 ran with another transform" in made.unknowns[0]
    assert "all of them by count and fingerprint" in made.unknowns[0]
    # Two old records equal current ones: the source had them twice.
    assert of_versions(Counts(10, 50, unexpected=38, duplicated=2)).counts == Counts(10, 50, earlier=40)


@pytest.mark.parametrize(
    ("counts", "more", "says"),
    [
        (Counts(10, 49, unexpected=39), 0, "1 records of batches 0 to 4 are lost"),
        (Counts(10, 50, unexpected=40), 9, "are lost or altered"),
        (Counts(10, 49, unexpected=40, lost=1), 0, "1 records are lost"),
        (Counts(10, 50, unexpected=40, altered=1), 3, "a value other than the one sent"),
        (Counts(10, 53, unexpected=39, duplicated=4), 3, "3 records are duplicated"),
    ],
)
def test_damage_is_found_across_versions(counts: Counts, more: int, says: str) -> None:
    made = of_versions(counts, more)
    assert made.verdict is Verdict.BROKEN
    assert any(says in breach for breach in made.breaches), made.breaches
    assert made.counts.adds_up


def test_added_columns_leave_only_the_count_of_earlier_records() -> None:
    made = report(Counts(10, 50, unexpected=40), ledger=50, delivered_more=9)
    known = judge(account_for_earlier(made, EARLIER, adds_columns=True), versions_known=True)
    assert known.verdict is Verdict.UNKNOWN
    assert "by count alone: with mergeSchema" in known.unknowns[0]
    lost = report(Counts(10, 49, unexpected=39), ledger=50, delivered_more=9)
    assert judge(account_for_earlier(lost, EARLIER, adds_columns=True), versions_known=True).verdict is Verdict.BROKEN


def test_what_is_more_than_any_version_handed_over_is_possibly_foreign() -> None:
    made = of_versions(Counts(10, 53, unexpected=43), 7)
    assert (made.verdict, made.counts.unexpected, made.counts.earlier) == (Verdict.UNKNOWN, 3, 40)
    assert "possibly foreign" in made.unknowns[-1]


def test_at_most_once_may_have_lost_records_of_another_version() -> None:
    made = of_versions(Counts(10, 49, unexpected=39), 0, Guarantee.AT_MOST_ONCE)
    assert made.verdict is Verdict.UNKNOWN
