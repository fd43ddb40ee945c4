"""The ledger of a pipeline and sink in the user's MySQL or MariaDB, and the staging tables of its shards.

Staging tables are in the ledger's database: `s_<check>_<batch>_<shard>_<nonce>`. DDL commits implicitly, so a staging
table is created before its transaction, and dropped after the one that moved its rows: by `Committer.commit`, or by the
next start.

Mechanism two_phase: XA transactions at the server. An id has two parts of at most 64 bytes, here joined by a colon:
`delivered.<check>.<batch>.<shard>` and `<since>.<nonce>.<pipeline>.<sink>`. The check is a hash of pipeline, sink and
the ledger's database, because a server lists the prepared transactions of all its databases; `since` is the start time
in milliseconds since 1970, in hexadecimal, which the server does not record; the nonce is new for each attempt, so ids
are never reused; the names are for display, and truncated.

In MariaDB, error 1397 (XAER_NOTA) means that the transaction has ended, or that the session that prepared it is still
alive. XA RECOVER distinguishes the two. It runs before the marker is read: a transaction that is not listed has ended,
and its effect is complete.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from delivered.connectors.mysql import MysqlOptions, client, target
from delivered.connectors.mysql.client import (
    CONSTRAINTS,
    DEADLOCK,
    ERRORS,
    LOCK_TIMEOUT,
    Session,
    check_writable,
    connect,
    end_session,
    error_number,
    explained,
    is_lost,
    ledger_version,
    migrate,
    register_session,
)
from delivered.connectors.mysql.target import MysqlMerge, Target, find, read_definition
from delivered.contract.sink import OpenTransaction
from delivered.kits.mysql import DENIED
from delivered.kits.sql.database import (
    CLAIM_WAIT_S,
    LEDGER_TABLES,
    Connection,
    Definition,
    Dialect,
    Server,
    quoted,
    with_values,
)
from delivered.kits.sql.ledger import SqlLedger
from delivered.kits.sql.merge import ORDER, ROUND, Merge
from delivered.kits.sql.sink import Names, PreparedRows, ServerCommitter, Shards, Staging, new_nonce, open_transaction
from delivered.kits.sql.table import Mechanism
from delivered.model.errors import DeliveredError, Refused
from delivered.model.identity import Scope, Work
from delivered.model.work import Prepared


@dataclass(frozen=True)
class MysqlDialect(Dialect):
    """A DELETE by a condition scans a short table whatever its indexes, and waits for locked rows: another pipeline's
    decision, or, forever, a marker of a prepared transaction. So nothing here does that."""

    def known(self, keys: str, column: str | None) -> str:
        first = column or keys.partition(",")[0]
        return f"ON DUPLICATE KEY UPDATE {first} = VALUES({first})"

    def delete(self, connection: Connection, table: str, where: str, values: Mapping[str, Any]) -> None:
        """Deletes only rows that a non-locking read sees, which excludes prepared ones; each by its id, the only form
        for which the server never scans."""
        for (number,) in connection.execute(self(f"SELECT n FROM {{{table}}} WHERE {where}"), values).fetchall():
            connection.execute(self(f"DELETE d FROM {{{table}}} AS d WHERE n = :n"), {"n": int(number)})

    def forget(self, connection: Connection, table: str, index: str, where: str) -> None:
        """Forces the index: a scan would wait for rows of other pipelines' decisions."""
        connection.execute(self(f"DELETE d FROM {{{table}}} AS d FORCE INDEX ({index}) WHERE {where}"), {})


@cache
def ledger_dialect(schema: str) -> MysqlDialect:
    """Dialect of a ledger in this database."""
    s = with_values(schema)
    return MysqlDialect(
        tables={name: f"{s}.{table}" for name, table in LEDGER_TABLES.items()},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "n", "started": "n"},
        hold=" FOR UPDATE",
        pack=lambda names: json.dumps(list(names)),
        unpack=json.loads,
        hash=lambda value: f"x'{value.hex()}'",
        snapshot=("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION READ ONLY"),
        see_holders="find the session: SELECT * FROM information_schema.innodb_trx; then KILL its trx_mysql_thread_id",
        sign="UPDATE {owner} SET session = :session WHERE pipeline = :pipeline AND sink = :sink",
    )


@dataclass(frozen=True)
class MysqlDatabase(Server[Session]):
    """The user's database."""

    options: MysqlOptions
    system = "MySQL"

    @property
    def where(self) -> str:
        return self.options.where

    @property
    def dialect(self) -> Dialect:
        return ledger_dialect(self.options.ledger_schema)

    def begin(self, connection: Session) -> None:
        check_writable(connection, self.options)
        if not connection.nonce:
            register_session(connection)
        connection.execute("START TRANSACTION")

    @contextlib.contextmanager
    def claiming(self, connection: Session) -> Iterator[None]:
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {CLAIM_WAIT_S}")
        try:
            self.begin(connection)
            yield
        except BaseException:
            self.discard(connection)
            raise
        connection.execute("COMMIT")
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {self.options.lock_timeout_s}")

    def may_commit(self, error: Exception) -> bool:
        """Always: only a claim, which waits for the transaction to end, shows it."""
        del error
        return True

    def end_holders(self, connection: Session, role: str, signature: Callable[[], str]) -> str:
        del role
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        connection.execute("START TRANSACTION READ ONLY")
        nonce = signature()
        connection.execute("COMMIT")
        if nonce and nonce != connection.nonce:
            end_session(connection, nonce)
        return ""

    def _connect(self, role: str, writes: bool) -> Session:
        return connect(self.options, role, writes)

    def check_writable(self, connection: Session) -> None:
        check_writable(connection, self.options)

    def errors(self) -> type[Exception]:
        return ERRORS

    def explained(self, error: Exception) -> DeliveredError:
        return explained(error, self.options)

    def is_lost(self, error: BaseException) -> bool:
        return is_lost(error)

    def is_locked(self, error: BaseException) -> bool:
        return error_number(error) in (LOCK_TIMEOUT, DEADLOCK)

    def is_constraint(self, error: Exception) -> bool:
        return error_number(error) in CONSTRAINTS

    def idle(self, connection: Session) -> bool:
        return connection.idle

    def definition(self, connection: Session, *, columns: bool = False) -> Definition:
        del columns  # they are read for the keys' collations anyway
        return read_definition(connection, self.options)

    def table(self, connection: Session) -> str | None:
        table = find(connection, self.options)
        return None if table is None else table.full

    def version(self, connection: Session) -> int:
        return ledger_version(connection, self.options.ledger_schema)

    def migrate(self, connection: Session) -> None:
        migrate(connection, self.options.ledger_schema)


class MysqlStaging(Staging):
    options: MysqlOptions

    def altered(self, connection: Session, tables: Sequence[str]) -> Iterator[tuple[str, str, str]]:
        options, columns = self.options, "column_name, column_type, character_set_name FROM information_schema.columns"
        rows = connection.execute(
            f"SELECT {columns} WHERE table_schema = coalesce(%s, database()) AND table_name = %s",
            [options.schema, options.table],
        ).fetchall()
        target = {name.lower(): (name, kind, charset) for name, kind, charset in rows}
        staged = connection.execute(
            f"SELECT DISTINCT {columns} WHERE table_schema = %s AND table_name IN ({', '.join(['%s'] * len(tables))})",
            [options.ledger_schema, *tables],
        ).fetchall()
        for name, kind, charset in staged:
            now = target.get(name.lower())
            if now is not None and now[1:] != (kind, charset):
                yield now[0], kind, now[1]

    def _merge(self, prepared: Prepared) -> Merge:
        handle = PreparedRows.of(prepared)
        return MysqlMerge(self.options.write, handle.target, handle.stored, handle.index)


def build_staging(options: MysqlOptions) -> MysqlStaging:
    return MysqlStaging(options, MysqlDatabase(options))


def build_store(options: MysqlOptions, scope: Scope) -> SqlLedger[Session]:
    """The ledger of a pipeline and sink, on the server that holds the rows."""
    return SqlLedger(MysqlDatabase(options), scope, build_staging(options))


def create(session: Session, options: MysqlOptions, table: str, target: Target) -> None:
    """Create a table with the columns of the rows, all nullable. Raises MySQLError."""
    write = options.write
    columns = [f"{quoted(n)} {target.shown[n]} NULL" for n in target.merge.columns]
    if write.expected is not None:
        columns.append(f"{quoted(write.expected)} {target.shown[str(write.version)]} NULL")
    if write.conditional:
        columns.append(f"{quoted(ROUND)} bigint NOT NULL DEFAULT 1")
    if write.delete is not None:
        columns.append(f"{quoted(write.delete)} tinyint(1) NULL")
    if write.merges:
        columns.append(f"{quoted(ORDER)} bigint unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY")
    session.execute(
        f"CREATE TABLE {quoted(options.ledger_schema)}.{quoted(table)} ({', '.join(columns)}) ENGINE = InnoDB"
    )


def list_staging_tables(session: Session, names: Names) -> list[str]:
    """Every staging table of this pipeline and sink. Raises MySQLError."""
    like = names.staging_prefix.replace("_", r"\_") + "%"
    rows = session.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name LIKE %s",
        [names.ledger_schema, like],
    ).fetchall()
    return [name for (name,) in rows if names.is_staging(name)]


PART_BYTES_MAX = 64
CLOSES_S, KILLED_S = 1.0, 5.0
"""How long to wait for the preparing session to end by itself, and again after killing it."""
_ID = re.compile(r"(\d+)\.(\d+):([0-9a-f]{11,16})\.([0-9a-f]{16})\.[A-Za-z0-9._-]*")


def build_names(scope: Scope, ledger_schema: str) -> Names:
    """With a longer check than elsewhere, because the names are not part of an id's first half."""
    return Names(scope, ledger_schema, check_bytes=8)


def id_prefix(scope: Scope, ledger_schema: str) -> str:
    """Prefix of all ids of this pipeline and sink, in any incarnation, and of no others."""
    return f"delivered.{build_names(scope, ledger_schema).check}."


def new_id(work: Work, ledger_schema: str) -> str:
    """A new, unique id."""
    first = f"{id_prefix(work.scope, ledger_schema)}{work.batch}.{work.shard}"
    since = time.time_ns() // 1_000_000
    second = f"{since:011x}.{new_nonce()}.{work.scope.pipeline}.{work.scope.sink}"
    return f"{first}:{second[:PART_BYTES_MAX]}"


def is_ours(scope: Scope, ledger_schema: str, candidate: str) -> bool:
    """Whether an id belongs to a shard of this pipeline and sink."""
    prefix = id_prefix(scope, ledger_schema)
    return candidate.startswith(prefix) and _ID.fullmatch(candidate[len(prefix) :]) is not None


def parse_nonce(gid: str) -> str:
    return gid.partition(":")[2].split(".")[1]


def staging_table(names: Names, gid: str) -> str:
    """The staging table of an upsert's transaction."""
    first, _, _ = gid.partition(":")
    batch, shard = first.split(".")[2:4]
    return names.staging(Work(names.scope, int(batch), int(shard)), parse_nonce(gid))


def xid(gid: str) -> str:
    """An id in SQL; needs no escaping."""
    first, _, second = gid.partition(":")
    return f"'{first}','{second}'"


def list_transactions(session: Session, scope: Scope, options: MysqlOptions) -> list[OpenTransaction]:
    """Every prepared transaction of this pipeline and sink, oldest first. Raises MySQLError.

    In MySQL, listing them is a right of its own, without which no pipeline prepares any (`check_allowed`).
    """
    prefix = id_prefix(scope, options.ledger_schema)
    prepared = []
    try:
        ids = _prepared(session)
    except ERRORS as error:
        if options.mechanism is Mechanism.TWO_PHASE or client.error_number(error) not in DENIED:
            raise
        return []
    for gid in ids:
        match = _ID.fullmatch(gid[len(prefix) :]) if gid.startswith(prefix) else None
        if match is not None:
            prepared.append((int(match[3], 16), gid))
    return [open_transaction(gid, started_ms, options) for started_ms, gid in sorted(prepared)]


def all_started_ms(session: Session) -> list[int]:
    """Start times of this package's prepared transactions, of any pipeline. Raises MySQLError."""
    matches = (re.fullmatch(rf"delivered\.[0-9a-f]{{16}}\.{_ID.pattern}", gid) for gid in _prepared(session))
    return [int(match[3], 16) for match in matches if match is not None]


def end(session: Session, gid: str, commit: bool) -> bool:
    """Commit or roll back a prepared transaction; kills the session that prepared it if it is still alive.

    Returns:
        False: no transaction is prepared under this id any more.

    Raises:
        MySQLError: the server rejected it; 1397: the preparing session could not be killed.
    """
    statement = f"XA {'COMMIT' if commit else 'ROLLBACK'} {xid(gid)}"
    for wait_s in (CLOSES_S, KILLED_S, 0.0):
        try:
            session.execute(statement)
            return True
        except ERRORS as error:
            if client.error_number(error) != client.XA_UNKNOWN:
                raise
            if gid not in _prepared(session):
                return False
            if not wait_s:
                raise
        # Its session is closing, or hangs: a paused task, a lost machine.
        if not client.session_has_ended(session, parse_nonce(gid), wait_s):
            client.end_session(session, parse_nonce(gid))
            # MariaDB 10.11 may acknowledge a commit while the killed session still ends, and then roll back.
            client.session_has_ended(session, parse_nonce(gid), KILLED_S)
    raise AssertionError("not reached")


def build_committer(options: MysqlOptions, scope: Scope) -> ServerCommitter[Session]:
    """XA COMMIT and XA ROLLBACK, from any session of the server.

    A staging table is dropped afterwards: the server cannot drop tables inside a transaction. It may acknowledge a
    commit and lose it: seen with MariaDB 10.11, in 1 of 30 commits right after the session that prepared was killed.
    """
    schema, names = options.ledger_schema, build_names(scope, options.ledger_schema)
    staging = build_staging(options)

    def drop(session: Session, table: str) -> None:
        """Terminate the session of a hanging task, whose locks on the table would block the drop."""
        nonce = table.rpartition("_")[2]
        if not client.session_has_ended(session, nonce, 0):
            client.end_session(session, nonce)
            client.session_has_ended(session, nonce, KILLED_S)
        staging.drop(session, table)

    shards = Shards(
        id_prefix(scope, schema),
        partial(is_ours, scope, schema),
        open=lambda session: list_transactions(session, scope, options),
        end=end,
        staged=lambda session: list_staging_tables(session, names),
        drop=drop,
        identity=lambda session: target.identity(session, options),
        staging_of=lambda gid: staging_table(names, gid) if options.write.merges else None,
        tables_remain=True,
        loses_commits=True,
    )
    return ServerCommitter(staging.server, options, scope, shards)


def check_allowed(session: Session, options: MysqlOptions) -> None:
    """
    Raises:
        Refused: the user may not list prepared transactions, or the server does not support them.
        MySQLError: the server rejected it.
    """
    try:
        _prepared(session)
    except ERRORS as error:
        if client.error_number(error) not in DENIED:
            raise
        raise Refused("XA_DENIED", place=options.place, error=client.error_message(error)) from None
    row = session.execute("SHOW VARIABLES LIKE 'wsrep_on'").fetchone()
    if row is not None and str(row[1]).upper() == "ON":
        raise Refused("XA_NOT_SUPPORTED", place=options.place)


def give_up_earlier(session: Session, work: Work, options: MysqlOptions) -> None:
    """Roll back transactions that earlier attempts of this shard left prepared: an upsert would wait for their locks.

    If the driver has decided one of them in the meantime, the shard is rewritten.
    """
    shard = f"{id_prefix(work.scope, options.ledger_schema)}{work.batch}.{work.shard}:"
    for transaction in list_transactions(session, work.scope, options):
        if transaction.transactional_id.startswith(shard):
            end(session, transaction.transactional_id, commit=False)


def _prepared(session: Session) -> list[str]:
    """Every prepared transaction of the server, with ids in the form above where possible. Raises MySQLError."""
    ids = []
    # Ids of other applications hold any bytes: MySQL would return them as text that is none.
    for _, first, second, data in session.execute(f"XA RECOVER{'' if session.mariadb else ' CONVERT XID'}").fetchall():
        raw = data if session.mariadb else bytes.fromhex(data.removeprefix("0x"))
        text = raw[:first] + b":" + raw[first : first + second]
        ids.append(text.decode("ascii", "replace"))
    return ids
