"""A connection that loads rows from memory. The only module that imports PyMySQL.

PyMySQL replies to LOAD DATA LOCAL with the file that the *server* requests: a rogue server could read any file of this
machine. Here the requested name is ignored and the caller's data is sent; a file request in reply to any other
statement is an error.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pymysql
from pymysql.constants import CLIENT, COMMAND, CR, SERVER_STATUS
from pymysql.protocol import OKPacketWrapper

from delivered.kits.mysql import Tls
from delivered.kits.mysql.connection import Connection
from delivered.kits.sql.database import Peer, watch
from delivered.model.errors import InvariantBroken
from delivered.model.limits import REQUEST_TIMEOUT_S

ERRORS: type[Exception] = pymysql.MySQLError
PACKET_BYTES = 1 << 17
"""Packet size of a load."""


class Session(Connection):
    """One connection with manual transactions. Used by one thread.

    Attributes:
        nonce: of the named lock that shows that this session is alive; empty: none.
    """

    def __init__(self, connect_s: float, tls: Tls | None, **settings: Any) -> None:
        self.nonce = ""
        self._peer: Peer | None = None
        # The client's own handling, `local_infile`, stays off.
        super().__init__(
            tls,
            **settings,
            autocommit=True,
            charset="utf8mb4",
            client_flag=CLIENT.LOCAL_FILES | CLIENT.FOUND_ROWS,  # an UPDATE counts the rows that it found
            connect_timeout=connect_s,
            read_timeout=connect_s,
            write_timeout=connect_s,
            program_name="delivered",
        )

    def connect(self, sock: Any = None) -> None:
        """Called by the constructor. Fails after `connect_s` if the server accepts but sends nothing."""
        if sock is None:
            try:
                sock = socket.create_connection((self.host, self.port), self.connect_timeout)
            except OSError as error:
                raise pymysql.OperationalError(
                    CR.CR_CONN_HOST_ERROR, f"Can't connect to {self.host}:{self.port}: {error}"
                ) from None
            _keep_alive(sock)
        super().connect(sock)
        # Statements may take long: moving a batch, waiting for a lock. Keep-alives detect a dead peer.
        self._read_timeout = self._write_timeout = None

    @property
    def mariadb(self) -> bool:
        return "mariadb" in str(self.server_version).lower()

    @property
    def idle(self) -> bool:
        """Open, and outside any transaction according to the server's last reply."""
        return bool(self.open) and not self.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS

    def watch(self, label: str, tls: Tls | None, settings: Mapping[str, Any]) -> None:
        """Watch all statements from here on. Args: as this session was opened."""

        def waits(sessions: Sequence[int]) -> Mapping[int, str]:
            try:
                other = Session(self.connect_timeout, tls, **settings)
            except pymysql.OperationalError as error:
                if isinstance(error.__context__, TimeoutError) or "timed out" in str(error):
                    raise TimeoutError(str(error)) from None
                raise
            try:
                rows = other.execute("SELECT id, state FROM information_schema.processlist").fetchall()
            finally:
                other.close()
            waiting = {int(i) for i, state in rows if "semi-sync" in str(state).lower()}
            return dict.fromkeys(waiting & set(sessions), "a semi-synchronous replica")

        self._peer = Peer(label, waits)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._peer is None:
            yield
            return
        with watch(self._peer, self.thread_id(), self._cut) as call:
            try:
                yield
            except pymysql.OperationalError as error:
                if call.reason:
                    raise pymysql.OperationalError(CR.CR_SERVER_LOST, call.reason) from error
                raise

    def _cut(self) -> None:
        """From another thread: the wait sees the end of the stream."""
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read_query_result(self, unbuffered: bool = False) -> None:
        with self._watched():
            super()._read_query_result(unbuffered)

    def execute(self, statement: str, values: Any = None) -> Any:
        """Run a statement; its cursor has all rows."""
        cursor = self.cursor()
        cursor.execute(statement, values)
        return cursor

    def stream(self, statement: str) -> Any:
        """Run a query; its cursor streams the rows."""
        cursor = self.cursor(pymysql.cursors.SSCursor)
        cursor.execute(statement)
        return cursor

    def start(self, statement: bytes, data: memoryview | None = None) -> None:
        """Send a statement, with `data` for LOAD DATA LOCAL; return before the server has finished.

        Raises MySQLError: the server rejected the statement, or the connection was lost.
        """
        with self._watched():
            self._execute_command(COMMAND.COM_QUERY, statement)
            if data is None:
                return
            answer = self._read_packet()
            if not answer.is_load_local_packet():
                raise InvariantBroken("LOAD_NOT_REQUESTED")
            for at in range(0, len(data), PACKET_BYTES):
                self.write_packet(bytes(data[at : at + PACKET_BYTES]))
            self.write_packet(b"")

    def finish(self) -> tuple[int, int]:
        """Wait until the server has finished. Returns the numbers of loaded rows and warnings.

        Raises MySQLError: the server rejected it, or the connection was lost.
        """
        with self._watched():
            answer = OKPacketWrapper(self._read_packet())
        self.server_status = answer.server_status
        return int(answer.affected_rows), int(answer.warning_count)


def _keep_alive(sock: socket.socket) -> None:
    """Detect a lost server within a minute, even while nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(REQUEST_TIMEOUT_S * 1000)),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
