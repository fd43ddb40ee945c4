"""The table of ids, and one message's transaction."""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from collections.abc import Iterator
from typing import Any

from delivered.model.errors import BadRecord, InvariantBroken, Refused, UsageError
from delivered.patterns.caller import NOW_MS, Caller, check_dialect, quoted

TABLE = "inbox"
ID_BYTES_MAX = 512
CONSUMER_BYTES_MAX = 128
CLEANED_MAX = 500
"""Rows that one call of `clean` deletes."""

# Bytes in MySQL: its collations ignore trailing spaces, so a new id could be mistaken for an old one.
_TYPES = {
    "postgres": ('TEXT COLLATE "C"', 'TEXT COLLATE "C"', ""),
    "mysql": (f"VARBINARY({CONSUMER_BYTES_MAX})", f"VARBINARY({ID_BYTES_MAX})", " ENGINE=InnoDB"),
    "sqlite": ("TEXT", "TEXT", ""),
}


def ddl(dialect: str, table: str = TABLE) -> str:
    """The CREATE TABLE IF NOT EXISTS statement.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    consumer, message, tail = _TYPES[check_dialect(dialect)]
    default = f" DEFAULT ({NOW_MS[dialect]})"
    return (
        f"CREATE TABLE IF NOT EXISTS {quoted(dialect, table)} (\n  consumer {consumer} NOT NULL,\n"
        f"  message_id {message} NOT NULL,\n  received_ms BIGINT NOT NULL{default},\n"
        f"  PRIMARY KEY (consumer, message_id),\n  UNIQUE (received_ms, consumer, message_id)\n){tail}"
    )


@contextlib.contextmanager
def inbox(
    connection: Any, message_id: str | bytes | uuid.UUID | None, *, consumer: str, table: str = TABLE
) -> Iterator[bool]:
    """Whether the message is new to this consumer. Never commits; commit after the block.

    An exception in the block rolls the id and the block's changes back to a savepoint, so a caller that catches it and
    commits loses nothing. If another transaction holds the same id, this waits: if it commits, the message is a
    duplicate; if it rolls back, the message is new. If the database ends the wait (PostgreSQL: lock_timeout, or a
    serialization failure under REPEATABLE READ; MySQL: innodb_lock_wait_timeout; SQLite: the connection's timeout),
    the client's own error is raised: roll back, and do not acknowledge.

    Args:
        connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        message_id: assigned by the sender, the same in every resend; at most 512 bytes of UTF-8.
        consumer: each has its own set of ids.

    Raises:
        Refused: the connection is in autocommit, or the table does not exist.
        BadRecord: the value is not a valid id.
        InvariantBroken: the transaction ended inside the block.
    """
    values = _stored("consumer", consumer, CONSUMER_BYTES_MAX), _stored("message_id", message_id, ID_BYTES_MAX)
    caller = Caller(connection, what="inbox")
    if caller.dialect == "mysql":
        sent: tuple[Any, ...] = tuple(v.encode() for v in values)
    else:
        sent = values
    columns = ("consumer", "message_id")

    def committed() -> Exception:
        return InvariantBroken(
            "INBOX_TRANSACTION_ENDED",
            f"The transaction ended inside the block of message {values[1]!r}: later changes are not protected.",
            next_step="commit after the with block, and let database errors leave the block",
        )

    with caller.savepoint(committed):
        try:
            first = caller.insert(caller.quoted(table), columns, sent)
        except Exception as error:
            _refuse_missing(caller, table, error)
            raise
        yield first


def clean(connection: Any, *, ttl: dt.timedelta, table: str = TABLE, limit: int = CLEANED_MAX) -> int:
    """Delete ids older than `ttl`, at most `limit` of them, in the open transaction of `connection`.

    Call it between messages, in a separate transaction, until it returns less than `limit`. A duplicate that arrives
    after its id was deleted counts as new: choose a `ttl` longer than the broker may redeliver or anybody may replay.

    Returns: number of deleted rows.
    """
    if ttl <= dt.timedelta(0) or limit < 1:
        raise UsageError(
            "INBOX_TTL",
            f"ttl is {ttl!r} and limit {limit!r}; both must be above 0.",
            next_step="pass a longer ttl, or a limit of at least 1",
        )
    caller = Caller(connection, what="inbox.clean")
    name, age = caller.quoted(table), int(ttl.total_seconds() * 1000)
    try:
        # Read without locks and deleted by key, so running consumers are not blocked.
        old = caller.execute(
            f"SELECT consumer, message_id FROM {name} WHERE received_ms < {NOW_MS[caller.dialect]} - ? "  # noqa: S608
            f"ORDER BY received_ms LIMIT {int(limit)}",
            (age,),
        ).rows
    except Exception as error:
        _refuse_missing(caller, table, error)
        raise
    delete = f"DELETE FROM {name} WHERE consumer = ? AND message_id = ?"  # noqa: S608
    return sum(caller.execute(delete, row).count for row in old)


def _refuse_missing(caller: Caller, table: str, error: Exception) -> None:
    if caller.missing(error):
        raise Refused(
            "INBOX_TABLE",
            f"The table {table} does not exist.",
            next_step=f'roll back without acknowledging, then run inbox.ddl("{caller.dialect}")',
        ) from error


def _stored(name: str, value: str | bytes | uuid.UUID | None, bytes_max: int) -> str:
    text: Any = str(value) if isinstance(value, uuid.UUID) else value
    try:
        text = text.decode() if isinstance(text, bytes) else text
        fits = isinstance(text, str) and 0 < len(text.encode()) <= bytes_max and "\0" not in text
    except UnicodeError:
        fits = False
    if not fits:
        raise BadRecord(
            "INBOX_VALUE",
            f"{name} is {value!r:.100} ({type(value).__name__}); it must be 1 to {bytes_max} bytes of UTF-8, no NUL.",
            next_step="have the sender assign an id to each message before its first attempt, and keep it in resends",
        )
    return str(text)
