"""A connection of the page's server that gives up on a client which does not finish its request."""

from __future__ import annotations

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_TIMEOUT_S = 10.0
"""A client that has not sent a complete request by then is disconnected."""


class TimedConnection(H11Protocol):
    """uvicorn bounds the time between requests, but not the time that one takes to arrive."""

    _late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The time runs from the connection, or a later request's first byte, until the headers are complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
