"""The workloads of `delivered verify`: real output of their transforms satisfies the oracle, damaged does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from delivered.model.capability import Guarantee
from delivered.pipeline.transform import load_function
from delivered_lab.verify.evidence import Evidence, Seen
from delivered_lab.verify.judge import Verdict, judge
from delivered_lab.verify.workloads import (
    PARTITIONS,
    POISON,
    WINDOW_S,
    WINDOWS,
    WORKLOADS,
    Record,
    Workload,
    drops_poison,
    records,
    source_id,
)

EXACTLY = Guarantee.EXACTLY_ONCE
Row = tuple[str | None, str]


def source(name: str) -> list[Record]:
    count = 120 if name == "big" else None
    return [replace(r, filler=min(r.filler, 100)) for r in records(WORKLOADS[name], 1, count)]


def sink(workload: Workload, sent: Sequence[Record]) -> list[Row]:
    """What a correct pipeline without Spark writes to the sink."""
    batch = pa.record_batch(
        {
            "key": pa.array([None if r.key is None else r.key.encode() for r in sent], pa.binary()),
            "value": pa.array([r.value.encode() for r in sent], pa.binary()),
            "topic": pa.array([f"t-in{'' if r.partition < PARTITIONS else '-1'}" for r in sent]),
        }
    )
    if workload.name == "poison":
        batch = drops_poison(batch)
    elif workload.arrow is not None:
        from pathlib import Path

        batch = load_function(workload.arrow, Path())(batch)
    rows = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
    return [(k.decode() if k is not None else None, v.decode()) for k, v in rows]


def evidence(workload: Workload, sent: Sequence[Record], rows: Sequence[Row]) -> Evidence:
    """Evidence as the fixture collects it from source and sink."""
    if workload.together is not None:
        expected = Counter(workload.effect_of(None, v).id for v in workload.together([r.value for r in sent]))
    else:
        expected = Counter(workload.effect_of(r.key, v).id for r in sent for v in workload.effects(r.value))
    told = [workload.effect_of(*row) for row in rows]
    final = [Seen(e.id, "t", n, e.key, e.number) for n, e in enumerate(told)]
    ids = [source_id(r.value) for r in sent]
    return Evidence(
        EXACTLY,
        expected=expected,
        acknowledged=frozenset(ids),
        in_source=Counter(ids),
        offered=frozenset(ids),
        seen=final,
        final=final,
        open_transactions=(),
        ordered=workload.ordered,
    )


WITHOUT_SPARK = [n for n, w in WORKLOADS.items() if not w.needs_spark and w.deterministic and not w.replaces]


@pytest.mark.parametrize("name", WITHOUT_SPARK)
def test_an_honest_pipeline_satisfies_the_oracle_and_damage_does_not(name: str) -> None:
    workload, sent = WORKLOADS[name], source(name)
    rows = sink(workload, sent)
    assert judge(evidence(workload, sent, rows)).verdict is Verdict.HELD
    for damage, checker in ((rows[1:], "lost"), ([*rows, rows[0]], "duplicated")):
        found = judge(evidence(workload, sent, damage))
        assert (found.verdict, found.count(checker)) == (Verdict.BROKEN, 1)
    altered = [(rows[0][0], rows[0][1].replace('"n": ', '"n":  ')), *rows[1:]]
    assert judge(evidence(workload, sent, altered)).count("unexpected") == 1


@pytest.mark.parametrize(
    ("name", "what"),
    [("sparse", "a record that the filter must drop"), ("poison", "the record that cannot be parsed")],
)
def test_what_must_not_come_out_is_found(name: str, what: str) -> None:
    workload, sent = WORKLOADS[name], source(name)
    unwanted = next(r for r in sent if not workload.effects(r.value))
    found = judge(evidence(workload, sent, [*sink(workload, sent), (unwanted.key, unwanted.value)]))
    assert (found.verdict, found.count("unexpected")) == (Verdict.BROKEN, 1), what


def test_copies_in_the_source_must_pass_through() -> None:
    workload, sent = WORKLOADS["doubled"], source("doubled")
    copies = Counter(r.id for r in sent)
    assert {1, 2, 3} == set(copies.values())
    once = list(dict.fromkeys(sink(workload, sent)))
    found = judge(evidence(workload, sent, once))
    assert (found.verdict, found.count("lost")) == (Verdict.BROKEN, len(sent) - len(copies))


def windows(sent: Sequence[Record]) -> list[Row]:
    together = WORKLOADS["windowed"].together
    assert together is not None
    return [(json.loads(v)["k"], v) for v in together([r.value for r in sent])]


def test_windows_are_counted_from_all_records() -> None:
    sent = source("windowed")
    rows = windows(sent)
    assert len(rows) == 16 * WINDOWS
    assert sum(json.loads(v)["count"] for _, v in rows) == WINDOW_S * WINDOWS
    assert judge(evidence(WORKLOADS["windowed"], sent, rows)).verdict is Verdict.HELD


def test_a_window_that_counted_a_record_twice_is_found() -> None:
    """The state was kept and its record read again: the row count is right, but one row is wrong."""
    sent = source("windowed")
    rows = windows(sent)
    data = json.loads(rows[5][1])
    lie = json.dumps({**data, "count": data["count"] + 1, "sum": data["sum"] + 100})
    found = judge(evidence(WORKLOADS["windowed"], sent, [*rows[:5], (rows[5][0], lie), *rows[6:]]))
    assert (found.verdict, found.count("lost"), found.count("unexpected")) == (Verdict.BROKEN, 1, 1)


def test_a_window_that_came_out_twice_is_found() -> None:
    sent = source("windowed")
    rows = windows(sent)
    found = judge(evidence(WORKLOADS["windowed"], sent, [*rows, rows[0]]))
    assert (found.verdict, found.count("duplicated")) == (Verdict.BROKEN, 1)


def test_other_values_of_a_random_transform_are_the_same_effect_and_copies_are_found() -> None:
    workload, sent = WORKLOADS["random"], source("random")
    rows = sink(workload, sent)
    assert rows != sink(workload, sent)
    assert judge(evidence(workload, sent, rows)).verdict is Verdict.HELD
    again = sink(workload, sent[:1])
    assert judge(evidence(workload, sent, [*rows, *again])).count("duplicated") == 1


def test_what_each_workload_is_made_for() -> None:
    skewed = Counter(r.partition for r in source("skewed"))
    assert skewed[0] > 0.8 * sum(skewed.values())
    assert skewed[PARTITIONS - 1] == 0
    assert {r.partition for r in source("topics")} == set(range(2 * PARTITIONS))
    assert all(len(r.value) > 1_000_000 for r in records(WORKLOADS["big"], 1, 4))
    assert sum(len(r.value) > 1_000_000 for r in records(WORKLOADS["oversized"], 1)) == 1
    assert sum(r.id.startswith(POISON) for r in source("poison")) == 2
    sparse = WORKLOADS["sparse"]
    assert sparse.rows_per_batch is not None
    kept = [bool(sparse.effects(r.value)) for r in source("sparse")]
    step = sparse.rows_per_batch
    batches = [any(kept[n : n + step]) for n in range(0, len(kept), step)]
    assert batches.count(False) >= 4
