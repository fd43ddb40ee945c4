"""Oracles of operators, and judges of keyed rows, on handwritten histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from examples.totals import of_operators

from delivered.model.capability import Guarantee
from delivered_lab.verify.case import Result as CaseResult
from delivered_lab.verify.evidence import Evidence, Seen
from delivered_lab.verify.judge import Verdict, differences, judge
from delivered_lab.verify.matrix import Store
from delivered_lab.verify.oracles import LATE_S, NOBODY, START_S, TAIL
from delivered_lab.verify.workloads import WORKLOADS, Record, records, source_id

Rows = Mapping[str, str]
OPERATORS = [n for n, w in WORKLOADS.items() if w.oracle is not None]
TOTALS = WORKLOADS["totals"]


def oracle(name: str, sent: Sequence[Record]) -> dict[str, str]:
    found = WORKLOADS[name].oracle
    assert found is not None
    return found([r.value for r in sent])


def ids(rows: Rows) -> frozenset[str]:
    return frozenset(TOTALS.effect_of(k, v).id for k, v in rows.items())


def evidence(sent: Sequence[Record], rows: Rows, snapshots: Sequence[Rows], name: str = "totals") -> Evidence:
    """Of a table of running totals, in batches of 250."""
    final = [Seen(TOTALS.effect_of(k, v).id, "t", n, k) for n, (k, v) in enumerate(rows.items())]
    sources = [source_id(r.value) for r in sent]
    wanted = {k: TOTALS.effect_of(k, v).id for k, v in oracle(name, sent).items()}
    return Evidence(
        Guarantee.EXACTLY_ONCE,
        expected=Counter(wanted.values()),
        wanted=wanted,
        states=[ids(oracle(name, sent[:end])) for end in range(250, len(sent) + 1, 250)],
        acknowledged=frozenset(sources),
        in_source=Counter(sources),
        seen=final,
        final=final,
        snapshots=[(float(n), ids(rows)) for n, rows in enumerate(snapshots)],
        batch_atomic=True,
        open_transactions=(),
    )


def test_totals_of_each_batch_hold() -> None:
    sent = records(TOTALS, 1)
    first, second, last = (oracle("totals", sent[:n]) for n in (250, 500, 750))
    assert NOBODY in last
    assert judge(evidence(sent, last, [first, second, last])).verdict is Verdict.HELD
    assert judge(evidence(sent, last, [second, second, last])).verdict is Verdict.HELD  # a reader may miss a state


def test_a_batch_that_counted_twice_is_found_by_its_keys() -> None:
    sent = records(TOTALS, 1)
    twice = oracle("totals", [*sent, *sent[500:]])
    found = judge(evidence(sent, twice, [twice]))
    assert found.verdict is Verdict.BROKEN
    assert found.count("by_key") == len({r.key for r in sent[500:]})
    assert found.count("torn_batch") == 1


@pytest.mark.parametrize("damage", ["missing", "extra", "different"])
def test_a_key_that_is_not_as_recomputed_is_named(damage: str) -> None:
    sent = records(TOTALS, 1)
    rows = oracle("totals", sent)
    if damage == "missing":
        del rows["k3"]
    else:
        rows["k3" if damage == "different" else "k99"] = "1 1"
    proof = evidence(sent, rows, [])
    assert {what: len(texts) for what, texts in differences(proof).items() if texts} == {damage: 1}
    (finding,) = (f for f in judge(proof).findings if f.checker == "by_key")
    assert (finding.verdict, finding.count) == (Verdict.BROKEN, 1)
    assert ("k99" if damage == "extra" else "k3") in finding.samples[0]


def test_a_state_that_comes_back_and_one_of_no_batch_are_told_apart() -> None:
    sent = records(TOTALS, 1)
    first, second, last = (oracle("totals", sent[:n]) for n in (250, 500, 750))
    back = judge(evidence(sent, last, [second, first, last]))
    assert (back.count("aborted_read"), back.count("torn_batch")) == (1, 0)
    half = {k: (second if k < "k3" else first)[k] for k in first}
    torn = judge(evidence(sent, last, [first, half, last]))
    assert (torn.verdict, torn.count("aborted_read"), torn.count("torn_batch")) == (Verdict.BROKEN, 0, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_records_make_an_oracle_say_something_of_everything_that_a_workload_is_for(name: str) -> None:
    sent = records(WORKLOADS[name], 1)
    rows = oracle(name, sent)
    assert len(rows) >= 5
    assert rows == oracle(name, sent[::-1])  # the order in which a source is read does not matter
    assert (TAIL in rows) is (name == "totals")
    if name == "distinct":
        assert len(rows) < len(sent)
    if name == "distinct-within":
        assert len({k.partition("@")[0] for k in rows}) < len(rows)
    if name == "join-outer":
        assert 0 < len(oracle("join", sent)) < len(rows)
    if name.startswith("visits"):
        assert len(rows) > 2 * len([k for k in rows if "#" not in k])


@pytest.mark.parametrize("name", ["windows", "sessions", "chained"])
def test_late_records_are_not_counted(name: str) -> None:
    sent = records(WORKLOADS[name], 1)
    late = [r for r in sent if START_S + r.number - int(r.value.partition('"at": ')[2].partition(",")[0]) >= LATE_S]
    assert len(late) > 3
    assert oracle(name, sent) == oracle(name, [r for r in sent if r not in late])
    assert oracle("totals", sent) != oracle("totals", [r for r in sent if r not in late])


def test_a_row_of_a_static_table_may_say_any_version_of_its_own_key() -> None:
    accepts = WORKLOADS["lookup"].accepts
    assert accepts is not None
    assert accepts("7 k3", "7 k3/12")
    assert not any(accepts("7 k3", found) for found in ("7 k4/1", "8 k3/1", "7 k3", "7 k3/", "7 k3/0"))


def test_results_of_operators_are_told_by_workload_and_sink(tmp_path: Path) -> None:
    """build/totals.json has them next to those of `make totals`."""
    store = Store(tmp_path / "verify.json")
    for workload, fault, verdict, different in (
        ("totals", "killed-twice", "held", 0), ("totals", "killed-after", "broken", 2), ("join", "none", "held", 0),
        ("join", "killed-after", "unknown", 0), ("keyed", "none", "held", 0),
    ):  # fmt: skip
        faults = [] if fault == "none" else ["kill@log:before", "kill@log:after"]
        result = CaseResult("sqlite", "exactly_once", workload, fault, 1, verdict, 0, 0, len(faults), True)
        result.faults, result.delivered, result.different = faults, 18, different
        store.add(result)
    found = {r.workload: (r.kills, r.rows, r.different, r.recomputed_equal) for r in of_operators(store.path)}
    assert found == {"totals": (4, 18, 2, False), "join": (0, 18, 0, True)}
    assert of_operators(tmp_path / "none.json") == []
