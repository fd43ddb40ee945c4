"""A chain of pipelines, judged from the seals of its hops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.seals import chain, linked

from delivered.audit.evidence import Counts, Verdict
from delivered.audit.seal import Seal, SealedHop, join, why_apart
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope

Change = Callable[[list[Seal]], list[Seal]]


def hop(name: str, change: Change = lambda seals: seals, count: int = 3, **more: Any) -> SealedHop:
    seals = linked(change(chain(count, Scope(name, "kafka", "5b2f"))))
    return SealedHop(name, Guarantee.EXACTLY_ONCE, seals, **more)


def damaged(seals: list[Seal]) -> list[Seal]:
    sums = replace(seals[1].sums, counts=Counts(sent=10, delivered=9, lost=1))
    text = "1 records are lost; exactly_once promises none"
    return [seals[0], replace(seals[1], sums=sums, verdict=Verdict.BROKEN, breaches=(text,)), *seals[2:]]


def test_hops_that_held_hold_from_end_to_end() -> None:
    hops = [hop("relay"), hop("store", count=2)]
    assert why_apart(hops) is None
    joined = join(hops)
    assert joined.counts == Counts(sent=30, delivered=20)
    assert joined.unknowns == ()
    assert joined.notes == ("relay is sealed up to batch 29 by 3 seals", "store is sealed up to batch 19 by 2 seals")


def test_damage_of_any_hop_is_damage_from_end_to_end() -> None:
    joined = join([hop("relay", damaged), hop("store")])
    assert joined.counts == Counts(sent=30, delivered=30, lost=1)
    assert joined.unknowns == ()
    assert join([hop("relay"), hop("store", damaged)]).counts == Counts(sent=30, delivered=29, lost=1)


def test_damage_of_two_hops_may_cancel_out() -> None:
    assert why_apart([hop("relay", damaged), hop("store")]) is None
    why = "relay and store are broken, and one may have undone what the other one did"
    assert why_apart([hop("relay", damaged), hop("store", damaged)]) == why


def test_damage_that_no_count_shows_is_not_forgotten() -> None:
    def change(seals: list[Seal]) -> list[Seal]:
        return [
            replace(seals[0], verdict=Verdict.BROKEN, breaches=("3 deleted keys are still in the sink",)),
            *seals[1:],
        ]

    joined = join([hop("relay", change), hop("store")])
    assert joined.unknowns == ("relay, seal 0: 3 deleted keys are still in the sink",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda seals: [], "store was never sealed"),
        (lambda seals: seals[1:], "the seals of store start with batch 10"),
        (
            lambda seals: [seals[0], replace(seals[1], audited=False), seals[2]],
            "store, batches 10 to 19: never audited",
        ),
        (
            lambda seals: [seals[0], replace(seals[1], verdict=Verdict.UNKNOWN), seals[2]],
            "store, batches 10 to 19: not judged",
        ),
        (
            lambda seals: [*seals[:2], replace(seals[2], scope=Scope("store", "kafka", "9c1d"), first=0)],
            "store was sealed on several checkpoints",
        ),
    ],
)
def test_seals_that_do_not_join(change: Change, why: str) -> None:
    assert why_apart([hop("relay"), hop("store", change)]) == why


def test_a_hop_whose_newest_audit_could_not_judge_does_not_join() -> None:
    assert why_apart([hop("relay", doubt="the sink was recreated"), hop("store")]) == "relay: the sink was recreated"


def test_a_hop_that_did_not_read_from_the_start_may_have_skipped_rows() -> None:
    assert why_apart([hop("relay"), hop("store", from_start=False)]) == "store did not read from the first row on"
    assert why_apart([hop("relay", from_start=False), hop("store")]) is None
