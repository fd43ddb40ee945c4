"""Watches statements in flight, from connections of its own.

A commit may wait for a synchronous standby that is down, and a server that was paused or lost its machine answers
nothing: in both cases the client waits without a word, for ever. Here both are logged, and end after a bounded time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import TELL_AFTER_S, TELL_EVERY_S, patience_s

log = logging.getLogger("delivered.outage")

_LOOK_S = 0.5


@dataclass(frozen=True)
class Peer:
    """A server as one session reaches it.

    Attributes:
        label: for messages: "PostgreSQL at host:5432".
        waits: session ids -> what those that wait for a standby wait for, asked on a new connection. Raises
            TimeoutError: no answer within `CONNECT_TIMEOUT_S`.
    """

    label: str
    waits: Callable[[Sequence[int]], Mapping[int, str]] = field(compare=False)


@dataclass(eq=False)
class InFlight:
    """A statement whose end is awaited.

    Attributes:
        session: the session's id at the server.
        cut: ends the connection, so that the wait fails.
        reason: why it was cut; empty: it was not.
    """

    peer: Peer
    session: int
    cut: Callable[[], None]
    since: float
    reason: str = ""


_lock = threading.Lock()
_in_flight: set[InFlight] = set()
_silent: dict[str, float] = {}
"""Label -> since when new connections get no answer."""
_reported: dict[str, float] = {}
_watcher: tuple[int, threading.Thread] | None = None


@contextmanager
def watched(peer: Peer, session: int, cut: Callable[[], None]) -> Iterator[InFlight]:
    """Watch the body's wait. Used by any thread, around each statement: costs a microsecond or two."""
    call = InFlight(peer, session, cut, time.monotonic())
    with _lock:
        _start()
        _in_flight.add(call)
    try:
        yield call
    finally:
        with _lock:
            _in_flight.discard(call)


def _start() -> None:
    """A forked process does not inherit its parent's thread, nor its statements."""
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid():
        _in_flight.clear()
        thread = threading.Thread(target=_watch, daemon=True, name="delivered-statements")
        _watcher = (os.getpid(), thread)
        thread.start()


def _watch() -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        now = time.monotonic()
        with _lock:
            due: dict[str, list[InFlight]] = {}
            for call in _in_flight:
                if now - call.since >= TELL_AFTER_S and now - _reported.get(call.peer.label, 0.0) >= TELL_EVERY_S:
                    due.setdefault(call.peer.label, []).append(call)
            for label in due:
                _reported[label] = now
        for label, calls in due.items():
            try:
                _look(label, calls)
            except Exception as error:
                # It answers, if only with a refusal; the statement has its own error, or goes on.
                log.debug("%s: could not look: %s", label, error)


def _look(label: str, calls: Sequence[InFlight]) -> None:
    asked = time.monotonic()
    try:
        waits = calls[0].peer.waits([c.session for c in calls])
    except TimeoutError:
        now = time.monotonic()
        since = _silent.setdefault(label, asked)
        log.warning("%s does not answer (%.0f s)", label, now - min(c.since for c in calls))
        if now - since >= REQUEST_TIMEOUT_S:
            _cut(calls, f"no answer for {REQUEST_TIMEOUT_S:.0f} s, not to a new connection either")
        return
    _silent.pop(label, None)
    for call in calls:
        if call.session in waits:
            waited_s = time.monotonic() - call.since
            log.warning("%s: a commit has waited %.0f s for %s", label, waited_s, waits[call.session])
            if waited_s >= patience_s(answered=False):
                _cut([call], f"a commit waited {waited_s:.0f} s for {waits[call.session]}")


def _cut(calls: Sequence[InFlight], reason: str) -> None:
    with _lock:
        for call in calls:
            if call in _in_flight:
                call.reason = reason
                call.cut()
