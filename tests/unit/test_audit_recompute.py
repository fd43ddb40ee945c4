"""What an audit by recomputing cannot prove. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delivered.audit.classes import Counts, Damage, Verdict
from delivered.audit.recompute import ALL, GONE, Doubt, Recompute, doubts, of_recomputed, operators
from delivered.audit.report import AuditReport
from delivered.model.capability import WriteMode
from delivered.model.guarantee import Guarantee

PLAN = """\
Aggregate [k#1], [k#1, count(1) AS n#2L, sum(v#3) AS total#4]
+- ~SubqueryAlias source
   +- ~StreamingRelationV2 org.apache.spark.sql.delivered, delivered_log, [k#1, v#3]
"""
UPDATE = Recompute("update", ("k",))
REPORT = AuditReport("p", "s", Guarantee.EXACTLY_ONCE)


def test_a_sum_by_key_leaves_nothing_open() -> None:
    assert operators(PLAN) == ["Aggregate", "SubqueryAlias", "StreamingRelationV2"]
    for how in (UPDATE, Recompute("complete")):
        assert doubts(how, PLAN, WriteMode(keys=("k",))) == []
    assert doubts(UPDATE, PLAN, WriteMode(keys=("k",), version="n")) == []


@pytest.mark.parametrize(
    ("plan", "how", "mode", "damage"),
    [
        ("", UPDATE, WriteMode(), ALL),
        ("Join Inner, (a#1 = b#2)\n:- " + PLAN, UPDATE, WriteMode(), ALL),
        ("TransformWithStateInPySpark f(k#1)\n+- " + PLAN, UPDATE, WriteMode(), ALL),
        ("Deduplicate [k#1]\n+- StreamingRelationV2 x", UPDATE, WriteMode(), ALL),
        ("Aggregate [max(n#2)]\n+- " + PLAN, UPDATE, WriteMode(), ALL),
        ("Project [current_timestamp() AS t#1]\n+- StreamingRelationV2 x", UPDATE, WriteMode(), ALL),
        (PLAN, replace(UPDATE, changing=("rand()",)), WriteMode(), ALL),
        (PLAN, replace(UPDATE, deterministic=False), WriteMode(), ALL),
        ("Filter (n#2L > 5)\n+- " + PLAN, UPDATE, WriteMode(), (Damage.UNEXPECTED,)),
        (PLAN, UPDATE, WriteMode(keys=("k",), version="total"), (Damage.ALTERED,)),
    ],
)
def test_what_depends_on_batches_is_open(
    plan: str, how: Recompute, mode: WriteMode, damage: tuple[Damage, ...]
) -> None:
    (found,) = doubts(how, plan, mode)
    assert found.damage == damage


def test_complete_filters_as_a_batch_does() -> None:
    assert doubts(Recompute("complete"), "Filter (n#2L > 5)\n+- " + PLAN, WriteMode()) == []


def test_a_doubt_turns_its_damage_into_unknown_and_no_other() -> None:
    damaged = replace(REPORT, counts=Counts(sent=9, delivered=8, lost=1))
    found = of_recomputed(damaged, [Doubt("late", GONE)], [], "key (k)")
    assert (found.verdict, found.breaches) == (Verdict.UNKNOWN, [])
    assert "late" in found.unknowns[0]
    assert of_recomputed(damaged, [Doubt("a filter", (Damage.UNEXPECTED,))], [], "key (k)").verdict is Verdict.BROKEN
    clean = replace(REPORT, counts=Counts(sent=9, delivered=9))
    assert of_recomputed(clean, [Doubt("late", GONE)], [], "key (k)").verdict is Verdict.HELD
