"""Runs sagas: the start of a call is logged, then the call is made, then its outcome is logged."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, UsageError
from delivered.model.limits import NAME_LENGTH_MAX, SAGA_BACKOFF_S_MAX, SAGA_ERROR_LENGTH_MAX
from delivered.model.options import check_argument
from delivered.model.patience import patience_s, wait_out
from delivered.model.step import Moment, StepId, reach
from delivered.patterns.saga.definition import (
    Call,
    Done,
    Entry,
    Event,
    Next,
    Rejected,
    Saga,
    Status,
    Verb,
    next_of,
    results,
    stored_result,
)
from delivered.patterns.saga.log import Claim, Log, OpenLog, is_lost

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often an idle worker looks for new sagas."""
_LOST_IN_A_ROW_MAX = 10


def run(
    where: Log,
    *sagas: Saga,
    forever: bool = False,
    threads: int = 1,
    ids: Sequence[str] | None = None,
    stop: threading.Event | None = None,
) -> dict[Status, int]:
    """Run sagas until all are at rest, or `stop` is set. Any number of processes may do so at once.

    A lost connection to the log is opened again for two minutes; a call that was under way then is treated as after a
    crash.

    Args:
        forever: wait for new ones.
        threads: sagas that run at the same time.
        ids: only these, of the one saga given.

    Returns: how many came to rest here, or (`ids`) are at rest, by status.

    Raises:
        Refused: no tables.
    """
    check_argument("run", "where", where, Log, "a log", "Log(url), saga")
    for saga in sagas:
        check_argument("run", "saga", saga, Saga, "a saga", "Log(url), saga")
    check_argument("run", "threads", threads, int, "a number", "..., threads=2")
    if threads < 1:
        wanted = {"kind": "int", "wanted": "1 or more", "example": "..., threads=2"}
        raise UsageError("ARGUMENT_TYPE", call="run", name="threads", value=threads, **wanted)
    check_argument("run", "ids", ids, (list, tuple, NoneType), "a list of ids", '..., ids=["order-1"]')
    work = _Work(where, sagas, forever, threading.Event() if stop is None else stop)
    parts = [None] * threads if ids is None else [part for at in range(threads) if (part := list(ids[at::threads]))]
    if len(parts) == 1:
        work.serve(parts[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:
            started = [pool.submit(work.serve, part) for part in parts]
            try:
                for thread in started:
                    thread.result()
            except BaseException:
                work.stop.set()
                raise
    return dict(work.rested)


@dataclass
class _Work:
    """What the threads of one `run` share."""

    where: Log
    sagas: Sequence[Saga]
    forever: bool
    stop: threading.Event
    rested: Counter[Status] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, ids: list[str] | None) -> None:
        """One thread, with one connection at a time."""
        runner = Runner(f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"[:NAME_LENGTH_MAX])
        lost, entries = 0, -1
        while True:
            opened = wait_out(self.where.label, self.where.open, is_lost, patience_s(answered=entries >= 0))
            try:
                return self._serve_all(opened, runner) if ids is None else self._serve_these(opened, runner, ids)
            except Exception as error:
                lost = lost + 1 if runner.entries == entries else 1
                entries = runner.entries
                if not is_lost(error) or lost > _LOST_IN_A_ROW_MAX:
                    raise
                log.warning("the saga log was lost, connecting again: %s", error)
            finally:
                opened.close()

    def _serve_all(self, opened: OpenLog, runner: Runner) -> None:
        while not self.stop.is_set():
            claimed = False
            for saga in self.sagas:
                claim = None if self.stop.is_set() else opened.claim(saga, runner.name)
                if claim is not None:
                    claimed = True
                    self._count(runner.advance(opened, claim, self.stop))
            if claimed:
                continue
            pause_s = opened.pause_s(self.sagas)
            if pause_s is None and not self.forever:
                return
            self.stop.wait(min(_LOOK_S, 0.01 + (_LOOK_S if pause_s is None else pause_s)))

    def _serve_these(self, opened: OpenLog, runner: Runner, ids: list[str]) -> None:
        (saga,) = self.sagas
        while ids and not self.stop.is_set():
            for id_ in list(ids):
                claim = opened.claim(saga, runner.name, id_)
                status = runner.advance(opened, claim, self.stop) if claim is not None else opened.status(saga, id_)
                if claim is None and status is None:
                    raise InvariantBroken("SAGA_GONE", saga=saga.name, id=id_)
                if status is not None and status.at_rest:
                    ids.remove(id_)
                    self._count(status)
            if ids:
                self.stop.wait(min(_LOOK_S, 0.01 + (opened.pause_s(self.sagas) or 0.0)))

    def _count(self, status: Status | None) -> None:
        if status is not None and status.at_rest:
            with self.lock:
                self.rested[status] += 1


class Runner:
    """Runs one saga at a time.

    Attributes:
        name: of this worker, in the log.
        entries: written so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries = 0

    def advance(self, opened: OpenLog, claim: Claim, stop: threading.Event) -> Status | None:
        """Run a claimed saga until it is at rest, has to pause, or `stop` is set; None: another worker has it.

        One transaction logs the outcome of a call together with the start of the next one, before that one is made.
        """
        outcomes: list[Entry] = []
        last: Next | None = None
        try:
            while True:
                status, next_ = next_of(claim.saga, [*claim.entries, *outcomes])
                failed = bool(outcomes) and outcomes[-1].event is Event.FAILED
                if next_ is None or failed or stop.is_set():
                    if outcomes or next_ is not None or status is not claim.status:
                        self._write(opened, claim, outcomes, status, backoff_s(last, next_) if failed else 0.0)
                    return status
                self._write(opened, claim, [*outcomes, Entry(next_.step.name, next_.verb, Event.STARTED)], status)
                facts = {"saga": claim.saga.name, "id": claim.id, "call": f"{next_.step.name}.{next_.verb}"}
                reach(StepId.SAGA_CALL, Moment.BEFORE, **facts)
                outcomes, last = [call(claim, next_)], next_
                reach(StepId.SAGA_CALL, Moment.AFTER, **facts)
        except Fenced as error:
            log.warning("%s", error)
            return None

    def _write(
        self, opened: OpenLog, claim: Claim, entries: Sequence[Entry], status: Status, pause_s: float | None = None
    ) -> None:
        reach(StepId.SAGA_LOG, Moment.BEFORE, saga=claim.saga.name, id=claim.id, status=status.value)
        opened.append(claim, entries, status, pause_s)
        self.entries += len(entries)
        reach(StepId.SAGA_LOG, Moment.AFTER, saga=claim.saga.name, id=claim.id, status=status.value)


def call(claim: Claim, next_: Next) -> Entry:
    """Call the step's function; the entry says how it ended."""
    step, verb = next_.step, next_.verb
    arguments = Call(
        claim.saga.name, claim.id, step.name, verb, claim.saga.key(claim.id, step), claim.data,
        results(claim.entries), next_.attempt,
    )  # fmt: skip
    entry = Entry(step.name, verb, Event.DONE)
    functions: dict[Verb, Any] = {Verb.DO: step.do, Verb.ASK: step.ask, Verb.UNDO: step.undo}
    try:
        result = functions[verb](arguments)
        if verb is Verb.ASK and result is None:
            return replace(entry, event=Event.NOT_DONE)
        if verb is Verb.ASK and not isinstance(result, Done):
            raise TypeError(f"ask returned {result!r:.100}; it must return Done(result), or None")
        if verb is Verb.UNDO:
            return entry
        return replace(entry, value=stored_result(result.result if isinstance(result, Done) else result))
    except Rejected as error:
        event = Event.REJECTED if verb is Verb.DO else Event.FAILED
        return replace(entry, event=event, error=_short(error))
    except Exception as error:
        log.warning("saga %s %r: %s of step %s failed: %s", claim.saga.name, claim.id, verb.value, step.name, error)
        return replace(entry, event=Event.FAILED, error=_short(error))


def backoff_s(failed: Next | None, then: Next | None) -> float:
    """Before the call after a failed one; 0 if the saga turns back. Doubles with each attempt, which the log counts
    across crashes; with jitter."""
    if (
        failed is None
        or then is None
        or then.step is not failed.step
        or (then.verb is Verb.UNDO) is not (failed.verb is Verb.UNDO)
    ):
        return 0.0
    doubled = failed.step.backoff_s * 2.0 ** min(failed.attempt - 1, 30)
    return min(SAGA_BACKOFF_S_MAX, doubled) * random.uniform(0.5, 1.0)  # noqa: S311


def _short(error: Exception) -> str:
    text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
    return text.replace("\0", "").encode(errors="replace").decode()[:SAGA_ERROR_LENGTH_MAX]
