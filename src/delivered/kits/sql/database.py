"""A database as the user declared it: connections, readable errors, queries."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from delivered.model.errors import DeliveredError, UsageError

T = TypeVar("T")


class Connection(Protocol):
    """The part of a client's connection that we use."""

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
        """The client's error as ours, with the next step."""

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the client's errors as ours."""
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
