"""Which session holds something up, and the end of it.

A server shows its sessions by a number that is used again after a restart, and what they do only to users with special
rights. So a session that others may have to wait for takes a named lock with a nonce, and writes the nonce where it is
found: the lock's holder is that very session, or nobody.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from delivered.kits.sql.names import new_nonce

if TYPE_CHECKING:
    from delivered.connectors.mysql.wire import Session


def register(session: Session, nonce: str | None = None) -> None:
    """Take the named lock, for as long as the session lives. Raises MySQLError."""
    session.nonce = nonce or new_nonce()
    session.execute("SELECT GET_LOCK(%s, 0)", [_name(session.nonce)])


def release(session: Session) -> None:
    """Give the named lock back: nobody has to wait for this session any more. Raises MySQLError."""
    session.execute("SELECT RELEASE_LOCK(%s)", [_name(session.nonce)])
    session.nonce = ""


def gone(session: Session, nonce: str, wait_s: float) -> bool:
    """Wait until the session of this nonce is over, its transaction with it. Raises MySQLError."""
    row = session.execute("SELECT GET_LOCK(%s, %s)", [_name(nonce), wait_s]).fetchone()
    if row[0] != 1:
        return False
    session.execute("SELECT RELEASE_LOCK(%s)", [_name(nonce)])
    return True


def end(session: Session, nonce: str) -> None:
    """Have the server end the session of this nonce, if it lives: what it has open is rolled back, what it has
    prepared stays. Works for sessions of the same user. Raises nothing that the server says."""
    from delivered.connectors.mysql.wire import ERRORS

    with contextlib.suppress(ERRORS):
        row = session.execute("SELECT IS_USED_LOCK(%s)", [_name(nonce)]).fetchone()
        if row[0] is not None and int(row[0]) != session.thread_id():
            session.execute(f"KILL {int(row[0])}")


def _name(nonce: str) -> str:
    return f"delivered.{nonce}"
