"""An audit continues where the last one stopped: log to SQLite, several seals, damage in between. Without Spark."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support.compared import by_record
from tests.support.orders import COPY, DELETE, FOREIGN, ROWS, Keys, Orders, clean, half, states
from tests.support.sweeps import sweep
from tests.support.without_spark import deliver

import delivered
from delivered import Pipeline
from delivered.audit import sealing
from delivered.audit.evidence import Counts, Verdict, count_open, read_ledger
from delivered.audit.report import AuditReport
from delivered.audit.seal import Seal, read_sealed
from delivered.checkpoint import read_view
from delivered.connectors.log import append
from delivered.connectors.sqlite.read import SqliteScan
from delivered.model import step
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope
from delivered.operate.dead_letters import dead_letters, drop, retry
from delivered.pipeline import registry
from delivered.pipeline.start import record_query


@pytest.fixture(autouse=True)
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors of installed packages: looking for them takes longer than an audit of 20 rows."""
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path)


@pytest.mark.matrix
def test_each_audit_reads_what_is_new(orders: Orders) -> None:
    orders.run(2)
    first = orders.audit()
    assert (first.verdict, first.counts) == (Verdict.HELD, clean(2 * ROWS)), first.unknowns
    orders.run(1)
    second = orders.audit()
    assert (second.verdict, second.counts) == (Verdict.HELD, clean(ROWS)), second
    assert second.fingerprints is not None
    assert second.fingerprints.says == "source, ledger and sink agree"
    nothing = orders.audit()
    assert (nothing.verdict, nothing.counts) == (Verdict.HELD, Counts()), nothing.unknowns
    seals = orders.seals()
    assert [(s.first, s.last, s.verdict) for s in seals] == [(0, 1, Verdict.HELD), (2, 2, Verdict.HELD)]
    assert seals[-1].total.counts == clean(3 * ROWS)
    assert seals[-1].total.sent == seals[-1].total.delivered == seals[-1].account.total == seals[-1].total.ledger.total
    print(first, second, nothing)


def test_damage_is_found_in_its_own_range_and_the_chain_goes_on(orders: Orders) -> None:
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    orders.run(2)
    orders.sql(DELETE.format(25))
    lost = orders.audit()
    assert lost.breaches == ["1 records are lost; exactly_once promises none"]
    orders.run()
    assert orders.audit().verdict is Verdict.HELD
    orders.run()
    orders.sql(COPY.format(85))
    twice = orders.audit()
    assert twice.breaches == ["1 records are duplicated; exactly_once promises none"]
    orders.run()
    held = orders.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS))
    assert states(orders) == [
        (0, 0, Verdict.HELD, True),
        (1, 2, Verdict.BROKEN, True),
        (3, 3, Verdict.HELD, True),
        (4, 4, Verdict.BROKEN, True),
        (5, 5, Verdict.HELD, True),
    ]
    last = orders.seals()[-1]
    assert [(u["state"], u["first"], u["last"], u["records"]) for u in last.unproved] == [
        ("broken", 1, 2, 2 * ROWS),
        ("broken", 4, 4, ROWS),
    ]
    assert "broken: batches 1 to 2, 40 records: 1 records are lost; exactly_once promises none" in str(held)
    assert "broken: batch 4, 20 records" in str(held)


def test_a_late_copy_of_a_sealed_record_is_a_duplicate_and_a_foreign_one_is_not(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    orders.run()
    orders.sql(COPY.format(3), FOREIGN)
    report = orders.audit()
    assert report.counts == Counts(ROWS, ROWS + 2, duplicated=1, unexpected=1), report
    assert report.verdict is Verdict.BROKEN
    assert states(orders)[-1] == (2, 2, Verdict.BROKEN, True)


def test_a_lost_row_that_was_restored_is_no_duplicate_and_a_second_copy_is(orders: Orders) -> None:
    orders.run()
    orders.sql("CREATE TABLE kept AS SELECT * FROM orders WHERE value = CAST('5' AS BLOB)", DELETE.format(5))
    assert orders.audit().counts.lost == 1
    orders.run()
    orders.sql("INSERT INTO orders SELECT * FROM kept")
    restored = orders.audit()
    assert (restored.verdict, restored.counts) == (Verdict.HELD, Counts(ROWS, ROWS + 1, earlier=1)), restored
    assert "of batches that were sealed before: 1" in str(restored)
    assert orders.seals()[-1].total.counts == Counts(2 * ROWS, 2 * ROWS, lost=1, earlier=1)
    orders.sql("INSERT INTO orders SELECT * FROM kept", COPY.format(7))
    assert orders.audit().counts == Counts(0, 2, duplicated=2)


@pytest.mark.parametrize("comparing", [by_record, None], ids=["by_record", "local"])
def test_a_restored_row_that_equals_a_new_one_is_no_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comparing: Any
) -> None:
    """One of them came while a batch was in flight, and is read again."""
    monkeypatch.setattr(sealing, "_CUT_WAIT_S", 0)
    keys = Keys(tmp_path, guarantee="at_least_once")
    row = "VALUES (CAST('2' AS BLOB))"

    def audit() -> Counts:
        return (keys.audit() if comparing else keys.pipeline().audit()).counts

    keys.run()
    keys.sql("DELETE FROM orders WHERE rowid IN (SELECT rowid FROM orders WHERE key = CAST('2' AS BLOB) LIMIT 2)")
    assert audit().lost == 2
    keys.send()
    deliver(keys.pipeline(), only_plan=True)
    keys.sql(f"INSERT INTO orders {row}")
    assert audit().in_progress == 1
    assert deliver(keys.pipeline()) == 1
    keys.sql(f"INSERT INTO orders {row}, (CAST('2' AS BLOB))")
    assert audit() == Counts(ROWS, ROWS + 3, duplicated=1, earlier=2)


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "retried"])
def test_rows_of_dead_letters_are_neither_lost_nor_copies(tmp_path: Path, again: bool) -> None:
    """Their cause was fixed: the sink accepts them now."""
    orders = Orders(tmp_path, guarantee="at_most_once")
    orders.sql(
        "CREATE TABLE orders (key BLOB, value BLOB)",
        "CREATE INDEX refusing ON orders (json_extract(CAST(value AS TEXT), '$.n'))",
    )
    pipeline = orders.pipeline(
        transform=delivered.arrow(select=["key", "value"]),
        on_bad_row="dead_letter",
        dead_letter=delivered.files(str(tmp_path / "letters"), fileFormat="parquet"),
    )
    append(str(tmp_path / "log"), pa.table({"key": [b"k"] * 3, "value": [b"{}", b"not", b'{"n": 1}']}))
    assert deliver(pipeline) == 1
    assert (pipeline.audit().verdict, len(dead_letters(pipeline))) == (Verdict.HELD, 1)
    orders.sql("DROP INDEX refusing")
    (retry if again else drop)(pipeline)
    report = pipeline.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(0, int(again), earlier=int(again))), report.unknowns
    full = pipeline.audit(full=True)
    if again:
        assert (full.verdict, full.counts) == (Verdict.HELD, replace(clean(3), reordered=1))
        orders.sql(DELETE.format("not"))
        assert pipeline.audit(full=True).breaches == [
            "1 records are lost but only 0 were recorded as given up; the other 1 are unaccounted for"
        ]
    else:
        assert (full.verdict, full.counts.lost) == (Verdict.UNKNOWN, 1)
        assert "the lost records may be dead letters" in full.unknowns[0]


def test_dead_letters_of_one_sink_excuse_no_loss_of_another(tmp_path: Path) -> None:
    orders = Orders(tmp_path, guarantee="at_most_once")
    orders.sql(
        "CREATE TABLE orders (key BLOB, value BLOB)",
        "CREATE TABLE refuses (key BLOB, value BLOB)",
        "CREATE INDEX refusing ON refuses (json_extract(CAST(value AS TEXT), '$.n'))",
    )
    pipeline = Pipeline(
        name="orders",
        guarantee="at_most_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "log"), startingOffsets="earliest"),
        transform=delivered.arrow(select=["key", "value"]),
        sinks=[delivered.sqlite(str(tmp_path / "orders.db"), n, name=n) for n in ("orders", "refuses")],
        on_bad_row="dead_letter",
        dead_letter=delivered.files(str(tmp_path / "letters"), fileFormat="parquet"),
    )
    append(str(tmp_path / "log"), pa.table({"key": [b"k"] * 3, "value": [b"{}", b"not", b'{"n": 1}']}))
    assert deliver(pipeline) == 1
    sinks, guarantee = pipeline.spec.open(), Guarantee.AT_MOST_ONCE
    still_open = {}
    for member in sinks.members[:2]:
        scope = Scope("orders", member.name, read_view(str(tmp_path / "checkpoint")).incarnation)
        ledger = read_ledger(member.sink, scope, guarantee, sinks, sinks.members[-1].name)
        still_open[member.name] = count_open(sinks, scope, ledger)
    assert still_open == {"orders": 0, "refuses": 1}


@pytest.mark.parametrize(
    ("starts", "missing"),
    [(["a", "a b"], 1), (["a b", "a", "a b"], 2), (["a b", "a, no batch", "a b"], 0)],
    ids=["added", "returned", "no batch without it"],
)
def test_batches_without_a_sink_are_not_lost_there(tmp_path: Path, starts: list[str], missing: int) -> None:
    """Regression: rows of batches before a sink was added counted as lost."""
    orders = Orders(tmp_path)
    for names in starts:
        pipeline = Pipeline(
            name="orders",
            guarantee="at_least_once",
            checkpoint=tmp_path / "checkpoint",
            source=delivered.log(str(tmp_path / "log"), startingOffsets="earliest"),
            transform=delivered.arrow(select=["key", "value"]),
            sinks=[
                delivered.sqlite(str(tmp_path / f"{name}.db"), name, name=name, ifNotExists=True)
                for name in names.partition(",")[0].split()
            ],
        )
        for _ in range(2):
            record_query(pipeline)
        if "no batch" not in names:
            orders.send()
            assert deliver(pipeline) == 1
    report = pipeline.audit(sink="b", full=True)
    assert report.verdict is (Verdict.UNKNOWN if missing else Verdict.HELD), report
    assert ("did not have this sink" in str(report.unknowns)) is bool(missing)
    assert pipeline.audit(sink="a").verdict is Verdict.HELD
    orders.send()
    assert deliver(pipeline) == 1
    assert pipeline.audit(sink="b").verdict is Verdict.HELD


def _without_five(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.not_equal(batch["value"], b"5"))


def test_what_source_and_sink_no_longer_hold_is_not_held(orders: Orders) -> None:
    orders.run()
    orders.sql(DELETE.format(5))
    orders.transform = _without_five
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, clean(ROWS - 1))
    assert "handed 1 more records to the sink" in report.unknowns[0]


def test_a_batch_that_gave_up_records_excuses_no_loss_of_another(tmp_path: Path) -> None:
    """Of what it gave up, half is there."""
    orders = Orders(tmp_path, guarantee="at_most_once")
    orders.send()
    with pytest.raises(RuntimeError):
        deliver(orders.pipeline(), half)
    deliver(orders.pipeline())
    orders.run()
    held = orders.audit(full=True)
    assert (held.verdict, held.given_up > held.counts.lost > 0) == (Verdict.HELD, True), held
    orders.sql(DELETE.format(25))
    report = orders.audit(full=True)
    assert report.given_up > report.counts.lost
    assert report.breaches == ["1 of the lost records are of batches that gave up none"]


def _numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([batch.column("value").cast(pa.string()).cast(pa.int64())], names=["n"])


def _marked_too(batch: pa.RecordBatch) -> pa.RecordBatch:
    numbers = pa.array([int(v.lstrip(b"x")) for v in batch["value"].to_pylist()], pa.int64())
    return pa.RecordBatch.from_arrays([numbers], names=["n"])


@pytest.mark.parametrize("seals", [False, True], ids=["unsealed", "sealed"])
def test_rows_of_dead_letters_of_a_fixed_function_are_not_foreign(tmp_path: Path, seals: bool) -> None:
    """Their batch ran with the transform that failed for them."""

    def pipeline(function: Any) -> Pipeline:
        return Orders(tmp_path, guarantee="at_most_once").pipeline(
            transform=delivered.arrow(function),
            on_bad_row="dead_letter",
            dead_letter=delivered.files(str(tmp_path / "letters"), fileFormat="parquet"),
            audit={"own": "true"},
        )

    append(str(tmp_path / "log"), pa.table({"key": [b"k"] * 3, "value": [b"1", b"x2", b"x3"]}))
    assert deliver(pipeline(_numbers)) == 1
    assert not seals or pipeline(_numbers).audit().verdict is Verdict.HELD
    fixed = pipeline(_marked_too)
    assert retry(fixed).settled.total() == 2
    report = fixed.audit()
    assert (report.verdict, report.counts.unexpected) == (Verdict.UNKNOWN, 2), report.breaches
    assert "retries wrote 2 to the sink" in report.unknowns[-1]
    Orders(tmp_path).sql("INSERT INTO orders VALUES (4)")
    assert fixed.audit(full=True).breaches == ["3 records in the sink were never sent"]


@pytest.mark.matrix
def test_a_copy_is_found_although_no_batch_is_new(orders: Orders) -> None:
    orders.run()
    orders.audit()
    orders.sql(COPY.format(3))
    report = orders.audit()
    assert report.breaches == ["1 records are duplicated; exactly_once promises none"]
    assert len(orders.seals()) == 1, "there is no batch that a seal could be of"
    orders.run()
    assert orders.audit().counts.duplicated == 1
    assert states(orders)[-1] == (1, 1, Verdict.BROKEN, True)


def crash(monkeypatch: pytest.MonkeyPatch, point: str, nth: int = 1) -> None:
    """Stop an audit at a step, as SIGKILL would."""
    seen: list[str] = []

    def handler(reached: str, _: dict[str, Any]) -> None:
        seen.append(reached)
        if seen.count(point) == nth and reached == point:
            raise KeyboardInterrupt(point)

    monkeypatch.setattr(step, "_handler", handler)


@pytest.mark.parametrize(
    "point", sweep(["audit.read:after", "audit.seal:before", "audit.seal:after"], "audit.seal:before".__eq__)
)
def test_a_killed_audit_leaves_no_half_seal(orders: Orders, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    orders.run()
    orders.audit()
    orders.run()
    with monkeypatch.context() as patched:
        crash(patched, point)
        with pytest.raises(KeyboardInterrupt):
            orders.audit()
    sealed = point == "audit.seal:after"
    assert len(orders.seals()) == 1 + sealed
    again = orders.audit()
    assert (again.verdict, again.counts) == (Verdict.HELD, clean(0 if sealed else ROWS)), again
    assert [s[:3] for s in states(orders)] == [(0, 0, Verdict.HELD), (1, 1, Verdict.HELD)]


def test_of_two_audits_at_once_one_seals(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.run()
    reports: list[AuditReport] = []

    def meanwhile(reached: str, _: dict[str, Any]) -> None:
        if reached == "audit.seal:before" and not reports:
            reports.append(AuditReport("orders", "orders", Guarantee.EXACTLY_ONCE))
            reports[0] = orders.audit()

    with monkeypatch.context() as patched:
        patched.setattr(step, "_handler", meanwhile)
        loser = orders.audit()
    (winner,) = reports
    assert winner.verdict is loser.verdict is Verdict.HELD
    assert winner.continuation is not None and loser.continuation is not None
    assert (len(winner.continuation.seals), loser.continuation.seals) == (1, ())
    assert "another audit has sealed these batches meanwhile" in loser.continuation.not_sealed
    assert "not sealed: another audit" in str(loser)
    assert len(orders.seals()) == 1
    orders.run()
    assert orders.audit().counts == clean(ROWS)


@pytest.mark.matrix
def test_a_new_checkpoint_begins_a_new_part_of_the_chain(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    orders.run()
    replaced = replace(orders, checkpoint="checkpoint-2")
    replaced.run(latest=True)
    report = replaced.audit()
    assert report.counts.earlier == ROWS, report
    assert replace(report.counts, earlier=0, delivered=ROWS) == clean(ROWS)
    assert states(orders) == [(0, 1, Verdict.HELD, True), (2, 2, Verdict.UNKNOWN, False), (0, 0, Verdict.HELD, True)]
    assert report.verdict is Verdict.UNKNOWN
    assert any("their checkpoint was replaced before they were audited" in u for u in report.unknowns)
    replaced.run()
    held = replaced.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS)), held
    assert replaced.seals()[-1].total.counts == clean(2 * ROWS)


def refused(report: AuditReport, what: str) -> None:
    """The audit proves nothing, says why, and adds no seal."""
    (reason,) = report.unknowns
    assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, 3)
    assert what in reason, reason
    assert "--full" in reason


def test_a_ledger_restored_from_an_older_copy_is_behind_its_seals(orders: Orders) -> None:
    """Its decisions alone, as where seals are kept by other means; then decisions and seals together."""
    orders.run(2)
    orders.audit()
    shutil.copy(orders.folder / "orders.db", orders.folder / "older.db")
    orders.run(2)
    orders.record(orders.audit())
    shutil.copy(orders.folder / "orders.db", orders.folder / "newer.db")
    orders.sql("DELETE FROM _delivered_decision WHERE batch > 2")
    refused(orders.audit(), "Seal 1 of sink 'orders' ends with batch 3, and the newest batch")
    shutil.copy(orders.folder / "older.db", orders.folder / "orders.db")
    refused(orders.audit(), "records seal 1 of sink 'orders', and the newest one in the ledger is 0")
    shutil.copy(orders.folder / "newer.db", orders.folder / "orders.db")
    assert orders.audit().verdict is Verdict.HELD


@pytest.mark.matrix
def test_a_ledger_that_went_on_from_an_older_copy_differs_from_its_seals(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    decisions = 'UPDATE _delivered_decision SET decision = replace(decision, \'"total":"40:\', \'"total":"39:\')'
    orders.sql(decisions)
    orders.run()
    refused(orders.audit(), "Seal 0 of sink 'orders' and the ledger differ on batch 1: the seal counts 40 records")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE {} SET seal = replace(seal, '\"lost\":0', '\"lost\":1') WHERE number = 1", "has another hash"),
        ("UPDATE {} SET seal = replace(seal, '\"lost\":0', '\"lost\":1') WHERE number = 0", "seal 0 has changed"),
        ("DELETE FROM {} WHERE number = 1", "and the newest one in the ledger is 0"),
        ("UPDATE {} SET seal = 'x' WHERE number = 1", "not hold"),
    ],
)
def test_changed_and_missing_seals_are_found(orders: Orders, change: str, says: str) -> None:
    for _ in range(2):
        orders.run()
        orders.record(orders.audit())
    orders.sql(change.format("_delivered_seal"))
    orders.run()
    refused(orders.audit(), says)
    full = orders.audit(full=True)
    assert (full.verdict, full.counts) == (Verdict.HELD, clean(3 * ROWS))


@pytest.mark.matrix
def test_a_row_removed_from_the_sealed_part_is_reported(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    orders.sql(DELETE.format(3))
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, clean(ROWS))
    assert "what seal 0 and earlier ones proved is no longer what the sink holds" in report.unknowns[0]
    full = orders.audit(full=True)
    assert full.breaches == ["1 records are lost; exactly_once promises none"]
    assert [s[:3] for s in states(orders)] == [
        (0, 1, Verdict.HELD),
        (2, 2, Verdict.UNKNOWN),
        (0, 2, Verdict.BROKEN),
    ]


@pytest.mark.matrix
def test_rows_of_a_table_made_anew_are_no_duplicates(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    orders.sql("CREATE TABLE kept AS SELECT * FROM orders", "DROP TABLE orders", "ALTER TABLE kept RENAME TO orders")
    report = orders.audit()
    assert (report.verdict, report.counts.unexpected) == (Verdict.UNKNOWN, 2 * ROWS)
    assert any("deleted and recreated" in u for u in report.unknowns)


@pytest.mark.matrix
def test_a_clock_that_jumps_orders_nothing(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.run()
    monkeypatch.setattr(time, "time_ns", lambda: 4_000_000_000 * 10**9)
    orders.audit()
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, clean(ROWS))
    assert [s.sealed_at_ms for s in orders.seals()] == [4_000_000_000_000, 1000]


@pytest.mark.matrix
def test_a_log_made_anew_is_told_by_its_source(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    shutil.rmtree(orders.folder / "log")
    orders.sent = 0
    orders.send()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts()), "no batch has read from the new log"
    orders.sent = 2 * ROWS
    report = orders.audit(full=True)
    assert report.verdict is Verdict.UNKNOWN
    assert len(orders.seals()) == 1


@pytest.mark.matrix
def test_a_seal_from_now_says_that_nobody_looked(orders: Orders) -> None:
    orders.run(2)
    report = orders.audit(from_now=True)
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts())
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False)]
    orders.run()
    held = orders.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS))
    assert "never audited: batches 0 to 1, 40 records: not audited before" in str(held)
    total = orders.seals()[-1].total
    assert (total.counts, orders.seals()[-1].account.total.count) == (clean(ROWS), 3 * ROWS)
    again = orders.audit(since=2)
    assert (again.verdict, again.counts) == (Verdict.HELD, clean(ROWS))
    full = orders.audit(full=True)
    assert (full.verdict, full.counts) == (Verdict.HELD, clean(3 * ROWS))
    assert "never audited" not in str(full)
    assert [s[:2] for s in states(orders)] == [(0, 1), (2, 2), (2, 2), (0, 2)]
    assert orders.seals()[-1].total.counts == clean(3 * ROWS)


def test_a_seal_that_does_not_say_where_it_stopped_is_not_continued(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink had no positions then."""
    orders.run()
    orders.audit()
    orders.run()
    with monkeypatch.context() as patched:
        patched.setattr(SqliteScan, "position", lambda _: None)
        assert orders.audit().counts == clean(2 * ROWS)
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, clean(2 * ROWS)), report
    assert [s[:3] for s in states(orders)] == [(0, 0, Verdict.HELD), (0, 1, Verdict.HELD), (1, 2, Verdict.HELD)]


@pytest.mark.matrix
def test_since_a_batch_that_is_not_there(orders: Orders) -> None:
    orders.run(2)
    orders.audit()
    (reason,) = orders.audit(since=2).unknowns
    assert "Batch 2 is after the newest decided batch of sink 'orders', 1" in reason


def test_batches_that_the_source_dropped_are_the_only_unknown_ones(orders: Orders) -> None:
    orders.run()
    orders.audit()
    orders.run(3)
    orders.drop(batch=2)
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts(ROWS, 3 * ROWS, earlier=2 * ROWS)), report
    (reason,) = report.unknowns
    assert reason.startswith("batches 1 to 2 were not compared: the source had dropped their records.")
    assert "it holds 40, all of them by count and fingerprint" in reason
    assert states(orders) == [(0, 0, Verdict.HELD, True), (1, 2, Verdict.UNKNOWN, False), (3, 3, Verdict.HELD, True)]
    orders.run()
    held = orders.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS))
    assert "never audited: batches 1 to 2, 40 records: the source had dropped their records" in str(held)
    last = orders.seals()[-1]
    assert last.total.counts == clean(3 * ROWS)
    assert last.account.total.count - last.total.ledger.total.count == 2 * ROWS


@pytest.mark.matrix
def test_rows_that_are_missing_of_dropped_batches_are_lost(orders: Orders) -> None:
    assert audit_without(orders, 25).verdict is Verdict.BROKEN
    assert states(orders) == [(0, 0, Verdict.HELD, True), (1, 1, Verdict.BROKEN, False), (2, 2, Verdict.HELD, True)]


@pytest.mark.matrix
def test_what_is_lost_after_dropped_batches_is_not_theirs(orders: Orders) -> None:
    assert audit_without(orders, 45).breaches == ["1 records are lost; exactly_once promises none"]
    assert states(orders)[1:] == [(1, 1, Verdict.UNKNOWN, False), (2, 2, Verdict.BROKEN, True)]


def audit_without(orders: Orders, value: int) -> AuditReport:
    """Of batches 1 and 2, after a row of them is lost, and the source has dropped the records of batch 1."""
    orders.run()
    orders.audit()
    orders.run(2)
    orders.sql(DELETE.format(value))
    orders.drop(batch=1)
    return orders.audit()


@pytest.mark.matrix
def test_an_audit_killed_between_its_two_seals(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.run()
    orders.audit()
    orders.run(3)
    orders.drop(batch=2)
    with monkeypatch.context() as patched:
        crash(patched, "audit.seal:before", 2)
        with pytest.raises(KeyboardInterrupt):
            orders.audit()
    assert states(orders) == [(0, 0, Verdict.HELD, True), (1, 2, Verdict.UNKNOWN, False)]
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts(ROWS, 3 * ROWS, earlier=2 * ROWS)), report
    assert states(orders)[2:] == [(3, 3, Verdict.HELD, True)]
    orders.run()
    held = orders.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS))
    assert orders.seals()[-1].total.counts == clean(3 * ROWS)


@pytest.mark.matrix
def test_a_full_audit_keeps_what_was_proved_of_dropped_batches(orders: Orders) -> None:
    orders.run()
    orders.audit()
    orders.run(2)
    orders.audit()
    orders.run()
    orders.drop(batch=0)
    full = orders.audit(full=True)
    assert (full.verdict, full.counts) == (Verdict.HELD, clean(3 * ROWS)), full
    orders.drop(batch=1)
    orders.run()
    full = orders.audit(full=True)
    assert (full.verdict, full.counts) == (Verdict.HELD, clean(2 * ROWS)), full
    assert [s[:2] for s in states(orders)] == [(0, 0), (1, 2), (1, 3), (3, 4)]
    assert orders.seals()[-1].total.counts == clean(5 * ROWS)
    assert [r.batches for r in read_sealed([s.text for s in orders.seals()]).ranges] == ["0 to 4"]


@pytest.mark.matrix
def test_a_full_audit_that_found_damage_is_not_passed_over(orders: Orders) -> None:
    """Neither by an audit that continues from a seal before it, nor by a full one that can read less."""
    for _ in range(2):
        orders.run()
        orders.audit()
    orders.sql(DELETE.format(3))
    assert orders.audit(full=True).counts.lost == 1
    orders.run()
    since = orders.audit(since=1)
    assert (since.verdict, since.counts.sent, since.counts.lost) == (Verdict.BROKEN, 3 * ROWS, 1), since
    orders.drop(batch=1)
    full = orders.audit(full=True)
    assert full.continuation is not None
    assert [(u["state"], u["first"], u["last"]) for u in full.continuation.unproved] == [("broken", 0, 2)]
    assert read_sealed([s.text for s in orders.seals()]).verdict is Verdict.BROKEN


@pytest.mark.matrix
def test_everything_was_dropped(orders: Orders) -> None:
    orders.run(2)
    orders.send()  # a log keeps its end
    orders.drop(batch=1)
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, Counts(0, 2 * ROWS, earlier=2 * ROWS)), report
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False)]
    assert deliver(orders.pipeline()) == 1
    held = orders.audit()
    assert (held.verdict, held.counts) == (Verdict.HELD, clean(ROWS)), held


@pytest.mark.matrix
def test_batches_that_are_decided_while_the_cut_is_sought(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a record of the last sealed batch, which lies before the cut, is a duplicate nevertheless."""
    orders.run()
    position = SqliteScan.position

    def moving(self: SqliteScan) -> Any:
        at = position(self)
        orders.run()
        return at

    with monkeypatch.context() as patched:
        patched.setattr(SqliteScan, "position", moving)
        report = orders.audit()
    assert report.verdict is Verdict.HELD, report
    (seal,) = orders.seals()
    assert seal.settled == seal.last - 1
    assert seal.sink_end is not None and seal.sink_read is not None
    assert seal.sink_end["rowid"] < seal.sink_read["rowid"]
    batches, sealed = orders.sent // ROWS, seal.last + 1
    held = orders.audit()
    assert (held.verdict, held.counts.sent) == (Verdict.HELD, (batches - sealed) * ROWS), held
    assert held.counts.lost == held.counts.duplicated == held.counts.unexpected == 0


def unsharp(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Seal:
    """Audit while batches are decided."""
    position, left = SqliteScan.position, [10]

    def moving(self: SqliteScan) -> Any:
        at = position(self)
        if left[0]:
            left[0] -= 1
            orders.run()
        return at

    with monkeypatch.context() as patched:
        patched.setattr(SqliteScan, "position", moving)
        assert orders.audit().verdict is Verdict.HELD
    (seal,) = orders.seals()
    assert seal.settled < seal.last
    return seal


@pytest.mark.matrix
def test_equal_rows_at_an_unsharp_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = Keys(tmp_path)
    orders.run()
    unsharp(orders, monkeypatch)
    orders.run()
    held = orders.audit()
    assert held.verdict is Verdict.HELD, held
    orders.sql("DELETE FROM orders WHERE rowid = (SELECT max(rowid) FROM orders)")
    orders.run()
    lost = orders.audit()
    assert lost.verdict is not Verdict.HELD


@pytest.mark.parametrize("record", sweep(["first", "last"], "first".__eq__))
def test_a_copy_of_a_record_at_an_unsharp_cut(orders: Orders, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    """Of the batch that was decided while the cut was sought: its rows lie behind the position that was read first."""
    orders.run()
    seal = unsharp(orders, monkeypatch)
    number = {"first": seal.settled * ROWS, "last": (seal.last + 1) * ROWS - 1}[record]
    orders.sql(COPY.format(number))
    orders.run()
    report = orders.audit()
    assert report.breaches == ["1 records are duplicated; exactly_once promises none"], report
    assert report.counts.lost == report.counts.unexpected == 0


@pytest.mark.matrix
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_a_batch_in_flight_under_a_weaker_guarantee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarantee: str
) -> None:
    """Its rows show before its decision: no cut is possible, and the next audit reads the sink from the one before."""
    monkeypatch.setattr(sealing, "_CUT_WAIT_S", 0.0)
    orders = Orders(tmp_path, guarantee=guarantee)
    orders.run(2)
    assert orders.audit().verdict is Verdict.HELD
    orders.run()
    orders.send()
    with pytest.raises(RuntimeError, match="half"):
        deliver(orders.pipeline(), half)
    report = orders.audit()
    assert report.verdict is Verdict.HELD, report
    first, second = orders.seals()
    assert (second.last, second.settled, second.sink_end) == (2, first.settled, first.sink_end)
    deliver(orders.pipeline())
    orders.run()
    report = orders.audit()
    expected = 2 * ROWS
    assert (report.verdict, report.counts.sent) == (Verdict.HELD, expected), report
    third = orders.seals()[-1]
    assert (third.first, third.last, third.settled) == (3, 4, 4)
