"""What an audit by recomputing cannot prove. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delivered.audit.evidence import Counts, Damage, Verdict
from delivered.audit.judge import (
    ALL,
    MISSING,
    Caveat,
    Method,
    account_for_recompute,
    find_caveats,
    keeps_first,
    operators,
)
from delivered.audit.report import AuditReport
from delivered.audit.request import Recompute
from delivered.model.capability import Guarantee, OnConflict, WriteMode

PLAN = """\
Aggregate [k#1], [k#1, count(1) AS n#2L, sum(v#3) AS total#4]
+- ~SubqueryAlias source
   +- ~StreamingRelationV2 org.apache.spark.sql.delivered, delivered_log, [k#1, v#3]
"""
UPDATE, APPEND = Recompute("update", ("k",)), Recompute("append")
KEYED = WriteMode(keys=("k",))
SOURCE = "\n+- ~StreamingRelationV2 x"
REPORT = AuditReport("p", "s", Guarantee.EXACTLY_ONCE)


def test_a_sum_by_key_leaves_nothing_open() -> None:
    assert operators(PLAN) == ["Aggregate", "SubqueryAlias", "StreamingRelationV2"]
    for how in (UPDATE, Recompute("complete")):
        for method in Method:
            assert find_caveats(how, PLAN, KEYED, method) == []
    assert find_caveats(UPDATE, PLAN, WriteMode(keys=("k",), version="n"), Method.ONE_BATCH) == []


@pytest.mark.parametrize(
    ("plan", "how", "mode", "damage"),
    [
        ("~Join LeftOuter, (a#1 = b#2)" + SOURCE, APPEND, WriteMode(), ALL),
        ("~Join Inner, (a#1 = b#2)\n:- ~EventTimeWatermark t#1: timestamp" + SOURCE, APPEND, WriteMode(), ALL),
        ("~Deduplicate [k#1]" + SOURCE, APPEND, WriteMode(), ALL),
        ("~DeduplicateWithinWatermark [k#1]" + SOURCE, APPEND, WriteMode(), ALL),
        ("~Aggregate [max(n#2)]\n+- " + PLAN, UPDATE, KEYED, ALL),
        (PLAN, UPDATE, WriteMode(), ALL),
        (PLAN, APPEND, WriteMode(replaces=("day",)), ALL),
        ("~Filter (n#2L > 5)\n+- " + PLAN, UPDATE, KEYED, (Damage.UNEXPECTED,)),
        (PLAN, UPDATE, WriteMode(keys=("k",), version="total"), (Damage.ALTERED,)),
        (PLAN, UPDATE, WriteMode(keys=("k",), version="total", expected="v"), ALL),
    ],
)
def test_what_depends_on_batches_is_open_until_they_are_replayed(
    plan: str, how: Recompute, mode: WriteMode, damage: tuple[Damage, ...]
) -> None:
    (found,) = find_caveats(how, plan, mode, Method.ONE_BATCH)
    assert found.damage == damage
    assert find_caveats(how, plan, mode, Method.REPLAY) == []


@pytest.mark.parametrize(
    ("plan", "how", "mode", "damage"),
    [
        ("", UPDATE, KEYED, ALL),
        ("~GlobalLimit 3" + SOURCE, APPEND, WriteMode(), ALL),
        ("~Project [current_timestamp() AS t#1]" + SOURCE, APPEND, WriteMode(), ALL),
        ("~Aggregate [k#1], [first(v#2) AS v#3]" + SOURCE, UPDATE, KEYED, ALL),
        ("~Join Inner, (a#1 = b#2)\n:- ~StreamingRelationV2 x\n+- Relation [b#2] json", APPEND, WriteMode(), ALL),
        ("~Join Inner, (a#1 = b#2)\n:- ~StreamingRelationV2 x\n+- LocalRelation [b#2]", APPEND, WriteMode(), ALL),
        (PLAN, replace(UPDATE, changing=("rand()",)), KEYED, ALL),
        (PLAN, replace(UPDATE, deterministic=False), KEYED, ALL),
        (PLAN, UPDATE, WriteMode(keys=("k",), insert=True), (Damage.ALTERED,)),
        (PLAN, UPDATE, WriteMode(keys=("k",), on_constraint=OnConflict.DEAD_LETTER), MISSING),
    ],
)
def test_what_depends_on_more_stays_open(
    plan: str, how: Recompute, mode: WriteMode, damage: tuple[Damage, ...]
) -> None:
    for method in Method:
        (found,) = find_caveats(how, plan, mode, method)
        assert found.damage == damage


def test_what_is_said_to_be_exact_is() -> None:
    inner = "~Join Inner, (a#1 = b#2)\n:- ~StreamingRelationV2 x\n+- ~StreamingRelationV2 y"
    values = "~Join LeftOuter, (a#1 = b#2)\n:- ~StreamingRelationV2 x\n+- LocalRelation [b#2]"
    state = "~TransformWithStateInPySpark f(k#1)\n:- ~StreamingRelationV2 x\n+- LocalRelation <empty>"
    assert find_caveats(APPEND, inner, WriteMode(), Method.ONE_BATCH) == []
    assert find_caveats(replace(APPEND, sql=True), values, WriteMode(), Method.REPLAY) == []
    assert find_caveats(replace(APPEND, deterministic=True), state, WriteMode(), Method.REPLAY) == []
    (open_,) = find_caveats(APPEND, state, WriteMode(), Method.REPLAY)
    assert "deterministic: true" in open_.why
    timers = state.replace("f(k#1)", "f(k#1), Append, ProcessingTime")
    (timed,) = find_caveats(replace(APPEND, deterministic=True), timers, WriteMode(), Method.REPLAY)
    assert "timers of" in timed.why
    assert keeps_first("~Deduplicate [k#1]" + SOURCE)
    assert not keeps_first(PLAN)
    assert find_caveats(Recompute("complete"), "~Filter (n#2L > 5)\n+- " + PLAN, WriteMode(), Method.ONE_BATCH) == []


def test_a_doubt_turns_its_damage_into_unknown_and_no_other() -> None:
    damaged = replace(REPORT, counts=Counts(sent=9, delivered=8, lost=1))
    found = account_for_recompute(damaged, [Caveat("late", MISSING)], [], "key (k)", "as one batch")
    assert (found.verdict, found.breaches) == (Verdict.UNKNOWN, [])
    assert "late" in found.unknowns[0]
    assert (
        account_for_recompute(
            damaged, [Caveat("a filter", (Damage.UNEXPECTED,))], [], "key (k)", "as one batch"
        ).verdict
        is Verdict.BROKEN
    )
    clean = replace(REPORT, counts=Counts(sent=9, delivered=9))
    assert (
        account_for_recompute(clean, [Caveat("late", MISSING)], [], "key (k)", "as one batch").verdict is Verdict.HELD
    )
