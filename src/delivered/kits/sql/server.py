"""A database behind a server: what is asked of its client beside connections and questions."""

from __future__ import annotations

import contextlib
from abc import abstractmethod

from delivered.kits.sql.database import C, Database


class Server(Database[C]):
    """One database of one server. Holds no connection; picklable; two that are named alike are equal."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection is gone, so that the outcome of what was asked last is not known."""

    @abstractmethod
    def is_locked(self, error: BaseException) -> bool:
        """Whether a lock was waited for in vain: nothing was done, and it may be asked again."""

    @abstractmethod
    def idle(self, connection: C) -> bool:
        """Whether the connection is open and outside of any transaction, as far as the client knows. Asks nobody."""

    @abstractmethod
    def version(self, connection: C) -> int:
        """The version of the ledger's tables; 0: there are none. Raises the client's error."""

    @abstractmethod
    def migrate(self, connection: C) -> None:
        """Bring the ledger's tables to the newest version; do nothing if they are there. Outside of a transaction.

        Raises:
            UsageError: a newer version of this package wrote them.
            The client's error: the server said no.
        """

    def discard(self, connection: C | None) -> None:
        """Close a connection, which undoes what it has open. Never raises."""
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()
