"""Answers over HTTP that end in time, and JSON of any shape: HTTP libraries bound each wait alone, so a byte a second
never ends."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import left_s

T = TypeVar("T")

_START_LENGTH_MAX = 100
_REQUIRED: Any = object()
_WORDS: dict[type, str] = {int: "an integer", str: "text", bool: "true or false", dict: "an object", list: "a list"}


class AnswerTooLarge(OSError):
    """A server sent more than its answers can have."""


class UnexpectedAnswer(ValueError):
    """A server's answer is no JSON, or JSON of another shape. Its text says what is wrong, and how it starts."""


class JsonAnswer:
    """JSON that a server sent: its fields are read with their types, as it may have any shape."""

    def __init__(self, value: Any, start: str, place: str = "") -> None:
        self._value, self._start, self._place = value, start, place

    @classmethod
    def read(cls, data: bytes) -> JsonAnswer:
        """Raises UnexpectedAnswer: it is no JSON."""
        start = ascii(data[:_START_LENGTH_MAX].decode(errors="replace"))
        try:
            return cls(json.loads(data), start)
        except (ValueError, RecursionError) as error:
            raise UnexpectedAnswer(f"{start} is no JSON: {str(error)[:_START_LENGTH_MAX]}") from None

    @classmethod
    def of(cls, value: Any) -> JsonAnswer:
        """What a library has parsed."""
        return cls(value, ascii(value)[:_START_LENGTH_MAX])

    def value(self, kind: type[T], missing: Any = _REQUIRED) -> T:
        """
        Args:
            missing: the value for null.

        Raises:
            UnexpectedAnswer: it is of another type; or an integer that 64 bits do not hold.
        """
        found: Any = self._value
        if found is None and missing is not _REQUIRED:
            return missing  # type: ignore[no-any-return]
        # For Python, true and false are numbers.
        if type(found) is not kind or (isinstance(found, int) and not -(1 << 63) <= found < 1 << 63):
            what = f"{self._place or 'it'} is {ascii(found)[:_START_LENGTH_MAX]}"
            raise UnexpectedAnswer(f"{what}, not {_WORDS[kind]}, in an answer that starts with {self._start}")
        return found

    def take(self, name: str, kind: type[T], missing: T = _REQUIRED) -> T:
        """A field.

        Args:
            missing: the value if there is none, or null.

        Raises:
            UnexpectedAnswer: it is of another type, or missing, or this is no object.
        """
        return self.at(name).value(kind, missing)

    def number(self, name: str, low: int, high: int = (1 << 63) - 1) -> int:
        """A field that is an integer, bounds included. Raises UnexpectedAnswer."""
        found = self.take(name, int)
        if not low <= found <= high:
            what = f"{self._place and self._place + '.'}{name} is {found}"
            raise UnexpectedAnswer(
                f"{what}; it must be from {low} to {high}, in an answer that starts with {self._start}"
            )
        return found

    def seconds(self, name: str) -> float | None:
        """A field that is a number, or a number as text; None: it is missing. Raises UnexpectedAnswer."""
        field = self.at(name)
        try:
            found = None if field._value is None or isinstance(field._value, bool) else float(field._value)
        except (ValueError, TypeError, OverflowError):
            found = math.nan
        if field._value is not None and (found is None or not math.isfinite(found)):
            raise UnexpectedAnswer(f"{field._place} is no number, in an answer that starts with {self._start}")
        return found

    def at(self, name: str) -> JsonAnswer:
        """A field of any type; null if it is missing. Raises UnexpectedAnswer: this is no object."""
        place = f"{self._place}.{name}" if self._place else name
        return JsonAnswer(self.value(dict).get(name), self._start, place)

    def each(self) -> list[JsonAnswer]:
        """Raises UnexpectedAnswer: this is no list."""
        return [JsonAnswer(v, self._start, f"{self._place}[{n}]") for n, v in enumerate(self.value(list))]

    def only(self) -> JsonAnswer:
        """The item of a list of one. Raises UnexpectedAnswer: it is none."""
        items = self.each()
        if len(items) != 1:
            raise UnexpectedAnswer(f"{self._start} is not a list of one")
        return items[0]

    def named(self) -> dict[str, JsonAnswer]:
        """Fields whose names are data. Raises UnexpectedAnswer: this is no object."""
        return {name: self.at(name) for name in self.value(dict)}


class TimedAnswer(http.client.HTTPResponse):
    """An answer whose head and body arrive within CONNECT_TIMEOUT_S and enclosing waits, or raise TimeoutError.

    Set it as the `response_class` of a connection.
    """

    def __init__(self, sock: Any, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp: Any = io.BufferedReader(_Timed(self.fp.detach(), sock))


class _Timed(io.RawIOBase):
    def __init__(self, raw: Any, sock: Any) -> None:
        self._raw, self._sock = raw, sock
        self._limit_s = left_s(CONNECT_TIMEOUT_S)
        self._deadline = time.monotonic() + self._limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"its answer did not end within {self._limit_s:.0f} s")
        if self._sock.fileno() >= 0:  # else it was closed after the request, and the rest is read from what is left
            self._sock.settimeout(remaining_s)
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


class _Running(threading.local):
    """The call that this thread makes."""

    deadline: float | None = None


_running = _Running()


@contextlib.contextmanager
def ends_within(timeout_s: float) -> Iterator[float]:
    """Calls of this thread by `limited` clients end after this time; yields the deadline, of time.monotonic()."""
    before, _running.deadline = _running.deadline, time.monotonic() + timeout_s
    try:
        yield _running.deadline
    finally:
        _running.deadline = before


def starts(timeout_s: float) -> None:
    """The next call of this thread by a `limited` client ends within this time."""
    _running.deadline = time.monotonic() + timeout_s


def limited(client: Any) -> Any:
    """The same client, of httpx or its successor; its waits end when `ends_within` or `starts` says so."""
    for transport in (client._transport, *client._mounts.values()):  # the mounts are the environment's proxies
        if transport is not None:
            pool = transport._pool
            library = sys.modules[type(pool).__module__.partition(".")[0]]
            pool._network_backend = _LimitedBackend(pool._network_backend, library.ReadTimeout)
    return client


class _Limited:
    def __init__(self, inner: Any, too_late: type[Exception]) -> None:
        self._inner, self._too_late = inner, too_late

    def _left_s(self, timeout_s: float | None) -> float:
        left_s = math.inf if _running.deadline is None else _running.deadline - time.monotonic()
        if left_s <= 0:
            raise self._too_late("the call took too long")
        return min(left_s, math.inf if timeout_s is None else timeout_s)


class _LimitedStream(_Limited):
    def read(self, max_bytes: int, timeout: float | None = None) -> Any:
        return self._inner.read(max_bytes, self._left_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._left_s(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: Any, server_hostname: Any = None, timeout: float | None = None) -> Any:
        made = self._inner.start_tls(ssl_context, server_hostname, self._left_s(timeout))
        return _LimitedStream(made, self._too_late)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _LimitedBackend(_Limited):
    """A network backend of httpcore."""

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *args: Any, **more: Any) -> Any:
        made = self._inner.connect_tcp(host, port, self._left_s(timeout), *args, **more)
        return _LimitedStream(made, self._too_late)

    def connect_unix_socket(self, path: str, timeout: float | None = None, *args: Any, **more: Any) -> Any:
        made = self._inner.connect_unix_socket(path, self._left_s(timeout), *args, **more)
        return _LimitedStream(made, self._too_late)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)
