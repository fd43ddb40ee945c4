"""A database server: what connectors implement in addition to `Database`."""

from __future__ import annotations

import contextlib
from abc import abstractmethod

from delivered.kits.sql.database import C, Database


class Server(Database[C]):
    """One database of one server. Holds no connection; picklable; equal if declared alike."""

    @abstractmethod
    def is_lost(self, error: BaseException) -> bool:
        """Whether the connection was lost, so that the outcome of the last statement is unknown."""

    @abstractmethod
    def is_locked(self, error: BaseException) -> bool:
        """Whether waiting for a lock timed out: nothing was done, and the statement may be retried."""

    @abstractmethod
    def idle(self, connection: C) -> bool:
        """Whether the connection is open and outside any transaction, according to the client. Asks no server."""

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
