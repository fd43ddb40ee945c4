"""Seals of audits in a journal of their own, which is read from its end, and never trimmed."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.connectors.pulsar.client import Bounds
from delivered.connectors.pulsar.journal import Journal, Record, Topic
from delivered.connectors.pulsar.positions import START, Position
from delivered.ledger import not_next
from delivered.model.errors import InvariantBroken
from delivered.model.work import Failed, Ok, Outcome, Unknown

SEAL = "seal"
_FEW = 16
"""Records that are read at first to find the newest seal."""


class Seals:
    """The seals of one sink."""

    def __init__(self, sink: str, topic: Topic) -> None:
        self._sink = sink
        self._topic = topic
        self._texts: dict[int, str] = {}
        self._journal = Journal(topic, lambda _: True, self._apply)
        self._start: Position | None = None

    def last(self) -> str | None:
        self._read_end()
        return self._texts.get(self._last)

    def texts(self, first: int) -> list[str]:
        self._read_all()
        return [self._texts[number] for number in sorted(self._texts) if number >= first]

    def add(self, number: int, text: str) -> Outcome[None]:
        """See `delivered.ledger.Store.add_seal`."""
        self._topic.ensure()
        while True:
            self._read_end()
            if number < self._last and number not in self._texts:
                self._read_all()
            if self._texts.get(number) == text:
                return Ok(None)
            if number != self._last + 1:
                return not_next(self._sink, number, self._last)
            match self._journal.append(SEAL, {"seal_number": number, "seal": text}):
                case Failed() | Unknown() as outcome:
                    return outcome

    def close(self) -> None:
        """May be called again."""
        self._topic.close()
        self._start = None

    @property
    def _last(self) -> int:
        return max(self._texts, default=-1)

    def _read_end(self) -> None:
        """Read enough to know the newest seal. A record that nothing follows may not count, unless it is the first."""
        if self._start is not None:
            self._journal.read()
            return
        if (bounds := self._topic.bounds()) is None:
            return
        for start in starts(bounds):
            self._read_from(start)
            if start == START or (self._journal.chain.proven and self._texts):
                return

    def _read_all(self) -> None:
        if self._start == START:
            self._journal.read()
        elif self._topic.bounds() is not None:
            self._read_from(START)

    def _read_from(self, start: Position) -> None:
        self._texts = {}
        self._journal.restart(start)
        self._journal.read()
        self._start = start
        chain = self._journal.chain
        if start == START and chain.started > 1:
            raise InvariantBroken("PULSAR_LEDGER.SEALS", topic=self._topic.label, first=chain.started)

    def _apply(self, record: Record, position: Position, restarts: bool) -> None:
        del position
        if restarts:
            self._texts = {}
        if record.kind == SEAL:
            self._texts[record.fields["seal_number"]] = record.fields["seal"]


def starts(bounds: Bounds) -> Iterator[Position]:
    """Positions from which to read, ever further from the end; the last one is START."""
    few = _FEW
    while few < sum(count for _, count in bounds.ledgers):
        left = few
        for ledger, count in reversed(bounds.ledgers):
            if left <= count:
                yield Position(ledger, count - left - 1)
                break
            left -= count
        few *= _FEW
    yield START
