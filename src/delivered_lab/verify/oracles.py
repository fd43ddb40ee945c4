"""What an operator must leave in the sink, recomputed in plain Python from all records of the source.

Pipelines (operators.py) share only the numbers below. Each oracle takes the values of a source's records, in any order,
and returns value by key of the rows that are determined however the records were cut into batches:

- A record is either on time (at most `JITTER_S` behind its place in the stream) or certainly late (`LATE_S`): the
  watermark is `DELAY_S` behind, and lags the records by at most two batches.
- After the records that count come those of the key `TAIL`, whose event time goes on. They move the watermark past
  everything else. Their own state is still open at the end: transforms leave their rows out.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW_S, SPAN_S, DELAY_S = 20, 100, 40
START_S, JITTER_S, LATE_S = 1_000, 20, 300
SESSION_GAP_S = 30
JOIN_S = 30
VISIT_GAP_S, MILESTONE = 60, 5
TAIL, NOBODY = "tail", "nobody"


@dataclass(frozen=True)
class Event:
    """
    Attributes:
        number: its place in the stream, from 0; at: its event time in seconds from `START_S`, one more per place.
        kind, ref: in a join: "order", or "payment" for the order with this id.
    """

    id: str
    k: str | None
    at: int
    amount: int
    kind: str = ""
    ref: str = ""

    @property
    def number(self) -> int:
        return int(self.id[1:])

    @property
    def late(self) -> bool:
        return START_S + self.number - self.at >= LATE_S


def _events(values: Sequence[str], tail: bool = False) -> Iterator[Event]:
    """Those that count, plus the tail if requested."""
    for value in values:
        event = Event(**json.loads(value))
        if tail or event.k != TAIL:
            yield event


def _row(*parts: object) -> str:
    return " ".join(str(p) for p in parts)


def totals(values: Sequence[str]) -> dict[str, str]:
    """Count and sum by key; null keys count as `NOBODY`."""
    counts, sums = Counter[str](), Counter[str]()
    for e in _events(values, tail=True):
        counts[e.k or NOBODY] += 1
        sums[e.k or NOBODY] += e.amount
    return {k: _row(n, sums[k]) for k, n in counts.items()}


def _windows(values: Sequence[str]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for e in _events(values):
        if not e.late:
            found[e.k or NOBODY, e.at // WINDOW_S].append(e.amount)
    return found


def windows(values: Sequence[str]) -> dict[str, str]:
    """Count and sum by key and window."""
    return {f"{k}@{n}": _row(len(amounts), sum(amounts)) for (k, n), amounts in _windows(values).items()}


def chained(values: Sequence[str]) -> dict[str, str]:
    """For each long window: how many short windows of any key ended in it, and the greatest sum of one."""
    found: dict[int, list[int]] = defaultdict(list)
    for (_, n), amounts in _windows(values).items():
        found[n * WINDOW_S // SPAN_S].append(sum(amounts))
    return {str(n): _row(len(sums), max(sums)) for n, sums in found.items()}


def sessions(values: Sequence[str]) -> dict[str, str]:
    """Records of a key with gaps up to the session gap, by the first one's time."""
    by_key: dict[str, list[Event]] = defaultdict(list)
    for e in _events(values):
        if not e.late:
            by_key[e.k or NOBODY].append(e)
    found: dict[str, str] = {}
    for k, events in by_key.items():
        events.sort(key=lambda e: e.at)
        first, members = 0, list[Event]()
        for e in events:
            if not members or e.at - members[-1].at > SESSION_GAP_S:
                first, members = e.at, []
            members.append(e)
            found[f"{k}@{first}"] = _row(len(members), sum(m.amount for m in members))
    return found


def distinct(values: Sequence[str]) -> dict[str, str]:
    return {e.id: str(e.amount) for e in _events(values, tail=True)}


def distinct_within(values: Sequence[str]) -> dict[str, str]:
    """A copy soon after the first is dropped; one after the first has expired is delivered again."""
    found: dict[str, str] = {}
    kept: dict[str, int] = {}
    for e in sorted(_events(values), key=lambda e: e.at):
        if e.id not in kept or e.at - kept[e.id] >= LATE_S:
            kept[e.id] = e.at
            found[f"{e.id}@{e.at}"] = str(e.amount)
    return found


def joined(values: Sequence[str]) -> dict[str, str]:
    """Each payment of an order within the time limit."""
    events = list(_events(values))
    orders = {e.id: e for e in events if e.kind == "order"}
    return {
        f"{e.ref}/{e.id}": _row(orders[e.ref].amount, e.amount)
        for e in events
        if e.kind == "payment" and e.ref in orders and 0 <= e.at - orders[e.ref].at <= JOIN_S
    }


def joined_outer(values: Sequence[str]) -> dict[str, str]:
    """The same, and each order not paid in time."""
    paid = joined(values)
    orders = {e.id: e for e in _events(values) if e.kind == "order"}
    left = orders.keys() - {key.partition("/")[0] for key in paid}
    return paid | {f"{o}/": str(orders[o].amount) for o in left}


def looked_up(values: Sequence[str]) -> dict[str, str]:
    """Without the table's line for the key, which depends on when the batch ran."""
    return {e.id: _row(e.amount, e.k or NOBODY) for e in _events(values, tail=True)}


def is_version(wanted: str, found: str) -> bool:
    """Whether `found` is the wanted row, joined with its key's line in any version of the table."""
    return re.fullmatch(re.escape(wanted) + r"/[1-9]\d*", found) is not None


def visits(values: Sequence[str]) -> dict[str, str]:
    """A row at every fifth record of a visit, and one after the last: their count and sum."""
    found: dict[str, str] = {}
    amounts: dict[str, list[int]] = defaultdict(list)
    for e in _events(values):
        amounts[e.k or NOBODY].append(e.amount)
    for k, those in amounts.items():
        found |= {f"{k}#{n}": str(n) for n in range(MILESTONE, len(those) + 1, MILESTONE)}
        found[k] = _row(len(those), sum(those))
    return found
