"""Seals of audits in the ledger's topic, and which of them count.

    partition 1   ["seal", pipeline, sink, number]   {"seal": its text, "writers": producer ids}

Each is a transaction under a transactional id of its own: it fences another audit of that sink, and never an owner.

As with decisions (`store.Trust`), only records count that the holders of this id wrote. The coordinator reports the
present one's producer id; each record names its own and those before it, as an id gets another one after a week without
use. If the id has expired, or this user may not ask, the newest record is believed that names its own producer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from delivered.clients.kafka.channel import NoAnswer
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.clients.kafka.transactions import Transaction
from delivered.connectors.kafka.topics import (
    HISTORY_PARTITION,
    NOBODY,
    CommittedReader,
    Keys,
    Record,
    barrier,
    damaged,
    id_prefix,
    starts_from_the_end,
)
from delivered.connectors.kafka.writes import (
    LEDGER_TRANSACTION_TIMEOUT_S,
    Again,
    LedgerProducer,
    holders,
    read_settled,
    take_id,
)
from delivered.ledger import not_next
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.model.work import Failed, Ok, Outcome, Unknown


@dataclass(frozen=True)
class Chain:
    """
    Attributes:
        texts: by number; perhaps only the newest.
        writers: producer ids that wrote them and those before them.
    """

    texts: dict[int, str] = field(default_factory=dict)
    writers: frozenset[int] = frozenset()

    @property
    def last(self) -> int:
        return max(self.texts, default=-1)


class Seals:
    """The seals of one sink. Args: scope: of that sink, any incarnation."""

    def __init__(self, wire: Wire, topic: str, scope: Scope) -> None:
        self._wire, self._topic, self._sink, self._keys = wire, topic, scope.sink, Keys(scope)
        self._start = self._keys.key("seal")[:-1] + b","
        self._id = f"{id_prefix(scope)}ledger.seal"

    def read(self, *, newest: bool = False, reach: int = 0) -> Chain:
        """
        Args:
            newest: only the last ones, which are looked for from the partition's end.
            reach: see `CommittedReader.reach`.

        Raises:
            NoAnswer, NoTopic; InvariantBroken: LEDGER_DAMAGED.
        """
        try:
            end = CommittedReader(self._wire, self._topic, HISTORY_PARTITION).end()
            current = holders(self._wire, [self._id])
        except NoTopic:
            return Chain()
        records: list[Record] = []
        for start in starts_from_the_end(max(end, reach)) if newest else (0,):
            records = self._records(start, reach, current)
            if any(r.producer in (current or ()) for r in records):
                break
        return self._counted(records, current)

    def add(self, number: int, text: str) -> Outcome[None]:
        """See `delivered.ledger.Store.add_seal`.

        1  take the id: no transaction of another audit can be committed from here on
        2  read the chain, up to an offset that only the partition's leader can give
        3  write the seal in one transaction, unless another audit initialised the id meanwhile
        """
        deadline = time.monotonic() + OUTAGE_PATIENCE_S
        sent = False
        while True:
            try:
                held = take_id(self._wire, self._id, self._topic, LEDGER_TRANSACTION_TIMEOUT_S * 1000, deadline)
                if not isinstance(held, Ok):
                    return Unknown(held.reason) if sent else Failed(held.reason)
                chain = self.read(newest=True, reach=barrier(self._wire, self._topic, HISTORY_PARTITION))
                if number < chain.last and number not in chain.texts:
                    chain = self.read()
            except (NoAnswer, DeliveredError) as error:
                return Unknown(str(error)) if sent else Failed(str(error))
            if chain.texts.get(number) == text:
                return Ok(None)
            if number != chain.last + 1:
                return not_next(self._sink, number, chain.last)
            outcome, again = self._write(held.value, number, text, chain.writers)
            sent = isinstance(outcome, Unknown)
            if isinstance(outcome, Ok) or time.monotonic() > deadline:
                return outcome
            if again is Again.FENCED:
                return Failed("another audit of this sink seals now")
            if again is Again.NO and not sent:
                return outcome
            # Nothing was committed, or it is not known: to take the id again settles that.

    def _write(
        self, held: Transaction, number: int, text: str, writers: Collection[int]
    ) -> tuple[Outcome[None], Again]:
        producer = LedgerProducer(self._wire, self._topic, held)
        value = {"writers": sorted({*writers, producer.producer_id}), "seal": text}
        data = json.dumps(value, separators=(",", ":")).encode()
        return producer.write({HISTORY_PARTITION: [(self._keys.key("seal", number), data)]})

    def _records(self, start: int, reach: int, current: Collection[int] | None) -> list[Record]:
        """Committed records of this chain, and those that cannot be read, by any producer."""

        def ours(record: Record) -> bool:
            """Whether an open transaction's record may become a seal."""
            return (not current or record.producer in current) and record.key.startswith(self._start)

        reader = CommittedReader(self._wire, self._topic, HISTORY_PARTITION)
        reader.position = start
        reader.reach(reach)
        found: list[Record] = []

        def read(until: float) -> None:
            for r in reader.read(until, ours=ours):
                if r.producer != NOBODY and (not r.key or r.key.startswith(self._start)):
                    found.append(r)

        read_settled(self._wire, [self._id], self._topic, read)
        return found

    def _counted(self, records: Iterable[Record], current: Collection[int] | None) -> Chain:
        """Those that holders of the id wrote."""
        records = sorted(records, key=lambda r: r.offset)
        own = [r for r in records if r.producer in (current or ())]
        named = (_writers(r) for r in reversed(own or records))
        writers = next((w for w in named if w), frozenset[int]()) | frozenset(current or ())
        texts: dict[int, str] = {}
        for record in records:
            if record.producer in writers:
                number, text = self._parsed(record)
                texts[number] = text
        return Chain(texts, writers)

    def _parsed(self, record: Record) -> tuple[int, str]:
        try:
            *_, number = json.loads(record.key)
            return int(number), str(json.loads(record.value or b"")["seal"])
        except (ValueError, LookupError, TypeError) as error:
            why = f"it is no seal of an audit: {error!r}"
            raise damaged(self._topic, HISTORY_PARTITION, record.offset, why) from None


def _writers(record: Record) -> frozenset[int]:
    """The producer ids that a record names, if its own is one of them."""
    try:
        writers = json.loads(record.value or b"")["writers"]
        named = frozenset(n for n in writers if type(n) is int)
    except (ValueError, LookupError, TypeError, RecursionError):
        return frozenset()
    return named if record.producer in named else frozenset()
