"""The column of the batch, in PostgreSQL and MariaDB: what is written to it, and audits that continue by it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.orders import ROWS, Orders, clean, states
from tests.support.sinks import SCHEMA, SHARDS, SINKS, Rig, offsets
from tests.support.sweeps import sweep

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.postgres import read
from delivered.contract.sink import Changes
from delivered.engine import decide
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.kits.sql import batches
from delivered.kits.sql.batches import BATCHES
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.model.identity import Work
from delivered.model.rows import Rows
from delivered.model.work import Decision, Ok
from delivered.pipeline import registry

SYSTEMS = ["postgres", "mysql"]
_names = itertools.count()
BOTH = [f"{system}-two-phase-by-batch" for system in SYSTEMS]
ON_POSTGRES, ON_MYSQL = (sweep(SYSTEMS, system.__eq__) for system in SYSTEMS)


@pytest.fixture(autouse=True)
def looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_find_others", cache(registry._find_others))


@pytest.fixture(params=SYSTEMS)
def server(request: pytest.FixtureRequest) -> Any:
    found = request.getfixturevalue(request.param)
    if request.param == "postgres":
        request.addfinalizer(found.roll_back_prepared)
    return found


@dataclass
class TableOrders(Orders):
    """From a log into a table that the sink creates."""

    server: Any = None
    name: str = field(default_factory=lambda: f"orders{next(_names)}")
    columns: dict[str, str] = field(default_factory=lambda: {"batchColumn": "batch"})

    def __post_init__(self) -> None:
        self.table = self.server.table(None)

    def pipeline(self, **changes: Any) -> Pipeline:
        connect = delivered.postgres if self.server.system == "postgres" else delivered.mysql
        options = {"ifNotExists": True, **self.columns}
        return Pipeline(
            **changes,
            name=self.name,
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.log(str(self.folder / "log"), startingOffsets="earliest"),
            sinks=[connect(self.server.url, self.table, **options)],
        )

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.server.execute(statement.format(t=self.table))
        return rows

    def copy(self, value: int, columns: str = "*") -> None:
        into = "" if columns == "*" else "(value)"
        self.execute(f"INSERT INTO {{t}} {into} SELECT {columns} FROM {{t}} WHERE value = '{value}'")

    def numbers(self) -> list[int | None]:
        return [n for (n,) in self.execute("SELECT DISTINCT batch FROM {t} ORDER BY batch")]


@pytest.fixture
def orders(server: Any, tmp_path: Path) -> TableOrders:
    return TableOrders(tmp_path, server=server)


@pytest.mark.parametrize("server", ON_MYSQL, indirect=True)
def test_an_audit_reads_what_is_new_and_finds_damage_there(orders: TableOrders) -> None:
    orders.run(2)
    first = orders.audit()
    assert (first.verdict, first.counts) == (Verdict.HELD, clean(2 * ROWS)), first.unknowns
    orders.run(2)
    orders.execute(f"DELETE FROM {{t}} WHERE value = '{2 * ROWS + 1}'")
    orders.copy(3 * ROWS + 1)
    orders.copy(5, "value")  # of a sealed record, by a client that does not know the column
    damaged = orders.audit()
    assert damaged.counts == Counts(2 * ROWS, 2 * ROWS + 1, lost=1, duplicated=1, altered=0, unexpected=1), damaged
    orders.run()
    assert orders.audit().counts == clean(ROWS)
    assert states(orders) == [
        (0, 1, Verdict.HELD, True),
        (2, 3, Verdict.BROKEN, True),
        (4, 4, Verdict.HELD, True),
    ]
    assert sorted(n for n in orders.numbers() if n is not None) == [0, 1, 2, 3, 4]
    sink = orders.pipeline().sinks[0].sink()
    assert "batch" not in sink.scan().schema().names


@pytest.mark.parametrize("server", ON_MYSQL, indirect=True)
def test_rows_removed_from_or_added_to_sealed_batches(orders: TableOrders) -> None:
    orders.run(3)
    assert orders.audit().verdict is Verdict.HELD
    orders.execute("DELETE FROM {t} WHERE value = '25'")
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.UNKNOWN, clean(ROWS))
    assert any(f"batch 1: 1 of {ROWS} rows were deleted" in text for text in report.unknowns), report.unknowns
    orders.copy(3)
    added = orders.audit()
    assert added.verdict is Verdict.UNKNOWN
    assert any(f"batch 0: 1 rows were added among {ROWS}" in text for text in added.unknowns), added.unknowns
    full = orders.audit(full=True)
    assert full.counts == Counts(4 * ROWS, 4 * ROWS, lost=1, duplicated=1)


@pytest.mark.parametrize("server", ON_POSTGRES, indirect=True)
def test_checkpoints_and_pipelines_that_share_a_table(orders: TableOrders) -> None:
    other = replace(orders, name=f"{orders.name}-other", folder=orders.folder / "other")
    other.table = orders.table
    orders.run(2)
    other.run(3)
    both = orders.audit()
    assert both.counts == Counts(2 * ROWS, 5 * ROWS, unexpected=3 * ROWS), "as without the column"
    orders.run()
    assert orders.audit().counts == clean(ROWS)
    other.run()
    assert orders.audit().counts == Counts(0, ROWS, unexpected=ROWS), "rows of the other one alone"
    orders.checkpoint = "second"
    orders.run(2, latest=True)
    report = orders.audit()
    assert report.counts == Counts(2 * ROWS, 3 * ROWS, unexpected=ROWS), report
    orders.run()
    assert (orders.audit().verdict, orders.audit().counts) == (Verdict.HELD, Counts()), states(orders)
    assert orders.numbers() == [
        *(0, 1, 2),
        *(BATCHES + n for n in range(4)),
        *(2 * BATCHES + n for n in range(3)),
    ]


@pytest.mark.parametrize("server", ON_POSTGRES, indirect=True)
def test_a_writer_gets_a_number_that_no_other_had(orders: TableOrders) -> None:
    """Also if only the ledger knows the other one, or only the table."""
    orders.run(2)
    orders.execute("TRUNCATE TABLE {t}")
    orders.checkpoint = "second"
    orders.run(1, latest=True)
    assert orders.numbers() == [BATCHES]
    elsewhere = replace(orders, name=f"{orders.name}-elsewhere", folder=orders.folder / "elsewhere")
    elsewhere.table = orders.table
    elsewhere.columns = {**orders.columns, "ledgerSchema": "delivered_elsewhere"}
    elsewhere.run(2)
    assert orders.numbers() == [BATCHES, 2 * BATCHES, 2 * BATCHES + 1]
    assert orders.audit().counts.unexpected == 2 * ROWS
    assert orders.audit().counts == Counts(), "rows by a ledger elsewhere lie before a position as well"


@pytest.mark.parametrize("server", ON_MYSQL, indirect=True)
def test_a_table_without_the_column_is_refused_with_what_adds_it(server: Any, tmp_path: Path) -> None:
    table = server.table()
    plain = server.sink(table)
    rig = Rig(plain)
    rig.run(0)
    sink = server.sink(table, batchColumn="batch")
    (refusal,) = sink.preflight(Guarantee.EXACTLY_ONCE)
    statement = f"ALTER TABLE {table} ADD COLUMN batch bigint"
    index = f"CREATE INDEX rows_by_batch ON {table} (batch)"
    assert refusal.refuses and refusal.code == "BATCH_COLUMN"
    assert f"{statement}; then {index}" in str(refusal)
    server.execute(statement)
    (advice,) = sink.preflight(Guarantee.EXACTLY_ONCE)
    assert not advice.refuses and index in str(advice)
    server.execute(index)
    assert list(sink.preflight(Guarantee.EXACTLY_ONCE)) == []
    numbered = Rig(sink, rig.pipeline)
    numbered.run(1)
    scan = sink.scan()
    at = json.loads(json.dumps(scan.position()))
    assert (at["batches"], at["unnumbered"]) == ({"0": 1}, True), "earlier rows have no number"
    facts = json.loads(json.dumps(scan.kept(at)))
    numbered.run(2)
    assert scan.changes(at, facts) == Changes()
    assert sum(b.num_rows for piece in scan.slices(at) for b in scan.read(piece)) == 100
    server.execute(f"INSERT INTO {table} (value) VALUES ('late')")
    changes = scan.changes(at, facts)
    assert changes.altered == (f"table {table}, rows without a number: 1 rows were added among 100",)
    assert not changes.continues
    server.execute(f"ALTER TABLE {table} DROP COLUMN batch")
    changes = scan.changes(at, facts)
    assert "columns were removed: batch" in changes.altered[0] and not changes.continues


def test_a_ledger_whose_name_looks_like_a_value(server: Any) -> None:
    options = {"ifNotExists": "true", "batchColumn": "batch", "ledgerSchema": "led%ger :x"}
    sink = server.sink(server.table(None), **options)
    assert not [f for f in sink.preflight(Guarantee.EXACTLY_ONCE) if f.refuses]
    Rig(sink).run(0)
    assert sink.scan().position()["batches"] == {"0": 0}


def test_a_column_that_cannot_hold_the_batch(server: Any) -> None:
    binary = "bytea" if server.system == "postgres" else "longblob"
    key = "key" if server.system == "postgres" else "`key`"
    table = server.table(f"{key} {binary}, value {binary}, batch bigint NOT NULL")
    sink = server.sink(table, batchColumn="batch")
    sink.preflight(Guarantee.EXACTLY_ONCE)
    check = sink.target_check()
    check(SCHEMA)
    Rig(sink).run(0)
    check(SCHEMA)
    table = server.table(f"{key} {binary}, value {binary}, batch integer")
    (refusal,) = server.sink(table, batchColumn="batch").preflight(Guarantee.EXACTLY_ONCE)
    assert refusal.refuses and "a batchColumn is bigint" in str(refusal)
    with pytest.raises(UsageError, match="COLUMN_NAME"):
        server.sink(table, batchColumn="value").check_schema(SCHEMA)


@pytest.mark.parametrize("name", sweep(BOTH, BOTH[0].__eq__))
def test_shards_that_show_one_after_another_lie_behind(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that is decided, and of one that is not, under a weaker guarantee: another pipeline's, for example."""
    rig = Rig(SINKS[name](request))
    scan = rig.sink.scan()
    rig.run(0)
    decision = decided(rig, monkeypatch)
    at = scan.position()
    assert at is not None and at["batches"] == {"0": 0}
    committer = rig.sink.committer(rig.scope)
    first, second = decision.participants
    assert committer.commit(Work(rig.scope, 1, first.shard), first) == Ok(None)
    assert scan.position() == at, "one of two shards shows"
    facts = scan.kept(at)
    assert committer.commit(Work(rig.scope, 1, second.shard), second) == Ok(None)
    committer.close()
    assert scan.changes(at, facts) == Changes()
    assert scan.position()["batches"] == {"0": 1}  # type: ignore[index]
    weak = rig.plan(rig.context("weak", Guarantee.AT_LEAST_ONCE), 2)
    end = scan.position()
    facts = scan.kept(end)
    for shard in range(SHARDS):
        write_shard(rig.sinks, weak, shard, 0, iter([Rows(rig.rows(2, shard))]), SCHEMA)
        assert (scan.position(), scan.changes(end, facts)) == (end, Changes())
    assert sum(b.num_rows for piece in scan.slices(end) for b in scan.read(piece)) == 100
    other = Rig(rig.sink)  # whose first batch is in flight
    in_flight = other.plan(other.context("weak", Guarantee.AT_LEAST_ONCE), 0)
    write_shard(other.sinks, in_flight, 0, 0, iter([Rows(other.rows(0, 0))]), SCHEMA)
    assert (scan.position(), scan.changes(end, facts)) == (end, Changes())


@pytest.mark.parametrize("name", sweep(BOTH, BOTH[1].__eq__))
def test_a_shard_that_is_written_again_has_the_number_of_its_batch(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(SINKS[name](request))
    rig.run(0)
    decision = decided(rig, monkeypatch)
    for prepared in decision.participants:  # as if they had timed out
        assert rig.context().committers.abort(prepared) == Ok(None)
    rig.run(1, rig.context("second"))
    assert counts(rig, request) == [(0, 100), (1, 100)]
    assert rig.visible() == rig.expected(0, 1)


def decided(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Decision:
    """Batch 1, whose driver was killed before it applied the decision."""
    context = rig.context()
    messages = rig.write(rig.plan(context, 1))
    with monkeypatch.context() as killed:
        killed.setattr(decide, "_apply", lambda *_: None)
        decision = commit_batch(context, 1, offsets(1), messages)
    assert decision is not None
    return decision


def counts(rig: Rig, request: pytest.FixtureRequest) -> list[tuple[int, int]]:
    options = rig.sink.options
    server: Any = request.getfixturevalue("postgres" if "postgres" in options.url else "mysql")
    rows = server.execute(f"SELECT batch, count(*) FROM {options.table_text} GROUP BY batch ORDER BY batch")
    return [(int(batch), int(n)) for batch, n in rows]


ROWS_OF_KEYS = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.int64()), pa.field("text", pa.string())])


@pytest.mark.parametrize("mechanism", sweep(["one_transaction", "two_phase"], "one_transaction".__eq__))
@pytest.mark.parametrize("server", ON_MYSQL, indirect=True)
def test_upserts_and_dead_letters(server: Any, mechanism: str) -> None:
    """A row has the number of the batch that wrote it last; a dead letter holds the columns of the rows alone."""
    options = {"ifNotExists": "true", "batchColumn": "batch", "keyColumns": "id", "mechanism": mechanism}
    sink = server.sink(server.table(None), mode="upsert", versionColumn="v", **options)
    rig = Rig(sink)

    def rows(*ids: int, v: int) -> list[pa.RecordBatch]:
        found = [{"id": i, "v": v, "text": "x"} for i in ids]
        return [pa.RecordBatch.from_pylist(found, ROWS_OF_KEYS)]

    rig.run_rows(0, rows(1, 2, 3, v=1))
    rig.run_rows(1, rows(2, 4, v=2))
    rig.run_rows(2, rows(3, v=0))
    found = server.execute(f"SELECT id, batch FROM {sink.options.table_text} ORDER BY id")
    assert found == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert sink.scan().position() is None
    first = server.sink(server.table(None), mode="insert", onConflict="dead_letter", **options)
    rig = Rig(first)
    rig.run_rows(0, rows(1, 2, v=1))
    rig.run_rows(1, rows(2, 3, v=2))
    found = server.execute(f"SELECT id, batch FROM {first.options.table_text} ORDER BY id")
    assert found == [(1, 0), (2, 0), (3, 1)]
    (letter,) = first.committer(rig.scope).dead_letters()
    assert (letter.batch, json.loads(letter.record)) == (1, {"id": 2, "v": 2, "text": "x"})


@pytest.mark.parametrize("name", sweep(BOTH, BOTH[0].__eq__))
def test_a_large_table_is_sampled(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COUNTED_MAX", 150)
    monkeypatch.setattr(batches, "HASHED_MAX", 250)
    monkeypatch.setattr(batches, "SAMPLES", 3)
    rig = Rig(SINKS[name](request))
    for batch in range(5):
        rig.run(batch)
    scan = rig.sink.scan()
    at = scan.position()
    assert at is not None
    facts = scan.kept(at)
    assert facts is not None
    assert (facts["counts"], [h[0] for h in facts["hashes"]]) == ([], [0, 2])
    server: Any = request.getfixturevalue(name.partition("-")[0])
    key = "key" if name.startswith("postgres") else "`key`"
    server.execute(f"DELETE FROM {rig.sink.options.table_text} WHERE {key} = '1-0-1'")
    assert scan.changes(at, facts) == Changes(), "no sample holds it; a full audit would find it"
    server.execute(f"DELETE FROM {rig.sink.options.table_text} WHERE {key} = '2-0-1'")
    assert "batch 2: 1 of 100 rows were deleted" in scan.changes(at, facts).altered[0]


def test_the_plan_recommends_the_column_for_large_tables(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "COUNTED_BYTES_MAX", 0)
    table = postgres.table("key bytea, value bytea, batch bigint")
    postgres.execute(f"INSERT INTO {table} VALUES ('a', 'b')")
    postgres.execute(f"CREATE INDEX ON {table} (batch)")
    (finding,) = postgres.sink(table).preflight(Guarantee.EXACTLY_ONCE)
    assert finding.code == "AUDIT_SCANS" and "batchColumn" in str(finding.next_step)
    assert list(postgres.sink(table, batchColumn="batch").preflight(Guarantee.EXACTLY_ONCE)) == []


@pytest.mark.matrix
def test_sealed_rows_that_change_and_an_emptied_table(orders: TableOrders) -> None:
    orders.run(2)
    assert orders.audit().verdict is Verdict.HELD
    orders.execute("UPDATE {t} SET value = 'x' WHERE value = '5'")
    orders.run()
    changed = orders.audit()
    assert (changed.verdict, changed.counts) == (Verdict.UNKNOWN, clean(ROWS)), changed
    assert any("batches 0 to 1: " in text and "some are others" in text for text in changed.unknowns), changed.unknowns
    orders.execute("TRUNCATE TABLE {t}")
    orders.run()
    emptied = orders.audit()
    assert (emptied.verdict, emptied.counts) == (Verdict.UNKNOWN, clean(ROWS)), emptied
    assert all(any(f"batch {n}: {ROWS} of {ROWS} rows were deleted" in t for t in emptied.unknowns) for n in range(3))
    full = orders.audit(full=True)
    assert full.counts == Counts(4 * ROWS, ROWS, lost=3 * ROWS), full


@pytest.mark.matrix
def test_rows_that_move_between_batches(orders: TableOrders) -> None:
    """Out of a sealed batch, into a new one, and to no batch."""
    orders.run(2)
    assert orders.audit().verdict is Verdict.HELD
    orders.run()
    orders.execute("UPDATE {t} SET batch = 2 WHERE value = '5'")
    moved = orders.audit()
    assert moved.verdict in (Verdict.UNKNOWN, Verdict.BROKEN)
    assert moved.counts.delivered == ROWS + 1, "a row that is read again"
    assert any("1 of " in text and "deleted" in text for text in moved.unknowns), moved.unknowns
    orders.run()
    orders.execute(f"UPDATE {{t}} SET batch = -1 WHERE value = '{3 * ROWS}'")
    assert orders.audit().counts == clean(ROWS), "rows with a number below 0 are read, as those without one"
    orders.run()
    orders.copy(4 * ROWS)
    orders.execute(f"UPDATE {{t}} SET batch = NULL WHERE value = '{4 * ROWS}'")
    with_others = orders.audit()
    assert any("rows without a number" in text for text in with_others.unknowns), with_others.unknowns


def test_a_number_of_a_batch_that_never_started(orders: TableOrders) -> None:
    """No audit would read such a row: batches between are read, and later ones once they are decided."""
    orders.run(2)
    orders.execute("INSERT INTO {t} SELECT * FROM {t} WHERE value = '5'")
    orders.execute("UPDATE {t} SET batch = 9 WHERE value = '5'")
    report = orders.audit()
    assert report.verdict is Verdict.UNKNOWN and "BATCH_COLUMN" in report.unknowns[0], report
    assert "has the number 9" in report.unknowns[0] and "is 1" in report.unknowns[0]
    assert orders.seals() == []
    orders.execute("UPDATE {t} SET batch = NULL WHERE batch = 9")
    assert orders.audit().counts == Counts(2 * ROWS, 2 * ROWS + 1, duplicated=1)


@pytest.mark.matrix
def test_a_sealed_table_that_gets_the_column_later(orders: TableOrders) -> None:
    """Positions by transactions are continued by numbers; without any, the next audit reads everything."""
    orders.columns = {}
    orders.run(2)
    assert orders.audit().verdict is Verdict.HELD
    orders.execute("ALTER TABLE {t} ADD COLUMN batch bigint")
    orders.execute("CREATE INDEX by_batch ON {t} (batch)")
    orders.columns = {"batchColumn": "batch"}
    orders.run(2)
    orders.copy(3 * ROWS + 1)
    rows = 2 * ROWS if orders.server.system == "postgres" else 4 * ROWS
    added = orders.audit()
    assert added.counts == Counts(rows, rows + 1, duplicated=1), added
    orders.run()
    assert orders.audit().counts == clean(ROWS)
    assert {*orders.numbers()} == {2, 3, 4, None}


def test_the_sink_creates_the_column_with_an_index(server: Any) -> None:
    sink = server.sink(server.table(None), ifNotExists="true", batchColumn="batch")
    Rig(sink).run(0)
    assert list(sink.preflight(Guarantee.EXACTLY_ONCE)) == []
    by = (
        "indexdef FROM pg_indexes WHERE tablename"
        if server.system == "postgres"
        else ("column_name FROM information_schema.statistics WHERE table_name")
    )
    name = sink.options.table_text.rpartition(".")[2].strip('`"')
    assert any("batch" in str(row[0]) for row in server.execute(f"SELECT {by} = '{name}'"))
