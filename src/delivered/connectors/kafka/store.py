"""The ledger's store in Kafka: owners and decisions in the pipeline's internal topic, a transaction for each.

Its records are those that its owners' producers wrote (decision 108).

Whoever may write to the topic can write any key and value there, but not under the producer id of a ledger's
transactional id: brokers check that a transactional batch comes from the holder of its id. An owner's record names the
producer ids of its claim and of those before it; the coordinator of the transactional ids tells the newest owner's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.errors import NoAnswer, NotSent
from delivered.clients.kafka.protocol import FATAL, NoTopic, Wire, is_leader, name_of, retried
from delivered.clients.kafka.sender import VERDICTS, Verdict
from delivered.clients.kafka.transactions import Transaction, describe, end, end_request, initialise
from delivered.connectors.kafka.committer import end_hanging, find_hanging, refused
from delivered.connectors.kafka.options import LEDGER_TOPICS, SinkOptions
from delivered.connectors.kafka.topics import (
    HIDDEN_S,
    HISTORY_PARTITION,
    MOVED,
    NOBODY,
    STATE_PARTITION,
    CommittedReader,
    Hidden,
    Key,
    Keys,
    Record,
    damaged,
    ensure_topic,
    id_prefix,
    is_moved,
    ledger_topic,
)
from delivered.ledger import Change, Head, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken, LedgerBehind, OutcomeUnknown
from delivered.model.identity import OTHERS_MAX, OtherLedger, Scope, named_first
from delivered.model.limits import (
    CONNECT_TIMEOUT_S,
    LEDGER_HISTORY_BATCHES,
    OUTAGE_PATIENCE_S,
    RECOVERY_WAIT_S,
    REQUEST_TIMEOUT_S,
)
from delivered.model.work import Archive, Archived, Begun, Decision, Failed, LedgerState, Ok, Outcome, Owner, Unknown

if TYPE_CHECKING:
    from delivered.connectors.kafka.seals import Chain, Seals

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


# One ledger transaction, request by request, so that each failure has a definite outcome.
#
# Not through librdkafka: it retries EndTxn by itself, so a rejected commit would be Unknown. With the read before it, a
#     decision takes 12 to 16 ms (p50) here and 21 ms there (docs/decisions/039).


class Again(Enum):
    """Whether a failed write may be retried after the transactional id has been initialised again."""

    NO = "no"
    FENCED = "a newer epoch of the id exists"
    AWAY = "no answer before EndTxn was sent: nothing was or will be committed"


def _added(response: Any) -> int:
    """The error code of an AddPartitionsToTxn response."""
    codes = [p.partition_error_code for t in response.results_by_topic_v3_and_below for p in t.results_by_partition]
    # After one partition's error the others report "operation not attempted".
    return next((c for c in codes if c not in (protocol.NONE, protocol.OPERATION_NOT_ATTEMPTED)), protocol.NONE)


Writes = Mapping[int, Sequence[tuple[bytes, bytes | None]]]
"""Partition -> records. A partition's records fit into one record batch."""

_FENCED = frozenset({protocol.INVALID_PRODUCER_EPOCH, protocol.PRODUCER_FENCED, protocol.INVALID_PRODUCER_ID_MAPPING})
_PASSING = frozenset(
    code
    for code, (_, verdict) in VERDICTS.items()
    if verdict in (Verdict.AGAIN, Verdict.MAYBE, Verdict.ELSEWHERE, Verdict.MISSING)
)
"""Of Produce. Also NOT_ENOUGH_REPLICAS, which is how brokers say that they cannot ask the coordinator just now."""
_AWAY = _PASSING | protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS}
_GZIP = 1
_GZIP_FROM_BYTES = 4096


class LedgerProducer:
    """A transactional id held by this process, under an epoch of its own.

    Attributes:
        ends: partition -> offset beyond the last acknowledged record.
    """

    def __init__(self, wire: Wire, topic: str, held: Transaction) -> None:
        self._wire = wire
        self._topic = topic
        self._held = held
        self._written: dict[int, int] = {}  # records per partition so far: the next sequence number
        self.ends: dict[int, int] = {}
        self._under_way: set[int] = set()  # partitions already written in the current transaction

    @property
    def producer_id(self) -> int:
        return self._held.producer_id

    def write(self, writes: Writes) -> tuple[Outcome[None], Again]:
        """Write records in one transaction.

        1 add the partitions       <- rejected here: nothing was or will be committed
        2 write the records
        3 EndTxn(commit), once     <- no answer here: the outcome is unknown

        Returns:
            The outcome; and for a failed one, whether it may be retried.
        """
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        self._under_way.clear()
        try:
            code = self.add(writes, deadline)
            if code == protocol.NONE:
                code = self.produce(writes)
                while code in _PASSING and time.monotonic() < deadline:
                    # For instance, the leader moved. The sequence number makes a retry idempotent.
                    time.sleep(0.02)
                    code = self.produce(writes)
        except NoAnswer as error:
            # Appended records are aborted without EndTxn, by the next InitProducerId or the time-out.
            return Failed(f"the records could not be written: {error}"), Again.AWAY
        if code != protocol.NONE:
            again = Again.FENCED if code in _FENCED else Again.AWAY if code in _AWAY else Again.NO
            return Failed(f"the records could not be written: {name_of(code)}"), again
        return self.commit()

    def add(self, writes: Writes, deadline: float) -> int:
        from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

        Topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic  # noqa: N806
        name = self._held.transactional_id

        def ask() -> Any:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=self._held.producer_id,
                v3_and_below_producer_epoch=self._held.epoch,
                v3_and_below_topics=[Topic(name=self._topic, partitions=list(writes))],
                max_version=3,
            )
            response = self._wire.ask_coordinator(name, request, again=True, code_of=_added)
            return SimpleNamespace(error_code=_added(response))

        # The id's last transaction may still be completing; adding partitions is idempotent.
        again = protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS, protocol.UNKNOWN_TOPIC_OR_PARTITION}
        return int(retried(ask, again, deadline, pause_s=0.002).error_code)

    def produce(self, writes: Writes) -> int:
        from kafka.protocol.producer.produce import ProduceRequest

        Topic = ProduceRequest.TopicProduceData  # noqa: N806
        by_leader: dict[int, list[int]] = {}
        failed = protocol.NONE
        for partition in writes.keys() - self._under_way:
            by_leader.setdefault(self._wire.leader(self._topic, partition), []).append(partition)
        for node, partitions in by_leader.items():
            data = [Topic.PartitionProduceData(index=p, records=self._batch(p, writes[p])) for p in partitions]
            request = ProduceRequest(
                transactional_id=self._held.transactional_id,
                acks=-1,
                timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                topic_data=[Topic(name=self._topic, partition_data=data)],
                max_version=9,
            )
            for part in (p for found in self._wire.ask(request, node).responses for p in found.partition_responses):
                if part.error_code != protocol.NONE:
                    self._wire.forget()
                    failed = int(part.error_code)
                    if failed in FATAL and not is_leader(self._wire, node, self._topic, part.index):
                        failed = protocol.NOT_LEADER
                    continue
                self._under_way.add(part.index)
                self.ends[part.index] = int(part.base_offset) + len(writes[part.index])
                self._written[part.index] = self._written.get(part.index, 0) + len(writes[part.index])
        return failed

    def commit(self) -> tuple[Outcome[None], Again]:
        request, name = end_request(self._held, commit=True), self._held.transactional_id
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            # A coordinator that is loading, or has moved, did nothing.
            answer = retried(
                lambda: self._wire.ask_coordinator(name, request, again=False), protocol.COORDINATOR_MOVED, deadline
            )
        except NotSent as error:
            return Failed(f"the commit was not sent: {error}"), Again.AWAY
        except NoAnswer as error:
            return Unknown(f"the commit was sent and not answered: {error}"), Again.NO
        if answer.error_code == protocol.NONE:
            return Ok(None), Again.NO
        reason = f"the commit was rejected: {name_of(answer.error_code)}"
        if answer.error_code in _FENCED | {protocol.INVALID_TXN_STATE}:
            # Rejected, and this was the only EndTxn: the transaction was or will be aborted.
            return Failed(reason), Again.FENCED if answer.error_code in _FENCED else Again.NO
        return Unknown(reason), Again.NO

    def _batch(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
        from kafka.record.default_records import DefaultRecordBatchBuilder

        size = sum(len(k) + len(v or b"") for k, v in records)
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=_GZIP if size > _GZIP_FROM_BYTES else 0,
            is_transactional=True,
            producer_id=self._held.producer_id,
            producer_epoch=self._held.epoch,
            base_sequence=self._written.get(partition, 0),
            batch_size=1 << 30,
        )
        now = time.time_ns() // 1_000_000
        for offset, (key, value) in enumerate(records):
            builder.append(offset, timestamp=now, key=key, value=value, headers=[])
        return bytes(builder.build())


# Ledgers of other pipelines and sinks, to name in an error whose they may be.


def other_ledgers(wire: Wire, own: str, scope: Scope) -> list[OtherLedger]:
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
        from delivered.connectors.kafka.seals import Seals  # batches do without it

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
        return OutcomeUnknown("LEDGER_UNREADABLE", topic=self._topic, error=error)
