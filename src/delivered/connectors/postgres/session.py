"""A connection whose waits are watched. The only module that imports psycopg before it is used.

Dates and times that Python has not are read as numbers, and infinity as text: they are for dead letters and messages
(`model.rows.plain_rows`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.datetime import DateLoader, TimestampLoader, TimestamptzLoader

from delivered.kits.sql.database import Peer, watch
from delivered.kits.sql.text import days, micros

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext, Loader


STANDBYS = (
    "SELECT current_setting('synchronous_standby_names'), "
    "coalesce(string_agg(application_name || ' (' || state || ', ' || sync_state || ')', ', '), 'none') "
    "FROM pg_stat_replication"
)
"""The synchronous standbys that are wanted, and all that are connected; names of the latter only for a monitor."""


class WaitEnded(psycopg.OperationalError):
    """The connection was ended, because the server, or a standby, did not answer. The outcome is unknown."""


class Session(psycopg.Connection[Any]):
    """A connection of the sink. Used by one thread.

    Attributes:
        settings: what `connect` pinned, as the server has it.
    """

    settings: Mapping[str, str]
    _peer: Peer | None = None

    def watch(self, label: str, conninfo: str, given: Mapping[str, Any]) -> None:
        """Watch all statements from here on.

        Args:
            conninfo, given: as this session was opened.
        """
        host, port = self.info.host, self.info.port
        # The same server, however many the URL names.
        here = {
            **given,
            "host": host,
            "port": port,
            "target_session_attrs": "any",
            "application_name": "delivered look",
        }
        if self.info.hostaddr:
            here["hostaddr"] = self.info.hostaddr

        def waits(sessions: Sequence[int]) -> Mapping[int, str]:
            try:
                connection = psycopg.connect(conninfo, **here, autocommit=True)
            except psycopg.errors.ConnectionTimeout as error:
                raise TimeoutError(str(error)) from None
            with connection:
                found = connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event = 'SyncRep'", [list(sessions)]
                ).fetchall()
                return dict.fromkeys((pid for (pid,) in found), standbys(connection)) if found else {}

        self._peer = Peer(f"{label} ({host}:{port})", waits)
        self._pid = self.info.backend_pid

    def wait(self, *given: Any, **options: Any) -> Any:
        """The one place where psycopg waits for the server."""
        if self._peer is None:
            return super().wait(*given, **options)
        with watch(self._peer, self._pid, self._cut) as call:
            try:
                return super().wait(*given, **options)
            except psycopg.OperationalError as error:
                if call.reason:
                    raise WaitEnded(call.reason) from error
                raise

    def _cut(self) -> None:
        """From another thread: the wait sees the end of the stream."""
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def standbys(connection: psycopg.Connection[Any]) -> str:
    """The synchronous standbys, in words. Raises psycopg.Error."""
    wanted, there = connection.execute(STANDBYS).fetchone() or ("", "none")
    return f"a synchronous standby (synchronous_standby_names = '{wanted}'; connected: {there})"


def register_loaders(context: AdaptContext) -> None:
    for name, loader in _LOADERS.items():
        context.adapters.register_loader(name, loader)


def _loader(base: type[Any], parse: Callable[[str], int]) -> type[Loader]:
    class Beyond(base):  # type: ignore[misc]
        def load(self, data: Any) -> Any:
            try:
                return super().load(data)
            except psycopg.DataError:
                text = bytes(data).decode()
                try:
                    return parse(text)
                except ValueError:
                    return text

    return Beyond


_LOADERS: dict[str, type[Loader]] = {
    "date": _loader(DateLoader, days),
    "timestamp": _loader(TimestampLoader, lambda text: micros(text, zoned=False)),
    "timestamptz": _loader(TimestamptzLoader, lambda text: micros(text, zoned=True)),
}
