"""mechanism two_phase: XA transactions as the server sees them.

An id has two parts of at most 64 bytes, here with a colon between: `delivered.<check>.<batch>.<shard>` and
`<since>.<nonce>.<pipeline>.<sink>`. The check is a hash of pipeline, sink and the ledger's database, for a server lists
prepared transactions of all its databases; `since` is when it began, in milliseconds since 1970, hexadecimal, because
the server does not say; the nonce is new for each attempt, so that no id is ever used twice; the names are for people,
and cut where they are long.

Error 1397, XAER_NOTA, stands for two things in MariaDB: there is no such transaction any more, or the session that
prepared it still lives. XA RECOVER tells them apart. It is asked first, and only then is the marker looked for: what is
not listed is over, and whatever ended it has been done by then.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from delivered.connectors.mysql import errors, sessions
from delivered.connectors.mysql.options import MysqlOptions
from delivered.kits.sql.names import Names, new_nonce
from delivered.kits.sql.transactions import OpenTransaction
from delivered.model.errors import Refused
from delivered.model.identity import Scope, Work

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session

PART_BYTES_MAX = 64
CLOSES_S, KILLED_S = 1.0, 5.0
"""How long a session that prepared is let come to its end by itself; and after the server was told to end it."""
_ID = re.compile(r"(\d+)\.(\d+):([0-9a-f]{11,16})\.([0-9a-f]{16})\.[A-Za-z0-9._-]*")


def names_of(scope: Scope, ledger_schema: str) -> Names:
    """A longer check than elsewhere: no name stands beside it that would tell two sinks apart."""
    return Names(scope, ledger_schema, check_bytes=8)


def id_prefix(scope: Scope, ledger_schema: str) -> str:
    """Start of all ids of this sink of this pipeline, in any incarnation, and of no other's."""
    return f"delivered.{names_of(scope, ledger_schema).check}."


def new_id(work: Work, ledger_schema: str) -> str:
    """An id that nobody else has, nor ever had."""
    first = f"{id_prefix(work.scope, ledger_schema)}{work.batch}.{work.shard}"
    since = time.time_ns() // 1_000_000
    second = f"{since:011x}.{new_nonce()}.{work.scope.pipeline}.{work.scope.sink}"
    return f"{first}:{second[:PART_BYTES_MAX]}"


def is_ours(scope: Scope, ledger_schema: str, candidate: str) -> bool:
    """Whether an id names a shard of this sink of this pipeline."""
    prefix = id_prefix(scope, ledger_schema)
    return candidate.startswith(prefix) and _ID.fullmatch(candidate[len(prefix) :]) is not None


def nonce_of(gid: str) -> str:
    return gid.partition(":")[2].split(".")[1]


def staging_of(names: Names, gid: str) -> str:
    """The staging table from which an upsert's transaction took its rows."""
    first, _, _ = gid.partition(":")
    batch, shard = first.split(".")[2:4]
    return names.staging(Work(names.scope, int(batch), int(shard)), nonce_of(gid))


def xid(gid: str) -> str:
    """An id of ours as SQL writes it: it holds nothing that wants escaping."""
    first, _, second = gid.partition(":")
    return f"'{first}','{second}'"


def listed(session: Session, scope: Scope, options: MysqlOptions) -> list[OpenTransaction]:
    """Every prepared transaction of this sink of this pipeline, oldest first. Raises MySQLError."""
    prefix = id_prefix(scope, options.ledger_schema)
    found = []
    for gid in _prepared(session):
        match = _ID.fullmatch(gid[len(prefix) :]) if gid.startswith(prefix) else None
        if match is not None:
            batch, shard, since = int(match[1]), int(match[2]), int(match[3], 16)
            found.append(
                OpenTransaction(gid, batch, shard, since, (options.table_text,), database=options.ledger_schema)
            )
    return sorted(found, key=lambda t: (t.started_ms, t.transactional_id))


def all_started_ms(session: Session) -> list[int]:
    """When prepared transactions of this package began, whosever pipelines'. Raises MySQLError."""
    found = (re.fullmatch(rf"delivered\.[0-9a-f]{{16}}\.{_ID.pattern}", gid) for gid in _prepared(session))
    return [int(match[3], 16) for match in found if match is not None]


def end(session: Session, gid: str, commit: bool) -> bool:
    """Commit or roll back a prepared transaction, whose preparer is dead, dying, or is ended here.

    Returns:
        False: nothing is prepared under this id any more.

    Raises:
        MySQLError: the server said no; 1397: the preparer could not be ended.
    """
    from delivered.connectors.mysql.wire import ERRORS

    statement = f"XA {'COMMIT' if commit else 'ROLLBACK'} {xid(gid)}"
    for wait_s in (CLOSES_S, KILLED_S, 0.0):
        try:
            session.execute(statement)
            return True
        except ERRORS as error:
            if errors.number_of(error) != errors.XA_UNKNOWN:
                raise
            if gid not in _prepared(session):
                return False
            if not wait_s:
                raise
        # Its session is closing, or hangs: a task that was paused, a machine that vanished.
        if not sessions.gone(session, nonce_of(gid), wait_s):
            sessions.end(session, nonce_of(gid))
    raise AssertionError("not reached")


def check_allowed(session: Session, options: MysqlOptions) -> None:
    """
    Raises:
        Refused: the user may not see prepared transactions, or the server has none that could be left to others.
        MySQLError: the server said no.
    """
    from delivered.connectors.mysql.wire import ERRORS

    try:
        session.execute("XA RECOVER")
    except ERRORS as error:
        if errors.number_of(error) not in errors.DENIED:
            raise
        raise Refused(
            "XA_DENIED",
            f"The user may not see prepared transactions of MySQL at {options.place} ({errors.said_by(error)}), which "
            "mechanism two_phase needs to find its own.",
            next_step="GRANT XA_RECOVER_ADMIN ON *.* TO the user, or write "
            '.option("mechanism", "one_transaction"), which needs no such right',
        ) from None
    row = session.execute("SHOW VARIABLES LIKE 'wsrep_on'").fetchone()
    if row is not None and str(row[1]).upper() == "ON":
        raise Refused(
            "XA_UNKNOWN_TO_CLUSTER",
            f"MySQL at {options.place} is a node of a Galera cluster, which has no XA transactions: mechanism "
            "two_phase needs them.",
            next_step='write .option("mechanism", "one_transaction")',
        )


def give_up_earlier(session: Session, work: Work, options: MysqlOptions) -> None:
    """Roll back what earlier attempts of this very shard left prepared: an upsert would wait for their locks.

    Should the driver have decided one of them meanwhile, its promise is gone, and the shard is written again.
    """
    for transaction in listed(session, work.scope, options):
        if (transaction.batch, transaction.shard) == (work.batch, work.shard):
            end(session, transaction.transactional_id, commit=False)


def _prepared(session: Session) -> list[str]:
    """Every prepared transaction of the server, in our form of ids; of others' what can be read."""
    found = []
    for _, first, second, data in session.execute("XA RECOVER").fetchall():
        raw = data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogateescape")
        text = raw[:first] + b":" + raw[first : first + second]
        found.append(text.decode("ascii", "replace"))
    return found
