"""A network between the clients of a SQL database and its server that loses and delays statements and their answers.

Of each protocol it knows how messages are cut, and which of them carry the text of a statement. Clients must connect
without TLS.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from delivered.verify.wire import Fired, NetworkFault, Wire, read_exactly, reset

_MESSAGE_BYTES_MAX = 64 << 20
_LATE_ANSWER_S = 15.0
_QUERY, _PARSE = b"Q", b"P"
_COMMAND_QUERY = 3
_BEGINS = ("BEGIN", "START TRANSACTION", "XA START")


@dataclass
class SqlRule:
    """What to do with some statements.

    Attributes:
        statement: how it begins; "COMMIT" is that alone, and not COMMIT PREPARED.
        within: a text that another statement of the same transaction must have held; empty: any transaction.
        skip, times, every: see `wire.AnyRule`.
        seconds: of a delay.
    """

    statement: str
    fault: NetworkFault
    within: str = ""
    skip: int = 0
    times: int = 1
    every: int = 1
    seconds: float = 1.0

    @property
    def name(self) -> str:
        of = f" of {self.within}" if self.within else ""
        return f"{self.fault}:{self.statement.lower()}{of}"

    def fits(self, statement: str, said: list[str]) -> bool:
        same = statement == self.statement if self.statement == "COMMIT" else statement.startswith(self.statement)
        return same and (not self.within or any(self.within in s for s in said))


@dataclass
class _Session:
    """Of one connection.

    Attributes:
        said: statements since its transaction began.
        hit: a rule that waits for the next answer.
    """

    said: list[str] = field(default_factory=list)
    hit: SqlRule | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class SqlProxy(Wire[SqlRule]):
    """See the module."""

    @abstractmethod
    def _greet(self, client: socket.socket, server: socket.socket) -> None:
        """Carry what a client says before its first message."""

    @abstractmethod
    def _message(self, client: socket.socket) -> tuple[bytes, str | None]:
        """The client's next message, and the statement that it carries, if it does.

        Raises:
            EOFError: the connection ended.
        """

    def _carry(self, client: socket.socket, server: socket.socket) -> tuple[Callable[[], None], Callable[[], None]]:
        session = _Session()
        return lambda: self._requests(client, server, session), lambda: self._replies(client, server, session)

    def _requests(self, client: socket.socket, server: socket.socket, session: _Session) -> None:
        self._greet(client, server)
        while True:
            message, statement = self._message(client)
            self._open.wait()
            rule = None if statement is None else self._match(statement.strip(), session)
            if rule is not None and rule.fault in (NetworkFault.LOSE_REQUEST, NetworkFault.RESET):
                if rule.fault is NetworkFault.RESET:
                    reset(client)
                return
            if rule is not None and rule.fault is NetworkFault.LATE_REQUEST:
                self._late(client, server, message, rule.seconds)
                return
            with session.lock:
                session.hit = rule or session.hit
            server.sendall(message)

    def _replies(self, client: socket.socket, server: socket.socket, session: _Session) -> None:
        while True:
            part = server.recv(1 << 16)
            if not part:
                return
            self._open.wait()
            # Clients ask one thing at a time, but for what opens a session: what comes next answers the statement.
            with session.lock:
                rule, session.hit = session.hit, None
            if rule is not None and rule.fault is NetworkFault.LOSE_REPLY:
                return
            if rule is not None:
                time.sleep(rule.seconds)
            client.sendall(part)

    def _late(self, client: socket.socket, server: socket.socket, message: bytes, seconds: float) -> None:
        """The client sees a broken connection; the server gets the statement when its sender has long moved on. Only
        for statements without parameters, which are one message."""
        with self._lock:
            self._sockets.discard(server)
        reset(client)
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            server.sendall(message)
            server.settimeout(_LATE_ANSWER_S)
            server.recv(1)

    def _match(self, text: str, session: _Session) -> SqlRule | None:
        word = text.split(None, 1)[0].upper() if text else ""
        if text.upper().startswith(_BEGINS):
            session.said.clear()
        session.said.append(text)
        hit = self._hit(word, lambda rule: rule.fits(text, session.said))
        if hit is not None:
            self._fired(Fired(hit.name, text[:80]))
        return hit


class PostgresProxy(SqlProxy):
    """Protocol version 3: a client's first message is its length and no type; all others are a type, a length that
    counts itself, and the rest. Clients connect with `sslmode=disable&gssencmode=disable`."""

    def _greet(self, client: socket.socket, server: socket.socket) -> None:
        head = read_exactly(client, 4)
        server.sendall(head + read_exactly(client, _size(head) - 4))

    def _message(self, client: socket.socket) -> tuple[bytes, str | None]:
        kind, head = read_exactly(client, 1), read_exactly(client, 4)
        body = read_exactly(client, _size(head) - 4)
        if kind not in (_QUERY, _PARSE):
            return kind + head + body, None
        text = body.split(b"\0")[0 if kind == _QUERY else 1]
        return kind + head + body, text.decode("utf-8", "replace")


class MysqlProxy(SqlProxy):
    """MySQL's and MariaDB's: a length of three bytes, a number within the exchange, and the rest. The server speaks
    first; a client's command has number 0, and its first byte says which one it is."""

    def _greet(self, client: socket.socket, server: socket.socket) -> None:
        del client, server

    def _message(self, client: socket.socket) -> tuple[bytes, str | None]:
        head = read_exactly(client, 4)
        body = read_exactly(client, int.from_bytes(head[:3], "little"))
        if head[3] != 0 or not body or body[0] != _COMMAND_QUERY:
            return head + body, None
        return head + body, body[1:].decode("utf-8", "replace")


def _size(head: bytes) -> int:
    (size,) = struct.unpack(">i", head)
    if not 4 <= size <= _MESSAGE_BYTES_MAX:
        raise EOFError(f"a message of {size} bytes")
    return int(size)
