"""The judge of upserts: what a table with the newest row of each key reveals about all records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from delivered.model.capability import Guarantee
from delivered_lab.verify.evidence import Evidence
from delivered_lab.verify.fixture import LatestByKey
from delivered_lab.verify.judge import Judgement, Verdict, judge
from delivered_lab.verify.systems.base import Row
from delivered_lab.verify.workloads import WORKLOADS, Record, records

CHANGES = WORKLOADS["changes"]
SENT = records(CHANGES, 1, 200)
HALF = 100


def table(sent: Sequence[Record]) -> list[Row]:
    newest = {r.key: r for r in sent}
    return [Row("effects", n, r.key, r.value) for n, r in enumerate(newest.values())]


def judged(*looks: Sequence[Row], atomic: bool = True) -> Judgement:
    """A reader saw these tables one after the other; the last one is the final state."""
    newest = LatestByKey(CHANGES, SENT)
    told = [newest.seen_in(rows, float(n)) for n, rows in enumerate(looks)]
    seen = [s for t in told for s in [*t, *newest.went_back(t, 0.0)]]
    ids = [CHANGES.effect_of(r.key, r.value).id for r in SENT]
    final = newest.seen_in(looks[-1], 9.0)
    return judge(
        Evidence(
            Guarantee.EXACTLY_ONCE,
            expected=Counter(ids),
            seen=seen,
            final=final,
            snapshots=[(float(n), frozenset(s.effect for s in t)) for n, t in enumerate(told)],
            batches={0: frozenset(ids[:HALF]), 1: frozenset(ids[HALF:])},
            batch_atomic=atomic,
            ordered=True,
            open_transactions=(),
        )
    )


def test_a_table_that_went_through_two_batches_is_held() -> None:
    assert judged(table(SENT[:HALF]), table(SENT)).verdict is Verdict.HELD


def test_a_key_that_is_not_as_new_as_its_source_has_lost_records() -> None:
    key = SENT[-1].key
    stale = [r for r in SENT if r.key != key or r.number < SENT[-1].number - 2]
    found = judged(table(SENT[:HALF]), table(stale), table(stale))
    assert (found.verdict, found.count("lost")) == (Verdict.BROKEN, 3)


def test_a_key_that_is_there_twice_is_doubled() -> None:
    rows = table(SENT)
    found = judged([*rows, replace(rows[0], position=99)])
    assert found.verdict is Verdict.BROKEN
    assert found.count("duplicated") > 0


def test_a_value_that_nobody_sent_is_found() -> None:
    rows = table(SENT)
    altered = replace(rows[0], value=rows[0].value.replace('"n": ', '"n":  '))
    assert judged([altered, *rows[1:]]).count("unexpected") == 1


def test_a_key_that_went_back_and_came_forward_again_is_found() -> None:
    found = judged(table(SENT), table(SENT[:HALF]), table(SENT))
    assert found.verdict is Verdict.BROKEN
    assert any("went back" in reason for reason in found.reasons), found.reasons


def test_a_key_that_was_gone_for_a_while_is_found() -> None:
    found = judged(table(SENT), table(SENT)[1:], table(SENT))
    assert any("to nothing" in reason for reason in found.reasons), found.reasons


def test_a_batch_of_which_some_keys_show_is_torn_where_the_sink_claims_whole_batches() -> None:
    half_way = [r for n, r in enumerate(SENT) if n < HALF or r.partition < 2]
    looks = (table(SENT[:HALF]), table(half_way), table(SENT))
    assert [f for f in judged(*looks).reasons if f.startswith("torn_batch")]
    assert judged(*looks, atomic=False).verdict is Verdict.HELD
