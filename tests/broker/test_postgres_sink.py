"""The PostgreSQL sink against a real server: types, bad input, what it leaves behind."""

from __future__ import annotations

import datetime as dt
import pickle
import socket
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.databases import EVERY_TYPE, MECHANISMS, VALUES, read, write
from tests.support.sinks import SCHEMA, Rig, alone, offsets, rows

from delivered.connectors.postgres import CONNECTOR, client
from delivered.connectors.postgres.target import MIGRATIONS, migrate
from delivered.connectors.postgres.writer import BLOCK_BYTES, blocks
from delivered.engine.context import open_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.kits.sql.ledger import Records
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES
from delivered.model.rows import Rows
from delivered.model.work import Account, Ok

if TYPE_CHECKING:
    from tests.support.servers import Postgres

EXACT = Guarantee.EXACTLY_ONCE


ROW = st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROW, min_size=1, max_size=30), st.integers(0, 3))
def test_every_type_comes_back_as_it_went_in(postgres: Postgres, values: list[dict[str, Any]], start: int) -> None:
    """Read by an independent client and by this package's reader; also for a batch that is a slice of another."""
    sink = postgres.sink(postgres.table(None), ifNotExists="true")
    batch = pa.RecordBatch.from_pylist(values, schema=EVERY_TYPE).slice(start)
    if batch.num_rows == 0:
        return
    write(sink, [batch])
    expected = batch.to_pylist()
    # That client parses a real's shortest text as a double.
    names = ", ".join(f'"{n}"' + ("::float8" if n == "real" else "") for n in EVERY_TYPE.names)
    there = postgres.execute(f"SELECT {names} FROM {sink.options.table}")
    assert sorted(map(repr, there)) == sorted(repr(_as_client(row)) for row in expected)
    canonical = sink.records(batch)
    back = read(sink).combine_chunks().to_batches()
    assert back[0].schema == canonical.schema
    assert sum((fingerprint(b, 7) for b in back), Fingerprint()) == fingerprint(canonical, 7)
    postgres.execute(f"DROP TABLE {sink.options.table}")


def _as_client(row: dict[str, Any]) -> tuple[Any, ...]:
    from zoneinfo import ZoneInfo

    def one(value: Any) -> Any:
        if isinstance(value, dt.datetime) and value.tzinfo is not None:
            return value.astimezone(ZoneInfo("Etc/UTC"))
        return value

    return tuple(one(v) for v in row.values())


def test_blocks_are_bounded_and_whole() -> None:
    """P26: what is encoded at once does not grow with the batch."""
    big = pa.record_batch({"n": pa.array(range(100_000), pa.int64()), "t": pa.array(["x" * 1000] * 100_000)})
    sizes = [len(b) for b in blocks(big, ["int8", "text"])]
    assert sum(sizes) == 100_000 * (2 + 4 + 8 + 4 + 1000)
    assert max(sizes) < 2 * BLOCK_BYTES
    assert list(blocks(big.slice(0, 0), ["int8", "text"])) == []


def test_other_types_of_the_table_that_fit(postgres: Postgres) -> None:
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
    postgres.execute("CREATE DOMAIN short AS varchar(5)")
    postgres.execute("CREATE DOMAIN shorter AS short CHECK (length(VALUE) < 4)")
    postgres.execute("CREATE DOMAIN moods AS mood")
    table = postgres.table(
        'a bigint, b double precision, m moods, j jsonb, k json, s shorter, n numeric, "Q q" text, late int DEFAULT 7'
    )
    batch = pa.record_batch(
        {
            "a": pa.array([1, None], pa.int16()), "b": pa.array([0.5, None], pa.float32()),
            "m": pa.array(["glad", None]), "j": pa.array(['{"x": 1}', None]), "k": pa.array(['{"y":  2}', None]),
            "s": pa.array(["abc", None]), "n": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
            "Q q": pa.array(["it's", None]).dictionary_encode(),
        }
    )  # fmt: skip
    write(postgres.sink(table), [batch])
    found = postgres.execute(f"SELECT a, b, m::text, j->>'x', k::text, s, n, \"Q q\", late FROM {table} ORDER BY a")
    assert found == [
        (1, 0.5, "glad", "1", '{"y":  2}', "abc", Decimal("1.50"), "it's", 7),
        (None, None, None, None, None, None, None, None, 7),
    ]


@pytest.mark.parametrize(
    ("columns", "column", "code"),
    [
        ("x int", pa.array([1], pa.int64()), "COLUMN_TYPE"),
        ("x text", pa.array([1], pa.int32()), "COLUMN_TYPE"),
        ("x timestamp", pa.array([0], pa.timestamp("us", "UTC")), "COLUMN_TYPE"),
        ("x numeric(9, 1)", pa.array([Decimal("1.25")], pa.decimal128(9, 2)), "COLUMN_TYPE"),
        ("x char(3)", pa.array(["a"]), "COLUMN_TYPE"),
        ("y text", pa.array(["a"]), "COLUMN_MISSING"),
        ("x text, id int NOT NULL", pa.array(["a"]), "COLUMN_REQUIRED"),
        ("x text, id needed_twice", pa.array(["a"]), "COLUMN_REQUIRED"),
        ("x cents_twice", pa.array([Decimal("1.25")], pa.decimal128(9, 2)), "COLUMN_TYPE"),
        ("x bigint GENERATED ALWAYS AS IDENTITY", pa.array([1], pa.int64()), "COLUMN_COMPUTED"),
    ],
)
def test_rows_that_do_not_fit_the_table_are_refused_before_the_first(
    postgres: Postgres, columns: str, column: pa.Array, code: str
) -> None:
    for domain, base in {"needed": "int NOT NULL", "cents": "numeric(9, 1)"}.items():
        postgres.execute(f"DROP DOMAIN IF EXISTS {domain} CASCADE")
        postgres.execute(f"CREATE DOMAIN {domain} AS {base}")
        postgres.execute(f"CREATE DOMAIN {domain}_twice AS {domain}")
    sink = postgres.sink(postgres.table(columns))
    with pytest.raises(UsageError, match=f"DELIVERED_{code}") as caught:
        write(sink, [pa.record_batch({"x": column})], EXACT)
    assert caught.value.next_step
    assert "'x'" in str(caught.value) or code == "COLUMN_REQUIRED"


def test_types_without_a_home_are_refused_without_a_server() -> None:
    sink = CONNECTOR.sink({"url": "postgresql://nowhere.invalid/db", "dbtable": "t"})
    for kind in (pa.list_(pa.int32()), pa.struct([("a", pa.int32())]), pa.duration("us"), pa.uint64()):
        with pytest.raises(UsageError, match="TYPE_UNKNOWN") as caught:
            sink.check_schema(pa.schema([("x", kind)]))
        assert caught.value.next_step
    with pytest.raises(UsageError, match="COLUMN_TWICE"):
        sink.check_schema(pa.schema([("x", pa.int32()), ("x", pa.int32())]))


def test_table_is_created_only_if_asked(postgres: Postgres) -> None:
    table = postgres.table(None)
    refused = postgres.sink(table)
    with pytest.raises(UsageError, match="TABLE_MISSING"):
        write(refused, [rows(0, 0)])
    assert [f.code for f in refused.preflight(EXACT) if f.refuses] == ["TABLE_MISSING"]
    asked = postgres.sink(table, ifNotExists="true")
    assert not [f for f in asked.preflight(EXACT) if f.refuses]
    done = [threading.Thread(target=write, args=(asked, [rows(0, i)])) for i in range(4)]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join()
    assert postgres.execute(f"SELECT count(*) FROM {table}") == [(200,)]


def test_changed_schema_is_refused(postgres: Postgres) -> None:
    table = postgres.table("a bigint, b text")
    write(postgres.sink(table), [pa.record_batch({"a": pa.array([1], pa.int32())})])
    with pytest.raises(UsageError, match="SCHEMA_CHANGED"):
        write(postgres.sink(table), [pa.record_batch({"a": pa.array([1], pa.int64())})])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_constraint_violation_leaves_nothing_visible(postgres: Postgres, mechanism: str) -> None:
    rig = Rig(postgres.sink(postgres.table("key bytea CHECK (key <> '0-1-7'), value bytea"), mechanism=mechanism))
    context = rig.context()
    plan = rig.plan(context, 0)
    if mechanism == "two_phase":
        with pytest.raises(BadRecord, match="ROW_REFUSED") as caught:
            rig.write(plan)
    else:
        messages = rig.write(plan)
        with pytest.raises(DeliveredError, match=r"DECISION_FAILED.*ROW_REFUSED") as caught:
            commit_batch(context, 0, offsets(0), messages)
    assert "check constraint" in str(caught.value)
    assert rig.visible() == Fingerprint()
    assert rig.plan(rig.context("next"), 0).batch == 0
    assert context.ledger.look().last is None
    assert postgres.execute("SELECT count(*) FROM pg_prepared_xacts WHERE gid LIKE %s", f"%.{rig.sink.name}.%") == [
        (0,)
    ]


def test_text_that_no_text_can_hold(postgres: Postgres) -> None:
    sink = postgres.sink(postgres.table("x text"))
    with pytest.raises(BadRecord, match="VALUE_UNSTORABLE"):
        write(sink, [pa.record_batch({"x": pa.array(["a\0b"])})])


def test_prepared_transactions_off_is_told_before_the_first_row(new_postgres: Callable[..., Postgres]) -> None:
    """PostgreSQL's default. The other mechanism works there."""
    postgres = new_postgres(max_prepared_transactions="0")
    table = postgres.table()
    rig = Rig(postgres.sink(table, mechanism="two_phase"))
    assert "PREPARED_TRANSACTIONS_OFF" in [f.code for f in rig.sink.preflight(EXACT) if f.refuses]
    assert not rig.sink.preflight(Guarantee.AT_LEAST_ONCE)
    writer = rig.sink.writer(Work(rig.scope, 0, 0), EXACT, SCHEMA)
    with pytest.raises(Refused, match="PREPARED_TRANSACTIONS_OFF") as caught:
        writer.stage(rows(0, 0))
    assert "one_transaction" in str(caught.value.next_step)
    writer.abort()
    write(rig.sink, [rows(0, 0)])  # the weaker guarantees need none
    assert rig.visible().count == 50
    postgres.execute(f"TRUNCATE {table}")
    other = Rig(postgres.sink(table))
    other.run(0)
    assert other.visible() == other.expected(0)


def test_prepared_transactions_exhausted(new_postgres: Callable[..., Postgres]) -> None:
    postgres = new_postgres(max_prepared_transactions="1")
    rig = Rig(postgres.sink(mechanism="two_phase"))
    assert "PREPARED_TRANSACTIONS_FEW" in [f.code for f in rig.sink.preflight(EXACT)]
    context = rig.context()
    plan = rig.plan(context, 0)
    with pytest.raises(DeliveredError, match="PREPARED_TRANSACTIONS_FULL") as caught:
        rig.write(plan)
    assert "max_prepared_transactions" in str(caught.value.next_step)
    assert [f.code for f in rig.sink.preflight(EXACT) if f.refuses] == ["PREPARED_TRANSACTIONS_FULL"]
    assert rig.visible() == Fingerprint()
    assert context.committers.abort_orphans(()) == Ok(1)


def test_replica_and_read_only_are_refused(new_postgres: Callable[..., Postgres]) -> None:
    postgres = new_postgres()
    rig = Rig(postgres.sink())
    rig.run(0)
    postgres.execute("ALTER DATABASE delivered SET default_transaction_read_only = on")
    _refused_as_read_only(rig, "61")
    postgres.execute("START TRANSACTION READ WRITE; ALTER DATABASE delivered RESET ALL; COMMIT")
    postgres.broker.stop()
    (postgres.broker.folder / "data" / "standby.signal").touch()
    postgres.broker.restart()
    assert postgres.execute("SELECT pg_is_in_recovery()") == [(True,)]
    _refused_as_read_only(rig, "62")
    assert rig.visible() == rig.expected(0)


def _refused_as_read_only(rig: Rig, seconds: str) -> None:
    fresh = CONNECTOR.sink({"url": rig.sink.options.url, "dbtable": rig.sink.options.table, "lockTimeout": seconds})
    assert [f.code for f in rig.sink.preflight(EXACT) if f.refuses] == ["READ_ONLY"]
    with pytest.raises(Unreachable, match="READ_ONLY") as caught:
        rig.plan(rig.context(), 1)
    assert "primary" in str(caught.value.next_step)
    with pytest.raises(Unreachable, match="READ_ONLY"):
        write(fresh, [rows(1, 0)])


def test_unlogged_table_and_view_are_refused(postgres: Postgres) -> None:
    table = postgres.table(None)
    postgres.execute(f"CREATE UNLOGGED TABLE {table} (key bytea, value bytea)")
    assert [f.code for f in postgres.sink(table).preflight(EXACT)] == ["TABLE_UNLOGGED"]
    view = postgres.table(None)
    postgres.execute(f"CREATE VIEW {view} AS SELECT * FROM {table}")
    assert [f.code for f in postgres.sink(view).preflight(EXACT)] == ["NOT_A_TABLE"]


def test_deadlock_and_lock_wait_are_told(postgres: Postgres) -> None:
    """Two shards that want each other's unique keys."""
    half = 3_000
    keys = [pa.record_batch({"x": pa.array(range(a, a + half), pa.int64())}) for a in (0, half)]
    sink = postgres.sink(postgres.table("x bigint UNIQUE"), mechanism="two_phase", lockTimeout="2")
    scope = Scope("deadlock", sink.name, "i")
    writers = [sink.writer(Work(scope, 0, i), EXACT, keys[0].schema) for i in (0, 1)]
    errors: list[DeliveredError] = []

    def end(i: int) -> None:
        try:
            writers[i].stage(keys[1 - i])
            writers[i].prepare(Fingerprint(2 * half))
        except DeliveredError as error:
            errors.append(error)
            writers[i].abort()

    for i in (0, 1):
        writers[i].stage(keys[i])
    deadline = time.monotonic() + 120
    while postgres.execute(
        "SELECT count(*) FROM pg_stat_progress_copy WHERE tuples_processed >= %s AND relid = %s::regclass",
        half - 1_000,
        sink.options.table,
    ) != [(2,)]:
        assert time.monotonic() < deadline, "the server did not take the first half"
    ends = [threading.Thread(target=end, args=(i,)) for i in (0, 1)]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join(60)
    assert errors
    assert all(e.code in ("DELIVERED_DEADLOCK", "DELIVERED_LOCK_TIMEOUT", "DELIVERED_ROW_REFUSED") for e in errors)
    assert errors[0].code != "DELIVERED_ROW_REFUSED"
    assert all(e.next_step for e in errors)
    # A prepared shard locks its keys: another one waits for them no longer than lockTimeout.
    committer = sink.committer(scope)
    committer.abort_orphans(())
    write(sink, [keys[0]], EXACT)
    began = time.monotonic()
    with pytest.raises(DeliveredError, match="LOCK_TIMEOUT"):
        write(sink, [keys[0]], EXACT)
    assert 1 < time.monotonic() - began < 15
    other = sink.committer(Scope("p", sink.name, "i"))
    assert other.abort_orphans(()) == Ok(1)
    assert postgres.execute(f"SELECT count(*) FROM {sink.options.table}") == [(0,)]


def test_login_and_password(new_postgres: Callable[..., Postgres], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is resolved where it is used; no error shows the password."""
    postgres = new_postgres()
    table = postgres.table()
    postgres.execute("CREATE ROLE app LOGIN PASSWORD 'open-sesame'")
    rules = postgres.broker.folder / "data" / "pg_hba.conf"
    rules.write_text("host all app 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
    postgres.execute("SELECT pg_reload_conf()")
    url = postgres.url.replace("delivered@", "app@")

    def sink(password: str) -> Any:
        return CONNECTOR.sink({"url": f"jdbc:{url}", "dbtable": table, "password": password})

    with pytest.raises(Unreachable, match="POSTGRES_LOGIN") as caught:
        write(sink("not-the-secret-word"), [rows(0, 0)])
    assert "not-the-secret-word" not in str(caught.value) + repr(caught.value.__cause__)
    assert "not-the-secret-word" not in repr(sink("not-the-secret-word"))
    stranger = CONNECTOR.sink({"url": postgres.url.replace("delivered@", "nobody_here@"), "dbtable": table})
    assert [f.code for f in stranger.preflight(EXACT)] == ["POSTGRES_LOGIN"]
    monkeypatch.setenv("APP_PASSWORD", "open-sesame")
    right = pickle.loads(pickle.dumps(sink("env:APP_PASSWORD")))
    assert [f.code for f in right.preflight(EXACT) if f.refuses] == ["PERMISSION"]
    with pytest.raises(UsageError, match="PERMISSION"):
        write(right, [rows(0, 0)])
    postgres.execute("GRANT CREATE ON DATABASE delivered TO app")
    assert [f.code for f in right.preflight(EXACT) if f.refuses] == ["PERMISSION"]
    postgres.execute(f"GRANT SELECT, INSERT ON {table} TO app")
    assert not right.preflight(EXACT)
    Rig(right).run(0)
    assert postgres.execute(f"SELECT count(*) FROM {table}") == [(100,)]

    def to_make(name: str) -> Any:
        return CONNECTOR.sink({"url": url, "dbtable": name, "password": "env:APP_PASSWORD", "ifNotExists": "true"})

    postgres.execute("REVOKE CREATE ON SCHEMA public FROM public")  # the default since 15
    assert [f.code for f in to_make("not_there").preflight(EXACT) if f.refuses] == ["PERMISSION"]
    assert [f.code for f in to_make("nowhere.t").preflight(EXACT) if f.refuses] == ["SCHEMA_MISSING"]
    postgres.execute("GRANT CREATE ON SCHEMA public TO app")
    assert not to_make("not_there").preflight(EXACT)


def test_server_that_is_not_there_or_silent_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.CONNECT_TRY_S < CONNECT_TIMEOUT_S
    monkeypatch.setattr(client, "CONNECT_TRY_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sink = CONNECTOR.sink({"url": f"postgresql://127.0.0.1:{port}/db", "dbtable": "t"})
        began = time.monotonic()
        with pytest.raises(Unreachable, match="POSTGRES_UNREACHABLE"):
            open_ledger(sink, Scope("p", "s", "i")).look()
        assert time.monotonic() - began < 15
    began = time.monotonic()
    assert [f.code for f in sink.preflight(EXACT)] == ["POSTGRES_UNREACHABLE"]
    with pytest.raises(Unreachable):
        write(sink, [rows(0, 0)])
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"url": "postgresql://me:secret-word@h/db"}, "PASSWORD_IN_URL"),
        ({"url": "jdbc:postgresql://h/db?user=me&password=secret-word"}, "PASSWORD_IN_URL"),
        ({"url": "jdbc:mysql://me:secret-word@h/db"}, "PASSWORD_IN_URL"),
        ({"url": "postgresql://h"}, "OPTION_VALUE"),
        ({"dbtable": "a.b.c"}, "OPTION_VALUE"),
        ({"dbtable": "t; DROP TABLE t"}, "OPTION_VALUE"),
        ({"mechanism": "three_phase"}, "OPTION_VALUE"),
        ({"lockTimeout": "0"}, "OPTION_VALUE"),
        ({"dbtabel": "t"}, "OPTION_UNKNOWN"),
    ],
)
def test_bad_options(options: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError, match=code) as caught:
        CONNECTOR.sink({"url": "postgresql://h/db", "dbtable": "t", **options})
    assert "secret-word" not in str(caught.value)


def test_names_that_need_quotes(postgres: Postgres) -> None:
    postgres.execute('CREATE SCHEMA "Or ders"')
    postgres.execute('CREATE TABLE "Or ders"."T""able" ("k ""ey" int)')
    for mechanism in MECHANISMS:
        rig = Rig(postgres.sink('"Or ders"."T""able"', mechanism=mechanism))
        context = rig.context()
        plan = rig.plan(context, 0)
        batch = pa.record_batch({'k "ey': pa.array([1, 2], pa.int32())})
        message = write_shard(rig.sinks, plan, 0, 0, iter([Rows(batch)]), batch.schema)
        commit_batch(context, 0, offsets(0), [message])
    assert postgres.execute('SELECT count(*) FROM "Or ders"."T""able"') == [(4,)]


def test_p13_p20_abort_orphans_touches_only_its_own_and_shows_their_age(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P20: prepared transactions never expire. P13: names that begin alike, or are written alike, are told apart."""
    rig = Rig(postgres.sink(mechanism="two_phase"))
    table = rig.sink.options.table
    others = ["somebody-else-1", f"{rig.scope.prefix}5.0.0123456789abcdef", f"{rig.scope.prefix}x"]
    import psycopg

    for gid in others:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("BEGIN")
            connection.execute(f"INSERT INTO {table} VALUES ('x', 'x')")
            connection.execute(f"PREPARE TRANSACTION '{gid}'")
    rig.write(rig.plan(rig.context("dead"), 0))
    assert not rig.sink.preflight(EXACT)
    monkeypatch.setattr("delivered.connectors.postgres.read.OPEN_TRANSACTION_OLD_S", 0.0)
    assert [(f.code, f.refuses) for f in rig.sink.preflight(EXACT)] == [("PREPARED_TRANSACTION_OLD", False)]
    from delivered.connectors.postgres.store import id_prefix

    committer = rig.context("next").committers
    listed = committer.open_transactions()
    prefix = id_prefix(rig.scope, rig.sink.options.ledger_schema)
    shards = [t.transactional_id.removeprefix(prefix).rpartition(".")[0] for t in listed]
    assert [*zip(shards, (t.state for t in listed), strict=True)] == [("0.0", "Prepared"), ("0.1", "Prepared")]
    assert all(0 <= t.age_s() < 60 for t in listed)
    assert all(len(t.transactional_id.encode()) < 200 for t in listed)
    assert committer.abort_orphans(()) == Ok(2)
    left = [gid for (gid,) in postgres.execute("SELECT gid FROM pg_prepared_xacts")]
    assert sorted(g for g in left if g in others or g.startswith(rig.scope.prefix)) == sorted(others)
    with pytest.raises(UsageError, match="TRANSACTION_FOREIGN"):
        alone(committer).end_by_id(others[1], commit=False)
    with pytest.raises(UsageError, match="TRANSACTION_NOT_OPEN"):
        alone(committer).end_by_id(listed[0].transactional_id, commit=False)
    for gid in others:
        postgres.execute(f"ROLLBACK PREPARED '{gid}'")
    assert rig.visible() == Fingerprint()


def test_longest_names_fit_a_transaction_id() -> None:
    from delivered.connectors.postgres.store import is_ours, new_id

    work = Work(Scope("p" * 64, "s" * 64, "i" * 64), 10**18, 9_999)
    assert len(new_id(work, "delivered").encode()) < 200
    assert new_id(work, "delivered") != new_id(work, "delivered")
    one, two = Scope("a", "b.c", "i"), Scope("a.b", "c", "i")
    assert one.prefix == two.prefix
    assert not is_ours(one, "delivered", new_id(Work(two, 0, 0), "delivered"))


def test_p5_rolled_back_by_hand_is_written_again_alone(postgres: Postgres) -> None:
    """P5: somebody ended a decided participant: found by its missing marker, only that shard is written again."""
    rig = Rig(postgres.sink(mechanism="two_phase"))
    context = rig.context("dies")
    plan = rig.plan(context, 0)
    messages = rig.write(plan)
    prepared = tuple(m.prepared for m in messages if m.prepared is not None)
    from delivered.model.work import Decision

    total = sum((p.fingerprint for p in prepared), Fingerprint())
    assert context.ledger.decide(
        Decision(rig.scope, "dies", EXACT, 0, plan.offsets, prepared, {rig.scope.sink: Account(total)}, 1)
    ) == Ok(None)
    postgres.execute(f"ROLLBACK PREPARED '{prepared[1].handle['gid']}'")
    again = rig.context("second")
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {1}
    decision = commit_batch(again, 0, offsets(0), rig.write(plan))
    assert decision is not None
    assert decision.revision == 1
    assert rig.visible() == rig.expected(0)


@pytest.mark.matrix
def test_p4_ledger_stays_small(postgres: Postgres) -> None:
    """P4: decisions and markers of 6,000 batches leave 1,000 decisions and the markers of one batch."""
    import psycopg

    schema = "small_ledger"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        migrate(connection, schema)
        records = Records(connection, client.ledger_dialect(schema), Scope("p", "s", "i"))
        for first in range(0, 6_000, 1_000):
            with connection.transaction(), connection.pipeline():
                for batch in range(first, first + 1_000):
                    for shard in range(4):
                        connection.execute(
                            f"INSERT INTO {schema}.marker VALUES ('p', 's', 'i', %s, %s, 'g', 'f')", [batch, shard]
                        )
                    records.record(batch, "{}")
            connection.execute(f"VACUUM {schema}.marker, {schema}.decision")
    assert postgres.execute(f"SELECT count(*), min(batch) FROM {schema}.decision") == [
        (LEDGER_HISTORY_BATCHES, 6_000 - LEDGER_HISTORY_BATCHES)
    ]
    assert postgres.execute(f"SELECT count(*) FROM {schema}.marker") == [(4,)]
    [(size,)] = postgres.execute(
        f"SELECT pg_total_relation_size('{schema}.decision') + pg_total_relation_size('{schema}.marker')"
    )
    assert size < 8_000_000


def test_migration_by_several_at_once_and_from_the_future(postgres: Postgres) -> None:
    sink = postgres.sink(ledgerSchema="Future")
    ledgers = [open_ledger(sink, Scope("p", "s", "i")) for _ in range(4)]
    from delivered.model.work import Owner

    done = [threading.Thread(target=ledger.claim, args=(Owner("one"),)) for ledger in ledgers]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join(120)
    assert ledgers[0].look().epoch == 4
    assert postgres.execute('SELECT max(version) FROM "Future".migration') == [(len(MIGRATIONS),)]
    postgres.execute('INSERT INTO "Future".migration VALUES (999)')
    with pytest.raises(UsageError, match="LEDGER_NEWER"):
        open_ledger(sink, Scope("p", "s", "i")).claim(Owner("one"))


def test_reading_back_in_many_pages_and_partitions(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.postgres import read as reading

    monkeypatch.setattr(reading, "SLICE_PAGES", 3)
    table = postgres.table(None)
    postgres.execute(f"CREATE TABLE {table} (n bigint, t text) PARTITION BY RANGE (n)")
    for i in (0, 1):
        postgres.execute(
            f"CREATE TABLE {table}_{i} PARTITION OF {table} FOR VALUES FROM ({i * 5000}) TO ({i * 5000 + 5000})"
        )
    sink = postgres.sink(table)
    batch = pa.record_batch({"n": pa.array(range(10_000)), "t": pa.array(['x,"\n' * (i % 9) for i in range(10_000)])})
    write(sink, [batch])
    assert len(sink.scan().slices()) > 10
    assert read(sink).sort_by("n").to_pylist() == batch.to_pylist()


@pytest.mark.parametrize("more", [{}, {"batchColumn": "batch"}], ids=["pages", "batches"])
def test_rows_of_tables_that_inherit_are_not_read_back(postgres: Postgres, more: dict[str, str]) -> None:
    """An audit would take them for rows that nobody sent."""
    table = postgres.table(None)
    postgres.execute(f"CREATE TABLE {table} (n bigint, t text, batch bigint)")
    sink, batch = postgres.sink(table, **more), pa.record_batch({"n": [1], "t": ["a"]})
    write(sink, [batch])
    before = sink.scan().position()
    postgres.execute(f"CREATE TABLE {table}_more () INHERITS ({table})")
    postgres.execute(f"INSERT INTO {table}_more VALUES (2, 'b', NULL)")
    assert read(sink).select(["n", "t"]).to_pylist() == batch.to_pylist()
    assert before is not None
    assert [b for s in sink.scan().slices(before) for b in sink.scan().read(s) if b.num_rows] == []


def test_idle_connection_that_the_server_closed_is_replaced(postgres: Postgres) -> None:
    rig = Rig(postgres.sink())
    context = rig.context()
    plan = rig.plan(context, 0)
    rig.write(plan)
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'delivered %%' "
        "AND pid <> pg_backend_pid()"
    )
    context = rig.context("next")
    commit_batch(context, 0, offsets(0), rig.write(rig.plan(context, 0)))
    assert rig.visible() == rig.expected(0)


def test_wire_types_load_no_server_library_on_import() -> None:
    """Listing connectors needs no driver."""
    import subprocess
    import sys

    code = (
        "import sys; from delivered.connectors.postgres import CONNECTOR; "
        "CONNECTOR.sink({'url': 'postgresql://h/d', 'dbtable': 't'}); print('psycopg' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert SCHEMA.names == ["key", "value"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_rows_and_decision_are_in_together_or_not_at_all(postgres: Postgres, mechanism: str) -> None:
    """The ledger's own row is rejected at the very end of the decision: no row of the batch is visible."""
    schema = f"refusing_{mechanism}"
    rig = Rig(postgres.sink(mechanism=mechanism, ledgerSchema=schema))
    rig.run(0)
    postgres.execute(
        f"CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no decision today'; END $$"
    )
    postgres.execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON {schema}.decision FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    )
    context = rig.context()
    messages = rig.write(rig.plan(context, 1))
    with pytest.raises(DeliveredError, match=r"DECISION_FAILED.*no decision today"):
        commit_batch(context, 1, offsets(1), messages)
    assert rig.visible() == rig.expected(0)
    postgres.execute(f"DROP TRIGGER refuse ON {schema}.decision")
    again = rig.context("second")
    commit_batch(again, 1, offsets(1), rig.write(rig.plan(again, 1)))
    assert rig.visible() == rig.expected(0, 1)


@pytest.mark.parametrize(
    ("query", "code"),
    [("sslmode=require", "TLS_ABSENT"), ("sslmode=verify-full", "TLS_ABSENT"), ("a=1", "OPTION_UNKNOWN")],
)
def test_a_url_that_this_server_or_libpq_cannot_meet_is_a_mistake_and_no_outage(
    postgres: Postgres, query: str, code: str
) -> None:
    (finding,) = postgres.sink(url=f"{postgres.url}?{query}").preflight(Guarantee.EXACTLY_ONCE)
    assert (finding.code, finding.refuses, finding.transient) == (code, True, False)
