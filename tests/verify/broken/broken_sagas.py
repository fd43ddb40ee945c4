"""Sagas that are broken on purpose; the judge must see each."""

from __future__ import annotations

import itertools
import os
from typing import Any

from delivered.patterns import saga
from delivered.patterns.saga import Saga, Step, definition, log


def break_it(variant: str, made: Saga) -> Saga:
    if variant == "log_after_the_step":
        write = log.OpenLog.append
        held: list[definition.Entry] = []

        def late(self: Any, claim: Any, entries: Any, status: Any, pause_s: float | None = None) -> None:
            started = [e for e in entries if e.event is definition.Event.STARTED]
            if not started:
                write(self, claim, [*held, *entries], status, pause_s)
            elif held:
                write(self, claim, [*held, *entries[:-1]], status, pause_s)
            held[:] = started

        log.OpenLog.append = late  # type: ignore[method-assign]
    elif variant == "key_per_try":
        tries = itertools.count()
        Saga.key = lambda self, *_: f"{os.getpid()}/{next(tries)}"  # type: ignore[method-assign]
    elif variant == "undo_in_order":
        definition.reversed = list  # type: ignore[attr-defined]
    elif variant == "undo_once":
        definition._undo = _undo_once
    elif variant == "repeats_any_step":
        Step.repeatable = property(lambda self: True)  # type: ignore[method-assign]
    elif variant == "rejected_is_not_done":
        fold = definition._forward
        definition._forward = lambda step, entries: _without_doubt(fold(step, entries))
    elif variant == "no_fence":
        execute = log.Caller.execute

        def unfenced(self: Any, statement: str, values: Any = ()) -> Any:
            if statement.startswith("UPDATE delivered_saga SET status") and "AND epoch = ?" in statement:
                statement, values = statement.replace("AND epoch = ?", ""), list(values)[:-1]
            if statement.startswith("INSERT INTO delivered_saga_entry"):
                values = [*values[:2], values[2] + 1000 * values[3], *values[3:]]
            return execute(self, statement, values)

        log.Caller.execute = unfenced  # type: ignore[method-assign]
    else:
        raise ValueError(variant)
    return made


def _without_doubt(found: Any) -> Any:
    found.open = found.earlier_open = False
    return found


def _undo_once(steps: Any, entries: Any) -> Any:
    """Takes a compensation that was started for one that is done."""
    for step in reversed(steps):
        if step.undo is not saga.NO_UNDO and not any(e.step == step.name and e.verb == "undo" for e in entries):
            return definition.Status.COMPENSATING, definition.Next(step, saga.Verb.UNDO)
    return definition.Status.COMPENSATED, None
