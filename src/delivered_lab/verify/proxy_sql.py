"""A network between the clients of a SQL database and its server that loses and delays statements and their answers.

It knows the message framing of each protocol, and which messages carry a statement. Clients must connect without TLS.
"""

from __future__ import annotations

import socket
import struct
import threading
from abc import abstractmethod
from dataclasses import dataclass, field

from delivered_lab.verify.proxy import Fired, Proxy, Rule, read_exactly

_MESSAGE_BYTES_MAX = 64 << 20
_QUERY, _PARSE = b"Q", b"P"
_COMMAND_QUERY = 3
_BEGINS = ("BEGIN", "START TRANSACTION", "XA START")


@dataclass
class _Session:
    """State of one connection.

    Attributes:
        statements: of the current transaction.
        hit: a rule that awaits the next answer.
    """

    statements: list[str] = field(default_factory=list)
    hit: Rule | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class SqlProxy(Proxy[_Session]):
    """See the module."""

    @abstractmethod
    def statement(self, message: bytes) -> str | None:
        """The statement in a client message; None: there is none."""

    def session(self) -> _Session:
        return _Session()

    def match(self, message: bytes, session: _Session) -> Rule | None:
        text = self.statement(message)
        if text is None:
            return None
        text = text.strip()
        if text.upper().startswith(_BEGINS):
            session.statements.clear()
        session.statements.append(text)
        word = text.split(None, 1)[0].upper() if text else ""
        hit = self._hit(word, lambda r: _fits(r, text, session.statements), lambda name: Fired(name, text[:80]))
        with session.lock:
            session.hit = hit or session.hit
        return hit

    def reply(self, server: socket.socket) -> bytes:
        return server.recv(1 << 16)

    def answered(self, reply: bytes, session: _Session) -> tuple[bytes, Rule | None]:
        """Except while a session opens, clients send one request at a time: the next message answers the statement."""
        with session.lock:
            hit, session.hit = session.hit, None
        return reply, hit


def _fits(rule: Rule, statement: str, transaction: list[str]) -> bool:
    same = statement == rule.request if rule.request == "COMMIT" else statement.startswith(rule.request)
    return same and (not rule.within or any(rule.within in s for s in transaction))


class PostgresProxy(SqlProxy):
    """Protocol version 3: a client's first message has a length and no type; all others have a type, a length that
    counts itself, and the rest. Clients connect with `sslmode=disable&gssencmode=disable`."""

    def greet(self, client: socket.socket, server: socket.socket) -> None:
        server.sendall(_counted(client))

    def request(self, client: socket.socket) -> bytes:
        return read_exactly(client, 1) + _counted(client)

    def statement(self, message: bytes) -> str | None:
        kind = message[:1]
        if kind not in (_QUERY, _PARSE):
            return None
        return message[5:].split(b"\0")[0 if kind == _QUERY else 1].decode("utf-8", "replace")


class MysqlProxy(SqlProxy):
    """MySQL and MariaDB: a length of three bytes, a sequence number within the exchange, and the rest. The server
    speaks first; a client's command has number 0, and its first byte is the command."""

    def request(self, client: socket.socket) -> bytes:
        head = read_exactly(client, 4)
        return head + read_exactly(client, int.from_bytes(head[:3], "little"))

    def statement(self, message: bytes) -> str | None:
        if message[3] != 0 or message[4:5] != bytes([_COMMAND_QUERY]):
            return None
        return message[5:].decode("utf-8", "replace")


def _counted(source: socket.socket) -> bytes:
    """A length that counts itself, and the rest."""
    head = read_exactly(source, 4)
    (size,) = struct.unpack(">i", head)
    if not 4 <= size <= _MESSAGE_BYTES_MAX:
        raise EOFError(f"a message of {size} bytes")
    return head + read_exactly(source, int(size) - 4)
