"""Entry arithmetic: entries between two positions, and the end of a batch of about n messages."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.connectors.pulsar.admin import Admin, Bounds
from delivered.connectors.pulsar.positions import START, Position

Ledgers = Sequence[tuple[int, int]]
_SAMPLES = 4


def ranges(start: Position, end: Position, ledgers: Ledgers) -> list[tuple[int, int, int]]:
    """(ledger, first entry, last entry + 1) of the ranges after `start`, up to `end`."""
    found = []
    for ledger, count in ledgers:
        if ledger < start.ledger or ledger > end.ledger:
            continue
        first = 0
        if ledger == start.ledger:
            first = start.entry + (1 if start.index is None else 0)
        stop = end.entry + 1 if ledger == end.ledger else count
        if first < stop:
            found.append((ledger, first, stop))
    return found


def rest(start: Position, end: Position, ledgers: Ledgers) -> int:
    """Number of entries after `start`, up to `end`."""
    return sum(stop - first for _, first, stop in ranges(start, end, ledgers))


def gone(position: Position, bounds: Bounds) -> bool:
    """Whether messages after `position` may have been deleted.

    Pulsar deletes whole ledgers, the oldest first (empty ones at any time). While the position's ledger or an older one
    exists, nothing after it was deleted.
    """
    if position == START or not bounds.ledgers:
        return position != START and not bounds.ledgers
    return bounds.ledgers[0][0] > max(position.ledger, position.follower if position.follower is not None else -1)


def cut(admin: Admin, physical: str, start: Position, bounds: Bounds, messages: int) -> Position:
    """End of a batch of about `messages`, at least one entry.

    Estimated from the message counts of a few entries. The result is logged, so it need not be reproducible.
    """
    pieces = ranges(start, bounds.last, bounds.ledgers)
    total = sum(stop - first for _, first, stop in pieces)
    wanted = min(total, messages)
    for _ in range(2):
        held = [
            1 if found is None or found.chunk is not None else found.messages
            for found in (admin.entry(physical, *_nth(pieces, n)) for n in _spread(wanted))
        ]
        wanted = max(1, min(total, messages * len(held) // sum(held)))
        if max(held) == 1:
            break
    return Position(*_nth(pieces, wanted - 1))


def _spread(count: int) -> list[int]:
    return sorted({n * (count - 1) // max(1, _SAMPLES - 1) for n in range(_SAMPLES)})


def _nth(pieces: Sequence[tuple[int, int, int]], number: int) -> tuple[int, int]:
    for ledger, first, stop in pieces:
        if number < stop - first:
            return ledger, first + number
        number -= stop - first
    raise IndexError(number)
