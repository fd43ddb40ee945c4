"""Seals of shares of the keys: links of the chain, which say nothing of other keys."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.support.orders import Orders, clean
from tests.support.seals import SCOPE, chain, share_of, texts

from delivered.audit.continuation import continuable
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.evidence_file import Chain, find_faults
from delivered.audit.recheck import Again, not_compared
from delivered.audit.report import AuditReport
from delivered.audit.seal import Seal, State, chain_faults, read_sealed
from delivered.engine.context import open_ledger
from delivered.model.errors import Refused
from delivered.model.identity import Scope
from delivered.model.work import Ok, check_format
from delivered.operate.status import SealStatus, read_seals, seal_problems, sealed_text
from delivered.pipeline import registry

LOST = ("1 records are lost; exactly_once promises none",)


def mixed() -> list[Seal]:
    """Of all keys, of two shares, of all keys, of another share."""
    seals = chain(1)
    seals += [share_of(seals, 7)]
    seals += [share_of(seals, 8)]
    seals += [replace(chain(2)[1], number=3, before=seals[-1].digest)]
    return [*seals, share_of(seals, 9)]


def test_a_share_is_a_link_of_the_chain() -> None:
    seals = mixed()
    assert not list(chain_faults(texts(seals)))
    assert not list(chain_faults(texts(seals)[1:]))
    for seal in seals:
        assert Seal.parse(seal.text) == seal
    assert not list(find_faults(Chain.of("kafka", texts(seals), seals[-1].text, {}), SCOPE.pipeline))


def test_seals_of_all_keys_are_stored_as_before_and_others_refused_by_earlier_releases() -> None:
    full, share = (json.loads(seal.text) for seal in mixed()[:2])
    assert full["format"] == 1 and "keys" not in full and "full" not in full
    with pytest.raises(Refused, match="DELIVERED_FORMAT_NEWER"):
        check_format(share["format"], "a seal", 1)
    assert share["keys"]["probability_found"]["1"] == 0.001


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda s: [s[0], replace(s[1], keys={**(s[1].keys or {}), "share": 6}), *s[2:]], "seal 1 has changed since"),
        (lambda s: [s[0], *s[2:]], "seal 2 follows seal 0"),
        (lambda s: [s[0], s[2], s[1], *s[3:]], "seal 1 follows seal 2"),
        (lambda s: [*s[:4], replace(s[4], full=0)], "names seal 0 as the last one of all keys, not 3"),
        (lambda s: [*s[:3], replace(s[3], first=25, last=30)], "starts with batch 25, and seal 0 ends with 9"),
        (lambda s: [*s[:3], replace(s[3], total=s[3].sums)], "its total is not that of seal 0"),
    ],
)
def test_damage_around_shares_is_found(damage: object, fault: str) -> None:
    assert any(fault in text for text in chain_faults(texts(damage(mixed()))))  # type: ignore[operator]


def test_ranges_consist_of_seals_of_all_keys() -> None:
    sealed = read_sealed(texts(mixed()))
    assert [(r.state, r.batches) for r in sealed.ranges] == [(State.HELD, "0 to 19")]
    assert sealed.last is not None and sealed.last.number == 3 and sealed.digest == sealed.last.digest
    assert [s.number for s in sealed.shares] == [1, 2, 4]
    assert sealed.superseded == () and sealed.verdict is Verdict.HELD
    assert [s.number for s in continuable(mixed())] == [0, 3]
    shown = json.loads(json.dumps(sealed.to_json()))["shares"]
    assert [(s["share"], s["of"], s["state"]) for s in shown] == [(n, 1000, "held") for n in (7, 8, 9)]


def test_a_broken_share_counts_until_it_is_compared_again() -> None:
    seals = chain(1)
    seals += [share_of(seals, 7, verdict=Verdict.BROKEN, breaches=LOST)]
    sealed = read_sealed(texts(seals))
    assert sealed.verdict is Verdict.BROKEN and not sealed.of(State.BROKEN)
    (problem,) = seal_problems({"rows": SealStatus(sealed)})
    assert problem.code == "DELIVERED_SEAL_BROKEN" and "share 7 of 1,000 of the keys: 1 records" in problem.text
    assert "share 7 of 1,000 of the keys (broken), until batch 9" in sealed_text(SealStatus(sealed))
    other = read_sealed(texts([*seals, share_of(seals, 8)]))
    assert other.verdict is Verdict.BROKEN, "another share says nothing of it"
    again = read_sealed(texts([*seals, share_of(seals, 7, verdict=Verdict.HELD, breaches=())]))
    assert again.verdict is Verdict.HELD and list(seal_problems({"rows": SealStatus(again)})) == []


def test_shares_are_not_compared_again_by_an_evidence_file() -> None:
    found = not_compared(mixed(), lambda seal: seal.number == 4, "")
    assert [(r.outcome, r.seals) for r in found] == [(Again.NOT_COMPARED, (4, 4))]
    assert "delivered audit --keys '#9/1000'" in found[0].says


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))
    return Orders(tmp_path)


def add_share(orders: Orders, **changes: object) -> Seal:
    sink = orders.pipeline().sinks[0].sink()
    seal = share_of(orders.seals(), 3, **changes)
    with closing(open_ledger(sink, Scope(orders.pipeline().name, sink.name, "any"))) as ledger:
        assert ledger.add_seal(sink.name, seal.number, seal.text) == Ok(None)
    return seal


@pytest.mark.matrix
def test_audits_continue_from_the_seal_of_all_keys_behind_shares(orders: Orders) -> None:
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    add_share(orders)
    add_share(orders, verdict=Verdict.BROKEN, breaches=LOST)
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, clean(20)), report
    assert [(s.number, s.first, s.last, s.keys is None) for s in orders.seals()] == [
        (0, 0, 0, True),
        (1, 0, 0, False),
        (2, 0, 0, False),
        (3, 1, 1, True),
    ]
    again = orders.audit(since=1)
    assert again.counts == clean(20) and again.continuation is not None and again.continuation.base is not None
    assert again.continuation.base.number == 0
    add_share(orders)
    sink = orders.pipeline().sinks[0].sink()
    with closing(open_ledger(sink, Scope("orders", sink.name, "any"))) as ledger:
        sealed = read_seals(ledger, sink.name, newest=1)
    assert sealed.last is not None and (sealed.last.number, len(sealed.shares)) == (4, 1)
    assert isinstance(report, AuditReport) and orders.audit(full=True).counts == Counts(40, 40)


@pytest.mark.matrix
def test_batches_of_which_a_share_was_compared_are_compared_completely(orders: Orders) -> None:
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    orders.run()
    add_share(orders, last=1)
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, clean(40)), report
    assert (orders.seals()[-1].first, orders.seals()[-1].last) == (1, 2)
