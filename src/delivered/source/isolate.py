"""Finds the poison message that makes the log reject a batch, by appending ever smaller parts of it.

A message that cannot be written (with an invalid time, say) must neither block all others nor be redelivered forever.
To rule out a full disk, a message that the store rejects only counts as bad if another one of the batch was appended.
A message that this code cannot turn into a record is bad in any case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from delivered.contract.queue import Entered, Journal, MessageBatch
from delivered.model.limits import REFUSED_IN_A_ROW_MAX
from delivered.model.outcome import Failed, Ok, Outcome

_PAUSE_S = 0.1


@dataclass(frozen=True)
class Raised(Failed):
    """This code failed, not the store."""


def guarded(journal: Journal, batch: MessageBatch) -> Outcome[Entered]:
    """An append that turns every error into an outcome: a message can cause any error."""
    try:
        return journal.append(batch)
    except Exception as error:
        return Raised(f"{type(error).__name__}: {error}"[:500])


@dataclass
class Isolated:
    """
    Attributes:
        outcome: of all appends; or the one that ended it, in which case nothing may be acknowledged.
        refused: indexes of the messages that the log rejected on their own every time; reasons: a sentence for each.
        in_a_row: how many of them since the last appended message.
    """

    outcome: Outcome[Entered] = field(default_factory=lambda: Ok(Entered(0, 0, 0)))
    refused: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    in_a_row: int = 0


def isolate(journal: Journal, batch: MessageBatch, times: int, in_a_row: int = 0) -> Isolated:
    """Append what can be appended, by bisecting down to single messages.

    Args:
        times: how often a message must be rejected on its own before it counts as the cause.
        in_a_row: messages rejected since the last appended one. Above `REFUSED_IN_A_ROW_MAX` the log is broken: stop.
    """
    found = Isolated(in_a_row=in_a_row)
    entered = repeated = tries = 0
    by_store = ""
    parts = [range(len(batch))]
    while parts:
        part = parts.pop()
        done = _tried(journal, batch.pick(part), times if len(part) == 1 else 1)
        match done:
            case Ok(more):
                entered, repeated, tries = entered + more.entered, repeated + more.repeated, tries + more.tries
                found.in_a_row = 0 if more.entered else found.in_a_row
            case Failed(reason) if len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]  # first half first, to keep the order
            case Failed(reason):
                found.in_a_row += 1
                if found.in_a_row > REFUSED_IN_A_ROW_MAX:
                    found.outcome = Failed(f"{found.in_a_row} messages in a row, each on its own; the last: {reason}")
                    return found
                by_store = by_store if isinstance(done, Raised) else reason
                found.refused.append(part[0])
                found.reasons.append(f"the log rejected it on its own, {times} times: {reason}")
            case _:
                found.outcome = done
                return found
    found.outcome = Failed(by_store) if by_store and not entered else Ok(Entered(entered, repeated, tries))
    return found


def _tried(journal: Journal, batch: MessageBatch, times: int) -> Outcome[Entered]:
    done = guarded(journal, batch)
    for _ in range(times - 1):
        if not isinstance(done, Failed):
            break
        time.sleep(_PAUSE_S)
        done = guarded(journal, batch)
    return done


def readable(batch: MessageBatch) -> MessageBatch:
    """A copy for logs that reject the original messages: everything but id and body as text."""
    headers = [
        [("delivered.key", _text(key)), ("delivered.time_us", _text(at)), ("delivered.headers", _text(list(pairs)))]
        for key, at, pairs in zip(batch.keys, batch.times_us, batch.headers, strict=True)
    ]
    ids = [None if i is None else i if isinstance(i, str) and i.isprintable() else ascii(i) for i in batch.ids]
    values = [v if isinstance(v, bytes) else _text(v) for v in batch.values]
    count = len(batch)
    return MessageBatch(ids, [None] * count, values, list(headers), [None] * count, list(batch.handles))


def _text(value: object) -> bytes:
    return ascii(value).encode()
