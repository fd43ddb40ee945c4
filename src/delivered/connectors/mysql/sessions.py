"""Finds and kills sessions that block others.

Session ids are reused after a restart, and only privileged users see what sessions do. So a session that may block
others takes a named lock with a nonce, and stores the nonce where others find it: the lock is held by that session or
is free.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from delivered.kits.sql.transactions import new_nonce

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


def register(session: Session, nonce: str | None = None) -> None:
    """Take the named lock for the lifetime of the session. Raises MySQLError."""
    session.nonce = nonce or new_nonce()
    session.execute("SELECT GET_LOCK(%s, 0)", [_name(session.nonce)])


def release(session: Session) -> None:
    """Release the named lock: this session no longer blocks anyone. Raises MySQLError."""
    session.execute("SELECT RELEASE_LOCK(%s)", [_name(session.nonce)])
    session.nonce = ""


def has_ended(session: Session, nonce: str, wait_s: float) -> bool:
    """Wait until the session with this nonce, and its transaction, has ended. Raises MySQLError."""
    row = session.execute("SELECT GET_LOCK(%s, %s)", [_name(nonce), wait_s]).fetchone()
    if row[0] != 1:
        return False
    session.execute("SELECT RELEASE_LOCK(%s)", [_name(nonce)])
    return True


def end(session: Session, nonce: str) -> None:
    """Kill the session with this nonce, if it is alive: its open transaction is rolled back, prepared ones stay. Works
    for sessions of the same user. Ignores the server's errors."""
    from delivered.connectors.mysql.wire import ERRORS

    with contextlib.suppress(ERRORS):
        row = session.execute("SELECT IS_USED_LOCK(%s)", [_name(nonce)]).fetchone()
        if row[0] is not None and int(row[0]) != session.thread_id():
            session.execute(f"KILL {int(row[0])}")


def _name(nonce: str) -> str:
    return f"delivered.{nonce}"
