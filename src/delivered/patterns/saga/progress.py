"""Where a saga stands and what comes next: a pure function of its declaration and its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from delivered.patterns.saga.definition import NO_UNDO, Saga, Step, Verb


class Status(StrEnum):
    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETE = "complete"
    COMPENSATED = "compensated"
    STUCK = "stuck"
    """A compensation failed too often; a person decides."""

    @property
    def at_rest(self) -> bool:
        """No worker will change it."""
        return self not in (Status.RUNNING, Status.COMPENSATING)


class Event(StrEnum):
    STARTED = "started"
    """Durable before the call."""
    DONE = "done"
    FAILED = "failed"
    """Whether it was done is open."""
    REJECTED = "rejected"
    """Not done, and never will be."""
    NOT_DONE = "not_done"
    """Answer of an ask."""
    SKIPPED = "skipped"
    RETRY = "retry"
    """A person lets a stuck compensation be tried again."""


@dataclass(frozen=True)
class Entry:
    """One line of a saga's log.

    Attributes:
        value: result of a do that is done.
    """

    step: str
    verb: Verb
    event: Event
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class Next:
    """The call that comes next.

    Attributes:
        attempt: from 1.
    """

    step: Step
    verb: Verb
    attempt: int = 1


@dataclass
class _Calls:
    """What the log says of one step's do.

    Attributes:
        asked: since the last answer.
        open: whether the newest call was done is not known.
        earlier_open: whether an earlier one was done is not known.
    """

    started: int = 0
    asked: int = 0
    open: bool = False
    earlier_open: bool = False
    done: bool = False
    rejected: bool = False


def _forward(step: Step, entries: Sequence[Entry]) -> _Calls:
    """Fold the entries of one step's do and ask."""
    calls = _Calls()
    for entry in entries:
        if entry.step != step.name or entry.verb is Verb.UNDO:
            continue
        match entry.event:
            case Event.STARTED if entry.verb is Verb.ASK:
                calls.asked += 1
            case Event.STARTED:
                calls.started += 1
                calls.earlier_open, calls.open = calls.earlier_open or calls.open, True
            case Event.DONE:
                calls.done = True
            case Event.REJECTED:
                calls.rejected, calls.open = True, False
            case Event.NOT_DONE:
                calls.open = calls.earlier_open = False
                calls.asked = 0
    return calls


def results(entries: Sequence[Entry]) -> dict[str, Any]:
    return {e.step: e.value for e in entries if e.verb is not Verb.UNDO and e.event is Event.DONE}


def next_of(saga: Saga, entries: Sequence[Entry]) -> tuple[Status, Next | None]:
    """The saga's status, and the call that comes next; None: it is at rest."""
    backward = any(e.verb is Verb.UNDO for e in entries)  # never forward again, even if the declaration changed
    for at, step in enumerate(saga.steps):
        calls = _forward(step, entries)
        if calls.done:
            continue
        if not backward and not calls.rejected:
            if calls.started == 0:
                return Status.RUNNING, Next(step, Verb.DO)
            if calls.open and step.ask is not None and not step.repeatable and calls.asked < step.attempts_max:
                return Status.RUNNING, Next(step, Verb.ASK, calls.asked + 1)
            known = step.repeatable or (step.ask is not None and not calls.open)
            if known and calls.started < step.attempts_max:
                return Status.RUNNING, Next(step, Verb.DO, calls.started + 1)
        perhaps = calls.open or calls.earlier_open
        return _undo(saga.steps[: at + perhaps], entries)
    return _undo(saga.steps, entries) if backward else (Status.COMPLETE, None)


def _undo(steps: Sequence[Step], entries: Sequence[Entry]) -> tuple[Status, Next | None]:
    """The next compensation of steps that were done, or perhaps done; the last one first."""
    for step in reversed(steps):
        if step.undo is NO_UNDO:
            continue
        started, over = 0, False
        for entry in entries:
            if entry.step == step.name and entry.verb is Verb.UNDO:
                started = 0 if entry.event is Event.RETRY else started + (entry.event is Event.STARTED)
                over = over or entry.event in (Event.DONE, Event.SKIPPED)
        if over:
            continue
        if started >= step.attempts_max:
            return Status.STUCK, None
        return Status.COMPENSATING, Next(step, Verb.UNDO, started + 1)
    return Status.COMPENSATED, None
