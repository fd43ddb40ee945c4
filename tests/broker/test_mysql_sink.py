"""The MySQL sink against a real server: types, bad input, what it leaves behind."""

from __future__ import annotations

import datetime as dt
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.databases import EVERY_TYPE, MECHANISMS, VALUES, read, write
from tests.support.sinks import Rig, offsets, rows
from tests.support.sweeps import sweep

from delivered.connectors.mysql import CONNECTOR, client, writer
from delivered.connectors.mysql.client import MIGRATIONS, migrate
from delivered.connectors.mysql.store import MysqlDatabase, ledger_dialect
from delivered.engine.context import open_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.kits.sql.ledger import Records
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES
from delivered.model.rows import Rows
from delivered.model.work import Owner

if TYPE_CHECKING:
    from tests.support.servers import Mysql

EXACT, LEAST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
FORMS = ["load", "insert"]
SCALE = {"real": 32, "wide": 64}
ROW = st.fixed_dictionaries(
    {
        name: st.none() | (st.floats(width=SCALE[name], allow_nan=False, allow_infinity=False) if name in SCALE else v)
        for name, v in VALUES.items()
    }
)


@contextmanager
def form(mysql: Mysql, name: str) -> Iterator[None]:
    """How rows are loaded; the server decides."""
    mysql.execute(f"SET GLOBAL local_infile = {int(name == 'load')}")
    try:
        yield
    finally:
        mysql.execute("SET GLOBAL local_infile = 1")


@pytest.mark.parametrize("how", FORMS)
def test_every_type_comes_back_as_it_went_in(mysql: Mysql, how: str) -> None:
    """Read by an independent client and by this package's reader; also for a batch that is a slice of another."""

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(ROW, min_size=1, max_size=30), st.integers(0, 3))
    def check(values: list[dict[str, Any]], start: int) -> None:
        batch = pa.RecordBatch.from_pylist(values, schema=EVERY_TYPE).slice(start)
        if batch.num_rows == 0:
            return
        sink = mysql.sink(mysql.table(None), ifNotExists="true")
        write(sink, [batch])
        names = ", ".join(f"`{n}`" + (" * 1e0" if n == "real" else "") for n in EVERY_TYPE.names)
        there = mysql.execute(f"SELECT {names} FROM {sink.options.table}")
        rows = [dict(zip(EVERY_TYPE.names, row, strict=True)) for row in there]
        assert sorted(repr(_as_client(row)) for row in rows) == sorted(repr(_as_client(r)) for r in batch.to_pylist())
        canonical = sink.records(batch)
        back = read(sink).combine_chunks().to_batches()
        assert back[0].schema == canonical.schema
        assert sum((fingerprint(b, 7) for b in back), Fingerprint()) == fingerprint(canonical, 7)
        mysql.execute(f"DROP TABLE {sink.options.table}")

    with form(mysql, how):
        check()


@pytest.mark.parametrize("how", FORMS)
def test_the_largest_float_gets_in(mysql: Mysql, how: str) -> None:
    """Its shortest text, 3.4028235e+38, parses to a larger double, which the server rejects."""
    largest = 3.4028234663852886e38
    batch = pa.record_batch({"id": pa.array([1, 2]), "real": pa.array([largest, -largest], pa.float32())})
    sink = mysql.sink(mysql.table(None), ifNotExists="true")
    with form(mysql, how):
        write(sink, [batch])
    assert sorted(read(sink).column("real").to_pylist()) == [-largest, largest]


def _as_client(row: dict[str, Any]) -> tuple[Any, ...]:
    def one(value: Any) -> Any:
        match value:
            case bool():
                return int(value)
            case float():
                return value + 0.0  # MariaDB has no -0.0
            case dt.datetime():
                return value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
            case dt.time():
                return dt.timedelta(
                    hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond
                )
            case _:
                return value

    return tuple(one(v) for v in row.values())


def test_blocks_are_bounded_and_whole() -> None:
    """P26: what is encoded at once does not grow with the batch."""
    big = pa.record_batch({"n": pa.array(range(100_000), pa.int64()), "t": pa.array(["x" * 1000] * 100_000)})
    found = list(writer.blocks(big, writer.LOAD))
    assert sum(rows for rows, _ in found) == 100_000
    assert sum(len(b) for _, b in found) == sum(len(str(i)) for i in range(100_000)) + 100_000 * (2 + 1000)
    assert max(len(b) for _, b in found) < 2 * writer.BLOCK_BYTES
    assert list(writer.blocks(big.slice(0, 0), writer.LOAD)) == []


def test_other_types_of_the_table_that_fit(mysql: Mysql) -> None:
    table = mysql.table(
        "a bigint, b double, s varchar(5), k varchar(5) CHARACTER SET utf8mb3, n decimal(20, 2), t timestamp(6) NULL, "
        "v varbinary(9), `Q q``%%` text, late int DEFAULT 7"
    )
    at = dt.datetime(2020, 2, 29, 12, 0, 0, 123456, dt.UTC)
    batch = pa.record_batch(
        {
            "a": pa.array([1, None], pa.int16()), "b": pa.array([0.5, None], pa.float32()),
            "s": pa.array(["äbc", None]), "k": pa.array(["abc", None]),
            "n": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
            "t": pa.array([at, None], pa.timestamp("us", "UTC")), "v": pa.array([b"\0\\\n\t'\xff", None]),
            "Q q`%%": pa.array(["it's", None]).dictionary_encode(),
        }
    )  # fmt: skip
    for how in FORMS:
        with form(mysql, how):
            write(mysql.sink(table), [batch])
    found = mysql.execute(f"SELECT a, b, s, k, n, v, `Q q``%%`, late FROM {table} WHERE a = 1")
    assert found == [(1, 0.5, "äbc", "abc", Decimal("1.50"), b"\0\\\n\t'\xff", "it's", 7)] * 2
    assert mysql.execute(f"SELECT count(*) FROM {table} WHERE coalesce(a, b, s, k, n, t, v) IS NULL") == [(2,)]
    back = read(mysql.sink(table))
    assert back["t"].to_pylist().count(at) == 2
    assert back["v"].to_pylist().count(b"\0\\\n\t'\xff") == 2


@pytest.mark.parametrize(
    ("columns", "column", "code"),
    [
        ("x int", pa.array([1], pa.int64()), "COLUMN_TYPE"),
        ("x text", pa.array([1], pa.int32()), "COLUMN_TYPE"),
        ("x int unsigned", pa.array([1], pa.int32()), "COLUMN_TYPE"),
        ("x timestamp(6) NULL", pa.array([0], pa.timestamp("us")), "COLUMN_TYPE"),
        ("x datetime", pa.array([0], pa.timestamp("us", "UTC")), "COLUMN_TYPE"),
        ("x float(7, 2)", pa.array([0.5], pa.float32()), "COLUMN_TYPE"),
        ("x decimal(9, 1)", pa.array([Decimal("1.25")], pa.decimal128(9, 2)), "COLUMN_TYPE"),
        ("x char(3)", pa.array(["a"]), "COLUMN_TYPE"),
        ("x enum('a', 'b')", pa.array(["a"]), "COLUMN_TYPE"),
        ("x text CHARACTER SET latin1", pa.array(["a"]), "COLUMN_TYPE"),
        ("x text CHARACTER SET ascii", pa.array(["a"]), "COLUMN_TYPE"),
        ("x binary(3)", pa.array([b"a"]), "COLUMN_TYPE"),
        ("y text", pa.array(["a"]), "COLUMN_MISSING"),
        ("x text, id int NOT NULL", pa.array(["a"]), "COLUMN_REQUIRED"),
        ("x bigint AS (1 + 1)", pa.array([1], pa.int64()), "COLUMN_COMPUTED"),
    ],
)
def test_rows_that_do_not_fit_the_table_are_refused_before_the_first(
    mysql: Mysql, columns: str, column: pa.Array, code: str
) -> None:
    sink = mysql.sink(mysql.table(columns))
    with pytest.raises(UsageError, match=f"DELIVERED_{code}") as caught:
        write(sink, [pa.record_batch({"x": column})], EXACT)
    assert caught.value.next_step
    assert "'x'" in str(caught.value) or code == "COLUMN_REQUIRED"


@pytest.mark.parametrize("name", ["a ", "\U0001f600", "n" * 65, ""])
def test_names_that_no_table_can_have_are_refused_without_a_server(name: str) -> None:
    sink = CONNECTOR.sink({"url": "mysql://nowhere.invalid/db", "dbtable": "t"})
    with pytest.raises(UsageError, match="COLUMN_NAME"):
        sink.check_schema(pa.schema([(name, pa.int64())]))
    sink.check_schema(pa.schema([(" a\uffff", pa.int64())]))


def test_types_without_a_home_are_refused_without_a_server() -> None:
    sink = CONNECTOR.sink({"url": "mysql://nowhere.invalid/db", "dbtable": "t"})
    for kind in (pa.list_(pa.int32()), pa.struct([("a", pa.int32())]), pa.duration("us"), pa.decimal128(38, 31)):
        with pytest.raises(UsageError, match="TYPE_UNKNOWN") as caught:
            sink.check_schema(pa.schema([("x", kind)]))
        assert caught.value.next_step
    with pytest.raises(UsageError, match="COLUMN_TWICE"):
        sink.check_schema(pa.schema([("x", pa.int32()), ("X", pa.int32())]))


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ("x varchar(2)", pa.array(["ok", "long"])),
        ("x text NOT NULL", pa.array(["ok", None])),
        ("x bigint UNIQUE", pa.array([1, 1], pa.int64())),
        ("x bigint CHECK (x < 2)", pa.array([1, 2], pa.int64())),
        ("x text CHARACTER SET utf8mb3", pa.array(["ä", "\U0001f600"])),
        (
            "x timestamp(6) NULL",
            pa.array([1_577_836_800_000_000, -315_619_200_000_000], pa.timestamp("us", "UTC")),
        ),
    ],
)
def test_a_row_that_would_be_changed_or_left_out_is_refused(
    mysql: Mysql, columns: str, column: pa.Array, how: str
) -> None:
    """LOAD DATA LOCAL implies IGNORE: it truncates, converts and skips, with a warning."""
    table = mysql.table(columns)
    with form(mysql, how):
        for guarantee, mechanism in ((LEAST, "two_phase"), (EXACT, "two_phase"), (EXACT, "one_transaction")):
            rig = Rig(mysql.sink(table, mechanism=mechanism))
            batch = pa.record_batch({"x": column})
            plan = rig.plan(rig.context(guarantee=guarantee), 0)
            with pytest.raises(DeliveredError, match="ROW_REFUSED") as caught:
                commit_batch(
                    rig.context(guarantee=guarantee),
                    0,
                    offsets(0),
                    [write_shard(rig.sinks, plan, 0, 0, iter([Rows(batch)]), batch.schema)],
                )
            assert caught.value.next_step
            assert mysql.execute(f"SELECT count(*) FROM {table}") == [(0,)]
            rig.context("next").committers.abort_orphans(())


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0, float("nan")]), pa.array([float("-inf")]), pa.array([-800_000], pa.int32()).cast(pa.date32())],
)
def test_values_that_no_column_can_hold(mysql: Mysql, column: pa.Array) -> None:
    sink, batch = mysql.sink(mysql.table(None), ifNotExists="true"), pa.record_batch({"x": column})
    with pytest.raises(BadRecord, match="VALUE_UNSTORABLE"):
        write(sink, [batch])
    reasons = sink.invalid_rows(batch)
    assert reasons is not None
    assert "column 'x'" in reasons.drop_null()[0].as_py()


def test_table_is_created_only_if_asked(mysql: Mysql) -> None:
    table = mysql.table(None)
    refused = mysql.sink(table)
    with pytest.raises(UsageError, match="TABLE_MISSING"):
        write(refused, [rows(0, 0)])
    assert [f.code for f in refused.preflight(EXACT) if f.refuses] == ["TABLE_MISSING"]
    asked = mysql.sink(table, ifNotExists="true")
    assert not [f for f in asked.preflight(EXACT) if f.refuses]
    done = [threading.Thread(target=write, args=(asked, [rows(0, i)])) for i in range(4)]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join()
    assert mysql.execute(f"SELECT count(*) FROM {table}") == [(200,)]
    with pytest.raises(UsageError, match="SCHEMA_CHANGED"):
        write(mysql.sink(table), [rows(0, 0).drop_columns(["value"])])
    # Dropped and recreated by this package, it is another table.
    mysql.execute(f"DROP TABLE {table}")
    write(asked, [rows(0, 0).drop_columns(["value"])])


@pytest.mark.parametrize("engine", ["MyISAM", "Aria", "MEMORY"])
def test_engines_that_undo_nothing_are_refused(mysql: Mysql, engine: str) -> None:
    if (engine,) not in mysql.execute("SELECT engine FROM information_schema.engines"):
        pytest.skip(f"{mysql.system} has no {engine}")
    table = mysql.table(None)
    mysql.execute(f"CREATE TABLE {table} (`key` varbinary(99), value varbinary(99)) ENGINE = {engine}")
    sink = mysql.sink(table)
    assert [f.code for f in sink.preflight(LEAST)] == ["ENGINE_NOT_TRANSACTIONAL"]
    with pytest.raises(UsageError, match="ENGINE_NOT_TRANSACTIONAL"):
        write(sink, [rows(0, 0)], EXACT)
    mysql.execute(f"CREATE VIEW {table}_v AS SELECT * FROM {table}")
    assert [f.code for f in mysql.sink(f"{table}_v").preflight(EXACT)] == ["NOT_A_TABLE"]


def test_read_only_server_is_refused_also_for_a_user_who_may_write(mysql: Mysql) -> None:
    """Its user has all privileges, which override read_only: a replica would diverge."""
    rig = Rig(mysql.sink())
    rig.run(0)
    fresh = mysql.sink(rig.sink.options.table, lockTimeout="61")  # type: ignore[attr-defined]
    mysql.execute("SET GLOBAL read_only = 1")
    try:
        assert [f.code for f in rig.sink.preflight(EXACT) if f.refuses] == ["READ_ONLY"]
        with pytest.raises(Unreachable, match="READ_ONLY") as caught:
            rig.plan(rig.context(), 1)
        assert "primary" in str(caught.value.next_step)
        with pytest.raises(Unreachable, match="READ_ONLY"):
            write(fresh, [rows(1, 0)])
        assert rig.visible() == rig.expected(0), "an audit may read"
    finally:
        mysql.execute("SET GLOBAL read_only = 0")


def test_settings_that_weaken_a_commit_are_told(mysql: Mysql) -> None:
    sink = mysql.sink()
    mysql.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        assert [(f.code, f.refuses) for f in sink.preflight(EXACT)] == [("COMMIT_NOT_FLUSHED", False)]
        assert not sink.preflight(Guarantee.AT_MOST_ONCE)
    finally:
        mysql.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert not sink.preflight(EXACT)


@pytest.mark.parametrize("mechanism", sweep(MECHANISMS, lambda m: m == "two_phase"))
def test_with_a_binary_log(new_mysql: Callable[..., Mysql], mechanism: str) -> None:
    """Killed with prepared transactions in its binary log; and a statement-based log, which is refused."""
    mysql = new_mysql(log_bin="binlog", server_id="1", binlog_format="ROW", sync_binlog="1")
    rig = Rig(mysql.sink(mechanism=mechanism))
    assert not rig.sink.preflight(EXACT)
    rig.run(0)
    context = rig.context()
    messages = rig.write(rig.plan(context, 1))
    mysql.broker.kill()
    mysql.broker.restart()
    assert rig.visible() == rig.expected(0)
    assert commit_batch(context, 1, offsets(1), messages) is not None
    assert rig.visible() == rig.expected(0, 1)
    mysql.execute("SET GLOBAL binlog_format = 'STATEMENT'")
    mysql.execute("SET GLOBAL sync_binlog = 0")
    assert [f.code for f in rig.sink.preflight(EXACT)] == ["COMMIT_NOT_FLUSHED", "BINLOG_STATEMENT"]
    with pytest.raises(UsageError, match="BINLOG_STATEMENT"):
        write(mysql.sink(lockTimeout="62"), [rows(2, 0)], EXACT)


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [
        (1021, "Disk full (/tmp/#sql); waiting for someone to free some space...", "DISK_FULL"),
        (1114, "The table 'orders' is full", "DISK_FULL"),
        (1030, 'Got error 28 "No space left on device" from storage engine InnoDB', "DISK_FULL"),
        (1030, "Got error 194 from storage engine InnoDB", "MYSQL_ERROR"),
        (1205, "Lock wait timeout exceeded", "LOCK_TIMEOUT"),
        (1213, "Deadlock found when trying to get lock", "DEADLOCK"),
        (1040, "Too many connections", "MYSQL_UNREACHABLE"),
        (1047, "WSREP has not yet prepared node for application use", "MYSQL_UNREACHABLE"),
        (1665, "Cannot execute statement: impossible to write to binary log", "BINLOG_STATEMENT"),
    ],
)
def test_errors_say_what_to_do(number: int, said: str, code: str) -> None:
    from pymysql import OperationalError

    from delivered.connectors.mysql.client import explained

    error = explained(OperationalError(number, said), CONNECTOR.sink({"url": "mysql://h/d", "dbtable": "t"}).options)
    assert error.code == f"DELIVERED_{code}"
    assert said in error.message
    assert error.next_step or code == "MYSQL_ERROR"


def test_lock_wait_and_deadlock_are_told(mysql: Mysql) -> None:
    """A prepared shard locks its unique keys: another one waits for them no longer than lockTimeout."""
    table = mysql.table("x bigint UNIQUE")
    sink = mysql.sink(table, mechanism="two_phase", lockTimeout="2")
    batch = pa.record_batch({"x": pa.array(range(100), pa.int64())})
    write(sink, [batch], EXACT)
    began = time.monotonic()
    with pytest.raises(DeliveredError, match="LOCK_TIMEOUT") as caught:
        write(sink, [batch], EXACT)
    assert 1 < time.monotonic() - began < 15
    assert "lockTimeout" in str(caught.value.next_step)
    sink.committer(Scope("p", sink.name, "i")).abort_orphans(())
    # Two that want each other's keys: a deadlock.
    halves = [batch.slice(0, 50), batch.slice(50, 50)]
    scope = Scope("deadlock", sink.name, "i")
    writers = [sink.writer(Work(scope, 0, i), EXACT, batch.schema) for i in (0, 1)]
    errors: list[DeliveredError] = []

    def end(i: int) -> None:
        try:
            writers[i].stage(halves[1 - i])
            writers[i].prepare(Fingerprint(100))
        except DeliveredError as error:
            errors.append(error)
            writers[i].abort()

    loaded = "SELECT trx_id FROM information_schema.innodb_trx WHERE trx_rows_modified >= 50"
    earlier = set(mysql.execute(loaded))  # what other tests left prepared at this server
    for i in (0, 1):
        writers[i].stage(halves[i])
    deadline = time.monotonic() + 30
    while len(set(mysql.execute(loaded)) - earlier) < 2:  # each has locked the first half of its keys
        assert time.monotonic() < deadline
        time.sleep(0.2)  # the server keeps what it shows for 0.1 s after each look
    ends = [threading.Thread(target=end, args=(i,)) for i in (0, 1)]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join(60)
    assert errors
    assert {e.code for e in errors} <= {"DELIVERED_DEADLOCK", "DELIVERED_LOCK_TIMEOUT"}
    assert all(e.next_step for e in errors)
    sink.committer(scope).abort_orphans(())
    assert mysql.execute(f"SELECT count(*) FROM {table}") == [(0,)]


def test_login_password_and_rights(mysql: Mysql, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is resolved where it is used; no error shows the password."""
    table = mysql.table()
    mysql.execute("CREATE USER app@'127.0.0.1' IDENTIFIED BY 'open-sesame'")
    mysql.execute("GRANT ALL ON ledger_of_app.* TO app@'127.0.0.1'")
    url = mysql.url.replace("delivered@", "app@")

    def sink(password: str, name: str = table, **more: str) -> Any:
        given = {"url": f"jdbc:{url}", "dbtable": name, "password": password, "ledgerSchema": "ledger_of_app", **more}
        return CONNECTOR.sink(given)

    assert [f.code for f in sink("env:APP_PASSWORD").preflight(EXACT)] == ["SECRET_MISSING"]
    monkeypatch.setenv("APP_PASSWORD", "open-sesame")
    assert [f.code for f in sink("env:APP_PASSWORD").preflight(EXACT)] == ["PERMISSION"], "not even to the database"
    mysql.execute(f"GRANT UPDATE ON {table} TO app@'127.0.0.1'")
    assert [f.code for f in sink("env:APP_PASSWORD").preflight(EXACT)] == ["PERMISSION"]
    with pytest.raises(Unreachable, match="MYSQL_LOGIN") as caught:
        write(sink("not-the-secret-word"), [rows(0, 0)])
    assert "not-the-secret-word" not in str(caught.value) + repr(caught.value.__cause__)
    assert "not-the-secret-word" not in repr(sink("not-the-secret-word"))
    right = pickle.loads(pickle.dumps(sink("env:APP_PASSWORD")))
    with pytest.raises(DeliveredError, match="PERMISSION"):
        Rig(right).run(0)
    mysql.execute(f"GRANT INSERT ON {table} TO app@'127.0.0.1'")
    assert not right.preflight(EXACT)
    Rig(right).run(0)
    assert mysql.execute(f"SELECT count(*) FROM {table}") == [(100,)]
    assert [f.code for f in sink("env:APP_PASSWORD", "elsewhere.t", ifNotExists="true").preflight(EXACT)] == [
        "PERMISSION"
    ]
    mysql.execute("GRANT ALL ON elsewhere.* TO app@'127.0.0.1'")
    missing = sink("env:APP_PASSWORD", "elsewhere.t", ifNotExists="true").preflight(EXACT)
    assert [f.code for f in missing if f.refuses] == ["SCHEMA_MISSING"]


def test_server_that_is_not_there_or_silent_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.CONNECT_TRY_S < CONNECT_TIMEOUT_S
    monkeypatch.setattr(client, "CONNECT_TRY_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sink = CONNECTOR.sink({"url": f"mysql://127.0.0.1:{port}/db", "dbtable": "t"})
        began = time.monotonic()
        with pytest.raises(Unreachable, match="MYSQL_UNREACHABLE"):
            open_ledger(sink, Scope("p", "s", "i")).look()
        assert time.monotonic() - began < 15
    began = time.monotonic()
    assert [f.code for f in sink.preflight(EXACT)] == ["MYSQL_UNREACHABLE"]
    with pytest.raises(Unreachable):
        write(sink, [rows(0, 0)])
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"url": "mysql://me:secret-word@h/db"}, "PASSWORD_IN_URL"),
        ({"url": "jdbc:mariadb://h/db?password=secret-word"}, "PASSWORD_IN_URL"),
        ({"url": "jdbc:postgresql://me:secret-word@h/db"}, "PASSWORD_IN_URL"),
        ({"url": "mysql://h"}, "OPTION_VALUE"),
        ({"url": "mysql://h:x/db"}, "OPTION_VALUE"),
        ({"url": "jdbc:mysql://h/db?useSSL=true"}, "OPTION_VALUE"),
        ({"dbtable": "a.b.c"}, "OPTION_VALUE"),
        ({"dbtable": "t; DROP TABLE t"}, "OPTION_VALUE"),
        ({"mechanism": "three_phase"}, "OPTION_VALUE"),
        ({"lockTimeout": "0"}, "OPTION_VALUE"),
        ({"dbtabel": "t"}, "OPTION_UNKNOWN"),
    ],
)
def test_bad_options(options: dict[str, str], code: str) -> None:
    with pytest.raises(UsageError, match=code) as caught:
        CONNECTOR.sink({"url": "mysql://h/db", "dbtable": "t", **options})
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_names_that_need_quotes(mysql: Mysql, mechanism: str) -> None:
    base = f"Or ders%{mechanism}"
    mysql.execute(f"CREATE DATABASE `{base}`")
    mysql.execute(f'CREATE TABLE `{base}`.`T``ab"le` (`k "ey` int, `{{x}}` int)')
    rig = Rig(mysql.sink(f'`{base}`.`T``ab"le`', mechanism=mechanism, ledgerSchema=f"led`ger {mechanism}"))
    context = rig.context()
    plan = rig.plan(context, 0)
    batch = pa.record_batch({'k "ey': pa.array([1, 2], pa.int32()), "{x}": pa.array([3, 4], pa.int32())})
    message = write_shard(rig.sinks, plan, 0, 0, iter([Rows(batch)]), batch.schema)
    commit_batch(context, 0, offsets(0), [message])
    assert mysql.execute(f'SELECT * FROM `{base}`.`T``ab"le`') == [(1, 3), (2, 4)]
    assert read(rig.sink).num_rows == 2


def test_migration_by_several_at_once_and_from_the_future(mysql: Mysql) -> None:
    sink = mysql.sink(ledgerSchema="Future")
    ledgers = [open_ledger(sink, Scope("p", "s", "i")) for _ in range(4)]
    done = [threading.Thread(target=ledger.claim, args=(Owner("one"),)) for ledger in ledgers]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join(120)
    assert ledgers[0].look().epoch == 4
    assert mysql.execute("SELECT max(version) FROM Future.migration") == [(len(MIGRATIONS),)]
    mysql.execute("INSERT INTO Future.migration (version) VALUES (999)")
    with pytest.raises(UsageError, match="LEDGER_NEWER"):
        open_ledger(sink, Scope("p", "s", "i")).claim(Owner("one"))


def test_migration_that_was_cut_short_is_finished(mysql: Mysql) -> None:
    """The server commits each table separately: a process can die in between."""
    sink = mysql.sink(ledgerSchema="cut_short")
    mysql.execute("CREATE DATABASE cut_short")
    mysql.execute("CREATE TABLE cut_short.migration (version integer PRIMARY KEY)")
    mysql.execute(MIGRATIONS[0][0].format(s="cut_short"))
    assert open_ledger(sink, Scope("p", "s", "i")).claim(Owner("one")).epoch == 1


def test_p4_ledger_stays_small(mysql: Mysql) -> None:
    """P4: decisions and markers of 1,250 batches leave 1,000 decisions and the markers of one batch."""
    schema, count = "small_ledger", 1_250
    sink = mysql.sink("t", ledgerSchema=schema)
    session = MysqlDatabase(sink.options).connect("test")
    records = Records(session, ledger_dialect(schema), Scope("p", "s", "i"))
    migrate(session, schema)
    for first in range(0, count, 250):
        session.execute("START TRANSACTION")
        for batch in range(first, first + 250):
            session.execute(
                f"INSERT INTO {schema}.marker (pipeline, sink, incarnation, batch, shard, gid, fingerprint) VALUES "
                + ", ".join(f"('p', 's', 'i', {batch}, {shard}, 'g', 'f')" for shard in range(2))
            )
            records.record(batch, "{}")
        session.execute("COMMIT")
    session.close()
    assert mysql.execute(f"SELECT count(*), min(batch) FROM {schema}.decision") == [
        (LEDGER_HISTORY_BATCHES, count - LEDGER_HISTORY_BATCHES)
    ]
    assert mysql.execute(f"SELECT count(*) FROM {schema}.marker") == [(2,)]


def test_reading_back_in_slices_of_the_key_and_without_one(mysql: Mysql, monkeypatch: pytest.MonkeyPatch) -> None:
    from delivered.connectors.mysql import read as reading

    monkeypatch.setattr(reading, "SLICE_KEYS", 700)
    batch = pa.record_batch(
        {"n": pa.array(range(-2_000, 8_000)), "t": pa.array(['x,"\n\\' * (i % 9) for i in range(10_000)])}
    )
    for key, least in (("n bigint PRIMARY KEY", 11), ("n bigint", 1)):
        sink = mysql.sink(mysql.table(f"{key}, t text"))
        write(sink, [batch])
        assert len(sink.scan().slices()) >= least
        assert read(sink).sort_by("n").to_pylist() == batch.to_pylist()
    empty = mysql.sink(mysql.table("n bigint PRIMARY KEY, t text"))
    write(empty, [batch.slice(0, 1)])
    mysql.execute(f"DELETE FROM {empty.options.table}")
    assert read(empty).num_rows == 0


def test_idle_connection_that_the_server_closed_is_replaced(mysql: Mysql) -> None:
    rig = Rig(mysql.sink())
    context = rig.context()
    rig.write(rig.plan(context, 0))
    with closing(mysql.connect()) as client:
        cursor = client.cursor()
        cursor.execute(
            "SELECT id FROM information_schema.processlist WHERE user = 'delivered' AND id <> connection_id()"
        )
        for (number,) in cursor.fetchall():
            cursor.execute(f"KILL {number}")
    messages = rig.write(rig.plan(context, 0))
    commit_batch(context, 0, offsets(0), messages)
    assert rig.visible() == rig.expected(0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_rows_and_decision_are_in_together_or_not_at_all(mysql: Mysql, mechanism: str) -> None:
    """The ledger's own row is rejected at the very end of the decision: no row of the batch is visible."""
    schema = f"refusing_{mechanism}"
    rig = Rig(mysql.sink(mechanism=mechanism, ledgerSchema=schema))
    rig.run(0)
    mysql.execute(
        f"CREATE TRIGGER {schema}.refuse BEFORE INSERT ON {schema}.decision FOR EACH ROW "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no decision today'"
    )
    context = rig.context()
    messages = rig.write(rig.plan(context, 1))
    with pytest.raises(DeliveredError, match=r"DECISION_FAILED.*no decision today"):
        commit_batch(context, 1, offsets(1), messages)
    assert rig.visible() == rig.expected(0)
    mysql.execute(f"DROP TRIGGER {schema}.refuse")
    again = rig.context("second")
    commit_batch(again, 1, offsets(1), rig.write(rig.plan(again, 1)))
    assert rig.visible() == rig.expected(0, 1)


def test_another_unique_index_never_takes_another_keys_row(mysql: Mysql) -> None:
    """ON DUPLICATE KEY UPDATE would silently let a new key with an existing address overwrite its owner."""
    table = mysql.table("id bigint PRIMARY KEY, address varchar(20) UNIQUE")
    sink = mysql.sink(table, mode="upsert", keyColumns="id")
    write(sink, [pa.record_batch({"id": pa.array([1]), "address": ["a"]})])
    with pytest.raises(BadRecord, match="ROW_REFUSED"):
        write(sink, [pa.record_batch({"id": pa.array([2]), "address": ["a"]})])
    assert mysql.execute(f"SELECT * FROM {table}") == [(1, "a")]


def test_a_loose_collation_of_a_key_is_told(mysql: Mysql) -> None:
    table = mysql.table("id varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY, v bigint")
    sink = mysql.sink(table, mode="upsert", keyColumns="id")
    assert [(f.code, f.refuses) for f in sink.preflight(EXACT)] == [("KEY_COLLATION", False)]
    # A table created by this package distinguishes all keys.
    own = mysql.sink(mysql.table(None), mode="upsert", keyColumns="id", ifNotExists="true")
    keys = ["a", "A", "a ", "ä", "", " "]
    write(own, [pa.record_batch({"id": pa.array(keys), "v": pa.array(range(6))})])
    assert not own.preflight(EXACT)
    assert sorted(mysql.execute(f"SELECT id, v FROM {own.options.table}")) == sorted(zip(keys, range(6), strict=True))


def test_no_file_of_this_machine_is_ever_sent(mysql: Mysql) -> None:
    """A server or an impostor may request any file in reply to any statement. The client does not send it."""
    from delivered.connectors.mysql.client import connect

    connection, table = connect(mysql.sink().options), mysql.table("x text")
    with pytest.raises(RuntimeError, match="local_infile"):
        connection.execute(f"LOAD DATA LOCAL INFILE '/etc/hostname' INTO TABLE {table} (x)")
    connection.close()
    assert mysql.execute(f"SELECT count(*) FROM {table}") == [(0,)]


def test_listing_connectors_needs_no_driver() -> None:
    code = (
        "import sys; from delivered.connectors.mysql import CONNECTOR; "
        "CONNECTOR.sink({'url': 'mysql://h/d', 'dbtable': 't'}); print('pymysql' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
