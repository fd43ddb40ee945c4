"""Translates the server's errors, by the numbers that MySQL and MariaDB share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered.connectors.mysql.options import MysqlOptions
from delivered.kits.mysql.server import DENIED, LOGIN, LOST
from delivered.kits.sql.table import no_right_to_alter
from delivered.model.errors import BadRecord, DeliveredError, Unreachable, UsageError

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session

LOCK_TIMEOUT, DEADLOCK = 1205, 1213
NO_TABLE, NO_DATABASE = 1146, 1049
XA_UNKNOWN = 1397
"""No such XA transaction: it has ended, or (MariaDB) the session that prepared it is still alive."""

_FULL = frozenset({1040, 1203, 1226})
_READ_ONLY = frozenset({1290, 1792, 1836, 3989})
_DISK = frozenset({1021, 1114})
_FILE = frozenset({3, 20, 1026, 1030})
"""File errors: disk full, if the message says so."""
_ROW = frozenset({1048, 1062, 1136, 1138, 1153, 1264, 1265, 1292, 1300, 1301, 1364, 1365, 1366, 1367, 1406, 1411, 1416,
                  1451, 1452, 1526, 1557, 1586, 1644, 1690, 1748, 3140, 3819, 4025})  # fmt: skip
CONSTRAINTS = frozenset({1048, 1062, 1451, 1452, 1557, 1586, 3819, 4025})
"""Of these: constraint violations. The statement is rolled back, its transaction goes on."""

_REFUSED = " rejected a row: "
_FILTER = "filter or correct such rows, or change the table; under exactly_once nothing of this batch is visible"
_BY_NUMBER: dict[int, tuple[type[DeliveredError], str, str]] = {
    NO_DATABASE: (UsageError, "DATABASE_MISSING", "create the database, or correct the url"),
    NO_TABLE: (UsageError, "TABLE_MISSING", "create {table}, or correct the option dbtable"),
    1054: (UsageError, "COLUMN_MISSING", "ALTER TABLE {table} ADD COLUMN ..., or drop the column from the rows"),
    DEADLOCK: (
        DeliveredError,
        "DEADLOCK",
        "start again; if this recurs, repartition the rows so that each key is in one shard",
    ),
    LOCK_TIMEOUT: (
        DeliveredError,
        "LOCK_TIMEOUT",
        "find the lock holder: SHOW ENGINE INNODB STATUS, SELECT * FROM information_schema.innodb_trx; under "
        "two_phase, two shards of a batch that write the same unique key block each other: repartition by that key, "
        "or raise lockTimeout",
    ),
    1665: (
        UsageError,
        "BINLOG_STATEMENT",
        "SET GLOBAL binlog_format = 'ROW' (or MIXED): with STATEMENT this server rejects writes at isolation level "
        "READ COMMITTED",
    ),
    1785: (UsageError, "ENGINE_NOT_TRANSACTIONAL", "ALTER TABLE {table} ENGINE = InnoDB"),
    1613: (DeliveredError, "LOCK_TIMEOUT", "start again; raise lockTimeout"),
    1614: (DeliveredError, "DEADLOCK", "start again; repartition the rows so that each key is in one shard"),
}


def number_of(error: BaseException) -> int:
    """The server's or the client's error number; 0: none, the connection was already closed."""
    first = error.args[0] if error.args else 0
    return first if isinstance(first, int) else 0


def is_lost(error: BaseException) -> bool:
    """Whether the connection was lost, so that the outcome of the last statement is unknown."""
    return number_of(error) in LOST


def about_a_row(error: BaseException) -> bool:
    """Whether the server refused a row, not the statement."""
    return number_of(error) in _ROW


def explained(error: Exception, options: MysqlOptions) -> DeliveredError:
    """Translate an error. The client's messages never contain passwords."""
    number = number_of(error)
    text, where = message_of(error), f"MySQL at {options.place}"
    if number in LOGIN:
        return Unreachable(
            "MYSQL_LOGIN",
            f"{where} rejected the login: {text}",
            next_step="check the options user and password (a reference like env:NAME is resolved where the task "
            "runs), and from which hosts the user may connect",
        )
    if number in LOST:
        return Unreachable(
            "MYSQL_UNREACHABLE",
            f"{where} is unreachable, or closed the connection: {text}",
            next_step=f"check that it is running: mysqladmin -h {options.host} -P {options.port} ping",
        )
    if number in _FULL:
        return Unreachable(
            "MYSQL_UNREACHABLE",
            f"{where} accepts no more connections: {text}",
            next_step="start the pipeline again later; check max_connections, and the user's own limit",
        )
    if number in DENIED:
        return UsageError(
            "PERMISSION",
            f"{where} reported: {text} (error {number}).",
            next_step=f"GRANT INSERT ON {options.table_text} and ALL ON {options.ledger_schema}.* to the user",
        )
    if number in _READ_ONLY:
        return Unreachable(
            "READ_ONLY", f"{where} reported: {text} (error {number}).", "point the url at the primary server"
        )
    if number in _DISK or (number in _FILE and "space" in text.lower()):
        return DeliveredError(
            "DISK_FULL",
            f"{where} has no disk space left: {text} (error {number}).",
            next_step="free disk space on the server, then start the pipeline again",
        )
    if number in _ROW:
        return BadRecord("ROW_REFUSED", f"{where} reported: {text} (error {number}).", _FILTER)
    if number in _BY_NUMBER:
        kind, code, next_step = _BY_NUMBER[number]
        return kind(code, f"{where} reported: {text} (error {number}).", next_step.format(table=options.table_text))
    return DeliveredError(
        "MYSQL_ERROR",
        f"{where} reported: {text} (error {number}).",
        next_step="look the error up in MySQL's manual, mend it, and start the pipeline again",
    )


def row_refused(text: str, options: MysqlOptions) -> BadRecord:
    """A row that LOAD DATA changed or skipped with only a warning, or that no statement can hold."""
    return BadRecord("ROW_REFUSED", f"MySQL at {options.place}{_REFUSED}{text}.", _FILTER)


def reason_of(error: BadRecord) -> str:
    """The text that `row_refused` was given."""
    return error.message.partition(_REFUSED)[2].rstrip(".")


def message_of(error: BaseException) -> str:
    """The server's message on one line."""
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    return " ".join(text.split())[:1500] or type(error).__name__


def alter(session: Session, options: MysqlOptions, statement: str) -> None:
    """Run a change of the table for `mergeSchema`. Raises UsageError if the user may not, and MySQLError."""
    try:
        session.execute(statement)
    except Exception as error:
        if number_of(error) not in DENIED:
            raise
        plain = statement.replace('"', "`")  # sessions of ours quote names as standard SQL does
        raise no_right_to_alter(options, error, plain, f"GRANT ALTER ON {options.table_text} TO the user") from error
