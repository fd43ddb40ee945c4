"""Seals as operators see them: `delivered status`, metrics, the page, and problems before it is too late."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.support.decided import checkpoint, decide, pipeline
from tests.support.seals import linked

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.seal import Seal, State, Sums, read_sealed
from delivered.checkpoint import history
from delivered.connectors.log.produce import append
from delivered.contract.source import Retained
from delivered.engine.context import _place, open_ledger
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision, Ok, Owner
from delivered.operate.asking import status
from delivered.operate.continuous import sealed_s, seals_now, unsealed
from delivered.operate.metrics import text
from delivered.operate.page import Flow, chain_line, page
from delivered.operate.status import SEALS_READ, SealStatus, Status, seal_problems
from delivered.pipeline.definition import Cadence

EVERY = {"every": "15 min"}


def now_ms() -> int:
    return int(time.time() * 1000)


def decided(tmp_path: Path, batches: int, **options: Any) -> tuple[delivered.Pipeline, list[Decision]]:
    made = pipeline(tmp_path, **options)
    decide(made, batches, _place(Owner("owner"), psutil.Process()))
    checkpoint(made, batches)
    with contextlib.closing(open_ledger(made.sinks[0].sink(), Scope("orders", "orders", "incarnation-1"))) as ledger:
        return made, sorted(ledger.history(), key=lambda d: d.batch)


def seals_of(decisions: list[Decision], *ends: int, verdicts: Mapping[int, Verdict] = {}) -> list[Seal]:
    """Seals that end with these batches, one a minute, the last one now."""
    seals: list[Seal] = []
    first, before = 0, Account()
    for number, last in enumerate(ends):
        after = Account(decisions[last].total)
        own = Account(after.total - before.total)
        sums = Sums(Counts(sent=own.total.count, delivered=own.total.count), own.total, own, own.total)
        start = seals[-1].end if seals else '{"source":"{}"}'
        seals.append(
            Seal(
                scope=Scope("orders", "orders", "incarnation-1"), number=number, before="", first=first, last=last,
                start=start, end=decisions[last].offsets, verdict=verdicts.get(number, Verdict.HELD), sums=sums,
                total=Sums(), account=after, settled=last, settled_end=decisions[last].offsets,
                breaches=("1 record is lost",) if verdicts.get(number) is Verdict.BROKEN else (),
                sealed_at_ms=now_ms() - 60_000 * (len(ends) - 1 - number),
            )
        )  # fmt: skip
        first, before = last + 1, after
    return linked(seals)


def put(made: delivered.Pipeline, seals: list[Seal]) -> None:
    with contextlib.closing(open_ledger(made.sinks[0].sink(), Scope("orders", "orders", "incarnation-1"))) as ledger:
        for seal in seals:
            assert ledger.add_seal("orders", seal.number, seal.text) == Ok(None)


def codes(found: Status) -> list[str]:
    return [p.code.removeprefix("DELIVERED_") for p in found.problems]


def test_a_pipeline_that_nobody_audits_has_no_problem_with_seals(tmp_path: Path) -> None:
    made, _ = decided(tmp_path, 2)
    found = status(made)
    assert codes(found) == [] and found.seals["orders"].last is None
    assert "audit_sealed_batch{" not in text([found])


def test_what_is_sealed_and_what_waits(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 5, audit=EVERY)
    put(made, seals_of(decisions, 0, 2))
    found = status(made)
    (seals,) = found.seals.values()
    assert (seals.last and seals.last.last, seals.unsealed_batches, seals.unsealed_records) == (2, 2, 2)
    assert codes(found) == []
    shown = text([found])
    for metric in (
        'delivered_audit_sealed_batch{pipeline="orders",sink="orders"} 2.0',
        'delivered_audit_every_seconds{pipeline="orders",sink="orders"} 900.0',
        'delivered_audit_unsealed_batches{pipeline="orders",sink="orders"} 2.0',
        'delivered_audit_unsealed_records{pipeline="orders",sink="orders"} 2.0',
        'delivered_audit_seal_verdict{pipeline="orders",sink="orders",verdict="held"} 1.0',
        'delivered_audit_never_audited_records{pipeline="orders",sink="orders"} 0.0',
        'delivered_audit_chain_faults{pipeline="orders",sink="orders"} 0.0',
    ):
        assert metric in shown, metric
    data = json.loads(json.dumps(found.to_json()))["seals"]["orders"]
    assert (data["unsealed_records"], data["last"]["batch"], data["verdict"]) == (2, 2, "held")


def test_a_seal_that_is_too_old(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 2, audit=EVERY)
    old = [replace(s, sealed_at_ms=now_ms() - 46 * 60_000) for s in seals_of(decisions, 0)]
    put(made, old)
    (problem,) = status(made).problems
    assert problem.code == "DELIVERED_SEAL_OLD"
    assert "the last seal is 46 min old" in problem.text and "every 15 minutes; not sealed: 1 record." in problem.text
    made.audit_every = Cadence(1800.0)
    assert codes(status(made)) == []


def test_a_pipeline_that_was_never_sealed_although_its_file_says_so(tmp_path: Path) -> None:
    made, _ = decided(tmp_path, 2, audit=EVERY)
    assert codes(status(made)) == []
    (seals,) = status(made).seals.values()
    assert seals.started_ms is not None and abs(seals.started_ms - time.time() * 1000) < 60_000
    late = replace(seals, started_ms=now_ms() - 46 * 60_000)
    (problem,) = seal_problems({"orders": late})
    assert problem.code == "DELIVERED_SEAL_OLD" and "no audit has sealed a batch" in problem.text


def test_a_broken_seal_stays_a_problem_for_a_day_after_the_next_one_held(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 4)
    chain = seals_of(decisions, 0, 1, 3, verdicts={1: Verdict.BROKEN})
    put(made, chain)
    (problem,) = status(made).problems
    assert problem.code == "DELIVERED_SEAL_BROKEN" and "seal 1, of batches 1 to 1: 1 record is lost" in problem.text
    assert "--since 1" in str(problem.next_step)
    assert 'delivered_audit_broken_ranges{pipeline="orders",sink="orders"} 1.0' in text([status(made)])
    older = linked(replace(s, sealed_at_ms=s.sealed_at_ms - 25 * 3_600_000) for s in chain)
    assert [*seal_problems({"orders": SealStatus.of(read_sealed(s.text for s in older), None, "orders")})] == []


def test_seals_that_are_no_chain(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 3)
    put(made, seals_of(decisions, 0, 1, 2))
    with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as database, database:
        database.execute("DELETE FROM _delivered_seal WHERE number = 0")
    (problem,) = status(made).problems
    assert problem.code == "DELIVERED_SEALS_CHANGED" and "1 of the seals 0 to 2 are missing" in problem.text
    with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as database, database:
        database.execute("UPDATE _delivered_seal SET seal = replace(seal, 'held', 'unknown') WHERE number = 1")
    (problem,) = status(made).problems
    assert "seal 1 has changed since seal 2 was made" in problem.text
    with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as database, database:
        database.execute("UPDATE _delivered_seal SET seal = 'no seal'")
    (problem,) = status(made).problems
    assert "cannot be read" in problem.text


def test_a_seal_ahead_of_a_ledger_that_was_put_back(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 3)
    put(made, [replace(s, last=7) for s in seals_of(decisions, 2)])
    (problem,) = status(made).problems
    assert problem.code == "DELIVERED_SEALS_AHEAD" and "ends with batch 7" in problem.text
    assert "newest decision is of batch 2" in problem.text


def test_of_a_long_chain_the_newest_are_read(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 1)
    (one,) = seals_of(decisions, 0)
    chain = linked(
        replace(one, number=n, first=n, last=n, start=one.end if n else one.start) for n in range(SEALS_READ + 5)
    )
    put(made, chain[:1])
    rows = [("orders", "orders", s.number, s.text) for s in chain[1:]]
    with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as database, database:
        database.executemany("INSERT INTO _delivered_seal VALUES (?, ?, ?, ?)", rows)
    (seals,) = status(made).seals.values()
    (held,) = seals.sealed.ranges
    assert (held.first_seal, held.last_seal, seals.sealed.faults) == (5, SEALS_READ + 4, ())


def test_records_that_a_log_dropped_before_they_were_sealed(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 4, audit=EVERY)
    log = str(tmp_path / "in")
    append(log, pa.table({"value": [b"b", b"c", b"d"]}), idempotence=("test", 2))
    put(made, seals_of(decisions, 0))
    assert codes(status(made)) == []
    import deltalake

    deltalake.DeltaTable(log).delete("offset < 1")
    assert codes(status(made)) == [], "offset 0 was sealed"
    deltalake.DeltaTable(log).delete("offset < 3")
    found = status(made)
    (problem,) = found.problems
    assert problem.code == "DELIVERED_UNSEALED_EXPIRED" and "2 offsets of 0" in problem.text
    assert 'delivered_audit_unsealed_missing_offsets{pipeline="orders",sink="orders"} 2.0' in text([found])


@pytest.mark.parametrize(
    ("left_s", "cadence", "age_s", "expiring"),
    [
        (7 * 86_400, Cadence(900.0), 60, False),
        (7 * 86_400, Cadence(900.0), 4_000, False),
        (43_200, Cadence(900.0), 60, False),
        (43_200, Cadence(900.0), 4_000, True),
        (2_600, Cadence(900.0), 60, True),
        (90_000, None, 1e6, False),
        (43_200, None, 1e6, True),
    ],
)
def test_when_the_source_drops_records_too_soon(
    left_s: float, cadence: Cadence | None, age_s: float, expiring: bool, tmp_path: Path
) -> None:
    _, decisions = decided(tmp_path, 2)
    chain = [replace(s, sealed_at_ms=now_ms() - int(age_s * 1000)) for s in seals_of(decisions, 0)]
    kept = {
        "source": Retained(until_ms={"orders/0": int(time.time() * 1000 + left_s * 1000), "orders/1": 2 * now_ms()})
    }
    found = replace(SealStatus.of(read_sealed(s.text for s in chain), decisions[1], "orders", cadence), retained=kept)
    problems = {p.code: p.text for p in seal_problems({"orders": found})}
    assert ("DELIVERED_UNSEALED_EXPIRING" in problems) is expiring
    if expiring:
        assert "of orders/0" in problems["DELIVERED_UNSEALED_EXPIRING"]
    sealed_all = replace(found, unsealed_batches=0)
    assert sealed_all.expires is None and [*seal_problems({"orders": sealed_all})] == []


def test_an_audit_that_failed_is_a_problem_until_one_succeeds(tmp_path: Path) -> None:
    made, _ = decided(tmp_path, 1)
    line: dict[str, Any] = {"sink": "orders", "at_ms": 1, "seconds": 1, "breaches": [], "unknowns": [], "counts": {}}
    history.add_audit(made.checkpoint, {**line, "verdict": "unknown", "error": "the broker is away"})
    (problem,) = status(made).problems
    assert problem.code == "DELIVERED_AUDIT_NOT_RUN" and "the broker is away" in problem.text
    history.add_audit(made.checkpoint, {**line, "verdict": "held"})
    assert codes(status(made)) == []


def test_the_page_shows_the_chain_as_a_line_of_time(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 9, audit=EVERY)
    chain = seals_of(decisions, 0, 1, 3, 5, 6, 7, verdicts={2: Verdict.BROKEN, 3: Verdict.UNKNOWN})
    chain = [replace(s, audited=s.number != 4, unknowns=("dropped <b>",) if s.number == 4 else ()) for s in chain]
    put(made, linked(chain))
    found = status(made)
    line = chain_line(found.seals["orders"])
    assert [(part.css, part.batches, part.label) for part in line] == [
        ("held", 2, "batches 0 to 1"),
        ("broken", 2, "batches 2 to 3"),
        ("unknown", 2, "batches 4 to 5"),
        ("never", 1, "batch 6"),
        ("held", 1, "batch 7"),
        ("unsealed", 1, "batch 8"),
    ]
    shown = page([(found, Flow())])
    assert "never audited: 1 record, sealed" in shown and "dropped &lt;b&gt;" in shown and "dropped <b>" not in shown
    assert '<li class="broken" style="flex-grow: 2"' in shown and str(found.seals["orders"].sealed.digest) in shown
    again = replace(chain[-1], scope=Scope("orders", "orders", "incarnation-2"), number=6, first=0, last=0)
    parts = chain_line(SealStatus.of(read_sealed(s.text for s in linked([*chain, again])), None, "orders"))
    assert [part.new for part in parts] == [False] * 5 + [True]


def test_states(tmp_path: Path) -> None:
    _, decisions = decided(tmp_path, 3)
    chain = linked(replace(s, audited=s.number != 1) for s in seals_of(decisions, 0, 1, 2))
    seals = SealStatus.of(read_sealed(s.text for s in chain), decisions[2], "orders")
    assert [r.state for r in seals.sealed.ranges] == [State.HELD, State.NEVER_AUDITED, State.HELD]
    assert (seals.never_audited, seals.sealed.faults) == (1, ())


def test_which_sinks_an_audit_has_something_to_do_for(tmp_path: Path) -> None:
    made, decisions = decided(tmp_path, 3)
    assert (unsealed(made), sealed_s(seals_now(made))) == (["orders"], None)
    put(made, seals_of(decisions, 1))
    since = sealed_s(seals_now(made))
    assert unsealed(made) == ["orders"] and since is not None and 0 <= since < 60
    put(made, seals_of(decisions, 1, 2)[1:])
    assert unsealed(made) == []
    (tmp_path / "out.db").write_bytes(b"no database" * 500)
    assert (unsealed(made), sealed_s(seals_now(made))) == (["orders"], None), "the audit says what is wrong"
