"""The saga log's tables, and how a saga comes into them: in the caller's own transaction."""

from __future__ import annotations

import json
from typing import Any

from delivered.model.errors import BadRecord, Refused
from delivered.model.limits import SAGA_DATA_BYTES_MAX, SAGA_ID_BYTES_MAX
from delivered.patterns.caller import NOW_MS, Caller, check_dialect, format_ddl, json_text, unstorable
from delivered.patterns.saga.definition import Saga
from delivered.patterns.saga.progress import Status

FORMAT = 1
SAGAS, ENTRIES, FORMATS = "delivered_saga", "delivered_saga_entry", "delivered_saga_format"

# Exact text: MySQL's other collations ignore case and spaces at the end.
_TYPES = {
    "postgres": ('VARCHAR(64) COLLATE "C"', f'VARCHAR({SAGA_ID_BYTES_MAX}) COLLATE "C"', "TEXT", ""),
    "mysql": (
        "VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin",
        f"VARBINARY({SAGA_ID_BYTES_MAX})",
        "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        " ENGINE=InnoDB",
    ),
    "sqlite": ("TEXT", "TEXT", "TEXT", ""),
}


def ddl(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables, unless they are there.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    name, id_, text, tail = _TYPES[check_dialect(dialect)]
    make = "CREATE TABLE IF NOT EXISTS"
    return (
        f"{make} {SAGAS} (\n  saga {name} NOT NULL,\n  id {id_} NOT NULL,\n  steps {text} NOT NULL,\n"
        f"  data {text} NOT NULL,\n  status {name} NOT NULL,\n  entries BIGINT NOT NULL,\n  epoch BIGINT NOT NULL,\n"
        f"  worker {name} NOT NULL,\n  due_ms BIGINT NOT NULL,\n  began_ms BIGINT NOT NULL,\n"
        f"  PRIMARY KEY (saga, id),\n  UNIQUE (status, due_ms, saga, id)\n){tail}",
        f"{make} {ENTRIES} (\n  saga {name} NOT NULL,\n  id {id_} NOT NULL,\n  n BIGINT NOT NULL,\n"
        f"  epoch BIGINT NOT NULL,\n  step {name} NOT NULL,\n  verb {name} NOT NULL,\n  event {name} NOT NULL,\n"
        f"  value {text},\n  error {text},\n  at_ms BIGINT NOT NULL,\n  PRIMARY KEY (saga, id, n)\n){tail}",
        *format_ddl(FORMATS, FORMAT, tail),
    )


class DuplicateSaga(Refused):
    """The log has a saga with this id, and other data. The transaction can go on."""


def begin(connection: Any, saga: Saga, *, id: str, data: Any = None) -> bool:  # noqa: A002
    """Record a saga, in the transaction that is open on `connection`. Commits nothing; a worker runs it afterwards.

    Args:
        connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        id: of this saga, given before the first try; at most 128 bytes of UTF-8. Keys of steps are made of it.
        data: a JSON value, which every step gets.

    Returns: False: the log has it already, with the same data.

    Raises:
        DuplicateSaga: the id is taken by a saga with other data.
        Refused: the connection is in autocommit, or there are no tables, or a newer version wrote them.
        BadRecord: a value cannot be stored. Nothing was sent to the database.
    """
    id_, text = checked(id, json.dumps(data, ensure_ascii=False) if isinstance(data, str) else data)
    caller = Caller(connection, what="saga.begin")
    check_tables(caller)
    return record(caller, saga, id_, text)


def record(caller: Caller, saga: Saga, id_: str, text: str) -> bool:
    """As `begin`, with values as `checked` returns them."""
    sent = id_.encode() if caller.dialect == "mysql" else id_
    columns = ("saga", "id", "steps", "data", "status", "entries", "epoch", "worker", "due_ms", "began_ms")
    ((now,),) = caller.execute(f"SELECT {NOW_MS[caller.dialect]}").rows
    values = (saga.name, sent, saga.signature, text, Status.RUNNING.value, 0, 0, "", int(now), int(now))
    if caller.insert(SAGAS, columns, values):
        return True
    lock = " LOCK IN SHARE MODE" if caller.dialect == "mysql" else ""  # else it may not see a row just committed
    found = caller.execute(f"SELECT data FROM {SAGAS} WHERE saga = ? AND id = ?{lock}", (saga.name, sent)).rows
    if found and json.loads(found[0][0]) == json.loads(text):
        return False
    raise DuplicateSaga(
        "SAGA_ID_REUSED",
        f"The log has saga {saga.name} {id_!r} already, with other data.",
        next_step="give each saga an id of its own; a repeat must bring the same data",
    )


def check_tables(caller: Caller) -> None:
    """Raise Refused if the tables are not there, or a newer version of this package made them."""
    caller.check_format(FORMATS, "a saga log", FORMAT, no_tables(caller.dialect))


def no_tables(dialect: str) -> Refused:
    return Refused(
        "SAGA_TABLES",
        "The database has no saga log.",
        next_step=f'run delivered sagas create --log ..., or Log(...).create(), or the statements of ddl("{dialect}")',
    )


def checked(id_: Any, data: Any) -> tuple[str, str]:
    """A saga's id, and its data as JSON text; data that is text must be JSON already.

    Raises:
        BadRecord: they cannot be stored.
    """
    fits = isinstance(id_, str) and not unstorable(id_) and 0 < len(id_.encode()) <= SAGA_ID_BYTES_MAX
    if not fits:
        raise BadRecord(
            "SAGA_ID",
            f"The id is {id_!r:.200} ({type(id_).__name__}); it must be 1 to {SAGA_ID_BYTES_MAX} bytes of UTF-8, "
            "no NUL.",
            next_step="pass the id of the order, payment, ... that the saga is for",
        )
    try:
        text = json_text(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord("SAGA_DATA", f"The data of saga {id_!r} is no JSON: {error}.", "pass a JSON value") from None
    if len(text.encode()) > SAGA_DATA_BYTES_MAX:
        raise BadRecord(
            "SAGA_DATA",
            f"The data of saga {id_!r} has {len(text.encode()):,} bytes; the limit is {SAGA_DATA_BYTES_MAX:,}.",
            next_step="pass a reference to it",
        )
    return id_, text


def stored_result(result: Any) -> Any:
    """A step's result as the log returns it.

    Raises:
        BadRecord: it cannot be stored.
    """
    try:
        text = json_text(json.dumps(result, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord(
            "SAGA_RESULT",
            f"The result {result!r:.100} is no JSON: {error}.",
            next_step="return None, or a value that json.dumps accepts",
        ) from None
    if len(text.encode()) > SAGA_DATA_BYTES_MAX:
        raise BadRecord(
            "SAGA_RESULT",
            f"The result has {len(text.encode()):,} bytes; the limit is {SAGA_DATA_BYTES_MAX:,}.",
            next_step="keep the data elsewhere, and return a reference to it",
        )
    return json.loads(text)
