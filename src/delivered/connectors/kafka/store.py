"""The ledger's store in Kafka: owners and decisions in the pipeline's internal topic.

Fencing is the broker's: every change is a transaction under one of two transactional ids of the sink, and `take`
initialises both, which fences the previous owner. There are two because an owner's planning process and deciding
process run side by side and must not fence each other. The topic is compacted, so its size is bounded by the number of
keys (ledger_keys.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.connectors.kafka.committed import CommittedReader, damaged
from delivered.connectors.kafka.ledger_ends import take_id
from delivered.connectors.kafka.ledger_keys import MOVED, Key, Keys
from delivered.connectors.kafka.ledger_others import other_ledgers
from delivered.connectors.kafka.ledger_trust import LedgerReader, Trust
from delivered.connectors.kafka.ledger_write import Again, LedgerProducer
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import (
    HISTORY_PARTITION,
    STATE_PARTITION,
    ensure_topic,
    ledger_topic,
)
from delivered.connectors.kafka.transactions import id_prefix
from delivered.ledger.ledger import outdated, state_of
from delivered.ledger.store import Change, Head
from delivered.model.archive import Archive, Archived
from delivered.model.errors import InvariantBroken, LedgerBehind, OutcomeUnknown
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import (
    LEDGER_HISTORY_BATCHES,
    OUTAGE_PATIENCE_S,
    RECOVERY_WAIT_S,
)
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Begun, Decision, LedgerState, Owner

LEDGER_TRANSACTION_TIMEOUT_S = 15
"""A ledger transaction is open for milliseconds. If its driver dies meanwhile, other sinks wait at most this long."""

_PLAN, _DECIDE = "plan", "decide"
_CLAIM_TRIES = 10
_ARCHIVE_ENTRIES = 400
"""Per archive record: 10 kB, which a claim rewrites to add an entry."""
_TOMBSTONES_MAX = 5_000
"""Approximate limit per claim, so that they fit into one record batch. The next claim continues."""


_Records = list[tuple[bytes, bytes | None]]


class KafkaStore:
    """See `delivered.ledger.store.Store`."""

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
        self._begun: dict[str, Begun] = {}
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
        kept: dict[bytes, bytes] = {}
        reader = CommittedReader(self._wire, self._topic, HISTORY_PARTITION)
        starts = tuple(key[:-1] + b"," for key in self._keys.both("kept", self._scope.incarnation))
        trust = self._trust or self._read_trust()
        try:
            for record in reader.read(time.monotonic() + RECOVERY_WAIT_S, ours=lambda r: r.key.startswith(starts)):
                ours = record.key.startswith(starts) and trust.holds(record, HISTORY_PARTITION)
                if ours and record.value is not None:
                    kept[record.key] = record.value
        except NoAnswer as error:
            raise self._unreadable(error) from None
        found = {d.batch: d for d in map(Decision.from_json, kept.values()) if d.scope == self._scope}
        horizon = max(found, default=0) - LEDGER_HISTORY_BATCHES  # keys of an earlier release are not reused
        yield from (found[batch] for batch in sorted(found) if batch > horizon)

    def others(self) -> list[OtherLedger]:
        """Skips topics that this user may not read."""
        try:
            return other_ledgers(self._wire, self._topic, self._scope)
        except NoAnswer as error:
            raise self._unreadable(error) from None

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
            raise LedgerBehind(
                "LEDGER_TOPIC_GONE",
                f"The ledger's topic {self._topic!r} no longer exists: it was deleted while the pipeline was running "
                "or stopped. Without it, it is unknown which batches are in the sink.",
                next_step="restore the topic from a copy; or start again and, when LEDGER_MISSING refuses that, "
                'accept once with .option("missingLedger", "accept") that the last batch may be written twice',
            ) from None

    def _read_new(self, wait: bool = True) -> None:
        if self._reader is None:
            ids = [self._id(role) for role in (_PLAN, _DECIDE)]
            self._reader = LedgerReader(self._wire, self._topic, self._keys, ids)
            self._owner, self._epoch, self._last, self._begun, self._archive = None, 0, {}, {}, {}
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
                self._begun.pop(incarnation, None)
                if value is not None:
                    self._begun[incarnation] = Begun.from_json(value)
            case "archive", (int(number),):
                archives = self._old_archive if old else self._archive
                archives[number] = Archive(value or b"", f"topic {self._topic!r}")
            case _:
                pass

    def _head(self) -> Head:
        own = self._scope.incarnation
        last = self._last.get(own)
        return Head(
            self._owner, self._epoch, None if last is None else last.batch, lambda: last, lambda: self._begun.get(own)
        )

    def _state(self) -> LedgerState:
        return state_of(self._scope, self._owner, self._epoch, self._last.values(), self._begun, self._archived)

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
                raise OutcomeUnknown(
                    "LEDGER_UNAVAILABLE",
                    f"The ledger in topic {self._topic!r} could not be opened for writing: {reason}.",
                    next_step="start again when the brokers respond; check that the user may write to the topic and "
                    "use transactional ids that start with `delivered.`",
                )

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
            raise InvariantBroken("LEDGER_UNREAD", "A ledger was claimed before it was read.")
        ends: dict[int, int] = {}
        if reader.trust.since is None:
            is_new = self._owner is None and not self._last and not self._begun
            both = () if is_new else (STATE_PARTITION, HISTORY_PARTITION)
            # Not the reader's position: an open transaction of others may hold it back.
            ends = {p: CommittedReader(self._wire, self._topic, p).end() for p in both}
        held = [producer.producer_id for producer in self._producers.values()]
        reader.trust = reader.trust.claimed(held, ends)
        return self._keys.key("owner"), owner.to_json(claims=epoch, **reader.trust.to_json()).encode()

    def _again(self) -> _Records:
        """The state anew: another producer wrote under its keys, and compaction would keep that."""
        records = [(self._keys.key("last", i), d.to_json().encode()) for i, d in self._last.items()]
        records += [(self._keys.key("begun", i), b.to_json().encode()) for i, b in self._begun.items()]
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
            begun = None if change.begun is None else change.begun.to_json().encode()
            return {STATE_PARTITION: [(self._keys.key("begun", incarnation), begun)]}
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
        if change.begun is not None:
            self._begun.pop(incarnation, None)
            self._begun[incarnation] = change.begun

    # -- names ---------------------------------------------------------------------------------------------------

    def _id(self, role: str) -> str:
        return f"{id_prefix(self._scope)}ledger.{role}"

    def _unreadable(self, error: Exception) -> OutcomeUnknown:
        return OutcomeUnknown(
            "LEDGER_UNREADABLE",
            f"The ledger in topic {self._topic!r} could not be read to its end: {error}.",
            next_step="start again when the brokers respond",
        )
