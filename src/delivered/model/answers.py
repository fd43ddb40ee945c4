"""Answers over HTTP that end in time: the standard library bounds each wait alone, so a byte a second never ends."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Iterable
from typing import Any

from delivered.model.limits import CONNECT_TIMEOUT_S


class AnswerTooLarge(OSError):
    """A server sent more than its answers can have."""


class TimedAnswer(http.client.HTTPResponse):
    """An answer whose head and body arrive within CONNECT_TIMEOUT_S, or raise TimeoutError.

    Set it as the `response_class` of a connection.
    """

    def __init__(self, sock: Any, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp: Any = io.BufferedReader(_Timed(self.fp.detach(), sock))


class _Timed(io.RawIOBase):
    def __init__(self, raw: Any, sock: Any) -> None:
        self._raw, self._sock = raw, sock
        self._deadline = time.monotonic() + CONNECT_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"its answer did not end within {CONNECT_TIMEOUT_S:.0f} s")
        if self._sock.fileno() >= 0:  # else it was closed after the request, and the rest is read from what is left
            self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def bounded(parts: Iterable[bytes], bytes_max: int, deadline: float) -> bytes:
    """
    Args:
        deadline: of time.monotonic().

    Raises:
        AnswerTooLarge: the parts have more bytes. TimeoutError: they did not end in time.
    """
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > bytes_max:
            raise AnswerTooLarge(f"its answer has more than {bytes_max:,} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"its answer did not end within {CONNECT_TIMEOUT_S:.0f} s")
    return bytes(body)
