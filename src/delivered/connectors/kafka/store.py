"""The ledger's store in Kafka: owners, decisions and seals in the pipeline's internal topic, a transaction for each.

Its records are those that its owners' producers wrote (decision 108).

Whoever may write to the topic can write any key and value there, but not under the producer id of a ledger's
transactional id: brokers check that a transactional batch comes from the holder of its id. An owner's record names the
producer ids of its claim and of those before it; the coordinator of the transactional ids reports the newest owner's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.clients.kafka.transactions import Transaction
from delivered.connectors.kafka import LEDGER_TOPICS, SinkOptions
from delivered.connectors.kafka.topics import (
    HISTORY_PARTITION,
    MOVED,
    NOBODY,
    STATE_PARTITION,
    CommittedReader,
    Key,
    Keys,
    Record,
    barrier,
    damaged,
    ensure_topic,
    id_prefix,
    is_moved,
    ledger_topic,
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
from delivered.ledger import Change, Head, not_next, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken, LedgerBehind, OutcomeUnknown
from delivered.model.identity import OTHERS_MAX, OtherLedger, Scope, named_first
from delivered.model.limits import (
    CONNECT_TIMEOUT_S,
    LEDGER_HISTORY_BATCHES,
    OUTAGE_PATIENCE_S,
    RECOVERY_WAIT_S,
)
from delivered.model.work import Archive, Archived, Decision, Failed, LedgerState, Ok, Outcome, Owner, Started, Unknown

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

        def read(until: float) -> None:
            for r in self._reader.read(until, wait, self._may_be_ours):
                found.pop((r.key, r.producer), None)
                found[r.key, r.producer] = r

        read_settled(self._wire, list(self._ids), self._topic, read)
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


# Ledgers of other pipelines and sinks, to name in an error whose they may be.


def find_other_ledgers(wire: Wire, own: str, scope: Scope) -> list[OtherLedger]:
    """Skips topics that this user may not read, and what no ledger wrote. Raises NoAnswer."""
    others = [name for name in wire.topics() if name.startswith(LEDGER_TOPICS) and name != own]
    # Reads only some; a renamed pipeline's name is usually similar.
    others.sort(key=lambda name: (-SequenceMatcher(None, own, name).ratio(), name))
    found: dict[tuple[str, str], bool] = {}
    for topic in [own, *others[:OTHERS_MAX]]:
        pipeline = scope.pipeline if topic == own else topic.removeprefix(LEDGER_TOPICS)
        reader = CommittedReader(wire, topic, STATE_PARTITION)
        with suppress(NoAnswer, DeliveredError):
            for record in reader.read(time.monotonic() + CONNECT_TIMEOUT_S, wait=False):
                key, value = Key.parse(record.key), record.value
                theirs = key.pipeline or pipeline
                if value is None or record.producer == NOBODY or key.kind not in ("owner", "last", "begun"):
                    continue
                with suppress(ValueError, LookupError, TypeError, AttributeError, DeliveredError):
                    if key.pipeline is None and key.kind == "owner" and is_moved(value):
                        continue
                    if key.pipeline is None and key.kind == "last":
                        theirs = Decision.from_json(value).scope.pipeline
                    holds = key.kind in ("last", "begun") and key.rest == (scope.incarnation,)
                    if holds or key.kind == "owner":
                        found[theirs, key.sink] = found.get((theirs, key.sink), False) or holds
    found.pop((scope.pipeline, scope.sink), None)
    return named_first(OtherLedger(*name, same_incarnation=holds) for name, holds in found.items())


# The ledger's store in Kafka: owners and decisions in the pipeline's internal topic.
#
# Fencing is the broker's: every change is a transaction under one of two transactional ids of the sink, and `take`
# initialises both, which fences the previous owner. There are two because an owner's planning process and deciding
# process run side by side and must not fence each other. The topic is compacted, so its size is bounded by the number
# of keys (topics.py).

_PLAN, _DECIDE = "plan", "decide"
_CLAIM_TRIES = 10
_ARCHIVE_ENTRIES = 400
"""Per archive record: 10 kB, which a claim rewrites to add an entry."""
_TOMBSTONES_MAX = 5_000
"""Approximate limit per claim, so that they fit into one record batch. The next claim continues."""


_Records = list[tuple[bytes, bytes | None]]


class KafkaStore:
    """See `delivered.ledger.Store`."""

    def __init__(self, options: SinkOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._topic = ledger_topic(scope, options.ledger_topic)
        self._keys = Keys(scope)
        self._opened: Wire | None = None
        self._reader: LedgerReader | None = None
        self._written = 0  # offset beyond what this process wrote: what is read must reach it
        self._producers: dict[str, LedgerProducer] = {}
        self._owner: Owner | None = None
        self._epoch = 0
        self._last: dict[str, Decision] = {}
        self._started: dict[str, Started] = {}
        self._archive: dict[int, Archive] = {}
        self._old_archive: dict[int, Archive] = {}
        self._old: set[str] = set()  # incarnations with a decision under an earlier release's keys
        self._moved = False  # such a release refuses this ledger

    @property
    def where(self) -> str:
        return f"in topic {self._topic!r}"

    def read(self) -> LedgerState:
        """Read the changes since the last read, with one request."""
        self._read()
        return self._state()

    def peek(self) -> LedgerState:
        try:
            self._read_new()
        except NoTopic:
            return LedgerState()
        return self._state()

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """Initialise both ids, which aborts open transactions; record the new owner; initialise the deciding id again.

        Every process checks the ledger's owner after it initialised an id, so the former owner stops once the record is
        committed.
        """
        ensure_topic(self._wire, self._topic, self._options)
        self._reader, self._written = None, 0  # read from the start: the topic may have been recreated
        reason = ""
        for _ in range(_CLAIM_TRIES):
            # A superseded driver must not fence the current owner, so check before taking the ids.
            self._read(wait=False)
            successor(self._head())
            # This ends all open transactions of earlier owners.
            for role in (_PLAN, _DECIDE):
                self._take(role)
            self._read()
            # Also for the present owner: the epoch distinguishes runs of a query restarted in one session.
            owner, epoch = successor(self._head()), self._epoch + 1
            match self._record(owner, epoch):
                case Ok():
                    # Before the record was committed, the former owner could still take the id back: fence it again.
                    self._take(_DECIDE)
                    return Ok(epoch)
                case Failed(reason) | Unknown(reason):
                    # Fenced by the former owner, or no answer: initialising the ids again settles the outcome.
                    pass
        return Unknown(reason)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """Write in one transaction. Failed: certainly not committed. Unknown: perhaps committed."""

        def check() -> Change | None:
            self._read()
            return rule(self._head())

        deadline = time.monotonic() + OUTAGE_PATIENCE_S
        fenced_before = False
        # No read is needed while this process holds the id: another claim or decision would have fenced it.
        change = rule(self._head()) or check()
        while change is not None:
            role = _PLAN if change.decision is None else _DECIDE
            if role not in self._producers:
                # A superseded owner must not fence the current one: check before taking the id, and after it.
                if check() is None:
                    break
                self._take(role)
                if (change := check()) is None:
                    break
            writes = self._writes(change)
            if self._owner is not None and self._trust and self._producers[role].producer_id not in self._trust.writers:
                writes[STATE_PARTITION].insert(0, self._claim(self._owner, self._epoch))  # the id has a new producer
            outcome, again = self._producers[role].write(writes)
            if isinstance(outcome, Ok):
                self._reached(self._producers[role])
                self._keep(change)
                return outcome
            del self._producers[role]
            # Retriable means that nothing was committed. FENCED: by this owner's other process, if the claim still
            # holds. AWAY: initialising the id aborts what was written.
            fenced = again is Again.FENCED
            if again is Again.NO or (fenced and fenced_before) or time.monotonic() > deadline:
                return outcome
            fenced_before = fenced
        return Ok(None)

    def history(self) -> Iterator[Decision]:
        found: dict[int, Decision] = {}
        trust = self._trust or self._read_trust()
        try:
            # From the end: the seals of audits, which are there for ever, lie between the decisions.
            for start in starts_from_the_end(CommittedReader(self._wire, self._topic, HISTORY_PARTITION).end()):
                found = self._history(start, trust)
                if found and len(found) == min(max(found) + 1, LEDGER_HISTORY_BATCHES):
                    break
        except NoAnswer as error:
            raise self._unreadable(error) from None
        yield from (found[batch] for batch in sorted(found))

    def _history(self, start: int, trust: Trust) -> dict[int, Decision]:
        """The decisions kept from an offset on, by batch."""
        kept: dict[bytes, bytes] = {}
        reader = CommittedReader(self._wire, self._topic, HISTORY_PARTITION)
        reader.position = start
        starts = tuple(key[:-1] + b"," for key in self._keys.both("kept", self._scope.incarnation))
        for record in reader.read(time.monotonic() + RECOVERY_WAIT_S, ours=lambda r: r.key.startswith(starts)):
            ours = record.key.startswith(starts) and trust.holds(record, HISTORY_PARTITION)
            if ours and record.value is not None:
                kept[record.key] = record.value
        found = {d.batch: d for d in map(Decision.from_json, kept.values()) if d.scope == self._scope}
        horizon = max(found, default=0) - LEDGER_HISTORY_BATCHES  # keys of an earlier release are not reused
        return {batch: decision for batch, decision in found.items() if batch > horizon}

    def others(self) -> list[OtherLedger]:
        """Skips topics that this user may not read."""
        try:
            return find_other_ledgers(self._wire, self._topic, self._scope)
        except NoAnswer as error:
            raise self._unreadable(error) from None

    def last_seal(self, sink: str) -> str | None:
        chain = self._sealed(sink, newest=True)
        return chain.texts.get(chain.last)

    def seals(self, sink: str, first: int = 0) -> list[str]:
        texts = self._sealed(sink).texts
        return [texts[number] for number in sorted(texts) if number >= first]

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        ensure_topic(self._wire, self._topic, self._options)
        return self._seals(sink).add(number, text)

    def _sealed(self, sink: str, *, newest: bool = False) -> Chain:
        try:
            return self._seals(sink).read(newest=newest)
        except NoAnswer as error:
            raise self._unreadable(error) from None

    def _seals(self, sink: str) -> Seals:
        return Seals(self._wire, self._topic, replace(self._scope, sink=sink))

    def close(self) -> None:
        wire, self._opened = self._opened, None
        self._reader = None
        self._producers = {}
        if wire is not None:
            wire.close()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def _wire(self) -> Wire:
        if self._opened is None:
            self._opened = Wire(self._options.resolved())
        return self._opened

    def _read(self, wait: bool = True) -> None:
        """Apply what was committed since the last read. Raises LedgerBehind: the topic was deleted."""
        try:
            self._read_new(wait)
        except NoTopic:
            raise LedgerBehind("LEDGER_TOPIC_GONE", topic=self._topic) from None

    def _read_new(self, wait: bool = True) -> None:
        if self._reader is None:
            ids = [self._id(role) for role in (_PLAN, _DECIDE)]
            self._reader = LedgerReader(self._wire, self._topic, self._keys, ids)
            self._owner, self._epoch, self._last, self._started, self._archive = None, 0, {}, {}, {}
            self._old_archive, self._old, self._moved = {}, set(), False
        self._reader.reach(self._written)
        try:
            for key, record in self._reader.read(wait):
                try:
                    self._apply(key, record.value)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    why = f"its value is none that a ledger writes: {error!r}"
                    raise damaged(self._topic, STATE_PARTITION, record.offset, why) from None
        except Exception as error:
            self._reader = None  # the state is incomplete
            if isinstance(error, NoAnswer) and not isinstance(error, NoTopic):
                raise self._unreadable(error) from None
            raise

    @property
    def _trust(self) -> Trust | None:
        return None if self._reader is None else self._reader.trust

    def _read_trust(self) -> Trust:
        self._read_new()
        return self._trust or Trust()

    def _apply(self, key: Key, value: bytes | None) -> None:
        """In log order: what has new keys follows what an earlier release wrote."""
        old = key.pipeline is None
        match key.kind, key.rest:
            case "owner", () if value is not None:
                owner, extra = Owner.from_json(value)
                if old and "moved" in extra:
                    self._moved = True
                elif not (old and self._moved):
                    self._owner, self._epoch = owner, extra.get("claims", 0)
            case "last", (str(incarnation),):
                decision = None if value is None else Decision.from_json(value)
                named = self._scope.pipeline if decision is None else decision.scope.pipeline
                if named != self._scope.pipeline or (old and decision is None and incarnation not in self._old):
                    return
                self._old |= {incarnation} if old else set()
                self._last.pop(incarnation, None)  # newest last
                if decision is not None:
                    self._last[incarnation] = decision
            case "begun", (str(incarnation),):
                self._started.pop(incarnation, None)
                if value is not None:
                    self._started[incarnation] = Started.from_json(value)
            case "archive", (int(number),):
                archives = self._old_archive if old else self._archive
                archives[number] = Archive(value or b"", f"topic {self._topic!r}")
            case _:
                pass

    def _head(self) -> Head:
        own = self._scope.incarnation
        last = self._last.get(own)
        return Head(
            self._owner, self._epoch, None if last is None else last.batch, lambda: last, lambda: self._started.get(own)
        )

    def _state(self) -> LedgerState:
        return state_of(self._scope, self._owner, self._epoch, self._last.values(), self._started, self._archived)

    def _archived(self, incarnation: str) -> Archived | None:
        archives = (*self._archive.values(), *self._old_archive.values())
        return next((a for archive in archives if (a := archive.find(incarnation)) is not None), None)

    # -- writing -------------------------------------------------------------------------------------------------

    def _take(self, role: str) -> None:
        deadline = time.monotonic() + RECOVERY_WAIT_S
        self._producers.pop(role, None)
        match take_id(self._wire, self._id(role), self._topic, LEDGER_TRANSACTION_TIMEOUT_S * 1000, deadline):
            case Ok(held):
                self._producers[role] = LedgerProducer(self._wire, self._topic, held)
            case Failed(reason) | Unknown(reason):
                raise OutcomeUnknown("LEDGER_UNAVAILABLE.WRITE", topic=self._topic, reason=reason)

    def _record(self, owner: Owner, epoch: int) -> Outcome[None]:
        """Record the new owner. Until then the former owner may take the id back once or twice."""
        writes = self._outdated()
        if self._reader is not None and self._reader.overwritten:
            writes[STATE_PARTITION][:0] = self._again()
        writes[STATE_PARTITION].insert(0, self._claim(owner, epoch))
        if not self._moved:
            writes[STATE_PARTITION].insert(0, (self._keys.old("owner"), owner.to_json(**MOVED).encode()))
        producer = self._producers.pop(_PLAN)
        outcome, _ = producer.write(writes)
        if isinstance(outcome, Ok):
            self._producers[_PLAN] = producer
            self._reached(producer)
        return outcome

    def _claim(self, owner: Owner, epoch: int) -> tuple[bytes, bytes]:
        """The owner's record. It names the producers of this claim: from now on, what others write does not count."""
        reader = self._reader
        if reader is None or reader.trust is None:
            raise InvariantBroken("LEDGER_UNREAD")
        ends: dict[int, int] = {}
        if reader.trust.since is None:
            is_new = self._owner is None and not self._last and not self._started
            both = () if is_new else (STATE_PARTITION, HISTORY_PARTITION)
            # Not the reader's position: an open transaction of others may hold it back.
            ends = {p: CommittedReader(self._wire, self._topic, p).end() for p in both}
        held = [producer.producer_id for producer in self._producers.values()]
        reader.trust = reader.trust.claimed(held, ends)
        return self._keys.key("owner"), owner.to_json(claims=epoch, **reader.trust.to_json()).encode()

    def _again(self) -> _Records:
        """All of the state: another producer wrote under its keys, and compaction would keep that."""
        records = [(self._keys.key("last", i), d.to_json().encode()) for i, d in self._last.items()]
        records += [(self._keys.key("begun", i), b.to_json().encode()) for i, b in self._started.items()]
        return [*records, *((self._keys.key("archive", n), a.data) for n, a in self._archive.items())]

    def _reached(self, producer: LedgerProducer) -> None:
        self._written = max(self._written, producer.ends.get(STATE_PARTITION, 0))

    def _outdated(self) -> dict[int, _Records]:
        """Archive the oldest incarnations and write tombstones for their keys, which bounds the ledger."""
        old = outdated(self._state())
        entries: list[Archived] = []
        state: _Records = []
        kept: _Records = []
        for incarnation, entry in reversed([*zip(old.incarnations, old.entries, strict=True)]):
            if len(state) + len(kept) > _TOMBSTONES_MAX:
                break
            entries.append(entry)
            last = self._last.get(incarnation)
            left = incarnation in self._old or (last is None and self._options.ledger_topic is None)
            keys = self._keys.both if left else self._keys.one
            decided = 0 if last is None else min(last.batch + 1, LEDGER_HISTORY_BATCHES)
            state += [(key, None) for kind in ("last", "begun") for key in keys(kind, incarnation)]
            kept += [(key, None) for n in range(decided) for key in keys("kept", incarnation, n)]
        if entries:
            number = max(self._archive, default=0)
            if len(self._archive.get(number, Archive())) >= _ARCHIVE_ENTRIES:
                number += 1
            archive = self._archive.get(number, Archive()).with_more(entries)
            state.append((self._keys.key("archive", number), archive.data))
        return {STATE_PARTITION: state, **({HISTORY_PARTITION: kept} if kept else {})}

    def _writes(self, change: Change) -> dict[int, _Records]:
        """A decision is written twice: as the newest, and for the audit's history."""
        incarnation, decision = self._scope.incarnation, change.decision
        if decision is None:
            started = None if change.started is None else change.started.to_json().encode()
            return {STATE_PARTITION: [(self._keys.key("begun", incarnation), started)]}
        text, n = decision.to_json().encode(), decision.batch % LEDGER_HISTORY_BATCHES
        return {
            STATE_PARTITION: [(self._keys.key("last", incarnation), text)],
            HISTORY_PARTITION: [(self._keys.key("kept", incarnation, n), text)],
        }

    def _keep(self, change: Change) -> None:
        """Make a written change the head for the next write, without reading it back."""
        incarnation = self._scope.incarnation
        if change.decision is not None:
            self._last.pop(incarnation, None)
            self._last[incarnation] = change.decision
        if change.started is not None:
            self._started.pop(incarnation, None)
            self._started[incarnation] = change.started

    # -- names ---------------------------------------------------------------------------------------------------

    def _id(self, role: str) -> str:
        return f"{id_prefix(self._scope)}ledger.{role}"

    def _unreadable(self, error: Exception) -> OutcomeUnknown:
        return OutcomeUnknown("LEDGER_UNREADABLE", topic=self._topic, error=error)


# Seals of audits in the ledger's topic, and which of them count.
#
#     partition 1   ["seal", pipeline, sink, number]   {"seal": its text, "writers": producer ids}
#
# Each is a transaction under a transactional id of its own: it fences another audit of that sink, and never an owner.
#
# As with decisions (`Trust`), only records count that the holders of this id wrote. The coordinator reports the present
# one's producer id; each record names its own and those before it, as an id gets another one after a week without use.
# If the id has expired, or this user may not ask, the newest record is believed that names its own producer.


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
