"""Chains of seals, made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.request import KeyCheck, KeyShare
from delivered.audit.seal import Seal, Sums
from delivered.engine.context import open_shared_ledger
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Ok

SCOPE = Scope("orders", "kafka", "5b2f")


def chain(count: int, scope: Scope = SCOPE) -> list[Seal]:
    """Seals of ten batches with ten records each."""
    seals: list[Seal] = []
    total = Sums()
    for number in range(count):
        prints = Fingerprint(10, number + 1, 7 * number)
        sums = Sums(Counts(sent=10, delivered=10), prints, Account(prints), prints)
        total = total + sums
        seals.append(
            Seal(
                scope=scope,
                number=number,
                before=seals[-1].digest if seals else "",
                first=10 * number,
                last=10 * number + 9,
                start=json.dumps({"orders": {"0": 10 * number}}),
                end=json.dumps({"orders": {"0": 10 * number + 10}}),
                verdict=Verdict.HELD,
                sums=sums,
                total=total,
                account=total.ledger,
                settled=10 * number + 9,
                settled_end=json.dumps({"orders": {"0": 10 * number + 10}}),
                sink_end={"orders": {"0": 11 * number}},
            )
        )
    return seals


def texts(seals: list[Seal]) -> list[str]:
    return [s.text for s in seals]


def linked(seals: Iterable[Seal]) -> list[Seal]:
    """Changed seals as an auditor would have written them: totals and hashes as they follow from them."""
    chained: list[Seal] = []
    for seal in seals:
        last = chained[-1] if chained else None
        before = last.total if last is not None and last.scope == seal.scope else Sums()
        total = before + seal.sums if seal.audited else before
        chained.append(replace(seal, before=last.digest if last is not None else "", total=total))
    return chained


def share_of(seals: list[Seal], share: int, of: int = 1000, **changes: Any) -> Seal:
    """The seal of a share of the keys that follows these seals."""
    full = next((s for s in reversed(seals) if s.keys is None), None)
    last = seals[-1] if seals else Seal.parse(chain(1)[0].text)
    keys = KeyCheck(KeyShare(share, of), compared=3, selected="here").to_json()
    return replace(
        last,
        **{
            "number": last.number + 1 if seals else 0,
            "before": last.digest if seals else "",
            "first": 0,
            "sums": Sums(Counts(sent=3, delivered=3)),
            "sink_end": None,
            "keys": keys,
            "full": -1 if full is None else full.number,
            **changes,
        },
    )


def add_seals(made: delivered.Pipeline, seals: Iterable[Seal]) -> None:
    """Into the ledger of a pipeline, for its only sink."""
    (name,) = made.sink_names
    spec = made.spec
    sinks = spec.open()
    with closing(open_shared_ledger(sinks, spec.scope(sinks))) as ledger:
        for seal in seals:
            assert isinstance(ledger.add_seal(name, seal.number, seal.text), Ok)
