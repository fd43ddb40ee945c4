"""A database as the user declared it: connections, readable errors, queries."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from delivered.model.errors import DeliveredError, UsageError

T = TypeVar("T")


class Connection(Protocol):
    """The subset of a client's connection used here."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Database(ABC, Generic[C]):
    """One database. Holds no connection; picklable."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Its location, for messages: "at host:5432/shop"."""

    @abstractmethod
    def connect(self, role: str, *, writes: bool = True) -> C:
        """Open a connection. Raises DeliveredError within 15 s.

        Args:
            role: shown in the server's list of sessions.
        """

    @abstractmethod
    def errors(self) -> type[Exception]:
        """Base class of the client's errors; imported on first use."""

    @abstractmethod
    def explained(self, error: Exception) -> DeliveredError:
        """Translate the client's error, with the next step."""

    @abstractmethod
    def is_constraint(self, error: Exception) -> bool:
        """Whether a row violated a constraint: the statement had no effect, its transaction goes on."""

    def at_once(self, connection: C) -> None:
        """Make the open transaction check deferred constraints immediately."""
        del connection

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Translate the client's errors."""
        try:
            yield
        except self.errors() as error:
            raise self.explained(error) from error

    def ask(self, question: Callable[[C], T]) -> T:
        """Run a read-only query on its own connection."""
        connection = self.connect("read", writes=False)
        try:
            with self.explaining():
                return question(connection)
        finally:
            connection.close()


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def is_newest(version: int, known: int, ledger: str) -> bool:
    """Whether the ledger's tables need no migration.

    Args:
        ledger: for messages: "in schema 'delivered'".

    Raises:
        UsageError: a newer version of this package created them.
    """
    if version > known:
        raise UsageError(
            "LEDGER_NEWER",
            f"The ledger {ledger} has version {version}; this version of delivered supports up to {known}.",
            next_step="pip install --upgrade delivered",
        )
    return version == known


class Server(Database[C]):
    """One database of one server. Holds no connection; picklable; equal if declared alike."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection was lost, so that the outcome of the last statement is unknown."""

    @abstractmethod
    def is_locked(self, error: BaseException) -> bool:
        """Whether a lock wait timed out: the statement had no effect and may be retried."""

    @abstractmethod
    def idle(self, connection: C) -> bool:
        """Whether the connection is open and outside any transaction, by the client's state; no round trip."""

    @abstractmethod
    def version(self, connection: C) -> int:
        """Version of the ledger's tables; 0: they do not exist. Raises the client's error."""

    @abstractmethod
    def migrate(self, connection: C) -> None:
        """Create or migrate the ledger's tables; does nothing if they are up to date. Outside a transaction.

        Raises:
            UsageError: a newer version of this package created them.
            The client's error: the server rejected it.
        """

    def discard(self, connection: C | None) -> None:
        """Close a connection, which rolls back its open transaction. Never raises."""
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()
