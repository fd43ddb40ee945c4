"""Which records of a ledger's topic are the ledger's: those that its owners' producers wrote (decision 108).

Whoever may write to the topic can write any key and value there, but not under the producer id of a ledger's
transactional id: brokers check that a transactional batch comes from the holder of its id. An owner's record names the
producer ids of its claim and of those before it; the coordinator of the transactional ids tells the newest owner's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from delivered.clients.kafka.errors import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction, describe, end, initialise
from delivered.connectors.kafka.committed import HIDDEN_S, NOBODY, CommittedReader, Hidden, Record, damaged
from delivered.connectors.kafka.committer import end_hanging, find_hanging, refused
from delivered.connectors.kafka.topics import HISTORY_PARTITION, STATE_PARTITION, Key, Keys
from delivered.model.limits import RECOVERY_WAIT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Owner

# Ends of the ledger's own transactions that its brokers lost (P28).
#
# The next commit of the same producer id would end them, too, and make a record visible whose abort everybody acted on.


def take_id(wire: Wire, name: str, topic: str, timeout_ms: int, deadline: float) -> Outcome[Transaction]:
    """Initialise a transactional id of the ledger, once neither partition holds an open transaction of it.

    An open one is aborted first, by name: its outcome is known then, whatever its coordinator forgets.

    Raises:
        DeliveredError: one that ended is still open in a partition, and this user may not end it.
    """
    delays: list[None] = []
    try:
        before = describe(wire, name)
        if before is not None:
            while before.state == "Ongoing" and isinstance(
                found := end(wire, before.participant, commit=False), Unknown
            ):
                if time.monotonic() > deadline:
                    return found
                time.sleep(0.05)  # its coordinator moves or loads; the request is idempotent
            settle_ids(wire, [name], topic, deadline)
        outcome = initialise(wire, name, timeout_ms, deadline, lambda: delays.append(None))
        if delays and isinstance(outcome, Ok):
            settle_ids(wire, [name], topic, deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    return outcome


def settle_ids(wire: Wire, names: Sequence[str], topic: str, deadline: float, *, known: bool = False) -> int:
    """End what these ids left open in the ledger's partitions: abort what their coordinator aborted, commit the rest.

    To commit is safe where nothing tells: a decision counts if it is in the ledger, and its participants are written
    again if they were aborted. A decision that was acknowledged must not vanish.

    Args:
        known: only what their coordinator reports as ended.

    Returns:
        How many there were.

    Raises:
        NoAnswer: a broker did not answer. DeliveredError: one is still open, and this user may not end it.
    """
    count = 0
    for found in find_hanging(wire, [(topic, STATE_PARTITION), (topic, HISTORY_PARTITION)], names, (), deadline):
        if known and found.committed is None:
            continue
        commit = found.committed is not False
        match end_hanging(wire, found, commit, deadline):
            case Ok():
                count += 1
            case Unknown(reason):
                raise NoAnswer(reason)
            case Failed(reason):
                # The next transaction of this producer id would end it, too. If that aborts, a decision vanishes.
                raise refused(found, commit, reason, by_hand=False)
    return count


log = logging.getLogger(__name__)

WRITERS_MAX = 64
"""A ledger gets a new producer id when its ids were unused for a week, or after 32,767 claims."""

_EVERY = 1 << 62


@dataclass(frozen=True)
class Trust:
    """
    Attributes:
        writers: producer ids of the ledger's owners, oldest first.
        current: those that hold its transactional ids now.
        since: partition -> offset before which every transaction counts: owners of earlier releases named no writers.
    """

    writers: tuple[int, ...] = ()
    current: frozenset[int] = frozenset()
    since: Mapping[int, int] | None = None

    def holds(self, record: Record, partition: int = STATE_PARTITION) -> bool:
        if record.producer == NOBODY:
            return False
        if record.producer in self.current or record.producer in self.writers:
            return True
        return record.offset < (_EVERY if self.since is None else self.since.get(partition, 0))

    def claimed(self, held: Collection[int], ends: Mapping[int, int]) -> Trust:
        """Once these producers hold the ids. Ends: where its partitions end, if no owner named its writers so far."""
        writers = tuple(dict.fromkeys((*self.writers, *held)))[-WRITERS_MAX:]
        return Trust(writers, frozenset(held), ends if self.since is None else self.since)

    def to_json(self) -> dict[str, Any]:
        """Fields of an owner's record."""
        since = self.since or {}
        return {"writers": list(self.writers), "since": [since.get(p, 0) for p in (STATE_PARTITION, HISTORY_PARTITION)]}


def trust_of(owners: Iterable[Record], current: Collection[int] | None) -> Trust:
    """What the newest owner's record says.

    Args:
        owners: records of owners, oldest first.
        current: from `holders`. Without any, an owner's record counts if it names the producer that wrote it.
    """
    known = frozenset(current or ())
    own = [o for o in owners if o.producer in known]
    for record in reversed(own or list(owners)):
        fields = _fields(record)
        if record.producer in fields.get("writers", ()):
            since = zip((STATE_PARTITION, HISTORY_PARTITION), fields["since"], strict=True)
            return Trust(tuple(fields["writers"]), known, dict(since))
        if own:
            break  # an owner of an earlier release claimed it last
    return Trust((), known)


def _fields(owner: Record) -> dict[str, Any]:
    try:
        fields = Owner.from_json(owner.value or b"")[1]
        numbers = [*fields.get("writers", ()), *fields.get("since", (0, 0))]
        return fields if all(type(n) is int for n in numbers) and len(fields.get("since", (0, 0))) == 2 else {}
    except Exception:  # not written by an owner
        return {}


def holders(wire: Wire, ids: Collection[str]) -> frozenset[int] | None:
    """Producer ids of these transactional ids now. None: this user may not ask."""
    try:
        found = [describe(wire, name) for name in ids]
    except NoAnswer as error:
        if "AUTHORIZATION" in str(error).upper():
            return None
        raise
    return frozenset(t.participant.producer_id for t in found if t is not None)


class LedgerReader:
    """Reads a ledger's state: the newest values of its keys that its owners wrote.

    Attributes:
        trust: None: nothing was read yet.
        overwritten: another producer wrote under a key of this ledger; compaction may take the ledger's own value.
    """

    def __init__(self, wire: Wire, topic: str, keys: Keys, ids: Collection[str]) -> None:
        self._wire, self._topic, self._keys, self._ids = wire, topic, keys, ids
        self._reader = CommittedReader(wire, topic, STATE_PARTITION)
        self.trust: Trust | None = None
        self.overwritten = False
        self._current: frozenset[int] | None = None
        self._warned = False

    def reach(self, end: int) -> None:
        """See `CommittedReader.reach`."""
        self._reader.reach(end)

    def read(self, wait: bool) -> Iterator[tuple[Key, Record]]:
        """What changed since the last read, in log order.

        Raises:
            NoAnswer, NoTopic: see `CommittedReader.read`. InvariantBroken: LEDGER_DAMAGED.
        """
        first = self.trust is None
        if first:
            # Raises NoTopic: a ledger that is not there yet has no holders, and to look for them would create what
            # brokers keep of transactions.
            self._wire.patiently(lambda: self._wire.led(self._topic, STATE_PARTITION))
            self._current = holders(self._wire, self._ids)
        records = self._newest(wait)
        if first:
            self.trust = trust_of([r for r in records if self._is_owner(r)], self._current)
        for record in records:
            if not first and self._is_owner(record):
                self._follow(record)
            if not self._trusted.holds(record):
                self._ignore(record)
                continue
            if not record.key:
                raise damaged(self._topic, STATE_PARTITION, record.offset, "the records of a batch cannot be read")
            key = Key.parse(record.key)
            if self._keys.holds(key):
                yield key, record

    @property
    def _trusted(self) -> Trust:
        return self.trust or Trust()

    def _newest(self, wait: bool) -> list[Record]:
        """Newest values by key and producer. A transaction whose end the brokers lost would hide them for ever."""
        found: dict[tuple[bytes, int], Record] = {}
        deadline = time.monotonic() + RECOVERY_WAIT_S

        def add(records: Iterable[Record]) -> None:
            for r in records:
                found.pop((r.key, r.producer), None)
                found[r.key, r.producer] = r

        try:
            soon = min(deadline, time.monotonic() + HIDDEN_S)
            add(self._reader.read(soon, wait, self._may_be_ours))
        except Hidden:
            settle_ids(self._wire, list(self._ids), self._topic, deadline, known=True)
            add(self._reader.read(deadline, wait, self._may_be_ours))
        return list(found.values())

    def _may_be_ours(self, record: Record) -> bool:
        """Whether an open transaction's record may change this ledger's state once it is committed."""
        known = self._current or frozenset()
        return (not known or record.producer in known) and self._keys.holds(Key.parse(record.key))

    def _is_owner(self, record: Record) -> bool:
        key = Key.parse(record.key)
        return key.kind == "owner" and key.pipeline is not None and self._keys.holds(key) and record.value is not None

    def _follow(self, owner: Record) -> None:
        """A later claim, or one with a new producer id."""
        if not self._trusted.holds(owner):
            self._current = holders(self._wire, self._ids)
            if self._current is not None and owner.producer not in self._current:
                return
        known = self._trusted.current | (self._current or frozenset())
        self.trust = trust_of([owner], known | {owner.producer})

    def _ignore(self, record: Record) -> None:
        self.overwritten = self.overwritten or self._keys.holds(Key.parse(record.key))
        if not self._warned:
            self._warned = True
            log.warning(
                "ignored a record that none of the ledger's owners wrote: topic %r, partition %d, offset %d, producer "
                "id %d. Check who may write to the topic",
                *(self._topic, STATE_PARTITION, record.offset, record.producer),
            )
