"""Waits for unreachable servers: one mechanism for all retriable calls.

    with unanswered("Kafka at broker:9092"):      one call; logs a warning if it takes long
    wait_out("Kafka at broker:9092", ask, away)   asks until there is an answer
    patiently("Kafka at broker:9092", ask)        the same at start; raises Unreachable, naming the server

Changes of unknown outcome are never retried here: the caller fences, then checks.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import tenacity

from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.limits import CONNECT_TIMEOUT_S, OUTAGE_PATIENCE_S

log = logging.getLogger("delivered.outage")

TELL_AFTER_S = 3.0
TELL_EVERY_S = 15.0
"""Of one process."""
SHOW_EVERY_S = 60.0
"""Of all processes of a pipeline, by `Outages`."""
_ENDED_AFTER = 2.5
"""Intervals without a warning, after which a process no longer waits, or has ended."""
_FORGET_S = 10.0
"""An outage ends this long after its last call."""
_LOOK_S = 0.5
_STALL_S = 1.0
_PAUSE_S_MAX = 1.0

T = TypeVar("T")


@dataclass
class _Silence:
    """An unresponsive server.

    A server may answer some calls while others wait: of several brokers one is away, or a ledger is read while writes
    are blocked. The outage is over when each kind of call has been answered that was not.

    Attributes:
        since: time.monotonic() of the first unanswered call.
        calls: in flight: a number of each -> its kind, and when it began.
        failed: kinds whose last call ended without an answer.
        warned_at: time of the last warning; 0: none during this outage.
    """

    since: float
    ended: float
    calls: dict[int, tuple[str, float]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    warned_at: float = 0.0


_lock = threading.Lock()
_numbers = itertools.count()
_silences: dict[str, _Silence] = {}
_watcher: tuple[int, threading.Thread] | None = None
_in_query = 0
_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))
"""In time.monotonic(); nested waits end with the outer one."""
_once: ContextVar[float | None] = ContextVar("once", default=None)
"""The longest that one request may take of those that are asked once; None: others."""


def in_query() -> None:
    """Mark that this process serves a running query: its servers have answered before, so wait for them."""
    global _in_query
    _in_query = max(1, _in_query)


@contextmanager
def serving_query() -> Iterator[None]:
    """The same for the time of one batch, in the user's process, which starts other queries, too."""
    global _in_query
    with _lock:
        _in_query += 1
    try:
        yield
    finally:
        with _lock:
            _in_query -= 1


def patience_s(answered: bool) -> float:
    """How long to wait for a server; longer if it has answered before. 0: ask once."""
    if answered or _in_query:
        return OUTAGE_PATIENCE_S
    return CONNECT_TIMEOUT_S if _once.get() is None else 0.0


def query_patience_s() -> float:
    """How long to wait for a server that every start asks first: a running query waits, a start fails at once."""
    return OUTAGE_PATIENCE_S if _in_query else 0.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the total time of all waits inside."""
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def asking_once(longest_s: float = float("inf")) -> Iterator[None]:
    """Inside, a server that cannot be connected to is not asked again: the caller reports it, or asks again itself.

    Args:
        longest_s: how long a server may be silent after a request.
    """
    outer = _once.get()
    token = _once.set(longest_s if outer is None else min(outer, longest_s))
    try:
        yield
    finally:
        _once.reset(token)


def left_s(longest_s: float) -> float:
    """Timeout of one request: at most `longest_s` and the time left of enclosing waits, with a small minimum."""
    if (once_s := _once.get()) is not None:
        longest_s = min(longest_s, once_s)
    return max(0.1, min(longest_s, _deadline.get() - time.monotonic()))


def connect_timeout_s(longest_s: float) -> int:
    """As `left_s`, for a client that takes an integer, at least two (libpq).

    Raises:
        TimeoutError: enclosing waits have ended: a connection that takes two seconds would outlast them.
    """
    if _deadline.get() < time.monotonic():
        raise TimeoutError("it had not answered when the time for asking was over")
    return max(2, math.ceil(left_s(longest_s)))


def wait_out(
    server: str,
    ask: Callable[[], T],
    away: Callable[[BaseException], bool],
    patience_s: float = OUTAGE_PATIENCE_S,
    kind: str = "",
) -> T:
    """Ask until there is an answer.

    Args:
        server: for messages: "Kafka at broker:9092".
        kind: of the call, as `unanswered` takes it; default: by the name of `ask`.
        ask: a query or an idempotent change; called any number of times.
        away: whether an exception means that the server is unreachable; any other counts as an answer.
        patience_s: from the first call on; less if an enclosing wait ends sooner. 0: ask once.

    Raises:
        The last error of `ask`.
    """
    with unanswered(server, away, kind or call_kind(ask)):
        if not patience_s:
            return ask()  # within no time, requests would have none either
        with within(patience_s):
            return _ask_again(server, ask, away)


def _ask_again(server: str, ask: Callable[[], T], away: Callable[[BaseException], bool]) -> T:
    """Until there is an answer, or the enclosing wait ends."""

    def failed(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.debug("%s: asking again: %s", server, error)

    asking = tenacity.Retrying(
        retry=tenacity.retry_if_exception(away),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=_PAUSE_S_MAX),
        stop=tenacity.stop_after_delay(max(0.0, _deadline.get() - time.monotonic())),
        before_sleep=failed,
        reraise=True,
    )
    return asking(ask)


@contextmanager
def unanswered(server: str, away: Callable[[BaseException], bool] = lambda _: True, kind: str = "") -> Iterator[None]:
    """Log warnings while the body waits for an answer, and log when the server answers again.

    Args:
        kind: of the call: an answer to another kind does not end this one's outage.
    """
    now, number = time.monotonic(), next(_numbers)
    with _lock:
        _watch()
        known = _silences.get(server)
        if known is None or (not known.calls and now - known.ended > _FORGET_S):
            known = _silences[server] = _Silence(now, now)
        known.calls[number] = kind, now
    try:
        yield
    except BaseException as error:
        _ended(known, server, number, answered=not away(error))
        raise
    _ended(known, server, number, answered=True)


def call_kind(ask: Callable[..., object]) -> str:
    """The kind of a call: where its function is defined."""
    while isinstance(ask, partial):
        ask = ask.func
    return getattr(ask, "__qualname__", type(ask).__qualname__)


class Stall:
    """Progress of work that a server accepts in pieces: logs a warning when it stalls.

    with Stall("Kafka at broker:9092") as stall:
        while left := what_is_left():
            stall.look(left)
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._stack = ExitStack()
        self._left: int | None = None
        self._since = 0.0
        self._stalled = False

    def __enter__(self) -> Stall:
        return self

    def look(self, left: int) -> None:
        """Report how much is left; may be called often."""
        now = time.monotonic()
        if left != self._left:
            self._left, self._since, self._stalled = left, now, False
            self._stack.close()
        elif not self._stalled and now - self._since > _STALL_S:
            self._stalled = True
            self._stack.enter_context(unanswered(self._server))

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]


def _ended(silence: _Silence, server: str, number: int, answered: bool) -> None:
    with _lock:
        now = time.monotonic()
        kind, _ = silence.calls.pop(number)
        silence.ended = now
        if not answered:
            silence.failed.add(kind)
            return
        silence.failed.discard(kind)
        if silence.failed or any(now - began >= TELL_AFTER_S for _, began in silence.calls.values()):
            return
        away_s, warned_at = now - silence.since, silence.warned_at
        silence.since, silence.warned_at = now, 0.0
        if not silence.calls and _silences.get(server) is silence:
            del _silences[server]
    if warned_at:
        log.warning("%s answers again, after %.0f s", server, away_s)


def _watch() -> None:
    """Start the thread that logs; a forked process does not inherit its parent's."""
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid():
        thread = threading.Thread(target=_tell, daemon=True, name="delivered-outage")
        _watcher = (os.getpid(), thread)
        thread.start()


def _tell() -> None:
    pause = threading.Event()
    while not pause.wait(_LOOK_S):
        now = time.monotonic()
        with _lock:
            due = [
                (server, now - s.since)
                for server, s in _silences.items()
                if s.calls and now - s.since >= TELL_AFTER_S and now - s.warned_at >= TELL_EVERY_S
            ]
            for server, _ in due:
                _silences[server].warned_at = now
        for server, away_s in due:
            log.warning("%s does not answer, retrying (%.0f s)", server, away_s)


_AWAY_LINE = re.compile(r"(?P<server>.+) does not answer, retrying \(\d+ s\)")
_BACK_LINE = re.compile(r"(?P<server>.+) answers again, after \d+ s")


class Outages:
    """What several processes log of outages, each by its own clock, as one: a line when a server stops answering, one a
    minute while it is away, and one when no process waits for it any more. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[int, float]] = {}
        self._shown_at: dict[str, float] = {}
        self._answered: dict[str, str] = {}

    def is_new(self, process: int, text: str) -> bool:
        """Whether to show a line of a process's log now."""
        now = time.monotonic()
        with self._lock:
            if away := _AWAY_LINE.fullmatch(text):
                server = away["server"]
                self._waiting.setdefault(server, {})[process] = now
                self._answered.pop(server, None)
                if now - self._shown_at.get(server, float("-inf")) < SHOW_EVERY_S:
                    return False
                self._shown_at[server] = now
            elif back := _BACK_LINE.fullmatch(text):
                server = back["server"]
                self._waiting.get(server, {}).pop(process, None)
                if server in self._shown_at:
                    self._answered[server] = text
                return self._is_over(server, now)
        return True

    def ended(self) -> list[str]:
        """Lines of outages that are over although a process that waited has not said so: it gave up, or was killed."""
        now = time.monotonic()
        with self._lock:
            return [text for server, text in [*self._answered.items()] if self._is_over(server, now)]

    def _is_over(self, server: str, now: float) -> bool:
        waits = self._waiting.get(server, {}).values()
        if server not in self._answered or any(now - at < _ENDED_AFTER * TELL_EVERY_S for at in waits):
            return False
        for known in (self._waiting, self._shown_at, self._answered):
            known.pop(server, None)
        return True


class StoppedWaiting(Exception):
    """Stopped before the server answered."""


def patiently(
    server: str,
    ask: Callable[[], T],
    *,
    away: Callable[[T], DeliveredError | None] = lambda _: None,
    patience_s: float = OUTAGE_PATIENCE_S,
    stop: Callable[[], bool] = lambda: False,
) -> T:
    """The answer of `ask`, once the server is reachable. The logger `delivered.outage` reports the wait, from the first
    answer that it is not: `ask` may take long for another reason.

    Args:
        server: for messages: "RabbitMQ at broker:5672".
        away: the error in an answer that means the server is unreachable; None: the answer is good.
        patience_s: 0: ask once.

    Raises:
        Unreachable: it stayed unreachable. Any other error of `ask` is raised at once.
        StoppedWaiting: `stop()` became true.
    """
    warned = False

    def once() -> T:
        nonlocal warned
        if warned and stop():
            raise StoppedWaiting
        try:
            with asking_once():
                answer = ask()
            error = away(answer)
            if error is not None:
                raise error
        except Unreachable as error:
            if patience_s and not warned and error.may_come_back:
                log.warning("%s; waiting up to %.0f s", error.message.rstrip("."), patience_s)
                warned = True
                outage.enter_context(unanswered(server, is_away))
            raise
        return answer

    if not patience_s:
        return once()  # within no time, requests would have none either
    with within(patience_s), ExitStack() as outage:
        return _ask_again(server, once, is_away)


def is_away(error: BaseException) -> bool:
    """Whether a server did not answer, and may come back."""
    return isinstance(error, Unreachable) and error.may_come_back


# Executors of a cluster that has forgotten their application.

LOST_S = 120.0
"""A master that knows the application replaces its executors within seconds, and workers start again within these."""


class Loss:
    """How long a job has waited for executors, of an application that had some. One that waits for its first ones
    waits, and one without jobs needs none: dynamic allocation gives them back."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._had = False

    def is_final(self, count: int, jobs: int, now: float) -> bool:
        """
        Args:
            count: of executors.
            jobs: that run or wait.
            now: in seconds.
        """
        self._had |= count > 0
        if count > 0 or not jobs or not self._had:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= LOST_S
