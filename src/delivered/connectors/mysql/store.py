"""The ledger of a pipeline and sink in the user's MySQL or MariaDB, and the staging tables of its shards.

Staging tables are in the ledger's database: `s_<check>_<batch>_<shard>_<nonce>`. DDL commits implicitly, so a staging
table is created before its transaction, and dropped after the one that moved its rows: by `Committer.commit`, or by the
next start.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from delivered.connectors.mysql import MysqlOptions
from delivered.connectors.mysql.client import (
    CONSTRAINTS,
    DEADLOCK,
    LOCK_TIMEOUT,
    check_writable,
    connect,
    end_session,
    error_number,
    explained,
    is_lost,
    ledger_version,
    migrate,
    register_session,
    with_values,
)
from delivered.connectors.mysql.target import MysqlMerge, Target, find, read_definition
from delivered.kits.sql.database import CLAIM_WAIT_S, LEDGER_TABLES, Connection, Definition, Dialect, Server, quoted
from delivered.kits.sql.ledger import SqlLedger
from delivered.kits.sql.merge import ORDER, ROUND, Merge
from delivered.kits.sql.transactions import Names, PreparedRows, Staging
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.work import Prepared

if TYPE_CHECKING:
    from delivered.connectors.mysql.session import Session


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
        tables={name: f"{s}.{name}" for name in LEDGER_TABLES},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "n", "begun": "n"},
        hold=" FOR UPDATE",
        pack=lambda names: json.dumps(list(names)),
        unpack=json.loads,
        hash=lambda value: f"x'{value.hex()}'",
        snapshot=("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION READ ONLY"),
        see_holders="find the session: SELECT * FROM information_schema.innodb_trx; then KILL its trx_mysql_thread_id",
        sign="UPDATE {owner} SET session = :session WHERE pipeline = :pipeline AND sink = :sink",
    )


@dataclass(frozen=True)
class MysqlDatabase(Server["Session"]):
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
        """Always: only a claim, which waits for the transaction to end, can tell."""
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
        from delivered.connectors.mysql.session import ERRORS

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
        found = find(connection, self.options)
        return None if found is None else found.full

    def version(self, connection: Session) -> int:
        return ledger_version(connection, self.options.ledger_schema)

    def migrate(self, connection: Session) -> None:
        migrate(connection, self.options.ledger_schema)


class MysqlStaging(Staging):
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


def table_nonce(table: str) -> str:
    """Nonce of the session that fills a staging table."""
    return table.rpartition("_")[2]
