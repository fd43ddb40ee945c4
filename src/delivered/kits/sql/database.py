"""A database as the user named it: connections, errors in plain words, questions."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from delivered.model.errors import DeliveredError, UsageError

T = TypeVar("T")


class Connection(Protocol):
    """What we ask of a client's connection."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Database(ABC, Generic[C]):
    """One database. Holds no connection; picklable."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where it is, as it stands in a sentence: "at host:5432/shop"."""

    @abstractmethod
    def connect(self, role: str, *, writes: bool = True) -> C:
        """Open a connection. Raises DeliveredError within 15 s.

        Args:
            role: who asks, for the server's list of sessions.
        """

    @abstractmethod
    def errors(self) -> type[Exception]:
        """The base of all the client's errors; imported when asked."""

    @abstractmethod
    def explained(self, error: Exception) -> DeliveredError:
        """The client's error in plain words, with the next step."""

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """What goes wrong inside is raised as ours."""
        try:
            yield
        except self.errors() as error:
            raise self.explained(error) from error

    def ask(self, question: Callable[[C], T]) -> T:
        """A question that changes nothing, on a connection of its own."""
        connection = self.connect("read", writes=False)
        try:
            with self.explaining():
                return question(connection)
        finally:
            connection.close()


def quoted(name: str) -> str:
    """An identifier, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def is_newest(version: int, known: int, ledger: str) -> bool:
    """Whether the ledger's tables need no migration.

    Args:
        ledger: as it stands in a sentence: "in schema 'delivered'".

    Raises:
        UsageError: a newer version of this package wrote them.
    """
    if version > known:
        raise UsageError(
            "LEDGER_NEWER",
            f"The ledger {ledger} has version {version}; this version of delivered knows {known}.",
            next_step="pip install --upgrade delivered",
        )
    return version == known
