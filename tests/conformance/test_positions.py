"""Positions of sinks: what lies between two, and what someone did to the rows before one."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue, EqualTo
from pyiceberg.io.pyarrow import ArrowScan
from tests.kafka_tools import make_topic_anew
from tests.support.pulsar import PulsarTopic
from tests.support.requests import ASKED, TO_SQLITE
from tests.support.sinks import SCHEMA, SINKS, Rig, offsets, rows

from delivered.connectors.kafka import reader as kafka_reader
from delivered.contract.sink import BoundedScan, Changes
from delivered.contract.source import Offsets
from delivered.engine.decide import commit_batch
from delivered.engine.shard import fingerprint_seed, write_shard
from delivered.model.capability import CHANGES_ROWS, Guarantee
from delivered.model.errors import Refused
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.rows import Rows
from delivered.pipeline.registry import find_sink
from delivered.planner import Plan, make_plan
from delivered_lab.verify.services import wait_for

POSTGRES = ["postgres-one-transaction", "postgres-two-phase"]
EMBEDDED = ["memory-two-phase", "memory-one-transaction", "sqlite", "delta", "iceberg", "files-parquet"]
BY_BATCH = [f"{s}-{m}-by-batch" for s in ("postgres", "mysql") for m in ("one-transaction", "two-phase")]
ORDERED = [*EMBEDDED, "kafka", "rocketmq", *POSTGRES, *BY_BATCH]
QUICK = ("postgres-two-phase-by-batch", "mysql-one-transaction-by-batch")


DAY_MS = 86_400_000


def between(rig: Rig, since: Offsets | None = None, until: Offsets | None = None) -> Fingerprint:
    """Fingerprint of the rows between two positions."""
    rig.settle()
    seed, names, scan = fingerprint_seed(rig.scope), rig.sink.records(rows(0, 0)).schema.names, rig.sink.scan()
    batches = (batch for piece in scan.slices(since, until) for batch in scan.read(piece))
    return sum((fingerprint(batch, seed, names) for batch in batches), Fingerprint())


def position(rig: Rig) -> Offsets:
    rig.settle()
    found = rig.sink.scan().position()
    assert found is not None
    stored: Offsets = json.loads(json.dumps(found))
    assert stored == found
    return stored


def kept(rig: Rig, at: Offsets) -> Any:
    return json.loads(json.dumps(rig.sink.scan().kept(at)))


REMOTE = ["delta-s3", "iceberg-s3", "iceberg-rest", "files-json"]


def some(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters, of which those that are not quick are left to the matrix."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("name", some([*ORDERED, *REMOTE], *EMBEDDED, "kafka", "postgres-two-phase", *QUICK))
def test_a_position_among_staged_rows(name: str, request: pytest.FixtureRequest) -> None:
    rig = Rig(SINKS[name](request))
    assert rig.sink.capability().no_position == ""
    context = rig.context()
    rig.run(0, context)
    messages = rig.write(rig.plan(context, 1, first=False))
    at = position(rig)
    facts = kept(rig, at)
    commit_batch(context, 1, offsets(1), messages)
    middle = position(rig)
    rig.run(2)
    end = position(rig)
    assert between(rig, None, at) == rig.expected(0)
    assert between(rig, at, middle) == rig.expected(1)
    assert between(rig, at) == rig.expected(1, 2)
    assert between(rig, middle, end) == rig.expected(2)
    assert between(rig, end) == between(rig, at, at) == Fingerprint()
    assert between(rig) == rig.expected(0, 1, 2)
    assert rig.sink.scan().changes(at, facts) == Changes()
    assert rig.sink.scan().changes(end, kept(rig, end)) == Changes()


@pytest.mark.parametrize("name", some([*EMBEDDED[2:], *POSTGRES[:1]], "sqlite", "files-parquet"))
def test_a_position_between_shards_that_are_visible_at_once(name: str, request: pytest.FixtureRequest) -> None:
    rig, weak = Rig(SINKS[name](request)), Guarantee.AT_LEAST_ONCE
    plan = rig.plan(rig.context(guarantee=weak), 0)
    found = []
    for shard in range(2):
        write_shard(rig.sinks, plan, shard, 0, iter([Rows(rig.rows(0, shard))]), SCHEMA)
        found.append(position(rig))
    seed = fingerprint_seed(rig.scope)
    first, second = (fingerprint(rig.sink.records(rig.rows(0, shard)), seed) for shard in range(2))
    assert (between(rig, None, found[0]), between(rig, *found)) == (first, second)


UNORDERED = "rows of MySQL do not say when they were added; the option batchColumn has them numbered"
UPSERT = {"mode": "upsert", "keyColumns": "key"}


@pytest.mark.parametrize(
    "system", some(["sqlite", "delta", "iceberg", "mysql", "mysql-append"], "sqlite", "mysql-append")
)
def test_the_plan_names_sinks_without_positions(system: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rows_ = [pa.record_batch({"key": pa.array(["a", "b"]), "value": pa.array([1, 2])})]
    places = {
        "sqlite": {"path": str(tmp_path / "db"), "table": "t"},
        "delta": {"path": str(tmp_path / "t")},
        "iceberg": {"warehouse": str(tmp_path), "table": "shop.t"},
    }
    if system in places:
        sink: Any = find_sink(system, {**places[system], **UPSERT})
    else:
        server: Any = request.getfixturevalue("mysql")
        sink = server.sink(server.table(None), ifNotExists="true", **({} if system == "mysql-append" else UPSERT))
    Rig(sink).run_rows(0, rows_)
    scan, why = sink.scan(), sink.capability().no_position
    assert scan.position() is None
    assert why == (UNORDERED if system == "mysql-append" else CHANGES_ROWS)
    asked = replace(TO_SQLITE, capability=sink.capability())
    plan = make_plan(replace(ASKED, sinks=(asked,)))
    assert isinstance(plan, Plan)
    assert any(limit.endswith(f"does not continue where the last one stopped: {why}") for limit in plan.limits)


class Hands(Protocol):
    """What someone does to a sink with its own client. Batch 0 has rows with the keys "0-0-1", "0-1-1"."""

    def tidy(self) -> None:
        """What the system does to files or pages without changing a row."""

    def delete(self) -> None:
        """Remove a row of batch 0, which is not its newest."""

    def alter(self) -> None:
        """Change a row of batch 0."""

    def recreate(self) -> int:
        """Delete and recreate the target; how many rows it has now."""


@dataclass
class SqliteHands:
    path: str

    def execute(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    def tidy(self) -> None:
        self.execute("VACUUM")

    def delete(self) -> None:
        self.execute("DELETE FROM orders WHERE key = CAST('0-0-1' AS BLOB)")

    def alter(self) -> None:
        self.execute("UPDATE orders SET value = CAST('x' AS BLOB) WHERE key = CAST('0-1-1' AS BLOB)")

    def recreate(self) -> int:
        row = "INSERT INTO orders VALUES (CAST('new' AS BLOB), CAST('new' AS BLOB))"
        self.execute("DROP TABLE orders", "CREATE TABLE orders (key BLOB, value BLOB)", row)
        return 1


@dataclass
class DeltaHands:
    path: str

    @property
    def table(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.path)

    def tidy(self) -> None:
        """Compaction mixes rows of both sides of every position."""
        self.table.optimize.compact()
        assert len(self.table.file_uris()) == 1

    def delete(self) -> None:
        self.table.delete("key = X'302d302d31'")

    def alter(self) -> None:
        self.table.update(predicate="key = X'302d312d31'", updates={"value": "X'78'"})

    def recreate(self) -> int:
        from deltalake import write_deltalake

        shutil.rmtree(self.path)
        write_deltalake(self.path, pa.table({"key": [b"new"], "value": [b"new"]}))
        return 1


@dataclass
class IcebergHands:
    folder: Path

    @property
    def catalog(self) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog("default", uri=f"sqlite:///{self.folder}/catalog.db", warehouse=f"file://{self.folder}")

    @property
    def table(self) -> Any:
        return self.catalog.load_table("shop.orders")

    def rewrite(self, first: int, changed: Callable[[pa.Table], pa.Table] | None = None) -> None:
        """One snapshot that replaces all files but the `first` ones, as Spark's rewrite_data_files and UPDATE do."""
        from pyiceberg.io.pyarrow import _dataframe_to_data_files
        from pyiceberg.table.snapshots import Operation, Summary
        from pyiceberg.table.update.snapshot import _OverwriteFiles

        class Rewrite(_OverwriteFiles):
            def _summary(self, properties: Any = {}) -> Summary:  # noqa: B006 - as in the client
                counts = super()._summary(properties).additional_properties
                return Summary(Operation.REPLACE if changed is None else Operation.OVERWRITE, **counts)

        table = self.table
        tasks = sorted(table.scan().plan_files(), key=lambda t: t.file.file_path)[first:]
        rows = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table(tasks)
        rows = rows if changed is None else changed(rows)
        with table.transaction() as transaction:
            producer = Rewrite(operation=Operation.OVERWRITE, transaction=transaction, io=table.io)
            with producer as snapshot:
                for task in tasks:
                    snapshot.delete_data_file(task.file)
                for file in _dataframe_to_data_files(transaction.table_metadata, rows, table.io):
                    snapshot.append_data_file(file)

    def tidy(self) -> None:
        self.rewrite(0)
        assert len(list(self.table.scan().plan_files())) == 1

    def delete(self) -> None:
        self.table.delete(EqualTo("key", b"0-0-1"))

    def alter(self) -> None:
        self.table.overwrite(pa.table({"key": [b"0-1-1"], "value": [b"x"]}), EqualTo("key", b"0-1-1"))

    def expire(self) -> None:
        """All snapshots but the current one."""
        table = self.table
        current, named = table.current_snapshot().snapshot_id, {ref.snapshot_id for ref in table.refs().values()}
        old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id != current and s.snapshot_id not in named]
        table.maintenance.expire_snapshots().by_ids(old).commit()
        assert old

    def recreate(self) -> int:
        schema = self.table.schema()
        self.catalog.drop_table("shop.orders")
        self.catalog.create_table("shop.orders", schema).append(pa.table({"key": [b"new"], "value": [b"new"]}))
        return 1


@dataclass
class PostgresHands:
    server: Any
    table: str
    key: str = "key"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.server.execute(statement.format(t=self.table))
        return rows

    def tidy(self) -> None:
        self.execute("VACUUM (FREEZE, ANALYZE) {t}")

    def delete(self) -> None:
        self.execute(f"DELETE FROM {{t}} WHERE {self.key} = '0-0-1'")

    def alter(self) -> None:
        self.execute(f"UPDATE {{t}} SET value = 'x' WHERE {self.key} = '0-1-1'")

    def recreate(self) -> int:
        self.execute("DROP TABLE {t}")
        self.execute("CREATE TABLE {t} (key bytea, value bytea, batch bigint)")
        self.execute("INSERT INTO {t} VALUES ('new', 'new')")
        return 1


@dataclass
class MysqlHands(PostgresHands):
    def tidy(self) -> None:
        self.execute("OPTIMIZE TABLE {t}")

    def recreate(self) -> int:
        self.execute("DROP TABLE {t}")
        self.execute("CREATE TABLE {t} (`key` longblob, value longblob)")
        self.execute("INSERT INTO {t} VALUES ('new', 'new')")
        return 1


@dataclass
class FilesHands:
    folder: Path

    def tidy(self) -> None:
        """Nothing."""

    def delete(self) -> None:
        sorted(self.folder.glob("batch=*/*.parquet"))[0].unlink()

    def alter(self) -> None:
        path = sorted(self.folder.glob("batch=*/*.parquet"))[0]
        path.write_bytes(path.read_bytes())

    def recreate(self) -> int:
        shutil.rmtree(self.folder)
        (self.folder / "_delivered").mkdir(parents=True)
        (self.folder / "_delivered" / "schema.arrow").write_bytes(SCHEMA.serialize().to_pybytes())
        (self.folder / "_delivered" / "identity").write_text("another")
        pq.write_table(pa.table({"key": [b"new"], "value": [b"new"]}), self.folder / "new.parquet")
        return 1


HANDS: dict[str, Callable[[Rig, pytest.FixtureRequest], Hands]] = {
    "sqlite": lambda rig, _: SqliteHands(rig.sink.options.path),
    "delta": lambda rig, _: DeltaHands(rig.sink.options.path),
    "files-parquet": lambda rig, _: FilesHands(Path(rig.sink.options.path)),
    **dict.fromkeys(
        POSTGRES, lambda rig, request: PostgresHands(request.getfixturevalue("postgres"), rig.sink.options.table_text)
    ),
    **{
        name: lambda rig, request: PostgresHands(request.getfixturevalue("postgres"), rig.sink.options.table_text)
        for name in BY_BATCH[:2]
    },
    **{
        name: lambda rig, request: MysqlHands(request.getfixturevalue("mysql"), rig.sink.options.table_text, "`key`")
        for name in BY_BATCH[2:]
    },
    "iceberg": lambda _, request: IcebergHands(request.getfixturevalue("tmp_path") / "lake"),
}


def started(name: str, request: pytest.FixtureRequest) -> tuple[Rig, Hands, Offsets, Any]:
    """A sink with batches 0 and 1, and the position between them with its facts."""
    rig = Rig(SINKS[name](request))
    rig.run(0)
    at = position(rig)
    facts = kept(rig, at)
    rig.run(1)
    return rig, HANDS[name](rig, request), at, facts


@pytest.mark.parametrize("name", some(HANDS, "sqlite", "delta", "files-parquet", "postgres-two-phase", *QUICK))
def test_what_a_system_does_to_its_files_changes_nothing(name: str, request: pytest.FixtureRequest) -> None:
    rig, hands, at, facts = started(name, request)
    end = position(rig)
    hands.tidy()
    scan = rig.sink.scan()
    assert scan.changes(at, facts) == Changes()
    assert between(rig, at) == rig.expected(1)
    assert between(rig, None, at) == rig.expected(0)
    rig.run(2)
    assert between(rig, end) == rig.expected(2)
    assert between(rig, at, end) == rig.expected(1)


@pytest.mark.parametrize("what", ["delete", "alter"])
@pytest.mark.parametrize("name", some(HANDS, "sqlite", "delta", "files-parquet", "postgres-two-phase", *QUICK))
def test_a_changed_row_before_a_position_is_reported(name: str, what: str, request: pytest.FixtureRequest) -> None:
    rig, hands, at, facts = started(name, request)
    getattr(hands, what)()
    changes = rig.sink.scan().changes(at, facts)
    assert changes.altered and not (changes.expired or changes.missed or changes.unknown)
    assert changes.continues
    added = 0
    if name == "files-parquet":
        assert ("1 of 2 files were deleted" in changes.altered[0]) == (what == "delete")
    elif name in POSTGRES or name in BY_BATCH or name == "sqlite":
        added = 1 if what == "alter" and name in POSTGRES else 0  # an update is a row of a new transaction
        assert ("1 of 100 rows were deleted" in changes.altered[0]) == (what == "delete" or added == 1)
    elif (name, what) == ("iceberg", "alter"):
        added = 1  # the client removes a row, and then appends another
    assert between(rig, at).count == 100 + added
    end = position(rig)
    assert rig.sink.scan().changes(end, kept(rig, end)) == Changes()


@pytest.mark.parametrize("name", some(HANDS, "sqlite", "delta", "files-parquet", "postgres-two-phase", *QUICK))
def test_all_rows_of_a_recreated_target_lie_behind_earlier_positions(name: str, request: pytest.FixtureRequest) -> None:
    rig, hands, at, facts = started(name, request)
    count = hands.recreate()
    changes = rig.sink.scan().changes(at, facts)
    assert "recreated" in changes.altered[0] and changes.continues
    if name.startswith("postgres"):  # its schema is kept by the table's id
        Rig(rig.sink).run(0)
        count += 100
    assert between(rig, at).count == count
    assert between(rig, None, at).count == 0


def test_delta_files_that_are_vacuumed_after_compaction(request: pytest.FixtureRequest) -> None:
    """Compacted alone, what was added is still told from the rest; mixed with older files, it is not."""
    rig, _, at, facts = started("delta", request)
    hands = DeltaHands(rig.sink.options.path)
    end = position(rig)
    rig.run(2)
    rig.run(3)
    last = position(rig)
    hands.tidy()
    hands.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    changes = rig.sink.scan().changes(at, facts)
    assert not changes.altered and not changes.continues and "compacted with older files" in changes.unknown[0]
    with pytest.raises(Refused, match="POSITION_LOST"):
        between(rig, end)
    rig.run(4)
    rig.run(5)
    assert between(rig, last) == rig.expected(4, 5)
    assert between(rig) == rig.expected(0, 1, 2, 3, 4, 5)


@pytest.mark.matrix
def test_iceberg_snapshots_that_expired(request: pytest.FixtureRequest) -> None:
    rig, hands, at, facts = started("iceberg", request)
    assert isinstance(hands, IcebergHands)
    hands.expire()
    assert rig.sink.scan().changes(at, facts) == Changes()
    assert between(rig, at) == rig.expected(1)
    rig.run(2)
    end = position(rig)
    hands.rewrite(first=2)
    hands.expire()
    rig.run(3)
    hands.expire()
    assert not rig.sink.scan().changes(end, facts).continues, "its files are compacted"
    last = position(rig)
    rig.run(4)
    assert between(rig, last) == rig.expected(4)
    end = position(rig)
    hands.table.manage_snapshots().rollback_to_snapshot(last["snapshot"]).commit()
    assert "no longer goes back" in rig.sink.scan().changes(end, facts).altered[0]
    with pytest.raises(Refused, match="POSITION_LOST"):
        between(rig, end)


@pytest.mark.matrix
def test_iceberg_rows_rewritten_on_both_sides(request: pytest.FixtureRequest) -> None:
    """Of one file that holds rows of both sides, nobody can say which are which."""
    rig, hands, at, facts = started("iceberg", request)
    assert isinstance(hands, IcebergHands)
    end = position(rig)
    rig.run(2)
    hands.rewrite(0, lambda rows: rows.slice(1))
    for position_ in (at, end):
        changes = rig.sink.scan().changes(position_, facts)
        assert "overwrite, 300 rows deleted, 299 rows added" in changes.altered[0] and not changes.continues
        with pytest.raises(Refused, match="rewrote rows of both sides"):
            between(rig, position_)


@pytest.mark.matrix
def test_delta_partitions_that_are_compacted_alone(tmp_path: Path) -> None:
    rig = Rig(find_sink("delta", {"path": str(tmp_path / "orders"), "partitionBy": "day"}))
    hands = DeltaHands(str(tmp_path / "orders"))

    def batch(day: int) -> list[pa.RecordBatch]:
        days = pa.array([day] * 10, pa.date32())
        return [pa.record_batch({"day": days, "n": pa.array([i, *range(9)])}) for i in range(2)]

    def count(since: Offsets | None = None) -> int:
        scan = rig.sink.scan()
        return sum(b.num_rows for piece in scan.slices(since) for b in scan.read(piece))

    rig.run_rows(0, batch(1))
    at = position(rig)
    rig.run_rows(1, batch(3))
    rig.run_rows(2, batch(3))
    hands.table.optimize.compact()
    assert len(hands.table.file_uris()) == 2
    assert count(at) == 40, "of the files as they were"
    hands.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert rig.sink.scan().changes(at, {}) == Changes()
    assert count(at) == 40 and count() == 60
    hands.table.delete("n = 8 and day = '1970-01-04'")
    assert rig.sink.scan().changes(at, {}) == Changes(), "of rows behind the position"
    assert count(at) == 36
    hands.table.delete("n = 8")
    assert "2 rows deleted" in rig.sink.scan().changes(at, {}).altered[0]
    assert count(at) == 36


def test_a_rowid_that_is_used_again(request: pytest.FixtureRequest) -> None:
    """The newest rows are deleted, then others get their numbers: they lie before the position."""
    rig = Rig(SINKS["sqlite"](request))
    rig.run(0)
    at = position(rig)
    facts = kept(rig, at)
    hands = SqliteHands(rig.sink.options.path)
    hands.execute("DELETE FROM orders WHERE rowid > 90")
    shrunk = rig.sink.scan().changes(at, facts)
    rig.run(1)
    reused = rig.sink.scan().changes(at, facts)
    assert "10 of 100 rows were deleted" in shrunk.altered[0] and not shrunk.continues
    assert "some are others" in reused.altered[0] and not reused.continues
    # VACUUM numbers rows again if some are missing, so that later ones move before the position.
    hands.execute("DELETE FROM orders WHERE rowid < 11", "VACUUM")
    assert rig.sink.scan().changes(position(rig), kept(rig, position(rig))) == Changes()


def test_a_dropped_table_was_not_recreated(request: pytest.FixtureRequest) -> None:
    rig, hands, at, facts = started("sqlite", request)
    assert isinstance(hands, SqliteHands)
    hands.execute("DROP TABLE orders")
    assert rig.sink.scan().changes(at, facts) == Changes(altered=("table orders was deleted",))


def test_a_long_table_is_sampled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.sqlite import read

    for name, value in {"COUNTED_MAX": 50, "HASHED_MAX": 40, "SAMPLES": 4}.items():
        monkeypatch.setattr(read, name, value)
    rig, hands, at, facts = started("sqlite", request)
    assert isinstance(hands, SqliteHands)
    assert facts["rows"] is None and [r[:2] for r in facts["ranges"]] == [[1, 11], [31, 41], [61, 71], [91, 101]]
    hands.execute("DELETE FROM orders WHERE rowid = 20")
    assert rig.sink.scan().changes(at, facts) == Changes(), "not among the sampled rows"
    hands.execute("DELETE FROM orders WHERE rowid = 65")
    assert "1 of 40 rows were deleted" in rig.sink.scan().changes(at, facts).altered[0]


@pytest.mark.parametrize(
    "columns", ["key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID", "key BLOB, value INTEGER PRIMARY KEY)"]
)
def test_rows_that_sqlite_does_not_number_have_no_position(columns: str, request: pytest.FixtureRequest) -> None:
    rig = Rig(SINKS["sqlite"](request))
    SqliteHands(rig.sink.options.path).execute(f"CREATE TABLE orders ({columns}")
    value = pa.array([1, 2]) if "INTEGER" in columns else pa.array([b"1", b"2"])
    rig.run_rows(0, [pa.record_batch({"key": pa.array([b"a", b"b"]), "value": value})])
    assert rig.sink.scan().position() is None
    (finding,) = rig.sink.preflight(Guarantee.EXACTLY_ONCE)
    assert (finding.code, finding.refuses) == ("AUDIT_READS_ALL", False)
    assert ("WITHOUT ROWID" if "ROWID" in columns else "'value' (INTEGER PRIMARY KEY)") in finding.message


def postgres_started(server: Any, **options: str) -> tuple[Rig, PostgresHands, Offsets, Any]:
    rig = Rig(server.sink(**options))
    rig.run(0)
    at = position(rig)
    facts = kept(rig, at)
    rig.run(1)
    return rig, PostgresHands(server, rig.sink.options.table_text), at, facts


def jump(server: Any, number: int, epoch: int = 0) -> None:
    """The next transaction has this number: the server is stopped meanwhile."""
    from delivered_lab.brokers import postgres

    server.broker.stop()
    data = postgres.data_folder(server.broker.folder)
    segment = data / "pg_xact" / f"{number // 2**20:04X}"  # which the server would have written
    segment.write_bytes(bytes(256 * 1024))
    shutil.chown(segment, data.stat().st_uid, data.stat().st_gid)
    tool = [*postgres.as_server_user(), str(postgres.programs() / "pg_resetwal")]
    subprocess.run([*tool, "-x", str(number), "-e", str(epoch), str(data)], check=True, cwd="/", timeout=60)
    server.broker.restart()


def freeze(server: Any) -> None:
    """Every row of every database, so that the server takes later numbers."""
    from psycopg import connect

    server.execute("UPDATE pg_database SET datallowconn = true")
    for (name,) in server.execute("SELECT datname FROM pg_database"):
        with connect(server.url.rpartition("/")[0] + f"/{name}", autocommit=True) as connection:
            connection.execute("VACUUM FREEZE")


ROW = "INSERT INTO {t} VALUES ('sub', 'sub')"


@pytest.mark.parametrize("prepared", [pytest.param(False, marks=pytest.mark.matrix), True])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.matrix), 100])
def test_rows_of_subtransactions_in_progress_lie_behind(
    postgres: Any, request: pytest.FixtureRequest, count: int, prepared: bool
) -> None:
    """The server's snapshot names no subtransaction; beyond 64, its list of them overflows."""
    request.addfinalizer(postgres.roll_back_prepared)
    rig, hands, _, _ = postgres_started(postgres)
    with closing(postgres.connect()) as connection:
        connection.execute("BEGIN")
        for _ in range(count):
            connection.execute(f"SAVEPOINT s; {ROW.format(t=hands.table)}; RELEASE s")
        connection.execute(ROW.format(t=hands.table))
        if prepared:
            connection.execute("PREPARE TRANSACTION 'sub'")
        hands.execute(ROW)  # a later transaction that is visible
        at = position(rig)
        facts = kept(rig, at)
        connection.execute("COMMIT PREPARED 'sub'" if prepared else "COMMIT")
    assert between(rig, None, at).count == 201
    assert between(rig, at).count == count + 1
    assert rig.sink.scan().changes(at, facts) == Changes()


KEEP = {
    "freeze": "VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) {t}",
    "full": "VACUUM (FULL, FREEZE) {t}",
    "cluster": "CREATE INDEX by_key_{t} ON {t} (key); CLUSTER {t} USING by_key_{t}",
    "column": "ALTER TABLE {t} ADD COLUMN more text DEFAULT 'x'",
    "index": "CREATE INDEX again_{t} ON {t} (key); REINDEX TABLE {t}",
}
"""What keeps positions, as measured."""
TOLD = {
    "truncate": ("TRUNCATE {t}", "100 of 100 rows were deleted"),
    "type": ("ALTER TABLE {t} ALTER COLUMN key TYPE text USING encode(key, 'hex')", "or rewritten, with new"),
    "logged": ("ALTER TABLE {t} SET UNLOGGED; ALTER TABLE {t} SET LOGGED", "or rewritten, with new transactions"),
    "drop": ("ALTER TABLE {t} DROP COLUMN value", "columns were removed: value"),
    "copy": ("CREATE TABLE n_{t} AS TABLE {t}; TRUNCATE {t}; INSERT INTO {t} TABLE n_{t}", "100 of 100 rows"),
}
"""What does not, and is reported."""


@pytest.mark.parametrize("what", some(KEEP, "freeze", "full"))
def test_what_keeps_the_transaction_of_a_row(postgres: Any, what: str) -> None:
    rig, hands, at, facts = postgres_started(postgres)
    for statement in KEEP[what].split("; "):
        hands.execute(statement)
    assert rig.sink.scan().changes(at, facts) == Changes()
    assert between(rig, None, at) == rig.expected(0)
    assert between(rig, at) == rig.expected(1)


@pytest.mark.parametrize("what", some(TOLD, "truncate"))
def test_what_does_not_keep_it_is_reported(postgres: Any, what: str) -> None:
    rig, hands, at, facts = postgres_started(postgres)
    statements, message = TOLD[what]
    for statement in statements.split("; "):
        hands.execute(statement)
    changes = rig.sink.scan().changes(at, facts)
    assert message in changes.altered[0]
    assert changes.continues == (what == "drop")


def in_partitions(server: Any, pages: int) -> tuple[Rig, PostgresHands, Offsets, Any]:
    """A table with two partitions, and its position: the rows of batches are in the first, next to so many pages."""
    table = server.table(None)
    first = "(left(encode(coalesce(key, ''), 'escape'), 1))"
    server.execute(f"CREATE TABLE {table} (key bytea, value bytea) PARTITION BY LIST ({first})")
    server.execute(f"CREATE TABLE {table}_0 PARTITION OF {table} DEFAULT")
    server.execute(f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES IN ('x')")
    for key in ("y", "x"):  # 7 rows in a page
        row = f"convert_to('{key}' || n, 'utf8'), convert_to(repeat('x', 1000), 'utf8')"
        server.execute(f"INSERT INTO {table} SELECT {row} FROM generate_series(1, {pages * 7}) n")
    rig = Rig(server.sink(table))
    rig.run(0)
    at = position(rig)
    return rig, PostgresHands(server, table), at, kept(rig, at)


def test_a_large_table_is_sampled_over_all_of_its_partitions(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.postgres import read as positions

    sizes = {"HASHED_BYTES_MAX": 0, "COUNTED_BYTES_MAX": 0, "SAMPLES": 6, "SAMPLE_PAGES": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(positions, name, value)
    rig, hands, at, facts = in_partitions(postgres, pages=20)
    first, second = facts["relations"].values()
    assert first["rows"] is second["rows"] is None
    assert [r[0] for r in second["ranges"]][::2] == [0, 19]
    assert len(first["ranges"]) + len(second["ranges"]) in (5, 6), "of both together"
    assert rig.sink.scan().changes(at, facts) == Changes()
    rig.run(1)
    assert rig.sink.scan().changes(at, facts) == Changes()
    hands.execute("DELETE FROM {t}_1 WHERE ctid = '(5,1)'")
    wait_for(lambda: rig.sink.scan().changes(at, facts).unknown, 30, "its statistics show it")
    assert "1 rows of" in rig.sink.scan().changes(at, facts).unknown[0]
    hands.execute("DELETE FROM {t}_1 WHERE ctid = '(19,1)'")
    assert "1 of 7 rows were deleted" in rig.sink.scan().changes(at, facts).altered[0]
    hands.execute("VACUUM FULL {t}_0")
    assert any("was rewritten" in what for what in rig.sink.scan().changes(at, facts).unknown)


@pytest.mark.parametrize("counted", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_partition_attached_with_earlier_rows_is_reported(
    postgres: Any, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie before the position, where no later audit reads them."""
    rig, hands, at, facts = in_partitions(postgres, pages=1)
    hands.execute("CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES IN ('z')")
    assert rig.sink.scan().changes(at, facts) == Changes()
    _, second = facts["relations"]
    hands.execute("ALTER TABLE {t} DETACH PARTITION {t}_1")
    detached = rig.sink.scan().changes(at, facts)
    assert detached.altered == (f"{second} was dropped or detached, with 7 rows",)
    assert detached.continues
    later, later_facts = position(rig), kept(rig, position(rig))
    hands.execute("ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN ('x')")
    if not counted:
        from delivered.connectors.postgres import read as positions

        monkeypatch.setattr(positions, "COUNTED_BYTES_MAX", 0)
    changes = rig.sink.scan().changes(later, later_facts)
    assert (changes.altered, changes.continues) == (
        ((f"{second} was attached since, with 7 rows from before",), False) if counted else ((), True)
    )
    assert ["too large to be counted" in what for what in changes.unknown] == [True] * (not counted)
    assert rig.sink.scan().changes(at, facts) == Changes(), "it is back"


@pytest.mark.matrix
def test_positions_survive_a_crash_of_postgres(new_postgres: Any) -> None:
    server = new_postgres()
    rig = Rig(server.sink(mechanism="two_phase"))
    context = rig.context()
    rig.run(0, context)
    messages = rig.write(rig.plan(context, 1, first=False))
    at = position(rig)
    facts = kept(rig, at)
    server.broker.kill()
    server.broker.restart()
    assert rig.sink.scan().changes(at, facts) == Changes()
    assert position(rig)["snapshot"].split(":")[2], "the prepared transactions"
    assert between(rig, None, at) == between(rig) == rig.expected(0)
    commit_batch(rig.context(), 1, offsets(1), messages)
    assert between(rig, at) == rig.expected(1)


@pytest.mark.matrix
def test_transaction_numbers_that_wrap(new_postgres: Any) -> None:
    """By pg_resetwal, as after so many transactions."""
    server = new_postgres()
    rig, _, at, facts = postgres_started(server)
    jump(server, 1_000_000_000)
    assert rig.sink.scan().changes(at, facts) == Changes()
    assert between(rig, at) == rig.expected(1)
    rig.run(2)
    middle = position(rig)
    rig.run(3)
    assert between(rig, at, middle) == rig.expected(1, 2)
    freeze(server)
    jump(server, 3_000_000_000)
    changes = rig.sink.scan().changes(at, facts)
    assert "transactions lie between" in changes.unknown[0] and not changes.continues
    with pytest.raises(Refused, match="POSITION_LOST"):
        between(rig, at)
    late = position(rig)
    late_facts = kept(rig, late)
    rig.run(4)
    assert between(rig, late) == rig.expected(4), "older rows have a negative age"
    assert between(rig, None, late) == rig.expected(0, 1, 2, 3)
    freeze(server)
    jump(server, 4_294_000_000, epoch=1)
    assert rig.sink.scan().position() is None
    assert [f.code for f in rig.sink.preflight(Guarantee.EXACTLY_ONCE)] == ["AUDIT_READS_ALL"]
    changes = rig.sink.scan().changes(late, late_facts)
    assert "used all numbers" in changes.unknown[0] and not changes.continues
    with pytest.raises(Refused, match="POSITION_LOST"):
        between(rig, late)


@pytest.mark.matrix
def test_a_database_restored_from_a_dump_is_another_one(postgres: Any, new_postgres: Any) -> None:
    from delivered_lab.brokers.postgres import programs

    _, hands, at, facts = postgres_started(postgres)
    other = new_postgres()
    dump = subprocess.run([programs() / "pg_dump", "-d", postgres.url], check=True, capture_output=True, cwd="/")
    subprocess.run([programs() / "psql", "-q", "-d", other.url], check=True, input=dump.stdout, cwd="/")
    scan = other.sink(hands.table).scan()
    assert "another server" in scan.changes(at, facts).unknown[0] and not scan.changes(at, facts).continues
    with pytest.raises(Refused, match="POSITION_LOST"):
        scan.slices(at)


@dataclass
class Topic:
    """A topic with one partition, as an audit reads it."""

    kafka: Any
    name: str

    @property
    def scan(self) -> BoundedScan:
        return find_sink("kafka", {"kafka.bootstrap.servers": self.kafka.bootstrap, "topic": self.name}).scan()

    def add(self, count: int, partition: int = 0) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.kafka.bootstrap})
        for n in range(count):
            producer.produce(self.name, b"v%d" % n, partition=partition)
        assert producer.flush(60) == 0

    def delete_before(self, offset: int) -> None:
        from confluent_kafka import TopicPartition

        at = TopicPartition(self.name, 0, offset)
        self.kafka.admin().delete_records([at])[at].result(60)

    def count(self, since: Offsets | None = None, until: Offsets | None = None) -> int:
        return sum(b.num_rows for piece in self.scan.slices(since, until) for b in self.scan.read(piece))

    def start(self) -> tuple[Offsets, Any]:
        self.add(10)
        at = self.scan.position()
        assert at is not None
        return json.loads(json.dumps(at)), json.loads(json.dumps(self.scan.kept(at)))


@pytest.mark.parametrize(
    ("settings", "later_ms", "expires"),
    [
        ({"retention_ms": DAY_MS}, DAY_MS, True),
        ({"retention_ms": DAY_MS, "retention_bytes": 1 << 30}, 0, False),
        ({"retention_ms": -1, "retention_bytes": 1}, 0, True),
        ({"retention_ms": -1}, DAY_MS, False),
    ],
)
def test_kafka_tells_retention_from_deletion(
    kafka: Any, settings: dict[str, int], later_ms: int, expires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the age of the records and the size of the log."""
    monkeypatch.setattr(kafka_reader, "_now_ms", lambda: time.time_ns() // 1_000_000 + later_ms)
    topic = Topic(kafka, kafka.topic(1, **settings))
    at, facts = topic.start()
    topic.add(5)
    assert topic.scan.changes(at, facts) == Changes()
    topic.delete_before(4)
    changes = topic.scan.changes(at, facts)
    (sentence,) = changes.expired if expires else changes.altered
    assert f"{topic.name}-0: offsets 0 to 3 were removed" in sentence
    assert not (changes.altered if expires else changes.expired) and not changes.missed
    assert (topic.count(None, at), topic.count(at)) == (6, 5)
    topic.delete_before(12)
    changes = topic.scan.changes(at, facts)
    assert "offsets 0 to 9" in "".join(changes.expired + changes.altered)
    assert changes.missed == (f"{topic.name}-0: offsets 10 to 11 were removed before an audit read them",)
    assert (topic.count(None, at), topic.count(at)) == (0, 3)


def test_partitions_added_to_a_topic_lie_behind_earlier_positions(kafka: Any) -> None:
    from confluent_kafka.admin import NewPartitions

    topic = Topic(kafka, kafka.topic(1))
    at, facts = topic.start()
    kafka.admin().create_partitions([NewPartitions(topic.name, 2)])[topic.name].result(120)
    topic.add(3, partition=1)
    end = topic.scan.position()
    topic.add(4, partition=1)
    assert (topic.count(None, at), topic.count(at, end), topic.count(end)) == (10, 3, 4)
    assert topic.scan.changes(at, facts) == Changes()


def test_all_records_of_a_recreated_topic_lie_behind_earlier_positions(kafka: Any) -> None:
    topic = Topic(kafka, kafka.topic(1))
    at, facts = topic.start()
    make_topic_anew(kafka, topic.name, 1)
    topic.add(12)
    changes = topic.scan.changes(at, facts)
    assert changes.altered == (f"topic {topic.name} was deleted and recreated",) and changes.continues
    assert (topic.count(None, at), topic.count(at)) == (0, 12)
    kafka.admin().delete_topics([topic.name])[topic.name].result(30)
    wait_for(lambda: topic.scan.changes(at, facts).altered[0].endswith("was deleted"), 60, "the topic is deleted")


@pytest.mark.matrix
def test_kafka_retention_removes_segments(new_kafka: Any) -> None:
    """Real retention, and a broker that is killed."""
    server = new_kafka(properties={"log.retention.check.interval.ms": "500"})
    topic = Topic(server, server.topic(1, retention_ms=1_000, segment_bytes=1_048_576, segment_ms=1_000))
    at, facts = topic.start()

    def expired() -> bool:
        topic.add(1)
        return bool(topic.scan.changes(at, facts).expired)

    wait_for(expired, 120, "retention removes the first segment")
    changes = topic.scan.changes(at, facts)
    assert "by retention" in changes.expired[0] and not changes.altered
    end = topic.scan.position()
    assert end is not None
    server.broker.kill()
    server.broker.restart()
    topic.add(2)
    assert topic.count(end) == 2
    assert not topic.scan.changes(at, facts).altered


def test_records_behind_an_open_transaction_lie_behind_the_position(kafka: Any, request: pytest.FixtureRequest) -> None:
    """They were written, by another producer, before the position was taken; no reader sees them yet."""
    rig = Rig(SINKS["kafka"](request))
    context = rig.context()
    rig.run(0, context)
    messages = rig.write(rig.plan(context, 1, first=False))
    topic = Topic(kafka, rig.sink.options.topic)
    for partition in range(4):
        topic.add(3, partition)
    at = position(rig)
    commit_batch(context, 1, offsets(1), messages)
    assert between(rig, None, at).count == 100
    assert between(rig, at).count == 112


@pytest.mark.matrix
def test_pulsar_positions_and_retention(pulsar: Any, tmp_path: Path) -> None:
    topic = PulsarTopic(pulsar, tmp_path)
    topic.add(10)
    topic.add(20)
    at = topic.scan.position()
    facts = topic.scan.kept(at)
    topic.add(30)
    end = topic.scan.position()
    topic.add(40)
    assert [topic.count(None, at), topic.count(at, end), topic.count(end), topic.count()] == [30, 30, 40, 100]
    assert topic.scan.changes(at, facts) == Changes()
    topic.acknowledge(1)
    changes = topic.scan.changes(at, facts)
    assert "entries up to ledger" in changes.expired[0] and not changes.altered
    assert [topic.count(None, at), topic.count(at, end), topic.count(end)] == [20, 30, 40]
    pulsar.admin("DELETE", f"{topic.path}?force=true")
    pulsar.admin("PUT", topic.path, {})
    topic.create()
    topic.add(5)
    changes = topic.scan.changes(at, facts)
    assert "by retention or with the topic" in changes.unknown[0] and changes.continues
    assert [topic.count(None, at), topic.count(at)] == [0, 5]


@pytest.mark.matrix
def test_rocketmq_topics(rocketmq: Any, request: pytest.FixtureRequest) -> None:
    rig = Rig(SINKS["rocketmq"](request))
    rig.run(0)
    at = position(rig)
    facts = kept(rig, at)
    rig.run(1)
    assert rig.sink.scan().changes(at, facts) == Changes()
    forged = {**facts, "last": dict.fromkeys(facts["last"], "another")}
    assert "another message at offset" in rig.sink.scan().changes(at, forged).altered[0]
    beyond = {broker: {q: end + 1_000 for q, end in queues.items()} for broker, queues in at.items()}
    assert "deleted or recreated" in rig.sink.scan().changes(beyond, facts).altered[0]
