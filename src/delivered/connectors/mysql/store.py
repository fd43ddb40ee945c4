"""The ledger of a pipeline and sink, on the server that holds the rows.

A DELETE by a condition scans a short table whatever its indexes, and waits for locked rows: another pipeline's
decision, or, forever, a marker of a prepared transaction. So nothing here does that.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered.connectors.mysql import errors, sessions, stage, target
from delivered.connectors.mysql.client import MysqlDatabase
from delivered.connectors.mysql.migrate import with_values
from delivered.connectors.mysql.options import MysqlOptions
from delivered.connectors.mysql.transactions import names_of
from delivered.kits.sql.database import Connection, Dialect
from delivered.kits.sql.server_store import CLAIM_WAIT_S, ServerStore
from delivered.model.identity import Scope
from delivered.model.outcome import Outcome, Unknown

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


_TABLES = ("owner", "decision", "begun", "marker", "memory", "noted", "seen", "archive", "left_out", "dead_letter")


@dataclass(frozen=True)
class MysqlDialect(Dialect):
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


def dialect(schema: str) -> MysqlDialect:
    """Dialect of a ledger in this database."""
    s = with_values(schema)
    return MysqlDialect(
        tables={name: f"{s}.{name}" for name in _TABLES},
        value=lambda statement: re.sub(r":(\w+)", r"%(\1)s", statement),
        written={"decision": "n", "begun": "n"},
        hold=" FOR UPDATE",
        pack=lambda names: json.dumps(list(names)),
        unpack=json.loads,
        hash=lambda value: f"x'{value.hex()}'",
    )


def staging(options: MysqlOptions) -> stage.MysqlStaging:
    return stage.MysqlStaging(options, MysqlDatabase(options), dialect(options.ledger_schema))


class MysqlStore(ServerStore["Session"]):
    def __init__(self, options: MysqlOptions, scope: Scope) -> None:
        super().__init__(staging(options), names_of(scope, options.ledger_schema))
        self._options = options

    def _open(self, writes: bool = True) -> Session:
        if self._connection is None or not self._connection.open:
            connection = self._database.connect(self._role, writes=writes)
            with self._database.explaining():
                sessions.register(connection)
            self._connection = connection
        return self._connection

    def _begin(self, connection: Session) -> None:
        """Locks the owner's row and stores the session's nonce there; others can read it before the commit."""
        self._server.check_writable(connection)
        connection.execute("START TRANSACTION")
        connection.execute(
            self._sql("UPDATE {owner} SET session = :session WHERE pipeline = :pipeline AND sink = :sink"),
            {**self._key, "session": connection.nonce},
        )

    def _begin_view(self, connection: Session) -> None:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("START TRANSACTION READ ONLY")

    @contextlib.contextmanager
    def _claiming(self, connection: Session) -> Iterator[None]:
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {CLAIM_WAIT_S}")
        try:
            self._begin(connection)
            yield
        except BaseException:
            self._server.discard(connection)
            raise
        connection.execute("COMMIT")
        connection.execute(f"SET SESSION innodb_lock_wait_timeout = {self._options.lock_timeout_s}")

    def _after_failed_commit(self, error: Exception, there: Callable[[Session], bool]) -> Outcome[None]:
        """Always Unknown: only a claim, which waits for the transaction to end, can resolve it."""
        del there
        return Unknown(str(errors.explained(error, self._options)))

    def _table(self, connection: Session) -> str | None:
        found = target.find(connection, self._options)
        return None if found is None else found.full

    def _end_holders(self) -> str:
        with contextlib.suppress(Exception):
            connection = self._open()
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            connection.execute("START TRANSACTION READ ONLY")
            row = connection.execute(
                self._sql("SELECT session FROM {owner} WHERE pipeline = :pipeline AND sink = :sink"), self._key
            ).fetchone()
            connection.execute("COMMIT")
            if row is not None and row[0] and row[0] != connection.nonce:
                sessions.end(connection, row[0])
        return ""

    @property
    def _see_holders(self) -> str:
        return "find the session: SELECT * FROM information_schema.innodb_trx; then KILL its trx_mysql_thread_id"
